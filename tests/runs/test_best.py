"""The best checkpoint is kept beside the newest ones, and is always one that a resumed or rolled back run also has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmjd.errors import CheckpointError, StorageError
from dmjd.runs import checkpoint
from dmjd.runs.best import Best, Validated, best_steps, read_best, write_best
from dmjd.runs.checkpoint import begin, commit, committed, drop_after, step_of


def save(run: Path, step: int, best: Best, keep: int = 1, keep_every: int | None = None) -> None:
    draft = begin(run / "checkpoints", step)

    def write() -> list[Path]:
        (draft / "weights").write_text(str(step))
        return [draft / "weights"]

    commit(draft, write, keep, keep_every, best=best.history)


def steps(run: Path) -> list[int]:
    return [step_of(path) for path in committed(run / "checkpoints")]


def test_the_best_is_kept_beside_the_newest_and_ties_keep_the_earlier(tmp_path: Path) -> None:
    best = Best()
    for step, score in ((1, 50.0), (2, 70.0), (3, 60.0), (4, 70.0), (5, 10.0)):
        best.add(step, score)
        save(tmp_path, step, best)
    assert best.step == 2
    assert steps(tmp_path) == [2, 5]
    assert read_best(tmp_path) == Validated(2, 70.0)
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 2, "score": 70.0}


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("scores", [(1, 2, 3, 2), (3, 1, 2, 1), (2, 2, 1, 3), (1, 3, 3, 3)])
def test_whichever_kept_checkpoint_a_run_returns_to_the_best_until_then_is_there(
    tmp_path: Path, scores: tuple[int, ...], keep: int
) -> None:
    """The oracle: the first greatest score among those of the steps up to it."""
    best = Best()
    for step, score in enumerate(scores, 1):
        best.add(step, score)
        save(tmp_path, step, best, keep)
        for back in range(max(1, step - keep + 1), step + 1):
            expected = max(range(1, back + 1), key=lambda number: (scores[number - 1], -number))
            assert best_steps(best.history, [back]) == {expected}
            assert expected in steps(tmp_path)
    assert len(steps(tmp_path)) <= 2 * keep


def test_a_rolled_back_best_is_forgotten(tmp_path: Path) -> None:
    best, states = Best(), {}
    for step, score in ((1, 50.0), (2, 40.0), (3, 90.0)):
        best.add(step, score)
        states[step] = best.state_dict()
        save(tmp_path, step, best, keep=2)
    assert (read_best(tmp_path).step, steps(tmp_path)) == (3, [1, 2, 3])
    best.load_state_dict(states[2])
    drop_after(tmp_path / "checkpoints", 2)
    write_best(tmp_path, best.history)
    assert (read_best(tmp_path), steps(tmp_path)) == (Validated(1, 50.0), [1, 2])
    best.add(3, 45.0)
    save(tmp_path, 3, best, keep=1)
    assert (read_best(tmp_path).step, steps(tmp_path)) == (1, [1, 3])


def test_a_run_that_dies_before_the_commit_keeps_the_best_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = Best()
    best.add(1, 50.0)
    save(tmp_path, 1, best)
    best.add(2, 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *names: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(StorageError):
            save(tmp_path, 2, best)
    assert (read_best(tmp_path).step, steps(tmp_path)) == (1, [1])


def test_a_run_without_validations_has_no_best(tmp_path: Path) -> None:
    save(tmp_path, 1, Best())
    save(tmp_path, 2, Best())
    assert steps(tmp_path) == [2]
    with pytest.raises(CheckpointError, match=r"has no best checkpoint: best\.json is written by"):
        read_best(tmp_path)
    write_best(tmp_path, [Validated(2, 1.0)])
    write_best(tmp_path, [])
    assert not (tmp_path / "best.json").exists()
    for text in ("", "[]", '{"step": "../x", "score": 1}', '{"step": -1, "score": 1}', '{"step": 1}'):
        (tmp_path / "best.json").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_best(tmp_path)


def test_a_multiple_of_keep_every_stays_too(tmp_path: Path) -> None:
    best = Best()
    for step in range(1, 8):
        best.add(step, 100.0 * (step == 2))
        save(tmp_path, step, best, keep_every=3)
    assert steps(tmp_path) == [2, 3, 6, 7]
    assert checkpoint.newest(tmp_path / "checkpoints", until=6) is not None
