"""Fine-tuning on the training loop: columns and files, resuming, signals, several processes, errors of the input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmjd.builders.finetune import FinetuneStep
from dmjd.compose import compose
from dmjd.config import FinetuneConfig
from dmjd.errors import ConfigError, DataError
from dmjd.parallel import store
from dmjd.runs.checkpoint import newest
from dmjd.runs.folder import RunFolder
from dmjd.train import loop
from dmjd.train.initial import with_init
from tests.compare import KILL, checkpoints, reason, rows, same

Words = Callable[..., list[str]]
Launch = Callable[..., Any]
Same = Callable[..., None]

STEPS_PER_EPOCH, STEPS = 6, 12
TINY = (
    *("epochs=2", "batch_size=8", "workers=0", "engine.device=cpu", "log_every=5", "checkpoint_every=4"),
    # A large epsilon, since Adam otherwise turns the rounding noise of a gradient of zero into a full step.
    *("keep_checkpoints=9", "optim.warmup_epochs=1", "optim.base_lr=3e-1", "optim.eps=1e-2", "ema_decay=0.9"),
)


@pytest.fixture(scope="session")
def pretrained(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a pre-trained run, into which scores may be written."""
    return Path(shutil.copytree(straight, tmp_path_factory.mktemp("pretrained") / "run"))


@pytest.fixture(scope="session")
def tuned(pretrained: Path) -> Words:
    """``tuned(run, *more)``: the arguments of two epochs of six steps over a folder of images."""
    return lambda run, *more: [str(pretrained), *TINY, f"run={run}", *more]


def configured(arguments: list[str]) -> FinetuneConfig:
    config: FinetuneConfig = compose("finetune", [f"init={arguments[0]}", *arguments[1:]])
    return config


def finetune(arguments: list[str]) -> Path:
    """Run it in this process; the run folder."""
    return loop.finetune(configured(arguments)).path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tuned: Words) -> Path:
    """The run from its start to its end. Only to be read."""
    return finetune(tuned(tmp_path_factory.mktemp("undisturbed") / "tuned"))


# Files of a run


def test_the_log_has_losses_and_validations_and_the_schedule_is_right(undisturbed: Path) -> None:
    log = rows(undisturbed)
    losses, validations = ([row for row in log if name in row] for name in ("loss", "val_top1"))
    assert len(losses) + len(validations) == len(log)
    assert [row["step"] for row in losses] == [5, 10, 12]
    assert set(losses[0]) == {"step", "epoch", "loss", "grad_norm", "lr"}
    peak = 3e-1 * 8 / 256
    for row in losses:
        done = row["step"] - 1
        turned = np.pi * (done - 6) / 6
        expected = peak * done / 6 if done < 6 else 1e-6 + (peak - 1e-6) * (1 + np.cos(turned)) / 2
        assert row["lr"] == pytest.approx(expected, rel=1e-9)
    assert [(row["step"], row["epoch"]) for row in validations] == [(6, 1.0), (12, 2.0)]
    assert all(0 <= row["val_ema_top1"] <= 100 and "val_top5" not in row for row in validations)


def test_the_run_folder_names_command_classes_groups_and_best(undisturbed: Path, pretrained: Path) -> None:
    config = RunFolder(undisturbed).check(configured([str(pretrained), *TINY, f"run={undisturbed}"]))
    assert (config.command, config.head.num_classes) == ("finetune", 2)
    end = newest(undisturbed / "checkpoints")
    assert end is not None
    assert json.loads((end / "classes.json").read_text()) == ["down", "up"]
    groups = json.loads((undisturbed / "groups.json").read_text())
    trained = store.read_model(end)
    assert sum(group["parameters"] for group in groups) == sum(value.numel() for value in trained.values())
    # One block: the head, the block and the embeddings.
    assert {round(group["lr_scale"], 9) for group in groups} == {1, 0.65, 0.4225}
    best = json.loads((undisturbed / "best.json").read_text())
    (first, last) = [row["val_ema_top1"] for row in rows(undisturbed) if "val_top1" in row]
    assert (best["score"], best["step"]) == (max(first, last), 12 if last > first else 6)
    assert set(checkpoints(undisturbed)) == {4, 6, 8, 12}, "a checkpoint at each best validation"


