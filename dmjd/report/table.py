"""Runs side by side, in the columns and the order of the paper's efficiency tables."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from dmjd.report.cost import CPU_HOURS, GPU_HOURS, PAPER_GPUS, PAPER_HOURS, computed, device_hours, hardware
from dmjd.report.differences import short_names
from dmjd.report.format import ABSENT, hours, look_up, plain, rate, scores, spread
from dmjd.report.html import table
from dmjd.report.method import base_and_additions
from dmjd.report.run import Run
from dmjd.report.scores import Metric, latest_of, metrics, points, records_of, references, unlike_training
from dmjd.report.speedup import definition, speedup

_PATTERNS = {"uniform": "Uniform", "block": "Block-wise", "beit": "BEiT's block-wise"}
_FORMULA = re.compile(r"^(?=[=+@\t]|-.)")


@dataclass(frozen=True)
class Column:
    """A title, one cell per run, and a footnote where the title needs one."""

    title: str
    cells: list[str]
    meaning: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Columns of equal length, and one sentence per speed-up."""

    columns: list[Column]
    speedups: list[str] = field(default_factory=list)

    @property
    def meanings(self) -> list[tuple[str, str]]:
        """Footnotes: title and meaning of every column that has one."""
        return [(column.title, column.meaning) for column in self.columns if column.meaning]

    def markdown(self, aligned: bool = True) -> str:
        """A Markdown table, by default with aligned source; every text from a run folder is escaped."""
        lines = [[escape_markdown(cell) for cell in (column.title, *column.cells)] for column in self.columns]
        widths = [max(3, *map(len, column)) if aligned else 3 for column in lines]
        sides = [str.rjust if column.numeric else str.ljust for column in self.columns]
        ends = [":" if column.numeric else "-" for column in self.columns]
        rule = ["-" * (width - 1) + end for end, width in zip(ends, widths, strict=True)]
        head, *body = (
            [side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)]
            for row in zip(*lines, strict=True)
        )
        return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])

    def text(self) -> str:
        """The same for a terminal: aligned columns without rules."""
        lines = [[_printable(cell) for cell in (column.title, *column.cells)] for column in self.columns]
        sides = [str.rjust if column.numeric else str.ljust for column in self.columns]
        padded = [
            [side(cell, max(map(len, cells))) for cell in cells] for side, cells in zip(sides, lines, strict=True)
        ]
        return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))

    def csv(self) -> str:
        """The same as CSV. A text that a spreadsheet would take for a formula begins with an apostrophe."""
        file = io.StringIO()
        rows = zip(*((column.title, *column.cells) for column in self.columns), strict=True)
        csv.writer(file, lineterminator="\n").writerows([_FORMULA.sub("'", cell) for cell in row] for row in rows)
        return file.getvalue()

    def html(self, name: str = "Runs") -> str:
        """The same as an HTML table. name: for screen readers."""
        tags = [("td", ' class="number"') if column.numeric else ("td", ' class="text"') for column in self.columns]
        tags[0] = ("th", ' scope="row"')
        sides = [' class="number"' if column.numeric else "" for column in self.columns]
        head = [
            f'<th scope="col"{side}>{escape(column.title)}</th>'
            for side, column in zip(sides, self.columns, strict=True)
        ]
        rows = (
            "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for (tag, kind), cell in zip(tags, cells, strict=True))
            for cells in zip(*(column.cells for column in self.columns), strict=True)
        )
        return table(name, "runs", head, rows)


def compare(runs: Sequence[Run], baseline: Run | None) -> Table:
    """The table of ``runs``, one row each, in their order; ``baseline``, if given, is one of them.

    Raises:
        DataError: if a run's provenance has an invalid world size.
    """
    measured = metrics(runs)
    names = short_names(runs)
    columns = [
        Column("Run", [run.name for run in runs], numeric=False),
        *([Column("Differs in", names, numeric=False)] if {*names} != {ABSENT} else []),
        Column("Method", _methods(runs), numeric=False),
        Column("m_patt", [_pattern(run) for run in runs], numeric=False),
        Column("K", [plain(look_up(run.config, ("mask", "views"))) for run in runs]),
        Column("Epoch", [_epochs(run) for run in runs]),
        Column("ETE", [_effective(run) for run in runs], "effective training epochs, K x epochs done."),
        Column(
            "m_corr",
            [rate(run.last("m_corr")) for run in runs],
            "share of tokens that a view masks, as measured.",
        ),
        Column(
            "m_pred",
            [rate(run.last("m_pred")) for run in runs],
            "share of tokens that are predicted over all views, as measured.",
        ),
        *_score_columns(runs, measured),
        *_cost_columns(runs),
    ]
    reasons: list[str] = []
    if baseline is not None:
        outcomes = [speedup(run, baseline, measured) for run in runs]
        columns.append(Column("Speed-up", [each.cell for each in outcomes], definition(baseline.name)))
        reasons = [each.reason for each in outcomes]
    return Table(columns, reasons)


