"""Find Fashion-MNIST on this machine, or download it to the user's cache.

Nothing is installed. torchvision, and then apt-get, download in a child process, so that a time limit can end them. The
files are compared with the SHA-256 of the authors' files after the download, and each time they are found in the cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dmjd.data.small import DEBIAN_FOLDER, decompressed, find_idx, has_fashion_mnist
from dmjd.errors import DataError
from dmjd.files import make_private

CONTENT = {
    "train-images-idx3-ubyte": (47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    "train-labels-idx1-ubyte": (60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    "t10k-images-idx3-ubyte": (7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    "t10k-labels-idx1-ubyte": (10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
}
"""File -> size and SHA-256 of its uncompressed content, equal in torchvision's archives and in Debian's."""

PACKAGE = "dataset-fashion-mnist"
SOCKET_SECONDS = 10.0
"""Limit of one operation on a connection."""
STALL_SECONDS = 30.0
"""Limit of a download without a new byte on the disk."""
LIMIT_SECONDS = 600.0
"""Limit of a whole download."""
_DRAFT = ".fetching-"
_ABANDONED_SECONDS = 3600.0
_POLL_SECONDS = 0.1

_log = logging.getLogger("dmjd")


class _Failed(Exception):
    """One download failed; the message is the reason."""


def fashion_mnist_folder() -> Path:
    """The folder of Fashion-MNIST's four files: Debian's, or the user's cache, to which they are downloaded if absent.

    Safe for concurrent processes: each downloads to its own folder, and the first rename succeeds.

    Raises:
        DataError: if the files do not exist and cannot be downloaded.
    """
    if has_fashion_mnist(DEBIAN_FOLDER):
        return DEBIAN_FOLDER
    try:
        cache = _user_cache()
        folder = cache / "fashion-mnist"
        if not _is_whole(folder):
            _fetch(folder)
    except (OSError, RuntimeError, _Failed) as error:
        raise DataError(
            f"Fashion-MNIST is neither in {DEBIAN_FOLDER} nor in the user's cache, and cannot be fetched "
            f"({_line(error)}); set data.root to a folder with its four files, or take data=digits"
        ) from error
    return folder


def _user_cache() -> Path:
    """``dmjd/`` in the user's cache, created if absent; writable by this user only."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():  # the XDG specification ignores relative paths
        home = Path.home() / ".cache"
    if not home.is_absolute():
        raise _Failed("neither HOME nor XDG_CACHE_HOME is an absolute path")
    cache = home / "dmjd"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fault := make_private(cache.resolve()):  # the user may have linked it to another disk
        raise _Failed(f"{cache} is not used, for {fault}; set XDG_CACHE_HOME")
    return cache


def _is_whole(folder: Path) -> bool:
    with suppress(OSError):
        # Sizes first: reading something that is not a regular file might not end.
        return all(_size(folder / name) == size for name, (size, _) in CONTENT.items()) and all(
            _has_content((folder / name).read_bytes(), name) for name in CONTENT
        )
    return False


def _size(path: Path) -> int:
    """Size of a regular file in bytes; -1 for anything else."""
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def _has_content(content: bytes, name: str) -> bool:
    return hashlib.sha256(content).hexdigest() == CONTENT[name][1]


def _fetch(folder: Path) -> None:
    _sweep(folder.parent)
    _log.info("fetching Fashion-MNIST (31 MB) into %s", folder)
    failures = []
    with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=folder.parent) as draft:
        for source, download in DOWNLOADERS.items():
            work, verified = Path(draft, source), Path(draft, f"{source}-verified")
            work.mkdir()
            try:
                _verify(download(work), verified)
            except (_Failed, DataError, OSError) as error:
                failures.append(f"{source}: {_line(error)}")
                shutil.rmtree(work)
                continue
            _place(verified, folder, Path(draft))
            return
    raise _Failed("; ".join(failures))


def _sweep(cache: Path) -> None:
    """Remove the folders of killed processes."""
    for draft in cache.glob(f"{_DRAFT}*"):
        with suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(draft, ignore_errors=True)


