"""One self-contained page per run: its numbers, its pictures, where it came from. Opens anywhere, fetches nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from dmjd.errors import ConfigError
from dmjd.files import replace_file
from dmjd.report.html import document, figure, heading, pairs
from dmjd.report.run import Evaluation, Run, content_of, read_run
from dmjd.report.words import ABSENT, duration, look_up, name_of, plain, rate

_CAPTIONS = {
    "loss": "Loss",
    "views": "What the views hide, the targets and the predictions",
    "masks": "Disjoint masks",
}


def write_report(run_path: str | Path) -> Path:
    """Write ``report.html`` into the run folder and return its path; a report that is already there is replaced.

    Raises:
        DataError: if the folder is not a complete run folder.
        ConfigError: if it cannot be written to.
    """
    run = read_run(run_path)
    path = Path(run_path) / "report.html"
    page = _page(run)
    try:
        replace_file(path, page)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; of a copy of the folder it can be made") from error
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
    "start": "starting and compiling",
    "data": "waiting for data",
    "checkpoint": "stalled by checkpoints",
    "evaluate": "evaluating",
    "lost": "lost to crashes and rollbacks",
}


def _goodput(run: Run) -> list[tuple[str, str]]:
    """The share of all wall time that went into training, and where the rest went; runs of before did not count it."""
    spent = {words: run.last(f"{account}_seconds") for account, words in _ACCOUNTS.items()}
    known = {words: seconds for words, seconds in spent.items() if seconds}
    if not known:
        return []
    share = 100 * (spent["training"] or 0.0) / sum(known.values())
    return [("Goodput", f"{share:.1f} %: " + ", ".join(f"{duration(known[words])} {words}" for words in known))]


def _scores(evaluations: list[Evaluation]) -> str:
    """Each trained score beside the untrained one of equal verb and settings; an unmatched score stands alone."""
    if not evaluations:
        return "<p>Not evaluated yet.</p>"
    groups: dict[tuple[str, str], list[Evaluation]] = {}
    for evaluation in evaluations:
        key = (evaluation.verb, json.dumps(evaluation.settings, sort_keys=True))
        groups.setdefault(key, []).append(evaluation)
    lines = []
    for group in groups.values():
        untrained = next((evaluation for evaluation in group if evaluation.weights == "untrained"), None)
        trained = sorted((each for each in group if each.weights != "untrained"), key=lambda each: each.step)
        lines += [_score(each, untrained) for each in trained] or [_score(None, untrained)]
    head = "<tr><th>Top-1, %</th><th>Trained</th><th>Untrained</th><th>Points gained</th><th>Step</th></tr>"
    return f'<div class="wide"><table class="scores">\n{head}\n' + "\n".join(lines) + "\n</table></div>"


def _score(trained: Evaluation | None, untrained: Evaluation | None) -> str:
    either = trained or untrained
    assert either is not None
    words = ["moving average"] if either.weights == "ema" else []
    settings = ", ".join([*words, *(f"{key} {plain(value)}" for key, value in either.settings.items())])
    gained, side = ABSENT, ""
    if trained and untrained:
        points = trained.top1 - untrained.top1
        gained, side = f"{points:+.2f}", "up" if points > 0 else "down" if points < 0 else ""
    after, before = (f"{each.top1:.2f}" if each else ABSENT for each in (trained, untrained))
    step = trained.step if trained else ABSENT
    label = f"<td>{escape(either.verb)}<small>{escape(settings)}</small></td>"
    return f'<tr>{label}<td>{after}</td><td>{before}</td><td class="{side}">{gained}</td><td>{step}</td></tr>'


def _in_reading_order(pictures: Iterable[Path]) -> list[Path]:
    return sorted(pictures, key=lambda path: (path.stem != "loss", path.name))


def _caption(path: Path) -> str:
    return _CAPTIONS.get(path.stem, path.stem.replace("_", " "))


def _backbone(section: Any) -> str:
    """Name and size: every ViT is called ``vit``."""
    words = {"patch_size": "patch", "embed_dim": "width", "depth": "depth"}
    sizes = [f"{word} {size}" for key, word in words.items() if (size := look_up(section, (key,)))]
    return ", ".join([name_of(section), *sizes])


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)
