"""Read remote files with retries. A read returns the whole file or raises one DataError."""

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
from dmjd.errors import DataError, TransientError

_log = logging.getLogger("dmjd")
_Result = TypeVar("_Result")

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error numbers of the local disk, for which a retry is useless."""

_TRANSIENT_STATUS = (408, 425, 429)  # 4xx status codes that a retry may resolve

_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Exceptions of botocore, an optional package. CredentialRetrievalError may pass and is retried."""

_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of a user who may read it, or for a public "
    "bucket FSSPEC_S3_ANON=true"
)

_SLOWEST = 16 << 10
"""Least average rate of a download in bytes per second, after the first ``Patience.stall`` seconds."""


@dataclass(frozen=True)
class Patience:
    """Retries of a network operation; the defaults give up after about four minutes of failures.

    attempts: number of attempts.
    first_pause, longest_pause: seconds between attempts; the pause doubles, and is shortened by a random factor so that
        the nodes of a cluster do not retry at the same time.
    stall: seconds without a byte after which a connection is closed.
    """

    attempts: int = 10
    first_pause: float = 1.0
    longest_pause: float = 60.0
    stall: float = 60.0

    def pause(self, failures: int) -> float:
        """Seconds to wait after ``failures`` failed attempts."""
        longest = min(self.first_pause * 2 ** (failures - 1), self.longest_pause)
        # Not the global generator, which is part of checkpoints.
        return longest * random.SystemRandom().uniform(0.5, 1.0)


PATIENCE = Patience()


def retry(url: str, attempt: Callable[[], _Result], patience: Patience) -> _Result:
    """Call ``attempt`` until it raises no :class:`~dmjd.errors.TransientError`, and return its result.

    Raises:
        DataError: if all attempts raised one.
    """
    begin = time.monotonic()
    for number in range(1, patience.attempts + 1):
        try:
            return attempt()
        except TransientError as error:
            fault = str(error)
        if number < patience.attempts:
            pause = patience.pause(number)
            _log.warning("%s: %s; retrying in %.0f s (%d of %d)", url, fault, pause, number, patience.attempts)
            time.sleep(pause)
    seconds = time.monotonic() - begin
    raise DataError(
        f"{url} cannot be fetched: {fault}, at the last of {patience.attempts} attempts in {seconds:.0f} s; "
        "checkpoints are intact, and the same command continues once it is reachable"
    )


def read(url: str, patience: Patience, limit: int) -> bytes:
    """The file at ``url``, of at most ``limit`` bytes, however many the server sends.

    Raises:
        FileNotFoundError: if it does not exist.
        DataError: if it is longer, may not be read, or every attempt failed.
    """
    try:
        return retry(url, lambda: _read_once(url, patience, limit), patience)
    except _TooLong as error:
        raise DataError(f"{url} has more than {limit} bytes, the limit of such a file") from error


def read_range(url: str, patience: Patience, start: int, end: int) -> bytes:
    """Bytes ``start .. end - 1`` of the file at ``url``, or fewer at its end; raises as :func:`read` does."""
    data = retry(url, lambda: _read_once(url, patience, end, (start, end)), patience)
    return data[start:end] if len(data) > end - start else data  # a server may ignore ranges


def download(url: str, path: Path, patience: Patience, limit: int) -> None:
    """Download ``url`` to ``path``, in one attempt.

    Raises:
        FileNotFoundError: if it does not exist.
        TransientError: if a retry may succeed, and if more than ``limit`` bytes are received.
        OSError: of :data:`DISK`. DataError: if it may not be read.
    """
    try:
        _get(url, path, patience, limit)
    except _TooLong as error:
        raise TransientError(f"received more than its {limit} bytes") from error


class _TooLong(Exception):
    """More bytes were received than allowed; the first of them are in the file."""


def _read_once(url: str, patience: Patience, limit: int, span: tuple[int, int] | None = None) -> bytes:
    """At most ``limit`` bytes: of the whole file, or with ``span`` of that range, where the file may be longer."""
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
        """Ends a download that is too long or too slow; fsspec calls it after every chunk."""

        value: int

        def call(self, *arguments: Any, **options: Any) -> None:
            seconds = time.monotonic() - began
            if self.value > limit:
                raise _TooLong
            if seconds > patience.stall + self.value / _SLOWEST:
                raise TransientError(f"received {self.value} bytes in {seconds:.0f} s")
            arrived()

    protocol = url.partition("://")[0]
    request: dict[str, Any] = {}
    if span is not None and protocol in ("http", "https"):
        request["headers"] = {"Range": f"bytes={span[0]}-{span[1] - 1}"}
    try:
        files, name = url_to_fs(url, **_options(protocol, patience.stall))
        if getattr(files, "async_impl", False):  # fsspec's time limit of a call, for servers that send headers slowly
            request["timeout"] = patience.stall + limit / _SLOWEST
        if span is not None and "headers" not in request:
            path.write_bytes(files.cat_file(name, start=span[0], end=span[1], **request))
        else:
            files.get_file(name, str(path), callback=Bound(), **request)
            if path.stat().st_size > limit:  # file:// copies without calling back
                raise _TooLong
    except (FileNotFoundError, TransientError, _TooLong):
        raise
    except (PermissionError, ImportError, ValueError) as error:
        cure = f"; {_CREDENTIALS}" if protocol == "s3" and isinstance(error, PermissionError) else ""
        raise DataError(f"{url} cannot be fetched: {_reason(error)}{cure}") from error
    except Exception as error:  # fsspec's protocols have no common base class
        if type(error).__name__ in _WITHOUT_CREDENTIALS:
            raise DataError(f"{url} cannot be fetched: {_reason(error).rstrip('.')}; {_CREDENTIALS}") from error
        if isinstance(error, OSError) and error.errno in DISK:
            raise
        status = getattr(error, "status", 500)
        if 400 <= status < 500 and status not in _TRANSIENT_STATUS:
            raise DataError(f"{url} cannot be fetched: {_reason(error)}") from error
        raise TransientError(_reason(error)) from error


def _options(protocol: str, stall: float) -> dict[str, Any]:
    """fsspec options: time-outs of a dead connection, and no retries of the protocol's own."""
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
    """An aiohttp hook that rejects redirects from https to http; aiohttp rejects all other protocols itself."""
    from aiohttp import TraceConfig

    hook = TraceConfig()
    hook.on_request_redirect.append(_check_redirect)
    return hook


async def _check_redirect(session: Any, context: Any, redirect: Any) -> None:
    response = redirect.response
    location = response.headers.get("Location") or response.headers.get("URI") or ""
    if response.url.scheme == "https" and response.url.join(type(response.url)(location)).scheme != "https":
        raise PermissionError("the server redirects from https to an unencrypted connection")


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; install dmjd[remote]"
    if type(error).__name__ == "FSTimeoutError":
        return "it took too long"
    return " ".join(str(error).split()) or type(error).__name__
