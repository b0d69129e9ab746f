"""The paper's table of runs: ETE, Gh. and scores, beside the published rows of each method.

Runs that differ in the seed only are one row, and repeated evaluations that differ in the seed only one score: mean,
sample standard deviation and number of values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from dmjd.report.cost import PAPER_GPUS, PAPER_HOURS, computed, device_hours, hardware
from dmjd.report.differences import SEED, seed_groups, short_names
from dmjd.report.format import ABSENT, hours, look_up, plain, spread
from dmjd.report.html import disclosure, heading, notes
from dmjd.report.method import method_name
from dmjd.report.published import MARK, PUBLISHED, Identity, Published, identity
from dmjd.report.run import Record, Run, columns_of, read_runs
from dmjd.report.scores import Metric, latest_of, metrics, records_of, references, repeats_of
from dmjd.report.table import Column, Table

SCORES = {
    "finetune": "Ft.",
    "linprobe": "LP",
    "knn": "kNN",
    "segment": "mIoU",
    "miou": "mIoU, dmjd miou",
    "detect": "AP box/mask",
    "ap": "AP, dmjd ap",
}
"""Evaluation -> its column in the paper's order."""
_OTHER_IMAGES = ("segment", "miou", "detect", "ap")
"""Evaluations that are never of the images of pre-training."""
PUBLISHED_NOTE = (
    f"{MARK} Published figures: measured by their authors on ImageNet-1k (mIoU on ADE20K, AP on COCO), Gh. on "
    f"{PAPER_GPUS} A100 40 GB. Scores of runs are measured on the data in the columns' notes. They are comparable "
    "with published ones only if data and protocol agree."
)
_LONG_TITLE = 20
_ABBREVIATIONS = {
    "ETE": "effective training epochs (views x epochs)",
    "Gh.": f"wall hours of pre-training on {PAPER_GPUS} GPUs",
    "Ft.": "top-1 in % after fine-tuning",
    "LP": "top-1 in % of a linear probe",
    "kNN": "top-1 in % of k-nearest-neighbour classification",
}
"""First word of a column's title -> its meaning, for the terminal."""
_ETE = "effective training epochs, K x epochs done; a published sum includes those of the tokenizer."
_HOURS = "number of devices x wall hours of pre-training over all launches, and the devices."
_SPREAD = "mean ± sample standard deviation (number of seeds)."


@dataclass(frozen=True)
class PaperTable:
    """The table and what belongs to it.

    own: its first rows, of runs and not published.
    notes: meaning of the marks, runs without a published row, and contradictions between published sources.
    values: the single values behind each mean.
    """

    table: Table
    own: int
    notes: list[str]
    values: list[str]

    @property
    def has_published(self) -> bool:
        """Whether there is a published row, or a note."""
        return bool(self.notes) or len(self.table.columns[0].cells) > self.own


class Head(NamedTuple):
    """A column of scores.

    evaluation: of :data:`SCORES`.
    protocol: of linear probes; "" if it is not stated.
    published: whether published figures may stand in it: all labels, and no moving average.
    """

    evaluation: str
    title: str
    protocol: str = ""
    published: bool = True


@dataclass(frozen=True)
class _Row:
    """One row before the columns are known. cells: title -> text. scores: column -> text."""

    cells: Mapping[str, str]
    scores: Mapping[Head, str]


