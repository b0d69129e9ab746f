"""One self-contained page per run: its numbers, its pictures, where it came from. Opens anywhere, fetches nothing."""

from __future__ import annotations

import base64
import json
import os
import statistics
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from dmjd.report.run import Evaluation, Run, read_run

ABSENT = "-"

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --muted: #59636e; --rule: #d8dee4; --well: #f6f8fa;
  --good: #1a7f37; --bad: #cf222e }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #e6edf3; --muted: #9198a1; --rule: #30363d; --well: #151b23;
    --good: #3fb950; --bad: #f85149 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p { color: var(--muted); margin: .3rem 0 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top }
th { color: var(--muted); font-weight: 500 }
.pairs th { width: 14rem }
.pairs td { overflow-wrap: anywhere }
.scores td + td, .scores th + th { text-align: right }
.scores small { display: block; color: var(--muted) }
.up { color: var(--good) } .down { color: var(--bad) }
figure { margin: 0; overflow-x: auto; background: #ffffff; border: 1px solid var(--rule); border-radius: 6px }
figure img { display: block; width: 100%; min-width: 34rem; height: auto }
details { margin-top: 1rem } summary { cursor: pointer; font-weight: 600 }
pre { background: var(--well); border-radius: 6px; padding: .8rem; overflow-x: auto; font-size: .85rem }
@media (max-width: 30rem) { .pairs th { width: 9rem } }
"""

_CAPTIONS = {
    "loss": "Loss",
    "views": "What the views hide, the targets and the predictions",
    "masks": "Disjoint masks",
}


def write_report(run_path: str | Path) -> Path:
    """Write ``report.html`` into the run folder and return its path; a report that is already there is replaced.

    Raises:
        DataError: if the folder is not a complete run folder.
    """
    run = read_run(run_path)
    page = _page(run)
    path = Path(run_path) / "report.html"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _page(run: Run) -> str:
    launches = run.provenance.get("launches") or [run.provenance]
    started, device = (escape(_plain(launches[0].get(key))) for key in ("started", "device"))
    again = f", launched {len(launches)} times" if len(launches) > 1 else ""
    latest = [(key.replace("_", " "), _plain(value)) for key, value in run.provenance.items() if key != "launches"]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.name)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(run.name)}</h1>
<p>Started {started} on {device}{again}</p>
<h2>Summary</h2>
{_pairs(_summary(run))}
<h2>Evaluation</h2>
{_scores(run.evaluations)}
{"".join(_picture(path) for path in _in_reading_order(run.pictures))}
<details><summary>Provenance of the latest launch</summary>
{_pairs(latest)}
</details>
<details><summary>Resolved configuration</summary>
<pre>{escape(run.config_text)}</pre>
</details>
</body>
</html>
"""


def _summary(run: Run) -> list[tuple[str, str]]:
    def configured(*keys: str) -> Any:
        return _look_up(run.config, keys)

    views, epochs, batch = configured("mask", "views"), configured("epochs"), configured("batch_size")
    effective = f"{views} x {epochs} = {views * epochs}" if _are_numbers(views, epochs) else ABSENT
    unique = f"{batch} images, {batch * views} views" if _are_numbers(views, batch) else _plain(batch)
    speeds = [row["images_per_second"] for row in run.rows if row.get("images_per_second") is not None]
    epoch, seconds, size = run.last("epoch"), run.last("seconds"), configured("data", "image_size")
    reached = _plain(run.last("step")) + (f" (epoch {round(epoch, 2):g})" if epoch is not None else "")
    return [
        ("Method", _name(configured("method"))),
        ("Backbone", _backbone(configured("backbone"))),
        ("Target", _name(configured("target"))),
        ("Data", _name(configured("data"))),
        ("Image size", " x ".join(map(str, size)) if isinstance(size, list) else _plain(size)),
        ("Views K", _plain(views)),
        ("Mask pattern", _plain(configured("mask", "pattern"))),
        ("Corruption rate m_corr", _rate(run.last("m_corr"))),
        ("Prediction rate m_pred", _rate(run.last("m_pred"))),
        ("Unique batch", unique),
        ("Epochs", _plain(epochs)),
        ("Effective training epochs", effective),
        ("Steps", reached),
        ("Images/s, median", f"{statistics.median(speeds):.1f}" if speeds else ABSENT),
        ("Wall time", ABSENT if seconds is None else _duration(seconds)),
        ("Device", _plain(run.provenance.get("device"))),
    ]


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
        trained = sorted((each for each in group if each.weights == "trained"), key=lambda each: each.step)
        lines += [_score(each, untrained) for each in trained] or [_score(None, untrained)]
    head = "<tr><th>Top-1, %</th><th>Trained</th><th>Untrained</th><th>Points gained</th><th>Step</th></tr>"
    return f'<div class="wide"><table class="scores">\n{head}\n' + "\n".join(lines) + "\n</table></div>"


def _score(trained: Evaluation | None, untrained: Evaluation | None) -> str:
    either = trained or untrained
    assert either is not None
    settings = ", ".join(f"{key} {_plain(value)}" for key, value in either.settings.items())
    gained, side = ABSENT, ""
    if trained and untrained:
        points = trained.top1 - untrained.top1
        gained, side = f"{points:+.2f}", "up" if points > 0 else "down" if points < 0 else ""
    after, before = (f"{each.top1:.2f}" if each else ABSENT for each in (trained, untrained))
    step = escape(str(trained.step)) if trained else ABSENT
    label = f"<td>{escape(either.verb)}<small>{escape(settings)}</small></td>"
    return f'<tr>{label}<td>{after}</td><td>{before}</td><td class="{side}">{gained}</td><td>{step}</td></tr>'


def _in_reading_order(pictures: Iterable[Path]) -> list[Path]:
    return sorted(pictures, key=lambda path: (path.stem != "loss", path.name))


def _picture(path: Path) -> str:
    caption = escape(_CAPTIONS.get(path.stem, path.stem.replace("_", " ")))
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<h2>{caption}</h2>\n<figure><img alt="{caption}" src="data:image/png;base64,{data}"></figure>\n'


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    lines = (f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in pairs)
    return '<table class="pairs">\n' + "\n".join(lines) + "\n</table>"


def _look_up(config: Any, keys: Iterable[str]) -> Any:
    """The value under nested ``keys``; None where a run of another version has no such section or key."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _name(section: Any) -> str:
    return _plain(section.get("name") if isinstance(section, Mapping) else section)


def _backbone(section: Any) -> str:
    """Name and size: every ViT is called ``vit``."""
    words = {"patch_size": "patch", "embed_dim": "width", "depth": "depth"}
    sizes = [f"{word} {size}" for key, word in words.items() if (size := _look_up(section, (key,)))]
    return ", ".join([_name(section), *sizes])


def _plain(value: Any) -> str:
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _rate(value: Any) -> str:
    return ABSENT if value is None else f"{100 * value:.1f} %"


def _duration(seconds: float) -> str:
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
