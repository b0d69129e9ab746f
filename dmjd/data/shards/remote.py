"""Fetching a file over a network that may stall, cut or refuse: whole and checked, or one sentence after many tries."""

from __future__ import annotations

import errno
import logging
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmjd.data.shards.index import Shard
from dmjd.data.shards.location import sha256
from dmjd.errors import DataError

_log = logging.getLogger("dmjd")

_PASSING = (408, 425, 429)  # of the 4xx, those that another try may mend
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class Patience:
    """How long to bear with a network: by default four minutes in which nothing succeeds.

    The pause doubles from ``first_pause`` to ``longest_pause`` seconds, less a random part, so that the nodes of a
    cluster do not all come back at once. ``stall``: seconds without a byte after which a connection counts as dead.
    """

    attempts: int = 10
    first_pause: float = 1.0
    longest_pause: float = 60.0
    stall: float = 60.0

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        longest = min(self.first_pause * 2 ** (failures - 1), self.longest_pause)
        return longest * random.SystemRandom().uniform(0.5, 1.0)  # no draw from the stream that checkpoints keep


def fetch(url: str, shard: Shard, path: Path, patience: Patience) -> None:
    """Put the tar at ``url`` into the file ``path``, which is overwritten, and verify its size and sha256.

    Raises:
        DataError: if it is not there, or may not be read, or every attempt failed or brought other bytes; or if the
            disk is full.
    """
    begin = time.monotonic()
    for attempt in range(1, patience.attempts + 1):
        fault = _try(url, shard, path, patience.stall)
        if fault is None:
            return
        if attempt < patience.attempts:
            pause = patience.pause(attempt)
            _log.warning("%s: %s; trying again in %.0f s (%d of %d)", url, fault, pause, attempt, patience.attempts)
            time.sleep(pause)
    seconds = time.monotonic() - begin
    raise DataError(
        f"{url} cannot be fetched: {fault}, at the last of {patience.attempts} attempts in {seconds:.0f} s; "
        "checkpoints are intact, and the same command continues once it can be reached"
    )


def _try(url: str, shard: Shard, path: Path, stall: float) -> str | None:
    """One attempt: what went wrong, if another may go better."""
    try:
        _download(url, path, stall)
    except (FileNotFoundError, PermissionError, ImportError, ValueError) as error:
        raise DataError(f"{url} cannot be fetched: {_reason(error)}") from error
    except Exception as error:  # every protocol has its own
        if isinstance(error, OSError) and error.errno in _DISK:
            raise DataError(
                f"{path.parent} cannot hold {url} ({error.strerror}); lower data.cache_gib or set data.cache"
            ) from error
        if 400 <= getattr(error, "status", 500) < 500 and getattr(error, "status", 500) not in _PASSING:
            raise DataError(f"{url} cannot be fetched: {_reason(error)}") from error
        return _reason(error)
    size = path.stat().st_size
    if size != shard.bytes:
        return f"{size} bytes came, and the manifest says {shard.bytes}"
    with path.open("rb") as file:
        if sha256(file) != shard.sha256:
            return "what came has another sha256 than the manifest says"
    return None


def _download(url: str, path: Path, stall: float) -> None:
    from fsspec.core import url_to_fs  # comes with torch

    files, name = url_to_fs(url, **_options(url.partition("://")[0], stall))
    files.get_file(name, str(path))


def _options(protocol: str, stall: float) -> dict[str, Any]:
    """What makes a protocol give up on a dead connection, and leave trying again to us."""
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=stall, sock_read=stall)}}
    if protocol == "s3":
        return {
            "config_kwargs": {"connect_timeout": stall, "read_timeout": stall, "retries": {"max_attempts": 1}},
        }
    return {}


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; install dmjd[remote]"
    if isinstance(error, FileNotFoundError):
        return "it is not there"
    return " ".join(str(error).split()) or type(error).__name__
