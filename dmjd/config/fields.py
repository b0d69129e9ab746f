"""Fields of a configuration: the default with the allowed values beside it, and their check."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from dmjd.errors import ConfigError
from dmjd.files import at_home
from dmjd.redact import Typed, same_but_secrets, shown

RENAMED = {
    "engine.accumulation": "engine.grad_accum_steps",
    "backbone.hidden": "backbone.masked_tokens",
    "mask.predict_ratio": "mask.loss_ratio",
}
"""Former key -> present key. Read for stored configurations and for the command line, and by nothing else."""


FLOAT_LIMIT = 1e6
"""A bound without meaning for the field, which keeps computations with the number finite; left out of ``--help``."""


INTEGER_LIMIT = 10**12
"""Greatest integer of any field, so that products of two, such as steps, fit 64 bits."""

_SIMILAR = 0.7
"""Least similarity of a suggestion: gpu is not cpu."""


def choice(default: str, *others: str, rejected: Mapping[str, str] | None = None) -> Any:
    """One of a few strings. ``rejected``: value that users may expect -> reason why it is not supported."""
    return field(default=default, metadata={"choices": (default, *others), "rejected": rejected or {}})


def choices(default: str, *others: str) -> Any:
    """A list of strings as for :func:`choice`; by default of ``default`` alone."""
    return field(default_factory=lambda: [default], metadata={"choices": (default, *others), "rejected": {}})


def choice_of(names: list[str]) -> Any:
    """As :func:`choice`, of a list that a registry may append to; the first is the default."""
    return field(default=names[0], metadata={"choices": names, "rejected": {}})


def naming(default: str | None, of: str) -> Any:
    """A string that is not blank, or None where the type allows it; ``of`` completes the error "... must name"."""
    return field(default=default, metadata={"names": of})


def path(default: str | None = None, of: str | None = None, between: str = "") -> Any:
    """A path or URL, or a list of them; a leading ``~`` is expanded (:func:`expand_paths`).

    ``of`` as for :func:`naming`; ``between``: separator, if there may be several paths.
    """
    return field(default=default, metadata={"path": between} | ({} if of is None else {"names": of}))


def number(default: Any, **bounds: float) -> Any:
    """A finite number, or None where the type allows it, within ``above``, ``least``, ``below``, ``most``."""
    return field(default=default, metadata={"bounds": bounds})


def positive(default: Any) -> Any:
    """A number that must be above 0."""
    return number(default, above=0)


def numbers(*default: float, length: int | None = None, **bounds: float) -> Any:
    """A list of finite numbers within bounds as for :func:`number`, of a fixed length if one is given."""
    return field(default_factory=lambda: list(default), metadata={"bounds": bounds, "length": length})


def pixel_values(*default: float, **bounds: float) -> Any:
    """A list as for :func:`numbers` in units of pixel values in 0..1; the error for one in 0..255 divides it."""
    return field(default_factory=lambda: list(default), metadata={"bounds": {**bounds, "most": 1}, "pixels": True})


def size(*default: int, **bounds: float) -> Any:
    """Height and width within bounds as for :func:`number`; on the command line one integer stands for both. Without a
    default it is None."""
    metadata = {"bounds": bounds, "length": 2, "square": True}
    return field(default_factory=lambda: list(default) or None, metadata=metadata)


def found_at_start(default: Any) -> Any:
    """A field that is null until a run starts, which stores the value that it finds. null agrees with any value."""
    item = default if isinstance(default, Field) else field(default=default)
    item.metadata = MappingProxyType({**item.metadata, "found_at_start": True})
    return item


def may_change(default: Any, where: str = "") -> Any:
    """A field that does not affect results: a run may be resumed with another value.

    Args:
        default: a field made by a function above, or a default value.
        where: applies only if the section's ``name`` has this value; "": always.
    """
    item = default if isinstance(default, Field) else field(default=default)
    item.metadata = MappingProxyType({**item.metadata, "may_change": where})
    return item


def recorded(default: Any = None) -> Any:
    """A field that the command line fills in; it is no key and not in ``--help``."""
    return field(default=default, metadata={"recorded": True})


def keys(schema: Any) -> list[Field[Any]]:
    """The fields of a configuration class that are keys of the command line."""
    return [item for item in fields(schema) if "recorded" not in item.metadata]


def first_difference(old: Any, new: Any, prefix: str = "") -> tuple[str, Any, Any] | None:
    """(key, old value, new value) of the first field that differs, except secrets and :func:`may_change` fields."""
    for item in fields(new):
        before, now = getattr(old, item.name), getattr(new, item.name)
        where = item.metadata.get("may_change")
        if where is not None and (not where or old.name == new.name == where):
            continue
        if now is None and "found_at_start" in item.metadata:
            continue
        if is_dataclass(before) and is_dataclass(now):
            inner = first_difference(before, now, f"{prefix}{item.name}.")
            if inner:
                return inner
        elif isinstance(before, str) and isinstance(now, str):
            if not same_but_secrets(before, now):
                return prefix + item.name, shown(before), shown(now)
        elif before != now:
            return prefix + item.name, before, now
    return None


def affecting(config: Any) -> dict[str, Any]:
    """Key -> value of all fields that may affect results, that is without :func:`may_change` fields; sections as
    nested mappings."""
    kept = [item for item in fields(config) if item.metadata.get("may_change") != ""]
    values = {item.name: getattr(config, item.name) for item in kept}
    return {key: affecting(value) if is_dataclass(value) else value for key, value in values.items()}


def expand_paths(config: Any) -> None:
    """Expand a leading ``~`` in every :func:`path` field; URLs and commands have none."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            expand_paths(value)
        elif "path" in item.metadata and isinstance(value, list):
            setattr(config, item.name, [at_home(each) for each in value])
        elif "path" in item.metadata and value is not None:
            between = item.metadata["path"]
            paths = between.join(map(at_home, value.split(between) if between else [value]))
            setattr(config, item.name, Typed(paths, value.typed) if isinstance(value, Typed) else paths)


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first value outside its field's choices or bounds."""
    for item in fields(config):
        value, key = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            check_fields(value, key + ".")
        for single in value if isinstance(value, list) else [value]:
            known = item.metadata.get("choices")
            if known and single not in known:
                why = item.metadata["rejected"].get(single)
                reason = suggestion(str(single).lower(), known) if why is None else f", which {why}"
                raise ConfigError(f"{key} must be one of {', '.join(sorted(known))}, got {single!r}{reason}")
        if "names" in item.metadata and value is not None and not value.strip():
            raise ConfigError(f"{key} must name {item.metadata['names']}, got an empty value")
        if "path" in item.metadata and value is not None:
            for single in value if isinstance(value, list) else [value]:
                _check_path(key, single)
        length = item.metadata.get("length")
        if length is not None and value is not None and len(value) != length:
            raise ConfigError(f"{key} must hold {length} numbers, got {value}")
        if "bounds" in item.metadata and value is not None:
            for single in value if isinstance(value, list) else [value]:
                _check_bounds(key, single, item.metadata)


