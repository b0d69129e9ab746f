from __future__ import annotations

import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from dmjd.config import DataConfig
from dmjd.data.build import build_dataset
from dmjd.data.folder import ImageFolder
from dmjd.data.shards.build import build_shards
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.shards.index import INDEX, Shard, load, save
from dmjd.data.shards.local import OpenFiles, check_files
from dmjd.errors import BadImage, ConfigError, DataError, NoSplit

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "shards"))


def config(root: Path, **values: Any) -> DataConfig:
    return DataConfig(name="shards", root=str(root), **{"image_size": [32, 32], **values})


def test_samples_are_those_of_the_folder(finished: Path, photos: Path) -> None:
    for split, count in (("train", 24), ("test", 4)):
        ours = build_dataset(config(finished), split)  # type: ignore[arg-type]
        theirs = ImageFolder(str(photos), split, 3, check="none")  # type: ignore[arg-type]
        whole = [index for index in range(len(theirs)) if not theirs.name(index).endswith("page.jpg")]
        assert len(ours) == len(whole) == count
        assert ours.num_classes == theirs.num_classes == 2
        for index, other in enumerate(whole):
            assert np.array_equal(ours.image(index), theirs.image(other))
            assert ours.label(index) == theirs.label(other)
        assert len({ours.name(index) for index in range(count)}) == count
        with pytest.raises(IndexError):
            ours.image(count)


def damage(dataset: ShardDataset, index: int, change: Callable[[bytes], bytes]) -> None:
    """Other bytes of the same number in a sample's place."""
    record = dataset.shards.records[index]
    with Path(dataset.shards.location(int(record["shard"]))).open("r+b") as file:
        file.seek(int(record["offset"]))
        old = file.read(int(record["size"]))
        new = change(old)
        assert len(new) == len(old)
        file.seek(int(record["offset"]))
        file.write(new)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("crc", lambda old: old[:-9] + bytes([old[-9] ^ 1]) + old[-8:], "another crc32 than in the index"),
        ("empty", lambda old: bytes(len(old)), "only zero bytes"),
        ("magic", lambda old: (b"<!DOCTYPE html>" + old)[: len(old)], "is not an image"),
    ],
)
def test_other_bytes_are_a_bad_image_of_their_kind(
    copy: Path, kind: str, change: Callable[[bytes], bytes], said: str
) -> None:
    dataset = ShardDataset(load(copy / "train"), None)
    before = dataset.image(4)
    damage(dataset, 3, change)
    with pytest.raises(BadImage, match=said) as caught:
        dataset.image(3)
    assert caught.value.kind == kind
    assert caught.value.name == dataset.name(3)
    assert np.array_equal(dataset.image(4), before)


def test_an_image_that_never_decoded_is_undecodable(photo: Callable[..., bytes], tmp_path: Path) -> None:
    data = photo()[:200] + bytes(300)
    (tmp_path / "a.tar").write_bytes(data)
    record = np.array([(0, 0, len(data), -1, zlib.crc32(data), 40, 56)], dtype=INDEX)
    save(tmp_path, [Shard("a.tar", 1, len(data), "0" * 64)], record, 3, (), "test")
    with pytest.raises(BadImage) as caught:
        ShardDataset(load(tmp_path), None).image(0)
    assert caught.value.kind in ("undecodable", "truncated")


def test_a_tar_cut_anywhere_is_noticed_at_the_start_and_at_every_sample_behind_the_cut(
    tmp_path: Path, photo: Callable[..., bytes]
) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(3):
        (tmp_path / "photos" / f"{number}.png").write_bytes(photo(number, "PNG", size=(6, 8)))
    build_shards(str(tmp_path / "photos"), str(tmp_path / "set"), workers=1)
    shards = load(tmp_path / "set")
    path, dataset = Path(shards.location(0)), ShardDataset(shards, None)
    images = [dataset.image(index) for index in range(3)]
    ends = [int(record["offset"] + record["size"]) for record in shards.records]
    cuts = {*range(0, path.stat().st_size, 11), *(end + near for end in ends for near in (-1, 0, 1))}
    for cut in sorted(cuts, reverse=True):
        os.truncate(path, cut)
        with pytest.raises(DataError, match=rf"train-000000.tar has {cut} bytes, not the .* of the manifest"):
            check_files(shards)
        for index, (image, end) in enumerate(zip(images, ends, strict=True)):
            if end <= cut:
                assert np.array_equal(dataset.image(index), image)
            else:
                with pytest.raises(BadImage) as caught:
                    dataset.image(index)
                assert caught.value.kind == "truncated"


def test_a_tar_that_is_gone_is_noticed_at_the_start_and_its_samples_are_missing(copy: Path) -> None:
    dataset = build_dataset(config(copy), "train")
    shards = load(copy / "train")
    Path(shards.location(1)).unlink()
    with pytest.raises(DataError, match=r"train-000001.tar cannot be read \(No such file"):
        build_dataset(config(copy), "train")
    with pytest.raises(BadImage) as caught:
        dataset.image(shards.manifest.shards[0].samples)
    assert caught.value.kind == "missing"


def test_a_set_that_is_replaced_under_a_reader_is_read_on_as_it_was(copy: Path) -> None:
    shards = load(copy / "train")
    path, dataset = Path(shards.location(0)), ShardDataset(shards, None)
    images = [dataset.image(index) for index in range(shards.manifest.shards[0].samples)]
    other = path.with_suffix(".new")
    other.write_bytes(bytes(reversed(path.read_bytes())))
    other.replace(path)
    assert all(np.array_equal(dataset.image(index), image) for index, image in enumerate(images))
    late = ShardDataset(shards, None)
    for index in range(len(images)):
        with pytest.raises(BadImage) as caught:
            late.image(index)
        assert caught.value.kind in ("crc", "magic", "empty")


