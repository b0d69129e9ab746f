"""``dmjd COMMAND --help``: the groups of a command's configuration, then every key with value, type and meaning.

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

from dmjd.compose import dataclass_of, groups_of, values
from dmjd.config import SCHEMAS, PlanConfig, PretrainConfig
from dmjd.config.fields import FLOAT_LIMIT, allowed, keys
from dmjd.errors import ConfigError
from dmjd.redact import redact

_MAX_WIDTH = 110
"""Longest line in characters; a narrower terminal is filled."""
_COLUMN = 36
"""Column of a key's type and allowed values."""

_CONDITIONS = "(X) before a meaning: the key applies only if its section's name is X; (K=X): only if its key K is X"

_KEY = re.compile(r"^(\w+):(?= )", re.MULTILINE)


def page(command: str, overrides: Sequence[str] = ()) -> list[str]:
    """Help lines for ``command``, with the values under ``overrides``, or the defaults if those cannot be composed.

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
        described = meanings(SCHEMAS[command]).get("model")
        lines += ["", *textwrap.wrap(described, width)] if described else []
        lines.append("")
    lines.append(f"keys: KEY=VALUE, with {f'values under {under}' if under else 'default values'}")
    if any(dataclass_of(hint) not in (None, PretrainConfig) for hint in get_type_hints(SCHEMAS[command]).values()):
        lines += textwrap.wrap(_CONDITIONS, width)
    return [*lines, *_section(SCHEMAS[command], now, "", width)]


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
    inherited = {item.name for item in fields(PretrainConfig)} if schema is PlanConfig else set()
    for item in sorted(keys(schema), key=lambda item: item.name in inherited):
        inner = dataclass_of(hints[item.name])
        if inner is None:
            key = f"  {prefix}{item.name}={_typed(now[item.name])}"
            yield from _hanging(f"({_type(item, hints[item.name])})", f"{key:{_COLUMN - 1}} ", _COLUMN, width)
            yield from textwrap.wrap(texts.get(item.name, ""), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        elif inner is not PretrainConfig:  # set by the groups of compose.DESCRIBING
            parts.append((item.name, inner))
    for name, inner in parts:
        yield from _section(inner, now[name] or _defaults(inner), f"{prefix}{name}.", width, texts.get(name, ""))


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
