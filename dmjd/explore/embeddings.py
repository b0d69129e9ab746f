"""Files of embeddings: one row of features per image, with the image's name, split, label and thumbnail.

.npz is read by numpy alone, .parquet by pandas, DuckDB and pyarrow; both hold the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from dmjd.errors import DataError
from dmjd.files import drafted, open_regular
from dmjd.safe_load import parse_json, read_npz, read_parquet

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

EMBEDDINGS = "embeddings"
"""Folder of such files in a run folder."""
SPLITS = ("train", "test")
FORMATS = (".npz", ".parquet")

Array: TypeAlias = "npt.NDArray[Any]"


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Features of N images by one or several encoders.

    names: of each image: its path within the folder of images, or the data set's name for it, with control characters
        as ``\\x0a``. Text; it is never opened as a path.
    ids: int64 ``[N]``, sample ids: the numbers of the images in their split.
    splits: text ``[N]``: "train" or "test".
    labels: int64 ``[N]``, -1 without a label.
    classes: names of the classes, at the index of their label; empty without labels.
    features: encoder's name -> float32 ``[N, D]``, of the same images in the same order.
    thumbnails: a small JPEG of each image; None if the file has none.
    settings: ``encoders``: name -> checkpoint, step, weights, pooling, dim and preparation of the images; ``data``;
        ``dmjd``, the version.
    """

    names: list[str]
    ids: npt.NDArray[np.int64]
    splits: npt.NDArray[np.str_]
    labels: npt.NDArray[np.int64]
    classes: list[str]
    features: dict[str, npt.NDArray[np.float32]]
    thumbnails: list[bytes] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: Sequence[int]) -> Embeddings:
        """The images at ``rows``, in this order."""
        rows = list(rows)
        return replace(
            self,
            names=[self.names[row] for row in rows],
            ids=self.ids[rows],
            splits=self.splits[rows],
            labels=self.labels[rows],
            features={name: values[rows] for name, values in self.features.items()},
            thumbnails=None if self.thumbnails is None else [self.thumbnails[row] for row in rows],
        )


def embeddings_at(path: str) -> Path:
    """``path`` if it is a file; the newest file of embeddings of a run folder. Raises DataError if there is none."""
    place = Path(path)
    if not place.is_dir():
        return place
    found = [file for file in (place / EMBEDDINGS).glob("*") if file.suffix in FORMATS and file.is_file()]
    if not found:
        raise DataError(f"{place} has no file of embeddings; write one with dmjd embed {place}")
    return max(found, key=lambda file: (file.stat().st_mtime_ns, file.name))


def read_embeddings(path: str | os.PathLike[str]) -> Embeddings:
    """Read a file that ``dmjd embed`` wrote; it may come from others.

    Raises:
        DataError: one line, if the file is missing, damaged, or anything else.
    """
    path = Path(path)
    try:
        with open_regular(path) as file, TemporaryFile() as scratch:
            if path.suffix == ".parquet":
                _convert_in_child(file, cast(BinaryIO, scratch))
                return _checked(_from_arrays(read_npz(cast(BinaryIO, scratch), _expected)))
            return _checked(_from_arrays(read_npz(file, _expected)))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); dmjd embed RUN writes one") from error
    except ValueError as error:
        raise DataError(f"{path} is not a file of embeddings: {error}; dmjd embed RUN writes one") from error


def write_embeddings(path: str | os.PathLike[str], embeddings: Embeddings, dtype: str = "float32") -> None:
    """Write a file atomically; the suffix of ``path`` sets the format. ``dtype``: of features, float32 or float16."""
    path = Path(path)
    with drafted(path) as draft, draft.open("wb") as file:
        if path.suffix == ".parquet":
            _write_parquet(file, [embeddings], embeddings, dtype)
        else:
            arrays = _to_arrays(embeddings, dtype).items()
            _write_npz(file, ((name, array.dtype, array.shape, [array]) for name, array in arrays))


def write_parts(path: Path, parts: Sequence[Path], scratch: Path, settings: dict[str, Any]) -> None:
    """Write a file atomically from ``parts``, .npz files of the same encoders and classes, one after the other; their
    boundaries do not matter. It holds one part at a time in memory.

    Args:
        scratch: folder on the same file system for the unfinished file.
        settings: of the file.
    """
    draft = scratch / "unfinished"
    with draft.open("wb") as file:
        if path.suffix == ".parquet":
            first = replace(read_embeddings(parts[0]), settings=settings)
            dtype = str(_read(parts[0])[_keys(len(first.features))[0]].dtype)
            _write_parquet(file, map(read_embeddings, parts), first, dtype)
        else:
            _write_npz(file, _joined(parts, settings))
    draft.replace(path)


