"""A run over a folder of images and its undisturbed end, for modules without runs of their own; unremovable folders."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runs import pretrain

Words = Callable[..., list[str]]


@pytest.fixture(scope="session")
def recipe(tiny: Words, image_folder: Path) -> Words:
    """``recipe(run, *more)``: two epochs of six steps over a folder of images.

    Checkpoints at 4, 8 and 12 fall into logging windows, which end at 5, 10 and 12.
    """

    def make(run: Path, *more: str) -> list[str]:
        folder = ("data=folder", f"data.root={image_folder}", "data.image_size=[16,16]", "epochs=2", "batch_size=8")
        every = ("log_every=5", "checkpoint_every=4", "keep_checkpoints=9")
        return tiny(run, *folder, *every, *more)

    return make


@pytest.fixture
def words(tmp_path: Path, recipe: Words) -> Words:
    """``words(name, *more)``: the recipe in ``tmp_path / name``."""
    return lambda name, *more: recipe(tmp_path / name, *more)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, recipe: Words) -> Path:
    """The recipe, run to its end without a stop. Only to be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: None)
        return pretrain(recipe(tmp_path_factory.mktemp("straight") / "run"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than a tiny run."""
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: None)


@pytest.fixture
def freeze() -> Iterator[Callable[[Path], None]]:
    """``freeze(folder)``: for the rest of the test the kernel refuses to remove anything from it, of root too."""
    frozen: list[Path] = []

    def attribute(sign: str, folder: Path) -> None:
        changed = subprocess.run(["chattr", f"{sign}i", folder], capture_output=True, text=True)
        if changed.returncode:
            pytest.skip(f"an unremovable folder needs root and a file system with attributes: {changed.stderr.strip()}")

    def act(folder: Path) -> None:
        attribute("+", folder)
        frozen.append(folder)

    yield act
    for folder in frozen:
        attribute("-", folder)
