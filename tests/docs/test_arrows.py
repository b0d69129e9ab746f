"""The table of arrows in docs/architecture.md is what the files of dmjd/ import from each other."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dmjd"


def table() -> dict[str, set[str]]:
    """Package or module -> what it imports, in the order of the table; continuation lines are indented."""
    (block,) = re.findall(r"```arrows\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    rows: dict[str, set[str]] = {}
    for line in block.splitlines():
        names = line.split()
        if line[0] != " ":
            importer, *names = names
            assert importer not in rows, f"{importer} has two lines"
            rows[importer] = set()
        rows[importer] |= set(names)
    return rows


def imports(path: Path) -> Iterator[str]:
    """Dotted names of every module and object that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(path: Path) -> str:
    """The package or module that a file of dmjd/ belongs to."""
    first = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return {"__main__": "cli", "__init__": "dmjd"}.get(first, first)


FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = {part(path) for path in FILES}


def arrows() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for name in imports(path):
            top, _, rest = name.partition(".")
            inner = rest.partition(".")[0]
            if top == "dmjd" and not re.match(r"_[a-z]", inner):  # dmjd._core and the like are native libraries
                found[part(path)].add(inner if inner in PARTS else "dmjd")
    return {importer: found[importer] - {importer} for importer in PARTS}


def test_the_table_is_what_the_files_import() -> None:
    rows, found = table(), arrows()
    assert rows.keys() == found.keys()
    wrong = [f"{name:13} {' '.join(sorted(found[name]))}" for name, allowed in rows.items() if found[name] != allowed]
    assert not wrong, "these lines of docs/architecture.md should be:\n" + "\n".join(wrong)


def test_every_arrow_goes_to_a_line_above() -> None:
    above: set[str] = set()
    for importer, names in table().items():
        assert names <= above, f"{importer} imports {', '.join(sorted(names - above))}, which is not above it"
        above.add(importer)


def test_evaluate_does_not_import_train() -> None:
    assert "train" not in arrows()["evaluate"]


def test_report_imports_only_the_modules_of_runs_without_torch() -> None:
    names = {name for path in FILES if part(path) == "report" for name in imports(path)}
    modules = {name.split(".")[2] for name in names if name.startswith("dmjd.runs.")}
    assert "dmjd.runs" not in names
    assert modules <= {"paths", "exit_record", "heartbeat"}


def test_ops_import_torch_only() -> None:
    tops = {name.partition(".")[0] for path in FILES if part(path) == "ops" for name in imports(path)}
    assert tops - sys.stdlib_module_names <= {"torch", "triton", "dmjd"}  # triton comes with torch
    assert arrows()["ops"] == set()
