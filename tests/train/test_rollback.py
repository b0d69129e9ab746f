"""Runs that meet bad steps: skipped, rolled back, stopped. The oracle is a run that never met them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmjd.train.loop as loop
from dmjd.builders.preparation import Preparation, Prepared
from dmjd.cli import main
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches
from dmjd.errors import Diverged
from dmjd.parallel import native_files, store
from dmjd.progress import Progress
from dmjd.runs.checkpoint import read_loop_state
from dmjd.train.state import Position
from tests.compare import configure, pretrain, reason, rows

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Words = Callable[..., list[str]]
Spoil = Callable[[Tensor], Tensor]
Same = Callable[[Path, Path], None]
Oracle = Callable[..., Path]

STEPS_PER_EPOCH, STEPS = 6, 24


@pytest.fixture(scope="module")
def recipe(tiny: Words, image_folder: Path) -> Words:
    """``recipe(run, *more)``: four epochs of six steps, whose guard rolls back at the second bad step in ten."""

    def make(run: Path, *more: str) -> list[str]:
        folder = ("data=folder", f"data.root={image_folder}", "data.image_size=[16,16]", "epochs=4", "batch_size=8")
        every = ("log_every=5", "checkpoint_every=8", "keep_checkpoints=9", "ema_decay=0.9", "backbone.drop_path=0.2")
        limits = ("guard.max_skips=1", "guard.window=10", "guard.margin=1")
        return tiny(run, *folder, *every, *limits, *more)

    return make


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, recipe: Words) -> Oracle:
    """``oracle(*windows)``: a run of sound data that passes over ``windows`` from its start. Only to be read."""

    @cache
    def run(*windows: tuple[int, int]) -> Path:
        def init(self: Position) -> None:
            self.step, self.passed_over = 0, windows

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Position, "__init__", init)
            patch.setattr(loop, "write_pictures", lambda *arguments: None)
            return pretrain(recipe(tmp_path_factory.mktemp("oracle") / "run"))

    return run


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than a tiny run."""
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: None)


def nan(targets: Tensor) -> Tensor:
    return torch.full_like(targets, float("nan"))


def high(targets: Tensor) -> Tensor:
    return targets + 30