def paper_table(runs: Sequence[Run]) -> PaperTable:
    """The rows of ``runs``, of their untrained encoders, and of the published methods that they are.

    Raises:
        DataError: if a run's provenance has an invalid world size.
    """
    groups = seed_groups([run for run in runs if not _is_in_origin(run, runs)])
    found = [metric for metric in metrics(runs) if not metric.online and _is_main(metric)]
    found.sort(key=lambda metric: list(SCORES).index(metric.evaluation))
    heads = {metric: _head(metric, found, runs) for metric in found}
    names = _differing([group[0] for group in groups], seeds=all(len(group) == 1 for group in groups))
    rows: list[_Row] = []
    values: list[str] = []
    for group, name in zip(groups, names, strict=True):
        rows += _rows_of(group, "" if name == ABSENT else name, heads)
        values += _single_values(group, heads)
    own, matched = len(rows), _matched(runs)
    columns = dict.fromkeys(heads.values())
    for row in matched:
        scores = _published_scores(row, columns)
        columns |= dict.fromkeys(scores)
        rows.append(_Row(_published_cells(row), scores))
    ordered = sorted(columns, key=lambda head: list(SCORES).index(head.evaluation))
    table = Table(_columns(rows, ordered, _meanings(heads, values)))
    return PaperTable(table, own, _notes(runs, matched), values)


def paper_text(run_paths: Sequence[str | Path]) -> str:
    """The table of :func:`paper_table` and its notes as plain text, for a terminal.

    Columns in which no run has a value are left out; conditions in long titles are numbered and listed below.

    Raises:
        DataError: as :func:`~dmjd.report.run.read_run`.
    """
    paper = paper_table(read_runs(run_paths))
    known = [column for column in paper.table.columns if {*column.cells[: paper.own]} != {ABSENT}]
    listed: list[str] = []
    for place, column in enumerate(known):
        name, _, conditions = column.title.removesuffix(")").partition(" (")
        if conditions and len(column.title) > _LONG_TITLE:
            listed.append(f"[{len(listed) + 1}] {name}: {conditions}.")
            known[place] = replace(column, title=f"{name} [{len(listed)}]")
    titles = {column.title.partition(" ")[0] for column in known}
    meanings = [f"{name}: {meaning}" for name, meaning in _ABBREVIATIONS.items() if name in titles]
    return "\n".join(
        [Table(known).text(), *["; ".join(meanings) + "."] * bool(meanings), *listed, *paper.values, *paper.notes]
    )


def published_table() -> Table:
    """All published rows, in their order."""

    def figures(title: str, value: Callable[[Published], float | None]) -> Column:
        return Column(title, [_figure(value(row)) for row in PUBLISHED])

    return Table(
        [
            Column("Method", [row.name for row in PUBLISHED], numeric=False),
            Column("Backbone", [row.backbone for row in PUBLISHED], numeric=False),
            Column("Target", [row.target for row in PUBLISHED], numeric=False),
            Column("ETE", [row.ete or ABSENT for row in PUBLISHED]),
            Column("Gh.", [_hours(row) for row in PUBLISHED]),
            figures("Ft.", lambda row: row.finetune),
            figures("LP", lambda row: row.linear),
            Column("LP protocol", [row.protocol or ABSENT for row in PUBLISHED], numeric=False),
            figures("kNN", lambda row: row.knn),
            figures("mIoU", lambda row: row.miou),
            Column("AP box/mask", [_precision(row) for row in PUBLISHED]),
            Column("Source", ["; ".join(filter(None, (row.source, row.note))) for row in PUBLISHED], numeric=False),
        ]
    )


def _pretrained(run: Run) -> Run | None:
    """The pre-training run of ``run``; None for a fine-tuning run whose initial weights are of no run at hand."""
    if run.training is None:
        return run
    return None if run.config.get("weights") == "untrained" else run.origin


def _is_in_origin(run: Run, runs: Sequence[Run]) -> bool:
    """Whether the score of a fine-tuning run, or of its repeat with equal seeds, stands in the row of the run that it
    began from: not if others began from a later checkpoint."""
    for origin in runs:
        if run.origin and origin.path.resolve() == run.origin.path.resolve():
            own = [each for each in origin.evaluations if each.settings.get("run") == run.path.resolve().name]
            shown = [each for metric in metrics([origin]) for each in latest_of(origin, metric)]
            if any({**each.settings, "run": ""} == {**other.settings, "run": ""} for each in own for other in shown):
                return True
    return False


def _is_main(metric: Metric) -> bool:
    return metric.evaluation in SCORES and metric.score == next(iter(columns_of(metric.evaluation)))


