"""Named tensors on disk, written in shards by any number of processes and read by any other number, or by none.

A name is ``KIND/PARAMETER``: the parameter itself, AdamW's moments and step count, and an average of the parameter. All
native engines write this one format (torch.distributed.checkpoint's), so they continue each other's runs. A file named
``consolidated.safetensors`` holds the same names with whole tensors, and is what engines of different kinds share.
"""

from __future__ import annotations

import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from dmjd.errors import CheckpointError, StorageError
from dmjd.files import read_file
from dmjd.safe_load import (
    TENSORS,
    WEIGHT_INDEX,
    Chunk,
    SavedTensor,
    check_torch,
    one_line,
    parse_shard_index,
    parse_weight_index,
    weights_only_forced,
)

T = TypeVar("T")

# torch warns at every save and load without a process group, though it is what `no_dist` asks for.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

PARAMETER, AVERAGE = "parameter", "average"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of a parameter, under torch's names; ``step`` is a scalar."""

CONSOLIDATED = "consolidated.safetensors"
MAX_FILES, BYTES_PER_FILE = 16, 1 << 28
"""Large states of a rank are written, and later hashed, as several files side by side."""
WRITERS = 4
"""Threads that write them."""
_INDEX = ".metadata"
_DROPPED = "a run that goes on drops all but its newest keep_checkpoints=..., so name the run again, or keep more"
_SHARDING = "DCP_SHARDING_INFO"
"""Of the header of a .safetensors file: torch's note that its tensors are parts of others. Ours are whole."""
_SHARDS = re.compile(r"__\d+_\d+\.distcp")
"""Names of the files beside the index that hold the tensors."""


