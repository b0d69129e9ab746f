from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from dmjd.data.stream.pipe import Pipe


def read(command: str, stall: float = 10.0) -> bytes:
    with Pipe(command, stall) as pipe:
        return pipe.readall() or b""


def test_it_is_what_the_command_writes(tmp_path: Path) -> None:
    content = os.urandom(300_000)
    (tmp_path / "a").write_bytes(content)
    assert read(f"cat {tmp_path / 'a'}") == content
    assert read(f"cat {tmp_path / 'a'} | tail -c 7") == content[-7:]
    with io.BufferedReader(Pipe(f"cat {tmp_path / 'a'}", 10), 1 << 16) as pipe:
        assert pipe.read(200_000) + pipe.read(200_000) == content


def test_an_exit_code_is_an_error_though_all_was_read() -> None:
    with pytest.raises(OSError, match="ended with exit code 3"):
        read("echo whole; exit 3")
    with pytest.raises(OSError, match="ended with exit code 127"):
        read("no_such_command_here 2> /dev/null")


@pytest.mark.parametrize("command", ["sleep 60", "echo a; sleep 60", "exec 1>&-; sleep 60"])
def test_a_command_that_stalls_is_given_up(command: str) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        read(command, stall=0.2)
    assert time.monotonic() - begin < 10


def test_closing_ends_all_that_the_command_has_started(tmp_path: Path) -> None:
    pipe = Pipe(f"(sleep 60 & echo $! > {tmp_path / 'pid'}; echo ready; wait) | cat", 10)
    assert pipe.read(6) == b"ready\n"
    child = int((tmp_path / "pid").read_text())
    pipe.close()
    pipe.close()
    end = time.monotonic() + 10
    while Path(f"/proc/{child}/status").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
