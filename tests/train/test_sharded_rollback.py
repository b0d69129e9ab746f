"""Runs over two processes that share parameters or moments, one of which meets bad data. The oracle is a run that never
did; what a rollback does in all detail is in test_rollback.py."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.conftest import free_port

BAD = (9, 10)
WORDS = (
    *("batch_size=64", "log_every=5", "checkpoint_every=8", "ema_decay=0.9", "backbone.drop_path=0.2"),
    *("guard.max_skips=1", "guard.window=10", "guard.margin=1", "engine.grad_accum_steps=2"),
)


class Life(NamedTuple):
    """One run of a process. windows: batches that it passes over from its start. bad: those whose targets are NaN."""

    port: str
    words: list[str]
    windows: tuple[tuple[int, int], ...] = ()
    bad: tuple[int, ...] = ()


def live(rank: int, lives: list[Life]) -> None:
    """What one of two processes does: run after run, in which the second rank's data may be bad."""
    import dmjd.train.loop as loop
    from dmjd.builders.step import Step
    from dmjd.compose import compose
    from dmjd.train.state import Position

    torch.set_num_threads(1)
    forward_backward = Step.forward_backward
    for one in lives:
        positions: list[Position] = []

        def init(self: Any, one: Life = one, positions: list[Position] = positions) -> None:
            self.step, self.passed_over = 0, one.windows
            positions.append(self)

        def spoiled(
            self: Any, *arguments: Any, one: Life = one, positions: list[Position] = positions, **options: Any
        ) -> Any:
            (position,) = positions
            if rank == 1 and position.batch(position.step) in one.bad:
                prepare = self.prepare

                def spoil(*arguments: Any) -> Any:
                    prepared = prepare(*arguments)
                    prepared.targets[-1] = float("nan")
                    return prepared

                self = replace(self, prepare=spoil)
            return forward_backward(self, *arguments, **options)

        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=one.port, GLOO_SOCKET_IFNAME="lo",
            WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "write_pictures", lambda *arguments: {})
            patch.setattr(Position, "__init__", init)
            patch.setattr(Step, "forward_backward", spoiled)
            loop.pretrain(compose("pretrain", one.words))


def launch(folder: Path, engine: str, tiny: Callable[..., list[str]]) -> None:
    """Runs ``sound`` and ``spoiled`` in ``folder``, of one launch."""
    lives = []
    for name, windows, bad in (("sound", ((8, 11),), ()), ("spoiled", (), BAD)):
        words = tiny(folder / name, *WORDS, f"engine={engine}")
        lives.append(Life(free_port(), words, windows, bad))
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=live, args=(rank, lives)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("zero2", marks=pytest.mark.long)])
def test_bad_steps_of_one_rank_turn_all_back(
    engine: str, tmp_path: Path, tiny: Callable[..., list[str]], assert_same_run: Callable[[Path, Path], None]
) -> None:
    launch(tmp_path, engine, tiny)
    spoiled = tmp_path / "spoiled"
    first, second, back = (json.loads(line) for line in (spoiled / "guard.jsonl").read_text().splitlines())
    assert [(row["event"], row["step"], row["batch"]) for row in (first, second)] == [
        ("skipped", 10, 9),
        ("skipped", 11, 10),
    ]
    assert [[one["rank"] for one in row["ranks"]] for row in (first, second)] == [[1], [1]]
    assert (back["event"], back["to"], back["passed_over"]) == ("rollback", 8, [8, 11])
    assert_same_run(spoiled, tmp_path / "sound")
