"""The text of a command-line argument as the value of a configuration field, read by the field's type."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args

from dmjd.config.fields import allowed, is_fraction
from dmjd.errors import ConfigError
from dmjd.redact import redact

NULLS = ("null", "none")
"""Lower case; ``~`` is a home folder here."""

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NAMES = {int: ("an integer", "integers"), float: ("a number", "numbers"), str: ("a text", "texts")}
_ITEM = re.compile(r"""\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\s*(?=,|$)|[^,]+""")
"""An item of a list of texts; commas inside quotes are part of it."""
_MINUS = str.maketrans("\u2212\u2013", "--")
"""Minus sign and en dash, as copied from papers and web pages."""


def parse(key: str, text: str, annotation: Any, metadata: Mapping[str, Any]) -> Any:
    """The value of ``KEY=TEXT``.

    Strings and paths are taken verbatim. Quotes around a whole value are removed. null and none are None where the type
    allows it. Booleans: true, yes, on, 1 and their opposites. Integers may be written as 1e2 or 64.0. Lists are numbers
    or texts separated by commas, in brackets or without; one integer stands for a square (height and width).

    Raises:
        ConfigError: if the text does not fit the type. Bounds are checked by :func:`~dmjd.config.fields.check_fields`.
    """
    optional = NoneType in get_args(annotation)
    (kind,) = [one for one in get_args(annotation) if one is not NoneType] if optional else [annotation]
    bare = unquoted(text)
    if kind is str:
        return _string(key, bare, text, optional, metadata)
    plain = bare.strip()
    if optional and plain.lower() in NULLS:
        return None
    or_null = " or null" if optional else ""
    if kind is bool:
        if plain.lower() not in _BOOLEANS:
            raise ConfigError(f"{key} must be true or false, got {redact(text)!r}")
        return _BOOLEANS[plain.lower()]
    (one,) = get_args(kind) or (None,)
    if one is not None:
        return _list(key, plain, text, one, metadata)
    value = _number(plain, kind)
    if value is None:
        limits = " ".join(filter(None, (_NAMES[kind][0], allowed(metadata))))
        raise ConfigError(f"{key} must be {limits}{or_null}, got {redact(text)!r}{_cure(plain, kind, metadata)}")
    return value


def unquoted(text: str) -> str:
    """``text`` without a pair of quotes around the whole of it."""
    for quote in "'\"":
        inner = re.fullmatch(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", text, re.DOTALL)
        if inner:
            return inner[1].replace(f"\\{quote}", quote)
    return text


def quoted(text: str) -> str:
    """``text`` in quotes, as an item of a list, which may hold commas."""
    return '"' + text.replace('"', '\\"') + '"'


def _string(key: str, bare: str, text: str, optional: bool, metadata: Mapping[str, Any]) -> str | None:
    is_null = bare == text and bare.lower() in NULLS
    if is_null and optional:
        return None
    if is_null and "none" in metadata.get("choices", ()):
        return "none"
    if bare == text == "null":
        raise ConfigError(f"{key} cannot be null; {key}=\"'null'\" sets the text null")
    return bare


def _number(plain: str, kind: type) -> int | float | None:
    """None if ``plain`` is no number, or no integer where ``kind`` is int."""
    plain = plain.translate(_MINUS)
    try:
        return kind(plain)
    except ValueError:
        pass
    try:
        value = float(plain)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def _list(key: str, plain: str, text: str, one: type, metadata: Mapping[str, Any]) -> list[Any]:
    brackets = re.fullmatch(r"\[(.*)\]|\((.*)\)", plain, re.DOTALL)
    inner = (plain if brackets is None else brackets[1] or brackets[2] or "").strip()
    if one is str:
        return [unquoted(part.strip()) for part in _ITEM.findall(inner)]
    separator = {int: r"\s*[,;x×]\s*|\s+", float: r"\s*[,;]\s*|\s+"}[one]
    parts = re.split(separator, inner) if inner else []
    length = metadata.get("length")
    values = [_number(unquoted(part), one) for part in parts]
    if "square" in metadata and len(values) == 1:
        values *= 2
    if None in values or (length is not None and len(values) != length):
        count = f"{length} " if length else ""
        limits = " ".join(filter(None, (f"a list of {count}{_NAMES[one][1]}", allowed(metadata))))
        example = ",".join("ABCD"[: length or 2])
        wrong = next((part for part, value in zip(parts, values, strict=False) if value is None), "")
        cure = _cure(wrong, one, metadata) or f"; write {key}=[{example}]"
        raise ConfigError(f"{key} must be {limits}, got {redact(text)!r}{cure}")
    return values


def _cure(plain: str, kind: type, metadata: Mapping[str, Any]) -> str:
    """The end of an error about a value that is no number: how to write what was meant."""
    plain = plain.translate(_MINUS)
    percent = _number(plain[:-1].strip(), float) if plain.endswith("%") else None
    if percent is not None:
        return f"; write {percent / 100 if is_fraction(metadata) else percent:g}"
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", plain) and kind is int:
        return f"; write {plain.replace(',', '')}"
    if re.fullmatch(r"[+-]?\d*,\d+", plain) and kind is float:
        return f"; write {plain.replace(',', '.')}"
    if "," in plain:
        return "; it takes one value, start one run per value"
    return ""
