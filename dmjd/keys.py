"""The groups and keys that a command takes, and the closest of them to one that it does not. Imports no Hydra."""

from __future__ import annotations

import difflib
import re
from dataclasses import Field, fields
from typing import Any, get_type_hints

from dmjd.config import SCHEMAS, DenseDataConfig, DownstreamConfig, PretrainConfig
from dmjd.config.fields import dataclass_of, keys, leaves
from dmjd.resources import configs_dir

DESCRIBING = ("experiment", "backbone")
"""Groups of pre-training that describe the model of a file of weights to other commands."""
_PRESETS_OF = {"ade20k": "segment", "coco": "detect"}


def groups() -> dict[str, list[str]]:
    """Config groups and their options, as shipped: ``{"data": ["digits", "folder", ...], ...}``."""
    folders = sorted(path for path in configs_dir().iterdir() if path.is_dir() and any(path.glob("*.yaml")))
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def groups_of(command: str) -> dict[str, list[str]]:
    """The groups that ``command`` takes, with their options."""
    schema: Any = SCHEMAS[command]
    names = {field.name for field in fields(schema)}
    if issubclass(schema, PretrainConfig) or takes_files(schema):
        names |= set(DESCRIBING)
    if issubclass(schema, DownstreamConfig):
        names = (names | {"preset"}) - {"optim"}  # whose option has the learning rate of pre-training
    if _reads_annotations(schema):
        names -= {"data"}  # whose options are data sets of images
    found = {name: options for name, options in groups().items() if name in names}
    if "preset" in found:
        found["preset"] = [name for name in found["preset"] if command_of_preset(name) == schema.command]
    return found


def _reads_annotations(schema: type) -> bool:
    data = dataclass_of(get_type_hints(schema).get("data"))
    return data is not None and issubclass(data, DenseDataConfig)


def command_of_preset(name: str) -> str:
    """The command that takes ``preset=NAME``: that of the data set at the beginning of the name, else finetune."""
    return _PRESETS_OF.get(name.partition("_")[0], "finetune")


def fields_of(command: str) -> dict[str, tuple[Field[Any], Any]]:
    """Dotted key -> (field, annotation), of all single values that ``command`` takes."""
    # A file's model is described by groups of pre-training.
    found = leaves(SCHEMAS[command])
    return {key: (item, annotation) for key, item, annotation in found if not key.startswith("model.")}


def takes_files(schema: type) -> bool:
    """Whether a command takes files of weights, whose model has to be described by :data:`DESCRIBING`."""
    return any(field.name == "model" for field in keys(schema))


def takes_data(schema: type) -> bool:
    """Whether a command reads the images of a checkpoint's data, of which only the keys that are given differ."""
    return any(field.name == "data_keys" for field in fields(schema))


def keys_of(command: str) -> set[str]:
    """Groups and keys that ``command`` takes before an equals sign."""
    described = fields_of("pretrain") if takes_files(SCHEMAS[command]) else {}
    more = {key for key in described if key.partition(".")[0] in DESCRIBING}
    return {*groups_of(command), *fields_of(command), *more}


SEVERAL = ("checkpoints", "embeddings")
"""Keys of a first argument that take a list: `dmjd embed RUN RUN` is short for `dmjd embed checkpoints=[RUN,RUN]`."""
PATHS = "paths"
"""Key of the arguments after the first one, of a command that has it: `dmjd show RUN A B` is short for
`dmjd show checkpoint=RUN paths=A,B`."""


def key_of_first(command: str) -> str | None:
    """The key of a first argument without one: `dmjd knn RUN` is short for `dmjd knn checkpoint=RUN`."""
    if issubclass(SCHEMAS.get(command, object), DownstreamConfig):
        return "init"
    names = {field.name for field in fields(SCHEMAS[command])} if command in SCHEMAS else set()
    return next((key for key in ("checkpoint", *SEVERAL) if key in names), None)


ELSEWHERE = {
    "arch": "backbone",
    "bs": "batch_size",
    "dir": "root",
    "directory": "root",
    "encoder": "backbone",
    "folder": "root",
    "img_size": "image_size",
    "input_size": "image_size",
    "k": "neighbours",
    "learning_rate": "base_lr",
    "lr": "base_lr",
    "model": "backbone",
    "num_epochs": "epochs",
    "num_workers": "workers",
    "output_dir": "run",
    "out": "run",
    "path": "root",
    "resolution": "image_size",
    "size": "image_size",
    "warmup": "warmup_epochs",
    "wd": "weight_decay",
}
"""Name of a key in other code bases -> the last component of its name here."""


def near(key: str, command: str) -> str:
    """The end of an error about an unknown key: up to three keys of ``command`` that are meant, or all of a section."""
    known = [*groups_of(command), *fields_of(command)]
    section = [name for name in known if name.startswith(f"{key}.")]
    if section:
        return f"; {key} is a section with {', '.join(name.removeprefix(f'{key}.') for name in section)}"
    above = key.rpartition(".")[0]
    if above in known and not any(name.startswith(f"{above}.") for name in known):
        return f"; {above} is a single value"
    scores = {name: _closeness(key, name) for name in known}
    best = max(scores.values(), default=0.0)
    if best >= 0.7:
        found = sorted((name for name in known if scores[name] >= best - 0.02), key=lambda name: name.count("."))[:3]
        return f"; did you mean {' or '.join(found)}?"
    inner = [name.removeprefix(f"{above}.") for name in known if above and name.startswith(f"{above}.")]
    names = inner or list(dict.fromkeys(name.partition(".")[0] for name in known))
    return f"; {above if inner else 'the top level'} has {', '.join(names)}"


def _closeness(typed: str, name: str) -> float:
    """How probable it is that ``name`` is meant by ``typed``, in 0..1."""
    (section, _, last), (own_section, _, own) = typed.lower().rpartition("."), name.rpartition(".")
    alike = difflib.SequenceMatcher(None, last, own).ratio()
    if own == last or re.sub(r"\W|__", "_", typed.lower()) in (own, name.replace(".", "_")):
        alike = 1.0
    elif ELSEWHERE.get(last) == own:
        alike = 0.95
    elif last in own.split("_"):
        alike = max(alike, 0.8)
    same_section = difflib.SequenceMatcher(None, section, own_section).ratio() > 0.75 if section else False
    return 0.9 * alike + 0.1 * same_section
