"""Readers of files and bytes from outside: they run no code, and bound what they take before they allocate it.

Every file that dmjd reads may come from somebody else: run folders, checkpoints, shard sets, weights, records of
collectives. This is the only module that deserialises them (docs/security.md). torch and numpy are imported inside
functions, so that report and doctor may import it.
"""

from __future__ import annotations

import json
from typing import Any

JSON_BYTES = 64 << 20
"""The largest JSON text that is parsed: the manifest of some 300,000 shards."""


def parse_json(content: bytes | str, limit: int = JSON_BYTES) -> Any:
    """The value of a JSON text of at most ``limit`` bytes or characters.

    Raises:
        ValueError: one line, if the text is longer, nested too deeply, not UTF-8, or no JSON.
    """
    if len(content) > limit:
        raise ValueError(f"it has {len(content)} bytes, more than the {limit} that are read")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
