"""``classes.json`` in a checkpoint of a fine-tuning: the names of the classes, in the order of the logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dmjd.errors import CheckpointError
from dmjd.files import read_file
from dmjd.safe_load import parse_json

CLASSES = "classes.json"


def pack_classes(names: Sequence[str]) -> bytes:
    """The content of ``classes.json``: a list of names."""
    return json.dumps(list(names), indent=1).encode()


def read_classes(checkpoint: Path) -> list[str]:
    """The names in a checkpoint folder; empty for other weights. Raises CheckpointError if they cannot be read."""
    file = checkpoint / CLASSES
    if not file.is_file():
        return []
    try:
        names = parse_json(read_file(file))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it is no list of names")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return names
