"""Readers of untrusted files and bytes: they run no code, and check sizes before they allocate memory.

Every file that dmjd reads may come from somebody else: run folders, checkpoints, shard sets, weights, flight records.
This is the only module that deserialises them (docs/security.md). torch and numpy are imported inside functions, so
that report and doctor may import it. Errors continue a line that begins with the name of the file.
"""

from __future__ import annotations

import codecs
import io
import itertools
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

_DIGITS = 1_000

_JSON_PIECE = 4 << 20
_SPACE = re.compile(r"[ \t\n\r]*")

_YAML_LENGTH, _YAML_DEPTH = 4 << 20, 64

_ADVICE = re.compile(r"^(Weights only|Please file|Check the doc)|weights_only|\(\d\)")
"""Lines of torch's errors that recommend to load the file unsafely."""

_HALF = re.compile(r"\\[uU](?:0000)?[dD][89a-fA-F]")
"""An escaped surrogate in JSON and YAML."""
_IS_HALF = "it has half a character (\\ud800 to \\udfff), which cannot be encoded"


def parse_json(content: bytes | str, limit: int = JSON_BYTES) -> Any:
    """The value of a JSON text of at most ``limit`` bytes or characters.

    Raises:
        ValueError: one line, if the text is longer, nested too deeply, not Unicode or not JSON, or if an object has a
            duplicate key.
    """
    if len(content) > limit:
        raise ValueError(f"it has {len(content)} bytes, more than the limit of {limit}")
    try:
        text = content if isinstance(content, str) else content.decode(json.detect_encoding(content))
        value = json.loads(text, object_pairs_hook=_object, parse_int=_integer)
        if _HALF.search(text):
            # \udc80 to \udcff are bytes of file names that are not UTF-8.
            json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(_IS_HALF) from error
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"it has a number of {len(text)} digits, more than the limit of {_DIGITS}")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a key twice")
    return values


def json_items(file: BinaryIO, keys: Collection[str], limit: int = JSON_BYTES) -> Iterator[tuple[str, Any]]:
    """Each element of the arrays ``keys`` of a JSON object in UTF-8, as (key, element), in the order of the file.

    The text is read in pieces, so the memory is that of the longest element. Other values are skipped.

    Args:
        file: read from its position to its end.
        keys: keys of the outermost object; each must be there.
        limit: greatest number of characters of an element, and of any other value that is no array.

    Raises:
        ValueError: one line, if the text is not such an object, an element is longer or nested too deeply, an object
            has a duplicate key, or a number is NaN or Infinity.
    """
    text, seen = _JsonText(file, limit), set[str]()
    text.expect("{")
    if not text.skip("}"):
        while True:
            key = text.value()
            if not isinstance(key, str) or key in seen:
                raise text.error("its outermost object has a key twice" if key in seen else "a key is not a string")
            seen.add(key)
            text.expect(":")
            if text.skip("["):
                if not text.skip("]"):
                    while True:
                        item = text.value()
                        if key in keys:
                            yield key, item
                        if text.skip("]"):
                            break
                        text.expect(",")
            elif key in keys:
                raise text.error(f"its {key} is not an array")
            else:
                text.value()
            if text.skip("}"):
                break
            text.expect(",")
    text.expect("")
    missing = next((key for key in keys if key not in seen), None)
    if missing is not None:
        raise ValueError(f"it has no {missing}")


