"""Shards in a bucket: s3fs against a server on this machine that speaks as much of S3 as reading takes."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest
import torch

import dmjd.train.loop as loop
from dmjd.compose import compose
from dmjd.config import DataConfig
from dmjd.data.build import build_dataset, fetch_ahead, training_batches
from dmjd.data.loader import make_loader
from dmjd.data.shards.cache import fetch_shard
from dmjd.data.shards.index import load_splits
from dmjd.data.shards.network import Patience
from dmjd.data.shards.verify import verify
from dmjd.errors import DataError

s3fs = pytest.importorskip("s3fs", reason="needs s3fs, with which shards in S3 are read")

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

KEY = "AKIDTEST"
BUCKET = "data"
QUICK = Patience(attempts=4, first_pause=0.01, longest_pause=0.02, stall=2.0)


class Bucket(ThreadingHTTPServer):
    """The files below ``root`` as objects; ``faults`` are what happens to the next downloads, one each."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.faults: list[str] = []
        self.downloads: Counter[str] = Counter()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no news."""


class Handler(BaseHTTPRequestHandler):
    """Objects by ``/bucket/key`` and lists of them, for who signs with the right key."""

    server: Bucket
    protocol_version = "HTTP/1.1"

    def _reply(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._reply(
            status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        )

    def _key(self) -> str | None:
        """The key of an object in the bucket, unless the request has been answered."""
        signed = self.headers.get("Authorization", "")
        if not signed.startswith(f"AWS4-HMAC-SHA256 Credential={KEY}/"):
            self._refuse(403, "AccessDenied")
            return None
        bucket, _, key = unquote(urlsplit(self.path).path).strip("/").partition("/")
        if bucket != BUCKET:
            self._refuse(404, "NoSuchBucket")
            return None
        return key

    def do_HEAD(self) -> None:
        key = self._key()
        if key is None:
            return
        path = self.server.root / key
        if not path.is_file():
            self._reply(404)
            return
        self._reply(200, length=path.stat().st_size, ETag='"e"', Last_Modified="Sat, 01 Nov 2025 00:00:00 GMT")

    def do_GET(self) -> None:
        key = self._key()
        if key is None:
            return
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
            return
        path = self.server.root / key
        if not key or not path.is_file():
            self._refuse(404, "NoSuchKey")
            return
        self.server.downloads[key] += 1
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.isdigit():
            self._refuse(int(fault), "AccessDenied" if fault == "403" else "SlowDown")
            return
        body, total, span = path.read_bytes(), path.stat().st_size, self.headers.get("Range")
        ranged: dict[str, str] = {}
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else total, total)
            body = body[int(first) : end]
            ranged = {"Content_Range": f"bytes {first}-{end - 1}/{total}"}
        if fault == "other":
            body = body[::-1]
        length, body = len(body), body[: len(body) // 2] if fault == "cut" else body
        self.close_connection = fault == "cut"
        self._reply(206 if span else 200, body, length, ETag='"e"', **ranged)

    def _list(self, prefix: str) -> None:
        keys = sorted(str(path.relative_to(self.server.root)) for path in self.server.root.rglob("*") if path.is_file())
        entries = "".join(
            f"<Contents><Key>{key}</Key><Size>{(self.server.root / key).stat().st_size}</Size>"
            "<LastModified>2025-11-01T00:00:00.000Z</LastModified><ETag>e</ETag></Contents>"
            for key in keys
            if key.startswith(prefix)
        )
        found = f"<IsTruncated>false</IsTruncated><KeyCount>{entries.count('<Key>')}</KeyCount>{entries}"
        self._reply(200, f"<?xml version='1.0'?><ListBucketResult>{found}</ListBucketResult>".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def bucket(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A copy of a finished set as ``s3://data/set``, with endpoint and credentials where AWS's tools look for them."""
    shutil.copytree(finished, tmp_path / "objects" / "set")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no_config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no_credentials"))
    with Bucket(tmp_path / "objects") as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        s3fs.S3FileSystem.clear_instance_cache()  # one of another test would ask that test's server
        yield running
        for left in threading.enumerate():
            if left.name.startswith("shards-"):
                left.join(10)
        s3fs.S3FileSystem.clear_instance_cache()
        running.shutdown()
        thread.join()


def data(root: str, cache: Path, **values: Any) -> DataConfig:
    return DataConfig(name="shards", root=root, cache=str(cache), **{"image_size": [32, 32], **values})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_in_a_bucket_gives_the_batches_of_the_same_set_on_a_disk(
    bucket: Bucket, finished: Path, tmp_path: Path, workers: int
) -> None:
    near, far = data(str(finished), tmp_path), data("s3://data/set", tmp_path / "cache")
    whole = training_batches(near, build_dataset(near, "train"), 8, seed=2)
    dataset = build_dataset(far, "train")
    ahead = fetch_ahead(dataset, 8, 2, rank=0, world=1, local_rank=0, local_world=1)
    assert ahead is not None
    loader = make_loader(training_batches(far, dataset, 8, seed=2), 1, 7, workers, False, None, ahead)
    for step, batch in enumerate(loader, 1):
        assert all(map(torch.equal, batch, whole[step]))
    tars = {name: count for name, count in bucket.downloads.items() if name.endswith(".tar")}
    assert tars
    assert set(tars.values()) == {1}
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".tar", ".stamp"}


