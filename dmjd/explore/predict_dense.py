"""``dmjd predict`` of segmentation and detection runs: a map of classes for each image, or detections in COCO's format.

Files in the folder of the predictions:

    predictions.csv     a row for each image, also for one that cannot be read
    classes.csv         names, numbers and colours of the classes
    maps/NAME.png       (segmentation) the class of each pixel, as a number of the training annotations
    detections.json     (detection) boxes, scores and masks in COCO's results format
    images.json         (detection) the images and categories of detections.json in COCO's annotation format
    overlays/NAME.jpg   (overlays=true) the images under their predictions
"""

from __future__ import annotations

import csv
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TextIO, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dmjd.builders.segment import check_test
from dmjd.config import DetectConfig, SegmentConfig, SegmentDataConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset
from dmjd.data.dataset import ImageDataset, Size, Split
from dmjd.data.dense import detection as squares
from dmjd.data.dense import segmentation as views
from dmjd.data.image_files import ImageFiles
from dmjd.data.loader import BatchLoader
from dmjd.data.substitution import Substitution
from dmjd.data.waiting import Limit
from dmjd.data.workers import check_shared_memory
from dmjd.errors import BadImage, ConfigError, DataError, NoSplit
from dmjd.evaluate.detection import SHOWN_SCORE, entries_of, in_original, objects_of
from dmjd.evaluate.encoder import FrozenEncoder, loader_workers
from dmjd.evaluate.overlays import Map, Objects, overlay, palette
from dmjd.evaluate.segmentation import MapTesting, predictions
from dmjd.explore.embeddings import plain_name
from dmjd.explore.predict import MOST_CLASSES, PRINTED, PredictConfig, default_name, fault_of
from dmjd.explore.sources import check_output
from dmjd.files import standing_place
from dmjd.models.dense.detection import Detection
from dmjd.ops.images import normalise
from dmjd.parallel.world import alone
from dmjd.progress import Progress
from dmjd.runs.classes import read_category_ids

ROWS, CLASS_TABLE, MAPS, OVERLAYS = "predictions.csv", "classes.csv", "maps", "overlays"
DETECTIONS, IMAGES = "detections.json", "images.json"
_JPEG_QUALITY = 90
_MOST_WINDOWS, _MOST_IMAGES = 8, 4  # per forward pass: more take memory and no less time


class Part(NamedTuple):
    """Images to predict. split: empty without splits. names: of the images in the files that are written, with their
    suffixes. stems: of each image the path of its own files, below their folder and without a suffix; distinct."""

    split: str
    images: ImageDataset
    names: list[str]
    stems: list[str]


class Predicted(NamedTuple):
    """One image. row: of predictions.csv. amounts: pixels or objects of each class that occurs. line: for the terminal.
    fault: why it cannot be read."""

    row: list[Any]
    amounts: Mapping[str, int] = {}
    line: str = ""
    fault: str = ""


@dataclass
class Tally:
    """Sums over a part."""

    images: int = 0
    unreadable: int = 0
    first_fault: str = ""
    amounts: Counter[str] = field(default_factory=Counter)


