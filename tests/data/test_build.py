from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dmjd.data.build as build
from dmjd.compose import compose
from dmjd.config import DataConfig
from dmjd.data import fetch
from dmjd.data.build import build_dataset, resolve_auto
from dmjd.errors import ConfigError, DataError


def write_split(folder: Path, prefix: str = "train") -> None:
    """One black 4x5 image of class 3 in IDX files."""
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
        bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 5]) + bytes(20)
    )
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 3]))


def data(name: str = "auto", root: str | None = None, **values: Any) -> DataConfig:
    return DataConfig(name=name, root=root, **{"pad": 2, "channels": 1, "image_size": [32, 32], **values})


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Fashion-MNIST on this machine, and no source of it."""
    monkeypatch.setattr(fetch, "DEBIAN_FOLDER", tmp_path / "absent")
    monkeypatch.setattr(fetch, "DOWNLOADERS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_auto_takes_fashion_mnist_from_root(tmp_path: Path) -> None:
    write_split(tmp_path)
    dataset = build_dataset(data(root=str(tmp_path), pad=1), "train")
    assert dataset.name(0).startswith(str(tmp_path))
    assert dataset.image(0).shape == (6, 7, 1)


@pytest.mark.parametrize("name", ["auto", "fashion_mnist"])
def test_without_a_root_fashion_mnist_is_debians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for prefix in ("train", "t10k"):
        write_split(tmp_path, prefix)
    monkeypatch.setattr(fetch, "DEBIAN_FOLDER", tmp_path)
    assert build_dataset(data(name), "train").name(0).startswith(str(tmp_path))


@pytest.mark.usefixtures("nowhere")
def test_auto_falls_back_to_digits_and_says_so_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dmjd"):
        resolved = resolve_auto(data())
        assert [len(build_dataset(resolved, split)) for split in ("train", "test")] == [1437, 360]
    (line,) = [record.getMessage() for record in caplog.records if "data=auto" in record.getMessage()]
    for part in ("digits", "97 %", "Fashion-MNIST is neither in", "set data.root"):
        assert part in line
    assert "\n" not in line


@pytest.mark.usefixtures("nowhere")
def test_fashion_mnist_by_name_never_becomes_digits() -> None:
    with pytest.raises(DataError, match=r"cannot be fetched .*; set data\.root .*, or take data=digits"):
        build_dataset(data("fashion_mnist"), "train")


@pytest.mark.parametrize("found", [True, False])
def test_auto_becomes_what_its_own_preset_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: bool
) -> None:
    def folder() -> Path:
        if found:
            return tmp_path
        raise DataError("absent")

    monkeypatch.setattr(build, "fashion_mnist_folder", folder)
    name = "fashion_mnist" if found else "digits"
    with caplog.at_level(logging.INFO, logger="dmjd"):
        resolved = resolve_auto(compose("pretrain", ["data=auto"]).data)
    assert resolved == compose("pretrain", [f"data={name}"]).data
    assert resolve_auto(resolved) is resolved
    (record,) = caplog.records
    assert "data=auto: using" in record.getMessage()


def test_auto_does_not_pass_over_a_root_without_fashion_mnist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither train-images-idx3-ubyte nor .* is in"):
        build_dataset(data(root=str(tmp_path)), "train")


def test_folder_checks_files_against_the_crop(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((40, 30, 3), np.uint8)).save(tmp_path / "a.png")
    assert build_dataset(data("folder", str(tmp_path), channels=3, image_size=[40, 30]), "train").image(0).shape == (
        40,
        30,
        3,
    )
    with pytest.raises(DataError, match="cannot fill the 40x32 crop"):
        build_dataset(data("folder", str(tmp_path), channels=3, image_size=[40, 32]), "train")


@pytest.mark.parametrize(
    ("config", "error", "sentence"),
    [
        (data("folder"), DataError, "data.name=folder needs data.root"),
        (data("fashion_mnist", "nowhere"), DataError, "data.root=nowhere is not a folder"),
        (data("digits", channels=3), ConfigError, "data.channels=3, but the images of data.name=digits have 1"),
    ],
)
def test_mistakes_are_one_sentence(config: DataConfig, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        build_dataset(config, "train")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
