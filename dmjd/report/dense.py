"""Sections of the page of a segmentation or detection: its method in sentences, its settings, its scores of classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dmjd.config.dense import window_stride
from dmjd.errors import DataError
from dmjd.report.finetune import peak, preset_of, regularisation, validated
from dmjd.report.format import ABSENT, look_up, plain
from dmjd.report.html import disclosure, heading, paragraph, table
from dmjd.report.published import identity
from dmjd.report.run import Run, content_of
from dmjd.report.scores import online_key, online_rows
from dmjd.runs.paths import CHECKPOINTS
from dmjd.safe_load import parse_json

PER_CLASS = "per_class.json"
OPEN = 40
"""Up to this many classes their table is open."""
_COLUMNS = {"iou": "IoU", "accuracy": "Accuracy", "box_ap": "AP box", "mask_ap": "AP mask"}


def dense_summary(run: Run) -> str:
    """The method in sentences: model, schedule, attention, head, augmentation, testing, regularisation."""

    def value(*keys: str) -> Any:
        return look_up(run.config, keys)

    preset = preset_of(run.config)
    segments = run.config.get("command") == "segment"
    what = f"{'Segmentation with UPerNet' if segments else 'Detection with Mask R-CNN'} on"
    parts = [
        f"{what} {identity(run.config).backbone}{f' with the preset {preset}' if preset else ''}: "
        f"{_count(value('epochs'), 'epoch')}, batch {plain(value('batch_size'))}{peak(run.config)}.",
        f"Attention: {_attention(run.config)}.",
        f"Head: {_head(run.config)}.",
        f"Augmentation: {_augmentation(value('data'))}.",
        *([f"Testing: {_testing(value('test'), value('data', 'image_size'))}."] if segments else []),
    ]
    return " ".join([*parts, regularisation(run.config)])


def dense_settings(run: Run) -> list[tuple[str, str]]:
    """Rows of the summary that segmentation and detection alone have."""
    return [
        ("Preset", preset_of(run.config) or ABSENT),
        ("Layer decay", plain(look_up(run.config, ("optim", "layer_decay")))),
        ("Drop path", plain(look_up(run.config, ("backbone", "drop_path")))),
        ("Attention", _attention(run.config)),
        ("Head", _head(run.config)),
        *_checkpoints(run),
    ]


def class_section(run: Run) -> list[str]:
    """Scores of each class in the last validation, the best first; empty without per_class.json."""
    file = run.path / PER_CLASS
    if not file.is_file():
        return []
    try:
        values = parse_json(content_of(file))
        step, names = values["step"], [str(name) for name in values["classes"]]
        columns = {key: [_score(value) for value in values[key]] for key in _COLUMNS if key in values}
        fits = isinstance(step, int) and columns and all(len(each) == len(names) for each in columns.values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is damaged: {' '.join(str(error).split())[:80]}") from None
    if not fits:
        raise DataError(f"{file} must hold step, classes, and a score of each class")
    main = next(iter(columns.values()))
    ranks = [-1.0 if value is None else value for value in main]
    order = sorted(range(len(names)), key=lambda place: ranks[place], reverse=True)
    rows = [
        f'<th scope="row">{escape(names[place])}</th>'
        + "".join(f"<td>{_cell(scores[place])}</td>" for scores in columns.values())
        for place in order
    ]
    head = ["Class", *(f"{_COLUMNS[key]}, %" for key in columns)]
    absent = sum(value is None for value in main)
    note = f"Last validation, step {step}, by {_COLUMNS[next(iter(columns))]}."
    if absent:
        note += f" {absent} of {len(names)} classes do not occur and are left out of the mean."
    shown = table("Classes", "groups", head, rows)
    return [
        heading("Classes"),
        paragraph(note),
        shown if len(names) <= OPEN else disclosure(f"All {len(names)} classes", shown),
    ]


def _score(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the score {number}")
    return number


def _cell(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def _checkpoints(run: Run) -> list[tuple[str, str]]:
    """The best validation and the last one, with their checkpoints as far as they are kept."""
    rows, key = online_rows(run), online_key(run)
    if not rows:
        return []

    def described(row: Mapping[str, Any]) -> str:
        folder = f"{CHECKPOINTS}/step-{row['step']:08d}"
        kept = f", {folder}" if (run.path / folder).is_dir() else ""
        epochs = f"epoch {plain(row.get('epoch'))} of {plain(run.config.get('epochs'))}"
        return f"{validated(key, row[key])}, {epochs}{kept}"

    best = max(rows, key=lambda row: row[key])
    return [("Best checkpoint", described(best)), ("Last validation", described(rows[-1]))]


def _attention(config: Mapping[str, Any]) -> str:
    window, blocks, kind = (
        look_up(config, ("attention", key)) for key in ("window", "global_blocks", "relative_positions")
    )
    if look_up(config, ("backbone", "name")) == "swin":
        return f"windows of {plain(look_up(config, ('backbone', 'windows', 'size')))} tokens"
    parts = [
        f"windows of {plain(window)} tokens" if window else "whole images",
        *([f"global blocks {plain(blocks) if blocks else 'evenly spaced'}"] if window else []),
        *(["relative positions of rows and columns"] if kind == "decomposed" else []),
    ]
    return ", ".join(parts)


def _head(config: Mapping[str, Any]) -> str:
    def value(key: str) -> Any:
        return look_up(config, ("head", key))

    parts = [f"{plain(value('channels'))} channels"]
    if config.get("command") == "segment":
        weight = value("auxiliary_weight")
        parts += [f"auxiliary FCN with weight {plain(weight)}"] if weight else ["no auxiliary head"]
        parts += [f"dropout {plain(value('dropout'))}"] if value("dropout") else []
    else:
        parts += [
            f"{_pyramid(config)} pyramid",
            f"convolutions: {plain(value('box_convs'))} for boxes, {plain(value('mask_convs'))} for masks",
            f"{plain(value('proposals'))} proposals",
        ]
    return ", ".join([*parts, *([_count(value("num_classes"), "class")] if value("num_classes") else [])])


def _count(number: Any, noun: str) -> str:
    """ "1 class", "2 classes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{plain(number)} {noun}{plural if number != 1 else ''}"


