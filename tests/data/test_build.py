from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dmjd.data.build as build
from dmjd.config import DataConfig
from dmjd.data.build import build_dataset
from dmjd.errors import ConfigError, DataError


def write_split(folder: Path) -> None:
    """One black 4x5 training image of class 3 in IDX files."""
    (folder / "train-images-idx3-ubyte").write_bytes(
        bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 5]) + bytes(20)
    )
    (folder / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 3]))


def data(name: str = "auto", root: str | None = None, **values: Any) -> DataConfig:
    return DataConfig(name=name, root=root, **{"pad": 2, "channels": 1, "image_size": [32, 32], **values})


@pytest.fixture
def no_debian_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmjd.data.idx.DEBIAN_FOLDER", tmp_path / "absent")
    monkeypatch.setattr(build, "DEBIAN_FOLDER", tmp_path / "absent")
    build._warn_of_digits.cache_clear()


def test_auto_takes_fashion_mnist_from_root(tmp_path: Path) -> None:
    write_split(tmp_path)
    dataset = build_dataset(data(root=str(tmp_path), pad=1), "train")
    assert dataset.name(0).startswith(str(tmp_path))
    assert dataset.image(0).shape == (6, 7, 1)


def test_auto_takes_debians_package_without_a_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_split(tmp_path)
    monkeypatch.setattr("dmjd.data.idx.DEBIAN_FOLDER", tmp_path)
    monkeypatch.setattr(build, "DEBIAN_FOLDER", tmp_path)
    assert build_dataset(data(), "train").name(0).startswith(str(tmp_path))


@pytest.mark.usefixtures("no_debian_package")
def test_auto_falls_back_to_digits_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dmjd"):
        assert [len(build_dataset(data(), split)) for split in ("train", "test")] == [1437, 360]
    assert len(caplog.records) == 1
    assert "digits" in caplog.records[0].getMessage()
    assert "97 %;" in caplog.records[0].getMessage()


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
        (data("cifar"), ConfigError, "choose auto, fashion_mnist, digits, folder, shards or stream"),
    ],
)
def test_mistakes_are_one_sentence(config: DataConfig, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        build_dataset(config, "train")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