class _JsonText:
    """A JSON text that is read in pieces."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file, self._limit = file, limit
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._before, self._ended = "", 0, 0, False
        self._json = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)

    def value(self) -> Any:
        """Read the value at the position."""
        self._next()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._more():  # a number may go on in the next piece
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > self._limit:
                    raise self.error(f"a value has more than {self._limit} characters, or no end") from error
                if not self._more():
                    raise self.error(error.msg, error.pos) from error
            except RecursionError as error:
                raise self.error("its brackets are nested too deeply") from error

    def skip(self, character: str) -> bool:
        """Read ``character`` if it is the next one, after spaces."""
        if self._next() != character:
            return False
        self._at += 1
        return True

    def expect(self, character: str) -> None:
        """Read ``character``, "" for the end of the text. Raises ValueError for any other."""
        found = self._next()
        if found != character:
            raise self.error(f"it has {found!r} in place of {character!r}" if found else "it ends too early")
        self._at += len(character)

    def error(self, message: str, position: int | None = None) -> ValueError:
        return ValueError(f"{message} (character {self._before + (self._at if position is None else position)})")

    def _next(self) -> str:
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read the next piece, as long as what is left or longer; False at the end of the file."""
        if self._ended:
            return False
        rest = self._text[self._at :]
        piece = self._file.read(max(_JSON_PIECE, len(rest)))
        self._ended = not piece
        try:
            self._text = rest + self._decoder.decode(piece, final=self._ended)
        except UnicodeDecodeError as error:
            raise ValueError("it is not UTF-8") from error
        self._before, self._at = self._before + self._at, 0
        return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"it has the number {name}, which is not JSON")


WEIGHT_INDEX = ".index.json"
"""End of the name of an index of weights in several files, as Hugging Face names it."""


def parse_weight_index(content: bytes) -> dict[str, str]:
    """The ``weight_map`` of an index of Hugging Face: name of a tensor -> name of the file that holds it, which lies
    beside the index.

    Raises:
        ValueError: one line, if it is no such index, or a file is not named by a plain name.
    """
    found = parse_json(content)
    listed = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ValueError("it is not an index of a sharded model, which has a weight_map of names and files")
    for name in listed.values():
        is_plain = isinstance(name, str) and name.isprintable() and Path(name).name == name and "\\" not in name
        if not is_plain or name in ("", ".."):
            raise ValueError(f"its part {str(name)[:80]!r} is not a file beside it; download the whole folder")
    return listed


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, made of mappings, lists, text, numbers and dates.

    Aliases are rejected: a few lines of them expand to billions of values.

    Raises:
        ValueError: one line, if the text is longer than 4 MiB, nested deeper than 64 levels, or other YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has an alias (*name), which is not supported")
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
        raise ValueError(f"it has {len(text)} characters, more than the limit of {_YAML_LENGTH}")
    if _HALF.search(text):
        raise ValueError(_IS_HALF)
    try:
        loader = Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    # Numbers and dates raise ValueError, keys TypeError, deep flows RecursionError.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """The line of an error with the cause, without torch's advice to load the file by its unsafe loader."""
    if isinstance(error, LookupError | TypeError | AttributeError | AssertionError):  # raised by damaged bytes
        return "it is damaged"
    if "persistent_load of storage is allowed" in str(error):  # files from before torch 1.6
        return "it holds a module with its class; save the state_dict() alone"
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    lines = (" ".join(line.split()) for line in text.splitlines())
    telling = (line for line in lines if line and not _ADVICE.search(line))
    cause = next(telling, "it is damaged" if str(error).strip() else "it is cut off")
    return re.sub(r"(was not an allowed global)\b.*", r"\1", cause)


# numpy's files -------------------------------------------------------------------------------------------------------


_NPY = b"\x93NUMPY\x01\x00"
_NPY_HEADER = 4096


def read_npy(file: BinaryIO, dtype: numpy.dtype[Any], *, mapped: bool) -> numpy.ndarray[Any, Any]:
    """Read a one-dimensional array that ``numpy.save`` wrote, from the position of ``file`` to its end; read-only.

    The header is compared with that of ``dtype`` and not evaluated. Its length must agree with the size of the file
    before anything is read or mapped.

    Args:
        file: seekable; on a disk if ``mapped``.
        dtype: required type of the array.
        mapped: map the file into memory instead of reading it.

    Raises:
        ValueError: one line, if the file is anything else.
    """
    import numpy as np

    _, (count,) = _npy_header(file, [dtype], 1)
    offset = file.tell()
    held = file.seek(0, os.SEEK_END) - offset
    if held != count * dtype.itemsize:
        raise ValueError(f"it has {held} bytes for {count} items of {dtype.itemsize}")
    file.seek(offset)
    if mapped and count:
        return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,))
    return np.frombuffer(file.read(held), dtype=dtype)


