from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dmjd.errors import StorageError
from dmjd.files import open_regular, private_folder, read_at_most, replace_file
from dmjd.parallel.environment import prepare_environment


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    replace_file(path, "before")

    def full_disk(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*config\.yaml'"):
        replace_file(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path], "no draft stays behind"


def test_a_pipe_is_neither_waited_for_nor_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (open_regular, lambda path: read_at_most(path, 9)):
        with pytest.raises(OSError, match="a named pipe"):
            read(tmp_path / "pipe")
        with pytest.raises(IsADirectoryError):
            read(tmp_path)


def test_a_file_is_read_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123456789")
    assert read_at_most(tmp_path / "file", 9) == b"123456789"
    with pytest.raises(ValueError, match="has 9 bytes, more than the limit of 8"):
        read_at_most(tmp_path / "file", 8)


# Folders below TMPDIR


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"dmjd-{os.geteuid()}"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_private_folder_is_its_owners_whatever_the_umask(temporary: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert private_folder("dmjd") == private_folder("dmjd") == temporary
    finally:
        os.umask(before)
    assert mode(temporary) == 0o700


def test_an_own_folder_that_others_can_read_is_closed_to_them(temporary: Path) -> None:
    temporary.mkdir(mode=0o755)
    assert private_folder("dmjd") == temporary
    assert mode(temporary) == 0o700


def made_by_another(path: Path, kind: str) -> None:
    if kind == "link":
        (path.parent / "target").mkdir()
        path.symlink_to(path.parent / "target")
    elif kind == "dangling link":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "file":
        path.write_text("")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "owner":
        path.mkdir(mode=0o700)
        os.chown(path, 12345, -1)
    else:
        path.mkdir()
        path.chmod(int(kind, 8))


KINDS = ["777", "1777", "770", "702", "link", "dangling link", "file", "pipe"]
KINDS += ["owner"] if os.geteuid() == 0 else []


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_others_made_or_can_write_to_is_not_used(
    temporary: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    made_by_another(temporary, kind)
    made_by_another(temporary.with_name(f"{temporary.name}-1"), "777")
    before = {path: path.lstat() for path in temporary.parent.iterdir()}
    own = private_folder("dmjd")
    assert own == private_folder("dmjd"), "all processes of the user agree"
    assert own == temporary.with_name(f"{temporary.name}-2")
    assert mode(own) == 0o700
    assert {path: path.lstat() for path in before} == before
    assert list(own.iterdir()) == []
    assert not (temporary.parent / "nowhere").exists()
    message = caplog.records[0].getMessage()
    assert message.startswith(f"{temporary} is not used, since ")
    assert message.endswith(f"{own} is used instead")


@pytest.mark.parametrize(("mode_of_parent", "warned"), [(0o777, True), (0o1777, False), (0o755, False), (0o702, True)])
def test_a_tmpdir_in_which_all_can_rename_is_warned_of(
    temporary: Path, mode_of_parent: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    temporary.parent.chmod(mode_of_parent)
    assert private_folder("dmjd") == temporary
    assert ("every user can rename files in" in caplog.text) == warned


def test_processes_that_make_it_at_once_agree(temporary: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: private_folder("dmjd"), range(64))) == {temporary}


def test_no_room_for_a_private_folder_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(StorageError, match=r"no folder can be created in TMPDIR .*; set TMPDIR"):
        private_folder("dmjd")


def test_compiled_code_is_not_loaded_from_a_folder_of_others(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"TRITON_CACHE_DIR": "/chosen"})
    temporary.mkdir()
    temporary.chmod(0o777)
    prepare_environment(temporary.parent / "run")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{temporary}-1/inductor"
    assert os.environ["TRITON_CACHE_DIR"] == "/chosen"