def _pyramid(config: Mapping[str, Any]) -> str:
    """The feature pyramid, of ``auto`` that of the backbone."""
    named = look_up(config, ("head", "pyramid"))
    plainly = "simple" if look_up(config, ("backbone", "name")) == "vit" else "FPN"
    return {"auto": plainly, "fpn": "FPN"}.get(named) or plain(named)


def _augmentation(data: Any) -> str:
    def value(key: str) -> Any:
        return look_up(data, (key,))

    size = _by(value("image_size"))
    if value("scale"):
        return f"large-scale jitter of {' to '.join(map(plain, value('scale')))} at {size} pixels, flips"
    ratio = " to ".join(map(plain, value("resize_ratio") or [])) or ABSENT
    parts = [f"sides of {_by(value('resize'))} pixels times {ratio}", f"crops of {size}", "flips"]
    return ", ".join([*parts, *(["photometric distortion"] if value("distortion") else [])])


def _testing(test: Any, window: Any) -> str:
    mode, stride, scales = (look_up(test, (key,)) for key in ("mode", "stride", "scales"))
    if isinstance(window, list):
        stride = window_stride(stride, window)
    parts = [f"windows with steps of {_by(stride)} pixels" if mode == "slide" else "whole images"]
    parts += [f"scales {plain(scales)}"] if scales and scales != [1.0] else []
    return ", ".join([*parts, *(["flips"] if look_up(test, ("flip",)) else [])])


def _by(sizes: Sequence[Any] | None) -> str:
    return " x ".join(map(plain, sizes)) if isinstance(sizes, list) else plain(sizes)
