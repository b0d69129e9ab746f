from __future__ import annotations

import functools
import gc
import gzip
import hashlib
import http.server
import logging
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import FashionMNIST

from dmjd.data import fetch
from dmjd.data.fetch import fashion_mnist_folder
from dmjd.data.small import FashionMnist
from dmjd.errors import DataError


def idx(*shape: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 10, shape, dtype=np.uint8)
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + pixels.tobytes()


FILES = {
    "train-images-idx3-ubyte": idx(30, 28, 28, seed=0),
    "train-labels-idx1-ubyte": idx(30, seed=1),
    "t10k-images-idx3-ubyte": idx(20, 28, 28, seed=2),
    "t10k-labels-idx1-ubyte": idx(20, seed=3),
}
PACKAGED = "usr/share/datasets/fashion-mnist"
TORCHVISION = "FashionMNIST/raw"
IMAGES = "train-images-idx3-ubyte"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place in a user's cache, which is empty, for files that are smaller than Fashion-MNIST's; no sources."""
    sums = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in FILES.items()}
    monkeypatch.setattr(fetch, "CONTENT", sums)
    monkeypatch.setattr(fetch, "DOWNLOADERS", {})
    monkeypatch.setattr(fetch, "DEBIAN_FOLDER", tmp_path / "absent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dmjd" / "fashion-mnist"


def write(folder: Path, *, compressed: bool = False, **other: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**FILES, **{name.replace("_", "-"): content for name, content in other.items()}}.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def take_from(monkeypatch: pytest.MonkeyPatch, **sources: Callable[[Path], Path]) -> None:
    monkeypatch.setattr(fetch, "DOWNLOADERS", sources)


def assert_whole(cache: Path) -> None:
    """The files are in their place, and nothing else was left."""
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == FILES
    assert list(cache.parent.iterdir()) == [cache]


def assert_nothing_left(cache: Path) -> None:
    assert list(cache.parent.iterdir()) == []


@pytest.mark.parametrize("compressed", [False, True])
def test_what_a_source_brings_is_kept_and_found_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    take_from(monkeypatch, first=lambda work: write(work / "deep", compressed=compressed))
    assert fashion_mnist_folder() == cache
    assert_whole(cache)
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    take_from(monkeypatch)
    assert fashion_mnist_folder() == cache
    assert [len(FashionMnist(cache, split)) for split in ("train", "test")] == [30, 20]


def test_debians_folder_comes_first_if_it_has_all_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debian = write(tmp_path / "debian", compressed=True)
    monkeypatch.setattr(fetch, "DEBIAN_FOLDER", debian)
    assert fashion_mnist_folder() == debian
    (debian / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="cannot be fetched"):
        fashion_mnist_folder()


def cannot_start(work: Path) -> Path:
    (work / "apt-get").touch(0o600)
    fetch._run([str(work / "apt-get")], work)
    return work


def fails(work: Path) -> Path:
    write(work)
    raise fetch._Failed("cut\noff")


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (fails, "cut off"),
        (cannot_start, "[Errno 13] Permission denied"),
        (lambda work: work, "the download has no train-images-idx3-ubyte"),
        (lambda work: write(work, t10k_labels_idx1_ubyte=idx(20, seed=4)), "its t10k-labels-idx1-ubyte is not that of"),
        (lambda work: write(work, train_images_idx3_ubyte=FILES[IMAGES] + b"more"), "its train-images-idx3-ubyte is"),
        (lambda work: write(work, train_images_idx3_ubyte=FILES[IMAGES][:-1]), "its train-images-idx3-ubyte is"),
    ],
)
def test_files_that_are_not_the_authors_are_left_and_the_next_source_is_asked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, first: Callable[[Path], Path], reason: str
) -> None:
    take_from(monkeypatch, first=first)
    with pytest.raises(DataError) as caught:
        fashion_mnist_folder()
    assert f"(first: {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "set data.root to a folder with its four files" in str(caught.value)
    assert_nothing_left(cache)
    take_from(monkeypatch, first=first, second=write)
    assert fashion_mnist_folder() == cache
    assert_whole(cache)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, replace_by_pipe, replace_by_loop])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_damaged_cache_is_fetched_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], name: str
) -> None:
    write(cache)
    cache.parent.chmod(0o700)
    damage(cache / name)
    take_from(monkeypatch, only=write)
    assert fashion_mnist_folder() == cache
    assert_whole(cache)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_cache_that_others_may_write_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    write(cache)
    cache.parent.chmod(mode)
    with pytest.raises(DataError, match="other users can write to it; set XDG_CACHE_HOME"):
        fashion_mnist_folder()


def test_a_cache_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(cache)
    cache.parent.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DataError, match="it belongs to user"):
        fashion_mnist_folder()


@pytest.mark.parametrize("variables", [{"XDG_CACHE_HOME": "FILE"}, {"XDG_CACHE_HOME": "relative", "HOME": "FILE/home"}])
def test_where_nothing_can_be_written_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    (tmp_path / "file").write_text("")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("FILE", str(tmp_path / "file")))
    take_from(monkeypatch, only=write)
    with pytest.raises(DataError, match=r"cannot be fetched \(.*Not a directory") as caught:
        fashion_mnist_folder()
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(work: Path) -> Path:
        write(work)
        raise OSError(28, "No space left on device")

    take_from(monkeypatch, only=full)
    with pytest.raises(DataError, match="No space left on device"):
        fashion_mnist_folder()
    assert_nothing_left(cache)


def test_an_interrupted_fetch_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(work: Path) -> Path:
        write(work)
        raise KeyboardInterrupt

    take_from(monkeypatch, only=interrupted)
    with pytest.raises(KeyboardInterrupt):
        fashion_mnist_folder()
    assert_nothing_left(cache)


def test_what_a_killed_process_left_is_removed_later(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, busy = (write(cache.parent / f".fetching-{name}") for name in ("killed", "busy"))
    cache.parent.chmod(0o700)
    os.utime(killed, (0, 0))
    take_from(monkeypatch, only=write)
    assert fashion_mnist_folder() == cache
    assert sorted(cache.parent.iterdir()) == sorted([cache, busy])


def test_several_at_once_get_the_same_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, found = threading.Barrier(4), []

    def fetched(work: Path) -> Path:
        together.wait(10)
        return write(work)

    take_from(monkeypatch, only=fetched)
    threads = [threading.Thread(target=lambda: found.append(fashion_mnist_folder())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [cache] * 4
    assert_whole(cache)


# torchvision's class against a server of our own


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What torchvision's mirror serves; its class, in this process, is the only source."""
    served = write(tmp_path / "served", compressed=True)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(served)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(FashionMNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    sums = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(served.iterdir())]
    monkeypatch.setattr(FashionMNIST, "resources", sums)

    def here(work: Path) -> Path:
        try:
            fetch.download(str(work))
        except SystemExit as error:
            raise fetch._Failed(f"exit code {error.code}") from error
        return work / TORCHVISION

    take_from(monkeypatch, torchvision=here)
    yield served
    server.shutdown()
    thread.join()
    server.server_close()
    gc.collect()  # sockets that urllib leaves open, whose warnings would disturb the next test


