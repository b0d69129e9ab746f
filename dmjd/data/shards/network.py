"""Reading over a network that may stall, cut or refuse: whole, or one sentence after many tries."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from dmjd.data.waiting import progress_mark
from dmjd.errors import DataError

_log = logging.getLogger("dmjd")
_Result = TypeVar("_Result")

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What goes wrong on this side."""

_PASSING = (408, 425, 429)  # of the 4xx, those that another try may mend


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


PATIENCE = Patience()
"""The default."""


class PassingFault(Exception):
    """What another attempt may mend, in words."""


def persist(url: str, attempt: Callable[[], _Result], patience: Patience) -> _Result:
    """What ``attempt`` returns, at the first time that it raises no :class:`PassingFault`.

    Raises:
        DataError: if the last attempt raised one too.
    """
    begin = time.monotonic()
    for number in range(1, patience.attempts + 1):
        try:
            return attempt()
        except PassingFault as error:
            fault = str(error)
        if number < patience.attempts:
            pause = patience.pause(number)
            _log.warning("%s: %s; trying again in %.0f s (%d of %d)", url, fault, pause, number, patience.attempts)
            time.sleep(pause)
    seconds = time.monotonic() - begin
    raise DataError(
        f"{url} cannot be fetched: {fault}, at the last of {patience.attempts} attempts in {seconds:.0f} s; "
        "checkpoints are intact, and the same command continues once it can be reached"
    )


def read(url: str, patience: Patience, start: int | None = None, end: int | None = None) -> bytes:
    """The file at ``url``, or its bytes ``start .. end - 1`` as far as there are any.

    Raises:
        FileNotFoundError: if the server says that there is none.
        DataError: if it may not be read, or every attempt failed.
    """
    act = lambda files, name: files.cat_file(name, start=start, end=end)  # noqa: E731
    data = persist(url, lambda: cast(bytes, _once(url, patience, act)), patience)
    whole = start is not None and end is not None and len(data) > end - start  # a server need not know of ranges
    return data[start:end] if whole else data


def download(url: str, path: Path, patience: Patience) -> None:
    """One attempt to put the file at ``url`` into ``path``.

    Raises:
        FileNotFoundError: if there is none. PassingFault: if another attempt may go better.
        OSError: of :data:`DISK`. DataError: if it may not be read.
    """
    from fsspec.callbacks import Callback  # comes with torch

    arrived = progress_mark()

    class Arrival(Callback):  # type: ignore[misc]
        def call(self, *arguments: Any, **options: Any) -> None:
            arrived()

    _once(url, patience, lambda files, name: files.get_file(name, str(path), callback=Arrival()))


def _once(url: str, patience: Patience, act: Callable[[Any, str], _Result]) -> _Result:
    from fsspec.core import url_to_fs  # comes with torch

    try:
        return act(*url_to_fs(url, **_options(url.partition("://")[0], patience.stall)))
    except FileNotFoundError:
        raise
    except (PermissionError, ImportError, ValueError) as error:
        raise DataError(f"{url} cannot be fetched: {_reason(error)}") from error
    except Exception as error:  # every protocol has its own
        if isinstance(error, OSError) and error.errno in DISK:
            raise
        status = getattr(error, "status", 500)
        if 400 <= status < 500 and status not in _PASSING:
            raise DataError(f"{url} cannot be fetched: {_reason(error)}") from error
        raise PassingFault(_reason(error)) from error


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
    return " ".join(str(error).split()) or type(error).__name__
