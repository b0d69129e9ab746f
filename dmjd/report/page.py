"""report.html of one run: summary, scores, pictures, provenance, configuration. Self-contained: it links to no file."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from dmjd.errors import ConfigError
from dmjd.evaluate import Column
from dmjd.files import replace_file
from dmjd.report.dense import class_section, dense_settings, dense_summary
from dmjd.report.finetune import finetune_settings, finetune_summary, group_table, origin_line
from dmjd.report.format import ABSENT, duration, look_up, name_of, plain, rate
from dmjd.report.html import chart, charts, details, disclosure, document, heading, pairs, paragraph, picture, table
from dmjd.report.method import held_out, masks_caption, method_name, method_summary
from dmjd.report.paper import paper_section, paper_table, published_fold
from dmjd.report.run import Record, Run, columns_of, content_of, read_run
from dmjd.report.scores import ABOUT_TRAINING, metrics, online_references, online_rows, unlike_training


def write_report(run_path: str | Path) -> Path:
    """Write ``report.html`` into the run folder, replacing an earlier one, and return its path.

    Raises:
        DataError: if the folder is not a complete run folder.
        ConfigError: if it is not writable.
    """
    run = read_run(run_path)
    path = Path(run_path) / "report.html"
    page = _page(run)
    try:
        replace_file(path, page)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; copy the run folder and report the copy") from error
    return path


def _page(run: Run) -> str:
    launches = run.launches
    started, device = (plain(launches[0].get(key)) for key in ("started", "device"))
    again = f", launched {len(launches)} times" if len(launches) > 1 else ""
    latest = [(key.replace("_", " "), plain(value)) for key, value in run.provenance.items() if key != "launches"]
    dense = run.config.get("command") in ("segment", "detect")
    paper = paper_table([run])  # of segmentation and detection the table of scores has the same without published rows
    configuration = f'<pre tabindex="0">{escape(run.config_text)}</pre>'
    return document(
        run.name,
        paragraph(_method(run)),
        *([origin_line(run)] if run.training else []),
        paragraph(f"Started {started} on {device}{again}"),
        heading("Summary"),
        pairs("Summary", _summary(run)),
        heading("Scores"),
        _scores(run),
        *(paper_section(paper) if paper.has_published or not dense else []),
        *_charts(run),
        *class_section(run),
        *group_table(run),
        *_pictures(run),
        details(
            [
                disclosure("Provenance of the latest launch", pairs("Provenance", latest)),
                disclosure("Resolved configuration", configuration),
                published_fold(),
            ]
        ),
    )


def _method(run: Run) -> str:
    """The method in sentences."""
    command = str(run.config.get("command"))
    summaries = {"finetune": finetune_summary, "segment": dense_summary, "detect": dense_summary}
    return summaries[command](run) if command in summaries else method_summary(run.config)


def _charts(run: Run) -> list[str]:
    from dmjd.report.curves import run_charts  # imports matplotlib, which takes half a second

    drawn = [chart(each.title, each.svg, each.legend, each.caption) for each in run_charts(run)]
    return [heading("Curves"), charts(drawn)] if drawn else []


def _pictures(run: Run) -> list[str]:
    """Pictures of the run, without those that repeat others: the losses of the charts, the masks of a single view."""
    repeated = ("loss", "masks", "show-masks") if look_up(run.config, ("mask", "views")) == 1 else ("loss",)
    shown = sorted((path for path in run.pictures if path.stem not in repeated), key=lambda path: path.stem)
    drawn = [picture(_caption(run, path), *_description(path)) for path in shown]
    return [heading("Pictures"), *drawn] if drawn else []


def _summary(run: Run) -> list[tuple[str, str]]:
    def configured(*keys: str) -> Any:
        return look_up(run.config, keys)

    views, epochs, batch = configured("mask", "views"), configured("epochs"), configured("batch_size")
    effective = f"{views} x {epochs} = {views * epochs}" if _are_numbers(views, epochs) else ABSENT
    unique = f"{batch} images, {batch * views} views" if _are_numbers(views, batch) else plain(batch)
    speeds = [row["images_per_second"] for row in run.timing if row.get("images_per_second") is not None]
    epoch, seconds, size = run.last("epoch"), run.last("seconds"), configured("data", "image_size")
    reached = plain(run.last("step")) + (f" (epoch {round(epoch, 2):g})" if epoch is not None else "")
    pre_training = [
        ("Views K", plain(views)),
        ("Mask pattern", plain(configured("mask", "pattern"))),
        ("Corruption rate m_corr", rate(run.last("m_corr"))),
        ("Prediction rate m_pred", rate(run.last("m_pred"))),
        ("Unique batch", unique),
        ("Epochs", plain(epochs)),
        ("Effective training epochs", effective),
    ]
    settings = finetune_settings if run.config.get("command") == "finetune" else dense_settings
    from_encoder = [("Batch", plain(batch)), ("Epochs", plain(epochs))]
    return [
        ("Method", method_name(run.config)),
        ("Backbone", _backbone(configured("backbone"))),
        *([] if run.training else [("Target", name_of(configured("target")))]),
        ("Data", name_of(configured("data"))),
        *[("Held out for scores", held) for held in [held_out(run.config)] if held != ABSENT],
        ("Image size", " x ".join(map(str, size)) if isinstance(size, list) else plain(size)),
        *([*from_encoder, *settings(run)] if run.training else pre_training),
        ("Steps", reached),
        ("Images/s, median", f"{statistics.median(speeds):.1f}" if speeds else ABSENT),
        ("Wall time", ABSENT if seconds is None else duration(seconds)),
        *_goodput(run),
        ("Device", plain(run.provenance.get("device"))),
    ]


_ACCOUNTS = {
    "training": "training",
    "start": "start-up and compilation",
    "data": "waiting for data",
    "checkpoint": "waiting for checkpoints",
    "evaluate": "evaluation",
    "lost": "lost to crashes and rollbacks",
}


def _goodput(run: Run) -> list[tuple[str, str]]:
    """Share of training in the wall time, and the rest by account; empty for early versions, which did not log it."""
    spent = {name: run.last(f"{account}_seconds") for account, name in _ACCOUNTS.items()}
    known = {name: seconds for name, seconds in spent.items() if seconds}
    if not known:
        return []
    share = 100 * (spent["training"] or 0.0) / sum(known.values())
    return [
        ("Goodput", f"{share:.1f} %: " + ", ".join(f"{duration(seconds)} {name}" for name, seconds in known.items()))
    ]


def _scores(run: Run) -> str:
    """A table of every trained score beside the untrained one of equal evaluation and settings, if there is one.

    Chance and majority, where some record holds them, are two more columns.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in run.evaluations:
        key = (record.evaluation, json.dumps(record.settings, sort_keys=True))
        groups.setdefault(key, []).append(record)
    lines = _online_line(run)
    for group in groups.values():
        untrained = next((record for record in group if record.weights == "untrained"), None)
        trained = sorted((record for record in group if record.weights != "untrained"), key=lambda each: each.step)
        lines += [line for record in trained for line in _lines(run, record, untrained)] or _lines(run, None, untrained)
    if not lines:
        return paragraph("Not evaluated yet.")
    compared = [name for name in ("majority", "chance") if any(name in line.references for line in lines)]
    head = ["Score", "Trained", "Untrained", "Gain", *map(str.capitalize, compared), "Step"]
    held = held_out(run.config)
    where = paragraph(f"Held out of training for scores: {held}.") if held != ABSENT else ""
    return where + table("Scores", "scores", head, [line.html(compared) for line in lines])


