"""Checks of the file or folder that a command writes, before it does any work."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from dmjd.errors import ConfigError
from dmjd.files import printable


def check_output(path: Path, suffixes: Collection[str], source: Path) -> None:
    """Raise ConfigError unless ``output=path`` can be written.

    Args:
        suffixes: allowed ones of a file; empty for a folder, which may exist.
        source: the file or folder that is read, which must not be replaced.
    """
    if suffixes and path.suffix not in suffixes:
        allowed = f"one of {', '.join(suffixes)}" if len(suffixes) > 1 else next(iter(suffixes))
        raise ConfigError(f"output={path} must end in {allowed}, which sets the format")
    if not path.parent.is_dir():
        raise ConfigError(f"output={path}: {path.parent} is not a folder; create it, or set another")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"output={path}: {path.parent} is not writable; set another folder")
    if suffixes and path.is_dir():
        raise ConfigError(f"output={path} is a folder; set a file")
    if not suffixes and path.exists() and not path.is_dir():
        raise ConfigError(f"output={path} is a file; set a folder")
    if path.exists() and source.exists() and path.samefile(source):
        raise ConfigError(f"output={path} is the input, which would be overwritten; set another file")
    if printable(str(path)) != str(path):
        raise ConfigError(f"output={printable(str(path))} is not UTF-8, and safetensors takes no other names")
