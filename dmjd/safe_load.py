"""Readers of files and bytes from outside: they run no code, and bound what they take before they allocate it.

Every file that dmjd reads may come from somebody else: run folders, checkpoints, shard sets, weights, records of
collectives. This is the only module that deserialises them (docs/security.md). torch and numpy are imported inside
functions, so that report and doctor may import it.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy

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


_NPY = b"\x93NUMPY\x01\x00"
_NPY_HEADER = 4096


def read_npy(file: BinaryIO, dtype: numpy.dtype[Any], *, mapped: bool) -> numpy.ndarray[Any, Any]:
    """The one-dimensional array that ``numpy.save`` wrote, from where ``file`` stands to its end; read-only.

    The header is compared with the one that ``dtype`` has and not evaluated, so no object, order, shape or version of
    another kind is accepted, and its length has to be that of the file before anything is read or mapped.

    Args:
        file: seekable; on a disk if ``mapped``.
        dtype: what the array has to be of.
        mapped: whether pages are read from the disk when they are used.

    Raises:
        ValueError: one line, if the file is anything else.
    """
    import numpy as np

    fixed = file.read(len(_NPY) + 2)
    length = int.from_bytes(fixed[len(_NPY) :], "little")
    if fixed[: len(_NPY)] != _NPY or len(fixed) < len(_NPY) + 2 or length > _NPY_HEADER:
        raise ValueError("it is no .npy file of version 1.0, or has a longer header than one that is read")
    header = file.read(length)
    shape = re.search(rb"'shape': \((\d{1,15}),\)", header)
    count = int(shape[1]) if shape else -1
    descr = np.lib.format.dtype_to_descr(dtype)
    if header.split() != f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': ({count},), }}".encode().split():
        raise ValueError(f"it is no one-dimensional array of {descr}")
    offset = file.tell()
    held = file.seek(0, os.SEEK_END) - offset
    if held != count * dtype.itemsize:
        raise ValueError(f"it has {held} bytes for {count} items of {dtype.itemsize}")
    file.seek(offset)
    if mapped and count:
        return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,))
    return np.frombuffer(file.read(held), dtype=dtype)