@dataclass(frozen=True)
class _Line:
    """One row of the table of scores. note: the conditions."""

    column: Column
    note: str
    after: float | None
    before: float | None
    references: dict[str, float]
    step: int | None

    def html(self, compared: Sequence[str]) -> str:
        column, after, before = self.column, self.after, self.before
        gained, side = ABSENT, ""
        if after is not None and before is not None:
            gained = column.format(after - before, sign="+")
            side = "" if after == before else "up" if (after > before) == column.higher_is_better else "down"
        values = [after, before, *(self.references.get(name) for name in compared)]
        cells = [f"<td>{ABSENT if value is None else column.format(value)}</td>" for value in values]
        cells.insert(2, f'<td class="{side}">{gained}</td>')
        label = f"{column.meaning}, {column.unit}".removesuffix(", ")
        head = f'<th scope="row">{escape(label)}<small>{escape(self.note)}</small></th>'
        return f"{head}{''.join(cells)}<td>{plain(self.step)}</td>"


def _online_line(run: Run) -> list[_Line]:
    """The latest score that was measured while training."""
    metric = next((metric for metric in metrics([run]) if metric.online), None)
    if metric is None or run.training:  # its last validation is a record, and the best one is in the summary
        return []
    curve = online_rows(run)
    best = max(curve, key=lambda row: row["knn_top1"])
    settings = ", ".join(f"{key} {plain(value)}" for key, value in json.loads(metric.settings).items())
    note = f"online; best {metric.column.format(best['knn_top1'])} at step {best['step']}; {settings}"
    known = online_references(run)
    return [_Line(metric.column, note, curve[-1]["knn_top1"], known.get("untrained"), known, curve[-1]["step"])]


def _lines(run: Run, trained: Record | None, untrained: Record | None) -> list[_Line]:
    """One row per score; at least one of the two records is given."""
    either = trained or untrained
    assert either is not None
    parts = ["moving average"] if either.weights == "ema" else []
    parts += [f"{key} {plain(value)}" for key, value in either.settings.items() if key not in ABOUT_TRAINING]
    unlike = unlike_training(run, either)
    note = ", ".join(parts) + (f"; {unlike}" if unlike else "")
    lines = []
    for score, column in columns_of(either.evaluation).items():
        after = trained.scores.get(score) if trained else None
        known = [record.untrained(score) for record in (untrained, trained) if record]
        before = next((value for value in known if value is not None), None)
        if after is not None or before is not None:
            references = either.references if score == either.main_score else {}
            lines.append(_Line(column, note, after, before, references, trained.step if trained else None))
    return lines


def _caption(run: Run, path: Path) -> str:
    several = look_up(run.config, ("mask", "views")) != 1
    captions = {
        "predictions": "Validation images: annotations and predictions",
        "views": "Masked views, target and prediction" if several else "Masked image, target and prediction",
        "masks": masks_caption(run.config),
        "show": "The model on sample images",
        "show-reconstruction": "Reconstruction of masked patches",
        "show-masks": masks_caption(run.config),
        "show-hog": "Histograms of oriented gradients",
        "show-attention": "Attention of the last block",
        "show-pca": "Principal components of patch tokens",
    }
    return captions.get(path.stem, path.stem.replace("_", " "))


def _description(path: Path) -> tuple[str, bytes]:
    """The description that a picture holds, and its bytes."""
    content = content_of(path)
    try:
        with Image.open(io.BytesIO(content)) as image:
            return str(image.info.get("Description", "")), content
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return "", content


def _backbone(section: Any) -> str:
    """Name and size: the name of every ViT is ``vit``."""
    keys = {"patch_size": "patch", "embed_dim": "width", "depth": "depth"}
    sizes = [f"{title} {size}" for key, title in keys.items() if (size := look_up(section, (key,)))]
    return ", ".join([name_of(section), *sizes])


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)