def predict_dense(frozen: FrozenEncoder, config: PredictConfig) -> Iterator[str]:
    """Predict, write the folder, and describe it.

    Raises:
        ConfigError: for keys that such a run does not have, and a folder that cannot be written.
        DataError: if a file cannot be written.
    """
    segments = isinstance(frozen.trained, SegmentConfig)
    kind = "segmentation" if segments else "detection"
    for key in ("labelled", "neighbours", *(["min_score"] if segments else [])):
        if getattr(config, key) is not None:
            raise ConfigError(
                f"{key} has no meaning for a {kind} run such as checkpoint={config.checkpoint}; remove it"
            )
    task = (_Segmentation if segments else _Detection)(frozen, config)
    folder = _folder(frozen, config)
    parts = _parts(frozen, config)
    few = sum(len(part.images) for part in parts) <= PRINTED
    replaced, tallies = folder.exists(), {part.split: Tally() for part in parts}
    try:
        with _draft_of(folder) as draft, open(draft / ROWS, "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\r\n")
            rows.writerow(task.head)
            for part, found in task.predicted(parts, draft):
                tally = tallies[part.split]
                tally.images += 1
                tally.amounts.update(found.amounts)
                if found.fault:
                    tally.unreadable += 1
                    tally.first_fault = tally.first_fault or f"{found.row[0]} {found.fault}"
                rows.writerow([*found.row, *[""] * (len(task.head) - len(found.row))])
                if few:
                    yield f"{found.row[0]}: {found.fault or found.line}"
    except OSError as error:
        raise DataError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    for split, tally in tallies.items():
        yield from _described(split, tally, task)
    if replaced:
        yield f"replaced the earlier {folder.name}"
    yield str(folder)


class _Task(ABC):
    """The parts in which segmentation and detection differ.

    head: titles of the columns of predictions.csv.
    """

    head: list[str]

    def __init__(self, frozen: FrozenEncoder, config: PredictConfig) -> None:
        assert frozen.objective is not None
        assert isinstance(frozen.trained, SegmentConfig | DetectConfig)
        self._frozen, self._config, self._model = frozen, config, frozen.objective
        classes = frozen.trained.head.num_classes or len(frozen.classes)
        self._names = [*map(plain_name, frozen.classes), *map(str, range(len(frozen.classes), classes))]

    @abstractmethod
    def predicted(self, parts: Sequence[Part], folder: Path) -> Iterator[tuple[Part, Predicted]]:
        """The prediction of each image, in order, after its files are written below ``folder``."""

    @abstractmethod
    def shares(self, amounts: Mapping[str, int]) -> str:
        """The classes of which most occurs."""

    def _loaded(self, batches: Any, count: int, step: int, nbytes: int, images: int) -> Iterator[Sequence[Batch]]:
        """The batches of a part, ``step`` at a time; ``count`` of them, of at most ``nbytes``, of ``images``."""
        workers = loader_workers(count, 1) if self._config.workers is None else self._config.workers
        check_shared_memory(nbytes, workers)
        limit = Limit(self._frozen.data.timeout, finishes=False)
        loader = BatchLoader(batches, 0, count, workers, pin_memory=False, limit=limit)
        with Progress("images", images, images=1) as bar, closing(iter(loader)) as found:
            for _ in range(0, count, step):
                taken = list(islice(found, step))
                yield taken
                bar.advance(len(taken[0].sample_ids))

    def _normalised(self, images: Tensor) -> Tensor:
        data = self._frozen.data
        return normalise(images.to(self._frozen.device), tuple(data.mean), tuple(data.std))

    def _overlay(self, folder: Path, part: Part, index: int, found: Map | Objects) -> None:
        if self._config.overlays:
            picture = Image.fromarray(overlay(part.images.image(index), found, self._names))
            picture.save(_made(folder / OVERLAYS, part.stems[index], ".jpg"), quality=_JPEG_QUALITY)

    def _classes(self, folder: Path, numbers: Sequence[int]) -> None:
        """Write classes.csv."""
        with open(folder / CLASS_TABLE, "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\r\n")
            rows.writerow(["number", "name", "colour"])
            for number, name, colour in zip(numbers, self._names, palette(len(self._names)).tolist(), strict=True):
                rows.writerow([number, name, "#{:02x}{:02x}{:02x}".format(*colour)])


