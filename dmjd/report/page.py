"""report.html of one run: summary, scores, pictures, provenance, configuration. Self-contained: it links to no file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from dmjd.errors import ConfigError
from dmjd.files import replace_file
from dmjd.report.format import ABSENT, duration, look_up, name_of, plain, rate
from dmjd.report.html import document, figure, heading, pairs
from dmjd.report.run import Record, Run, columns_of, content_of, read_run

_CAPTIONS = {
    "loss": "Loss",
    "views": "Masked views, targets and predictions",
    "masks": "Disjoint masks",
}


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
    started, device = (escape(plain(launches[0].get(key))) for key in ("started", "device"))
    again = f", launched {len(launches)} times" if len(launches) > 1 else ""
    latest = [(key.replace("_", " "), plain(value)) for key, value in run.provenance.items() if key != "launches"]
    return document(
        run.name,
        f"<p>Started {started} on {device}{again}</p>",
        heading("Summary"),
        pairs(_summary(run)),
        heading("Evaluation"),
        _scores(run.evaluations),
        *(figure(_caption(path), content_of(path)) for path in _in_reading_order(run.pictures)),
        f"<details><summary>Provenance of the latest launch</summary>\n{pairs(latest)}\n</details>",
        "<details><summary>Resolved configuration</summary>",
        f"<pre>{escape(run.config_text)}</pre>\n</details>",
    )


def _summary(run: Run) -> list[tuple[str, str]]:
    def configured(*keys: str) -> Any:
        return look_up(run.config, keys)

    views, epochs, batch = configured("mask", "views"), configured("epochs"), configured("batch_size")
    effective = f"{views} x {epochs} = {views * epochs}" if _are_numbers(views, epochs) else ABSENT
    unique = f"{batch} images, {batch * views} views" if _are_numbers(views, batch) else plain(batch)
    speeds = [row["images_per_second"] for row in run.timing if row.get("images_per_second") is not None]
    epoch, seconds, size = run.last("epoch"), run.last("seconds"), configured("data", "image_size")
    reached = plain(run.last("step")) + (f" (epoch {round(epoch, 2):g})" if epoch is not None else "")
    return [
        ("Method", name_of(configured("method"))),
        ("Backbone", _backbone(configured("backbone"))),
        ("Target", name_of(configured("target"))),
        ("Data", name_of(configured("data"))),
        ("Image size", " x ".join(map(str, size)) if isinstance(size, list) else plain(size)),
        ("Views K", plain(views)),
        ("Mask pattern", plain(configured("mask", "pattern"))),
        ("Corruption rate m_corr", rate(run.last("m_corr"))),
        ("Prediction rate m_pred", rate(run.last("m_pred"))),
        ("Unique batch", unique),
        ("Epochs", plain(epochs)),
        ("Effective training epochs", effective),
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


def _scores(records: list[Record]) -> str:
    """A table of every trained score beside the untrained one of equal evaluation and settings, if there is one."""
    if not records:
        return "<p>Not evaluated yet.</p>"
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        key = (record.evaluation, json.dumps(record.settings, sort_keys=True))
        groups.setdefault(key, []).append(record)
    lines: list[str] = []
    for group in groups.values():
        untrained = next((record for record in group if record.weights == "untrained"), None)
        trained = sorted((record for record in group if record.weights != "untrained"), key=lambda each: each.step)
        lines += [row for record in trained for row in _rows(record, untrained)] or _rows(None, untrained)
    head = "<tr><th>Score</th><th>Trained</th><th>Untrained</th><th>Gain</th><th>Step</th></tr>"
    return f'<div class="wide"><table class="scores">\n{head}\n' + "\n".join(lines) + "\n</table></div>"


def _rows(trained: Record | None, untrained: Record | None) -> Iterator[str]:
    """One row per score; at least one of the two records is given."""
    either = trained or untrained
    assert either is not None
    average = ["moving average"] if either.weights == "ema" else []
    settings = ", ".join([*average, *(f"{key} {plain(value)}" for key, value in either.settings.items())])
    for score, column in columns_of(either.evaluation).items():
        after, before = (record.scores.get(score) if record else None for record in (trained, untrained))
        if after is None and before is None:
            continue
        gained, side = ABSENT, ""
        if after is not None and before is not None:
            gained = column.format(after - before, sign="+")
            side = "" if after == before else "up" if (after > before) == column.higher_is_better else "down"
        cells = [ABSENT if value is None else column.format(value) for value in (after, before)]
        label = f"{escape(f'{column.meaning}, {column.unit}'.removesuffix(', '))}<small>{escape(settings)}</small>"
        yield (
            f'<tr><td>{label}</td><td>{cells[0]}</td><td>{cells[1]}</td><td class="{side}">{gained}</td>'
            f"<td>{trained.step if trained else ABSENT}</td></tr>"
        )


def _in_reading_order(pictures: Iterable[Path]) -> list[Path]:
    return sorted(pictures, key=lambda path: (path.stem != "loss", path.name))


def _caption(path: Path) -> str:
    return _CAPTIONS.get(path.stem, path.stem.replace("_", " "))


def _backbone(section: Any) -> str:
    """Name and size: the name of every ViT is ``vit``."""
    keys = {"patch_size": "patch", "embed_dim": "width", "depth": "depth"}
    sizes = [f"{title} {size}" for key, title in keys.items() if (size := look_up(section, (key,)))]
    return ", ".join([name_of(section), *sizes])


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)
