"""Files of named tensors: .safetensors, or torch's .pth. No code from a file is run."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dmjd.errors import CheckpointError, ConfigError
from dmjd.files import replace_file
from dmjd.interop.file_content import SAFETENSORS, is_safetensors, read_content
from dmjd.interop.names import LEAVES, summary
from dmjd.safe_load import parse_json

OF_HUGGING_FACE = ("model.safetensors", "pytorch_model.bin")
"""Names of weights in a folder of Hugging Face, whole or with the index of their parts (``.index.json``)."""
MODEL_CONFIG = "config.json"
"""The configuration in such a folder."""
GRID = "dmjd.token_grid"
"""Key in the header of .safetensors: the token grid of position tables, as ``7x28``; rows do not determine it."""
SUFFIXES = (SAFETENSORS, ".pth", ".pt", ".pyth")

CONTAINERS = (
    *("model", "model_state", "state_dict", "model_state_dict", "module", "weights", "network", "net", "encoder"),
    *("backbone", "student", "online_network", "online_model", "params"),
)
"""Keys of the trained state in training files, and prefixes of its names; DeepSpeed's key is ``module``."""

AVERAGES = (
    *("model_ema", "ema", "ema_model", "ema_state", "state_dict_ema", "ema_state_dict", "model_ema_state_dict"),
    *("model_state_dict_ema", "ema_weights", "ema_params", "params_ema", "averaged_model", "teacher", "shadow"),
    *("target_network", "target_encoder", "momentum_encoder", "encoder_k", "shadow_params"),
)
"""Keys and prefixes of an average of the weights (EMA); ``shadow_params`` is a list in the order of the parameters."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights. Narrower types are quantised and need a scale that is stored elsewhere."""

_AVERAGE_KEY = re.compile(r"(^|[_.])(ema|teacher|swa|avg|averaged?|momentum|shadow|polyak)\d*([_.]|$)")
_TRAINED_KEY = re.compile(r"student|online|model_state|state_dict")
"""Other keys of the two, such as ``teacher_state_dict``."""

_CALLBACKS = "callbacks"
"""Key of the states of Lightning's callbacks, of which some keep an average."""
_NO_MODEL = re.compile(r"optim|sched|scaler|loss|callback")
"""Keys of a file's other states, which are not searched."""
_SHADOWS = ("shadow", "shadow_params")

_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module"}
)
"""Parts of names from DDP, torch.compile, Lightning Fabric, FSDP and activation checkpointing, at any place."""

_OUTER = ("model", "student", "teacher", "net", "network", "ema_model", "online_model")
"""First parts of every name, from the attribute that holds the model. No layout has them."""

_MOST_OUTER = 4

_MOST_LISTED = 50
"""Names that an error takes from a file without weights."""

_ENCODER = re.compile(r"([^.]+)\.(?:.*\.)?patch_embed")
"""The first part of an encoder's names."""
_COUNTERS = re.compile(r"(^|\.)(n_averaged|num_averaged|num_updates|initted|steps?|iter|epoch|decay)$")
"""Names of counters that averages keep beside the weights."""


class State(NamedTuple):
    """The tensors of a file by name. kind: "trained" or "ema". other: the key of the file's other kind, or several of
    averages; empty for none.

    key: the key in the file that holds them; empty for a bare state.
    """

    tensors: dict[str, Tensor]
    kind: str = "trained"
    key: str = ""
    other: str = ""

    @property
    def note(self) -> str:
        """The kind that was read, where a file has two or only an average, for messages."""
        if _is_distillation(self.other, self.key):
            return f" ({self.key}, which its authors evaluate; weights=student reads {self.other})"
        if self.kind == "ema":
            return f" (the average {self.key})"
        if ", " in self.other:
            return f" (the trained weights, not its averages {self.other})"
        return f" (the trained weights; weights=ema reads its average {self.other})" if self.other else ""


def _is_distillation(trained: str, average: str) -> bool:
    """Whether a file holds a student and its teacher, as of DINO and iBOT, whose authors evaluate the teacher."""
    return "student" in trained and "teacher" in average