def spoiled(patch: pytest.MonkeyPatch, words: list[str], bad: Iterable[int], spoil: Spoil = nan) -> None:
    """From here on the last target of every batch whose number is in ``bad`` is spoiled, whenever it is read."""
    config = configure(words)
    batches = training_batches(config.data, build_dataset(config.data, "train"), config.batch_size, config.seed)
    marks = {(number // STEPS_PER_EPOCH, *batches[number].sample_ids.tolist()) for number in bad}
    prepare = Preparation.__call__

    def call(self: Preparation, batch: Batch, epoch: int) -> Prepared:
        prepared = prepare(self, batch, epoch)
        if (epoch, *batch.sample_ids.tolist()) in marks:
            prepared.targets[-1] = spoil(prepared.targets[-1])
        return prepared

    patch.setattr(Preparation, "__call__", call)


def at(run: Path, step: int = STEPS) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


# Skipping


def test_a_bad_step_is_skipped_counted_and_named(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    command = words("run", "epochs=2", "checkpoint_every=1", "keep_checkpoints=99", "log_every=4")
    fine = pretrain(words("fine", "epochs=2", "log_every=1", "checkpoint_every=99"))
    spoiled(monkeypatch, command, {6})
    run = pretrain(command)
    before, bad, after = (
        store.read(at(run, step), native_files.PARAMETER, *native_files.MOMENTS) for step in (6, 7, 8)
    )
    assert all(torch.equal(value, bad[name]) for name, value in before.items()), "step 7 moved nothing"
    assert not any(torch.equal(value, after[name]) for name, value in before.items() if value.ndim > 1)
    second = rows(run)[1]
    assert (second["step"], second["skipped"]) == (8, 1)
    assert all("skipped" not in row for row in rows(run) if row is not second and row["step"] != 8)
    # Steps 5 and 6 are those of the sound run, so of three steps that are in the mean two are known.
    known = sum(row["loss"] for row in rows(fine)[4:6])
    assert 0 < 3 * second["loss"] - known < known
    (line,) = rows(run, "guard")
    assert (line["event"], line["step"], line["batch"], line["loss"]) == ("skipped", 7, 6, "nan")
    assert len(line["ranks"][0]["samples"]) == 8
    assert reason(run)["reason"] == "finished"


def test_a_window_of_skipped_steps_alone_has_a_row_without_means(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    command = words("run", "log_every=1")
    spoiled(monkeypatch, command, {6})
    row = rows(pretrain(command))[6]
    assert row.keys() == {"step", "epoch", "skipped", "lr"}


# Rolling back


@pytest.mark.parametrize("every", [3, 8])
def test_a_rolled_back_run_is_one_that_never_read_the_bad_batches(
    words: Words, assert_same_run: Same, oracle: Oracle, every: int
) -> None:
    # The second bad step is step 11, the first step 10; a margin of one step lets step 9 go as well.
    expected = oracle((8, 11))
    command = words("run", f"checkpoint_every={every}")
    with pytest.MonkeyPatch.context() as patch:
        spoiled(patch, command, {9, 10})
        run = pretrain(command)
    assert_same_run(run, expected)
    skips, back = rows(run, "guard")[:2], rows(run, "guard")[2]
    assert [(line["event"], line["step"], line["batch"]) for line in skips] == [("skipped", 10, 9), ("skipped", 11, 10)]
    assert (back["event"], back["steps"], back["passed_over"]) == ("rollback", [10, 11], [8, 11])
    assert back["to"] == 8 // every * every
    assert read_loop_state(at(run))["guard"]["rollbacks"] == 1
    assert read_loop_state(at(run))["position"] == {"step": STEPS, "passed_over": ((8, 11),)}


def test_two_bursts_before_the_next_checkpoint_are_both_passed_over(
    words: Words, assert_same_run: Same, oracle: Oracle
) -> None:
    expected = oracle((8, 11), (12, 15))
    command = words("run", "checkpoint_every=8")
    with pytest.MonkeyPatch.context() as patch:
        spoiled(patch, command, {9, 10, 13, 14})
        run = pretrain(command)
    assert [line["event"] for line in rows(run, "guard")] == ["skipped", "skipped", "rollback"] * 2
    assert_same_run(run, expected)


class Stopped(Exception):
    """Stands for any end of a process."""


def test_a_rolled_back_run_may_be_killed_at_any_moment(words: Words, assert_same_run: Same, oracle: Oracle) -> None:
    expected = oracle((8, 11))
    # Counted in steps that a launch takes in: at the first bad step; at the first step after the rollback; at the
    # second bad step, met again; and after the first checkpoint that knows of the rollback, which is that of step 12.
    kills = 10, 3, 2, 8
    command = words("run", "checkpoint_every=4")
    advance = Progress.advance
    for kill in kills:
        left = iter(range(kill - 1))

        def stopping(self: Progress, units: int = 1, left: Iterator[int] = left, **values: str) -> None:
            if next(left, None) is None:
                raise Stopped
            advance(self, units, **values)

        with pytest.MonkeyPatch.context() as patch:
            spoiled(patch, command, {9, 10})
            patch.setattr(Progress, "advance", stopping)
            with pytest.raises(Stopped):
                pretrain(command)
    with pytest.MonkeyPatch.context() as patch:
        spoiled(patch, command, {9, 10})
        run = pretrain(command)
    assert_same_run(run, expected)
    assert read_loop_state(at(run))["guard"]["rollbacks"] == 1


def test_a_spike_is_rolled_back_although_its_steps_were_taken(
    words: Words, assert_same_run: Same, oracle: Oracle
) -> None:
    expected = oracle((14, 18))
    command = words("run", "guard.spike=20", "guard.spike_steps=3", "workers=1")
    with pytest.MonkeyPatch.context() as patch:
        spoiled(patch, command, {15, 16, 17}, high)
        run = pretrain(command)
    assert [line["event"] for line in rows(run, "guard")] == ["high", "high", "high", "rollback"]
    assert_same_run(run, expected)


def test_a_checkpoint_from_before_the_first_bad_step_stays_while_steps_are_in_doubt(
    words: Words, assert_same_run: Same, oracle: Oracle
) -> None:
    # Step 7 is bad, a checkpoint follows at 8, and step 10 is bad too: the only one kept would be the wrong one.
    expected = oracle((5, 10))
    command = words("run", "keep_checkpoints=1", "checkpoint_every=4")
    with pytest.MonkeyPatch.context() as patch:
        spoiled(patch, command, {6, 9})
        run = pretrain(command)
    assert rows(run, "guard")[-1]["to"] == 4
    assert_same_run(run, expected)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000024"]


def test_callbacks_run_again_after_a_rollback_and_restore_the_rows_left(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scores:
        def __init__(self) -> None:
            self.calls: list[int] = []
            self.restored: list[list[int]] = []

        def on_epoch_end(self, encoder: nn.Module, step: int, epoch: float) -> dict[str, float]:
            self.calls.append(step)
            return {"score": float(step)}

        def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
            self.restored.append([row["step"] for row in rows if "score" in row])

    command = words("run", "checkpoint_every=8")
    spoiled(monkeypatch, command, {11, 13})
    scores = Scores()
    run = loop.pretrain(configure(command), [scores]).path
    assert scores.calls == [6, 12, 12, 18, 24]
    assert scores.restored == [[], [6]]
    assert [row["step"] for row in rows(run) if "score" in row] == [6, 12, 18, 24]


# Stopping


def test_a_run_that_does_not_recover_stops_with_a_report(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    command = words("run")
    run = Path(configure(command).run)
    with pytest.MonkeyPatch.context() as patch:
        spoiled(patch, command, range(9, 99))
        capsys.readouterr()
        assert main(["pretrain", *command]) == 1
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    for part in ("loss of nan", "samples ", "after 2 rollback(s)", "guard.jsonl"):
        assert part in sentence
    events = [line["event"] for line in rows(run, "guard")]
    assert events == ["skipped", "skipped", "rollback"] * 2 + ["skipped", "skipped", "stop"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000008"]
    assert reason(run)["reason"] == "diverged"
    assert reason(run)["detail"] in sentence


def test_a_run_without_a_checkpoint_to_go_back_to_stops(words: Words) -> None:
    command = words("run")
    with pytest.MonkeyPatch.context() as patch:
        spoiled(patch, command, {1, 2})
        with pytest.raises(Diverged, match="no checkpoint from before"):
            pretrain(command)
    assert reason(Path(configure(command).run))["reason"] == "diverged"