def write(path: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[Path]:
    """Write ``tensors`` into the existing folder ``path``; the files that this rank wrote.

    Collective over ``group``, a group for the CPU; None is one process by itself. A tensor that all ranks hold is
    written by one of them.

    Raises:
        StorageError: on every rank, if any could not write.
    """
    own = sum(tensor.nbytes for tensor in tensors.values()) // (1 if group is None else dist.get_world_size(group))
    writer = _Writer(path, files=min(MAX_FILES, 1 + own // BYTES_PER_FILE))
    try:
        save_shards(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        rank, cause = _cause(error)
        raise StorageError(f"{cause} (rank {rank})" if group is not None else str(cause)) from error
    rank = 0 if group is None else dist.get_rank(group)
    return sorted(path.glob(f"__{rank}_*")) + [path / _INDEX] * (rank == 0)


class _Writer(FileSystemWriter):
    """Torch's writer, for several files at a time; the errors of torch's own threads are lost."""

    def __init__(self, path: Path, files: int) -> None:
        # Nothing has to be copied ahead from a device. A checkpoint is flushed as a whole, before it counts, but the
        # disk need not wait until the last of several files is written.
        super().__init__(path, sync_files=files > 1, thread_count=files, per_thread_copy_ahead=0)

    def _write_data(self, planner: Any, file_queue: Any) -> Any:
        self.thread_count = 1  # of each call
        with ThreadPoolExecutor(WRITERS) as pool:
            parts = list(pool.map(super()._write_data, [planner] * WRITERS, [file_queue] * WRITERS))
        written: torch.futures.Future[list[Any]] = torch.futures.Future()
        written.set_result([result for part in parts for result in part.wait()])
        return written


def read_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` in place, each rank its own part of a sharded one. Not collective.

    Raises:
        CheckpointError: if the names or shapes in ``path`` are others, when nothing is filled, or it cannot be read.
    """
    reader = _reader(path)
    saved = _shapes(reader)
    own = {name: value.shape for name, value in tensors.items()}
    for kind in (PARAMETER, *MOMENTS, AVERAGE):
        check_same_model(of_kind(own, kind), of_kind(saved, kind), path, "parameter" if kind == PARAMETER else kind)
    _fill(dict(tensors), reader, path)


class Tensors(NamedTuple):
    """Tensors of a checkpoint that are read one at a time: ``read(name)`` gives one, whole and on the CPU.

    like: all of them, by name, on "meta".
    """

    like: dict[str, Tensor]
    read: Callable[[str], Tensor]


def open_tensors(path: Path) -> Tensors:
    """The tensors in ``path``. Needs no process group; memory is that of some copies of the tensor that is read.

    Raises:
        CheckpointError: if it cannot be read, here or in ``read``.
    """
    reader = _reader(path)
    like = {
        name: torch.empty(item.size, dtype=item.properties.dtype, device="meta")
        for name, item in reader.read_metadata().state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(like[name], device="cpu")
        _fill({name: tensor}, reader, path)
        return tensor

    return Tensors(like, read)


def read(path: Path, *kinds: str) -> dict[str, Tensor]:
    """The tensors of ``kinds``, or all, whole and on the CPU. Needs no process group.

    Raises:
        CheckpointError: if it cannot be read.
    """
    reader = _reader(path)
    wanted = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in reader.read_metadata().state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata) and (not kinds or name.partition("/")[0] in kinds)
    }
    _fill(wanted, reader, path)
    return wanted


def _fill(tensors: dict[str, Tensor], reader: FileSystemReader, path: Path) -> None:
    try:
        with weights_only_forced():
            load_shards(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        _, cause = _cause(error)
        raise CheckpointError(f"{path} cannot be read ({one_line(cause)}); {_DROPPED}") from error


def _cause(error: CheckpointException) -> tuple[int, BaseException]:
    """The rank that failed first, and with what."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return rank, cause


def is_consolidated(path: Path) -> bool:
    """Whether the file ``path``, or the files of the index ``path``, hold parameters under the names of this module."""
    if not path.is_file():  # safetensors would wait for a pipe
        return False
    try:
        if path.name.endswith(WEIGHT_INDEX):
            names: Iterable[str] = parse_weight_index(read_file(path))
        elif path.suffix == Path(CONSOLIDATED).suffix:
            with safe_open(path, "pt") as file:
                names = file.keys()
        else:
            return False
        return any(name.startswith(f"{PARAMETER}/") for name in names)
    except (OSError, ValueError, SafetensorError):
        return False  # reading it raises the error


def shapes(path: Path, kind: str) -> dict[str, torch.Size]:
    """Shapes of the tensors of ``kind`` in a native checkpoint, by the parameters' names."""
    return of_kind(_shapes(_reader(path)), kind)


def check_same_model(
    own: Mapping[str, torch.Size], saved: Mapping[str, torch.Size], path: Path, what: str = "parameter"
) -> None:
    """Raise CheckpointError, of one line, unless names and shapes agree."""
    missing, unknown = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or unknown:
        differences = [
            f"{len(names)} {how} ({names[0]}{', ...' if len(names) > 1 else ''})"
            for how, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise CheckpointError(f"{path} is a checkpoint of another model: {' and '.join(differences)} {what}s")
    for name, shape in saved.items():
        if own[name] != shape:
            raise CheckpointError(
                f"{path} is a checkpoint of another model: {name} is {tuple(shape)} there and {tuple(own[name])} here"
            )


def _reader(path: Path) -> FileSystemReader:
    if (path / _INDEX).is_file():
        return _Shards(path)
    found = [path / CONSOLIDATED, path / f"{CONSOLIDATED}{WEIGHT_INDEX}"] if path.is_dir() else [path]
    for file in found:
        if file.is_file():
            return _WholeTensors(file)
    raise CheckpointError(
        f"{path} was written by another kind of engine; dmjd consolidate {path} makes it readable for this one"
    )


class _Shards(FileSystemReader):
    """Torch's reader would unpickle the index and follow it anywhere; this one has it parsed and compared to the disk.

    Raises:
        CheckpointError: if the index is none, or does not fit the files beside it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            tensors = parse_shard_index(read_file(path / _INDEX))
            _check_on_disk(path, tensors)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); {_DROPPED}") from error
        except ValueError as error:
            raise CheckpointError(f"{path / _INDEX} cannot be read: {error}") from error
        self._index = _for_torch(tensors)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        return self._index

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        part = io.BytesIO(super()._slice_file(file, sinfo).read())  # torch's view does not seek from its end
        check_torch(part, TENSORS)
        return part


def _check_on_disk(path: Path, tensors: Mapping[str, SavedTensor]) -> None:
    """Raise ValueError unless the chunks are apart from each other in files of shards, and no larger than their bytes.

    Then tensors that are made by the index take no more memory than the files take of the disk.
    """
    held: dict[str, list[Chunk]] = {}
    for name, tensor in tensors.items():
        if {"", ".", ".."} & set(name.split("/")):  # names become folders where a checkpoint is laid out for DeepSpeed
            raise ValueError(f"{name!r} is not a name of a tensor")
        for chunk in tensor.chunks:
            held.setdefault(chunk.file, []).append(chunk)
            if prod(chunk.shape) * tensor.dtype.itemsize > chunk.length:
                raise ValueError(f"{name} is larger than the {chunk.length} bytes that hold it")
    for file, chunks in held.items():
        if not _SHARDS.fullmatch(file):
            raise ValueError(f"it points to {file}, which is not a file of shards")
        found = os.lstat(path / file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{file} is not a regular file; put a copy of it in its place")
        chunks.sort(key=lambda chunk: chunk.start)
        if any(one.start + one.length > next.start for one, next in pairwise(chunks)):
            raise ValueError(f"two tensors share bytes of {file}")
        if chunks[-1].start + chunks[-1].length > found.st_size:
            raise ValueError(f"it points behind the end of {file}")


def _for_torch(tensors: Mapping[str, SavedTensor]) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in tensor.chunks],
            )
            for name, tensor in tensors.items()
        },
        storage_data={
            MetadataIndex(name, chunk.offsets): _StorageInfo(chunk.file, chunk.start, chunk.length)
            for name, tensor in tensors.items()
            for chunk in tensor.chunks
        },
    )


class _WholeTensors(HuggingFaceStorageReader):
    """Torch's reader takes every safetensors file of a folder; this one takes ``file`` or, of an index, those that it
    lists."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        try:
            listed: dict[str, str] = {}
            if file.name.endswith(WEIGHT_INDEX):
                listed = parse_weight_index(read_file(file))
            parts = sorted({file.with_name(name) for name in listed.values()}) or [file]
            held: list[str] = []
            for part in parts:
                if not part.is_file():  # safetensors would wait for a pipe
                    raise ValueError(f"its part {part.name!r} is not a file beside it; copy the whole folder")
                with safe_open(part, "pt") as opened:  # which checks sizes and offsets
                    if _SHARDING in (opened.metadata() or {}):
                        raise ValueError("it holds shards of tensors")
                    held += opened.keys()
                    if listed and any(listed.get(name) != part.name for name in opened.keys()):  # noqa: SIM118
                        raise ValueError(f"{part.name} holds other tensors than it lists")
            if listed.keys() - held:
                raise ValueError("its files lack tensors that it lists")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {one_line(error)}") from error
        self.fs = _FilesAsFolder(parts)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._metadata is None:  # it opens every file, and open_tensors loads one tensor at a time
            self._metadata = super().read_metadata()
        return self._metadata


class _FilesAsFolder(FileSystem):
    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        self._files = files

    def ls(self, path: Any) -> list[str]:
        return [str(file) for file in self._files]


def _shapes(reader: FileSystemReader) -> dict[str, torch.Size]:
    items = reader.read_metadata().state_dict_metadata
    return {name: item.size for name, item in items.items() if isinstance(item, TensorStorageMetadata)}


def of_kind(items: Mapping[str, T], kind: str) -> dict[str, T]:
    """Those named ``kind/PARAMETER``, by the parameters' names."""
    return {name.removeprefix(f"{kind}/"): item for name, item in items.items() if name.startswith(f"{kind}/")}