def _head(metric: Metric, others: Sequence[Metric], runs: Sequence[Run]) -> Head:
    """ "Ft.", "LP (protocol mae)", "kNN (k 20)"; a linear probe names its protocol, and a choice on test images; a
    score on other data than the pre-training's of one of ``runs`` names its data."""
    protocol, few = _kind(metric)
    alike = [other for other in others if (other.title, _kind(other)) == (metric.title, (protocol, few))]
    settings = json.loads(metric.settings)
    chosen, differing = settings.get("selection"), metric.differing(alike)
    data = f"data {plain(settings.get('data'))}"
    foreign = data not in differing and any(_is_foreign(run, metric) for run in runs)
    conditions = [
        *([f"protocol {protocol}"] if protocol else []),
        *([f"{few} % of labels" if few != "list" else "listed labels"] if few else []),
        *([plain(chosen)] if chosen else []),
        *([data] if foreign else []),
        *filter(None, [differing]),
    ]
    average = metric.weights == "ema"
    title = SCORES[metric.evaluation] + " EMA" * average
    if conditions:
        title += f" ({', '.join(conditions)})"
    return Head(metric.evaluation, title, protocol, not (few or average))


def _is_foreign(run: Run, metric: Metric) -> bool:
    """Whether ``run`` has ``metric``, on images of another data set than its pre-training's."""
    name, root = (look_up((_pretrained(run) or run).config, ("data", key)) for key in ("name", "root"))
    source = json.loads(metric.settings).get("data")
    unknown = metric.evaluation in _OTHER_IMAGES or name in (None, "auto") or (name == "folder" and root is None)
    if unknown or source is None or not records_of(run, metric):
        return False
    own = f"{name} in {root}" if root else str(name)
    return not f"{source},".startswith(f"{own},")


def _kind(metric: Metric) -> tuple[str, str]:
    """The protocol of a linear probe, whose automatic one is not recorded, and the share of labels that it used."""
    settings = json.loads(metric.settings)
    few = settings.get("few_shot")
    protocol = plain(settings.get("protocol", "auto")) if metric.evaluation == "linprobe" else ""
    return protocol, "" if few is None else plain(few)


def _rows_of(group: Sequence[Run], name: str, heads: Mapping[Metric, Head]) -> list[_Row]:
    """The row of runs that differ in the seed only, and that of their untrained encoders if it has a score."""
    cells = {"Run": _row_name(group), "Differs in": name, **_facts(group)}
    trained, untrained = dict[Head, str](), dict[Head, str]()
    for metric, head in heads.items():
        records = [record for _, record in repeats_of(group, metric)]
        after = [record.scores[metric.score] for record in records]
        known = {plain(run.config.get(SEED)): references(run, metric).get("untrained") for run in group}
        before = [score for score in known.values() if score is not None]
        for row, scores in ((trained, after), (untrained, before)):
            if scores:
                row[head] = _text(scores, metric)
        masks = [record.scores["mask_ap"] for record in records if "mask_ap" in record.scores]
        if after and len(masks) == len(after):
            trained[head] += f"/{_text(masks, metric)}"
    below = {"Run": "untrained encoder", "Backbone": cells["Backbone"]}
    return [_Row(cells, trained), *([_Row(below, untrained)] if untrained else [])]


def _text(scores: Sequence[float], metric: Metric) -> str:
    return spread(scores, metric.column) if len(scores) > 1 else metric.column.format(scores[0])


def _row_name(group: Sequence[Run]) -> str:
    """Names of the runs; of many or long names the first and the number of the others."""
    names = ", ".join(run.name for run in group)
    return names if len(group) == 1 or len(names) <= 40 else f"{group[0].name} and {len(group) - 1} more"


def _differing(runs: Sequence[Run], seeds: bool) -> list[str]:
    """Keys in which one run of each row differs from the others; with ``seeds`` the seed too."""
    if seeds:
        return short_names(runs)
    return short_names(
        [replace(run, config={key: run.config[key] for key in run.config if key != SEED}) for run in runs]
    )