# Archives of numpy ----------------------------------------------------------------------------------------------------

_KINDS: dict[str, tuple[tuple[str, ...], int]] = {
    "names": (("|u1",), 1),
    "ids": (("<i8",), 1),
    "splits": (("<U5",), 1),
    "labels": (("<i8",), 1),
    "classes": (("|u1",), 1),
    "thumbnails": (("|u1",), 1),
    "thumbnail_sizes": (("<i8",), 1),
    "settings": (("|u1",), 1),
}
"""Array -> its type and dimensions. Names and classes are UTF-8 with a line feed after each."""
_FEATURES = re.compile(r"features(_\d{1,3})?")


def _expected(name: str) -> tuple[tuple[str, ...], int] | None:
    return (("<f4", "<f2"), 2) if _FEATURES.fullmatch(name) else _KINDS.get(name)


def _keys(encoders: int) -> list[str]:
    """Names of the arrays and columns of features: ``features`` of one encoder, else with its number from 0 on."""
    return ["features"] if encoders == 1 else [f"features_{number}" for number in range(encoders)]


def _to_arrays(embeddings: Embeddings, dtype: str) -> dict[str, Array]:
    import numpy as np

    arrays: dict[str, Array] = {}
    for key, values in zip(_keys(len(embeddings.features)), embeddings.features.values(), strict=True):
        arrays[key] = values.astype(dtype)
    arrays |= {
        "ids": embeddings.ids.astype("<i8"),
        "labels": embeddings.labels.astype("<i8"),
        "splits": np.asarray(embeddings.splits, dtype="<U5"),
        "names": _lines(embeddings.names),
        "classes": _lines(embeddings.classes),
        "settings": _bytes(_json(embeddings.settings, embeddings.features)),
    }
    if embeddings.thumbnails is not None:
        arrays["thumbnails"] = np.frombuffer(b"".join(embeddings.thumbnails), np.uint8)
        arrays["thumbnail_sizes"] = np.array([len(each) for each in embeddings.thumbnails], "<i8")
    return arrays


def _json(settings: dict[str, Any], encoders: Iterable[str]) -> str:
    """Settings of a file, with the names of the encoders in the order of their arrays as ``features``."""
    return json.dumps({**settings, "features": list(encoders)}, ensure_ascii=False, sort_keys=True)


def _bytes(text: str) -> Array:
    import numpy as np

    return np.frombuffer(text.encode(), np.uint8)


def _lines(texts: Sequence[str]) -> Array:
    return _bytes("".join(f"{text}\n" for text in texts))


def _write_npz(file: IO[bytes], entries: Iterable[tuple[str, Any, tuple[int, ...], Iterable[Array]]]) -> None:
    """Write arrays of (name, dtype, shape, pieces along the first axis), as ``numpy.savez``, with the same bytes at any
    time of day."""
    import numpy as np

    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, dtype, shape, pieces in entries:
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(entry, header)
                for piece in pieces:
                    entry.write(np.ascontiguousarray(piece).data if piece.size else b"")


def _joined(
    parts: Sequence[Path], settings: dict[str, Any]
) -> Iterator[tuple[str, Any, tuple[int, ...], Iterable[Array]]]:
    """The entries of :func:`_write_npz` of one file of all ``parts``."""
    rows: Counter[str] = Counter()
    for part in parts:
        arrays = _read(part)
        rows.update({key: len(array) for key, array in arrays.items()})
    kinds = {key: (array.dtype, array.shape[1:]) for key, array in arrays.items()}
    described = _bytes(_json(settings, parse_json(arrays["settings"].tobytes())["features"]))
    shared = {"classes": arrays["classes"], "settings": described}
    for key, (dtype, shape) in kinds.items():
        if key in shared:
            yield key, dtype, shared[key].shape, [shared[key]]
        else:
            yield key, dtype, (rows[key], *shape), (_read(part, key)[key] for part in parts)


def _read(path: Path, only: str | None = None) -> dict[str, Array]:
    with open_regular(path) as file:
        return read_npz(file, _expected, only)


def _from_arrays(arrays: Mapping[str, Array]) -> Embeddings:
    import numpy as np

    for key in _KINDS.keys() - {"thumbnails", "thumbnail_sizes"} - arrays.keys():
        raise ValueError(f"it has no {key}")
    found = [key for key in arrays if _FEATURES.fullmatch(key)]
    names, settings = _described(arrays["settings"].tobytes(), found)
    thumbnails = None
    if "thumbnails" in arrays or "thumbnail_sizes" in arrays:
        thumbnails = _cut(arrays.get("thumbnails"), arrays.get("thumbnail_sizes"))
    return Embeddings(
        _texts(arrays["names"]),
        arrays["ids"],
        arrays["splits"],
        arrays["labels"],
        _texts(arrays["classes"]),
        {name: arrays[key].astype(np.float32) for name, key in zip(names, _keys(len(found)), strict=True)},
        thumbnails,
        settings,
    )


