"""The wheel that the tests of this folder share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(command: list[str], cwd: Path, **environment: str) -> None:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built outside the checkout by the first of the workers that asks for it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("dmjd-*.whl")):
            build_wheel(folder)
    (built,) = folder.glob("dmjd-*.whl")
    return built


def build_wheel(folder: Path) -> None:
    """Sdist, then wheel. From the sdist, so that a file missing there fails here."""
    # An egg-info of its own: setuptools adds to the sdist whatever an older one lists.
    build(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(folder), "sdist", "-d", str(folder)],
        ROOT,
        DMJD_EXT="off",
        DMJD_CUDA="off",
        DMJD_JPEG="off",
    )
    (sdist,) = folder.glob("dmjd-*.tar.gz")
    # Optimised code takes the compiler half as long again, and is tested as the checkout's.
    compiler = folder / "c++"
    compiler.write_text('#!/bin/bash\nexec c++ "${@/#-O3/-O0}"\n')
    compiler.chmod(0o755)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    build([*pip, str(sdist)], folder, DMJD_EXT="force", DMJD_CUDA="off", CXX=str(compiler))
