"""A small folder of photographs with labels, the shard sets made of it, and a server for them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data

from dmjd.data.shards.build import build_shards
from tests.data.shards.http_server import Server

ASTRONAUT = data.astronaut()


@pytest.fixture(scope="session")
def photo() -> Callable[..., bytes]:
    """``photo(number, ending, size)``: a file, another one for every number."""

    def make(number: int = 0, kind: str = "JPEG", size: tuple[int, int] = (40, 56), **options: object) -> bytes:
        top, left = np.random.default_rng(number).integers(0, 300, 2)
        buffer = io.BytesIO()
        Image.fromarray(ASTRONAUT[top : top + size[0], left : left + size[1]]).save(buffer, kind, **options)
        return buffer.getvalue()

    return make


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> Path:
    """24 training and 4 held-out images in two class folders, and one that is none."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 12), ("val", 2)):
        for label in ("ant", "bee"):
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                content = photo(number, size=(40 + number, 56 - number))
                (root / split / label / f"{number:02d}.jpg").write_bytes(content)
    (root / "train" / "ant" / "page.jpg").write_bytes(b"<!DOCTYPE html><title>404</title>")
    return root


@pytest.fixture
def small_tars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tars of a few images each, though sizes are given in megabytes."""
    monkeypatch.setattr("dmjd.data.shards.build.MEGABYTE", 7_000)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """What a build of ``photos`` in small tars ends with. Tests that write into it take a copy."""
    folder = tmp_path_factory.mktemp("finished") / "shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmjd.data.shards.build.MEGABYTE", 7_000)
        build_shards(str(photos), str(folder), workers=1, shard_mb=1)
    return folder


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.wake.set()
        for left in threading.enumerate():
            if left.name.startswith("shards-"):
                left.join(10)
        running.shutdown()
        thread.join()
