"""Single images of a set, for a look at them; training has faster readers."""

from __future__ import annotations

import io

from PIL import Image, UnidentifiedImageError

from dmjd.data.decode import FORMATS
from dmjd.data.shards.checksum import crc32
from dmjd.data.shards.index import ShardSet
from dmjd.data.shards.location import is_remote
from dmjd.data.shards.network import PATIENCE, read_range
from dmjd.errors import BadImage
from dmjd.files import open_regular


def image_bytes(shards: ShardSet, index: int) -> bytes:
    """The file of sample ``index``.

    Raises:
        BadImage: if its tar is missing, cannot be read, or holds other bytes.
        DataError: if its tar lies behind a URL and every attempt to read it failed.
    """
    record = shards.records[index]
    location, start, size = shards.location(int(record["shard"])), int(record["offset"]), int(record["size"])
    try:
        if is_remote(location):
            data = read_range(location, PATIENCE, start, start + size)
        else:
            with open_regular(location) as file:
                file.seek(start)
                data = file.read(size)
    except FileNotFoundError as error:
        raise BadImage(shards.name(index), "missing", "is not there, for its tar is missing") from error
    except OSError as error:
        raise BadImage(shards.name(index), "unreadable", f"cannot be read ({error.strerror or error})") from error
    fault = fault_of(data, size, int(record["crc32"]))
    if fault is not None:
        raise BadImage(shards.name(index), *fault)
    return data


def fault_of(data: bytes, size: int, crc: int) -> tuple[str, str] | None:
    """Kind and fault of ``data``, or None where they are the ``size`` bytes that the index has ``crc`` of."""
    if len(data) < size:
        return "truncated", f"is cut at {len(data)} of {size} bytes, as its tar is"
    if size and crc32(data) == crc:
        return None
    if not any(data):
        return "empty", "has nothing but zeros in its place" if data else "has no bytes"
    try:
        Image.open(io.BytesIO(data), formats=FORMATS).close()
    except UnidentifiedImageError:
        return "magic", f"is no image any more: it begins with {data[:12]!r}"
    except Exception:  # its header is damaged in some other way
        pass
    return "crc", "has another crc32 than the index says"


def evenly(total: int, count: int) -> list[int]:
    """Up to ``count`` indices below ``total``, evenly spaced from the first on."""
    count = min(count, total)
    return [number * total // count for number in range(count)]
