"""``dmjd COMMAND --help``: examples, groups and the most used keys; ``--help-all``: every key.

A key has its value, type and meaning.

Meanings are read from the classes' docstrings: one paragraph ``key: meaning`` per key, continuation lines indented.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from shutil import get_terminal_size
from types import NoneType
from typing import Any, get_args, get_type_hints

from dmjd.compose import values
from dmjd.config import SCHEMAS, PretrainConfig
from dmjd.config.fields import FLOAT_LIMIT, allowed, dataclass_of, keys
from dmjd.errors import ConfigError
from dmjd.keys import fields_of, groups_of, takes_files
from dmjd.redact import redact

_MAX_WIDTH = 110
"""Longest line in characters; a narrower terminal is filled."""
_COLUMN = 36
"""Column of a key's type and allowed values."""

_CONDITIONS = "(X) before a meaning: the key applies only if SECTION.name=X; (K=X): only if SECTION.K=X"

_OF_PLANS = (
    *("gpu", "gpus", "gpus_per_node", "images", "mfu", "data.root", "data.image_size", "epochs", "batch_size"),
)
MOST_USED = {
    "pretrain": (
        *("run", "data.root", "data.image_size", "epochs", "batch_size", "optim.base_lr", "optim.warmup_epochs"),
        *("mask.views", "mask.mask_ratio", "init", "workers", "seed", "engine.device", "engine.precision"),
        *("checkpoint_every", "online_knn.every_epochs"),
    ),
    "finetune": (
        *("run", "init", "data.root", "data.image_size", "data.val_percent", "epochs", "batch_size", "optim.base_lr"),
        *("optim.layer_decay", "backbone.drop_path", "head.pooling", "augment.randaugment", "augment.mixup", "freeze"),
        *("ema_decay", "workers", "seed", "engine.device", "engine.precision", "val_every"),
    ),
    "segment": (
        *("run", "init", "data.root", "data.image_size", "epochs", "batch_size", "optim.base_lr", "optim.layer_decay"),
        *("backbone.drop_path", "head.channels", "attention.relative_positions", "test.mode", "test.flip", "val_every"),
        *("freeze", "ema_decay", "workers", "seed", "engine.device", "engine.precision"),
        "engine.activation_checkpointing",
    ),
    "detect": (
        *("run", "init", "data.root", "data.image_size", "data.train", "data.val", "epochs", "batch_size"),
        *("optim.base_lr", "optim.layer_decay", "backbone.drop_path", "attention.window", "attention.global_blocks"),
        *("attention.relative_positions", "head.pyramid", "val_every", "freeze", "ema_decay", "workers", "seed"),
        *("engine.device", "engine.precision", "engine.activation_checkpointing"),
    ),
    "plan": (
        *_OF_PLANS,
        *("mask.views", "mask.mask_ratio", "ema_decay", "engine.precision", "engine.compile"),
    ),
    "plan_finetune": (*_OF_PLANS, "head.num_classes", "freeze", "ema_decay", "engine.precision", "engine.compile"),
    "plan_segment": (*_OF_PLANS, "head.num_classes", "head.channels", "freeze", "ema_decay", "engine.precision"),
    "plan_detect": (*_OF_PLANS, "head.num_classes", "attention.window", "freeze", "ema_decay", "engine.precision"),
    "miou": (
        *("checkpoint", "which", "weights", "data.root", "test.mode", "test.stride", "test.scales"),
        *("test.flip", "batch_size", "workers", "device", "output"),
    ),
    "ap": (
        *("checkpoint", "which", "weights", "data.root", "data.val", "results", "batch_size", "workers", "device"),
        "output",
    ),
}
"""Command -> the keys of its short help. Of other commands these are all keys that are in no section."""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "pretrain": (
        ("dmjd pretrain experiment=own_photos data.root=photos", "train on a folder of images"),
        ("dmjd pretrain experiment=mae_vit_base data.root=imagenet engine=ddp", "a published recipe, under torchrun"),
        ("dmjd pretrain experiment=demo epochs=3 engine.device=cpu", "a small model on a small data set"),
    ),
    "finetune": (
        ("dmjd finetune runs/own_photos preset=own_photos", "start from a run, train on its images in class folders"),
        (
            "dmjd finetune runs/photos data.root=labelled data.val_percent=10",
            "train on other images, hold out 10 % for validation",
        ),
        (
            "dmjd finetune mae.pth preset=mae_vit_base data.root=imagenet engine=ddp",
            "a published recipe, with torchrun",
        ),
    ),
    "segment": (
        ("dmjd segment runs/photos data.root=ADEChallengeData2016", "start from a pre-training run"),
        (
            "dmjd segment mae.pth preset=ade20k_mae_vit_base data.root=ADEChallengeData2016 engine=ddp",
            "a published recipe, with torchrun",
        ),
        (
            "dmjd segment runs/photos data.root=own data.reduce_zero_label=false batch_size=4",
            "own masks, in which 0 is a class",
        ),
    ),
    "detect": (
        ("dmjd detect runs/photos data.root=coco attention.window=14", "start from a pre-training run"),
        (
            "dmjd detect mae.pth preset=coco_vitdet_base data.root=coco engine=ddp",
            "a published recipe, with torchrun",
        ),
        (
            "dmjd detect runs/photos data.root=own data.train=train data.val=val batch_size=4",
            "own annotations in COCO's JSON format",
        ),
    ),
    "demo": (
        ("dmjd demo", "train, evaluate and write a report"),
        ("dmjd demo run=runs/demo epochs=1", "shorter"),
        ("dmjd demo mask.mask_ratio=0.75 mask.views=1", "with other masks"),
    ),
    "plan": (
        ("dmjd plan data.root=photos gpu=rtx4090", "for the images of a folder"),
        ("dmjd plan experiment=mae_vit_large gpu=a100-80 gpus=32", "for ImageNet-1k on a cluster"),
        ("dmjd plan detect preset=coco_vitdet_base gpu=a100-80 gpus=8", "for detection; likewise finetune and segment"),
    ),
    "report": (
        ("dmjd report runs/photos", "runs/photos/report.html"),
        ("dmjd report runs/photos runs/finetune", "compare a pre-training and a fine-tuning run"),
        ("dmjd report runs/* baseline=runs/a output=reports", "compare all runs, with speedups over one of them"),
    ),
    "validate": (
        ("dmjd validate runs/finetune", "the newest checkpoint, on the run's test images"),
        ("dmjd validate runs/finetune which=best weights=ema", "the EMA weights of the best checkpoint"),
        ("dmjd validate runs/finetune data.root=others", "on other images of the same classes"),
    ),
    "miou": (
        ("dmjd miou runs/segment", "the newest checkpoint, on the validation images of the run"),
        (
            "dmjd miou runs/segment which=best test.flip=true test.scales=[.5,.75,1,1.25,1.5,1.75]",
            "multi-scale testing",
        ),
        (
            "dmjd miou runs/segment test.mode=whole data.root=others",
            "whole images without windows, from another folder",
        ),
    ),
    "ap": (
        ("dmjd ap runs/detect", "the newest checkpoint, on the validation images of the run"),
        ("dmjd ap runs/detect which=best weights=ema", "the EMA weights of the best checkpoint"),
        ("dmjd ap runs/detect results=detections.json", "also write the detections in COCO's results format"),
    ),
    "knn": (
        ("dmjd knn runs/photos", "the newest checkpoint of a run (of a fine-tuned run, its encoder)"),
        ("dmjd knn runs/photos neighbours=[10,20,100] few_shot=1", "the best of several k, with 1 % of the labels"),
        ("dmjd knn mae.pth experiment=mae_vit_base data=folder data.root=imagenet", "a file of another code base"),
    ),
    "linprobe": (
        ("dmjd linprobe runs/photos", "the newest checkpoint; settings depend on the number of images"),
        ("dmjd linprobe runs/photos protocol=dmjd", "a published protocol, on ImageNet"),
        ("dmjd linprobe runs/photos protocol=cached few_shot=10", "13 learning rates in one pass, 10 % of the labels"),
    ),
    "embed": (
        ("dmjd embed runs/photos", "all images of the run, as RUN/embeddings/trained-step########.npz"),
        ("dmjd embed runs/photos data.root=new output=new.parquet", "other images, as a table"),
        ("dmjd embed runs/a runs/b mae.pth experiment=mae_vit_base output=all.npz", "three encoders side by side"),
    ),
    "tsne": (
        ("dmjd tsne runs/photos", "the newest file of dmjd embed, as RUN/explore/tsne.png and tsne.html"),
        ("dmjd tsne all.npz classes=20 split=test", "the encoders of a file side by side, test images of 20 classes"),
        ("dmjd tsne runs/a runs/b classes=[cat,dog]", "the same images of two classes in two runs"),
    ),
    "neighbours": (
        ("dmjd neighbours runs/photos", "the newest file of dmjd embed, as RUN/explore/neighbours.html and .csv"),
        ("dmjd neighbours trained.npz untrained.npz queries=40", "the encoders of two files below each other"),
        (
            "dmjd neighbours runs/photos query=cat/001.jpg duplicates=0.999",
            "one query; pairs of equal images",
        ),
    ),
    "predict": (
        ("dmjd predict runs/finetune new_photos", "all images of a folder, with a fine-tuned classifier"),
        (
            "dmjd predict runs/finetune a.jpg b.jpg probabilities=top5",
            "two images, with the five most probable classes",
        ),
        (
            "dmjd predict runs/photos new_photos labelled=labelled.npz",
            "with kNN on the labelled images of a dmjd embed file",
        ),
    ),
    "show": (
        ("dmjd show runs/photos", "test images of a run, as RUN/pictures/show*.png, which dmjd report includes"),
        ("dmjd show runs/photos a.jpg new/ kinds=attention,pca data.image_size=384", "other images, finer maps"),
        ("dmjd show mae.pth a.jpg experiment=mae_vit_base output=pictures", "a file with encoder and decoder"),
    ),
    "export": (
        ("dmjd export runs/photos", "the newest checkpoint, for timm.create_model"),
        ("dmjd export runs/tuned format=onnx weights=ema", "a fine-tuned run's classifier, EMA weights"),
        ("dmjd export mae.pth experiment=mae_vit_base output=mae.safetensors", "a file of another code base"),
    ),
    "consolidate": (
        ("dmjd consolidate runs/photos", "the newest checkpoint; the file is written into its folder"),
        ("dmjd consolidate runs/photos output=model.safetensors shard_size=5GB", "to several files and an index"),
        ("dmjd consolidate runs/photos/checkpoints/step-00001000", "an earlier checkpoint"),
    ),
    "convert": (
        ("dmjd convert input=mae.pth output=timm.safetensors to=timm", "MAE's weights for timm"),
        ("dmjd convert input=runs/photos output=mae.pth to=mae", "a run for MAE's code"),
        (
            "dmjd convert input=a.pth output=b.pth to=timm grid=[24,24]",
            "with position embeddings interpolated to 24x24 tokens",
        ),
    ),
    "shards": (
        ("dmjd shards build photos shards", "write the images of a folder as tars"),
        ("dmjd shards index 'tars/*.tar' shards", "index existing tars"),
        ("dmjd shards verify shards decode=true", "check every byte and pixel"),
    ),
    "submit": (
        ("dmjd submit pretrain experiment=mae_vit_base data.root=imagenet nodes=4 --dry-run", "print the script"),
        ("dmjd submit pretrain data.root=photos run=runs/photos time=24:00:00", "submit a run"),
        ("dmjd submit knn runs/photos", "submit an evaluation"),
    ),
    "preflight": (
        ("dmjd preflight data.root=photos", "check this machine"),
        ("dmjd preflight finetune runs/photos warm=true", "for dmjd finetune; also run one training step"),
        ("dmjd submit preflight data.root=imagenet nodes=4", "check the nodes of a job"),
    ),
    "doctor": (("dmjd doctor runs/photos", "why a run stopped or hangs"),),
    "ops": (("dmjd ops status", "the kernel of each op"),),
    "completion": (
        ('eval "$(dmjd completion bash)"', "in ~/.bashrc"),
        ('eval "$(dmjd completion zsh)"', "in ~/.zshrc"),
        ("dmjd completion fish | source", "in ~/.config/fish/config.fish"),
    ),
    "version": (("dmjd version", "the installed version"),),
}