def read_state(path: Path, weights: str = "trained") -> State:
    """The weights in a file, on the CPU, without wrappers' parts in the names.

    Entries without a weight's name are ignored: many files hold options and counters too. A file that holds an average
    alone gives it for "trained" as well.

    Args:
        weights: "trained"; "ema", their average; or "student". Of a file with a student and a teacher "trained" is the
            teacher, which the authors of such methods evaluate.

    Raises:
        CheckpointError: if the file cannot be read or holds no state, or an entry with a weight's name is not a weight,
            or there are several averages to read.
        ConfigError: if the file does not have ``weights``.
    """
    file = read_content(path)
    if not isinstance(file, Mapping):
        raise CheckpointError(f"{path} holds a {type(file).__name__}, not weights by name; save a state_dict()")
    if "averaging_state" in file and "current_model_state" in file:  # of Lightning's WeightAveraging
        file = {"model": file["current_model_state"], "state_dict_ema": file.get("state_dict")}
    keys = [key for key in file if isinstance(key, str)]
    averages = [key for key in keys if _AVERAGE_KEY.search(key)]
    others = [key for key in keys if _TRAINED_KEY.search(key) and key not in averages]
    models = [each for each in others if _has_encoder(file[each])]
    (key, entries), (average_key, averaged) = _held(file, [*CONTAINERS, *others]), _held(file, [*AVERAGES, *averages])
    if key in models[:1] and len(models) > 1:
        raise CheckpointError(f"{path} holds several models: {summary(models)}; save one of them to a file")
    if entries is None and (any(_is_weight(name) for name in _tensors(file)) or (averaged is None and _tensors(file))):
        key, entries = "", file
    if averaged is None and isinstance(callbacks := file.get(_CALLBACKS), Mapping):
        inside = _states(callbacks, f"{_CALLBACKS}.")
        average_key, averaged = next((pair for pair in inside if _AVERAGE_KEY.search(pair[0])), ("", None))
    if entries is None and averaged is None:
        (key, entries), (average_key, averaged) = _deeper(path, file)
    if entries is not None and averaged is None:
        (key, entries), (average_key, averaged) = _split(key, entries)
    elif isinstance(averaged, Mapping):  # ema-pytorch's file has both
        within, average_within = _split(average_key, averaged)
        if average_within[1] is not None:
            average_key, averaged = average_within
            key, entries = within if entries is None else (key, entries)
    distilled = _is_distillation(key, average_key)
    average = weights == "ema" or (weights == "trained" and distilled)
    if isinstance(averaged, Sequence) and (average or entries is None):
        averaged = _named(path, average_key, averaged, entries)
    if average and averaged is None:
        raise ConfigError(f"weights=ema, but {path} has no EMA weights; use weights=trained")
    several = ", ".join(_averages(file))
    if weights == "ema" and ", " in several:
        raise CheckpointError(f"{path} holds several averages: {several}; save one of them to a file")
    if weights == "student" and not distilled:
        raise ConfigError(f"weights=student, but {path} has no student beside a teacher; use weights=trained")
    if entries is None and averaged is None:
        for part in (file, *map(file.get, keys)):
            if isinstance(part, Mapping):
                _check_weights(path, part)
        found = summary(islice(_listing(file), _MOST_LISTED)) or "nothing by name"
        raise CheckpointError(
            f"{path} holds no tensors by name, at the top or under a key such as model or state_dict; it has {found}; "
            "of a module that was saved whole, save the state_dict()"
        )
    if averaged is not None and (average or entries is None):
        return State(_clean(path, averaged), "ema", average_key, key)
    assert entries is not None
    return State(_clean(path, entries), "trained", key, several if ", " in several and not distilled else average_key)


def _held(file: Mapping[Any, Any], keys: Sequence[str], deeper: bool = True) -> tuple[str, Any]:
    """The first of ``keys`` that holds tensors by name or in a list, also one container deeper, and what it holds;
    ("", None) if none does. Those that hold an encoder come first."""
    for key in sorted(keys, key=lambda key: not _has_encoder(file.get(key))):
        part = file.get(key)
        if isinstance(part, Mapping) and _weights(part):
            return key, part
        if isinstance(part, Mapping) and deeper:
            inner, entries = _held(part, (*CONTAINERS, *_SHADOWS), deeper=False)
            if entries is not None:
                return f"{key}.{inner}", entries
        if isinstance(part, list) and part and all(isinstance(value, Tensor) for value in part):
            return key, part
    return "", None


def _has_encoder(part: Any) -> bool:
    return isinstance(part, Mapping) and any("patch_embed" in str(name) for name in part)


