"""Content of a file of weights: .safetensors, torch's .pth, or the index of several files. No code in it is run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.files import read_file
from dmjd.interop.names import summary
from dmjd.safe_load import WEIGHT_INDEX, load_torch, one_line, parse_weight_index

SAFETENSORS = ".safetensors"

_MOST_HEADER = 100_000_000
"""Bytes of a header that the safetensors library reads."""

_ZIP, _PICKLE = b"PK", b"\x80\x02"
"""First bytes of torch's files, since version 1.6 and before."""


def read_content(path: Path) -> Any:
    """The content of a file, on the CPU; of the index of several files the tensors of all.

    Raises:
        CheckpointError: if it cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        return _parts(path) if path.name.endswith(WEIGHT_INDEX) else _content(path)
    except (OSError, ValueError, SafetensorError) as error:
        fault = one_line(error)
        cure = next((cure for part, cure in _CURES.items() if part in fault), "")
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {fault}{cure}") from error


def is_safetensors(path: Path) -> bool:
    """Whether the file is .safetensors, by its first bytes, else by its suffix; not an index of several."""
    with path.open("rb") as file:
        start = file.read(9)
    return _has_header(start) or (path.suffix == SAFETENSORS and start[:2] not in (_ZIP, _PICKLE))


def _has_header(start: bytes) -> bool:
    """Whether a file that begins with ``start`` has the header of .safetensors: a size and a JSON object."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= _MOST_HEADER


def _content(path: Path) -> Any:
    _check_start(path)
    return load_file(path) if is_safetensors(path) else load_torch(path, None, _inert)


def _parts(path: Path) -> dict[str, Tensor]:
    """The tensors of all files that the index ``path`` of Hugging Face lists, which lie beside it."""
    listed = parse_weight_index(read_file(path))
    found: dict[str, Tensor] = {}
    for name in sorted(set(listed.values())):
        if not (path.parent / name).is_file():
            raise ValueError(f"its part {name!r} is not a file beside it; download the whole folder")
        content = _content(path.parent / name)
        if not isinstance(content, Mapping):
            raise ValueError(f"its part {name!r} holds a {type(content).__name__}, not weights by name")
        found |= {key: value for key, value in content.items() if listed.get(key) == name}
    if absent := listed.keys() - found.keys():
        raise ValueError(f"its parts lack {summary(absent)}; download the whole folder again")
    return found


_CURES = {
    "it is cut off": "; download or copy it again",
    "it is damaged": "; download or copy it again",
    "torch.save did not write it": "; name a .safetensors file or one of torch.save",
    "header": "; it is cut off or no .safetensors file: download or copy it again",
    "incomplete": "; it is cut off: download or copy it again",
    "unexpected EOF": "; download or copy it again",
    "Expecting value": "; it is cut off or no JSON: download or copy it again",
    "Unsupported operand": "; save the state_dict() with torch.save without pickle_protocol",
}
"""Parts of the messages of readers -> what to do."""
_STARTS = {
    b"version https://git-lfs.github.com/spec/": "it is a Git LFS pointer; fetch the weights with git lfs pull",
    b"\x1f\x8b": "it is compressed with gzip; unpack it",
    b"BZh": "it is compressed with bzip2; unpack it",
    b"\xfd7zXZ": "it is compressed with xz; unpack it",
    b"(\xb5/\xfd": "it is compressed with zstd; unpack it",
    b"7z\xbc\xaf": "it is a 7z archive; unpack it",
    b"Rar!": "it is a RAR archive; unpack it",
    b"\x89HDF": "it is an HDF5 file of Keras; convert it with its own code to .safetensors",
    b"GGUF": "it is a GGUF file; convert it with its own code to .safetensors",
    b"\x93NUMPY": "it is an array of numpy; save named tensors as .safetensors",
}
"""First bytes of other files -> the fault and its cure."""
_TAR = 257
"""Offset of a tar's magic number."""


def _check_start(path: Path) -> None:
    """Raise ValueError if the first bytes are those of a file that holds no tensors."""
    with path.open("rb") as file:
        start = file.read(512)
    if not start:
        raise ValueError("it is empty; download or copy it again")
    if _has_header(start):
        return
    for magic, fault in _STARTS.items():
        if start.startswith(magic):
            raise ValueError(fault)
    if start[_TAR : _TAR + 5] == b"ustar":
        raise ValueError("it is a tar archive; unpack it")
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<script")):
        raise ValueError("it is a web page, as of a failed download; download the file itself")
    if text.startswith((b"{", b"[")):
        raise ValueError("it is JSON text, as of a failed download or a configuration; name the file of weights")


class _Discarded(dict[str, Any]):
    """Attributes of a stand-in object, which are discarded: pickle sets them from a dict or a tuple of any length."""

    def update(self, *state: Any, **attributes: Any) -> None:
        pass


def _inert(name: str) -> type:
    """A new class in place of the class ``name``: torch needs a distinct one for each."""
    return type("Inert", (_Inert,), {})


class _Inert:
    """Stand-in for any class in a file: training files hold argparse or yacs options, numpy scalars and the like.

    Construction gives an empty OrderedDict, the one type that torch fills like a dict and like an object.
    """

    def __new__(cls, *arguments: Any) -> Any:
        stand_in: OrderedDict[Any, Any] = OrderedDict()
        stand_in.__dict__ = _Discarded()
        return stand_in
