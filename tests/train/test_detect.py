"""Detection on the training loop: files of a run, stops and resuming, several processes, the encoder of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.compose import compose
from dmjd.parallel import store
from dmjd.runs.checkpoint import newest
from dmjd.train import loop
from tests.compare import reason, rows, stopped_and_resumed

pytest.importorskip("torchvision", reason="the extra dmjd[dense] is not installed")
pytest.importorskip("faster_coco_eval", reason="the extra dmjd[dense] is not installed")

Launch = Callable[..., Any]
Same = Callable[..., None]
Words = Callable[..., list[str]]

STEPS = 4
TINY = (
    *("init=null", "backbone.embed_dim=32", "backbone.depth=2", "backbone.num_heads=2", "data.image_size=64"),
    *("attention.window=2", "attention.global_blocks=[1]", "attention.relative_positions=decomposed"),
    *("head.channels=16", "head.box_convs=1", "head.box_width=16", "head.mask_convs=1", "head.samples=16"),
    *("head.proposals=16", "head.proposals_before=16", "head.detections=10", "epochs=2", "batch_size=4", "workers=0"),
    *("engine.device=cpu", "log_every=1", "checkpoint_every=3", "keep_checkpoints=9", "optim.base_lr=.3"),
    *("optim.eps=1e-2", "optim.warmup_epochs=1"),
)


@pytest.fixture(scope="session")
def words(scenes: Path) -> Words:
    return lambda run, *more: [*TINY, f"data.root={scenes}", f"run={run}", *more]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, words: Words) -> Path:
    """Two epochs of two steps, from their start to their end. Only to be read."""
    return loop.detect(compose("detect", words(tmp_path_factory.mktemp("detect") / "run"))).path


def test_losses_scores_classes_and_the_record_are_written(undisturbed: Path) -> None:
    log = rows(undisturbed)
    losses, scores = ([row for row in log if name in row] for name in ("loss", "val_box_ap"))
    assert [row["step"] for row in losses] == [1, 2, 3, 4]
    assert [row["step"] for row in scores] == [2, 4]
    for row in losses:
        parts = ("rpn_class", "rpn_box", "class", "box", "mask")
        assert sum(row[name] for name in parts) == pytest.approx(row["loss"], rel=1e-5)
    end = newest(undisturbed / "checkpoints")
    assert end is not None
    classes = json.loads((end / "classes.json").read_text())
    names = {each["id"]: each["name"] for each in _categories(undisturbed)}
    assert classes == [names[key] for key in sorted(names)]
    (record,) = (json.loads(path.read_text()) for path in (undisturbed / "evaluations").glob("detect-*.json"))
    assert (record["verb"], record["step"], record["box_ap"]) == ("detect", STEPS, scores[-1]["val_box_ap"])
    assert "box_apl" in record, "scores of sizes that do not occur are null"
    assert (undisturbed / "pictures" / "predictions.png").is_file()
    assert f"dmjd ap {undisturbed}" in reason(undisturbed)["next"]


def _categories(run: Path) -> list[dict[str, Any]]:
    root = Path(compose("detect", ["init=null"]).data.root or _root(run))
    found: list[dict[str, Any]] = json.loads((root / "annotations/instances_train2017.json").read_text())["categories"]
    return found


def _root(run: Path) -> str:
    import yaml

    root: str = yaml.safe_load((run / "config.yaml").read_text())["data"]["root"]
    return root


@pytest.mark.parametrize(
    ("where", "calls", "step"), [("step", 3, 3), pytest.param("validation", 1, 2, marks=pytest.mark.long)]
)
def test_a_stopped_run_ends_as_one_that_was_left_alone(
    where: str,
    calls: int,
    step: int,
    tmp_path: Path,
    words: Words,
    undisturbed: Path,
    launch: Launch,
    assert_same_run: Same,
) -> None:
    """SIGTERM in step 3; and in the first validation, of two batches, with which the next launch begins."""
    places = {"step": "dmjd.parallel.single:SingleEngine.step", "validation": "dmjd.builders.detect:DetectStep.detect"}
    run = tmp_path / "run"
    stopped = stopped_and_resumed(launch, ["detect", *words(run)], run, places[where], calls)
    assert step <= stopped, "a loaded machine may see the signal a step later"
    assert_same_run(undisturbed, run, "guard", "best")


@pytest.mark.parametrize(
    "engine", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "hsdp", "zero1", "zero3"))]
)
def test_two_processes_train_and_validate_as_one(
    engine: str, tmp_path: Path, words: Words, undisturbed: Path, launch_world: Launch
) -> None:
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra dmjd[scale] is not installed")
    run = tmp_path / "run"
    ranks = launch_world(2, ["detect", *words(run, f"engine={engine}", "engine.grad_accum_steps=2")])
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    for one, two in zip(rows(undisturbed), rows(run), strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)
    before, after, sharded = (
        store.read_model(folder / "checkpoints" / f"step-{step:08d}")
        for folder, step in ((undisturbed, 2), (undisturbed, STEPS), (run, STEPS))
    )
    for name, value in after.items():
        torch.testing.assert_close(sharded[name], value, rtol=0, atol=1e-4)
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3, "the runs did move"


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["none", "block"])
def test_a_run_on_a_gpu_has_the_losses_of_the_cpu(
    compiled: str, words: Words, undisturbed: Path, tmp_path: Path
) -> None:
    options = ("engine.device=cuda", "engine.precision=fp32", f"engine.compile={compiled}", "epochs=1")
    run = loop.detect(compose("detect", words(tmp_path / "run", *options))).path
    for one, two in zip(rows(undisturbed), rows(run), strict=False):
        if "loss" in two:
            assert two["loss"] == pytest.approx(one["loss"], rel=2e-2)
    assert any("val_box_ap" in row for row in rows(run))