def _printable(text: str) -> str:
    """``text`` on one line, with a question mark for each control character."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def escape_markdown(text: str) -> str:
    """``text`` on one line, with Markdown and HTML escaped."""
    line = " ".join(text.split())
    # An underscore inside a word needs no escape.
    return re.sub(r"[\\`*<>\[\]|~&$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", line)


def _methods(runs: Sequence[Run]) -> list[str]:
    """Base method and additions; a row that repeats the base above has the additions only, as in the paper."""
    cells, above = [], ""
    for run in runs:
        base, added = base_and_additions(run.config)
        cells.append(added if added and base == above else " ".join(filter(None, (base, added))))
        above = base
    return cells


def _pattern(run: Run) -> str:
    pattern = plain(look_up(run.config, ("mask", "pattern")))
    return _PATTERNS.get(pattern, pattern)


def _epochs(run: Run) -> str:
    """Epochs done; "62.5 of 400" for an unfinished run."""
    asked, done = run.config.get("epochs"), run.last("epoch")
    if done is None:
        return ABSENT
    return _count(done) if asked is None or done >= asked else f"{_count(done)} of {plain(asked)}"


def _effective(run: Run) -> str:
    done = run.effective_epochs(run.last("epoch"))
    return ABSENT if done is None else _count(done)


def _count(epochs: float) -> str:
    return f"{round(epochs, 2):g}"


def _score_columns(runs: Sequence[Run], measured: Sequence[Metric]) -> list[Column]:
    columns = []
    for metric in measured:
        alike = [other for other in measured if other.title == metric.title]
        differing = metric.differing(alike)
        best = [metric.best(point.score for point in points(run, metric)) for run in runs]
        title = f"{metric.heading} ({differing})" if differing else metric.heading
        cells = scores(best, metric.column)
        repeats = [[record.scores[metric.score] for record in latest_of(run, metric)] for run in runs]
        for place, values in enumerate(repeats):
            if len(values) > 1:
                cells[place] = spread(values, metric.column)
        meaning = " ".join([metric.description, *_references(runs, metric), *_unlike(runs, metric)])
        columns.append(Column(title, cells, meaning))
    return columns


def _references(runs: Sequence[Run], metric: Metric) -> list[str]:
    """Chance and majority, which are equal for all runs under equal settings, and the untrained scores."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for name, value in references(run, metric).items():
            text = f"{metric.column.format(value)} {metric.column.unit}".rstrip()
            found.setdefault(name, []).append(f"{text} of {run.name}" if name == "untrained" else text)
    return [f"{name.capitalize()}: {', '.join(dict.fromkeys(texts))}." for name, texts in found.items()]


def _unlike(runs: Sequence[Run], metric: Metric) -> list[str]:
    """Runs that this score measured on images of another size or normalisation than pre-training's."""
    found = [(run.name, unlike_training(run, record)) for run in runs for record in records_of(run, metric)]
    return [f"{name}: {text}." for name, text in dict.fromkeys(found) if text]


def _cost_columns(runs: Sequence[Run]) -> list[Column]:
    used = [hardware(run) for run in runs]
    spent = [device_hours(run) for run in runs]
    columns = [
        Column(f"{kind} hours", [hours(each[kind]) if kind in each else ABSENT for each in spent], meaning)
        for kind, meaning in (("GPU", GPU_HOURS), ("CPU", CPU_HOURS))
        if any(where.kind == kind for where in used)
    ]
    paper = [
        ABSENT if "GPU" not in each else hours(each["GPU"] / PAPER_GPUS) + computed(where)
        for each, where in zip(spent, used, strict=True)
    ]
    return [*columns, Column("Gh.", paper, PAPER_HOURS)]