def _npy_header(
    file: IO[bytes], dtypes: Sequence[numpy.dtype[Any]], dimensions: int
) -> tuple[numpy.dtype[Any], tuple[int, ...]]:
    """Type and shape in the header of an array that ``numpy.save`` wrote. Raises ValueError for other types, another
    number of dimensions and anything else."""
    import numpy as np

    fixed = file.read(len(_NPY) + 2)
    length = int.from_bytes(fixed[len(_NPY) :], "little")
    if fixed[: len(_NPY)] != _NPY or len(fixed) < len(_NPY) + 2 or length > _NPY_HEADER:
        raise ValueError("it is not a .npy file of version 1.0, or its header is too long")
    header = file.read(length)
    numbers = re.search(rb"'shape': \(([\d, ]{1,64})\)", header)
    shape = tuple(map(int, re.findall(rb"\d{1,15}", numbers[1]))) if numbers else ()
    for dtype in dtypes:
        descr = np.lib.format.dtype_to_descr(dtype)
        known = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
        if header.split() == known.encode().split() and len(shape) == dimensions:
            return dtype, shape
    kinds = " or ".join(str(np.lib.format.dtype_to_descr(dtype)) for dtype in dtypes)
    raise ValueError(f"it is not a {'one' if dimensions == 1 else 'two'}-dimensional array of {kinds}")


def read_npz(
    file: BinaryIO, expected: Callable[[str], tuple[Sequence[str], int] | None], only: str | None = None
) -> dict[str, numpy.ndarray[Any, Any]]:
    """Read the arrays of an archive that ``numpy.savez`` wrote, without compression.

    The sizes in the archive and in the arrays' headers must agree with the size of the file before anything is read.

    Args:
        file: seekable.
        expected: allowed types (as ``numpy.dtype`` takes them) and number of dimensions of the array of a name; None
            rejects the name.
        only: read this array alone.

    Raises:
        ValueError: one line, if the file is anything else.
    """
    import numpy as np

    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    found: dict[str, numpy.ndarray[Any, Any]] = {}
    name = ""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len({entry.filename for entry in entries}) != len(entries):
                raise ValueError("it has an array twice")
            if sum(entry.file_size for entry in entries) > size:
                raise ValueError(f"it has {size} bytes and declares more content, or is compressed")
            for entry in entries:
                key = entry.filename.removesuffix(".npy")
                if only is not None and key != only:
                    continue
                name, kinds = ascii(key)[1:-1][:40], expected(key)
                if kinds is None:
                    raise ValueError("it has an array of an unknown name")
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed")
                with archive.open(entry) as stream:
                    dtype, shape = _npy_header(stream, [np.dtype(kind) for kind in kinds[0]], kinds[1])
                    held = entry.file_size - stream.tell()
                    if held != math.prod(shape) * dtype.itemsize:
                        raise ValueError(f"it has {held} bytes for a shape of {list(shape)}")
                    content = np.empty(held, np.uint8)
                    place = 0
                    while piece := stream.read(1 << 20):  # the last one verifies the checksum
                        content[place : place + len(piece)] = np.frombuffer(piece, np.uint8)
                        place += len(piece)
                    if place != held:
                        raise ValueError("it is cut off")
                found[key] = content.view(dtype).reshape(shape)
    except Exception as error:  # damaged bytes raise errors of any type
        raise ValueError(f"{name}: {one_line(error)}" if name else one_line(error)) from error
    return found


# Tables --------------------------------------------------------------------------------------------------------------