@pytest.mark.parametrize("length", [0, 1 << 20])
def test_a_set_that_is_written_over_under_a_reader_gives_no_wrong_image(copy: Path, length: int) -> None:
    shards = load(copy / "train")
    path, dataset = Path(shards.location(0)), ShardDataset(shards, None)
    dataset.image(0)
    path.write_bytes(np.random.default_rng(0).bytes(length))
    for index in range(shards.manifest.shards[0].samples):
        with pytest.raises(BadImage) as caught:
            dataset.image(index)
        assert caught.value.kind == ("magic" if length else "truncated")
    with pytest.raises(DataError, match=rf"train-000000.tar has {length} bytes, not the .* of the manifest"):
        build_dataset(config(copy), "train")


def test_images_smaller_than_the_crop_are_found_in_the_index(finished: Path) -> None:
    with pytest.raises(DataError, match=r"\(40x56\) cannot fill the 42x32 crop .*, and 3 more; lower"):
        build_dataset(config(finished, image_size=[42, 32]), "train")
    dataset = build_dataset(config(finished, image_size=[42, 32], max_bad_percent=17.0), "train")
    assert [bad.kind for bad in dataset.bad.values()] == ["too small"] * 4
    for index, bad in dataset.bad.items():
        with pytest.raises(BadImage) as caught:
            dataset.image(index)
        assert (caught.value.kind, caught.value.name) == (bad.kind, bad.name)
    assert not build_dataset(config(finished, image_size=[42, 32], check="none"), "train").bad


@pytest.mark.parametrize(
    ("error", "said", "values"),
    [
        (DataError, "data.name=shards needs data.root", {"root": None}),
        (DataError, "is not a shard set", {"root": "/absent"}),
        (ConfigError, r"dmjd shards verify .* decode=true", {"check": "decode"}),
        (ConfigError, "set data.channels=3", {"channels": 1}),
    ],
)
def test_what_the_configuration_cannot_have_is_said(
    finished: Path, error: type[Exception], said: str, values: dict[str, Any]
) -> None:
    with pytest.raises(error, match=said):
        build_dataset(replace(config(finished), **values), "train")


def test_a_set_that_is_not_divided_has_no_test_images(finished: Path) -> None:
    with pytest.raises(NoSplit, match="has no val shards, only train"):
        build_dataset(config(finished / "train"), "test")


def test_a_cache_smaller_than_a_shard_is_refused(tmp_path: Path) -> None:
    shard = Shard("http://127.0.0.1:9/a.tar", 1, 1 << 30, "0" * 64)
    save(tmp_path, [shard], np.array([(0, 512, 9, 0, 0, 64, 64)], dtype=INDEX), 3, ("a",), "test")
    with pytest.raises(ConfigError, match=r"data.cache_gib=0.5 must be at least 1, the largest shard"):
        build_dataset(config(tmp_path, cache_gib=0.5), "train")


# Open files


def descriptors() -> set[Path]:
    return {path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()}


def test_files_stay_open_up_to_a_number(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}" for number in range(5)]
    for path in paths:
        path.write_text(path.name * 10)
    files = OpenFiles(capacity=2)
    for _ in range(2):
        for path in paths:
            assert files.read(str(path), 4, 20) == path.name.encode() * 6
    assert descriptors() & set(paths) == set(paths[3:])
    copy = pickle.loads(pickle.dumps(files))
    assert copy.read(str(paths[0]), 0, 3) == b"000"
    assert descriptors() & set(paths) == {*paths[3:], paths[0]}


def test_a_missing_file_leaves_the_others_readable(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    files = OpenFiles(capacity=1)
    assert files.read(str(tmp_path / "a"), 0, 2) == b"ab"
    with pytest.raises(FileNotFoundError):
        files.read(str(tmp_path / "b"), 0, 2)
    assert files.read(str(tmp_path / "a"), 1, 2) == b"bc"


# Memory


class Touch(TorchDataset[tuple[int, int]]):
    """Looks at everything that reading a sample looks at, but for its pixels; (sum of labels, private KiB)."""

    def __init__(self, dataset: ShardDataset, chunk: int) -> None:
        self._dataset, self._chunk = dataset, chunk

    def __getitem__(self, number: int) -> tuple[int, int]:
        labels = 0
        for index in range(number * self._chunk, (number + 1) * self._chunk):
            self._dataset.name(index)
            labels += self._dataset.label(index)
        with open("/proc/self/smaps_rollup") as rollup:
            private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
        return labels, private


def test_a_million_samples_cost_a_worker_nothing(tmp_path: Path) -> None:
    count, chunk = 1_000_000, 10_000
    records = np.zeros(count, dtype=INDEX)
    records["shard"] = np.arange(count) // 1000
    records["label"] = 1
    records["height"] = records["width"] = 64
    shards = [Shard(f"train-{number:06d}.tar", 1000, 1 << 20, f"{number:064x}") for number in range(1000)]
    save(tmp_path, shards, records, 3, ("a", "b"), "test")
    loader = DataLoader(
        Touch(ShardDataset(load(tmp_path), None, (32, 32)), chunk), batch_size=None, sampler=range(100), num_workers=2
    )
    seen = list(loader)
    assert sum(labels for labels, _ in seen) == count
    first, last = (max(private for _, private in part) for part in (seen[2:6], seen[-4:]))
    assert last - first < 3 * 1024  # a Python list of as many paths costs a worker 90 MB (and the records are 28)
