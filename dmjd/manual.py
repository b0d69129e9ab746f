"""The page of a verb that has a configuration: groups, and every key with its value, what it may be and what it means.

Meanings are the docstrings of the configuration's classes: what follows a key in double backticks, where a sentence
begins with it, up to the next such sentence.
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

from dmjd.compose import SCHEMAS, dataclass_of, groups_of, values
from dmjd.config import PretrainConfig
from dmjd.config.fields import allowed
from dmjd.errors import ConfigError
from dmjd.redact import redact

_WIDEST = 110
"""Of a line, in characters; a terminal that is narrower is filled."""
_COLUMN = 36
"""Where what a value may be begins."""

_KEY = r"``(\w+)``"
_OPENING = re.compile(rf"(?:^|(?<=[.;] )){_KEY}(?: and {_KEY})?(?= |:)")


def page(verb: str, words: Sequence[str] = ()) -> list[str]:
    """Help lines for ``verb``; values are those in force under ``words``, or by default where they cannot be composed.

    A key's first line is what one types, ``KEY=VALUE``, and what else it may be; the lines below it say what it means.
    """
    try:
        now, under = values(verb, words), " ".join(map(redact, words))
    except ConfigError:
        now, under = values(verb, ()), ""
    width = min(_WIDEST, get_terminal_size((_WIDEST, 24)).columns)
    lines = []
    offered = groups_of(verb)
    if offered:
        lines = ["groups: GROUP=OPTION sets many keys at once", ""]
        for name, options in offered.items():
            lines += _hanging(", ".join(options), f"  {name:12} ", 15, width)
        lines.append("")
    lines.append(f"keys: KEY=VALUE, as they are {f'under {under}' if under else 'by default'}")
    return [*lines, *_section(SCHEMAS[verb], now, "", width)]


def meanings(schema: type) -> dict[str, str]:
    """What the docstrings of a configuration's class and its bases say of each of their keys."""
    said: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        text = _text(owner)
        found = list(_OPENING.finditer(text))
        for match, end in zip(found, [*(match.start() for match in found), len(text)][1:], strict=True):
            said |= {key: _plain(text[match.end() : end]) for key in match.groups() if key}
    return {item.name: said[item.name] for item in fields(schema) if item.name in said}


def _section(schema: type, now: Mapping[str, Any], prefix: str, width: int) -> Iterator[str]:
    """The single values of a class under its summary, and then its parts, each with its own."""
    hints, said = get_type_hints(schema), meanings(schema)
    summary = _plain(_OPENING.split(_text(schema), maxsplit=1)[0])
    yield ""
    yield from textwrap.wrap(f"{prefix.removesuffix('.')}: {summary}" if prefix else summary, width)
    parts = []
    for item in fields(schema):
        inner = dataclass_of(hints[item.name])
        if inner is None:
            key = f"  {prefix}{item.name}={_typed(now[item.name])}"
            yield from _hanging(f"({_what(item, hints[item.name])})", f"{key:{_COLUMN - 1}} ", _COLUMN, width)
            yield from textwrap.wrap(said.get(item.name, ""), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        elif inner is not PretrainConfig:  # described by the words of compose.DESCRIBING
            parts.append((item.name, inner))
    for name, inner in parts:
        yield from _section(inner, now[name] or _defaults(inner), f"{prefix}{name}.", width)


def _text(schema: type) -> str:
    return " ".join((inspect.cleandoc(schema.__doc__ or "")).split())


def _plain(text: str) -> str:
    return re.sub(r"``(.+?)``", r"\1", re.sub(r"^(\s*\([^)]*\))?:", r"\1", text)).strip()


def _hanging(text: str, first: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False)


def _what(item: Field[Any], annotation: Any) -> str:
    """The kind of value and its bounds: "int, above 0; or null"."""
    optional = NoneType in get_args(annotation)
    (kind,) = [one for one in get_args(annotation) if one is not NoneType] if optional else [annotation]
    (one,) = get_args(kind) or (kind,)  # of a list
    words = allowed(item.metadata)
    if not {"choices", "path"} & item.metadata.keys():
        words = ", ".join(filter(None, ({bool: "true | false", str: "text"}.get(one, one.__name__), words)))
    if get_args(kind):
        length = item.metadata.get("length")
        words = f"list{f' of {length}' if length else ''}: {words}"
    return words + ("; required" if item.default == "???" else "; or null" if optional else "")


def _typed(value: Any) -> str:
    """A value as one types it behind ``KEY=``."""
    if value == "???":
        return "..."
    return redact(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _defaults(schema: type) -> dict[str, Any]:
    """Of a part that is null: what its keys begin with once an option of its group is chosen."""
    return {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(schema)
    }
