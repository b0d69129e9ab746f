"""Comparison of several runs: a table and convergence curves, as Markdown, as a self-contained page and as a PNG."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dmjd.errors import ConfigError
from dmjd.files import replace_file
from dmjd.report.differences import differences, labels
from dmjd.report.html import chart, charts, details, disclosure, document, heading, notes, paragraph
from dmjd.report.html import table as html_table
from dmjd.report.paper import PaperTable, paper_section, paper_table, published_fold
from dmjd.report.run import Run, read_runs
from dmjd.report.table import Table, compare, escape_markdown

if TYPE_CHECKING:
    from dmjd.report.curves import Convergence


def write_comparison(
    run_paths: Sequence[str | Path], baseline: str | Path | None = None, output: str | Path | None = None
) -> list[Path]:
    """Write ``comparison.md``, ``comparison.html``, ``convergence.png`` and ``comparison.csv`` and return their paths.

    Args:
        run_paths: two run folders or more, in the order of the rows.
        baseline: the run that speed-ups refer to; None for no speed-ups.
        output: a folder, created if needed; by default ``comparison`` in the runs' common parent folder.

    Raises:
        ConfigError: if a run is listed twice, the baseline is not among the runs, or ``output`` is not writable.
        DataError: if a folder is not a complete run folder.
    """
    if isinstance(run_paths, (str, os.PathLike)):
        raise ConfigError(f"run_paths={str(run_paths)!r} must be a list of two run folders or more")
    folders = [Path(path).resolve() for path in run_paths]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise ConfigError(f"{run_paths[index]} is listed twice; list every run once")
    chosen = None if baseline is None else Path(baseline).resolve()
    if chosen is not None and chosen not in folders:
        raise ConfigError(f"baseline={baseline} is not one of the runs; choose from {', '.join(map(str, run_paths))}")
    runs = read_runs(run_paths)
    reference = None if chosen is None else runs[folders.index(chosen)]
    table, paper = compare(runs, reference), paper_table(runs)
    from dmjd.report.curves import convergence  # imports matplotlib, which takes a second

    curves = convergence(runs, reference, labels(runs))
    parent = Path(os.path.commonpath([folder.parent for folder in folders]))
    target = parent / "comparison" if output is None else Path(output)
    files: dict[str, bytes | str] = {
        "comparison.md": _markdown(table, paper, curves.caption),
        "comparison.html": _page(runs, table, paper, curves),
        "convergence.png": curves.png,
        "comparison.csv": paper.table.csv(),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(target / name, content)
    except OSError as error:
        raise ConfigError(f"cannot write to {target}: {error.strerror}; set another folder with output=") from error
    return [target / name for name in files]


def _markdown(table: Table, paper: PaperTable, caption: str) -> str:
    def listed(lines: Sequence[str]) -> str:
        return "\n".join(f"- {line}" for line in lines)

    meanings = [f"**{escape_markdown(title)}**: {escape_markdown(text)}" for title, text in table.meanings]
    parts = ["# Comparison", table.markdown()]
    if table.speedups:
        parts += ["## Speed-up", listed([escape_markdown(line) for line in table.speedups])]
    parts += ["## Columns", listed(meanings)]
    parts += ["## Scores and published rows", paper.table.markdown()]
    lines = [escape_markdown(line) for line in (*paper.values, *paper.notes)]
    parts += [listed(lines)] * bool(lines)
    parts += ["## Convergence", "![Convergence](convergence.png)", escape_markdown(caption)]
    return "\n\n".join(parts) + "\n"


def _page(runs: Sequence[Run], table: Table, paper: PaperTable, curves: Convergence) -> str:
    speedups = [heading("Speed-up"), notes(table.speedups)] if table.speedups else []
    drawn = [chart(each.title, each.svg, each.legend, each.caption) for each in curves.charts]
    return document(
        "Comparison",
        paragraph(", ".join(run.name for run in runs)),
        heading("Runs"),
        table.html(),
        *speedups,
        *paper_section(paper),
        heading("Convergence"),
        charts(drawn),
        paragraph(curves.caption),
        heading("Columns"),
        notes([f"{title}: {text}" for title, text in table.meanings]),
        details([*_differing(runs), published_fold()]),
    )


def _differing(runs: Sequence[Run]) -> list[str]:
    """All keys in which the configurations differ, and their values."""
    rows = [
        f'<th scope="row">{escape(key)}</th>' + "".join(f'<td class="text">{escape(value)}</td>' for value in values)
        for key, values in differences(runs).items()
    ]
    if not rows:
        return []
    keys = html_table("Differing keys", "runs", ["Key", *(run.name for run in runs)], rows)
    return [disclosure(f"Keys that differ ({len(rows)})", keys)]
