"""Segmentation on the training loop: running statistics in checkpoints, stops and resuming, several processes, bad
input, and the encoder of a run in other commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from dmjd.builders.plan import Plan
from dmjd.compose import compose
from dmjd.evaluate import evaluate
from dmjd.parallel import store
from dmjd.runs.checkpoint import newest, read_buffers
from dmjd.train import loop
from tests.compare import reason, rows, same, stopped_and_resumed

pytest.importorskip("transformers", reason="the extra dmjd[dense] is not installed")

from dmjd.builders.segment import SegmentStep

Launch = Callable[..., Any]
Same = Callable[..., None]
Words = Callable[..., list[str]]
Command = Callable[..., tuple[int, str, str]]

STEPS = 6
TINY = (
    *("init=null", "backbone.embed_dim=32", "backbone.depth=4", "backbone.num_heads=2", "data.image_size=64"),
    *("data.resize=[64,128]", "head.channels=16", "head.auxiliary_channels=16", "test.stride=48", "epochs=2"),
    *("batch_size=4", "workers=0", "engine.device=cpu", "log_every=1", "checkpoint_every=4", "keep_checkpoints=9"),
    *("optim.base_lr=.3", "optim.eps=1e-2", "optim.warmup_epochs=1", "ema_decay=0.5"),
)


@pytest.fixture(scope="session")
def words(scenes: Path) -> Words:
    return lambda run, *more: [*TINY, f"data.root={scenes}", f"run={run}", *more]


def segment(arguments: list[str]) -> Path:
    """Run it in this process; the run folder."""
    return loop.segment(compose("segment", arguments)).path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, words: Words) -> Path:
    """Two epochs of three steps, from their start to their end. Only to be read."""
    return segment(words(tmp_path_factory.mktemp("segment") / "run"))


def end_of(run: Path) -> Path:
    end = newest(run / "checkpoints")
    assert end is not None
    return end


def test_losses_scores_classes_and_the_record_are_written(undisturbed: Path) -> None:
    log = rows(undisturbed)
    losses, scores = ([row for row in log if name in row] for name in ("loss", "val_miou"))
    assert [row["step"] for row in losses] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in scores] == [3, 6]
    for row in losses:
        assert row["decode"] + 0.4 * row["auxiliary"] == pytest.approx(row["loss"], rel=1e-5)
    assert len(json.loads((end_of(undisturbed) / "classes.json").read_text())) == 11
    (record,) = (json.loads(path.read_text()) for path in (undisturbed / "evaluations").glob("segment-*.json"))
    assert (record["verb"], record["step"], record["weights"]) == ("segment", STEPS, "ema")
    assert (record["miou"], record["trained_miou"]) == (scores[-1]["val_ema_miou"], scores[-1]["val_miou"])
    best = json.loads((undisturbed / "best.json").read_text())
    assert best["score"] == max(row["val_ema_miou"] for row in scores)
    assert f"dmjd miou {undisturbed}" in reason(undisturbed)["next"]


def test_an_evaluation_has_the_running_statistics_of_the_validation(undisturbed: Path) -> None:
    """Of the trained weights, and of their average, whose statistics are averaged too."""
    last = [row for row in rows(undisturbed) if "val_miou" in row][-1]
    for weights, column in (("trained", "val_miou"), ("ema", "val_ema_miou")):
        config = compose("miou", [f"checkpoint={undisturbed}", f"weights={weights}", "device=cpu"])
        assert evaluate("miou", config)["miou"] == pytest.approx(last[column], abs=1e-9)
    trained, average = (read_buffers(end_of(undisturbed), average=average) for average in (False, True))
    assert trained.keys() == average.keys()
    changed = [name for name in trained if not same(trained[name], average[name])]
    assert any(name.endswith("running_mean") for name in changed)


@pytest.mark.parametrize(
    ("where", "calls", "step"), [("step", 4, 4), pytest.param("validation", 1, 3, marks=pytest.mark.long)]
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
    places = {
        "step": "dmjd.parallel.single:SingleEngine.step",
        "validation": "dmjd.builders.segment:SegmentStep.logits",
    }
    run = tmp_path / "run"
    stopped = stopped_and_resumed(launch, ["segment", *words(run)], run, places[where], calls)
    assert step <= stopped, "a loaded machine may see the signal a step later"
    assert_same_run(undisturbed, run, "guard", "best", "buffers")


def test_a_skipped_step_leaves_no_trace_in_running_statistics(
    tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics of a batch that is not finite would be part of every later validation."""
    forward, steps = SegmentStep.forward_backward, list[dict[str, Tensor]]()

    def poison(self: SegmentStep, batch: Any, epoch: int, *, skip: bool = False) -> Mapping[str, Tensor]:
        steps.append({name: buffer.clone() for name, buffer in self.engine.objective.named_buffers()})
        return forward(self, batch, epoch, skip=skip or len(steps) == 2)

    monkeypatch.setattr(SegmentStep, "forward_backward", poison)
    segment(words(tmp_path / "run", "epochs=1", "ema_decay=null"))
    before, after = steps[1:3]
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not all(torch.equal(before[name], value) for name, value in steps[0].items()), "step 1 was applied"


