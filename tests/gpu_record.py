"""The outcome of the GPU tests, kept in a file: continuous integration has no card.

    python tests/gpu_record.py [pytest arguments]    on a machine with a card: run the tests, write the record
    python tests/gpu_record.py --check               anywhere: 0 if the record is of this code and nothing failed

The record holds a hash of csrc/ and dmjd/ops. Whoever changes either runs the tests on a card and commits the record.
It is judged by the tests of those sources; what it says of steps and engines, which no hash dates, is for readers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "gpu_tests.json"
HASHED = ("csrc", "dmjd/ops")
JUDGED = "tests/ops/"
SUFFIXES = (".py", ".h", ".cuh", ".cpp", ".cu")
REFRESH = "on a machine with a card run `python tests/gpu_record.py` and commit benchmarks/results/gpu_tests.json"


def fingerprint(root: Path = ROOT) -> str:
    """sha256 over the sorted paths and the contents of the sources under :data:`HASHED`."""
    digest = hashlib.sha256()
    paths = [path for folder in HASHED for path in (root / folder).rglob("*") if path.suffix in SUFFIXES]
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class Recorder:
    """A pytest plugin that keeps what became of every test, the worst of its phases."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase (setup, call, teardown) of one test."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = f"skipped: {report.longrepr[-1].removeprefix('Skipped: ')}"
        elif report.when == "call":
            self.outcomes[report.nodeid] = "passed"

    def pytest_collectreport(self, report: Any) -> None:
        """A file that could not be read has failed."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"


def record(arguments: Sequence[str], path: Path = RECORD) -> int:
    """Run the GPU tests and write ``path``; pytest's exit code, or 1 without a card."""
    # As `python -m pytest` at the top of the checkout: this folder, which python put there, has no modules to offer.
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    import pytest
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to record", file=sys.stderr)
        return 1
    recorder = Recorder()
    code = pytest.main(["-m", "gpu", *arguments], plugins=[recorder])
    facts = {
        "card": torch.cuda.get_device_name(),
        "cards": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "sha256": fingerprint(),
        "tests": dict(sorted(recorder.outcomes.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(path)
    return int(code)


def complaint(path: Path = RECORD, root: Path = ROOT, expected: Sequence[str] = (), judged: str = JUDGED) -> str | None:
    """What is wrong with the record of ``path`` for the sources under ``root``, in one sentence; None if nothing is.

    ``expected`` are tests that it has to know. Only those whose names begin with ``judged`` count.
    """
    if not path.is_file():
        return f"there is no record of the GPU tests: {REFRESH}"
    facts = json.loads(path.read_text())
    tests: dict[str, str] = {name: outcome for name, outcome in facts["tests"].items() if name.startswith(judged)}
    if facts["sha256"] != fingerprint(root):
        return f"csrc/ or dmjd/ops changed since the GPU tests ran on {facts['card']} ({facts['date']}): {REFRESH}"
    # A file that could not be read where the card is stands without "::"; what it hides has no recorded outcome below.
    failed = [
        name
        for name, outcome in tests.items()
        if "::" in name and outcome != "passed" and not outcome.startswith("skipped")
    ]
    if failed:
        return f"on {facts['card']} {len(failed)} of {len(tests)} GPU tests failed, such as {failed[0]}: {REFRESH}"
    unknown = [name for name in expected if name.startswith(judged) and name not in tests]
    if unknown:
        return f"{len(unknown)} GPU tests have no recorded outcome, such as {unknown[0]}: {REFRESH}"
    if "passed" not in tests.values():
        return f"no GPU test has run on {facts['card']}: {REFRESH}"
    return None


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="judge the record instead of writing it")
    known, rest = parser.parse_known_args()
    if not known.check:
        return record(rest)
    wrong = complaint()
    print(wrong or f"{RECORD.relative_to(ROOT)} is of this code, and nothing failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
