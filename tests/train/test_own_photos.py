"""``experiment=own_photos`` from the command line: rules at the first start, stored values afterwards, the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmjd.builders import recipe
from dmjd.builders.recipe import Schedule
from dmjd.compose import compose, from_yaml
from dmjd.config import PretrainConfig
from dmjd.data.small import Digits
from dmjd.parallel.world import alone
from dmjd.runs.folder import RunFolder
from dmjd.train import loop
from dmjd.train.pretraining import next_steps
from dmjd.train.summary import start_lines
from tests.compare import checkpoints, reason, rows

Dmjd = Callable[..., tuple[int, str, str]]
SMALL = ("backbone.embed_dim=32", "backbone.depth=1", "engine.device=cpu", "workers=0", "checkpoint_every=4")


def stored(run: Path) -> PretrainConfig:
    config: PretrainConfig = from_yaml(PretrainConfig, (run / "config.yaml").read_text())
    return config


@pytest.fixture
def photos(tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """48 training and 12 held-out images; the rules give few epochs, so that the run takes a second."""
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: None)
    machine = recipe.MACHINES["cpu"]
    machine = replace(machine, decoder=(32, 1, 2), pretrain=replace(machine.pretrain, epochs=1, batch=48))
    monkeypatch.setattr(recipe, "MACHINES", {"cpu": machine})
    return Path(shutil.copytree(image_folder, tmp_path / "photos"))


def test_the_same_command_goes_on_after_a_new_file_other_rules_and_another_device(
    photos: Path, tmp_path: Path, dmjd: Dmjd, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["pretrain", "experiment=own_photos", f"data.root={photos}", *SMALL]
    ends = {}
    for name in ("straight", "stopped"):
        run, words = tmp_path / name, [*typed, f"run={tmp_path / name}"]
        if name == "stopped":
            with monkeypatch.context() as patch:
                patch.setattr(loop.Trainer, "is_checkpoint_due", stop_at_four)
                assert dmjd(*words)[0] == 0
            assert checkpoints(run) == [4]
            first = stored(run)
            Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(photos / "train" / "down" / "00a.png")
            schedule = Schedule(batch=8, epochs=9, base_lr=1.0)
            changed = replace(recipe.MACHINES["cpu"], pretrain=schedule, grid=2)
            monkeypatch.setattr(recipe, "MACHINES", {"cpu": changed, "cuda": changed})
        code, _, err = dmjd(*words)
        assert code == 0, err
        ends[name] = (run / "log.jsonl").read_bytes()
    assert stored(run) == first
    assert "48 in 2 classes, without 1 added since the first start; crops of 16x16 pixels" in err
    assert "48 training images, 12 test images" in err, "online kNN leaves the added image out as well"
    assert ends["stopped"] == ends["straight"]


def stop_at_four(trainer: loop.Trainer) -> bool:
    if trainer.position.step == 4:
        trainer.requests.reason = "file"
    return trainer.position.step % 4 == 0


def test_the_first_start_and_the_end_say_what_was_done(photos: Path, tmp_path: Path, dmjd: Dmjd) -> None:
    run = tmp_path / "run"
    code, out, err = dmjd("pretrain", "experiment=own_photos", f"data.root={photos}", *SMALL, f"run={run}")
    assert code == 0, err
    config = stored(run)
    code, out_of_cfg, _ = dmjd(
        "pretrain", "experiment=own_photos", f"data.root={photos}", *SMALL, f"run={run}", "--cfg"
    )
    shown = from_yaml(PretrainConfig, out_of_cfg)
    for key in ("epochs", "batch_size", "backbone", "method"):
        assert getattr(shown, key) == getattr(config, key), key
    assert (config.epochs, config.batch_size, config.data.image_size, config.backbone.patch_size) == (
        10,
        48,
        [16, 16],
        4,
    )
    for part in (
        "recipe=small_data: 48 training images, shorter side 16 pixels, cpu",
        "epochs=10",
        "images      48 in 2 classes; crops of 16x16 pixels",
        "steps       1 per epoch, 10 in 10 epochs\n",
        "75 % masked in each view (mask.mask_ratio=0.6 is rounded to 3 of 4 masked units)",
    ):
        assert part in err, part
    assert "embed_dim" not in err, "a typed key is no rule's"
    assert [row["step"] for row in rows(run) if "knn_top1" in row] == list(range(1, 11))
    for command in ("dmjd knn", "dmjd report"):
        assert f"{command} checkpoint={run}" in out or f"{command} {run}" in out
    for split in ("val", "train"):  # evaluations stop at a bad image of either
        file = next((photos / split).rglob("*.png"))
        content = file.read_bytes()
        file.write_bytes(content[:20])
        if split == "train":
            (run / "quarantine.jsonl").write_text('{"name": "a.png", "kind": "undecodable"}\n')
        assert next_steps(config, RunFolder(run)).endswith("(for scores, remove or replace 1 bad image(s) first)")
        assert "dmjd knn" not in next_steps(config, RunFolder(run))
        file.write_bytes(content)


def test_the_end_advises_only_commands_that_work_and_names_skipped_steps(
    photos: Path, tmp_path: Path, dmjd: Dmjd
) -> None:
    shutil.rmtree(photos / "val")
    words = ["pretrain", "experiment=own_photos", f"data.root={photos}", *SMALL, "epochs=3", "optim.warmup_percent=0"]
    code, _, err = dmjd(*words, f"run={tmp_path / 'held'}", "optim.base_lr=1e38")
    assert code == 0, err
    assert "no online kNN at step 3: the encoder's features hold NaN or infinity" in err
    code, _, err = dmjd(*words, f"run={tmp_path / 'run'}", "optim.base_lr=1e38", "data.val_percent=0")
    assert code == 0, err
    end = reason(tmp_path / "run")
    assert "all steps are done, 2 of 3 were skipped for a loss or gradient that is not finite" in end["detail"]
    assert "the run has diverged; start a new one with a lower optim.base_lr" in end["detail"]
    assert "knn" not in end["next"]
    assert "dmjd report" in end["next"]
    assert not [row for row in rows(tmp_path / "run") if "knn_top1" in row], "no labels are held out"


@pytest.mark.parametrize(("epochs", "cut"), [(10, True), (40, True), (41, False)])
def test_a_warm_up_that_the_run_does_not_outlast_is_reported(epochs: int, cut: bool) -> None:
    config = compose("pretrain", ["experiment=mae_vit_base", "data.root=photos", f"epochs={epochs}"])
    data: Any = SimpleNamespace(steps_per_epoch=1, added=0, source=Digits("train"))
    task: Any = SimpleNamespace(parameters="", peak_lr=1e-3, details=list)
    (line,) = (line for line in start_lines(config, data, task, alone(torch.device("cpu"))) if "schedule" in line)
    assert line.startswith("schedule    peak learning rate 0.001 after 40 steps of warm-up")
    assert line.endswith("; the run ends before, lower optim.warmup_epochs") == cut
