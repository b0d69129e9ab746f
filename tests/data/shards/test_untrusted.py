"""Shard sets, sources and caches that somebody else made: one error of a line, and nothing is touched outside."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmjd.config import DataConfig
from dmjd.data.build import build_dataset
from dmjd.data.shards.build import RECIPE, build
from dmjd.data.shards.cache import ShardCache
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.shards.encode import measure
from dmjd.data.shards.in_place import index_tars
from dmjd.data.shards.index import INDEX, MANIFEST, RECORDS, load, load_splits
from dmjd.data.shards.network import Patience
from dmjd.data.shards.part import REJECTS
from dmjd.data.stream.tars import tar_images
from dmjd.errors import BadImage, DataError
from tests.data.shards.http_server import SIZE, Server
from tests.data.shards.test_remote import QUICK, shard

Photo = Callable[..., bytes]
ROW = (0, 512, 100, 1, 7, 40, 56)
SHARD = {"url": "a.tar", "samples": 1, "bytes": 10240, "sha256": "0" * 64}
OTHER_USER = 12345


def npy(array: np.ndarray[Any, Any], **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def forge(folder: Path, index: bytes | None = None, **fields: Any) -> Path:
    """A set with this index, whose digests agree."""
    folder.mkdir(parents=True, exist_ok=True)
    index = npy(np.array([ROW], dtype=INDEX)) if index is None else index
    (folder / RECORDS).write_bytes(index)
    manifest = {
        **{"format": 1, "shards": [SHARD], "samples": 1, "channels": 3, "classes": ["ant", "bee"]},
        **{"index_sha256": hashlib.sha256(index).hexdigest(), "source": "a test", "dmjd": "0.1.0"},
    }
    (folder / MANIFEST).write_text(json.dumps({**manifest, **fields}))
    return folder


def fault(folder: Path | str, most: int = 16 << 20) -> str:
    """The error of loading it, which takes at most so many bytes of memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            load(folder, QUICK)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_a_forged_set_is_one_that_loads(tmp_path: Path) -> None:
    assert load(forge(tmp_path)).records.tolist() == [ROW]


# The index


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((4_000_000_000, 512, 100, 1, 7, 40, 56), "lists 1 shards, and its index has one of number 4000000000"),
        ((0, 2**63 - 10, 100, 1, 7, 40, 56), "end beyond the 10240 bytes"),
        ((0, -1, 100, 1, 7, 40, 56), "end beyond"),
        ((0, 10_141, 100, 1, 7, 40, 56), "end beyond"),
        ((0, 0, 2**32 - 1, 1, 7, 40, 56), "end beyond"),
        ((0, 512, 100, 2, 7, 40, 56), "labels 2 to 2"),
        ((0, 512, 100, -2, 7, 40, 56), "labels -2 to -2"),
        ((0, 512, 100, 1, 7, 0, 56), "without pixels"),
    ],
)
def test_a_row_of_an_index_that_cannot_be(tmp_path: Path, row: tuple[int, ...], said: str) -> None:
    assert said in fault(forge(tmp_path, npy(np.array([row], dtype=INDEX))))


ROWS = np.array([ROW], dtype=INDEX)
HEADER = f"{{'descr': {np.lib.format.dtype_to_descr(INDEX)!r}, 'fortran_order': False, 'shape': (1,), }}"


def npy_of(header: str, content: bytes = ROWS.tobytes(), version: bytes = b"\1\0") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + content


@pytest.mark.parametrize(
    "index",
    [
        npy(np.array([{"a": 1}], dtype=object), allow_pickle=True),
        npy(np.array([ROW], dtype=[*INDEX.descr[:-1], ("width", "O")]), allow_pickle=True),
        npy(np.zeros(28)),
        npy(ROWS.reshape(1, 1)),
        npy(ROWS[0]),
        npy(np.asfortranarray(np.zeros((2, 2), INDEX))),
        npy(np.array([ROW], dtype=INDEX.newbyteorder(">"))),
        npy_of(HEADER, version=b"\2\0"),
        npy_of(HEADER.replace("(1,)", "(4000000000000000,)")),
        npy_of(HEADER.replace("(1,)", "(-1,)")),
        npy_of(HEADER.replace("(1,)", "(__import__('os').system('true'),)")),
        npy_of(HEADER, ROWS.tobytes()[:-1]),
        npy_of(HEADER, ROWS.tobytes() + b"\0"),
        npy_of(HEADER + " " * 60_000),
        npy_of("[" * 4000),
        b"\x93NUMPY\1\0\xff\xff",
        b"\x93NUMPY",
        b"PK\3\4",
        b"",
    ],
    ids=range(19),
)
def test_an_index_of_another_kind_is_neither_read_nor_mapped(tmp_path: Path, index: bytes) -> None:
    assert "index.npy is no index that this dmjd reads: " in fault(forge(tmp_path, index))