def _verify(found: Path, verified: Path) -> None:
    """Verify the four files in ``found``, and write them uncompressed to ``verified``."""
    verified.mkdir()
    for name, (size, _) in CONTENT.items():
        path = find_idx(found, name)
        if path is None:
            raise _Failed(f"the download has no {name}")
        content = decompressed(path, most=size + 1)
        if not _has_content(content, name):
            raise _Failed(f"its {path.name} is not that of Fashion-MNIST's authors")
        (verified / name).write_bytes(content)


def _place(verified: Path, folder: Path, draft: Path) -> None:
    """Rename ``verified`` to ``folder``, replacing a damaged one."""
    with suppress(FileNotFoundError):
        folder.rename(draft / "damaged")
    try:
        verified.rename(folder)
    except OSError:
        if not _is_whole(folder):  # else another process was first
            raise


def _by_torchvision(work: Path) -> Path:
    # The child gets this sys.path; its standard error shows the progress.
    command = f"import sys; sys.path[:] = sys.argv[2:]; from {__name__} import download; download(sys.argv[1])"
    _run([sys.executable, "-c", command, str(work), *map(os.path.abspath, sys.path)], work, stderr=None)
    return work / "FashionMNIST" / "raw"


def download(work: str) -> None:
    """Download Fashion-MNIST with torchvision to ``work``; on failure print a line and exit with code 1."""
    socket.setdefaulttimeout(SOCKET_SECONDS)
    try:
        from torchvision.datasets import FashionMNIST

        FashionMNIST(work, download=True)
    except Exception as error:  # network libraries have no common exception class
        print(_line(error).rpartition("got: ")[2])  # after torchvision's prefix of file and URL
        sys.exit(1)


def _by_apt(work: Path) -> Path:
    options = [f"Acquire::{scheme}::Timeout={SOCKET_SECONDS:.0f}" for scheme in ("http", "https")]
    options += ["Acquire::Retries=0", "Acquire::Languages=none", "APT::Update::Error-Mode=any"]
    get = ["apt-get", "-q", *(argument for option in options for argument in ("-o", option))]
    try:
        _run([*get, "download", PACKAGE], work)
    except _Failed:
        # A fresh container has no package lists; use a temporary copy instead of updating the system's.
        lists, cache = work / "lists", work / "cache"
        (lists / "partial").mkdir(parents=True)
        (cache / "archives" / "partial").mkdir(parents=True)
        get += ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
        _run([*get, "update"], work)
        _run([*get, "download", PACKAGE], work)
    archive = next(work.glob(f"{PACKAGE}_*.deb"), None)
    if archive is None:
        raise _Failed("apt-get download left no package")
    unpacked = work / "unpacked"
    _run(["dpkg-deb", "-x", str(archive), str(unpacked)], work)
    return unpacked / DEBIAN_FOLDER.relative_to("/")


DOWNLOADERS: dict[str, Callable[[Path], Path]] = {"torchvision": _by_torchvision, "apt-get": _by_apt}
"""Name -> function that downloads to an empty folder and returns the folder of the files."""


def _run(command: Sequence[str], work: Path, stderr: int | None = subprocess.STDOUT) -> None:
    """Run ``command`` in ``work`` within the time limits. Raises _Failed with the last line of its output."""
    log = work / "output"
    try:
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                cwd=work,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=stderr,
                start_new_session=True,
            )
    except FileNotFoundError as error:
        raise _Failed(f"{command[0]} is not installed") from error
    try:
        code = _ended(child, work)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # and its children
            child.wait()
    if code:
        lines = log.read_text(errors="replace").splitlines()
        raise _Failed(next((line for line in reversed(lines) if line.strip()), f"exit code {code}"))


def _ended(child: subprocess.Popen[bytes], work: Path) -> int:
    """Wait for ``child`` and return its exit code; new bytes in ``work`` are its progress."""
    began = grown = time.monotonic()
    size = -1
    while (code := child.poll()) is None:
        time.sleep(_POLL_SECONDS)
        now, size_now = time.monotonic(), _bytes_in(work)
        if size_now != size:
            grown, size = now, size_now
        if now - grown > STALL_SECONDS:
            raise _Failed(f"received no data for {STALL_SECONDS:.0f} s")
        if now - began > LIMIT_SECONDS:
            raise _Failed(f"not finished after {LIMIT_SECONDS:.0f} s")
    return code


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # the child renames and removes files
                total += Path(parent, name).lstat().st_size
    return total


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