@pytest.mark.parametrize("faults", [["503"], ["503", "500", "503"], ["cut"], ["other"], ["cut", "503", "other"]])
def test_what_passes_costs_another_attempt_and_nothing_else(
    bucket: Bucket, finished: Path, tmp_path: Path, faults: list[str]
) -> None:
    shards = load_splits(finished)["train"]
    bucket.faults = list(faults)
    fetch_shard("s3://data/set/train/train-000000.tar", shards.manifest.shards[0], tmp_path / "a", QUICK)
    assert (tmp_path / "a").read_bytes() == Path(shards.location(0)).read_bytes()
    assert not bucket.faults


def test_what_stays_is_one_sentence(bucket: Bucket, finished: Path, tmp_path: Path) -> None:
    shard = load_splits(finished)["train"].manifest.shards[0]
    url = "s3://data/set/train/train-000000.tar"
    bucket.faults = ["503"] * 99
    with pytest.raises(DataError, match=r"cannot be fetched: \S.* at the last of 1 attempts") as caught:
        fetch_shard(url, shard, tmp_path / "a", Patience(attempts=1))  # s3fs has tries of its own, which take seconds
    assert str(caught.value).startswith(url)
    assert "\n" not in str(caught.value)
    bucket.faults = []
    with pytest.raises(DataError, match="it does not exist"):
        fetch_shard("s3://data/set/train/other.tar", shard, tmp_path / "a", QUICK)


def test_credentials_that_do_not_hold_are_said_at_once(
    bucket: Bucket, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOTHER")
    shard = load_splits(finished)["train"].manifest.shards[0]
    with pytest.raises(
        DataError, match=r"s3://data/set/train/train-000000.tar cannot be fetched: .*(Forbidden|Denied)"
    ):
        fetch_shard("s3://data/set/train/train-000000.tar", shard, tmp_path / "a", QUICK)
    with pytest.raises(DataError, match=r"manifest.json cannot be fetched: .*(Forbidden|Denied).*; set AWS_"):
        load_splits("s3://data/set", QUICK)


@pytest.mark.parametrize("lacking", [["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], ["AWS_SECRET_ACCESS_KEY"]])
def test_missing_credentials_are_an_error_at_the_first_attempt(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: list[str]
) -> None:
    for name in lacking:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DataError, match=r"json cannot be fetched: .*redentials.*; set AWS_ACCESS_KEY_ID"):
        load_splits("s3://data/set", QUICK)
    assert "retrying" not in caplog.text


def test_the_endpoint_may_stand_in_the_configuration_of_fsspec(
    bucket: Bucket, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec.config

    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": bucket.endpoint, "key": KEY, "secret": "secret"})
    found, expected = load_splits("s3://data/set", QUICK), load_splits(finished)
    assert {split: shards.manifest for split, shards in found.items()} == {
        split: shards.manifest for split, shards in expected.items()
    }
    assert all(np.array_equal(found[split].records, expected[split].records) for split in expected)


def test_a_bucket_is_verified_and_indexed_where_it_is(
    bucket: Bucket, tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    assert verify(load_splits("s3://data/set", QUICK)["train"], workers=1) == []
    tar = "s3://data/set/train/train-000000.tar"
    code, said, _ = dmjd("shards", "index", tar, str(tmp_path / "index"), "workers=1")
    assert code == 0
    assert "no image rejected" in said
    of = data(str(tmp_path / "index"), tmp_path / "cache")
    dataset, original = build_dataset(of, "train"), build_dataset(data("s3://data/set", tmp_path / "cache"), "train")
    assert all(np.array_equal(dataset.image(index), original.image(index)) for index in range(len(dataset)))


def test_a_run_over_a_bucket_has_the_log_of_one_over_a_disk(
    bucket: Bucket, finished: Path, tmp_path: Path, tiny: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: {})
    more = ("data=shards", "data.image_size=[16,16]", "epochs=2", "batch_size=8", "log_every=1", "workers=1")
    logs = []
    for name, root in (("near", str(finished)), ("far", "s3://data/set")):
        words = tiny(tmp_path / name, *more, f"data.root={root}", f"data.cache={tmp_path / 'cache'}")
        logs.append(loop.pretrain(compose("pretrain", words)).log.read_bytes())
    assert logs[0] == logs[1]
