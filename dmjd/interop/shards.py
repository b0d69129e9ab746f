"""Safetensors files that are written one tensor at a time, whole or in the shards of Hugging Face."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from dmjd.errors import ConfigError
from dmjd.files import drafted
from dmjd.interop.file_content import SAFETENSORS
from dmjd.safe_load import WEIGHT_INDEX

_TYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
"""The types that are written, with their names in a header."""

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def shard_bytes(shard_size: str | None) -> int | None:
    """The bytes of ``shard_size``, such as 5GB (10^9 bytes, as Hugging Face counts) or 500MiB. Raises ConfigError."""
    if shard_size is None:
        return None
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) *([A-Za-z]+)", shard_size.strip())
    unit = None if found is None else _UNITS.get(found[2].upper())
    size = 0 if found is None or unit is None else int(float(found[1]) * unit)
    if size < 1:
        raise ConfigError(f"shard_size={shard_size} is not a size such as 5GB or 500MiB")
    return size


def write_shards(
    path: Path,
    like: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    shard_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write tensors to ``path``, or to several files of at most ``shard_size`` bytes of tensors and an index.

    Memory is that of one tensor. Of ``model.safetensors`` the files are ``model-00001-of-0000N.safetensors`` and
    ``model.safetensors.index.json``, as those of Hugging Face. A larger tensor has a file of its own. Files are
    replaced when all are complete; the index, or the only file, is the last.

    Args:
        like: the tensors by name, float32, bfloat16 or float16, also on "meta".
        read: gives the tensor of a name.
        metadata: header of an only file. Of several it has "format", which Hugging Face requires, beside it.

    Returns:
        The files; the last is to be read.

    Raises:
        OSError: if they cannot be written; earlier ones are kept.
    """
    parts = _divide(like, shard_size)
    index = path.with_name(path.name + WEIGHT_INDEX)
    with ExitStack() as drafts:  # left in reverse order: the index, which is entered first, is replaced last
        if len(parts) == 1:
            files = {path: parts[0]}
        else:
            stem, count = path.name.removesuffix(SAFETENSORS), len(parts)
            names = [f"{stem}-{number:05d}-of-{count:05d}{SAFETENSORS}" for number in range(1, count + 1)]
            files = dict(zip(map(path.with_name, names), parts, strict=True))
            metadata = {"format": "pt", **(metadata or {})}
            drafts.enter_context(drafted(index)).write_text(_index(files, like))
        for file, part in files.items():
            _write(drafts.enter_context(drafted(file)), part, like, read, metadata)
    return [*files, index] if len(parts) > 1 else [path]


def _divide(like: Mapping[str, Tensor], shard_size: int | None) -> list[list[str]]:
    """The names of each file, in the order of the safetensors library: wide types first, then by name."""
    parts, size = [list[str]()], 0
    for name in sorted(like, key=lambda name: (-like[name].itemsize, like[name].dtype != torch.bfloat16, name)):
        if shard_size is not None and parts[-1] and size + like[name].nbytes > shard_size:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += like[name].nbytes
    return parts


def _write(
    file: Path,
    names: Sequence[str],
    like: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None,
) -> None:
    """Write one file, with the bytes that the safetensors library gives it."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        begin, end = end, end + like[name].nbytes
        shape, kind = list(like[name].shape), _TYPES[like[name].dtype]
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            tensor = read(name)
            assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype), name
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next is read


def _index(files: Mapping[Path, Iterable[str]], like: Mapping[str, Tensor]) -> str:
    listed = {name: file.name for file, names in files.items() for name in names}
    total = sum(like[name].nbytes for name in listed)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}
    return json.dumps(content, indent=2) + "\n"
