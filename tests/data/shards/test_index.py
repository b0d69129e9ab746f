from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmjd.data.shards.index import INDEX, MANIFEST, RECORDS, Shard, load, load_splits, save
from dmjd.errors import DataError

ZEROS, ONES, TWOS = "0" * 64, "1" * 64, "2" * 64
SHARDS = [Shard("a.tar", 2, 100, ZEROS), Shard("b.tar", 1, 80, ONES)]
ROWS = [(0, 10, 20, 1, 7, 4, 5), (0, 40, 60, 0, 8, 4, 5), (1, 0, 80, -1, 9, 65535, 1)]


def saved(folder: Path, rows: Sequence[tuple[int, ...]] = ROWS, shards: Sequence[Shard] = SHARDS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, shards, np.array(rows, dtype=INDEX), channels=3, classes=("ant", "bee"), source="a test")
    return folder


def edit(folder: Path, **fields: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **fields}))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    shards = load(saved(tmp_path))
    assert shards.records.tolist() == ROWS
    assert shards.manifest.shards == tuple(SHARDS)
    assert (shards.manifest.samples, shards.manifest.channels, shards.manifest.classes) == (3, 3, ("ant", "bee"))
    assert shards.location(1) == str(tmp_path / "b.tar")
    assert shards.name(1) == "a.tar@40"


def test_records_stay_on_the_disk(tmp_path: Path) -> None:
    records = load(saved(tmp_path)).records
    assert isinstance(records, np.memmap)
    assert not records.flags.writeable


def test_a_record_has_28_bytes() -> None:
    assert INDEX.itemsize == 28
    assert INDEX.names == ("shard", "offset", "size", "label", "crc32", "height", "width")


def test_a_url_serves_as_a_folder(tmp_path: Path) -> None:
    shards = load(f"file://{saved(tmp_path)}")
    assert shards.records.tolist() == ROWS
    assert shards.location(0) == f"file://{tmp_path}/a.tar"


@pytest.mark.parametrize("url", ["/elsewhere/a.tar", "s3://bucket/a.tar", "https://host/x/a.tar"])
def test_a_tar_elsewhere_keeps_its_place(tmp_path: Path, url: str) -> None:
    saved(tmp_path, shards=[Shard(url, 2, 100, ZEROS), SHARDS[1]])
    assert load(tmp_path).location(0) == url


