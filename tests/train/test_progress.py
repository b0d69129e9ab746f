"""The bar and its lines are for whoever reads them; a run needs nobody to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path

import pytest

import dmjd.train.progress as progress
from dmjd.train.guard import StepNumbers
from dmjd.train.progress import Progress

NUMBERS = StepNumbers(1.0, 2.0, None, 3.0, applied=1.0, m_corr=0.6, m_pred=1.0)


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIOWrapper]]:
    """The number of the end to read from, and the other as a file that errors are written to."""
    read, write = os.pipe()
    file = os.fdopen(write, "w")
    yield read, file
    with suppress(BrokenPipeError):
        file.close()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_goes_on_when_its_reader_leaves(
    tmp_path: Path, pipe: tuple[int, TextIOWrapper], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    read, errors = pipe
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")  # rich takes the former for a terminal
    with (tmp_path / "stdout").open("w") as stdout:  # rich points it at /dev/null when it meets a broken pipe
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", errors)
        with Progress(3, 0) as bar:
            bar.advance(NUMBERS)
            assert terminal or b"step 1/3" in os.read(read, 1000)
            os.close(read)
            bar.advance(NUMBERS)
            bar.advance(NUMBERS)
