"""Single images of a set, for a look at them; training has faster readers."""

from __future__ import annotations

from dmjd.data.shards.index import ShardSet
from dmjd.data.shards.location import open_binary
from dmjd.errors import BadImage


def image_bytes(shards: ShardSet, index: int) -> bytes:
    """The file of sample ``index``.

    Raises:
        BadImage: if its tar is missing, or cannot be read.
    """
    record = shards.records[index]
    try:
        with open_binary(shards.location(int(record["shard"]))) as file:
            file.seek(int(record["offset"]))
            return file.read(int(record["size"]))
    except FileNotFoundError as error:
        raise BadImage(shards.name(index), "missing", "is not there, for its tar is missing") from error
    except OSError as error:
        raise BadImage(shards.name(index), "unreadable", f"cannot be read ({error.strerror or error})") from error


def evenly(total: int, count: int) -> list[int]:
    """Up to ``count`` indices below ``total``, evenly spaced from the first on."""
    count = min(count, total)
    return [number * total // count for number in range(count)]