def _described(content: bytes, keys: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The names of the encoders and the settings, from the JSON of a file with the arrays ``keys`` of features."""
    settings = parse_json(content)
    names = settings.pop("features", None) if isinstance(settings, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its settings do not name its encoders")
    if not keys or sorted(keys) != sorted(_keys(len(names))) or len(set(names)) < len(names):
        raise ValueError(f"its settings name {len(names)} encoders, and it has the features of {len(keys)}")
    return names, settings


def _texts(lines: Array) -> list[str]:
    text = lines.tobytes().decode()
    if text and not text.endswith("\n"):
        raise ValueError("its names are cut off")
    return text.split("\n")[:-1]


def _cut(content: Array | None, sizes: Array | None) -> list[bytes]:
    if content is None or sizes is None or (sizes < 0).any() or int(sizes.sum(dtype=object)) != len(content):
        raise ValueError("the sizes of its thumbnails do not add up to their bytes")
    ends = sizes.cumsum().tolist()
    joined = content.tobytes()
    return [joined[start:end] for start, end in pairwise([0, *ends])]


# Parquet --------------------------------------------------------------------------------------------------------------

_GROUP = 4096
"""Images of a row group."""


def _write_parquet(file: IO[bytes], pieces: Iterable[Embeddings], first: Embeddings, dtype: str) -> None:
    """One row per image of ``pieces``, with the settings of ``first``. Row groups do not depend on the pieces."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    described = {**json.loads(_json(first.settings, first.features)), "classes": first.classes}
    metadata = {"dmjd": json.dumps(described, ensure_ascii=False, sort_keys=True)}
    schema = _table(first, dtype, slice(0, 0)).schema.with_metadata(metadata)
    rest = schema.empty_table()
    # Without compression and dictionaries a reader can bound the memory of an untrusted file by its size.
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
        for piece in pieces:
            rest = pa.concat_tables([rest, _table(piece, dtype).replace_schema_metadata(metadata)])
            while len(rest) >= _GROUP:
                writer.write_table(rest.slice(0, _GROUP).combine_chunks())
                rest = rest.slice(_GROUP)
        if len(rest):
            writer.write_table(rest.combine_chunks())


def _table(embeddings: Embeddings, dtype: str, rows: slice = slice(None)) -> Any:
    import numpy as np
    import pyarrow as pa

    names = [*embeddings.classes, None]
    columns = {
        "id": pa.array(embeddings.ids[rows], pa.int64()),
        "name": pa.array(embeddings.names[rows], pa.string()),
        "split": pa.array(embeddings.splits[rows].tolist(), pa.string()),
        "label": pa.array(embeddings.labels[rows], pa.int64()),
        "class": pa.array([names[label] for label in embeddings.labels[rows].tolist()], pa.string()),
    }
    for key, values in zip(_keys(len(embeddings.features)), embeddings.features.values(), strict=True):
        flat = pa.array(np.ascontiguousarray(values[rows], dtype).reshape(-1))
        columns[key] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    if embeddings.thumbnails is not None:
        columns["thumbnail"] = pa.array(embeddings.thumbnails[rows], pa.binary())
    return pa.table(columns)


_CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
sys.path.insert(0, {root!r})
from dmjd.explore.embeddings import convert
convert(open(0, "rb"), open(1, "wb"))
"""
_CHILD_SECONDS, _CHILD_BYTES_PER_SECOND = 60, 1 << 24
_CHILD_BYTES, _CHILD_COPIES = 4 << 30, 8
"""Limit of the child's memory: libraries, and copies of the file."""
_WRONG = "wrong: "


def _convert_in_child(file: BinaryIO, target: BinaryIO) -> None:
    """:func:`convert` in a process of its own, which pyarrow aborts for some damaged files. Raises ValueError."""
    import pyarrow.parquet  # noqa: F401 -- without it, the command names the extra

    root = str(Path(__file__).resolve().parents[2])
    size = os.fstat(file.fileno()).st_size
    limit = _CHILD_SECONDS + size / _CHILD_BYTES_PER_SECOND
    memory = _CHILD_BYTES + _CHILD_COPIES * size
    command = [sys.executable, "-c", _CHILD.format(root=root, memory=memory)]
    # Each thread takes virtual memory, whose limit is the same on a host with 128 cores.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_IO_THREADS": "1"}
    try:
        done = subprocess.run(
            command, stdin=file, stdout=target, stderr=subprocess.PIPE, timeout=limit, check=False, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"it is not read within {limit:.0f} s") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        reasons = [line.removeprefix(_WRONG) for line in lines if line.startswith(_WRONG)]
        raise ValueError(reasons[0] if reasons else "it is damaged")


def convert(file: BinaryIO, target: BinaryIO) -> None:
    """Write the table in ``file`` as an archive of arrays, which the caller checks. A wrong table ends the process."""
    try:
        arrays = _to_arrays(_from_table(read_parquet(file)), "float32")
    except ValueError as error:
        sys.exit(_WRONG + " ".join(str(error).split()))
    _write_npz(target, ((name, array.dtype, array.shape, [array]) for name, array in arrays.items()))


def _from_table(table: Any) -> Embeddings:
    import numpy as np

    columns = dict(zip(table.column_names, table.itercolumns(), strict=True))
    found = [key for key in columns if _FEATURES.fullmatch(key)]
    types = {"id": "int64", "name": "string", "split": "string", "label": "int64", "class": "string"}
    types |= {"thumbnail": "binary"} if "thumbnail" in columns else {}
    if sorted(columns) != sorted([*types, *found]):
        raise ValueError(f"its columns are {', '.join(map(repr, columns))[:200]}")
    for key, column in columns.items():
        kind = str(column.type)
        wanted = types.get(key) or r"fixed_size_list<\w+: (float|halffloat)>\[\d+\]"
        if not re.fullmatch(wanted, kind) or (column.null_count and key != "class"):
            raise ValueError(f"its column {key} is of type {kind:.60} with {column.null_count} nulls")
    names, settings = _described((table.schema.metadata or {}).get(b"dmjd", b"null"), found)
    classes = settings.pop("classes", None)
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError("its settings do not list its classes")
    features = {}
    for name, key in zip(names, _keys(len(found)), strict=True):
        rows = columns[key].combine_chunks()
        values = rows.flatten().to_numpy(zero_copy_only=True)
        features[name] = values.reshape(len(table), rows.type.list_size).astype(np.float32)
    return Embeddings(
        columns["name"].to_pylist(),
        columns["id"].to_numpy(),
        np.array(columns["split"].to_pylist(), dtype=np.str_),
        columns["label"].to_numpy(),
        classes,
        features,
        columns["thumbnail"].to_pylist() if "thumbnail" in columns else None,
        settings,
    )


# Checks ---------------------------------------------------------------------------------------------------------------

_ROWS = 4096


def _checked(embeddings: Embeddings) -> Embeddings:
    """``embeddings``, whose arrays have the right types. Raises ValueError if their values do not fit together."""
    import numpy as np

    count = len(embeddings)
    lengths = {"ids": len(embeddings.ids), "splits": len(embeddings.splits), "labels": len(embeddings.labels)}
    lengths |= {f"features of {name!r}": len(values) for name, values in embeddings.features.items()}
    lengths |= {} if embeddings.thumbnails is None else {"thumbnails": len(embeddings.thumbnails)}
    for key, length in lengths.items():
        if length != count:
            raise ValueError(f"it has {count} names and {length} {key}")
    if not count:
        raise ValueError("it holds no images")
    for text in (*embeddings.names, *embeddings.classes, *embeddings.features):
        if not text or _CONTROL.search(text):
            raise ValueError(f"{text!r:.80} is not a name: it is empty or has control characters")
    low, high = int(embeddings.labels.min()), int(embeddings.labels.max())
    if low < -1 or high >= len(embeddings.classes):
        raise ValueError(f"its labels are from {low} to {high}, and it has {len(embeddings.classes)} classes")
    if int(embeddings.ids.min()) < 0:
        raise ValueError("an id is negative")
    if not np.isin(embeddings.splits, SPLITS).all():
        raise ValueError("a split is neither train nor test")
    for name, values in embeddings.features.items():
        if not values.shape[1]:
            raise ValueError(f"the features of {name!r} have no dimensions")
        for rows in _blocks(values):
            if not np.isfinite(rows).all():
                raise ValueError(f"the features of {name!r} hold NaN or infinity")
    return embeddings


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _blocks(values: Array) -> Iterator[Array]:
    return (values[start : start + _ROWS] for start in range(0, len(values), _ROWS))


def plain_name(name: str) -> str:
    """A name of an image or a class for a file of embeddings: bytes that are not UTF-8 and control characters as
    ``\\x0a``."""
    text = os.fsencode(name).decode(errors="backslashreplace") or "''"
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
