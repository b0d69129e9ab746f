"""A killed run goes on to the same log where its targets have a past (a teacher) or a picture of their own (codes)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmjd.parallel import store
from dmjd.runs import checkpoint
from tests.train.shrunken import CODES, write_clip, write_dvae

Words = Callable[..., list[str]]

WORDS = ("batch_size=16", "log_every=1", "checkpoint_every=4", "engine.grad_accum_steps=2", "backbone.drop_path=0.2")

KILLED = """
import os
from dmjd.parallel.single import SingleEngine
step, steps = SingleEngine.step, []
def fault(self, lr, wd):
    steps.append(lr)
    os.kill(os.getpid(), 9) if len(steps) == LAST else None
    return step(self, lr, wd)
SingleEngine.step = fault
"""


def of_a_teacher(tmp_path: Path, image_folder: Path) -> tuple[str, ...]:
    """The average of an average: what it teaches depends on every step before."""
    teacher = ("target=teacher", "target.layers=1", "ema_decay=0.9", "optim.base_lr=5e-2")
    return ("epochs=4", *teacher, "data.channels=1", "data.image_size=[32,32]")


def of_codes(tmp_path: Path, image_folder: Path) -> tuple[str, ...]:
    """BEiT's: the same crop at half the size, flipped and coloured alike, through a dVAE."""
    model = ("method=beit", "backbone.patch_size=16", "mask.count=6", "optim.base_lr=1e-2")
    target = (f"target.weights={write_dvae(tmp_path / 'dvae.pt')}", f"target.codes={CODES}")
    return ("epochs=4", *model, *target, "data.channels=3", "data.image_size=[64,64]", "data.second_size=[32,32]")


@pytest.mark.parametrize("case", [of_a_teacher, of_codes])
def test_a_killed_run_goes_on_to_the_same_log(
    case: Callable[[Path, Path], tuple[str, ...]],
    tmp_path: Path,
    image_folder: Path,
    tiny: Words,
    launch: Callable[..., Any],
    assert_same_run: Callable[[Path, Path], None],
) -> None:
    words = (*case(tmp_path, image_folder), *WORDS)
    channels = 3 if "data.channels=3" in words else 1
    images = ["data=folder", f"data.root={image_folder}", "data.check=none"]
    images += [f"data.{name}={[value] * channels}".replace(" ", "") for name, value in (("mean", 0.4), ("std", 0.3))]

    def run(name: str, last: int) -> int:
        process = launch(["pretrain", *tiny(tmp_path / name, *images, *words)], KILLED.replace("LAST", str(last)))
        process.join(300)
        return int(process.exitcode)

    assert run("whole", last=0) == 0
    assert [run("killed", last=6), run("killed", last=3)] == [-9, -9]  # in steps 6 and 7, both after the fourth
    assert run("killed", last=0) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    end = checkpoint.newest(tmp_path / "whole" / "checkpoints")
    assert end is not None
    assert checkpoint.step_of(end) == 12
    if case is of_a_teacher:
        averages, parameters = store.read_average(end), store.read_model(end)
        assert any((averages[name] - parameters[name]).abs().max() > 1e-3 for name in averages), "it learns"


def test_ranks_keep_step_until_they_stop_where_the_target_reads_another_size(
    tmp_path: Path, image_folder: Path, tiny: Words, launch_world: Callable[..., list[Any]]
) -> None:
    """One image is too many, and one rank has met it: what it shows to CLIP from then on has CLIP's size as well."""
    root = Path(shutil.copytree(image_folder, tmp_path / "images"))
    next(root.glob("train/*/*.png")).write_bytes(b"broken")
    images = ("data=folder", f"data.root={root}", "data.check=none", "data.max_bad_percent=0", "batch_size=48")
    sizes = ("data.channels=3", "data.image_size=[32,32]", "data.second_size=[64,64]", "backbone.patch_size=8")
    statistics = ("data.mean=[0.4,0.4,0.4]", "data.std=[0.3,0.3,0.3]")
    target = ("target=clip", f"target.weights={write_clip(tmp_path)}", "target.model=tiny-clip", "target.dim=20")
    words = tiny(tmp_path / "run", *images, *sizes, *statistics, *target, "engine=ddp", "engine.device=cpu")
    known = f"import open_clip; open_clip.add_model_config({str(tmp_path / 'tiny-clip.json')!r})"
    ranks = launch_world(2, ["pretrain", *words], known)
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [2, 2]