OF_EVALUATIONS = (
    ("dmjd {} runs/photos", "the newest checkpoint of a run"),
    ("dmjd {} runs/photos weights=untrained", "the same model before training"),
    ("dmjd {} mae.pth experiment=mae_vit_base data=folder data.root=imagenet", "a file of another code base"),
)

OF_REPORT = (
    "The page and the terminal show the runs as in the paper's tables, with published rows (†) of the same methods:",
    *("  ETE         effective training epochs: views x epochs", "  Gh.         wall hours of pre-training on 8 GPUs"),
    *("  Ft.         top-1 of dmjd finetune", "  LP          top-1 of dmjd linprobe, by protocol"),
    "  kNN         top-1 of dmjd knn",
    "Runs, fine-tunings and probes that differ only in the seed are one row: mean ± standard deviation (seeds).",
    "Scores with other settings or on other data have their own columns.",
    "",
    "baseline=RUN  one of the compared runs; speedups are relative to it",
    "output=DIR    folder of the comparison; default: comparison, beside the runs",
)
"""Help lines of ``dmjd report``."""

_KEY = re.compile(r"^(\w+):(?= )", re.MULTILINE)


def examples(command: str) -> list[str]:
    """Help lines with up to three commands that can be typed."""
    shown = EXAMPLES.get(command) or [(text.format(command), meaning) for text, meaning in OF_EVALUATIONS]
    return ["examples", *(line for text, meaning in shown for line in (f"  {text}", f"      {meaning}"))]