# The manifest


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format": NaN}',
        b'{"format": 1e400}',
        b'{"format": ' + b"9" * 5000 + b"}",
        b'{"format": 1, "shards": 1e999999999}',
        b"\xff\xfe{}",
        b'{"format": 1',
        b'{"format": 9, "format": 1}',
        b'"format"',
        b"null",
        b"",
        b"\0" * 1000,
    ],
    ids=range(13),
)
def test_a_manifest_that_is_none(tmp_path: Path, content: bytes) -> None:
    (forge(tmp_path) / MANIFEST).write_bytes(content)
    assert fault(tmp_path).startswith(f"{tmp_path}/{MANIFEST} ")


@pytest.mark.parametrize("size", [65 << 20, 1 << 40])
def test_a_manifest_without_end_is_read_to_a_limit(tmp_path: Path, size: int) -> None:
    os.truncate(forge(tmp_path) / MANIFEST, size)
    with pytest.raises(DataError, match="more than the limit of 67108864"):
        load(tmp_path)


ODD: tuple[Any, ...] = (None, True, -1, 0.5, float("nan"), 2**63, 10**400, "x\ny", [], {}, [[]], [None], "x" * 5000)


@pytest.mark.parametrize("key", ["format", "shards", "samples", "channels", "classes", "index_sha256"])
def test_a_value_of_a_manifest_that_cannot_be(tmp_path: Path, key: str) -> None:
    for value in ODD:
        assert MANIFEST in fault(forge(tmp_path, **{key: value})), value


@pytest.mark.parametrize("key", SHARD)
def test_a_value_of_a_shard_that_cannot_be(tmp_path: Path, key: str) -> None:
    for value in (*ODD, 0):
        assert MANIFEST in fault(forge(tmp_path, shards=[{**SHARD, key: value}])), value


@pytest.mark.parametrize("text", ["\x1b[31mx", "x\ny", "\x9b", "\0"])
def test_a_text_that_would_disturb_a_terminal(tmp_path: Path, text: str) -> None:
    for fields in ({"classes": ["ant", text]}, {"source": text}, {"dmjd": text}):
        assert "which must have no control characters" in fault(forge(tmp_path, **fields))


@pytest.mark.parametrize("key", ["format", "samples", "channels"])
@pytest.mark.parametrize("value", ["1.0", "1e0", '"1"', "true", "NaN", "Infinity", "-1", "1" * 4400])
def test_a_number_of_another_type(tmp_path: Path, key: str, value: str) -> None:
    path = forge(tmp_path, channels=1) / MANIFEST
    path.write_text(path.read_text().replace(f'"{key}": 1', f'"{key}": {value}', 1))
    assert MANIFEST in fault(tmp_path)


