"""Files of embeddings: both formats hold the same, numpy reads one alone, and files of others are never trusted."""

from __future__ import annotations

import io
import json
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dmjd
from dmjd.errors import DataError
from dmjd.explore import embeddings
from dmjd.explore.embeddings import Embeddings, convert, embeddings_at, plain_name, read_embeddings, write_embeddings

N = 9
NAMES = [f"train/Zürich '{number}' </script>.jpg" for number in range(N)]


def made(**changes: Any) -> Embeddings:
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {
        "names": NAMES,
        "ids": np.arange(N),
        "splits": np.array(["train"] * 6 + ["test"] * 3),
        "labels": np.array([0, 1, -1] * 3),
        "classes": ["cat", "dog, black"],
        "features": {"a": rng.standard_normal((N, 5)).astype("f4"), "b": rng.standard_normal((N, 3)).astype("f4")},
        "thumbnails": [rng.bytes(int(size)) for size in rng.integers(0, 40, N)],
        "settings": {"encoders": {"a": {"step": 3}, "b": {}}, "left_out": {}},
    }
    return Embeddings(**{**values, **changes})


def assert_same(one: Embeddings, other: Embeddings) -> None:
    assert one.features.keys() == other.features.keys()
    for key in ("names", "classes", "thumbnails", "settings"):
        assert getattr(one, key) == getattr(other, key), key
    for key in ("ids", "splits", "labels"):
        assert np.array_equal(getattr(one, key), getattr(other, key)), key
    for name in one.features:
        assert other.features[name].dtype == np.float32
        assert np.array_equal(one.features[name], other.features[name])


def in_this_process(file: BinaryIO, target: BinaryIO) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "exit", lambda text: (_ for _ in ()).throw(ValueError(text.removeprefix("wrong: "))))
        convert(file, target)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_convert_in_child", in_this_process)
    bare = made(labels=np.full(N, -1), classes=[], thumbnails=None, features={"a": made().features["a"]}, settings={})
    for number, values in enumerate((made(), bare)):
        path = tmp_path / f"{number}{suffix}"
        write_embeddings(path, values)
        assert_same(values, dmjd.read_embeddings(path))
        write_embeddings(path, values, "float16")
        halves = {name: each.astype("f2").astype("f4") for name, each in values.features.items()}
        assert_same(made(**{**vars(values), "features": halves}), read_embeddings(path))
    assert {path.name for path in tmp_path.iterdir()} == {f"0{suffix}", f"1{suffix}"}


def test_numpy_alone_and_pyarrow_alone_read_every_value(tmp_path: Path) -> None:
    one, two = made(features={"a": made().features["a"]}), made()
    write_embeddings(tmp_path / "one.npz", one)
    write_embeddings(tmp_path / "two.parquet", two)
    with np.load(tmp_path / "one.npz", allow_pickle=False) as file:
        assert np.array_equal(file["features"], one.features["a"])
        assert file["names"].tobytes().decode().splitlines() == one.names
        assert file["splits"].tolist() == one.splits.tolist()
        assert json.loads(file["settings"].tobytes())["encoders"] == one.settings["encoders"]
    table = pq.read_table(tmp_path / "two.parquet")
    assert table.column_names == ["id", "name", "split", "label", "class", "features_0", "features_1", "thumbnail"]
    assert np.array_equal(np.array(table["features_1"].to_pylist(), "f4"), two.features["b"])
    assert table["class"].to_pylist() == ["cat", "dog, black", None] * 3


def test_names_are_one_line_of_text() -> None:
    assert plain_name("a\nb\x1b\x85\u2028\udcff/ü") == "a\\nb\\x1b\\x85\\u2028\\xff/ü"
    assert plain_name("") != ""


def test_the_newest_file_of_a_run_is_found(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"dmjd embed {tmp_path}$"):
        embeddings_at(str(tmp_path))
    (tmp_path / "embeddings/z.npz.parts").mkdir(parents=True)
    for name in ("b.npz", "a.parquet"):
        write_embeddings(tmp_path / "embeddings" / name, made())
    assert embeddings_at(str(tmp_path)) == tmp_path / "embeddings/a.parquet"
    assert embeddings_at("x.npz") == Path("x.npz")


# Files of others


def rejected(path: Path, *parts: str) -> None:
    with pytest.raises(DataError) as caught:
        read_embeddings(path)
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    assert text.isprintable()
    assert str(path) in text
    for part in parts:
        assert part in text, f"{text!r} lacks {part!r}"