def read_parquet(file: BinaryIO) -> Any:
    """Read a table of integers, text, bytes and lists of floating-point numbers of a fixed length, without compression
    and dictionaries, as a pyarrow.Table. Its sizes must agree with the size of the file before anything is read.

    Call it in a process of its own: pyarrow aborts the process for some damaged files.

    Raises:
        ValueError: one line, if the file is anything else.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        with pq.ParquetFile(file) as parsed:
            metadata, declared = parsed.metadata, 0
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            rows = sum(group.num_rows for group in groups)
            if rows != metadata.num_rows or any(group.num_rows < 0 for group in groups):
                raise ValueError("the numbers of its rows do not agree")
            for kind in parsed.schema_arrow:
                if pa.types.is_fixed_size_list(kind.type) and pa.types.is_floating(kind.type.value_type):
                    declared += kind.type.list_size * kind.type.value_type.bit_width // 8
                elif kind.type in (pa.int64(), pa.string(), pa.binary()):
                    declared += 4  # the length of a text
                else:
                    raise ValueError(f"its column {kind.name!r:.40} is of type {kind.type!s:.40}")
            if rows * declared > size:
                raise ValueError(f"it has {size} bytes and declares {rows} rows of {declared} or more")
            for group in groups:
                for number in range(group.num_columns):
                    column = group.column(number)
                    if column.compression != "UNCOMPRESSED" or set(column.encodings) - {"PLAIN", "RLE", "BIT_PACKED"}:
                        raise ValueError(f"its column {column.path_in_schema!r:.40} is compressed")
            return parsed.read(use_threads=False)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # damaged bytes raise errors of any type
        raise ValueError(one_line(error)) from error


# torch's files -------------------------------------------------------------------------------------------------------


def load_torch(
    file: Path | IO[bytes],
    allowed: Collection[str] | None,
    stand_in: Callable[[str], Any] | None = None,
    *,
    mapped: bool = False,
) -> Any:
    """Load a file of ``torch.save`` to the CPU; all formats but the tar of 2016.

    Args:
        file: a path, or an open file at its start.
        allowed: classes and functions that the file may name, such as :data:`TENSORS`; None for all that torch allows.
        stand_in: maps the name of any other class to a replacement. None rejects a file that names one.
        mapped: map the tensors of a file at a path into memory instead of reading them.

    Raises:
        ValueError: one line, if the file cannot be read, or its contents exceed its size.
    """
    import torch

    try:
        with file.open("rb") if isinstance(file, Path) else nullcontext(file) as stream:
            stand_ins: list[Any] = []
            if stand_in is None:
                check_torch(stream, allowed)
            else:
                stand_ins = [(stand_in(name), name) for name in _other_names(stream, allowed)]
            with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about kinds of tensors that are rejected later
                # torch goes by the suffix of a path as well.
                source = os.fspath(file) if mapped and isinstance(file, Path) else stream
                return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise ValueError(error.strerror or one_line(error)) from error
    except Exception as error:  # damaged bytes raise errors of any type
        raise ValueError(one_line(error)) from error


@dataclass(frozen=True)
class TensorInFile:
    """A contiguous tensor in a file of ``torch.save``, which begins at byte ``start``."""

    file: Path
    dtype: Any
    shape: tuple[int, ...]
    start: int

    def read(self, first: int, count: int) -> Any:
        """``count`` elements from the element ``first`` on, as one dimension.

        Raises:
            ValueError: if the file or the tensor does not have them.
        """
        import torch

        size, bytes_each = self.file.stat().st_size, self.dtype.itemsize
        begin = self.start + first * bytes_each
        if not 0 <= first <= first + count <= math.prod(self.shape) or begin + count * bytes_each > size:
            raise ValueError("it is damaged")
        values = torch.empty(count, dtype=self.dtype)
        with self.file.open("rb") as stream:
            stream.seek(begin)
            if stream.readinto(values.view(torch.uint8).numpy().data) != values.nbytes:
                raise ValueError("it is cut off")
        return values


def locate_torch(file: Path, allowed: Collection[str]) -> Any:
    """As :func:`load_torch`, with a :class:`TensorInFile` in place of each tensor, whose values are not read. For files
    of torch 1.6 and later.

    Raises:
        ValueError: one line, if the file cannot be read, or a tensor is not contiguous.
    """
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.utils._pytree import tree_map

    def located(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        start = getattr(leaf.untyped_storage(), "_checkpoint_offset", None)
        if not leaf.is_contiguous() or start is None:
            raise ValueError("a tensor in it is not contiguous")
        return TensorInFile(file, leaf.dtype, tuple(leaf.shape), start + leaf.storage_offset() * leaf.dtype.itemsize)

    with FakeTensorMode():
        content = load_torch(file, allowed, mapped=True)
    return tree_map(located, content, is_leaf=lambda node: isinstance(node, torch.Size))


def check_torch(file: IO[bytes], allowed: Collection[str] | None) -> None:
    """Raise ValueError if :func:`load_torch` would reject ``file``; leave it at its start otherwise."""
    others = _other_names(file, allowed)
    if others:
        raise ValueError(f"it names {others[0]}, which is neither a tensor nor a container of them")


TENSORS = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch.storage.UntypedStorage",
    }
    | {
        f"torch.{kind}Storage"
        for kind in ["Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "Untyped"]
    }
    | {
        f"torch.{name}"
        for name in ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    }
)
"""Names in files of tensors, numbers, text and containers, such as those that dmjd writes."""

_CONTAINERS = {b"PK": "zip", b"\x80\x02": "pickles"}
_MAGIC = 0x1950A86A20F9469CFC6C
"""The first value in files of torch.save before torch 1.6."""
_OTHER_PICKLE = (
    "it is a pickle that torch.save's default protocol did not write, and pickles can run code; save the state_dict() "
    "with safetensors, or with torch.save without pickle_protocol"
)


def _other_names(file: IO[bytes], allowed: Collection[str] | None) -> list[str]:
    """The names in ``file`` that are not allowed, sorted; leaves ``file`` at its start."""
    if allowed is None:
        from torch import _weights_only_unpickler

        allowed = _weights_only_unpickler._get_allowed_globals().keys()
    names = _names(file)
    file.seek(0)
    return sorted(names.difference(allowed))


def _names(file: IO[bytes]) -> set[str]:
    """``module.name`` of every class and function that a torch file names. Checks sizes, too.

    Raises:
        ValueError: if torch.save did not write it.
    """
    start = file.read(2)
    kind = _CONTAINERS.get(start)
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
                raise ValueError(f"it has {size} bytes and declares more content")
            found = _names_in_pickle(io.BytesIO(archive.read(entries[parts.index("data.pkl")])))
    elif kind == "pickles":  # before torch 1.6: magic number, version, system, content
        first = next(itertools.islice(_opcodes(file), 1, None), None)
        file.seek(0)
        if first is None or first[1] != _MAGIC:
            raise ValueError(_OTHER_PICKLE)
        found = {name for _ in range(4) for name in _names_in_pickle(file)}
    elif start[:1] == b"\x80":
        raise ValueError(_OTHER_PICKLE)
    else:
        raise ValueError("torch.save did not write it" if size else "it is cut off")
    if "builtins.bytearray" in found:  # torch allows it, and it allocates as many bytes as its argument
        raise ValueError("it names builtins.bytearray, which is not allowed; save the state_dict() alone")
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
            raise ValueError(_OTHER_PICKLE)
    return found


def _opcodes(stream: IO[bytes]) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    try:
        yield from pickletools.genops(stream)
    except (ValueError, IndexError) as error:
        raise ValueError("it is damaged") from error


@contextmanager
def weights_only_forced(classes: Sequence[type] = ()) -> Iterator[None]:
    """Context manager that forces ``weights_only=True``, with ``classes`` allowed, on every ``torch.load`` of any code.

    Processes that start within it inherit this; those that are not forked also reject ``classes``.
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


