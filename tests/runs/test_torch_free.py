"""Modules that read a run folder must be importable without torch: the report uses them."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ("dmjd.runs.paths", "dmjd.runs.exit_record", "dmjd.runs.heartbeat", "dmjd.report")


@pytest.mark.parametrize("module", MODULES)
def test_the_import_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
