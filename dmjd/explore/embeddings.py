"""Files of embeddings: one row of features per image, with the image's name, split, label and thumbnail.

.npz is read by numpy alone, .parquet by pandas, DuckDB and pyarrow; both hold the same.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from dmjd.errors import DataError
from dmjd.files import open_regular
from dmjd.safe_load import parse_json, read_npz

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SPLITS = ("train", "test")
FORMATS = (".npz", ".parquet")
DTYPES = ("float32", "float16")

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


def read_embeddings(path: str | os.PathLike[str]) -> Embeddings:
    """Read a file that ``dmjd embed`` wrote; it may come from others.

    Raises:
        DataError: one line, if the file is missing, damaged, or anything else.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            return _from_arrays(read_npz(file, _expected))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); dmjd embed RUN makes one") from error
    except ValueError as error:
        raise DataError(f"{path} is no file of embeddings: {error}; dmjd embed RUN makes one") from error


def write_embeddings(path: str | os.PathLike[str], embeddings: Embeddings, dtype: str = "float32") -> None:
    """Write a file atomically; the suffix of ``path`` chooses the format. ``dtype``: of the features."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            _write_npz(
                file,
                ((name, array.dtype, array.shape, [array]) for name, array in _to_arrays(embeddings, dtype).items()),
            )
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


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
    settings = {"settings": embeddings.settings, "names": list(embeddings.features)}
    arrays |= {
        "ids": embeddings.ids.astype("<i8"),
        "labels": embeddings.labels.astype("<i8"),
        "splits": np.asarray(embeddings.splits, dtype="<U5"),
        "names": _lines(embeddings.names),
        "classes": _lines(embeddings.classes),
        "settings": _bytes(json.dumps(settings, ensure_ascii=False, sort_keys=True)),
    }
    if embeddings.thumbnails is not None:
        arrays["thumbnails"] = np.frombuffer(b"".join(embeddings.thumbnails), np.uint8)
        arrays["thumbnail_sizes"] = np.array([len(each) for each in embeddings.thumbnails], "<i8")
    return arrays


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


def _from_arrays(arrays: Mapping[str, Array]) -> Embeddings:
    import numpy as np

    for key in _KINDS.keys() - {"thumbnails", "thumbnail_sizes"} - arrays.keys():
        raise ValueError(f"it has no {key}")
    described = parse_json(arrays["settings"].tobytes())
    thumbnails = None
    if "thumbnails" in arrays or "thumbnail_sizes" in arrays:
        thumbnails = _cut(arrays.get("thumbnails"), arrays.get("thumbnail_sizes"))
    found = [key for key in arrays if _FEATURES.fullmatch(key)]
    names = described.get("names") if isinstance(described, dict) else None
    if not isinstance(names, list) or not found or sorted(found) != sorted(_keys(len(found))):
        raise ValueError("it has no features of its encoders")
    if len(names) != len(found) or len(set(map(str, names))) != len(names):
        raise ValueError(f"its settings do not name the encoders of its {len(found)} arrays of features")
    return _checked(
        Embeddings(
            _texts(arrays["names"]),
            arrays["ids"],
            arrays["splits"],
            arrays["labels"],
            _texts(arrays["classes"]),
            {name: arrays[key].astype(np.float32) for name, key in zip(names, _keys(len(found)), strict=True)},
            thumbnails,
            described.get("settings"),
        )
    )


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
    return [joined[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


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
        if not isinstance(text, str) or not text or _CONTROL.search(text):
            raise ValueError(f"{text!r:.80} is no name: it is empty or has control characters")
    if not isinstance(embeddings.settings, dict):
        raise ValueError("its settings are no mapping")
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
