"""The registry of commands for trained encoders: one record each. The command line and ``--help`` read it; it imports
no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dmjd.config import SCHEMAS


@dataclass(frozen=True)
class Tool:
    """A command for a trained encoder or its embeddings: ``dmjd NAME RUN``.

    name: the command; configs/NAME.yaml has the defaults of its configuration.
    summary: its line in ``dmjd --help``.
    config: a dataclass, whose field ``checkpoint``, ``checkpoints`` or ``embeddings`` is the key of the first argument.
    run: does the work and returns the lines to print; its module imports torch and the like inside this function.
    """

    name: str
    summary: str
    config: type
    run: Callable[[Any], Iterable[str]]


TOOLS: dict[str, Tool] = {}
"""Name -> command, in the order of the usage page."""


def register(tool: Tool) -> None:
    """Add a command with help and configuration."""
    TOOLS[tool.name] = tool
    SCHEMAS[tool.name] = tool.config