def page(command: str, overrides: Sequence[str] = (), everything: bool = True) -> list[str]:
    """Help lines for ``command``, with the values under ``overrides``, or the defaults if those cannot be composed.

    Lists ``everything``, or the keys of :data:`MOST_USED`.

    A key's first line is ``KEY=VALUE``, as it can be typed, with type and allowed values; its meaning follows below.
    """
    try:
        now, under = values(command, overrides), " ".join(map(redact, overrides))
    except ConfigError:
        now, under = values(command, ()), ""
    width = min(_MAX_WIDTH, get_terminal_size((_MAX_WIDTH, 24)).columns)
    lines = []
    offered = groups_of(command)
    if offered:
        lines = ["groups: GROUP=OPTION sets several keys at once", ""]
        for name, options in offered.items():
            lines += _hanging(", ".join(options), f"  {name:12} ", 15, width)
        described = meanings(SCHEMAS[command])["model"] if takes_files(SCHEMAS[command]) else ""
        lines += ["", *textwrap.wrap(described, width)] if described else []
        lines.append("")
    schema, known = SCHEMAS[command], fields_of(command)
    used = MOST_USED.get(command) or tuple(key for key in known if "." not in key)
    few = not everything and len(used) < len(known)
    under = f"values under {under}" if under else "default values"
    lines.append(f"{'most used ' * few}keys: KEY=VALUE, with {under}")
    if not everything:
        lines += ["", *(line for key in used for line in _used(schema, key, now, width))]
        more = f"dmjd {command.replace('_', ' ')} --help-all lists all {len(known)} keys"
        return [*lines, "", more] if few else lines
    if any(dataclass_of(hint) not in (None, PretrainConfig) for hint in get_type_hints(schema).values()):
        lines += textwrap.wrap(_CONDITIONS, width)
    return [*lines, *_section(schema, now, "", width)]