def _facts(group: Sequence[Run]) -> dict[str, str]:
    """Method, backbone, target, ETE and cost of runs that differ in the seed only."""
    sources = [source for run in group if (source := _pretrained(run)) is not None]
    if not sources:
        untrained = group[0].config.get("weights") == "untrained" or group[0].config.get("init") is None
        method = "none (untrained)" if untrained else ABSENT
        return {"Method": method, "Backbone": identity(group[0].config).backbone}
    run, what = sources[0], identity(sources[0].config)
    epochs = run.effective_epochs(run.last("epoch"))
    spent = [device_hours(source) for source in sources]
    gpu = [each["GPU"] / PAPER_GPUS for each in spent if "GPU" in each]
    cpu = [each["CPU"] for each in spent if "CPU" in each]
    used = [hardware(source) for source in sources]
    where = " or ".join(dict.fromkeys(filter(None, map(str, used))))
    if len(gpu) == len(sources):
        where = f"{hours(PAPER_GPUS * mean(gpu))} GPU hours, {where}"
    elif len(cpu) == len(sources):
        where = f"{hours(mean(cpu))} CPU hours, {where}"
    published = any(row.matches(run.config) for row in PUBLISHED)
    return {
        "Method": what.method if published else method_name(run.config),
        "Backbone": what.backbone,
        "Target": what.target,
        "ETE": ABSENT if epochs is None else f"{round(epochs, 2):g}",
        "Gh.": hours(mean(gpu)) + computed(*used) if len(gpu) == len(sources) else ABSENT,
        "Device hours": where,
    }


def _single_values(group: Sequence[Run], heads: Mapping[Metric, Head]) -> list[str]:
    name, names = _row_name(group), ", ".join(run.name for run in group)
    lines = [f"{name}: {names}."] if name != names else []
    for metric, head in heads.items():
        repeats = sorted(repeats_of(group, metric), key=lambda each: _seed(each[1]))
        found = [each for run in group for each in repeats if each[0] is run]
        if len(found) > 1:
            scores = [metric.column.format(record.scores[metric.score]) for _, record in found]
            texts = [f"{score} {_origin_of(*each)}" for score, each in zip(scores, found, strict=True)]
            lines.append(f"{head.title}: {', '.join(texts)}.")
    return lines


def _origin_of(run: Run, record: Record) -> str:
    """ "(run-1, seed 1; evaluation seed 0)"; of a fine-tuning that has a run of its own "(finetune-1, seed 0)"."""
    own = f"{run.name}, seed {plain(run.config[SEED])}" if SEED in run.config else run.name
    seed = [f"seed {plain(record.settings[SEED])}"] if SEED in record.settings else []
    if "run" in record.settings:
        return f"({', '.join([plain(record.settings['run']), *seed])})"
    return f"({'; '.join([own, *(f'evaluation {text}' for text in seed)])})"


def _seed(record: Record) -> tuple[str, ...]:
    """Sorts repeats by their seed."""
    return plain(record.settings.get(SEED)).rjust(10), plain(record.settings.get("run"))


def _matched(runs: Sequence[Run]) -> list[Published]:
    sources = [source for run in runs if (source := _pretrained(run)) is not None]
    return [row for row in PUBLISHED if any(row.matches(source.config) for source in sources)]


def _published_cells(row: Published) -> dict[str, str]:
    return {
        "Run": f"{MARK} {row.source}",
        "Method": row.name,
        "Backbone": row.backbone,
        "Target": row.target,
        "ETE": row.ete or ABSENT,
        "Gh.": _marked(_hours(row)),
        "Device hours": f"{PAPER_GPUS} x A100 40 GB" if row.hours else ABSENT,
    }