class _Segmentation(_Task):
    """Maps of classes, tested as in the validations of the run but for the keys of ``test`` that are given."""

    def __init__(self, frozen: FrozenEncoder, config: PredictConfig) -> None:
        super().__init__(frozen, config)
        trained, data = frozen.trained, frozen.data
        assert isinstance(trained, SegmentConfig)
        if not isinstance(data, SegmentDataConfig):  # of data=folder, which has no maps of classes
            data = replace(trained.data, image_size=data.image_size)
        given = {key: value for key, value in vars(config.test).items() if value not in (None, "run")}
        test = replace(trained.test, **given)
        check_test(replace(trained, data=data, test=test))
        self._testing = MapTesting.of(test, data, trained.backbone.patch_size)
        self._first = int(data.reduce_zero_label)  # number of class 0
        self.head = ["name", "map", "height", "width", "error", *self._names]

    def predicted(self, parts: Sequence[Part], folder: Path) -> Iterator[tuple[Part, Predicted]]:
        self._classes(folder, range(self._first, self._first + len(self._names)))
        colours = [0] * (3 * self._first) + palette(len(self._names)).flatten().tolist()
        testing, world = self._testing, alone(self._frozen.device)
        scales = len(testing.resizes)
        for part in parts:
            images = part.images
            nbytes = max(short * longest for short, longest in testing.resizes) * images.channels
            loaded = self._loaded(_Views(images, testing), len(images) * scales, scales, nbytes, len(images))
            for index, batches in enumerate(loaded):
                height, width = batches[0].labels.tolist()
                if not height:
                    fault = fault_of(images, index)
                    yield part, Predicted([part.names[index], "", "", "", fault], fault=fault)
                    continue
                windows = testing.calls((height, width))
                size = min(self._config.batch_size, windows, _MOST_WINDOWS) if testing.slide else 1
                ((_, classes, _),) = predictions(self._logits, batches, testing, size, -(-windows // size), world)
                found = classes.cpu().numpy()
                picture = Image.fromarray(found + np.uint8(self._first))
                picture.putpalette(colours)
                file = _made(folder / MAPS, part.stems[index], ".png")
                picture.save(file)
                self._overlay(folder, part, index, found)
                counts = np.bincount(found.ravel(), minlength=len(self._names)).tolist()
                amounts = {name: count for name, count in zip(self._names, counts, strict=True) if count}
                row = [part.names[index], plain_name(str(file.relative_to(folder))), height, width, ""]
                row += [f"{count / found.size:.6g}" for count in counts]
                yield part, Predicted(row, amounts, self.shares(amounts))

    def _logits(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self._model(self._normalised(images))
        return found

    def shares(self, amounts: Mapping[str, int]) -> str:
        total, most = sum(amounts.values()), Counter(amounts).most_common(MOST_CLASSES)
        return ", ".join(f"{name} {100 * count / total:.1f} %" for name, count in most)


class _Views:
    """Batches by number for a loader, of each image one for each of the resizes, as
    :class:`~dmjd.evaluate.segmentation.ScaledImages` has them; an image that cannot be read has height 0."""

    def __init__(self, images: ImageDataset, testing: MapTesting) -> None:
        self._images, self._resizes = images, testing.resizes

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        index, place = divmod(number, len(self._resizes))
        try:
            opened = self._images.open(index)
            pixels, size = views.test_image(opened, self._resizes[place]), opened.size
        except BadImage:
            pixels, size = np.zeros((1, 1, self._images.channels), np.uint8), (0, 0)
        return Batch(torch.from_numpy(pixels)[None], torch.tensor([index]), torch.tensor(size)), ()


class _Detection(_Task):
    """Detections of the objects of an image."""

    def __init__(self, frozen: FrozenEncoder, config: PredictConfig) -> None:
        super().__init__(frozen, config)
        self.head = ["name", "image_id", "height", "width", "error", "detections", "classes"]
        assert isinstance(self._model, Detection)
        self._detector = self._model
        own = read_category_ids(frozen.path) or list(range(1, len(frozen.classes) + 1))
        self._categories = own[: len(frozen.classes)]
        self._names = self._names[: len(self._categories)]

    def predicted(self, parts: Sequence[Part], folder: Path) -> Iterator[tuple[Part, Predicted]]:
        self._classes(folder, self._categories)
        known: list[dict[str, Any]] = []
        size, device = self._frozen.size, self._frozen.device
        labels = {category: label for label, category in enumerate(self._categories)}
        with open(folder / DETECTIONS, "w", encoding="utf-8") as file:
            entries = _JsonList(file)
            for part in parts:
                images, batch_size = part.images, min(self._config.batch_size, len(part.images), _MOST_IMAGES)
                count = -(-len(images) // batch_size)
                nbytes = Batch.nbytes(batch_size, [size], images.channels)
                for (batch,) in self._loaded(_Squares(images, batch_size, size), count, 1, nbytes, len(images)):
                    valid, sizes = batch.labels[:, :2], batch.labels[:, 2:].tolist()
                    with torch.no_grad():
                        detected = self._detector.detect(self._normalised(batch.images), valid.to(device))
                    for index, found, inner, (height, width) in zip(
                        batch.sample_ids.tolist(), detected, valid.tolist(), sizes, strict=True
                    ):
                        name = part.names[index]
                        if not height:
                            fault = fault_of(images, index)
                            yield part, Predicted([name, "", "", "", fault], fault=fault)
                            continue
                        number = getattr(images, "image_id", lambda _: len(known) + 1)(index)
                        known.append({"id": number, "file_name": name, "height": height, "width": width})
                        kept = self._kept(found)
                        own = entries_of(
                            in_original(kept, inner, (height, width)), (height, width), number, self._categories
                        )
                        entries.extend(own)
                        self._overlay(folder, part, index, objects_of(own, labels, SHOWN_SCORE))
                        amounts = Counter(self._names[labels[entry["category_id"]]] for entry in own)
                        shares, plural = self.shares(amounts), "s" * (len(own) != 1)
                        row = [name, number, height, width, "", len(own), shares]
                        yield (
                            part,
                            Predicted(row, amounts, f"{len(own)} detection{plural}: {shares}".removesuffix(": ")),
                        )
            entries.close()
        categories = [{"id": each, "name": name} for each, name in zip(self._categories, self._names, strict=True)]
        described = {"images": known, "annotations": [], "categories": categories}
        (folder / IMAGES).write_text(json.dumps(described) + "\n", encoding="utf-8")

    def _kept(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Detections of the data's classes that have the least score."""
        chosen = found["labels"] < len(self._categories)
        if self._config.min_score is not None:
            chosen &= found["scores"] >= self._config.min_score
        return {name: values[chosen] for name, values in found.items()}

    def shares(self, amounts: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {count}" for name, count in Counter(amounts).most_common(MOST_CLASSES))


class _Squares:
    """Batches by number for a loader: images padded to ``size``; ``labels`` int64 ``[B, 4]``: height and width without
    the padding, then those of the image, 0 for one that cannot be read."""

    def __init__(self, images: ImageDataset, batch_size: int, size: Size) -> None:
        self._images, self._batch_size, self._size = images, batch_size, size

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        start = number * self._batch_size
        ids = range(start, min(start + self._batch_size, len(self._images)))
        pixels, sizes = zip(*map(self._square, ids), strict=True)
        return Batch(torch.stack(pixels), torch.tensor(ids), torch.tensor(sizes)), ()

    def _square(self, index: int) -> tuple[Tensor, tuple[int, int, int, int]]:
        try:
            opened = self._images.open(index)
            square, valid = squares.test_image(opened, self._size)
        except BadImage:
            return torch.zeros(*self._size, self._images.channels, dtype=torch.uint8), (*self._size, 0, 0)
        return square, (*valid, *opened.size)


class _JsonList:
    """A JSON list that is written item by item."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._before = file, "["

    def extend(self, items: Sequence[Any]) -> None:
        for item in items:
            self._file.write(f"{self._before}{json.dumps(item)}")
            self._before = ",\n"

    def close(self) -> None:
        self._file.write("[]\n" if self._before == "[" else "]\n")


# Images, folders and lines -------------------------------------------------------------------------------------------


def _parts(frozen: FrozenEncoder, config: PredictConfig) -> list[Part]:
    """The images to predict, by split: by default the validation images."""
    if config.paths:
        channels = cast(Literal[1, 3], frozen.data.channels)
        return [_part("", ImageFiles(config.paths, channels), config.paths)]
    data = replace(frozen.data, check="none", max_bad_percent=100.0)

    def part(split: Split) -> Part:
        return _part(split, build_dataset(data, split), [data.root or ""])

    if config.split in ("train", "test", "auto"):
        return [part("train" if config.split == "train" else "test")]
    try:
        return [part("train"), part("test")]
    except NoSplit:
        return [part("train")]


def _part(split: str, images: ImageDataset, roots: Sequence[str]) -> Part:
    folders = [root for root in roots if os.path.isdir(root)]
    names, stems, taken = [], [], set[str]()
    for index in range(len(images)):
        below = _below(images.name(index), folders)
        stem = str(below.with_suffix(""))
        number = 2
        while stem in taken:
            stem, number = f"{below.with_suffix('')}-{number}", number + 1
        taken.add(stem)
        names.append(plain_name(str(below)))
        stems.append(stem)
    return Part(split, images, names, stems)


def _below(name: str, folders: Sequence[str]) -> PurePosixPath:
    """The path of an image below the one of ``folders`` that it is in, behind that folder's name if there are several;
    of another image its last part. It never leads out of the folder that it is written to."""
    for folder in sorted(folders, key=len, reverse=True):
        path = os.path.relpath(name, folder)
        if not path.startswith(os.pardir + os.sep):
            inner = [part for part in PurePosixPath(path).parts if part not in (os.pardir, os.sep)]
            return PurePosixPath(*[os.path.basename(os.path.abspath(folder))] * (len(folders) > 1), *inner)
    return PurePosixPath(os.path.basename(name))


def _made(folder: Path, stem: str, suffix: str) -> Path:
    """The path of a file below ``folder``, whose own folder is created."""
    path = folder / f"{stem}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _folder(frozen: FrozenEncoder, config: PredictConfig) -> Path:
    """The folder of the predictions. Raises ConfigError if it cannot be written, or holds anything else."""
    default = frozen.run.path / "predictions" / default_name(frozen, config)
    folder = check_output(default if config.output is None else Path(config.output))
    if folder.exists() and any(folder.iterdir()) and not (folder / ROWS).is_file():
        raise ConfigError(f"{folder} holds other files than predictions; set another folder with output=FOLDER")
    inside = [each for each in config.paths or () if Path(each).resolve().is_relative_to(folder.resolve())]
    if inside:
        raise ConfigError(f"{inside[0]} is in {folder}, which is replaced; set another folder with output=FOLDER")
    return folder


@contextmanager
def _draft_of(folder: Path) -> Iterator[Path]:
    """A folder to write to, which replaces ``folder`` after the block, and is removed if that raises."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".predictions-", dir=standing_place(folder.parent)) as scratch:
        draft = Path(scratch) / "new"
        draft.mkdir()
        yield draft
        if folder.exists():
            folder.rename(Path(scratch) / "earlier")
        draft.rename(folder)


def _described(split: str, tally: Tally, task: _Task) -> Iterator[str]:
    parts = [f"{tally.images} image{'s' * (tally.images != 1)}"]
    if tally.unreadable:
        parts.append(f"{tally.unreadable} of them cannot be read, the first: {tally.first_fault}")
    yield f"{split}: " * bool(split) + "; ".join(parts)
    if tally.amounts:
        more = len(tally.amounts) - MOST_CLASSES
        yield f"predicted: {task.shares(tally.amounts)}" + f" and {more} more classes" * (more > 0)
