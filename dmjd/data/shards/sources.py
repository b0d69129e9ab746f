"""Sources of a shard build: a folder, webdataset tars, COCO or ADE20K, detected by their files."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dmjd.config.data import ENDINGS
from dmjd.data.held_out import HeldOut, one_sided, report_one_sided
from dmjd.data.regular import only_files
from dmjd.data.shards.index import MANIFEST, MOST_IMAGE_BYTES, load
from dmjd.data.shards.location import check_below
from dmjd.data.shards.pool import each
from dmjd.data.shards.sample import read_errors
from dmjd.data.shards.tar import TarSample, tar_samples
from dmjd.errors import BadImage, DataError
from dmjd.files import open_regular, read_at_most
from dmjd.safe_load import JSON_BYTES, parse_json

_STAT_THREADS = 16  # stat waits for network file systems
_NO_LABEL = -1
_BAD_LABEL = -2
_LEFT_OUT = -3
_MOST_ANNOTATION_BYTES = 1 << 30
_LABEL_DIGITS = 6  # bounds the list of class names, which has one per number up to the highest


class Item(NamedTuple):
    """A source image: ``size`` bytes at ``offset`` of the file ``path``; size -1 if it is missing.

    ``name``: its name in errors; ``stem``: the end of its key in a shard; ``label``: -1 for none.
    """

    name: str
    stem: str
    path: str
    offset: int
    size: int
    label: int

    def place(self, root: str) -> str:
        """Its path below ``root``; of an image in a tar, the tar's name and the image's key."""
        if self.name == self.path:
            return Path(self.path).relative_to(root).as_posix()
        return f"{Path(self.path).name}/{self.name.removeprefix(f'{self.path}: ')}"

    def read(self) -> bytes:
        """Read the bytes of the image.

        Raises:
            BadImage: if it is missing, unreadable, shorter than when it was listed, or has no valid label.
        """
        if self.label == _LEFT_OUT:
            fault = "is a link, or a further image of its key (up to the first dot) without a label of its own"
            raise BadImage(self.name, "extra", fault)
        if self.size < 0:
            raise BadImage(self.name, "missing", "does not exist")
        if self.label == _BAD_LABEL:
            fault = f"has a cls member that is not a class number of up to {_LABEL_DIGITS} digits"
            raise BadImage(self.name, "label", fault)
        if self.size > MOST_IMAGE_BYTES:
            raise BadImage(self.name, "too large", f"has {self.size} bytes, more than {MOST_IMAGE_BYTES}")
        with read_errors(self.name), open_regular(self.path) as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if len(data) < self.size:
            raise BadImage(self.name, "truncated", f"ends after {len(data)} of {self.size} bytes")
        return data


class Source(NamedTuple):
    """The listed images. ``splits``: "train" and perhaps "val"; ``classes``: names of the labels of both."""

    kind: str
    splits: dict[str, list[Item]]
    classes: tuple[str, ...]


def split_source(source: Source, src: str, held_out: HeldOut) -> Source:
    """``source`` with the images that are held out as its split "val"; their names are those below ``src``.

    Raises:
        DataError: if it has held-out images already, or one side would be empty.
    """
    if "val" in source.splits:
        raise DataError(f"{src} has a held-out split, for which val_percent cannot be set; leave it out")
    items = source.splits["train"]
    sides = held_out.sides(item.place(src) for item in items)
    held_out.require_both(sides, (item.place(src) for item in items), src, section="")
    report_one_sided(src, one_sided((item.label for item in items), sides, source.classes, section=""))
    splits = {
        split: [item for item, side in zip(items, sides, strict=True) if side == (split == "val")]
        for split in ("train", "val")
    }
    return source._replace(splits=splits)


def find_source(src: str, workers: int = 1, endings: Sequence[str] = ENDINGS) -> Source:
    """Detect the kind of source and list its images in a fixed order, without opening any.

    - ``*.tar`` in the folder, in its ``train`` and ``val`` or ``test``, or matched by ``src`` as a pattern: webdataset
      tars, labelled by their cls members. Class names are the numbers.
    - ``annotations/*_train2017.json`` beside ``train2017`` or ``images/train2017``: COCO. The images that the
      annotations list, without labels. Shards do not contain the annotations.
    - ``images/training`` beside ``images/validation``: ADE20K of the scene parsing challenge. Labels are the scenes of
      ``sceneCategories.txt`` if it exists. Shards do not contain the segmentation masks.
    - Any other folder: as ``data=folder``, in the same order and with the same labels.

    Args:
        src: a folder, a tar, or a pattern of tars.
        workers: number of processes that read tars.
        endings: endings of image files in a folder.

    Raises:
        DataError: if the source is none of these, or is damaged.
    """
    root = Path(src)
    tars = _find_tars(root)
    if any(tars.values()):
        return _from_tars(tars, workers)
    if not root.is_dir():
        raise DataError(f"{src} is neither a folder nor a tar; give a folder of images or of webdataset tars")
    if list(root.glob("annotations/*_train20??.json")):
        return _from_coco(root)
    if (root / "images" / "training").is_dir():
        return _from_ade(root)
    return _from_folder(root, endings)


def _find_tars(root: Path) -> dict[str, list[str]]:
    def matching(*patterns: str) -> list[str]:
        paths = next((found for pattern in patterns if (found := sorted(map(str, root.glob(pattern))))), [])
        return only_files(paths, str(root))

    if not root.is_dir():
        matches = [str(root)] if root.is_file() else sorted(glob.glob(str(root)))
        tars = bool(matches) and all(".tar" in Path(path).name for path in matches)
        return {"train": only_files(matches, str(root))} if tars else {}
    here = matching("*.tar")
    if here:
        return {"train": here}
    train, val = matching("train/*.tar"), matching("val/*.tar", "test/*.tar")
    if val and not train:
        raise DataError(f"{root} has tars of a held-out split and none in train/; put the training tars there")
    return {"train": train, "val": val} if val else {"train": train} if train else {}


def list_tar(path: str) -> list[TarSample]:
    """All samples of a tar; for errors see :func:`dmjd.data.shards.tar.tar_samples`."""
    return list(tar_samples(path))


def tar_items(path: str, sample: TarSample) -> Iterator[Item]:
    """The image of a sample of the tar at ``path``, then its extra members, which are listed as rejects."""
    stem = Path(sample.key).name
    if sample.size >= 0 or not sample.left_out:
        yield Item(f"{path}: {sample.key}", stem, path, sample.offset, sample.size, _label_of(sample))
    for name in sample.left_out:
        yield Item(f"{path}: {name}", stem, path, -1, -1, _LEFT_OUT)


def _label_of(sample: TarSample) -> int:
    """The class number of a cls member; -1 without one, -2 if it is not a number."""
    if sample.label is None:
        return _NO_LABEL
    text = sample.label.strip()
    return int(text) if text.isdigit() and len(text) <= _LABEL_DIGITS else _BAD_LABEL


def number_classes(labels: Iterable[int]) -> tuple[str, ...]:
    """Class names for numbered labels: the numbers up to the highest."""
    return tuple(map(str, range(max(labels, default=-1) + 1)))


def _from_tars(tars: dict[str, list[str]], workers: int) -> Source:
    splits = {}
    for split, paths in tars.items():
        listings = dict(each(list_tar, paths, workers, f"reading the tars of {split}"))
        splits[split] = [
            item for number, path in enumerate(paths) for sample in listings[number] for item in tar_items(path, sample)
        ]
    folder = Path(tars["train"][0]).parent
    names = load(folder).manifest.classes if (folder / MANIFEST).is_file() else ()  # of a shard set
    numbers = number_classes(item.label for items in splits.values() for item in items)
    return Source("tars", _filled(splits), names if len(names) >= len(numbers) else numbers)


def _from_folder(root: Path, endings: Sequence[str]) -> Source:
    from dmjd.data.folder import ImageFolder  # imports torch, which workers do not need

    divided = any((root / name).is_dir() for name in ("val", "test"))
    folders = {"train": ImageFolder(str(root), "train", channels=3, check="none", endings=endings)}
    if divided:
        folders["val"] = ImageFolder(str(root), "test", channels=3, check="none", endings=endings)
    for folder in folders.values():
        folder.report()
    splits = {
        split: _stat([(folder.name(index), folder.label(index)) for index in range(len(folder))])
        for split, folder in folders.items()
    }
    return Source("folder", splits, folders["train"].classes)


def _from_coco(root: Path) -> Source:
    splits = {}
    for split in ("train", "val"):
        years = sorted({path.stem[-4:] for path in root.glob(f"annotations/*_{split}20??.json")})
        if len(years) > 1:
            raise DataError(
                f"{root} has {split} images of {' and '.join(years)}; keep the annotations of one year there"
            )
        for year in years:
            # Captions, instances and key points list the same images; take the smallest file.
            path = min(root.glob(f"annotations/*_{split}{year}.json"), key=lambda path: (path.stat().st_size, path))
            try:
                content = parse_json(read_at_most(path, _MOST_ANNOTATION_BYTES), _MOST_ANNOTATION_BYTES)
                names = sorted(check_below(image["file_name"]) for image in content["images"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = f" ({error})" if isinstance(error, ValueError) else ""
                raise DataError(f"{path} is damaged or not a COCO list of images{reason}; fetch it again") from error
            folders = (root / f"{split}{year}", root / "images" / f"{split}{year}")
            folder = next((folder for folder in folders if folder.is_dir()), folders[0])
            paths = only_files([str(folder / name) for name in names], str(folder))
            splits[split] = _stat([(path, _NO_LABEL) for path in paths])
    return Source("coco", _filled(splits), ())


def _from_ade(root: Path) -> Source:
    scenes: dict[str, str] = {}
    listing = root / "sceneCategories.txt"
    if listing.is_file():
        try:
            text = read_at_most(listing, JSON_BYTES).decode()
        except ValueError as error:
            raise DataError(f"{listing} is damaged or not a list of scenes ({error}); fetch it again") from error
        rows = (line.split() for line in text.splitlines())
        scenes = {row[0]: row[1] for row in rows if len(row) == 2}
    classes = sorted(set(scenes.values()))
    numbers = {name: number for number, name in enumerate(classes)}
    splits = {}
    for split, name in (("train", "training"), ("val", "validation")):
        folder = root / "images" / name
        paths = only_files(sorted(str(path) for path in folder.glob("[!.]*")), str(folder))
        labels = [numbers.get(scenes.get(Path(path).stem, ""), _NO_LABEL) for path in paths]
        splits[split] = _stat(list(zip(paths, labels, strict=True)))
    return Source("ade20k", _filled(splits), tuple(classes))


def _filled(splits: dict[str, list[Item]]) -> dict[str, list[Item]]:
    if not splits.get("train"):
        raise DataError("the source has no training images; check its path")
    return {split: items for split, items in splits.items() if items}


def _stat(images: list[tuple[str, int]]) -> list[Item]:
    def size(image: tuple[str, int]) -> int:
        try:
            return os.stat(image[0]).st_size
        except OSError:
            return -1

    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        sizes = pool.map(size, images)
        return [
            Item(path, Path(path).stem, path, 0, size, label) for (path, label), size in zip(images, sizes, strict=True)
        ]
