"""Fetching a shard over a network, whole and verified."""

from __future__ import annotations

from pathlib import Path

from dmjd.data.shards.index import Shard
from dmjd.data.shards.location import sha256
from dmjd.data.shards.network import PassingFault, Patience, download, retry
from dmjd.errors import DataError


def fetch(url: str, shard: Shard, path: Path, patience: Patience) -> None:
    """Put the tar at ``url`` into the file ``path``, which is overwritten, and verify its size and sha256.

    Raises:
        DataError: if it is not there, or may not be read, or every attempt failed or brought other bytes; or if the
            disk is full.
    """
    retry(url, lambda: _fetch_once(url, shard, path, patience), patience)


def _fetch_once(url: str, shard: Shard, path: Path, patience: Patience) -> None:
    try:
        download(url, path, patience, shard.bytes)
    except FileNotFoundError as error:
        raise DataError(f"{url} cannot be fetched: it is not there") from error
    except OSError as error:
        raise DataError(
            f"{path.parent} cannot hold {url} ({error.strerror}); lower data.cache_gib or set data.cache"
        ) from error
    size = path.stat().st_size
    if size != shard.bytes:
        raise PassingFault(f"{size} bytes came, and the manifest says {shard.bytes}")
    with path.open("rb") as file:
        if sha256(file) != shard.sha256:
            raise PassingFault("what came has another sha256 than the manifest says")