@pytest.fixture(autouse=True)
def timeout_as_before() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.usefixtures("mirror")
def test_torchvisions_class_fetches(cache: Path) -> None:
    assert fashion_mnist_folder() == cache
    assert_whole(cache)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that urllib leaves open
@pytest.mark.parametrize("damage", [Path.unlink, cut, flip])
def test_torchvisions_checksums_are_heeded(
    cache: Path, mirror: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    damage(mirror / f"{IMAGES}.gz")
    with pytest.raises(DataError, match="torchvision: exit code 1"):
        fashion_mnist_folder()
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert_nothing_left(cache)


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_does_not_answer_has_a_time_limit(
    cache: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "SOCKET_SECONDS", 0.2)
    monkeypatch.setattr(Quiet, "do_GET", lambda self: time.sleep(1), raising=False)
    began = time.monotonic()
    with pytest.raises(DataError, match="torchvision: exit code 1"):
        fashion_mnist_folder()
    assert time.monotonic() - began < 3
    assert "timed out" in capsys.readouterr().out


# What runs in a child process


def fake_torchvision(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """A torchvision whose FashionMNIST(root, download=True) is ``body``."""
    package = folder / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "datasets.py").write_text(
        "import os, shutil, sys, time\ndef FashionMNIST(root, download):\n    assert download\n    " + body
    )
    monkeypatch.syspath_prepend(folder)
    take_from(monkeypatch, torchvision=fetch._by_torchvision)


def test_torchvision_runs_in_a_process_of_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    files = write(tmp_path / "files")
    body = f"shutil.copytree({str(files)!r}, root + '/{TORCHVISION}'); print('40 %', file=sys.stderr); print('done')"
    fake_torchvision(monkeypatch, tmp_path / "fake", body)
    monkeypatch.setattr(logging.getLogger("dmjd"), "handlers", [])  # those of a command that another test ran
    assert fashion_mnist_folder() == cache
    assert_whole(cache)
    assert capfd.readouterr() == ("", "40 %\n"), "its progress is shown, and nothing else"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('Error downloading:\\nTried http://x, got:\\nno route')", "torchvision: no route"),
        ("import tensorflow_of_tomorrow", "No module named 'tensorflow_of_tomorrow'"),
        ("print('Bus error'); os._exit(7)", "Bus error|exit code 7"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("time.sleep(100)", "received no data for 1 s"),
        ("[(open(f'{root}/{n}', 'w').write('x'), time.sleep(.1)) for n in range(1000)]", "not finished after 3 s"),
    ],
)
def test_a_child_that_fails_or_waits_is_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    monkeypatch.setattr(fetch, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(fetch, "LIMIT_SECONDS", 3.0)
    fake_torchvision(monkeypatch, tmp_path / "fake", body)
    with pytest.raises(DataError, match=reason) as caught:
        fashion_mnist_folder()
    assert "\n" not in str(caught.value)
    assert_nothing_left(cache)


# apt-get


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``apt(script)``: an apt-get of these lines of shell, alone on PATH with a dpkg-deb; returns the package it may
    give. The first line that is asked is kept in ``asked``."""
    tree, package, tools = tmp_path / "tree", tmp_path / "package.deb", tmp_path / "tools"
    write(tree / PACKAGED, compressed=True)
    tools.mkdir()
    for name in ("sh", "cp", "sleep", "echo", "rm", "tar", "gzip", "cat"):
        where = shutil.which(name)
        if where:
            (tools / name).symlink_to(where)
    dpkg = shutil.which("dpkg-deb")
    if dpkg is None:
        pytest.skip("this system has no dpkg-deb")
    (tools / "dpkg-deb").symlink_to(dpkg)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN" / "control").write_text(
        "Package: dataset-fashion-mnist\nVersion: 1\nArchitecture: all\n"
        "Maintainer: me <me@example.org>\nDescription: x\n"
    )
    subprocess.run([dpkg, "-b", str(tree), str(package)], check=True, capture_output=True)
    shutil.rmtree(tree)
    monkeypatch.setattr(fetch, "DEBIAN_FOLDER", Path("/", PACKAGED, "absent").parent)
    monkeypatch.setattr(fetch, "has_fashion_mnist", lambda folder: False)
    monkeypatch.setenv("PATH", str(tools))
    take_from(monkeypatch, apt=fetch._by_apt)

    def make(script: str) -> Path:
        file = tools / "apt-get"
        file.write_text(f'#!{tools}/sh\necho "$@" >> {tmp_path}/asked\nPACKAGE={package}\n{script}\n')
        file.chmod(0o755)
        return tmp_path / "asked"

    return make


GIVE = 'cp "$PACKAGE" dataset-fashion-mnist_1_all.deb'


def test_apt_downloads_and_nothing_is_installed(cache: Path, apt: Callable[[str], Path]) -> None:
    asked = apt(GIVE)
    assert fashion_mnist_folder() == cache
    assert_whole(cache)
    (line,) = asked.read_text().splitlines()
    assert line.endswith("download dataset-fashion-mnist")
    assert "install" not in line


def test_where_there_are_no_lists_of_packages_private_ones_are_fetched(cache: Path, apt: Callable[[str], Path]) -> None:
    missing = "E: Unable to locate package dataset-fashion-mnist"
    asked = apt(
        f'case "$*" in *Dir::State::Lists=*update) echo x > "$PWD/lists/partial/y";; '
        f'*Dir::State::Lists=*download*) cat "$PWD/lists/partial/y" && {GIVE};; '
        f'*) echo "{missing}" >&2; exit 100;; esac'
    )
    assert fashion_mnist_folder() == cache
    assert_whole(cache)
    assert [line.split()[-1] for line in asked.read_text().splitlines()] == [fetch.PACKAGE, "update", fetch.PACKAGE]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'W: sandbox' >&2; echo 'E: No route\n' >&2; exit 100", "apt: E: No route"),
        ("exit 1", "apt: exit code 1"),
        ("exit 0", "apt: apt-get download left no package"),
        (f"{GIVE}; echo cut > dataset-fashion-mnist_1_all.deb", "apt: .*not a Debian format archive"),
        ("sleep 100 & sleep 100", "apt: received no data for 1 s"),
    ],
)
def test_an_apt_that_fails_or_waits_is_one_line(
    cache: Path, apt: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setattr(fetch, "STALL_SECONDS", 1.0)
    apt(script)
    began = time.monotonic()
    with pytest.raises(DataError, match=reason) as caught:
        fashion_mnist_folder()
    assert time.monotonic() - began < 10
    assert "\n" not in str(caught.value)
    assert_nothing_left(cache)


def test_a_system_without_apt_is_one_line(cache: Path, apt: Callable[[str], Path]) -> None:
    with pytest.raises(DataError, match=r"\(apt: apt-get is not installed\)"):
        fashion_mnist_folder()
    assert_nothing_left(cache)
