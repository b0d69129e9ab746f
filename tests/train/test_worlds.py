"""The loss curve does not know how many processes, micro-batches or workers computed it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.parallel import store
from tests.compare import rows, telling

pytestmark = pytest.mark.slow

WORDS = (
    "batch_size=64",
    "log_every=1",
    "checkpoint_every=100",
    "backbone.depth=2",
    "backbone.drop_path=0.3",
    "ema_decay=0.9",
)
COLUMNS = ("loss", "mim", "vis", "grad_norm", "m_corr", "m_pred", "lr")


@pytest.fixture(scope="module")
def curves(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]], launch_world: Callable[..., Any]
) -> Callable[..., list[dict[str, float]]]:
    """``curves(world, *words)``: the log of a run over that many processes."""

    def run(world: int, *words: str) -> list[dict[str, float]]:
        folder = tmp_path_factory.mktemp("worlds") / "run"
        engine = "single" if world == 1 else "ddp"
        command = ["pretrain", *tiny(folder, *WORDS, f"engine={engine}", "engine.device=cpu", *words)]
        processes = launch_world(world, command)
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0] * world
        return rows(folder)

    return run


@pytest.fixture(scope="module")
def alone(curves: Callable[..., list[dict[str, float]]]) -> list[dict[str, float]]:
    return curves(1)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (1, ("engine.grad_accum_steps=4", "workers=2")),
        (2, ("workers=1",)),
        (2, ("engine.grad_accum_steps=2",)),
        pytest.param(4, (), marks=pytest.mark.long),
    ],
)
def test_the_curve_is_that_of_one_process(
    world: int,
    words: tuple[str, ...],
    curves: Callable[..., list[dict[str, float]]],
    alone: list[dict[str, float]],
) -> None:
    curve = curves(world, *words)
    assert len(curve) == len(alone) == 22
    for ours, reference in zip(curve, alone, strict=True):
        for column in COLUMNS:
            assert ours[column] == pytest.approx(reference[column], abs=1e-5, rel=1e-5), (ours["step"], column)


def test_drop_path_is_really_on(curves: Callable[..., list[dict[str, float]]], alone: list[dict[str, float]]) -> None:
    without = curves(1, "backbone.drop_path=0")
    assert abs(without[0]["loss"] - alone[0]["loss"]) > 1e-4


def test_two_processes_need_an_engine_for_them(
    tmp_path: Path, tiny: Callable[..., list[str]], launch: Callable[..., Any]
) -> None:
    process = launch(["pretrain", *tiny(tmp_path / "run")], WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    process.join(60)
    assert process.exitcode == 2
    assert not (tmp_path / "run").exists()


# The first call is the rehearsal, so the fourth is step 3.
POISON = """
import torch
from dmjd.builders.preparation import Preparation
call = Preparation.__call__
def poisoned(self, batch, epoch):
    prepared = call(self, batch, epoch)
    poisoned.steps = getattr(poisoned, "steps", 0) + 1
    if poisoned.steps == 4 and os.environ["RANK"] == "1":
        prepared.targets.fill_(float("nan"))
    return prepared
Preparation.__call__ = poisoned
"""


def test_a_bad_step_of_one_rank_stops_all_and_names_its_samples(
    tmp_path: Path, tiny: Callable[..., list[str]], launch_world: Callable[..., Any]
) -> None:
    at_once = ("guard.max_skips=0", "guard.max_rollbacks=0")
    words = ["pretrain", *tiny(tmp_path / "run", *WORDS, "checkpoint_every=2", "engine=ddp", *at_once)]
    processes = launch_world(2, words, telling(tmp_path / "said") + POISON)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [1, 1]
    said = (tmp_path / "said").read_text()
    assert said.count("step 3 gave a loss of nan") == said.count("error: ") == 1
    assert "on rank 1, samples " in said
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_refusal_is_said_once_and_ends_every_rank(
    tmp_path: Path, tiny: Callable[..., list[str]], launch_world: Callable[..., Any]
) -> None:
    (tmp_path / "run").write_text("in the way")
    words = ["pretrain", *tiny(tmp_path / "run", "engine=ddp", "batch_size=64")]
    processes = launch_world(2, words, telling(tmp_path / "said"))
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [2, 2]
    assert (tmp_path / "said").read_text().count("error: ") == 1


@pytest.mark.parametrize(("part", "images"), [("[:-3]", 39), ("[:1]", 1)])  # which is less than a batch
def test_ranks_that_see_other_images_are_told_apart(
    part: str, images: int, tmp_path: Path, recipe: Callable[..., list[str]], launch_world: Callable[..., Any]
) -> None:
    words = ["pretrain", *recipe(tmp_path / "run", "engine=ddp")]
    fewer = f"import dmjd.data.folder as folder; walk = folder._walk\nfolder._walk = lambda *at: list(walk(*at)){part}"
    processes = launch_world(2, words, telling(tmp_path / "said"), {1: fewer})
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [2, 2]
    (said,) = (line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("error: "))
    assert "has 48 images of fingerprint" in said
    assert f"and {images} images of fingerprint" in said
    assert "for rank 1 (" in said
    assert not (tmp_path / "run").exists()


CUT = """
import dmjd.train.loop as loop
save = loop.Trainer.save_checkpoint
def fault(self):
    save(self)
    self.saver.wait()
    os._exit(9)
loop.Trainer.save_checkpoint = fault
"""


@pytest.mark.long
def test_three_processes_go_on_in_the_same_bits(
    tmp_path: Path, tiny: Callable[..., list[str]], launch_world: Callable[..., Any]
) -> None:
    # With two addends the order of a sum does not matter; with three it does.
    def run(name: str, prelude: str = "") -> list[int]:
        words = ["pretrain", *tiny(tmp_path / name, *WORDS, "batch_size=66", "checkpoint_every=8", "engine=ddp")]
        processes = launch_world(3, words, prelude)
        for process in processes:
            process.join(120)
        return [process.exitcode for process in processes]

    assert run("straight") == [0, 0, 0]
    assert run("cut", CUT) == [9, 9, 9]
    assert run("cut") == [0, 0, 0]
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert (straight / "log.jsonl").read_bytes() == (cut / "log.jsonl").read_bytes()
    states = [store.read(path / "checkpoints/step-00000021") for path in (straight, cut)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
