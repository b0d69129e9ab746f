"""Runs that are stopped, killed, damaged or begun from others, and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dmjd.train.loop as loop
from dmjd.cli import main
from dmjd.data.dataset import ArrayDataset
from dmjd.errors import CheckpointError, ConfigError
from dmjd.parallel import store
from dmjd.progress import Progress
from dmjd.runs.checkpoint import newest
from tests.compare import PICTURES, checkpoints, configure, pretrain, rows

# On a machine with one core torch warns that two workers are many; they are what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Words = Callable[..., list[str]]
Same = Callable[..., None]

STEPS_PER_EPOCH, STEPS = 6, 12


class Stopped(Exception):
    """Stands for any end of a process."""


def stop_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The run ends while it takes in the numbers of ``step``, which is one step behind what it computes."""
    advance = Progress.advance

    def stopping(self: Progress, units: int = 1, **values: str) -> None:
        if self._done == step:
            raise Stopped
        advance(self, units, **values)

    monkeypatch.setattr(Progress, "advance", stopping)


@pytest.mark.parametrize("step", [1, 4, 6, 9, 11])
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_happened(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None, step: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, step)
        with pytest.raises(Stopped):
            pretrain(words("stopped"))
    resumed = pretrain(words("stopped"))
    assert_same_run(straight, resumed)
    assert len(json.loads((resumed / "provenance.json").read_text())["launches"]) == 2
    seconds = [row["seconds"] for row in rows(resumed, "timing")]
    assert seconds == sorted(seconds), "wall time goes on as well"


def test_a_run_may_be_stopped_again_and_again_under_other_orchestration(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None
) -> None:
    for step, more in ((3, ("checkpoint_every=2",)), (6, ("workers=2",)), (9, ("checkpoint_every=1",))):
        with pytest.MonkeyPatch.context() as patch:
            stop_before(patch, step)
            with pytest.raises(Stopped):
                pretrain(words("stopped", *more))
    assert_same_run(straight, pretrain(words("stopped")))


def test_a_finished_run_stays_as_it_is(words: Words, no_pictures: None) -> None:
    run = pretrain(words("run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.suffix in (".pt", ".distcp", ".jsonl")}
    pretrain(words("run"))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.suffix in (".pt", ".distcp", ".jsonl")} == before


def kill(process: Any, when: Callable[[], bool]) -> None:
    """SIGKILL to ``process`` as soon as ``when`` holds; it must not have ended before."""
    deadline = time.monotonic() + 120
    while not when():
        assert process.exitcode is None, "ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_the_same_command_after_a_sigkill_ends_in_the_same_bits(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None, tmp_path: Path, launch: Callable[..., Any]
) -> None:
    command = words("killed")
    first = tmp_path / "killed" / "checkpoints" / "step-00000004" / "manifest.json"
    kill(launch(["pretrain", *command], PICTURES), first.exists)  # they leave time for it
    assert 12 not in checkpoints(tmp_path / "killed")
    assert main(["pretrain", *command]) == 0
    assert_same_run(straight, tmp_path / "killed")


HANGS_IN_ITS_SECOND_CHECKPOINT = """
import pathlib, sys, time
from dmjd.parallel.single import SingleEngine

save = SingleEngine.save

def hang(self, path, averages):
    def half():
        (path / "half").write_bytes(b"half a file")
        time.sleep(600)

    return save(self, path, averages) if "step-00000004" in path.name else half

SingleEngine.save = hang
"""


def test_a_run_killed_inside_a_checkpoint_goes_on_from_the_one_before(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None, tmp_path: Path, launch: Callable[..., Any]
) -> None:
    killed = tmp_path / "killed"
    half = killed / "checkpoints" / "step-00000008.tmp" / "half"
    process = launch(["pretrain", *words("killed")], HANGS_IN_ITS_SECOND_CHECKPOINT)
    kill(process, lambda: half.exists() and half.stat().st_size > 0)
    assert newest(killed / "checkpoints") == killed / "checkpoints" / "step-00000004"
    assert [row["step"] for row in rows(killed)] == [5], "a row beyond the checkpoint, which must not come twice"
    assert_same_run(straight, pretrain(words("killed")))
    assert checkpoints(killed) == [4, 8, 12]
    assert not half.parent.exists()


def test_a_damaged_checkpoint_costs_only_the_way_back_to_the_one_before(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None
) -> None:
    damaged = pretrain(words("damaged"))
    shutil.rmtree(damaged / "checkpoints" / "step-00000012")
    os.truncate(damaged / "checkpoints" / "step-00000008" / "__0_0.distcp", 100)
    assert_same_run(straight, pretrain(words("damaged")))


def test_a_lost_log_does_not_stop_a_run(words: Words) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, 9)
        patch.setattr(loop, "write_pictures", lambda *arguments: None)
        with pytest.raises(Stopped):
            pretrain(words("run"))
    (Path(configure(words("run")).run) / "log.jsonl").unlink()
    run = pretrain(words("run", "checkpoint_every=100"))  # with pictures, which read the log
    assert [row["step"] for row in rows(run)][-2:] == [10, 12]