def _published_scores(row: Published, heads: Iterable[Head]) -> dict[Head, str]:
    """The figures of ``row`` in the first column of their evaluation and protocol, or in one of their own."""
    fitting: dict[tuple[str, str], Head] = {}
    for head in heads:
        if head.published:
            fitting.setdefault((head.evaluation, head.protocol), head)
    figures: dict[Head, str] = {}
    for own, value in (
        (Head("finetune", SCORES["finetune"]), row.finetune),
        (Head("linprobe", f"LP (protocol {row.protocol or 'not stated'})", row.protocol), row.linear),
        (Head("knn", SCORES["knn"]), row.knn),
        (Head("segment", SCORES["segment"]), row.miou),
    ):
        if value is not None:
            figures[fitting.get((own.evaluation, own.protocol), own)] = _marked(_figure(value))
    if row.box is not None:
        own = Head("detect", SCORES["detect"])
        figures[fitting.get((own.evaluation, own.protocol), own)] = _marked(_precision(row))
    return figures


def _figure(value: float | None) -> str:
    """A published score with the decimals of its source, at least one."""
    return ABSENT if value is None else f"{value:.1f}" if value == round(value, 1) else f"{value:g}"


def _marked(figure: str) -> str:
    return figure if figure == ABSENT else f"{figure} {MARK}"


def _hours(row: Published) -> str:
    return ABSENT if row.hours is None else f"{row.hours:g}"


def _precision(row: Published) -> str:
    return ABSENT if row.box is None else f"{_figure(row.box)}/{_figure(row.mask)}"


def _meanings(heads: Mapping[Metric, Head], values: Sequence[str]) -> dict[str, str]:
    meanings = {"ETE": _ETE, "Gh.": PAPER_HOURS, "Device hours": _HOURS}
    for metric, head in heads.items():
        meanings[head.title] = metric.description + f" With several seeds: {_SPREAD}" * bool(values)
    return meanings


def _columns(rows: Sequence[_Row], scores: Sequence[Head], meanings: Mapping[str, str]) -> list[Column]:
    def column(title: str, cells: list[str], numeric: bool) -> Column:
        return Column(title, cells, meanings.get(title, ""), numeric)

    texts, numbers = ["Run", "Differs in", "Method", "Backbone", "Target"], ["ETE", "Gh."]
    shown = [title for title in texts if title != "Differs in" or any(row.cells.get(title) for row in rows)]
    columns = [column(title, [row.cells.get(title) or ABSENT for row in rows], False) for title in shown]
    columns += [column(title, [row.cells.get(title) or ABSENT for row in rows], True) for title in numbers]
    columns += [column(head.title, [row.scores.get(head, ABSENT) for row in rows], True) for head in scores]
    return [*columns, column("Device hours", [row.cells.get("Device hours") or ABSENT for row in rows], False)]


def _notes(runs: Sequence[Run], matched: Sequence[Published]) -> list[str]:
    published = {row.identity for row in matched}
    sources = {run.name: source for run in runs if (source := _pretrained(run)) is not None}
    alone: dict[Identity, list[str]] = {}
    for name, source in sources.items():
        alone.setdefault(identity(source.config), []).append(name)
    lines = [PUBLISHED_NOTE] if matched else []
    lines += [
        f"The paper and the official repositories have no row like {', '.join(names)}, in the paper's terms {what}."
        for what, names in alone.items()
        if what not in published
    ]
    return [*lines, *[f"{row.name}, {row.backbone} ({row.source}): {row.note}." for row in matched if row.note]]


def paper_section(paper: PaperTable) -> list[str]:
    """HTML of the table with its notes and, in a fold, the single values."""
    meanings = [f"{title}: {text}" for title, text in paper.table.meanings]
    return [
        heading("Scores and published rows"),
        paper.table.html("Scores and published rows"),
        *([notes(paper.notes)] if paper.notes else []),
        *([disclosure("Values behind the means", notes(paper.values))] if paper.values else []),
        disclosure("Columns of this table", notes(meanings)),
    ]


def published_fold() -> str:
    """HTML of a fold with all published rows."""
    return disclosure(f"All published rows ({len(PUBLISHED)})", published_table().html("All published rows"))