def _averages(file: Mapping[Any, Any]) -> list[str]:
    """Keys and prefixes of all averages that hold an encoder; one for all that a key of an average holds."""
    found = list[str]()
    bare = [("", file)] if any(_is_weight(name) for name in _tensors(file)) else []
    for top, states in [("", bare), *((str(key), list(_states({key: part}))) for key, part in file.items())]:
        inside = list[str]()
        for key, part in states:
            encoders = dict.fromkeys(match[1] for name in _without_wrappers(part) if (match := _ENCODER.match(name)))
            prefixes = [f"{key}.{first}".strip(".") for first in encoders if _is_average(first)]
            inside += prefixes or [key] * (_is_average(key) and _has_encoder(part))
        found += [top] if inside and _is_average(top) else inside
    return found


def _is_average(key: str) -> bool:
    return bool(_AVERAGE_KEY.search(key)) or not {*AVERAGES}.isdisjoint(key.split("."))


def _deeper(path: Path, file: Mapping[Any, Any]) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Trained weights and an average at any other place of a file that has one of each at most.

    Raises:
        CheckpointError: if there are several models.
    """
    trained, average = dict[str, Any](), dict[str, Any]()
    for key, part in _states(file):
        (average if _AVERAGE_KEY.search(key) else trained)[key] = part
    for found in (trained, average):
        if len(found) > 1:
            raise CheckpointError(f"{path} holds several models: {summary(found)}; save one of them to a file")
    return next(iter(trained.items()), ("", None)), next(iter(average.items()), ("", None))


def _states(file: Mapping[Any, Any], prefix: str = "", depth: int = _MOST_OUTER) -> Iterator[tuple[str, Any]]:
    """Dotted keys of mappings of weights by name, but for those of optimizers, and the mappings."""
    for key, part in file.items():
        if not isinstance(part, Mapping) or not depth or _NO_MODEL.search(str(key)):
            continue
        if any(_is_weight(name) for name in _tensors(part)):
            yield f"{prefix}{key}", part
        else:
            yield from _states(part, f"{prefix}{key}.", depth - 1)


def _split(key: str, entries: Mapping[Any, Any]) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Trained weights and an average that stand in one state under the prefixes ``student.`` and ``teacher.``."""
    first = [str(name).partition(".")[0] for name in _without_wrappers(entries)]
    encoders = {found[1] for name in _without_wrappers(entries) if (found := _ENCODER.match(name))}
    others = (part for part in first if part in encoders and _AVERAGE_KEY.search(part))
    average = next((part for part in AVERAGES if part in first), None) or next(others, None)
    if average is None:
        return (key, entries), ("", None)
    named = dict(zip(_without_wrappers(entries), entries.values(), strict=True))
    parts = {part: {name: value for name, value in named.items() if name.startswith(f"{part}.")} for part in first}
    trained = next((part for part in CONTAINERS if part in first), None)
    if trained is None and (
        trained := next(filter(_TRAINED_KEY.search, sorted(encoders - {average})), None)
    ):  # of lightly
        parts[trained] = _below(parts[trained], trained)
    rest = {name: value for name, value in named.items() if name not in parts[average]}
    inside = f"{key}.{average}" if key else average
    if trained is not None:
        return (f"{key}.{trained}" if key else trained, parts[trained]), (inside, _below(parts[average], average))
    return (key, rest if _weights(rest) else None), (inside, _below(parts[average], average))


def _below(entries: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name.removeprefix(f"{part}."): value for name, value in entries.items()}


def _named(path: Path, key: str, values: Sequence[Tensor], entries: Any) -> dict[str, Tensor]:
    """A list of averaged parameters under the names of the trained ones, which are in the same order."""
    names = [name for name, value in _tensors(entries or {}).items() if value.is_floating_point()]
    if [tuple(value.shape) for value in values] != [tuple(entries[name].shape) for name in names]:
        raise CheckpointError(
            f"{path}: {key} is a list of {len(values)} tensors whose shapes are not those of the {len(names)} trained "
            "ones; save the average by name"
        )
    return dict(zip(names, values, strict=True))


