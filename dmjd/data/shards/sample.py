"""Read and verify single images of a shard set. Training uses :mod:`dmjd.data.shards.dataset`, which is faster."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import UnidentifiedImageError

from dmjd.data.decode import identify
from dmjd.data.shards.index import ShardSet
from dmjd.data.shards.location import is_remote
from dmjd.data.shards.network import PATIENCE, read_range
from dmjd.errors import BadImage
from dmjd.files import open_regular

try:  # ISA-L's crc32 of 110 kB takes 2 us, zlib's 27 us: three times as long as reading them from the page cache
    from isal.isal_zlib import crc32 as crc32
except ImportError:  # no wheel for this processor, or installed without it
    from zlib import crc32 as crc32


def image_bytes(shards: ShardSet, index: int) -> bytes:
    """The file of sample ``index``.

    Raises:
        BadImage: if its tar is missing, cannot be read, or has other bytes.
        DataError: if its tar is remote and every attempt to read it failed.
    """
    record = shards.records[index]
    location, start, size = shards.location(int(record["shard"])), int(record["offset"]), int(record["size"])
    with read_errors(shards.name(index)):
        if is_remote(location):
            data = read_range(location, PATIENCE, start, start + size)
        else:
            with open_regular(location) as file:
                file.seek(start)
                data = file.read(size)
    fault = fault_of(data, size, int(record["crc32"]))
    if fault is not None:
        raise BadImage(shards.name(index), *fault)
    return data


@contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Turn any OSError of the block into BadImage of the image ``name``."""
    try:
        yield
    except FileNotFoundError as error:
        raise BadImage(name, "missing", "cannot be read, since its file is missing") from error
    except OSError as error:
        raise BadImage(name, "unreadable", f"cannot be read ({error.strerror or error})") from error


def fault_of(data: bytes, size: int, crc: int) -> tuple[str, str] | None:
    """Kind and description of the fault of ``data``; None for ``size`` bytes with the checksum ``crc``."""
    if len(data) < size:
        return "truncated", f"has {len(data)} of {size} bytes, since its tar is truncated"
    if size and crc32(data) == crc:
        return None
    if not any(data):
        return "empty", "has only zero bytes" if data else "has no bytes"
    try:
        identify(io.BytesIO(data), "").close()
    except UnidentifiedImageError:
        return "magic", f"is not an image: it begins with {data[:12]!r}"
    except Exception:  # other damage of the header
        pass
    return "crc", "has another crc32 than in the index"