def _check_path(key: str, path: str) -> None:
    if path == "":
        raise ConfigError(f"{key} must be a path, got an empty value; check that the shell variable in it is set")
    if path.startswith("~"):
        raise ConfigError(
            f"{key}={path}: there is no user {path[1:].partition('/')[0]}; ./{path} is a path of that name"
        )


_BOUNDS = {
    "above": (operator.gt, "above"),
    "least": (operator.ge, "at least"),
    "below": (operator.lt, "below"),
    "most": (operator.le, "at most"),
}


def allowed(metadata: Mapping[str, Any]) -> str:
    """Allowed values from a field's metadata: choices, "path", or bounds of a number."""
    if "choices" in metadata:
        return " | ".join(metadata["choices"])
    if "path" in metadata:
        return "path"
    return " and ".join(f"{_BOUNDS[name][1]} {bound:.10g}" for name, bound in metadata.get("bounds", {}).items())


def is_fraction(metadata: Mapping[str, Any]) -> bool:
    """Whether the field's numbers are at most 1."""
    bounds = metadata.get("bounds", {})
    return min(bounds.get("most", math.inf), bounds.get("below", math.inf)) <= 1


def _check_bounds(key: str, value: float, metadata: Mapping[str, Any]) -> None:
    bounds = metadata["bounds"]
    if isinstance(value, int) and value > INTEGER_LIMIT:
        bounds = {**bounds, "most": INTEGER_LIMIT}
    if math.isfinite(value) and all(_BOUNDS[name][0](value, bound) for name, bound in bounds.items()):
        return
    cure = ""
    if "pixels" in metadata and 1 < value <= 255:
        cure = f"; divide values for pixels in 0..255 by 255: {value / 255:.3g}"
    elif is_fraction(metadata) and 1 < value <= 100:
        cure = f"; {value:g} % is {value / 100:g}"
    raise ConfigError(f"{key} must be {allowed({'bounds': bounds}) or 'a finite number'}, got {value:.10g}{cure}")


def suggestion(name: str, names: Iterable[str]) -> str:
    """``; did you mean NAME?`` for the closest of ``names``, or nothing."""
    near = closest(name, names)
    return f"; did you mean {near}?" if near else ""


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that is most similar to ``name``, in any case and with - for _; None if none is.

    The shortest name that begins with ``name`` comes first.
    """
    typed = _plain(name)
    known = {_plain(each): each for each in sorted(names, key=len, reverse=True)}
    begun = [each for each in known if len(typed) > 2 and each.startswith(typed)]
    near = difflib.get_close_matches(typed, known, n=1, cutoff=_SIMILAR)
    return known[min(begun, key=len)] if begun else known[near[0]] if near else None


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def dataclass_of(annotation: Any) -> type | None:
    """The dataclass inside ``X`` or ``X | None``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


def leaves(schema: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """(dotted key, field, annotation) of every single value of a configuration class and its sections."""
    hints = get_type_hints(schema)
    for item in keys(schema):
        inner = dataclass_of(hints[item.name])
        if inner is None:
            yield prefix + item.name, item, hints[item.name]
        else:
            yield from leaves(inner, f"{prefix}{item.name}.")
