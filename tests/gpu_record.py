"""The outcomes of the GPU tests, kept in a file per op: continuous integration has no GPU.

    python tests/gpu_record.py            on a machine with a GPU: run all GPU tests and write the record
    python tests/gpu_record.py OP ...     the same for these ops; the records of all others stay
    python tests/gpu_record.py --check    anywhere: 0 if every op's record is of this code and nothing failed

An op is a module of dmjd/ops with GPU tests in files of tests/ops that are named after it. Its record holds a hash of
its sources: the module, the kernels of the ops that it defines, and all that these import and include. Comments,
docstrings and blank lines are left out of the hash. A changed source asks for the tests of the ops that use it.
Outcomes of the GPU tests outside of tests/ops are kept for readers; nothing checks them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import platform
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "gpu_tests.json"

_CPP = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')|//[^\n]*|/\*.*?\*/""", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#include "(.+)"', re.MULTILINE)
_KERNEL = re.compile(r'\bm\.impl\("(\w+)"')
_OP = re.compile(r'\bdefine\(\s*"(\w+)\(')


def op_of(test: str, root: Path = ROOT) -> str | None:
    """The op that a test of this node id belongs to: the longest name of a module that its file's name begins with."""
    folder, _, name = test.partition("::")[0].rpartition("/test_")
    if folder != "tests/ops":
        return None
    modules = [path.stem.lstrip("_") for path in (root / "dmjd/ops").glob("*.py")]
    found = [module for module in modules if module and re.match(rf"{module}(_|\.py$)", name)]
    return max(found, key=len, default=None)


def sources(op: str, root: Path = ROOT) -> list[Path]:
    """The files that an op is made of."""
    folder = root / "dmjd/ops"
    plain = folder / f"{op}.py"
    found: set[Path] = set()
    _follow(plain if plain.exists() else folder / f"_{op}.py", lambda path: _imports(path, folder), found)
    names = {path.stem for path in found} | {name for path in found for name in _OP.findall(path.read_text())}
    for kernel in sorted((root / "csrc/ops").glob("*/*.c*")):
        if names.intersection(_KERNEL.findall(kernel.read_text())):
            _follow(kernel, _includes, found)
            _follow(kernel.with_name("module.cpp"), _includes, found)
    return sorted(found)


def _follow(path: Path, leads_to: Any, found: set[Path]) -> None:
    if path not in found:
        found.add(path)
        for other in leads_to(path):
            _follow(other, leads_to, found)


def _includes(path: Path) -> Iterator[Path]:
    for name in _INCLUDE.findall(path.read_text()):
        yield (path.parent / name).resolve()


def _imports(path: Path, folder: Path) -> Iterator[Path]:
    """Modules of dmjd.ops, which `from dmjd.ops import name` and `from dmjd.ops.name import ...` name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dmjd.ops"):
            names = [alias.name for alias in node.names] if node.module == "dmjd.ops" else [str(node.module)[9:]]
            yield from (module for name in names if (module := folder / f"{name}.py").exists())


def code(path: Path) -> str:
    """The lines of a source without comments, docstrings and blank lines."""
    text = path.read_text()
    text = _python(text) if path.suffix == ".py" else _CPP.sub(lambda found: found[1] or " ", text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


@cache
def _python(text: str) -> str:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = ""  # a string that is a statement has its lines to itself
    return "\n".join(lines)


def fingerprint(op: str, root: Path = ROOT) -> str:
    """sha256 over the sorted paths and the code of the op's sources."""
    digest = hashlib.sha256()
    for path in sources(op, root):
        for part in (path.relative_to(root).as_posix().encode(), code(path).encode()):
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


def by_op(tests: Iterable[str], root: Path = ROOT) -> dict[str | None, list[str]]:
    """The tests of every op; of None those that belong to none."""
    found: dict[str | None, list[str]] = defaultdict(list)
    for test in tests:
        found[op_of(test, root)].append(test)
    return found


def record(ops: Sequence[str], path: Path = RECORD) -> int:
    """Run the GPU tests of ``ops``, or all, and write their records into ``path``; pytest's exit code, or 1."""
    # As `python -m pytest` at the top of the checkout: this folder, which python put there, has no modules to offer.
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    import pytest
    import torch

    files = by_op(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/ops").glob("test_*.py")))
    unknown = [op for op in ops if op not in files]
    if unknown:
        print(f"no op {unknown[0]}, expected one of {', '.join(sorted(filter(None, files)))}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to record", file=sys.stderr)
        return 1
    recorder = Recorder()
    ended = pytest.main(["-m", "gpu", *(file for op in ops for file in files[op])], plugins=[recorder])
    facts = {
        "card": torch.cuda.get_device_name(),
        "cards": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    records = json.loads(path.read_text()) if ops else {}
    for op, tests in by_op(sorted(recorder.outcomes)).items():
        outcomes = {test: recorder.outcomes[test] for test in tests}
        records[op or "others"] = facts | ({"sha256": fingerprint(op)} if op else {}) | {"tests": outcomes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
    print(path)
    return int(ended)


def errors(path: Path = RECORD, root: Path = ROOT, expected: Iterable[str] = ()) -> dict[str, str]:
    """The ops whose records do not hold for the sources under ``root``, with the reason.

    ``expected`` are the tests that the records must hold, an op's in the op's.
    """
    records = json.loads(path.read_text()) if path.is_file() else {}
    required = by_op(expected, root)
    found: dict[str, str] = {}
    for op in sorted({op for op in (*records, *required) if op not in (None, "others")}):
        problem = _error(op, records.get(op), required.get(op, ()), root)
        if problem:
            found[op] = problem
    return found


def _error(op: str, facts: dict[str, Any] | None, expected: Iterable[str], root: Path) -> str | None:
    if facts is None:
        return "its GPU tests have not run"
    tests: dict[str, str] = facts["tests"]
    run = f"on {facts['card']} ({facts['date']})"
    if facts["sha256"] != fingerprint(op, root):
        return f"its sources changed since its GPU tests ran {run}"
    # A file that could not be imported there is listed without "::"; the tests in it have no outcome.
    failed = [test for test, outcome in tests.items() if "::" in test and outcome == "failed"]
    if failed:
        return f"{len(failed)} of {len(tests)} GPU tests failed {run}, the first is {failed[0]}"
    unknown = [test for test in expected if test not in tests]
    if unknown:
        return f"{len(unknown)} GPU tests have no outcome {run}, the first is {unknown[0]}"
    if "passed" not in tests.values():
        return f"no GPU test passed {run}"
    return None


def report(found: dict[str, str]) -> str:
    """``errors`` as lines, with the command that makes new records."""
    lines = [f"{op}: {problem}" for op, problem in found.items()]
    cure = f"on a machine with a GPU run `python tests/gpu_record.py {' '.join(found)}` and commit {RECORD.name}"
    return "\n".join([*lines, cure])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="modules of dmjd/ops; all by default")
    parser.add_argument("--check", action="store_true", help="check the records instead of writing them")
    arguments = parser.parse_args()
    if not arguments.check:
        return record(arguments.ops)
    found = errors()
    print(report(found) if found else f"{RECORD.relative_to(ROOT)} is of this code, and nothing failed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