def rewritten(change: Callable[[dict[str, bytes]], object]) -> bytes:
    """An archive with changed entries."""
    file, made_file = io.BytesIO(), io.BytesIO()
    arrays = {"features": made().features["a"], "ids": np.arange(N), "splits": made().splits, "labels": made().labels}
    arrays |= {"names": np.frombuffer("".join(f"{name}\n" for name in NAMES).encode(), "u1")}
    arrays |= {"classes": np.frombuffer(b"cat\ndog\n", "u1"), "settings": np.frombuffer(b'{"features": ["a"]}', "u1")}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(made_file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return made_file.getvalue()


def npy(array: Any, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def text(content: str) -> bytes:
    return npy(np.frombuffer(content.encode(errors="surrogatepass"), "u1"))


def test_a_plain_archive_of_numpy_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.npz").write_bytes(rewritten(lambda entries: None))
    assert_same(made(features={"a": made().features["a"]}, classes=["cat", "dog"], thumbnails=None, settings={}),
                read_embeddings(tmp_path / "own.npz"))  # fmt: skip


def huge(content: bytes, old: bytes, new: bytes) -> bytes:
    """A header that declares another shape, of the same length."""
    assert old in content
    return content.replace(old + b" " * (len(new) - len(old)), new)


NPZ: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "object array": (lambda e: e.update({"ids.npy": npy(np.array([{}] * N), True)}), "ids: it is not a one"),
    "object names": (lambda e: e.update({"names.npy": npy(np.array(NAMES, object), True)}), "names: "),
    "10^9 rows": (
        lambda e: e.update({"features.npy": huge(e["features.npy"], b"(9, 5), }", b"(1000000000, 5), }")}),
        "features: it has 180 bytes for a shape of [1000000000, 5]",
    ),
    "another order": (lambda e: e.update({"features.npy": npy(np.asfortranarray(made().features["a"]))}), "features: "),
    "wrong shape": (lambda e: e.update({"features.npy": npy(np.zeros(9, "f4"))}), "not a two-dimensional array"),
    "no dimensions": (lambda e: e.update({"features.npy": npy(np.zeros((9, 0), "f4"))}), "no dimensions"),
    "fewer rows": (lambda e: e.update({"features.npy": npy(np.zeros((8, 5), "f4"))}), "9 names and 8 features of 'a'"),
    "NaN": (lambda e: e.update({"features.npy": npy(np.full((9, 5), np.nan, "f4"))}), "'a' hold NaN or infinity"),
    "missing": (lambda e: e.pop("labels.npy"), "it has no labels"),
    "unknown": (lambda e: e.update({"x\n\x1b.npy": npy(np.zeros(1))}), "an array of an unknown name"),
    "label": (lambda e: e.update({"labels.npy": npy(np.full(9, 2))}), "labels are from 2 to 2, and it has 2 classes"),
    "negative label": (lambda e: e.update({"labels.npy": npy(np.full(9, -2))}), "labels are from -2"),
    "split": (lambda e: e.update({"splits.npy": npy(np.array(["valid"] * N))}), "neither train nor test"),
    "newline": (lambda e: e.update({"names.npy": text("\n".join("a" * 10) + "\n")}), "10 names and 9 ids"),
    "control": (lambda e: e.update({"names.npy": text("a\x1b[2J\n" * 9)}), "'a\\x1b[2J' is not a name"),
    "empty": (lambda e: e.update({"names.npy": text("\n" * 9)}), "'' is not a name"),
    "not UTF-8": (lambda e: e.update({"names.npy": text("\udcff\n" * 9)}), "decode"),
    "cut names": (lambda e: e.update({"names.npy": text("a\n" * 8 + "b")}), "cut off"),
    "settings": (lambda e: e.update({"settings.npy": text("[" * 100_000)}), "nested too deeply"),
    "encoders": (lambda e: e.update({"settings.npy": text('{"features": ["a", "b"]}')}), "name 2 encoders"),
    "encoder's name": (lambda e: e.update({"settings.npy": text('{"features": [{}]}')}), "do not name its encoders"),
    "negative size": (
        lambda e: e.update({"thumbnails.npy": text(""), "thumbnail_sizes.npy": npy(np.array([-5, 5] + [0] * 7))}),
        "thumbnails do not add up",
    ),
    "overflow": (
        lambda e: e.update({"thumbnails.npy": text(""), "thumbnail_sizes.npy": npy(np.array([2**62] * 4 + [0] * 5))}),
        "thumbnails do not add up",
    ),
    "no images": (lambda e: e.update({key: npy(np.load(io.BytesIO(e[key]))[:0]) for key in e if key[0] in "finl"}
                                     | {"splits.npy": npy(made().splits[:0])}), "no images"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NPZ)
def test_a_wrong_archive_is_one_line(tmp_path: Path, kind: str) -> None:
    change, part = NPZ[kind]
    path = tmp_path / "wrong.npz"
    path.write_bytes(rewritten(change))
    rejected(path, part)


def test_archives_that_expand_are_rejected_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("features.npy", bytes(1 << 26))
    rejected(path, "declares more content, or is compressed")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("features.npy", npy(made().features["a"]))
        archive.writestr("pad", bytes(random.Random(0).randbytes(500)))
    rejected(path, "features: it is compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("features.npy", npy(made().features["a"]))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("features.npy", npy(made().features["a"]))
    rejected(path, "an array twice")
    rejected(tmp_path / "none.npz", "No such file", "dmjd embed RUN")
    rejected(tmp_path, "Is a directory")


def table(change: Callable[[pa.Table], pa.Table], path: Path, **options: Any) -> None:
    write_embeddings(path, made())
    pq.write_table(change(pq.read_table(path)), path, **{"compression": "none", "use_dictionary": False, **options})


def column(name: str, values: Any, kind: Any = None) -> Callable[[pa.Table], pa.Table]:
    def change(before: pa.Table) -> pa.Table:
        return before.set_column(before.column_names.index(name), name, pa.array(values, kind))

    return change


WIDE = pa.list_(pa.float32(), 10**6)
PARQUET: dict[str, tuple[Callable[[pa.Table], pa.Table], dict[str, Any], str]] = {
    "compressed": (lambda before: before, {"compression": "snappy"}, "is compressed"),
    "dictionary": (lambda before: before, {"use_dictionary": True}, "is compressed"),
    "10^6 dimensions": (column("features_0", [None] * N, WIDE), {}, "declares 9 rows of 40000"),
    "another type": (column("features_0", [[1.0]] * N), {}, "is of type list<"),
    "nulls": (column("features_0", [None] * N, pa.list_(pa.float32(), 5)), {}, "with 9 nulls"),
    "null": (column("features_0", [[None] * 5] * N, pa.list_(pa.float32(), 5)), {}, "is not a file of embeddings"),
    "NaN": (column("features_0", [[np.nan] * 5] * N, pa.list_(pa.float32(), 5)), {}, "hold NaN"),
    "newline": (column("name", ["a\nb"] * N), {}, "18 names and 9 ids"),
    "missing": (lambda before: before.drop_columns(["label"]), {}, "its columns are 'id', 'name', 'split', 'class'"),
    "no settings": (lambda before: before.replace_schema_metadata({}), {}, "do not name its encoders"),
    "no rows": (lambda before: before.slice(0, 0), {}, "no images"),
}


@pytest.mark.parametrize("kind", PARQUET)
def test_a_wrong_table_is_one_line(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_convert_in_child", in_this_process)
    change, options, part = PARQUET[kind]
    path = tmp_path / "wrong.parquet"
    table(change, path, **options)
    rejected(path, part)


def test_cut_and_changed_archives_are_one_line_or_hold_valid_values(tmp_path: Path) -> None:
    path, chance = tmp_path / "file.npz", random.Random(0)
    write_embeddings(path, made())
    whole = path.read_bytes()
    for length in chance.sample(range(len(whole)), 60):
        path.write_bytes(whole[:length])
        rejected(path)
    for _ in range(300):
        changed = bytearray(whole)
        for place in chance.sample(range(len(whole)), chance.choice([1, 3])):
            changed[place] = chance.randrange(256)
        path.write_bytes(changed)
        try:
            found = read_embeddings(path)
        except DataError:
            rejected(path)
        else:
            assert len(found) == N
            assert all(np.isfinite(values).all() for values in found.features.values())


def test_damaged_tables_are_one_line_even_where_pyarrow_aborts(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    write_embeddings(path, made())
    whole = path.read_bytes()
    assert_same(made(), read_embeddings(path))
    path.write_bytes(whole[:-20])
    rejected(path)
    # The codec of the first column in the footer: 0 is none, and pyarrow 26 aborts the process for 120.
    before, after = b"\x19\x18\x02id\x15\x00", b"\x19\x18\x02id\x15\xf0\x01"
    assert whole.count(before) == 1
    length = int.from_bytes(whole[-8:-4], "little") + 1
    path.write_bytes(whole.replace(before, after)[:-8] + length.to_bytes(4, "little") + whole[-4:])
    rejected(path, "it is damaged")
