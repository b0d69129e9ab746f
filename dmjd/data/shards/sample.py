"""Single images of a set, for a look at them; training has faster readers."""

from __future__ import annotations

from dmjd.data.shards.index import ShardSet
from dmjd.data.shards.location import is_remote
from dmjd.data.shards.network import PATIENCE, read
from dmjd.errors import BadImage


def image_bytes(shards: ShardSet, index: int) -> bytes:
    """The file of sample ``index``.

    Raises:
        BadImage: if its tar is missing, or cannot be read.
        DataError: if its tar lies behind a URL and every attempt to read it failed.
    """
    record = shards.records[index]
    location, start, size = shards.location(int(record["shard"])), int(record["offset"]), int(record["size"])
    try:
        if is_remote(location):
            return read(location, PATIENCE, start, start + size)
        with open(location, "rb") as file:
            file.seek(start)
            return file.read(size)
    except FileNotFoundError as error:
        raise BadImage(shards.name(index), "missing", "is not there, for its tar is missing") from error
    except OSError as error:
        raise BadImage(shards.name(index), "unreadable", f"cannot be read ({error.strerror or error})") from error


def evenly(total: int, count: int) -> list[int]:
    """Up to ``count`` indices below ``total``, evenly spaced from the first on."""
    count = min(count, total)
    return [number * total // count for number in range(count)]
