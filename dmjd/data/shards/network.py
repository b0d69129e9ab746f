"""Reading over a network that may stall, cut or refuse: whole, or one sentence after many tries."""

from __future__ import annotations

import errno
import logging
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dmjd.data.waiting import progress_mark
from dmjd.errors import DataError

_log = logging.getLogger("dmjd")
_Result = TypeVar("_Result")

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What goes wrong on this side."""

_PASSING = (408, 425, 429)  # of the 4xx, those that another try may mend

_SLOWEST = 16 << 10
"""Bytes a second that a download has to bring on average, after the first ``Patience.stall`` seconds."""


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


def retry(url: str, attempt: Callable[[], _Result], patience: Patience) -> _Result:
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


def read(url: str, patience: Patience, limit: int) -> bytes:
    """The file at ``url``, of at most ``limit`` bytes; no more are taken from a server that sends more.

    Raises:
        FileNotFoundError: if the server says that there is none.
        DataError: if it is longer, may not be read, or every attempt failed.
    """
    try:
        return retry(url, lambda: _read_once(url, patience, limit), patience)
    except _TooLong as error:
        raise DataError(f"{url} has more than the {limit} bytes that are read of it") from error


def read_range(url: str, patience: Patience, start: int, end: int) -> bytes:
    """Bytes ``start .. end - 1`` of the file at ``url``, as far as there are any; raises as :func:`read` does."""
    data = retry(url, lambda: _read_once(url, patience, end, (start, end)), patience)
    return data[start:end] if len(data) > end - start else data  # a server need not know of ranges


def download(url: str, path: Path, patience: Patience, limit: int) -> None:
    """One attempt to put the file at ``url`` into ``path``.

    Raises:
        FileNotFoundError: if there is none.
        PassingFault: if another attempt may go better; also where more than ``limit`` bytes came.
        OSError: of :data:`DISK`. DataError: if it may not be read.
    """
    try:
        _get(url, path, patience, limit)
    except _TooLong as error:
        raise PassingFault(f"more than the {limit} bytes came that it should have") from error


class _TooLong(Exception):
    """More bytes came than are taken; the first of them are in the file."""


def _read_once(url: str, patience: Patience, limit: int, span: tuple[int, int] | None = None) -> bytes:
    """At most ``limit`` bytes. With a ``span`` the file may be longer, and these are asked for or its beginning."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy"
        try:
            _get(url, path, patience, limit, span)
        except _TooLong:
            if span is None:
                raise
        with path.open("rb") as file:
            return file.read(min(limit, path.stat().st_size))


def _get(url: str, path: Path, patience: Patience, limit: int, span: tuple[int, int] | None = None) -> None:
    from fsspec.callbacks import Callback  # comes with torch
    from fsspec.core import url_to_fs

    arrived, began = progress_mark(), time.monotonic()

    class Bound(Callback):  # type: ignore[misc]
        """Ends a download that is too long or too slow; protocols call it after every piece."""

        value: int

        def call(self, *arguments: Any, **options: Any) -> None:
            seconds = time.monotonic() - began
            if self.value > limit:
                raise _TooLong
            if seconds > patience.stall + self.value / _SLOWEST:
                raise PassingFault(f"{self.value} bytes came in {seconds:.0f} s")
            arrived()

    protocol = url.partition("://")[0]
    request: dict[str, Any] = {}
    if span is not None and protocol in ("http", "https"):
        request["headers"] = {"Range": f"bytes={span[0]}-{span[1] - 1}"}
    try:
        files, name = url_to_fs(url, **_options(protocol, patience.stall))
        if getattr(files, "async_impl", False):  # fsspec's own limit of a call; headers can trickle as well
            request["timeout"] = patience.stall + limit / _SLOWEST
        if span is not None and "headers" not in request:
            path.write_bytes(files.cat_file(name, start=span[0], end=span[1], **request))
        else:
            files.get_file(name, str(path), callback=Bound(), **request)
            if path.stat().st_size > limit:  # a local file is copied at once
                raise _TooLong
    except (FileNotFoundError, PassingFault, _TooLong):
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

        timeout = ClientTimeout(total=None, sock_connect=stall, sock_read=stall)
        return {"client_kwargs": {"timeout": timeout, "trace_configs": [_redirects()]}}
    if protocol == "s3":
        return {
            "config_kwargs": {"connect_timeout": stall, "read_timeout": stall, "retries": {"max_attempts": 1}},
        }
    return {}


@cache
def _redirects() -> Any:
    """A hook that ends a redirect from https to http; aiohttp itself follows none to a protocol but these two."""
    from aiohttp import TraceConfig

    hook = TraceConfig()
    hook.on_request_redirect.append(_check_redirect)
    return hook


async def _check_redirect(session: Any, context: Any, redirect: Any) -> None:
    response = redirect.response
    location = response.headers.get("Location") or response.headers.get("URI") or ""
    if response.url.scheme == "https" and response.url.join(type(response.url)(location)).scheme != "https":
        raise PermissionError("the server redirects from https to a connection that is not encrypted")


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; install dmjd[remote]"
    if type(error).__name__ == "FSTimeoutError":
        return "it took too long"
    return " ".join(str(error).split()) or type(error).__name__
