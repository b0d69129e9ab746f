"""Progress on a real terminal of 40, 80 and 120 columns, on one without colours or without control codes, in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pytest

from dmjd import progress

PROGRAM = """
import contextlib, logging, os, sys, time, warnings
from dmjd import progress
progress.SHOW_AFTER, progress.LINE_SECONDS = float(sys.argv[1]), 0.2
progress.begin()
logging.basicConfig(format="%(message)s", level=logging.INFO, handlers=[progress.LogHandler()])
with progress.Progress("pretrain", None), progress.Progress("step", 8000, 7900, images=64) as bar:
    for step in range(int(sys.argv[2])):
        time.sleep(0.02)
        bar.advance(loss="0.1234", epoch="99/100", lr="1.5e-04")
        if step == 15:
            logging.getLogger("dmjd").info("a record" + " and more of it" * 10)
            warnings.warn("a warning")
            child = os.fork()
            if not child:
                logging.getLogger("dmjd").info("a child's record")
                os._exit(0)
            os.waitpid(child, 0)
            for _ in progress.track("abc", "images", 3):
                time.sleep(0.1)
with contextlib.suppress(OSError):
    print("result")
"""
RECORD = "a record" + " and more of it" * 10


def on_terminal(columns: int, *arguments: str, hang_up: bool = False, **environment: str) -> tuple[str, int]:
    """(what :data:`PROGRAM` wrote to a terminal of so many columns, its exit code)."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    }
    command = [sys.executable, "-c", PROGRAM, *arguments]
    environment = {**inherited, "TERM": "xterm", **environment}
    written = b""
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as child:
        os.close(end)
        with suppress(OSError):  # EIO at the end
            while data := os.read(terminal, 1 << 16):
                written += data
                if hang_up and b"loss" in written:
                    break
        os.close(terminal)
        return written.decode(), child.wait(60)


def screen_lines(written: str) -> list[str]:
    """All that ever stood in a line of the terminal: frames of the bar and whole lines above it, without colours."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", written)
    return [line for line in re.split(r"[\r\n]+|\x1b\[\d*[A-Z]", plain) if line.strip()]


@pytest.mark.parametrize(
    ("columns", "shown", "left_out"),
    [
        (40, ("loss 0.1234", "ETA 0:00:0"), ("epoch", "lr", "img/s")),
        (80, ("loss 0.1234", "ETA 0:00:0", "epoch 99/100", "img/s", "lr 1.5e-04"), ()),
        (120, ("loss 0.1234", "ETA 0:00:0", "epoch 99/100", "img/s", "lr 1.5e-04", "━━━━━━"), ()),
    ],
)
def test_the_bar_fits_the_terminal_and_the_log_stands_above_it(
    columns: int, shown: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    written, code = on_terminal(columns, "0.1", "45")
    assert code == 0
    lines = screen_lines(written)
    bars = [line for line in lines if line.startswith("step ")]
    assert len(bars) > 3
    assert max(map(len, bars)) <= columns
    for part in shown:
        assert part in bars[-1]
    for part in left_out:
        assert part not in "".join(bars)
    assert RECORD in lines, "not glued to the bar, not broken"
    assert any(line.endswith("UserWarning: a warning") for line in lines)
    assert any(re.match(r"images [0-3]/3 ", line) for line in lines)
    assert "a child's record" in lines, "it waits for no lock of its parent's threads"
    assert lines[-1] == "result"
    assert re.search(r"step 7945/8000[^\r]*\r\n[^\n]*result", written), "the bar's last state stays"


def test_without_colours_there_are_none() -> None:
    written, code = on_terminal(80, "0.1", "20", NO_COLOR="1")
    assert code == 0
    assert "loss 0.1234" in written
    assert not re.search(r"\x1b\[[\d;]*m", written)


def test_a_terminal_without_control_codes_and_a_pipe_get_lines() -> None:
    written, code = on_terminal(40, "0.1", "40", TERM="dumb")
    command = [sys.executable, "-c", PROGRAM, "0.1", "40"]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (code, done.returncode, done.stdout) == (0, 0, "result\n")
    for text in (written, done.stderr):
        assert "\x1b" not in text
        lines = text.splitlines()
        assert RECORD in lines
        steps = [line for line in lines if line.startswith("step ")]
        assert len(steps) > 2
        for line in steps:
            assert re.fullmatch(
                r"step 79\d\d/8000  loss 0.1234  epoch 99/100  lr 1.5e-04  \d+ img/s  ETA 0:00:\d\d", line
            )


def test_another_process_of_a_launch_shows_nothing() -> None:
    command = [sys.executable, "-c", PROGRAM, "0.1", "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "RANK": "1"})
    assert "step" not in done.stderr
    assert RECORD in done.stderr


def test_a_short_command_shows_nothing() -> None:
    written, code = on_terminal(80, "60", "10")
    assert (written, code) == ("result\r\n", 0)


def test_a_command_goes_on_when_its_terminal_or_its_reader_is_gone() -> None:
    assert on_terminal(80, "0.1", "25", hang_up=True)[1] in (0, 120), "120: the result itself could not be written"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "0.1", "25"], stderr=subprocess.PIPE, stdout=-1, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stderr.readline()
        child.stderr.close()
        assert child.stdout.read() == "result\n"
        assert child.wait(60) == 0


def test_the_remaining_time_has_a_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "SHOW_AFTER", 0.0)
    with progress.Progress("step", 10**18) as bar:
        for _ in range(2):
            time.sleep(0.01)
            bar.advance()
    assert "ETA 115740 days" in capsys.readouterr().err