def _clean(path: Path, entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The weights among ``entries`` without wrappers and counters. Raises CheckpointError for what is no weight."""
    _check_weights(path, entries)
    state, before = {}, dict[str, str]()
    for original, name in zip(entries, _without_wrappers(entries), strict=True):
        if name in before:
            raise CheckpointError(
                f"{path}: {before[name]} and {original} are both {name} without their wrappers; save one of them"
            )
        before[name] = str(original)
        if isinstance(entries[original], Tensor) and not _COUNTERS.search(name):
            state[name] = entries[original]
    for _ in range(_MOST_OUTER):
        outer = next((part for part in _OUTER if all(name.startswith(f"{part}.") for name in state)), None)
        if outer is None:
            break
        state = _below(state, outer)
    return state


def _without_wrappers(names: Iterable[Any]) -> list[str]:
    return [".".join(part for part in str(name).split(".") if part not in _WRAPPERS) for name in names]


def grid_noted(path: Path) -> tuple[int, int] | None:
    """The token grid in the header of a .safetensors file of ``dmjd convert`` or ``dmjd export``; None without one."""
    if not is_safetensors(path):
        return None
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
    noted = header.get(GRID, "")
    with suppress(ValueError, LookupError, TypeError):
        noted = noted or str(parse_json(header["dmjd"])["token_grid"])
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", noted)
    return (int(found[1]), int(found[2])) if found else None


def write_state(path: Path, state: Mapping[str, Tensor], container: str | None, metadata: Mapping[str, str]) -> None:
    """Write ``state`` to ``path`` atomically.

    Args:
        container: the key of the state in a .pth file, None for a bare state; .safetensors are always bare.
        metadata: header of .safetensors; ignored for .pth.
    """
    # Copies: a view would write its whole storage, and safetensors rejects tensors that share memory.
    state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    if path.suffix == SAFETENSORS:
        replace_file(path, save(state, metadata=dict(metadata)))
        return
    buffer = io.BytesIO()
    torch.save(state if container is None else {container: state}, buffer)
    replace_file(path, buffer.getvalue())


def _listing(entries: Mapping[Any, Any], depth: int = 4) -> Iterator[str]:
    """Dotted names of what ``entries`` holds, without what is inside a mapping of tensors."""
    for name, part in entries.items():
        if isinstance(part, Mapping) and part and depth and not _tensors(part):
            yield from (f"{name}.{inner}" for inner in _listing(part, depth - 1))
        else:
            yield str(name)


def is_of_hugging_face(path: Path) -> bool:
    """Whether the file is that of the weights, or their index, in a folder of Hugging Face."""
    return path.name.startswith(OF_HUGGING_FACE) and (path.parent / MODEL_CONFIG).is_file()


def _is_weight(name: str) -> bool:
    """Whether ``name`` ends as a weight's does."""
    return name.rpartition(".")[2] in LEAVES


def _weights(entries: Mapping[Any, Any]) -> bool:
    """Whether there are tensors other than counters."""
    return any(not _COUNTERS.search(name) for name in _tensors(entries))


def _tensors(entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): value for name, value in entries.items() if isinstance(value, Tensor)}


def _check_weights(path: Path, entries: Mapping[Any, Any]) -> None:
    """Raise CheckpointError with the entries that have a weight's name and the first fault found."""
    faults: dict[str, list[str]] = {}
    for name, value in entries.items():
        if _is_weight(str(name)) and (fault := _fault(value)):
            faults.setdefault(fault, []).append(str(name))
    flat = [str(name) for name in entries if str(name).endswith("_flat_param")]
    if flat:
        raise CheckpointError(f"{path}: {summary(flat)} hold all weights of FSDP in a row; save a FULL_STATE_DICT")
    for fault, names in faults.items():
        raise CheckpointError(f"{path}: {summary(names)} {'is' if len(names) == 1 else 'are'} {fault}")


def _fault(value: Any) -> str | None:
    """Why ``value`` is not a weight, to follow "NAME is"; None if it is one."""
    if not isinstance(value, Tensor):
        return "not stored as torch's tensors; store what torch.as_tensor() gives"
    if value.is_quantized:
        return "quantised; store what dequantize() gives"
    if value.layout is not torch.strided:
        return "sparse; store what to_dense() gives"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes() and not value.is_meta:
        return "larger than what the file holds of it; store what contiguous() gives"
    if value.is_meta:
        return "without values, for the model was on torch's meta device; save it after loading its weights"
    if value.dtype not in FLOATS:
        kinds = ", ".join(map(str, FLOATS))
        return f"of {value.dtype}, and weights are read in {kinds}; store what dequantize() or float() gives"
    if not value.ndim:
        return "a single number, which no weight is; save the state_dict() of the model"
    if not value.numel():
        return "empty, as where each process of a sharded model stores its own part; gather them first"
    return None
