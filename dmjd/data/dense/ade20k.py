"""Images with a class for each pixel, in ADE20K's folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from dmjd.config import SegmentDataConfig
from dmjd.data.dataset import OpenImage, Pixels, Size, Split
from dmjd.data.decode import decode_errors, identify, read_bytes, read_whole
from dmjd.data.dense.annotated import AnnotatedImage, AnnotatedImages
from dmjd.data.folder import images_below
from dmjd.data.quarantine import check_share
from dmjd.errors import BadImage, DataError, NoSplit
from dmjd.files import open_regular, read_at_most

IGNORED = 255
"""The class of pixels without one."""

_MASK = "mask"
"""The kind of :class:`BadImage` of masks that do not fit their image or the classes."""
_FOLDERS: dict[Split, str] = {"train": "training", "test": "validation"}
_LIST, _TABLE = "classes.txt", "objectInfo150.txt"
_MOST_BYTES = 1 << 20  # of these
_PNG_DEPTH = 24  # offset of the bit depth in a PNG file


class Ade20k(AnnotatedImages):
    """``root/images/{training,validation}`` with a PNG of the same name in ``root/annotations/...`` for each image.

    The number of a pixel's class is its value in a grey or palette PNG of at most 8 bits; 255 is no class. With
    ``reduce_zero_label`` 0 is none either, and class 1 becomes 0. Names of the classes: each line of
    ``root/classes.txt``, else the last column of ``root/objectInfo150.txt`` up to its first comma.

    A mask that is missing, damaged, of another size than its image or of another mode, or that has a value without a
    class, makes its image a bad one, named by the mask. ``check=header`` finds all of that but values without a class,
    ``check=decode`` those too. Masks of validation images, which are few and of which none may be bad, are decoded with
    both.

    Args:
        config: ``root``, ``reduce_zero_label``, ``channels``, ``check`` and ``max_bad_percent`` are used.
        split: "train" is ``training``, "test" is ``validation``.

    Raises:
        DataError: if a folder or the classes are missing or empty, or too many images are bad.
        NoSplit: if there are no validation images.
    """

    def __init__(self, config: SegmentDataConfig, split: Split) -> None:
        if config.root is None:
            raise DataError("data.name=ade20k needs data.root, the folder of images/ and annotations/")
        root, below = Path(config.root), _FOLDERS[split]
        folder, self._masks = root / "images" / below, os.fspath(root / "annotations" / below)
        if not folder.is_dir():
            kind = NoSplit if split == "test" and (root / "images" / _FOLDERS["train"]).is_dir() else DataError
            raise kind(f"{folder} is not a folder; data.name=ade20k reads images/{{training,validation}} of data.root")
        if not os.path.isdir(self._masks):
            raise DataError(f"{self._masks} is not a folder; put a PNG of class numbers there for each image")
        skipped: Counter[str] = Counter()
        paths = images_below(os.fspath(folder), skipped)
        if not paths:
            raise DataError(f"folder {folder} holds no images")
        without_image = {*images_below(self._masks, endings=(".png",))} - {_mask_of(path) for path in paths}
        skipped.update({"masks without an image": len(without_image)} if without_image else {})
        file, names = _read_classes(root)
        first = int(config.reduce_zero_label)
        most = IGNORED - first
        if not 2 <= len(names) <= most:
            raise DataError(f"number of classes in {file} is {len(names)}; class numbers of 8 bits allow 2 to {most}")
        self._file, self._first, self._validates = file, first, split == "test"
        self._invalid = range(first + len(names), IGNORED)  # values
        self._table = bytes(IGNORED if value in (IGNORED, first - 1) else value - first for value in range(256))
        super().__init__(config, folder, paths, names, bytes([first]), skipped=skipped)
        self.check()

    def open(self, index: int) -> SegmentedImage:
        return SegmentedImage(self._open_image(index), self, index)

    def require_annotations(self) -> None:
        bad = []
        for index in range(len(self)):
            try:
                labelled = (self.classes_of(index, self.size(index)) != IGNORED).any()
            except BadImage as error:
                bad.append(error.copy())
                continue
            if labelled:
                return
        check_share(bad, len(self), self._config.max_bad_percent)
        unlabelled = f"0 or {IGNORED} (0 is no class with data.reduce_zero_label=true)" if self._first else f"{IGNORED}"
        raise DataError(f"no pixel of the masks in {self._masks} has a class: all are {unlabelled}; annotate them")

    def mask_name(self, index: int) -> str:
        """The path of the mask of an image."""
        return os.path.join(self._masks, _mask_of(self.path(index)))

    def classes_of(self, index: int, size: Size) -> Pixels:
        """The class of each pixel, uint8 ``[H, W]``, 255 for none, of an image of ``size``.

        Raises:
            BadImage: if the mask cannot be used.
        """
        path = self.mask_name(index)
        with _mask_errors(path):
            data = read_bytes(path)
            image = identify(BytesIO(data), path)
            self._require_mask(index, image, size)
            read_whole(data, image)
            values: npt.NDArray[np.uint8] = np.asarray(image, dtype=np.uint8)
        if image.mode == "L":  # Pillow stretches grey values of 2 and 4 bits to 0..255
            values = values // (255 // (2 ** data[_PNG_DEPTH] - 1))
        counts = Image.fromarray(values).histogram()
        odd = next((value for value in self._invalid if counts[value]), None)
        if odd is not None:
            last = self._first + self.num_classes - 1
            hint = "" if self._first or odd > last + 1 else " (data.reduce_zero_label=true numbers them from 1)"
            allowed = f"{self._first} to {last}{hint}, {IGNORED} for none"
            raise BadImage(path, _MASK, f"has value {odd}, and the classes of {self._file} are {allowed}")
        classes = bytearray(values.tobytes()).translate(self._table)  # faster than an array as index
        return np.frombuffer(classes, dtype=np.uint8).reshape(size)

    def _check_annotations(self, index: int, size: Size, decode: bool) -> None:
        if decode or self._validates:
            self.classes_of(index, size)
            return
        path = self.mask_name(index)
        with _mask_errors(path), open_regular(path) as file, identify(file, path) as image:
            self._require_mask(index, image, size)

    def _require_mask(self, index: int, image: Image.Image, size: Size) -> None:
        """Raise BadImage unless ``image`` can be the mask of image ``index`` of ``size``."""
        path = self.mask_name(index)
        if image.format != "PNG":
            raise BadImage(path, _MASK, f"is a {image.format} file; class numbers need a grey or palette PNG")
        if image.mode not in ("1", "L", "P"):
            raise BadImage(
                path, _MASK, f"has pixels of mode {image.mode}; class numbers need a grey or palette PNG of 8 bits"
            )
        if (image.height, image.width) != size:
            raise BadImage(
                path,
                _MASK,
                f"has {image.height}x{image.width} pixels, and {self.name(index)} {size[0]}x{size[1]} (height x width)",
            )


class SegmentedImage(AnnotatedImage):
    """An opened image and its mask."""

    def __init__(self, image: OpenImage, dataset: Ade20k, index: int) -> None:
        super().__init__(image)
        self._dataset, self._index = dataset, index

    def classes(self) -> Pixels:
        """The class of each pixel, uint8 ``[H, W]``, 255 for none. Raises BadImage if the mask cannot be used."""
        return self._dataset.classes_of(self._index, self.size)


@contextmanager
def _mask_errors(path: str) -> Iterator[None]:
    """As :func:`~dmjd.data.decode.decode_errors`, of the mask ``path``."""
    try:
        with decode_errors(path):
            yield
    except BadImage as error:
        if error.kind != "missing":
            raise
        raise BadImage(path, error.kind, "does not exist (each image needs a mask of its name)") from error


def _mask_of(path: str) -> str:
    """The path of an image's mask below the folder of masks."""
    return os.path.splitext(path)[0] + ".png"


def _read_classes(root: Path) -> tuple[Path, Sequence[str]]:
    """The file that names the classes, and their names."""
    file = next((root / name for name in (_LIST, _TABLE) if (root / name).is_file()), None)
    if file is None:
        raise DataError(
            f"{root} has no {_TABLE} and no {_LIST}; write the names of the classes into {_LIST}, a line each"
        )
    try:
        text = read_at_most(file, _MOST_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{file} cannot be read ({reason}); it has to be a text file in UTF-8") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if file.name == _LIST:
        names = lines
    else:
        rows = [line.split("\t") for line in lines[1:]]
        numbers = [row[0].strip() for row in rows]
        complete = all(len(row) > 1 and row[-1].strip() for row in rows)
        if not complete or numbers != [str(number) for number in range(1, len(rows) + 1)]:
            raise DataError(f"{file} needs a line of titles, and lines NUMBER, tab, ..., tab, NAME numbered from 1 on")
        names = [row[-1].strip() for row in rows]
        short = [name.split(",")[0].strip() for name in names]
        names = short if len(set(short)) == len(short) else names
    double = next((name for name, count in Counter(names).items() if count > 1), None)
    if double is not None:
        raise DataError(f"{file} has the class {double!r} twice; give each class a name of its own")
    return file, names