def test_the_score_is_recorded_in_both_runs(undisturbed: Path, pretrained: Path) -> None:
    own, of_init = (list((run / "evaluations").glob("finetune-*.json")) for run in (undisturbed, pretrained))
    assert len(own) == 1
    record = json.loads(own[0].read_text())
    assert own[0].read_bytes() in [path.read_bytes() for path in of_init]
    last = [row for row in rows(undisturbed) if "val_top1" in row][-1]
    assert (record["verb"], record["step"], record["top1"]) == ("finetune", STEPS, last["val_ema_top1"])
    ending = reason(undisturbed)
    assert f"top-1 {last['val_ema_top1']:.2f} % of 12 test images" in ending["detail"]
    assert f"dmjd validate {undisturbed}" in ending["next"]


def test_a_classifier_learns(tmp_path: Path, tuned: Words) -> None:
    plain = ("augment.randaugment=null", "augment.mixup=0", "augment.cutmix=0", "ema_decay=null", "optim.eps=1e-8")
    run = finetune(tuned(tmp_path / "run", *plain, "epochs=4", "val_every=3"))
    log = rows(run)
    assert [row["step"] for row in log if "val_top1" in row] == [18, 24]
    assert log[-1]["val_top1"] >= 90, "ramps that fall and rise"


def test_untrained_weights_have_the_configuration_of_init(tmp_path: Path, tuned: Words, pretrained: Path) -> None:
    run = finetune(tuned(tmp_path / "run", "weights=untrained", "epochs=1", "optim.base_lr=1e-9"))
    began = store.read_model(sorted((pretrained / "checkpoints").iterdir())[-1])
    ended = store.read_model(sorted((run / "checkpoints").iterdir())[-1])
    name = "model.encoder.blocks.0.attn.qkv.weight"
    assert ended[name].shape == began[name].shape
    assert not torch.allclose(ended[name], began[name], atol=1e-3)


# Stopped runs

FAULTS = {
    "in a step after a checkpoint": f"""
from dmjd.parallel.single import SingleEngine
step, done = SingleEngine.step, []
def fault(self, lr, weight_decay):
    done.append(1)
    {KILL} if len(done) == 6 else None
    return step(self, lr, weight_decay)
SingleEngine.step = fault
""",
    "in the second validation": f"""
import dmjd.train.finetuning as finetuning
validate, done = finetuning.validate, []
def fault(*arguments):
    done.append(1)
    {KILL} if len(done) == 2 else None
    return validate(*arguments)
finetuning.validate = fault
""",
}


@pytest.mark.parametrize(
    "moment", [pytest.param("in a step after a checkpoint", marks=pytest.mark.long), "in the second validation"]
)
def test_a_killed_run_ends_as_one_that_was_left_alone(
    moment: str,
    tmp_path: Path,
    tuned: Words,
    undisturbed: Path,
    launch: Launch,
    assert_same_run: Same,
    finish_through_fault: Any,
) -> None:
    arguments = ["finetune", *tuned(tmp_path / "run")]
    finish_through_fault(lambda fault: launch(arguments, fault), FAULTS[moment])
    assert_same_run(undisturbed, tmp_path / "run", "journal", "guard", "best")
    assert checkpoints(tmp_path / "run") == checkpoints(undisturbed)
    assert (tmp_path / "run" / "best.json").read_bytes() == (undisturbed / "best.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "calls", "step"),
    [
        ("SIGTERM", 6, STEPS),
        pytest.param("SIGTERM", 2, STEPS_PER_EPOCH, marks=pytest.mark.long),
        pytest.param("SIGUSR1", 2, 3, marks=pytest.mark.long),
    ],
)
def test_a_signal_saves_and_the_same_command_continues(
    name: str,
    calls: int,
    step: int,
    tmp_path: Path,
    tuned: Words,
    undisturbed: Path,
    launch: Launch,
    assert_same_run: Same,
) -> None:
    # SIGTERM comes in a validation, of four calls, with which the next launch begins; SIGUSR1 in a step.
    where = {
        "SIGTERM": "import dmjd.evaluate.validation as module; name = '_counts'",
        "SIGUSR1": "from dmjd.parallel.single import SingleEngine as module; name = 'step'",
    }[name]
    fault = f"""
import os, signal
{where}
inner, done = getattr(module, name), []
def fault(*arguments):
    done.append(1)
    os.kill(os.getpid(), signal.{name}) if len(done) == {calls} else None
    return inner(*arguments)
setattr(module, name, fault)
"""
    run, arguments = tmp_path / "run", ["finetune", *tuned(tmp_path / "run")]
    first = launch(arguments, fault)
    first.join(60)
    assert first.exitcode == 0
    assert (reason(run)["reason"], reason(run)["step"]) == ("signal", step)
    second = launch(arguments)
    second.join(60)
    assert second.exitcode == 0
    assert_same_run(undisturbed, run, "position", "guard", "best")
    assert (run / "best.json").read_bytes() == (undisturbed / "best.json").read_bytes()