@pytest.mark.long  # tests/parallel compares the steps of every engine
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "hsdp", "zero1", "zero3"])
def test_two_processes_train_and_validate_as_one(
    engine: str, tmp_path: Path, words: Words, undisturbed: Path, launch_world: Launch
) -> None:
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra dmjd[scale] is not installed")
    run = tmp_path / "run"
    ranks = launch_world(2, ["segment", *words(run, f"engine={engine}")])
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    for one, two in zip(rows(undisturbed), rows(run), strict=True):
        assert {name: one[name] for name in one if "loss" in name} == pytest.approx(
            {name: two[name] for name in two if "loss" in name}, rel=1e-4
        )
    before, after, sharded = (
        store.read_model(folder / "checkpoints" / f"step-{step:08d}")
        for folder, step in ((undisturbed, 4), (undisturbed, STEPS), (run, STEPS))
    )
    for name, value in after.items():
        torch.testing.assert_close(sharded[name], value, rtol=0, atol=1e-4)
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3, "the runs did move"
    for name, value in read_buffers(end_of(undisturbed)).items():
        torch.testing.assert_close(read_buffers(end_of(run))[name], value, rtol=1e-3, atol=1e-4)


BAD: dict[str, tuple[list[str], str]] = {
    "size": (
        ["data.image_size=60"],
        "not divisible by backbone.patch_size=16; the nearest size is data.image_size=64",
    ),
    "batch": (["batch_size=16"], r"batch_size=16 exceeds the 12 training images of data.root="),
    "micro-batches": (["engine.grad_accum_steps=3"], "batch_size=4 is not divisible by engine.grad_accum_steps=3"),
    "classes": (["head.num_classes=5"], "head.num_classes=5 is less than the 11 classes of the data"),
    "no folder": (["data.root=missing"], "data.root=missing is not a folder"),
    "no validation": (["data.root={bare}"], "validation"),
    "no labels": (["data.root={bare}"], "bare/annotations/validation has a class: all are 0 or 255"),
    "pooling": (["head.pool_scales=[0]"], "head.pool_scales"),
    "window": (["attention.window=5"], "window=5 exceeds the 4x4 tokens of an image"),
    "preset": (["preset=mae_vit_base"], "preset=mae_vit_base"),
    "data set": (["data=digits"], "data"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_a_folder_is_written(
    case: str, tmp_path: Path, words: Words, scenes: Path, dmjd: Command
) -> None:
    more, part = BAD[case]
    if case == "no validation":
        shutil.copytree(scenes, tmp_path / "bare", ignore=shutil.ignore_patterns("validation"))
    if case == "no labels":
        shutil.copytree(scenes, tmp_path / "bare")
        for mask in (tmp_path / "bare" / "annotations" / "validation").iterdir():
            with Image.open(mask) as image:
                Image.new("L", image.size, 255).save(mask)
    more = [each.format(bare=tmp_path / "bare") for each in more]
    keys = {each.partition("=")[0] for each in more}
    kept = [each for each in words(tmp_path / "run") if each.partition("=")[0] not in keys]
    code, _, err = dmjd("segment", *kept, *more)
    (line,) = [text for text in err.splitlines() if text.startswith("error")]
    assert code == 2
    assert part in line
    assert not (tmp_path / "run").exists()


def test_the_encoder_of_a_run_is_used_by_other_commands(
    undisturbed: Path, scenes: Path, image_folder: Path, tmp_path: Path, dmjd: Command
) -> None:
    code, out, err = dmjd("embed", str(undisturbed), f"output={tmp_path}/all.npz", "device=cpu")
    assert code == 0, err
    assert "18 images of ade20k" in out
    assert "has no final norm: its features get one of weight 1 and bias 0" in err
    arguments = (f"data.root={image_folder}", "data=folder", "data.image_size=32", "data.check=none", "epochs=1")
    tiny = ("batch_size=8", "workers=0", "engine.device=cpu", f"run={tmp_path}/tuned")
    code, _, err = dmjd("finetune", str(undisturbed), *arguments, *tiny)
    assert code == 0, err
    assert "beginning from" in err
    folder = ("data=folder", f"data.root={image_folder}", "data.image_size=32", "data.check=none", "device=cpu")
    code, out, err = dmjd("knn", str(undisturbed), *folder)
    assert code == 0, err
    assert "knn: k-nearest-neighbour top-1" in out
    code, _, err = dmjd("finetune", str(undisturbed), "recipe=none", f"run={tmp_path}/nothing")
    assert (code, err) == (2, "error: data.name=folder needs data.root, the folder of images\n")
    code, out, err = dmjd("detect", str(undisturbed), f"data.root={scenes}", "--cfg")
    assert code == 0, err
    assert "embed_dim: 32" in out


def test_a_plan_is_of_the_model_that_the_run_builds(words: Words, tmp_path: Path, undisturbed: Path) -> None:
    plan = Plan(compose("plan_segment", [*words(tmp_path / "run"), "images=20", "gpu=h200"]))
    trained = store.read_model(end_of(undisturbed))
    assert (plan.classes, plan.images, plan.images_per_gpu) == (150, 20, 4), "no number of classes is read with images="
    of_class = 32 + 2  # weights and biases of both classifiers
    assert plan.parameters - (150 - 11) * of_class == sum(value.numel() for value in trained.values())
    published = Plan(compose("plan_segment", [word for word in TINY if not word.startswith("init")]))
    assert (published.images, published.images_from) == (20_210, "ADE20K, as data.root is not set")


@pytest.mark.long
def test_a_plan_traces_micro_batches_of_1_2_and_4_images(words: Words, tmp_path: Path) -> None:
    plan = Plan(compose("plan_segment", [*words(tmp_path / "run"), "images=20", "gpu=h200"]))
    saved = [plan.activations("none").saved(images) for images in (1, 2, 3, 4)]
    assert saved == sorted(saved)
    assert saved[2] - saved[1] == pytest.approx(saved[3] - saved[2]), "linear between the traced sizes"


def test_preflight_takes_the_first_step(words: Words, tmp_path: Path, dmjd: Command) -> None:
    code, out, err = dmjd("preflight", "segment", *words(tmp_path / "run"), "warm=true")
    assert code == 0, err
    assert "ok     compilation" in out
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["none", "block"])
def test_a_run_on_a_gpu_has_the_losses_of_the_cpu(
    compiled: str, words: Words, undisturbed: Path, tmp_path: Path
) -> None:
    options = ("engine.device=cuda", "engine.precision=fp32", f"engine.compile={compiled}", "epochs=1")
    run = loop.segment(compose("segment", words(tmp_path / "run", *options))).path
    for one, two in zip(rows(undisturbed), rows(run), strict=False):
        if "loss" in two:
            assert two["loss"] == pytest.approx(one["loss"], rel=2e-2)
    assert any("val_miou" in row for row in rows(run))
