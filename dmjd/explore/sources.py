"""Files of embeddings that a command reads, several as one of the images they all hold; the folder of its results."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmjd.errors import ConfigError, DataError, printable_message
from dmjd.explore.embeddings import embeddings_at, read_embeddings
from dmjd.files import obstacle, printable, replace_file, standing_place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dmjd.explore.embeddings import Embeddings

logger = logging.getLogger("dmjd")


def output_folder(source: str, output: str | None) -> Path:
    """``output``, or by default the folder ``explore`` of the run ``source``, or the folder of the file ``source``.

    Raises:
        ConfigError: as :func:`check_output`.
    """
    path = Path(source)
    return check_output(Path(output) if output is not None else path / "explore" if path.is_dir() else path.parent)


def check_output(path: Path, suffixes: Sequence[str] = ()) -> Path:
    """``path``, if it can be written to; checked before the work whose results it gets. Missing folders are created by
    the writer.

    Args:
        suffixes: allowed ones of a file; empty for a folder.

    Raises:
        ConfigError: if a file has another suffix, something else is in its place, or its folder cannot be created or
            written to.
    """
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"output={path} must end in {' or '.join(suffixes)}")
    folder = path.parent if suffixes else path
    place = folder if os.path.lexists(folder) else standing_place(folder)
    what = obstacle(place, folder=True) or ("" if os.access(place, os.W_OK | os.X_OK) else "read-only")
    if suffixes and not what:
        place, what = path, obstacle(path)
    if what:
        other = f"file with output=FILE{suffixes[0]}" if suffixes else "folder with output=FOLDER"
        into = "" if suffixes else "into "
        raise ConfigError(f"cannot write {into}{path}: {place} is {what}; set another {other}")
    return path


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> list[str]:
    """Write files, name -> content, into ``folder``, which is created; returns their paths.

    Raises:
        ConfigError: if one cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            replace_file(folder / name, content)
    except OSError as error:
        raise ConfigError(
            f"cannot write into {folder}: {error.strerror}; set another folder with output=FOLDER"
        ) from error
    return [str(folder / name) for name in files]


def read_together(sources: Sequence[str]) -> Embeddings:
    """The files of ``sources`` as one: the images that all hold, in the order of the first file, with its labels and
    thumbnails, and the encoders of all. Of a run folder the newest file is read, and named in the log.

    Images are the same if name and split are. An encoder whose name an earlier file has is called FILE: NAME.

    Raises:
        DataError: for a file that cannot be read, and if no image is in all files.
    """
    paths = [embeddings_at(source) for source in sources]
    for source, path in zip(sources, paths, strict=True):
        if path != Path(source):
            logger.info("reading %s, the newest file of %s", path, source)
    files = [read_embeddings(path) for path in paths]
    if len(files) == 1:
        return files[0]
    rows = [_rows(file) for file in files]
    shared = [key for key in rows[0] if all(key in each for each in rows[1:])]
    if not shared:
        raise DataError(
            f"{' and '.join(map(str, paths))} have no image of the same name and split in common; embed the same "
            "images with each encoder"
        )
    features: dict[str, NDArray[np.float32]] = {}
    encoders: dict[str, Any] = {}
    titles = _titles(paths, files)
    for file, row, renamed in zip(files, rows, titles, strict=True):
        own = [row[key] for key in shared]
        described = file.settings.get("encoders")
        for name, values in file.features.items():
            features[renamed[name]] = values[own]
            encoders[renamed[name]] = described.get(name) if isinstance(described, dict) else None
    first = files[0].take([rows[0][key] for key in shared])
    return replace(first, features=features, settings={**first.settings, "encoders": encoders})


def _rows(file: Embeddings) -> dict[tuple[str, str], int]:
    """(split, name) -> row; of equal ones the first."""
    rows: dict[tuple[str, str], int] = {}
    for index, key in enumerate(zip(map(str, file.splits), file.names, strict=True)):
        rows.setdefault(key, index)
    return rows


def _titles(paths: Sequence[Path], files: Sequence[Embeddings]) -> list[dict[str, str]]:
    """Encoder -> its name among those of all files, of each file."""
    counts = Counter(name for file in files for name in file.features)
    found: list[dict[str, str]] = []
    taken: set[str] = set()
    for path, file in zip(paths, files, strict=True):
        found.append({})
        for name in file.features:
            title = name if counts[name] == 1 else f"{path.stem}: {name}"
            number = 2
            while title in taken:
                title, number = f"{path.stem} ({number}): {name}", number + 1
            taken.add(title)
            found[-1][name] = title
    return found


def origin(embeddings: Embeddings, encoder: str, keys: Sequence[str], longest: int) -> str:
    """The record of an encoder in a file, in at most ``longest`` characters. keys: such as weights and step;
    a fine-tuned one is stated, which was trained with labels."""
    encoders = embeddings.settings.get("encoders")
    described = encoders.get(encoder) if isinstance(encoders, dict) else None
    known = described if isinstance(described, dict) else {}
    values = {key: known[key] for key in keys if isinstance(known.get(key), str | int) and known[key]}
    parts = [str(value) if key == "weights" else f"{key} {value}" for key, value in values.items()]
    parts += ["fine-tuned"] * (known.get("finetuned") is True)
    return shortened(printable_message(printable(", ".join(parts))), longest)


def shortened(text: str, length: int) -> str:
    """``text`` in one line of at most ``length`` characters, without its middle if it is longer."""
    line = " ".join(text.split())
    half = (length - 3) // 2
    return line if len(line) <= length else f"{line[:half]}...{line[-half:]}"
