from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dmjd.data.shards.build import build_shards
from dmjd.data.shards.index import ShardSet, load, save
from dmjd.data.shards.verify import verify


@pytest.fixture
def shards(photo: Callable[..., bytes], tmp_path: Path) -> ShardSet:
    """A set of one tar of three tiny images that a test may damage."""
    (tmp_path / "source").mkdir()
    for number in range(3):
        (tmp_path / "source" / f"{number}.jpg").write_bytes(photo(number, size=(8, 8 + number)))
    build_shards(str(tmp_path / "source"), str(tmp_path / "shards"), workers=1)
    return load(tmp_path / "shards")


def test_what_was_built_is_intact(finished: Path) -> None:
    for split in ("train", "val"):
        assert verify(load(finished / split), workers=1, decode=True) == []


def test_a_tar_cut_anywhere_is_found(shards: ShardSet) -> None:
    path = Path(shards.location(0))
    size = path.stat().st_size
    ends = shards.records["offset"] + shards.records["size"]
    for cut in range(size - 1, -1, -1):
        os.truncate(path, cut)
        first, *samples = verify(shards, workers=1)
        assert first == f"{path} has {cut} bytes, not the {size} of the manifest"
        assert len(samples) == int((ends > cut).sum()), "and every sample that is lost, but no other"


def test_a_changed_byte_anywhere_is_found(shards: ShardSet) -> None:
    path = Path(shards.location(0))
    content = path.read_bytes()
    for place in range(0, len(content), 17):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        first, *samples = verify(shards, workers=1)
        assert first == f"{path} has another sha256 than in the manifest"
        starts, ends = shards.records["offset"], shards.records["offset"] + shards.records["size"]
        assert len(samples) == int(((starts <= place) & (place < ends)).sum())


def test_a_lost_tar_is_found(shards: ShardSet) -> None:
    Path(shards.location(0)).unlink()
    assert verify(shards, workers=1) == [f"{shards.location(0)} is missing"]


@pytest.mark.parametrize(("column", "fault"), [("height", "not the 9x8 of the index"), ("offset", "cannot be decoded")])
def test_decoding_finds_an_index_that_is_wrong(shards: ShardSet, column: str, fault: str) -> None:
    records = np.array(shards.records)
    records[column][0] += 1
    if column == "offset":  # with the crc32 of what is there
        records["size"][0] -= 100
        with open(shards.location(0), "rb") as file:
            file.seek(int(records["offset"][0]) - 1)
            records["offset"][0] -= 1
            records["crc32"][0] = zlib.crc32(file.read(int(records["size"][0])))
    manifest = shards.manifest
    save(Path(shards.folder), manifest.shards, records, manifest.channels, manifest.classes, manifest.source)
    changed = load(shards.folder)
    assert verify(changed, workers=1) == []
    (found,) = verify(changed, workers=1, decode=True)
    assert fault in found


def test_several_processes_and_a_url_find_the_same(finished: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished / "train", tmp_path / "train")
    for name in ("train-000001.tar", "train-000003.tar"):
        path = copy / name
        path.write_bytes(path.read_bytes()[:3000])
    alone = verify(load(copy), workers=1)
    assert len({fault.partition(".tar")[0] for fault in alone}) == 2
    assert verify(load(copy), workers=2) == alone
    assert verify(load(f"file://{copy}"), workers=1) == [f"file://{fault}" for fault in alone]