NAMES = (
    *("../a.tar", "a/../../b.tar", "..", ".", "a/", "a//b", "", "-rf", "a\0b", "a\nb", "a\x1b[31mb", "a\\b"),
    *("C:a.tar", "/../etc/passwd", "//host/share", "x" * 300, "x" * 5000),
    *("pipe:rm -rf x", "a::file://b", "filecache://x", "simplecache::http://x/y", "local:///etc/passwd", "data://x/y"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_shard_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    if name == "pipe:rm -rf x":
        assert load(forge(tmp_path, shards=[{**SHARD, "url": name}])).location(0) == f"{tmp_path}/{name}", "a file"
        return
    assert "which must be" in fault(forge(tmp_path, shards=[{**SHARD, "url": name}]))


@pytest.mark.parametrize(
    "digest", ["../victim", "/etc/passwd", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 63 + "\n", "٣" * 64]
)
def test_a_digest_that_is_none(tmp_path: Path, digest: str) -> None:
    assert "64 hexadecimal digits" in fault(forge(tmp_path, shards=[{**SHARD, "sha256": digest}]))
    assert "64 hexadecimal digits" in fault(forge(tmp_path, index_sha256=digest))


def test_counts_that_disagree_and_names_given_twice(tmp_path: Path) -> None:
    twice = [SHARD, {**SHARD, "sha256": "1" * 64}]
    assert "lists 2 shards under 1 names" in fault(forge(tmp_path, shards=twice, samples=2))
    assert "counts 7 samples, and its shards 1" in fault(forge(tmp_path, samples=7))
    wrong = [{**SHARD, "samples": 7}]
    assert "counts 7 samples, and its index 1" in fault(forge(tmp_path, shards=wrong, samples=7))
    many = [{**SHARD, "url": f"{number}.tar", "samples": 0} for number in range(100_000)]
    with pytest.raises(DataError, match="counts 1 samples, and its shards 0"):
        load(forge(tmp_path, shards=many))


def test_a_key_given_twice_is_not_one_of_the_two(tmp_path: Path) -> None:
    path = forge(tmp_path) / MANIFEST
    path.write_text(path.read_text().replace('"samples": 1', '"samples": 9, "samples": 1', 1))
    assert "an object has a key twice" in fault(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, RECORDS])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    (forge(tmp_path) / name).unlink()
    os.mkfifo(tmp_path / name)
    assert "cannot be read (a named pipe)" in fault(tmp_path)


def test_a_tar_that_is_a_pipe_is_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    shards = load(forge(tmp_path))
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(BadImage, match="a named pipe"):
        ShardDataset(shards, None).read(0)


# Servers


@pytest.mark.parametrize("digest", ["../victim", "x/../../victim"])
def test_a_digest_from_a_server_leaves_files_beside_the_cache_alone(
    server: Server, tmp_path: Path, digest: str
) -> None:
    server.root = forge(tmp_path / "set", shards=[{**SHARD, "sha256": digest}])
    victims = [tmp_path / "victim.tar", tmp_path / "victim.part"]
    for victim in victims:
        victim.write_text("precious")
    config = DataConfig(name="shards", root=server.url("")[:-1], image_size=[32, 32], cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="64 hexadecimal digits"):
        build_dataset(config, "train")
    assert [victim.read_text() for victim in victims] == ["precious"] * 2


@pytest.mark.parametrize("name", ["/etc/passwd", "file:///etc/passwd", "local:///etc/passwd", "../../x.tar"])
def test_a_manifest_behind_a_url_names_no_file_of_this_computer(server: Server, tmp_path: Path, name: str) -> None:
    server.root = forge(tmp_path, shards=[{**SHARD, "url": name}])
    assert "which must be" in fault(server.url("")[:-1])


@pytest.mark.parametrize("how", ["endless", "endless headers", "trickle", "trickle headers"])
def test_a_server_that_never_ends_is_left(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("dmjd.data.shards.index.JSON_BYTES", 1 << 20)
    monkeypatch.setattr("dmjd.data.shards.network._SLOWEST", 1 << 20)
    server.root = forge(tmp_path)
    server.faults = [how] * 9
    with pytest.raises(DataError, match=r"manifest\.json (cannot be fetched|has more than the 1048576 bytes)"):
        load(server.url("")[:-1], Patience(attempts=1, stall=0.5))


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x", "gopher://127.0.0.1/x"])
def test_a_redirect_to_another_protocol_is_not_followed(server: Server, tmp_path: Path, target: str) -> None:
    server.root = forge(tmp_path)
    server.faults = [f"redirect {target}"] * 9
    with pytest.raises(DataError, match=r"manifest\.json cannot be fetched"):
        load(server.url("")[:-1], QUICK)


def test_a_manifest_that_unpacks_to_more_is_left_at_the_limit(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmjd.data.shards.index.JSON_BYTES", 1 << 20)
    server.root = forge(tmp_path)
    (tmp_path / MANIFEST).write_bytes(gzip.compress(bytes(1 << 30), 1))
    server.faults = ["gzip"] * 9
    assert "more than the 1048576 bytes" in fault(server.url("")[:-1], 64 << 20), "aiohttp unpacks it in pieces"


RESPONSES = {
    "negative": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc",
    "beyond 64 bits": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nabc",
    "no number": b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\nabc",
    "2**62": b"HTTP/1.1 200 OK\r\nContent-Length: 4611686018427387904\r\n\r\nabc",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\nabc",
    "a long header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    "an empty range": b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 5-1/0\r\n\r\n",
    "no HTTP": b"\0\xff\r\n\r\n",
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_that_is_none(server: Server, tmp_path: Path, name: str) -> None:
    server.root = forge(tmp_path)
    server.faults = [f"raw {RESPONSES[name].decode('latin1')}"] * 9
    assert MANIFEST in fault(server.url("")[:-1])


# The cache


def planted(cache: Path, name: str, content: bytes) -> Path:
    cache.mkdir(exist_ok=True)
    path = cache / f"{shard(name).sha256}.tar"
    path.write_bytes(content)
    return path


def test_a_file_of_the_right_name_and_size_is_compared_with_its_name(server: Server, tmp_path: Path) -> None:
    planted(tmp_path / "cache", "a", bytes(SIZE))
    cache = ShardCache(tmp_path / "cache", 9 * SIZE, QUICK)
    data = cache.read(server.url("a"), shard("a"), 0, SIZE)
    assert hashlib.sha256(data).hexdigest() == shard("a").sha256
    assert server.requests["a"] == 1


def test_a_whole_file_that_was_left_here_is_taken(server: Server, tmp_path: Path) -> None:
    ShardCache(tmp_path, 9 * SIZE, QUICK).fetch(server.url("a"), shard("a"))
    for stamp in tmp_path.glob("*.stamp"):
        stamp.unlink()
    ShardCache(tmp_path, 9 * SIZE, QUICK).fetch(server.url("a"), shard("a"))
    assert server.requests["a"] == 1


@pytest.mark.parametrize("same_process", [True, False])
def test_a_file_that_changes_after_it_was_checked_is_fetched_again(
    server: Server, tmp_path: Path, same_process: bool
) -> None:
    """With its size and its time of change set as they were."""
    cache = ShardCache(tmp_path, 9 * SIZE, QUICK)
    whole = cache.read(server.url("a"), shard("a"), 0, SIZE)
    (path,) = tmp_path.glob("*.tar")
    times = path.stat()
    path.write_bytes(whole[:-1] + b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    cache = cache if same_process else ShardCache(tmp_path, 9 * SIZE, QUICK)
    assert cache.read(server.url("a"), shard("a"), 0, SIZE) == whole


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can give files away")
@pytest.mark.parametrize(("owner", "mode"), [(OTHER_USER, 0o600), (0, 0o622)])
def test_a_stamp_that_others_could_write_proves_nothing(server: Server, tmp_path: Path, owner: int, mode: int) -> None:
    ShardCache(tmp_path, 9 * SIZE, QUICK).fetch(server.url("a"), shard("a"))
    (tar,), (stamp,) = tmp_path.glob("*.tar"), tmp_path.glob("*.stamp")
    tar.write_bytes(bytes(SIZE))
    status = tar.stat()
    identity = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    stamp.write_text(f"{shard('a').sha256} {identity}")
    stamp.chmod(mode)
    os.chown(stamp, owner, -1)
    data = ShardCache(tmp_path, 9 * SIZE, QUICK).read(server.url("a"), shard("a"), 0, SIZE)
    assert hashlib.sha256(data).hexdigest() == shard("a").sha256


@pytest.mark.parametrize("name", ["part", "tar"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_the_cache_overwrites_and_waits_for_nothing(
    server: Server, tmp_path: Path, name: str, kind: str
) -> None:
    victim, cache = tmp_path / "victim", tmp_path / "cache"
    victim.write_text("precious")
    cache.mkdir()
    place = cache / f"{shard('a').sha256}.{name}"
    place.symlink_to(victim) if kind == "link" else os.mkfifo(place)
    data = ShardCache(cache, 9 * SIZE, QUICK).read(server.url("a"), shard("a"), 0, SIZE)
    assert hashlib.sha256(data).hexdigest() == shard("a").sha256
    assert victim.read_text() == "precious"


def test_damage_of_the_cache_is_mended_and_the_set_is_not_blamed(
    server: Server, finished: Path, tmp_path: Path
) -> None:
    """A crash of the machine left other bytes under an inode that did not change, as far as its stamp says."""
    server.root = finished
    config = DataConfig(name="shards", root=server.url("")[:-1], image_size=[32, 32], cache=str(tmp_path))
    dataset = build_dataset(config, "train")
    assert isinstance(dataset, ShardDataset)
    expected = [dataset.read(index) for index in range(len(dataset))]
    for tar in tmp_path.glob("*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))
        status = tar.stat()
        identity = f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        (stamp,) = tmp_path.glob(f"{tar.stem}.*.stamp")
        stamp.write_text(f"{tar.stem} {identity}")
    again = build_dataset(config, "train")
    assert isinstance(again, ShardDataset)
    assert [again.read(index) for index in range(len(again))] == expected


def test_the_default_cache_is_not_one_that_somebody_else_made(
    server: Server, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trap = tmp_path / f"dmjd-shards-{os.geteuid()}"
    trap.mkdir()
    trap.chmod(0o777)
    server.root = finished
    for each in load_splits(finished)["train"].manifest.shards:
        (trap / f"{each.sha256}.tar").write_bytes(bytes(each.bytes))
    dataset = build_dataset(DataConfig(name="shards", root=server.url("")[:-1], image_size=[32, 32]), "train")
    assert isinstance(dataset, ShardDataset)
    for index in range(len(dataset)):
        dataset.read(index)
    own = tmp_path / f"dmjd-shards-{os.geteuid()}-1"
    assert own.stat().st_mode & 0o777 == 0o700
    assert len(list(own.glob("*.tar"))) > 3
    assert f"{trap} is not used, since other users can write to it; remove it. {own} is used instead" in caplog.text


# Sources and builds


def tar_with(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for info, content in members:
            info.size = info.size or len(content)
            tar.addfile(info, io.BytesIO(content + bytes(info.size - len(content))))
    return path


def header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


HEADERS = {
    "a size without end": header("a.jpg", (1 << 62) - 1) + bytes(4096),
    "a size beyond the file": header("a.jpg", 1 << 40) + bytes(4096),
    "a negative size": header("a.jpg", -512) + bytes(4096),
    "headers in headers": (header("././@LongLink", 1)[:156] + b"L" + header("././@LongLink", 1)[157:]) * 3000,
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_tar_with_an_odd_header_is_one_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.tar").write_bytes(HEADERS[name])
    for make in (
        lambda: build(str(tmp_path / "a.tar"), str(tmp_path / "built"), workers=1),
        lambda: index_tars([str(tmp_path / "a.tar")], str(tmp_path / "index"), workers=1),
    ):
        with pytest.raises(DataError) as caught:
            make()
        assert "\n" not in str(caught.value)
    with pytest.raises(BadImage):
        list(tar_images(str(tmp_path / "a.tar"), 1.0))


@pytest.mark.parametrize("name", ["a\x1b[31mb", "c\nd", "e\rf", "g\x9bh", "i\tj"])
def test_an_error_about_a_member_disturbs_no_terminal(tmp_path: Path, name: str) -> None:
    tar_with(tmp_path / "a.tar", (tarfile.TarInfo(f"{name}.jpg"), b"no image"))
    with pytest.raises(DataError) as caught:
        build(str(tmp_path / "a.tar"), str(tmp_path / "built"), workers=1)
    assert "\n" in name or str(caught.value).isprintable()
    with pytest.raises(BadImage) as bad:
        measure(f"{name}.jpg", b"no image")
    assert str(bad.value).isprintable()
    assert bad.value.name == f"{name}.jpg", "as lists of bad images have it"


def test_members_that_would_fill_the_memory_are_not_read(
    photo: Photo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1 << 20
    for module in ("sources", "index"):
        monkeypatch.setattr(f"dmjd.data.shards.{module}.MOST_IMAGE_BYTES", most)
    monkeypatch.setattr("dmjd.data.stream.tars.MOST_IMAGE_BYTES", most)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, size in (("a.jpg", 40 << 20), ("b.jpg", 0), ("b.cls", 40 << 20), ("c.jpg", 0)):
            info = tarfile.TarInfo(name)
            content = photo() if not size else bytes(size)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    tracemalloc.start()
    (saved,) = build(str(tmp_path / "a.tar"), str(tmp_path / "built"), workers=1)
    with pytest.raises(BadImage, match="has a member of 41943040 bytes, more than 1048576"):
        list(tar_images(str(tmp_path / "a.tar"), 1.0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (saved.samples, dict(saved.rejects)) == (1, {"too large": 1, "label": 1})
    assert peak < 20 << 20


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"images": [{"file_name": "../../secret.jpg"}]}',
        b'{"images": [{"file_name": "SECRET"}]}',
        b'{"images": [{"file_name": 7}]}',
        b'{"images": [{"file_name": "a\\u0000"}]}',
        b'{"images": {"a": 1}}',
        b'{"images": 7}',
        b"[]",
        b"\xff",
    ],
    ids=range(9),
)
def test_annotations_name_no_file_outside_their_folder(photo: Photo, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret.jpg").write_bytes(photo())
    for folder in ("annotations", "train2017"):
        (tmp_path / "coco" / folder).mkdir(parents=True)
    content = content.replace(b"SECRET", str(tmp_path / "secret.jpg").encode())
    (tmp_path / "coco" / "annotations" / "captions_train2017.json").write_bytes(content)
    with pytest.raises(DataError, match=r"captions_train2017\.json is damaged, or lists no images as COCO does"):
        build(str(tmp_path / "coco"), str(tmp_path / "built"), workers=1)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"7", b"\xff", b'{"source": {"a": 1}}', b"\0" * (2 << 20)])
def test_a_recipe_that_is_none_is_another_build(photos: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / RECIPE).write_bytes(content)
    with pytest.raises(DataError, match="holds a build of source=") as caught:
        build(str(photos), str(tmp_path), workers=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [b"[" * 100_000, b"7", b'{"kind": "a"}', b'{"name": "a", "kind": 7, "reason": "b"}'])
def test_a_list_of_rejects_that_is_none_is_one_error(
    photos: Path, tmp_path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(str(photos), str(tmp_path), workers=1)
    (tmp_path / "train" / REJECTS).write_bytes(line + b"\n")
    with pytest.raises(DataError, match=r"rejects\.jsonl is damaged") as caught:
        build(str(photos), str(tmp_path), workers=1)
    assert "\n" not in str(caught.value)


def forged_note(path: Path, kind: str) -> None:
    head, rest = path.read_bytes().split(b"\n", 1)
    entries = json.loads(head)
    if kind == "name":
        entries["shard"]["url"] = "../../victim.tar"
    elif kind == "other":
        entries["shard"]["url"] = "train-000009.tar"
    elif kind == "size":
        entries["shard"]["bytes"] = True
    elif kind == "digest":
        entries["shard"]["sha256"] = "../victim"
    elif kind == "rejects":
        entries["rejects"] = [7]
    elif kind == "rows":
        rest = npy(np.array([{"a": 1}], dtype=object), allow_pickle=True)
    head = b"[" * 100_000 if kind == "brackets" else json.dumps(entries).encode()
    path.write_bytes(head + b"\n" + rest)


@pytest.mark.usefixtures("small_tars")
@pytest.mark.parametrize("kind", ["name", "other", "size", "digest", "rejects", "rows", "brackets"])
def test_a_forged_note_of_a_finished_tar_is_made_again(
    photos: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def ended(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dmjd.data.shards.build.save_parts", ended)
        with pytest.raises(Exception, match="No space left"):
            build(str(photos), str(tmp_path), workers=1, shard_mb=1)
    forged_note(tmp_path / ".parts" / "train-000001.part", kind)
    build(str(photos), str(tmp_path), workers=1, shard_mb=1)
    expected = load(finished / "train")
    assert load(tmp_path / "train").manifest == expected.manifest
