from __future__ import annotations

import io
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from dmjd.errors import ConfigError
from dmjd.train.trackers import Trackers, check_packages

CONFIG = {"epochs": 2, "mask": {"views": 2}}


def trackers(folder: Path, *, tensorboard: bool = False, wandb: str | None = None, resumed_step: int = 0) -> Trackers:
    return Trackers(
        folder,
        tensorboard=tensorboard,
        wandb_project=wandb,
        run_name="demo",
        config=CONFIG,
        resumed_step=resumed_step,
    )


def events(folder: Path) -> EventAccumulator:
    """What TensorBoard would show."""
    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    accumulator.Reload()
    return accumulator


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


@pytest.fixture
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PNG with a palette of 256 colours, 7 wide and 5 high."""
    path = tmp_path_factory.mktemp("pictures") / "views.png"
    Image.fromarray(colours()).quantize(256).save(path)
    return path


def colours() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


class FakeRun:
    """What a W&B run is asked to do, in order."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, str | None]] = []
        self.rows: list[dict[str, Any]] = []
        self.finished = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, Any]) -> None:
        assert not self.finished
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


class FakeWandb(ModuleType):
    """A package ``wandb`` that keeps its calls and talks to nobody."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []

    def init(self, **settings: Any) -> FakeRun:
        self.inits.append(settings)
        self.runs.append(FakeRun())
        return self.runs[-1]

    def Image(self, path: str) -> tuple[str, str]:
        return "image", path


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


# TensorBoard


def test_event_files_hold_the_rows_and_pictures(tmp_path: Path, picture: Path) -> None:
    tracked = trackers(tmp_path, tensorboard=True)
    tracked.scalars({"step": 10, "loss": 0.5, "lr": 2**-12}, 10)
    tracked.scalars({"step": 20, "loss": 0.25, "lr": 2**-11}, 20)
    tracked.scalars({"step": 20, "knn_top1": 61.5}, 20)
    tracked.pictures({"views": picture}, 20)
    tracked.close()
    assert set(events(tmp_path).Tags()["scalars"]) == {"loss", "lr", "knn_top1"}
    assert curve(tmp_path, "loss") == [(10, 0.5), (20, 0.25)]
    assert curve(tmp_path, "lr") == [(10, 2**-12), (20, 2**-11)]
    assert curve(tmp_path, "knn_top1") == [(20, 61.5)]
    assert events(tmp_path).Tags()["images"] == ["pictures/views"]
    (shown,) = events(tmp_path).Images("pictures/views")
    assert shown.step == 20
    with Image.open(io.BytesIO(shown.encoded_image_string)) as decoded:
        assert np.array_equal(np.asarray(decoded), colours())


@pytest.mark.parametrize("resumed_step", [0, 4])
def test_a_resumed_run_is_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed_step: int) -> None:
    """Six rows, a kill, and again from the step after the checkpoint: each step once, as the second launch had it."""
    killed = trackers(tmp_path, tensorboard=True)
    for step in range(1, 7):
        killed.scalars({"loss": 100.0 + step}, step)
    now = time.time
    # An hour later, since TensorBoard reads files in the order of their names, which begin with the second of birth.
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    resumed = trackers(tmp_path, tensorboard=True, resumed_step=resumed_step)
    for step in range(resumed_step + 1, 8):
        resumed.scalars({"loss": 200.0 + step}, step)
    expected = [(step, (100.0 if step <= resumed_step else 200.0) + step) for step in range(1, 8)]
    assert curve(tmp_path, "loss") == expected, "on disk although neither has been closed"
    resumed.close()
    killed.close()


# Weights & Biases


def test_a_wandb_run_is_begun_as_asked(tmp_path: Path, wandb: FakeWandb) -> None:
    before = random.getstate()
    tracked = trackers(tmp_path, wandb="dmjd")
    assert random.getstate() == before
    (settings,) = wandb.inits
    identity = settings.pop("id")
    # No mode: whether W&B is online is decided by its own variables and settings.
    assert settings == {
        "project": "dmjd",
        "name": "demo",
        "resume": "allow",
        "dir": str(tmp_path),
        "config": CONFIG,
    }
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb_id": identity}
    assert wandb.runs[0].metrics == [("step", None), ("*", "step")]
    tracked.close()


def test_a_wandb_run_gets_rows_and_pictures_under_their_step(tmp_path: Path, wandb: FakeWandb, picture: Path) -> None:
    tracked = trackers(tmp_path, wandb="dmjd")
    tracked.scalars({"step": 10, "loss": 0.5}, 10)
    tracked.scalars({"knn_top1": 61.5}, 12)
    tracked.pictures({"views": picture}, 12)
    tracked.close()
    (run,) = wandb.runs
    assert run.rows == [
        {"loss": 0.5, "step": 10},
        {"knn_top1": 61.5, "step": 12},
        {"pictures/views": ("image", str(picture)), "step": 12},
    ]
    assert run.finished == 1


def test_the_wandb_id_belongs_to_the_run_folder(tmp_path: Path, wandb: FakeWandb) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    trackers(tmp_path / "a", wandb="dmjd").close()
    trackers(tmp_path / "a", wandb="dmjd", resumed_step=40).close()
    trackers(tmp_path / "b", wandb="dmjd").close()
    first, again, other = (settings["id"] for settings in wandb.inits)
    assert first == again
    assert first != other


def test_an_id_survives_a_server_that_did_not_answer(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def unreachable(**settings: Any) -> FakeRun:
        asked.append(settings["id"])
        raise OSError("no route to host\nand a page of details")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "dmjd"):
        patch.setattr(wandb, "init", unreachable)
        tracked = trackers(tmp_path, wandb="dmjd")
        tracked.scalars({"loss": 0.5}, 1)
        tracked.close()
    (message,) = caplog.messages
    assert message.startswith("Weights & Biases failed (no route to host) and is off")
    trackers(tmp_path, wandb="dmjd").close()
    assert asked == [settings["id"] for settings in wandb.inits]


# What breaks


@pytest.mark.parametrize("act", ["scalars", "pictures", "close"])
def test_a_tracker_that_fails_is_off_after_one_warning(
    tmp_path: Path,
    wandb: FakeWandb,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    act: str,
) -> None:
    writer: list[SummaryWriter] = []

    def full(self: SummaryWriter, *arguments: Any, **options: Any) -> None:
        writer.append(self)
        raise OSError("No space left on device")

    method = {"scalars": "add_scalar", "pictures": "add_image", "close": "close"}[act]
    acts: dict[str, Callable[[Trackers], None]] = {
        "scalars": lambda tracked: tracked.scalars({"loss": 0.5}, 1),
        "pictures": lambda tracked: tracked.pictures({"views": picture}, 1),
        "close": lambda tracked: tracked.close(),
    }
    tracked = trackers(tmp_path, tensorboard=True, wandb="dmjd")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "dmjd"):
        patch.setattr(SummaryWriter, method, full)
        acts[act](tracked)
        if act != "close":
            acts[act](tracked)
        tracked.close()
    assert caplog.messages == [
        "TensorBoard failed (No space left on device) and is off until the run is started again; the run continues"
    ]
    assert len(writer) == 1, "asked once, and never again"
    assert len(wandb.runs[0].rows) == (0 if act == "close" else 2), "the other tracker is not concerned"
    assert wandb.runs[0].finished == 1
    writer[0].close()


def test_a_damaged_id_file_does_not_stop_a_run(
    tmp_path: Path, wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trackers.json").write_text("{}")
    with caplog.at_level(logging.WARNING, "dmjd"):
        trackers(tmp_path, wandb="dmjd").scalars({"loss": 0.5}, 1)
    assert len(caplog.messages) == 1
    assert wandb.inits == []


# What is refused


@pytest.mark.parametrize(
    ("absent", "settings", "sentence"),
    [
        (
            "torch.utils.tensorboard",
            {"tensorboard": True, "wandb_project": None},
            r"tensorboard=true needs the package tensorboard, .*; pip install 'dmjd\[train\]'$",
        ),
        (
            "wandb",
            {"tensorboard": False, "wandb_project": "dmjd"},
            r"wandb=dmjd needs the package wandb, .*; pip install 'dmjd\[wandb\]'$",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, absent: str, settings: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ConfigError, match=sentence):
        check_packages(**settings)
    check_packages(tensorboard=False, wandb_project=None)


def test_a_folder_named_wandb_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(ConfigError, match=r"only a folder named wandb was found\); pip install 'dmjd\[wandb\]'"):
        check_packages(tensorboard=False, wandb_project="dmjd")


def test_no_tracker_writes_nothing(tmp_path: Path, picture: Path) -> None:
    tracked = trackers(tmp_path)
    tracked.scalars({"loss": 0.5}, 1)
    tracked.pictures({"views": picture}, 1)
    tracked.close()
    assert list(tmp_path.iterdir()) == []
