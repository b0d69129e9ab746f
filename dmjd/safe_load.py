"""Readers of files and bytes from outside: they run no code, and bound what they take before they allocate it.

Every file that dmjd reads may come from somebody else: run folders, checkpoints, shard sets, weights, records of
collectives. This is the only module that deserialises them (docs/security.md). torch and numpy are imported inside
functions, so that report and doctor may import it.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, ClassVar

if TYPE_CHECKING:
    import numpy

JSON_BYTES = 64 << 20
"""The largest JSON text that is parsed: the manifest of some 300,000 shards."""

_YAML_LENGTH, _YAML_DEPTH = 4 << 20, 64

_ADVICE = re.compile(r"^(Weights only|Please file|Check the doc)|weights_only|\(\d\)")
"""Lines of torch's errors that say how to load the file all the same."""


_HALF = re.compile(r"\\[uU](?:0000)?[dD][89a-fA-F]")
"""An escaped half of a character, in JSON and in YAML."""
_IS_HALF = "it has half a character (\\ud800 to \\udfff), which no text can be written with"


def parse_json(content: bytes | str, limit: int = JSON_BYTES) -> Any:
    """The value of a JSON text of at most ``limit`` bytes or characters.

    Raises:
        ValueError: one line, if the text is longer, nested too deeply, not Unicode, or no JSON, or if an object has a
            key twice, of which readers take one or the other.
    """
    if len(content) > limit:
        raise ValueError(f"it has {len(content)} bytes, more than the {limit} that are read")
    try:
        text = content if isinstance(content, str) else content.decode(json.detect_encoding(content))
        value = json.loads(text, object_pairs_hook=_object)
        if _HALF.search(text):
            # \udc80 to \udcff stand for the bytes of a file's name that is not UTF-8.
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(_IS_HALF) from error
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a key twice")
    return values


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, made of mappings, lists, text, numbers and dates.

    Aliases are rejected: a few lines of them stand for billions of values once they are copied.

    Raises:
        ValueError: one line, if the text is longer than 4 MiB, nested deeper than 64 levels, or no such YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias (*name), which is not read")
            self.depth += 1
            if self.depth > _YAML_DEPTH:
                raise ValueError(f"it is nested deeper than {_YAML_DEPTH} levels")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            made = super().construct_mapping(node, deep)
            if len(made) < len(node.value):
                raise ValueError("it gives a key twice")
            return made

    if len(text) > _YAML_LENGTH:
        raise ValueError(f"it has {len(text)} characters, more than the {_YAML_LENGTH} that are read")
    if _HALF.search(text):
        raise ValueError(_IS_HALF)
    try:
        loader = Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    # Beside its own errors, numbers and dates raise ValueError, keys TypeError, and long flows RecursionError.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """The line of an error that says what is wrong.

    torch's errors begin with advice to load a file without weights_only, which runs the code in it: never repeated.
    """
    if isinstance(error, LookupError | TypeError | AttributeError | AssertionError):  # of bytes that mean nothing
        return "it is damaged"
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    lines = (" ".join(line.split()) for line in text.splitlines())
    telling = (line for line in lines if line and not _ADVICE.search(line))
    said = next(telling, "it is damaged" if str(error).strip() else "it is cut off")
    return re.sub(r"(was not an allowed global)\b.*", r"\1", said)


# numpy's files -------------------------------------------------------------------------------------------------------


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


# torch's files -------------------------------------------------------------------------------------------------------


def load_torch(
    file: Path | IO[bytes],
    allowed: Collection[str] | None,
    stand_in: Callable[[str], Any] | None = None,
    *,
    mapped: bool = False,
) -> Any:
    """What ``torch.save`` wrote, on the CPU, in any of its formats but the tar of 2016.

    Args:
        file: a path, or an open file at its start.
        allowed: classes and functions that the file may name, such as :data:`TENSORS`; None for all that torch allows.
        stand_in: makes what takes the place of any other class from its name. None rejects a file that names one.
        mapped: leave the tensors of a file at a path on the disk until they are used.

    Raises:
        ValueError: one line, if it cannot be read so, or holds more than its size.
    """
    import torch

    try:
        with file.open("rb") if isinstance(file, Path) else nullcontext(file) as stream:
            others = sorted(_names(stream).difference(_allowed(allowed)))
            if others and stand_in is None:
                raise ValueError(f"it names {others[0]}, which is neither a tensor nor a container of them")
            stand_ins: list[Any] = [(stand_in(name), name) for name in others] if stand_in is not None else []
            stream.seek(0)
            with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of kinds of tensors that are rejected later
                # Of a path, torch goes by its suffix too.
                source = os.fspath(file) if mapped and isinstance(file, Path) else stream
                return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise ValueError(error.strerror or one_line(error)) from error
    except Exception as error:  # bytes that are no pickle do what they happen to mean, and fail as that fails
        raise ValueError(one_line(error)) from error


def check_torch(file: IO[bytes], allowed: Collection[str] | None) -> None:
    """Leave ``file`` at its start if :func:`load_torch` would read it. Raises ValueError if it would not."""
    others = sorted(_names(file).difference(_allowed(allowed)))
    if others:
        raise ValueError(f"it names {others[0]}, which is neither a tensor nor a container of them")
    file.seek(0)


TENSORS = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch.storage.UntypedStorage",
        *(
            f"torch.{kind}Storage"
            for kind in (
                "Double",
                "Float",
                "Half",
                "BFloat16",
                "Long",
                "Int",
                "Short",
                "Char",
                "Byte",
                "Bool",
                "Untyped",
            )
        ),
        *(
            f"torch.{name}"
            for name in (
                "float64",
                "float32",
                "float16",
                "bfloat16",
                "int64",
                "int32",
                "int16",
                "int8",
                "uint8",
                "bool",
            )
        ),
    }
)
"""The names in files of tensors, numbers, text and containers: all that our own files hold."""

_CONTAINERS = {b"PK": "zip", b"\x80\x02": "pickles"}


def _allowed(allowed: Collection[str] | None) -> Collection[str]:
    if allowed is not None:
        return allowed
    from torch import _weights_only_unpickler as torchs

    return torchs._get_allowed_globals().keys()


def _names(file: IO[bytes]) -> set[str]:
    """``module.name`` of every class and function that a file of torch's names. Checks sizes on the way.

    Raises:
        ValueError: if torch.save did not write it.
    """
    kind = _CONTAINERS.get(file.read(2))
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if kind == "zip":
        if not zipfile.is_zipfile(file):
            raise ValueError("it is cut off")
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            parts = [entry.filename.rpartition("/")[2] for entry in entries]
            if "constants.pkl" in parts:
                raise ValueError("it is a TorchScript archive; torch.save the state_dict() of what it holds")
            if parts.count("data.pkl") != 1 or len({entry.filename for entry in entries}) != len(entries):
                raise ValueError("torch.save did not write it")
            if sum(entry.file_size for entry in entries) > size:  # torch.save does not compress
                raise ValueError(f"it has {size} bytes and says that it holds more")
            found = _names_in_pickle(io.BytesIO(archive.read(entries[parts.index("data.pkl")])))
    elif kind == "pickles":  # before torch 1.6: a magic number, a version and the system's, and then the content
        found = {name for _ in range(4) for name in _names_in_pickle(file)}
    else:
        raise ValueError("torch.save did not write it" if size else "it is cut off")
    if "builtins.bytearray" in found:  # which torch allows; its argument is a size, allocated and filled at once
        raise ValueError("it names builtins.bytearray, which is not read")
    return found


def _names_in_pickle(stream: IO[bytes]) -> set[str]:
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    found = set()
    for opcode, argument, _ in _opcodes(stream):
        if opcode.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
            found.add(f"{module}.{name}")
        elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            raise ValueError("torch.save did not write it")
    return found


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    try:
        yield from pickletools.genops(stream)
    except (ValueError, IndexError) as error:
        raise ValueError("it is damaged") from error


@contextmanager
def weights_only_forced(classes: Sequence[type] = ()) -> Iterator[None]:
    """Within it, ``torch.load`` of any code reads tensors and ``classes`` alone, whatever that code asks for.

    Processes that start within it load so as well; of those that are not forked, ``classes`` are then rejected.
    """
    import torch

    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(list(classes)):
            yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


# Pickles of others ----------------------------------------------------------------------------------------------------


class _Plain(pickle._Unpickler):
    """Of a pickle, numbers, text and containers, and records of the classes in ``allowed``, of which none is made.

    Python's own implementation, for that in C allocates a table as long as a number in the file says. Keys are text,
    numbers or records: a tuple of tuples of tuples takes for ever to hash.
    """

    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {}
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module, name]
        except KeyError:
            raise ValueError(f"it names {module}.{name}, which has no place in it") from None

    def persistent_load(self, identity: Any) -> Any:
        raise ValueError("it refers to something outside of it")

    def get_extension(self, code: int) -> Any:
        raise ValueError("it names an extension, which has no place in it")

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._fill(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def _fill(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or not all(isinstance(key, _KEYS) for key in items[::2]):
            raise ValueError("it is damaged")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _reject(self) -> None:
        raise ValueError("it is damaged")

    dispatch[pickle.SETITEMS[0]] = _set_items
    dispatch[pickle.SETITEM[0]] = _set_item
    for _opcode in (pickle.ADDITEMS, pickle.FROZENSET, pickle.DICT, pickle.INST, pickle.OBJ, pickle.BYTEARRAY8):
        dispatch[_opcode[0]] = _reject


class _Record:
    """Stands for an object of a class that a pickle names, with what the pickle says of it."""

    kind = ""

    def __new__(cls, *arguments: Any) -> _Record:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


_KEYS = (str, int, _Record)


def unpickle_plain(content: bytes) -> Any:
    """The value of a pickle of numbers, text and containers alone, such as a record of collectives.

    Raises:
        ValueError: one line, if it names any class or function, or is damaged.
    """
    return _unpickled(_Plain, content)


def _unpickled(reader: type[_Plain], content: bytes) -> Any:
    try:
        return reader(io.BytesIO(content)).load()
    except Exception as error:  # of damaged bytes a pickle makes errors of any kind
        raise ValueError(one_line(error)) from error


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where it begins and its shape, and the ``length`` bytes of ``file`` from ``start`` on."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint in shards."""

    dtype: Any
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def parse_shard_index(content: bytes) -> dict[str, SavedTensor]:
    """What a ``.metadata`` of torch.distributed.checkpoint says of each tensor.

    It is a pickle. The names in :data:`_SHARD_INDEX`, the types of tensors and the class of paths are all that honest
    ones name (measured on torch 2.11 and 2.14), and none of these classes is made.

    Raises:
        ValueError: one line, if it names anything else, or a type, a range or a number in it cannot be.
    """
    top = _unpickled(_ShardIndex, content)
    try:
        fields = _state(top, "Metadata")
        places: dict[Any, tuple[str, int, int]] = {}
        for index, place in fields["storage_data"].items():
            at, where = _state(index, "MetadataIndex"), _state(place, "_StorageInfo")
            if where.get("transform_descriptors"):
                raise ValueError("its tensors are compressed, which is not read")
            key = _text(at["fqn"]), at.get("offset") and _sizes(at["offset"])
            start, length = _sizes((where["offset"], where["length"]))
            places[key] = _text(where["relative_path"]), start, length
        return {_text(name): _saved(name, item, places) for name, item in fields["state_dict_metadata"].items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("it is damaged") from error


def _saved(name: str, item: Any, places: Mapping[Any, tuple[str, int, int]]) -> SavedTensor:
    import torch

    fields = _state(item, "TensorStorageMetadata")
    dtype, shape = _state(fields["properties"], "TensorProperties")[0], _sizes(fields["size"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no type")
    chunks = []
    for part in fields["chunks"]:
        said = _state(part, "ChunkStorageMetadata")
        offsets, sizes = _sizes(said["offsets"]), _sizes(said["sizes"])
        if math.prod(sizes):
            place = places.get((name, offsets)) or places[name, None]
            chunks.append(Chunk(offsets, sizes, *place))
    if not _tile(shape, chunks):
        raise ValueError(f"the chunks of {name} are not slices that make {list(shape)}")
    return SavedTensor(dtype, shape, tuple(chunks))


def _tile(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks, cut along one axis as engines cut, are the whole tensor, each element once."""
    axes = {
        axis
        for chunk in chunks
        if len(chunk.shape) == len(chunk.offsets) == len(shape)
        for axis, size in enumerate(shape)
        if chunk.shape[axis] != size or chunk.offsets[axis]
    }
    if any(len(chunk.shape) != len(shape) or len(chunk.offsets) != len(shape) for chunk in chunks) or len(axes) > 1:
        return False
    if not axes:
        return len(chunks) == (math.prod(shape) > 0)
    (axis,), end = axes, 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        if chunk.offsets[axis] != end:
            return False
        end += chunk.shape[axis]
    return end == shape[axis]


def _state(record: Any, kind: str) -> Any:
    if not isinstance(record, _Record) or record.kind != kind:
        raise TypeError
    return record.state


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError("a size or an offset in it cannot be")
    return values


_DCP = "torch.distributed.checkpoint"
_SHARD_INDEX: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    **{
        (module, name): type(name, (_Record,), {"kind": name})
        for module, names in {
            f"{_DCP}.metadata": (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            ),
            f"{_DCP}.filesystem": ("_StorageInfo",),
            "torch.serialization": ("_get_layout",),
            "pathlib": ("PosixPath",),
            "pathlib._local": ("PosixPath",),  # Python 3.13
        }.items()
        for name in names
    },
}


class _ShardIndex(_Plain):
    allowed = _SHARD_INDEX

    def find_class(self, module: str, name: str) -> Any:
        import torch

        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        return dtype if isinstance(dtype, torch.dtype) else super().find_class(module, name)