def meanings(schema: type) -> dict[str, str]:
    """Key -> meaning, from the docstrings of a configuration class and its bases."""
    found: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        _, *parts = _KEY.split(inspect.cleandoc(owner.__doc__ or ""))
        found |= {key: _plain(text) for key, text in zip(parts[::2], parts[1::2], strict=True)}
    return {item.name: found[item.name] for item in fields(schema) if item.name in found}


def _section(schema: type, now: Mapping[str, Any], prefix: str, width: int, when: str = "") -> Iterator[str]:
    """The class's summary and its values, then its nested classes, each in the same way; ``when`` it applies."""
    hints, texts = get_type_hints(schema), meanings(schema)
    summary = _plain(_KEY.split(inspect.cleandoc(schema.__doc__ or ""), maxsplit=1)[0])
    yield ""
    yield from textwrap.wrap(" ".join(filter(None, (f"{prefix[:-1]}:" * bool(prefix), summary, when))), width)
    parts = []
    for item in keys(schema):
        inner = dataclass_of(hints[item.name])
        if inner is None:
            text = texts.get(item.name, "")
            yield from _entry(prefix + item.name, now[item.name], _type(item, hints[item.name]), text, width)
        elif inner is not PretrainConfig:  # set by the groups of keys.DESCRIBING
            parts.append((item.name, inner))
    for name, inner in parts:
        yield from _section(inner, now[name] or _defaults(inner), f"{prefix}{name}.", width, texts.get(name, ""))


