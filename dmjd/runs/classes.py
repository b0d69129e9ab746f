"""``classes.json`` in a checkpoint of a fine-tuning, segmentation or detection: the names of the classes, in the order
of the logits. ``category_ids.json`` in one of a detection: their COCO category ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dmjd.errors import CheckpointError
from dmjd.files import read_file
from dmjd.safe_load import parse_json

CLASSES = "classes.json"
CATEGORY_IDS = "category_ids.json"


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
            raise ValueError("it is not a list of names")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return names


def pack_category_ids(ids: Sequence[int]) -> bytes:
    """The content of ``category_ids.json``: a list of numbers."""
    return json.dumps(list(ids)).encode()


def read_category_ids(checkpoint: Path) -> list[int]:
    """The category ids in a checkpoint folder, as many as classes; empty if it has none. Raises CheckpointError if they
    cannot be read."""
    file = checkpoint / CATEGORY_IDS
    if not file.is_file():
        return []
    try:
        ids = parse_json(read_file(file))
        if not isinstance(ids, list) or not all(type(each) is int for each in ids) or len({*ids}) != len(ids):
            raise ValueError("it is not a list of different numbers")
        if len(ids) != len(read_classes(checkpoint)):
            raise ValueError(f"it has {len(ids)} numbers for {len(read_classes(checkpoint))} classes")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return ids
