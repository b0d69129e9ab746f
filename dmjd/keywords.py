"""Keyword arguments of the Python interface as overrides of the command line."""

from __future__ import annotations

import numbers
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from dmjd.errors import ConfigError

_PLAIN = re.compile(r"[\w./@+-]+", re.ASCII)


def as_overrides(keys: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """``KEY=VALUE`` of each key: ``{"optim": {"base_lr": 1e-3}}`` and ``{"optim.base_lr": 1e-3}`` are the same.

    Values are numbers, strings, paths, None (``null``), and lists of these; a dict holds the keys of a section.

    Raises:
        ConfigError: for a value of another type.
    """
    for name, value in keys.items():
        if isinstance(value, Mapping):
            yield from as_overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_text(f'{prefix}{name}', value)}"


def of_checkpoint(checkpoint: Any, keys: Mapping[str, Any]) -> list[str]:
    """Overrides of an evaluation of ``checkpoint``. Raises ConfigError if it is None."""
    if checkpoint is None:
        raise ConfigError("checkpoint=None; give a run folder, a checkpoint folder or a file of weights")
    return list(as_overrides({"checkpoint": checkpoint, **keys}))


def _text(key: str, value: Any) -> str:
    """``value`` in Hydra's grammar; strings are quoted unless they are plain words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, (str, os.PathLike)):
        text = str(os.fspath(value))
        if "\0" in text:
            raise ConfigError(f"{key}={text!r} holds a null character, which no name has; remove it")
        return text if _PLAIN.fullmatch(text) else QuotedString(text, Quote.double).with_quotes()
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return f"[{','.join(_text(key, each) for each in value)}]"
    raise ConfigError(f"{key}={value!r} must be a number, a string, a path, a list, a dict or None")