@pytest.mark.parametrize(
    ("word", "part"), [("seed=1", "seed=0"), ("epochs=3", "epochs=2"), ("backbone.depth=2", "backbone.depth=1")]
)
def test_another_experiment_is_refused_before_anything_is_touched(
    words: Words, no_pictures: None, word: str, part: str
) -> None:
    run = pretrain(words("run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=f"{part}, and {word}"):
        pretrain(words("run", word))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_other_images_than_a_run_began_with_are_refused(
    words: Words, no_pictures: None, image_folder: Path, tmp_path: Path
) -> None:
    images = Path(shutil.copytree(image_folder, tmp_path / "images"))
    recipe = words("run", f"data.root={images}", "data.max_bad_percent=5")
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, 6)
        with pytest.raises(Stopped):
            pretrain(recipe)
    run = Path(configure(recipe).run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    lost = images / "train" / "down" / "05.png"
    lost.rename(tmp_path / "05.png")
    began, now = "started with 48 images of fingerprint .*", "data.root now has {} images of fingerprint"
    with pytest.raises(ConfigError, match=began + now.format(47)):
        pretrain(recipe)
    lost.with_name("zz.png").write_bytes((tmp_path / "05.png").read_bytes())  # an added image is left out
    with pytest.raises(ConfigError, match=began + now.format(47)):
        pretrain(recipe)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    lost.with_name("zz.png").unlink()
    lost.touch()
    assert [row["step"] for row in rows(pretrain(recipe))] == [5, 10, 12]


def test_a_run_from_before_folders_had_fingerprints_goes_on(
    words: Words, no_pictures: None, straight: Path, assert_same_run: Same
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, 6)
        patch.setattr("dmjd.data.identity.ImageFolder", ArrayDataset)
        with pytest.raises(Stopped):
            pretrain(words("stopped"))
    assert_same_run(straight, pretrain(words("stopped")))


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_touched(straight: Path, words: Words) -> None:
    run = Path(configure(words("run")).run)
    shutil.copytree(straight / "checkpoints", run / "checkpoints")
    before = sorted(run.rglob("*"))
    for word, was in (("backbone.depth=2", "backbone.depth=1"), ("backbone.embed_dim=64", "backbone.embed_dim=32")):
        with pytest.raises(ConfigError, match=f"was started with {was}, and {word} is set now") as caught:
            pretrain(words("run", word))
        assert "\n" not in str(caught.value)
        assert sorted({*run.rglob("*")} - {run / ".lock"}) == before


# Beginning from another run


def test_init_begins_from_another_run_and_the_run_s_own_checkpoint_wins(
    straight: Path, words: Words, no_pictures: None
) -> None:
    more = (f"init={straight}", "optim.base_lr=1e-9")
    run = pretrain(words("second", *more))
    began = store.read_model(straight / "checkpoints" / f"step-{STEPS:08d}")
    for name, value in store.read_model(run / "checkpoints" / f"step-{STEPS:08d}").items():
        torch.testing.assert_close(value, began[name], atol=1e-6, rtol=0)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    before = (run / "log.jsonl").read_bytes()
    assert pretrain(words("second", *more)) == run
    assert (run / "log.jsonl").read_bytes() == before


def test_init_of_a_run_that_still_trains_is_that_of_the_first_start(
    straight: Path, tmp_path: Path, words: Words, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(straight, tmp_path / "source"))
    *_, first, last = sorted((source / "checkpoints").iterdir())
    began, more = store.read_model(first), words("pinned", f"init={source}", "optim.base_lr=1e-9")
    later = last.rename(tmp_path / last.name)

    def killed(training: loop.Trainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dmjd.train.loop.Trainer.train", killed)
        with pytest.raises(KeyboardInterrupt):
            pretrain(more)
    later.rename(last)  # meanwhile the other run went on
    away = first.rename(tmp_path / first.name)
    with pytest.raises(
        CheckpointError, match=rf"init={source}: this run started from {first}, which was removed, .* remove"
    ):
        pretrain(more)
    shutil.copytree(last, first)
    with pytest.raises(CheckpointError, match="removed, changed or moved"):
        pretrain(more)
    shutil.rmtree(first)
    away.rename(first)
    run = pretrain(more)
    for name, value in store.read_model(run / "checkpoints" / f"step-{STEPS:08d}").items():
        torch.testing.assert_close(value, began[name], atol=1e-6, rtol=0)


def test_an_init_of_another_model_is_refused_before_the_folder_exists(straight: Path, words: Words) -> None:
    with pytest.raises(CheckpointError, match="another model"):
        pretrain(words("second", f"init={straight}", "backbone.depth=2"))
    assert not Path(configure(words("second")).run).exists()