def _used(schema: type, key: str, now: Any, width: int) -> Iterator[str]:
    """The entry of one dotted key."""
    *sections, name = key.split(".")
    for section in sections:
        inner = dataclass_of(get_type_hints(schema)[section])
        assert inner is not None
        schema, now = inner, now[section] or _defaults(inner)
    (item,) = (item for item in fields(schema) if item.name == name)
    kind = _type(item, get_type_hints(schema)[name])
    yield from _entry(key, now[name], kind, meanings(schema)[name], width)


def _entry(key: str, value: Any, kind: str, meaning: str, width: int) -> Iterator[str]:
    yield from _hanging(f"({kind})", f"{f'  {key}={_typed(value)}':{_COLUMN - 1}} ", _COLUMN, width)
    yield from textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def _hanging(text: str, first: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False)


def _type(item: Field[Any], annotation: Any) -> str:
    """Type and allowed values: "int, above 0; or null"."""
    optional = NoneType in get_args(annotation)
    (kind,) = [one for one in get_args(annotation) if one is not NoneType] if optional else [annotation]
    (one,) = get_args(kind) or (kind,)  # of a list
    bounds = {name: bound for name, bound in item.metadata.get("bounds", {}).items() if abs(bound) != FLOAT_LIMIT}
    text = allowed({**item.metadata, "bounds": bounds})
    if not {"choices", "path"} & item.metadata.keys():
        text = ", ".join(filter(None, ({bool: "true | false", str: "text"}.get(one, one.__name__), text)))
    if get_args(kind):
        length = item.metadata.get("length")
        text = f"list{f' of {length}' if length else ''}: {text}"
    return text + ("; required" if item.default == "???" else "; or null" if optional else "")


def _typed(value: Any) -> str:
    """A value as it is typed behind ``KEY=``."""
    if value == "???":
        return "..."
    return redact(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _defaults(schema: type) -> dict[str, Any]:
    """The values of an optional section that is null: those it has once an option of its group is chosen."""
    return {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(schema)
    }