def test_a_rollback_forgets_validations_after_its_checkpoint(
    tmp_path: Path, tuned: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, poisoned = FinetuneStep.forward_backward, [8]

    def poison(self: FinetuneStep, batch: Any, epoch: int, *, skip: bool = False) -> Mapping[str, Tensor]:
        poisoned[0] -= 1
        return forward(self, batch, epoch, skip=poisoned[0] == 0 or skip)

    monkeypatch.setattr(FinetuneStep, "forward_backward", poison)
    # Validations at 3, 6, ...: that at 6 is after the checkpoint at 4, to which step 8 rolls back.
    run = finetune(tuned(tmp_path / "run", "batch_size=16", "epochs=4", "guard.max_skips=0", "guard.margin=3"))
    steps = [row["step"] for row in rows(run) if "val_top1" in row]
    assert steps == [3, 6, 9, 12]
    (event,) = [row for row in rows(run, "guard") if row["event"] == "rollback"]
    assert event["to"] == 4
    assert json.loads((run / "best.json").read_text())["step"] in checkpoints(run)


# Several processes


@pytest.mark.parametrize(
    "engine",
    ["ddp", "fsdp", *(pytest.param(name, marks=pytest.mark.long) for name in ("hsdp", "zero1", "zero2", "zero3"))],
)
def test_two_processes_train_and_validate_as_one(
    engine: str, tmp_path: Path, tuned: Words, undisturbed: Path, launch_world: Launch
) -> None:
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra dmjd[scale] is not installed")
    run = tmp_path / "run"
    ranks = launch_world(2, ["finetune", *tuned(run, f"engine={engine}", "engine.grad_accum_steps=2")])
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    for one, two in zip(rows(undisturbed), rows(run), strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    before, after, sharded = (
        store.read_model(folder / "checkpoints" / f"step-{step:08d}")
        for folder, step in ((undisturbed, 4), (undisturbed, STEPS), (run, STEPS))
    )
    for name, value in after.items():
        torch.testing.assert_close(sharded[name], value, rtol=0, atol=1e-5)
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3, "the runs did move"


# Initial weights and data


def test_backbone_and_data_of_a_run_hold_unless_they_are_typed(
    pretrained: Path, image_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = newest(pretrained / "checkpoints") or Path()

    def resolved(*more: str) -> FinetuneConfig:
        return with_init(configured([str(pretrained), *more]), checkpoint)

    plain = resolved()
    assert (plain.backbone.embed_dim, plain.backbone.depth, plain.backbone.patch_size) == (32, 1, 4)
    assert plain.backbone.drop_path == 0.1, "of fine-tuning, and not of pre-training"
    assert (plain.data.root, plain.data.image_size) == (str(image_folder), [16, 16])
    assert plain.data.crop_scale == [0.08, 1.0]
    typed = resolved("data.image_size=32", "backbone.depth=2", "data.root=elsewhere", "data.val_percent=20")
    assert (typed.data.image_size, typed.backbone.depth) == ([32, 32], 2)
    assert (typed.data.root, typed.data.val_percent, typed.data.mean) == ("elsewhere", 20, plain.data.mean)
    with pytest.raises(ConfigError, match=r"^preset=simmim_swin_base is for backbone\.name=swin, .* is vit; choose"):
        resolved("preset=simmim_swin_base")
    assert not caplog.text
    assert resolved("preset=mae_vit_base", "backbone.drop_path=0").backbone.depth == 1
    assert "for an encoder of embed_dim=768 depth=12, and that of init=" in caplog.text
    assert caplog.text.count("\n") == 1
    checkpoint = Path(shutil.copytree(checkpoint, tmp_path / "swin" / "checkpoints" / checkpoint.name))
    config = (checkpoint / "config.yaml").read_text()
    (checkpoint / "config.yaml").write_text(config.replace("name: vit", "name: swin"))
    preset = resolved("preset=simmim_swin_base")
    assert (preset.backbone.embed_dim, preset.backbone.windows.size) == (32, 7)
    assert preset.data.image_size == [224, 224]
    assert preset.optim.layer_decay == 0.8


def test_head_and_tables_of_a_fine_tuned_run_hold_unless_they_are_typed_or_set_by_a_preset(
    undisturbed: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(newest(undisturbed / "checkpoints") or Path(), tmp_path / "run/checkpoints/step"))
    config = path / "config.yaml"
    stored = config.read_text()
    for old, new in (("norm: pooled", "norm: encoder"), ("bias_tables: shared", "bias_tables: per_block")):
        assert stored.count(old) == 1
        stored = stored.replace(old, new)
    config.write_text(stored)

    def resolved(*more: str) -> tuple[str, str]:
        found = with_init(configured([str(tmp_path / "run"), *more]), path)
        return found.head.norm, found.backbone.bias_tables

    assert resolved() == ("encoder", "per_block")
    assert resolved("head.norm=pooled", "backbone.bias_tables=shared") == ("pooled", "shared")
    assert resolved("preset=mae_vit_base") == ("pooled", "per_block")


def test_a_run_of_few_images_brings_its_recipe_unless_a_preset_is_typed(pretrained: Path, tmp_path: Path) -> None:
    few = tmp_path / "run" / "checkpoints" / "step-00000001"
    shutil.copytree(newest(pretrained / "checkpoints") or Path(), few)
    config = few / "config.yaml"
    config.write_text(config.read_text().replace("recipe: none", "recipe: small_data"))

    def resolved(*more: str) -> tuple[str, float | None]:
        found = with_init(configured([str(pretrained), *more]), few)
        return found.recipe, found.optim.warmup_epochs

    assert resolved() == ("small_data", None)
    assert resolved("optim.warmup_epochs=1") == ("small_data", 1)
    assert resolved("recipe=none")[0] == resolved("preset=mae_vit_base")[0] == "none"


BAD = {
    "no init": ([], "init is required"),
    "no file": (["missing"], "init=missing does not exist"),
    "a folder of images": (["{tmp}/whole"], "whole is a folder of images, which data.root names; init names a run"),
    "an empty file": (["{tmp}/w.safetensors"], "w.safetensors cannot be read as a checkpoint: it is empty"),
    "a pre-training folder": (["{run}", "run={run}"], "is a run of dmjd pretrain; name another folder"),
    "another width": (["{run}", "backbone.embed_dim=64"], "another encoder than the configuration"),
    "one class": (["{run}", "data.root={tmp}/one"], "the training images have one class, and a score needs two"),
    "no labels": (["{run}", "data.root={tmp}/flat"], "no labels|have none"),
    "no test images": (["{run}", "data.root={tmp}/whole"], "data.val_percent=10"),
    "too few classes": (["{run}", "head.num_classes=2", "data.root={tmp}/three"], "head.num_classes=2"),
    "odd micro-batches": (["{run}", "batch_size=5"], "pairs"),
    "a batch of more images": (["{run}", "batch_size=64"], "the 48 training images; set a smaller one, or preset=own_"),
    "no class token": (["{run}", "head.pooling=cls"], "class token"),
    "grey images": (["{run}", "data=digits"], "reads 3"),
    "too many frozen": (["{run}", "freeze=9"], "freeze=9"),
    "few labels": (["{run}", "few_shot=1"], "batch_size=8 exceeds the 2 training images"),
    "no list of labels": (["{run}", "labels={tmp}/names"], "cannot be read: No such file"),
    "unknown preset": (["{run}", "preset=mae"], "preset has no option"),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, image_folder: Path) -> Path:
    """Folders of images of other layouts, and a file of weights."""
    root = tmp_path_factory.mktemp("others")
    (root / "w.safetensors").write_bytes(b"")
    for name, classes in (("one", ("up",)), ("whole", ("up", "down")), ("three", ("up", "down", "up2"))):
        for split in ("train", "val") if name != "whole" else ("",):
            for label in classes:
                shutil.copytree(image_folder / "val" / label.rstrip("2"), root / name / split / label)
    for split in ("train", "val"):
        shutil.copytree(image_folder / "val" / "up", root / "flat" / split)
    return root


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_before_a_folder_is_written(
    case: str, others: Path, pretrained: Path, tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    words, part = BAD[case]
    arguments = [word.format(run=pretrained, tmp=others) for word in words]
    own = [] if any(word.startswith("run=") for word in words) else [f"run={tmp_path}/run"]
    small = [word for word in TINY if word.partition("=")[0] not in [each.partition("=")[0] for each in words]]
    before = sorted(pretrained.rglob("*"))
    code, _, err = dmjd("finetune", *arguments[:1], *small, *own, *arguments[1:])
    assert code == 2
    (line,) = [text for text in err.splitlines() if text.startswith("error")]
    assert any(each in line for each in part.split("|")), line
    assert not (tmp_path / "run").exists()
    assert sorted(pretrained.rglob("*")) == before


def test_preflight_resolves_the_run_and_takes_its_step(
    pretrained: Path, tuned: Words, tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = dmjd("preflight", "finetune", *tuned(tmp_path / "run"), "warm=true")
    assert (code, out.count("ok     ")) == (0, 8)
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_run_that_another_command_made_is_refused_both_ways(undisturbed: Path, words: Words) -> None:
    config = compose("pretrain", words("run", f"run={undisturbed}"))
    with pytest.raises(ConfigError, match="is a run of dmjd finetune; name another folder"):
        RunFolder(undisturbed).check(config)


def test_added_classes_are_refused_on_resuming(tmp_path: Path, tuned: Words, image_folder: Path) -> None:
    images = Path(shutil.copytree(image_folder, tmp_path / "images"))
    arguments = tuned(tmp_path / "run", f"data.root={images}", "epochs=1", "checkpoint_every=3")
    run = finetune(arguments)
    for split in ("train", "val"):
        shutil.copytree(images / split / "up", images / split / "a")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    with pytest.raises(DataError, match=r"started with 2 classes \(down, up\).*3 \(a, down"):
        finetune(arguments)


def test_the_average_and_the_weights_are_those_of_one_process(undisturbed: Path) -> None:
    state = store.read(sorted((undisturbed / "checkpoints").iterdir())[-1])
    kinds = {name.partition("/")[0] for name in state}
    assert kinds >= {"parameter", "average"}
    assert not same(state["parameter/model.head.bias"], state["average/model.head.bias"])


def test_labels_and_test_images_are_the_same_after_images_were_added(
    tmp_path: Path, tuned: Words, image_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A quarter of 24 images of each of two classes; the run ends as it did before its last step was repeated."""
    images = Path(shutil.copytree(image_folder, tmp_path / "images"))
    arguments = tuned(tmp_path / "run", f"data.root={images}", "few_shot=25", "checkpoint_every=1")
    caplog.set_level("INFO", logger="dmjd")
    run = finetune(arguments)
    table = [line.removeprefix("groups").strip() for line in caplog.messages if " layer " in line]
    assert table[0] == (
        "layer 0: learning rate x 0.423, weight decay 0.05 (1 tensor, 1,536 parameters) and 0 (1 tensor, 32 parameters)"
    )
    assert len(table) == 3, "a line for the embeddings, the block and the head"
    (record,) = (json.loads(path.read_text()) for path in (run / "evaluations").glob("finetune-*.json"))
    assert record["settings"]["few_shot"] == 25.0
    assert len(record["settings"]["few_shot_images"]) == 16
    assert checkpoints(run) == [1, 2], "two epochs of 12 images in batches of 8"
    first = store.read_model(run / "checkpoints" / "step-00000002")
    scores = [row for row in rows(run) if "val_top1" in row]
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    for number in range(40):
        for split in ("train", "val"):
            shutil.copy(images / split / "up" / "00.png", images / split / "up" / f"added_{number}.png")
    caplog.clear()
    finetune(arguments)
    assert [line for line in caplog.messages if "group" in line] == [
        "groups      6 groups, learning rate x 0.423 to 1, weight decay 0.05 (groups.json has the table)"
    ]
    assert [row for row in rows(run) if "val_top1" in row] == scores, "added test images are left out too"
    again = store.read_model(run / "checkpoints" / "step-00000002")
    assert all(torch.equal(value, first[name]) for name, value in again.items())
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    (images / "val" / "up" / "00.png").unlink()
    with pytest.raises(ConfigError, match=r"data\.root now has 11 images"):
        finetune(arguments)
    with pytest.raises(ConfigError, match="few_shot"):
        finetune([*arguments, "few_shot=50"])