def test_splits_are_folders_or_the_root(tmp_path: Path) -> None:
    saved(tmp_path / "both" / "train")
    saved(tmp_path / "both" / "val", ROWS[:2], SHARDS[:1])
    saved(tmp_path / "one")
    both, one = load_splits(tmp_path / "both"), load_splits(tmp_path / "one")
    assert {split: len(shards.records) for split, shards in both.items()} == {"train": 3, "val": 2}
    assert {split: len(shards.records) for split, shards in one.items()} == {"train": 3}
    with pytest.raises(DataError, match=r"is not a shard set: it has no manifest.json; make one with"):
        load_splits(tmp_path)


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    fingerprint = load(saved(tmp_path / "a")).manifest.fingerprint
    moved = [Shard(f"s3://bucket/{shard.url}", shard.samples, shard.bytes, shard.sha256) for shard in SHARDS]
    assert load(saved(tmp_path / "b", shards=moved)).manifest.fingerprint == fingerprint
    other = [SHARDS[0], Shard("b.tar", 1, 80, TWOS)]
    assert load(saved(tmp_path / "c", shards=other)).manifest.fingerprint != fingerprint
    assert load(saved(tmp_path / "d", [*ROWS[:2], (1, 0, 79, -1, 9, 8, 8)])).manifest.fingerprint != fingerprint


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"format": 2}, "has format 2, and this dmjd reads format 1"),
        ({"samples": 4}, "has samples=4, but its shards have 3"),
        ({"index_sha256": TWOS}, "is not the index of"),
        ({"shards": [{"url": "a.tar"}]}, "lacks or has too many fields"),
        ({"colour": "blue"}, "lacks or has too many fields"),
        ({"channels": 2}, "has channels=2, which must be 1 or 3"),
        ({"classes": ["ant"]}, "has 1 classes, but its index has labels -1 to 1"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    edit(saved(tmp_path), **fields)
    with pytest.raises(DataError, match=sentence):
        load(tmp_path)


@pytest.mark.parametrize(
    ("shards", "sentence"),
    [
        ([Shard("a.tar", 1, 100, ZEROS), Shard("b.tar", 2, 80, ONES)], "has samples=1 for a.tar, but its index has 2"),
        ([Shard("a.tar", 2, 99, ZEROS), SHARDS[1]], "has sample 1 beyond the 99 bytes of a.tar"),
        (
            [Shard("a.tar", 3, 100, ZEROS)],
            "has 1 shards, but its index has shard number 1",
        ),
    ],
)
def test_shards_that_do_not_fit_are_refused(tmp_path: Path, shards: list[Shard], sentence: str) -> None:
    saved(tmp_path)
    edit(tmp_path, shards=[vars(shard) for shard in shards])
    with pytest.raises(DataError, match=sentence):
        load(tmp_path)


ODD: tuple[Any, ...] = (None, -1, "x", [], {}, True, 1.5, [1, 2], {"a": 1}, 10**30)


def test_a_manifest_that_was_edited_is_refused_in_a_sentence_or_still_fits(tmp_path: Path) -> None:
    saved(tmp_path)
    whole = json.loads((tmp_path / MANIFEST).read_text())
    variants: list[Any] = list(ODD)
    for value in ODD:
        variants += [{**whole, key: value} for key in whole]
        first, second = whole["shards"]
        variants += [{**whole, "shards": [{**first, key: value}, second]} for key in first]
    fitting = 0
    for variant in variants:
        (tmp_path / MANIFEST).write_text(json.dumps(variant))
        try:
            shards = load(tmp_path)
        except DataError:
            continue
        fitting += 1  # another text in the place of a text
        assert shards.location(0).startswith(str(tmp_path))
        assert len(shards.manifest.fingerprint) == 64
    assert fitting <= 6


def test_an_index_out_of_order_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not sorted by shard"):
        saved(tmp_path, [ROWS[0], ROWS[2], ROWS[1]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [MANIFEST, RECORDS])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path) / name
    content = path.read_bytes()
    for cut in range(len(content.rstrip())):
        path.write_bytes(content[:cut])
        with pytest.raises(DataError):
            load(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"no {MANIFEST}" if name == MANIFEST else f"{RECORDS} is missing"):
        load(tmp_path)


def test_a_tar_in_place_of_a_folder_is_no_shard_set(tmp_path: Path) -> None:
    (tmp_path / "train-000000.tar").write_bytes(b"a tar")
    with pytest.raises(DataError, match=r"train-000000.tar is not a shard set.*dmjd shards build"):
        load_splits(tmp_path / "train-000000.tar")


@pytest.mark.parametrize("name", [MANIFEST, RECORDS])
def test_a_file_that_the_disk_does_not_give_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (saved(tmp_path) / name).unlink()
    (tmp_path / name).mkdir()  # as good as one without permission, which root would have
    with pytest.raises(DataError, match=rf"{name} cannot be read \(Is a directory\)"):
        load_splits(tmp_path)


def test_the_index_of_another_set_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    saved(tmp_path / "b", [*ROWS[:2], (1, 0, 79, -1, 9, 8, 8)])
    shutil.copy(tmp_path / "b" / RECORDS, tmp_path / "a" / RECORDS)
    with pytest.raises(DataError, match="restore both"):
        load(tmp_path / "a")


def test_a_build_is_loaded(finished: Path, photo: Callable[..., bytes]) -> None:
    shards = load(finished / "train")
    first, last = shards.records[0], shards.records[-1]
    for record, number, label in ((first, 0, 0), (last, 11, 1)):
        with open(shards.location(int(record["shard"])), "rb") as file:
            file.seek(int(record["offset"]))
            assert file.read(int(record["size"])) == photo(number, size=(40 + number, 56 - number))
        assert (record["label"], record["height"], record["width"]) == (label, 40 + number, 56 - number)
