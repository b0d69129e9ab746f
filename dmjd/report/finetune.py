"""Sections of the page of a fine-tuning run: its method in sentences, its settings, its parameter groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import quote

from dmjd.report.format import ABSENT, look_up, plain
from dmjd.report.html import heading, link, paragraph, table
from dmjd.report.method import method_name
from dmjd.report.published import identity
from dmjd.report.run import Run
from dmjd.report.scores import AVERAGE, online_key, online_rows
from dmjd.report.trainings import score_name

_GROUPS = {
    "name": "Group",
    "layers": "Layers",
    "lr_scale": "Learning-rate scale",
    "weight_decay": "Weight decay",
    "tensors": "Tensors",
    "parameters": "Parameters",
}


def finetune_summary(run: Run) -> str:
    """The method in sentences: start, schedule, head, augmentation, regularisation."""

    def value(*keys: str) -> Any:
        return look_up(run.config, keys)

    preset = preset_of(run.config)
    begin = f"Fine-tuning of {identity(run.config).backbone}{f' with the preset {preset}' if preset else ''}"
    parts = [
        f"{begin}: {plain(value('epochs'))} epochs, batch {plain(value('batch_size'))}{peak(run.config)}.",
        f"Head: {_head(value('head'))}.",
        f"Augmentation: {', '.join(_augmentation(value('augment'))) or 'crops and flips only'}.",
    ]
    return " ".join([*parts, regularisation(run.config)])


def regularisation(config: Mapping[str, Any]) -> str:
    """Layer decay, drop path, weight decay, average and frozen layers as a sentence."""
    keys = (("optim", "layer_decay"), ("backbone", "drop_path"), ("ema_decay",), ("freeze",))
    decay, drop, average, frozen = (look_up(config, key) for key in keys)
    parts = [
        "no layer decay" if decay == 1.0 else f"layer decay {plain(decay)}",
        f"drop path {plain(drop)}" if drop else "no drop path",
        f"weight decay {plain(look_up(config, ('optim', 'weight_decay')))}",
        *([f"moving average of the weights with decay {plain(average)}"] if average else []),
        *([f"the first {plain(frozen)} layers frozen"] if frozen else []),
    ]
    return f"Regularisation: {', '.join(parts)}."


def finetune_settings(run: Run) -> list[tuple[str, str]]:
    """Rows of the summary that only fine-tuning has."""
    rows = [
        ("Preset", preset_of(run.config) or ABSENT),
        ("Layer decay", plain(look_up(run.config, ("optim", "layer_decay")))),
        ("Drop path", plain(look_up(run.config, ("backbone", "drop_path")))),
        ("Head", _head(look_up(run.config, ("head",)))),
        ("Augmentation", ", ".join(_augmentation(look_up(run.config, ("augment",)))) or ABSENT),
    ]
    best = best_epoch(run)
    return rows + ([("Best epoch", best)] if best else [])


def preset_of(config: Mapping[str, Any]) -> str:
    """The name of ``preset=NAME``; empty if none was typed."""
    typed = config.get("typed")
    names = [str(name) for name in typed] if isinstance(typed, list) else []
    return next((name.partition("=")[2] for name in names if name.startswith("preset=")), "")


def best_epoch(run: Run) -> str:
    """ "45 of 50: validation top-1 86.20 %"; empty before the first validation. Of equal scores the earliest."""
    rows, key = online_rows(run), online_key(run)
    if not rows:
        return ""
    best = max(rows, key=lambda row: row[key])
    epochs = f"{plain(best.get('epoch'))} of {plain(run.config.get('epochs'))}"
    return f"{epochs}: {validated(key, best[key])}"


def validated(key: str, score: float) -> str:
    """A score of a validation: "validation top-1 of the moving average 86.20 %"."""
    name = score_name(key.removeprefix(AVERAGE).removeprefix("val_"))
    return f"validation {name}{' of the moving average' * key.startswith(AVERAGE)} {score:.2f} %"


def origin_line(run: Run) -> str:
    """HTML: the source of the initial weights, with a link to its report where there is one."""
    init = run.config.get("init")
    if init is None:
        return paragraph("Initial weights: random.")
    untrained = " (its configuration only; random weights)" * (run.config.get("weights") == "untrained")
    if run.origin is None:
        return paragraph(f"Initial weights: {plain(init)}{untrained}.")
    text = f"{run.origin.name}, {method_name(run.origin.config)}{untrained}"
    page = run.origin.path / "report.html"
    if not page.is_file():
        return paragraph(f"Initial weights: {text}.")
    # Quoting leaves no colon, so no name can become a scheme.
    address = quote(os.path.relpath(page.resolve(), run.path.resolve()))
    return f"<p>Initial weights: {link(text, address)}.</p>"


def group_table(run: Run) -> list[str]:
    """The parameter groups: learning-rate scale and weight decay of each; empty without groups.json."""
    if not run.groups:
        return []
    rows = [
        f'<th scope="row">{escape(_shown(row, "name"))}</th>'
        + "".join(f"<td>{escape(_shown(row, key))}</td>" for key in [*_GROUPS][1:])
        for row in run.groups
    ]
    return [heading("Parameter groups"), table("Parameter groups", "groups", [*_GROUPS.values()], rows)]


def _shown(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else plain(value)


def peak(config: Mapping[str, Any]) -> str:
    """ ", peak learning rate 0.0005 x 1024 / 256 = 0.002"; empty if it is not known."""
    base, batch = look_up(config, ("optim", "base_lr")), config.get("batch_size")
    if not (isinstance(base, int | float) and isinstance(batch, int)):
        return ""
    return f", peak learning rate {plain(float(base))} x {batch} / 256 = {plain(base * batch / 256)}"


def _head(head: Any) -> str:
    pooling, norm, classes, dropout = (look_up(head, (key,)) for key in ("pooling", "norm", "num_classes", "dropout"))
    parts = [
        {"mean": "mean of the patch tokens", "cls": "class token"}.get(plain(pooling), plain(pooling)),
        {"pooled": "then a new LayerNorm", "encoder": "after the encoder's norm"}.get(plain(norm), ""),
        f"dropout {plain(dropout)}" if dropout else "",
        f"{classes} classes" if classes else "",
    ]
    return ", ".join(filter(None, parts))


def _augmentation(augment: Any) -> list[str]:
    def value(key: str) -> Any:
        return look_up(augment, (key,))

    named = {"mixup": "mixup", "cutmix": "cutmix", "erase_prob": "random erasing", "smoothing": "label smoothing"}
    policy = [f"RandAugment {plain(value('randaugment'))}"] if value("randaugment") else []
    return policy + [f"{name} {plain(value(key))}" for key, name in named.items() if value(key)]