# Untrusted pickles ----------------------------------------------------------------------------------------------------


class _Plain(pickle._Unpickler):
    """Unpickler of numbers, text and containers, and of the classes in ``allowed`` as records without behaviour.

    Based on the Python implementation: the one in C allocates a table of the length that the file declares. Keys must
    be text, numbers or records: hashing deeply nested tuples takes exponential time.
    """

    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {}
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module, name]
        except KeyError:
            raise ValueError(f"it names {module}.{name}, which is not allowed") from None

    def get_extension(self, code: int) -> Any:
        raise ValueError("it names an extension, which is not allowed")

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
    """An object of a class that a pickle names: its state alone."""

    kind = ""
    state: Any = None

    def __new__(cls, *arguments: Any) -> _Record:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


_KEYS = (str, int, _Record)


def unpickle_plain(content: bytes) -> Any:
    """The value of a pickle of numbers, text and containers, such as a flight record of collectives.

    Raises:
        ValueError: one line, if it names any class or function, or is damaged.
    """
    return _unpickled(_Plain, content)


def _unpickled(reader: type[_Plain], content: bytes) -> Any:
    try:
        return reader(io.BytesIO(content)).load()
    except Exception as error:  # damaged bytes raise errors of any type
        raise ValueError(one_line(error)) from error


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its offsets and shape, stored in ``length`` bytes of ``file`` from ``start`` on."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a sharded checkpoint."""

    dtype: Any
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def parse_shard_index(content: bytes) -> dict[str, SavedTensor]:
    """Parse the ``.metadata`` of torch.distributed.checkpoint: name -> tensor.

    It is a pickle. Valid ones name only :data:`_SHARD_INDEX` and the dtypes of torch (measured on torch 2.11 and 2.14).
    None of these classes is instantiated.

    Raises:
        ValueError: one line, if it names anything else, or a type, a range or a number is not valid.
    """
    top = _unpickled(_ShardIndex, content)
    try:
        fields = _state(top, "Metadata")
        places: dict[Any, tuple[str, int, int]] = {}
        for index, place in fields["storage_data"].items():
            at, where = _state(index, "MetadataIndex"), _state(place, "_StorageInfo")
            if where.get("transform_descriptors"):
                raise ValueError("its tensors are compressed, which is not supported")
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
        values = _state(part, "ChunkStorageMetadata")
        offsets, sizes = _sizes(values["offsets"]), _sizes(values["sizes"])
        if math.prod(sizes):
            place = places.get((name, offsets)) or places[name, None]
            chunks.append(Chunk(offsets, sizes, *place))
    if not _tile(shape, chunks):
        raise ValueError(f"the chunks of {name} are not slices that make {list(shape)}")
    return SavedTensor(dtype, shape, tuple(chunks))


def _tile(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks, cut along one axis as engines do, cover the tensor, each element once."""
    if any(len(chunk.shape) != len(shape) or len(chunk.offsets) != len(shape) for chunk in chunks):
        return False
    cut = ((chunk, axis) for chunk in chunks for axis in range(len(shape)))
    axes = {axis for chunk, axis in cut if chunk.shape[axis] != shape[axis] or chunk.offsets[axis]}
    if len(axes) > 1:
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
            f"{_DCP}.metadata": "ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
            "TensorStorageMetadata _MEM_FORMAT_ENCODING",
            f"{_DCP}.filesystem": "_StorageInfo",
            "torch.serialization": "_get_layout",
            "pathlib": "PosixPath",
            "pathlib._local": "PosixPath",  # Python 3.13
        }.items()
        for name in names.split()
    },
}


class _ShardIndex(_Plain):
    allowed = _SHARD_INDEX

    def find_class(self, module: str, name: str) -> Any:
        import torch

        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        return dtype if isinstance(dtype, torch.dtype) else super().find_class(module, name)
