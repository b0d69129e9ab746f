"""Modules that read a run folder must be importable without torch: the report uses them."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("dmjd.runs.paths", "dmjd.runs.exit_record", "dmjd.runs.heartbeat", "dmjd.report", "dmjd.api")


def test_the_imports_do_not_import_torch() -> None:
    loop = f"import sys\nfor name in {MODULES}:\n    __import__(name)\n    assert 'torch' not in sys.modules, name"
    assert subprocess.run([sys.executable, "-c", loop]).returncode == 0
