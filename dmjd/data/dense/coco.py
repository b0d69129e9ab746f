"""COCO's layout of images with objects: folders of images, and one annotation file for each."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dmjd.config.dense import DetectDataConfig
from dmjd.data.dataset import OpenImage, Size, Split
from dmjd.data.dense.annotated import AnnotatedImage, AnnotatedImages
from dmjd.data.dense.instances import EMPTY, Instances, read_instances
from dmjd.data.dense.masks import Masks
from dmjd.errors import BadImage, DataError

MOST_OBJECTS = 1000
"""Limit of the objects in a training image: a mask takes 128 KiB at 1024x1024 pixels, and the images of a batch are
padded to the largest number."""


@dataclass(frozen=True)
class Objects:
    """The objects of an image, without crowd regions.

    boxes: float32 ``[M, 4]``, (x1, y1, x2, y2) in pixels of the image, inside it and not empty.
    labels: int64 ``[M]``, in ``range(num_classes)``.
    masks: M masks, drawn by :meth:`dmjd.data.dense.masks.Masks.render`.
    """

    boxes: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    masks: Masks


class CocoImage(AnnotatedImage):
    """An :class:`~dmjd.data.dataset.OpenImage` with its objects."""

    def __init__(self, image: OpenImage, objects: Objects) -> None:
        super().__init__(image)
        self._objects = objects

    def objects(self) -> Objects:
        return self._objects


class Coco(AnnotatedImages):
    """The images of ``root/NAME/`` and ``root/annotations/instances_NAME.json``, in the order of their ids.

    NAME is ``config.train`` or ``config.val``. Labels number the categories in the order of their ids, which may have
    gaps. In training, images without a usable object are left out. An object is usable if it is no crowd region, its
    box has an area inside the image, and it has a mask. :attr:`skipped` has the number of images and annotations that
    are left out, by kind.

    The EXIF orientation of images is ignored, as everywhere in dmjd and in COCO's annotations.

    Args:
        config: the images.
        split: "train", or "test" for the validation images.

    Attributes:
        annotation_file: path of the annotation file, for evaluations.
        category_ids: category id of each label.
        most_objects: largest number of objects in an image.

    Raises:
        DataError: if the folder, the annotation file or an image is missing or cannot be used; see
            :func:`~dmjd.data.dense.instances.read_instances`.
        NoSplit: if there is no annotation file.
    """

    def __init__(self, config: DetectDataConfig, split: Split) -> None:
        if config.root is None:
            raise DataError("data.name=coco needs data.root, the folder with annotations/ and the folders of images")
        name = config.train if split == "train" else config.val
        folder = Path(config.root) / name
        self.annotation_file = Path(config.root) / "annotations" / f"instances_{name}.json"
        found = read_instances(self.annotation_file)
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; put the images of {self.annotation_file} there")
        counts, skipped = np.diff(found.first), dict(found.skipped)
        kept = np.flatnonzero(counts) if split == "train" else np.arange(len(counts))
        if len(kept) < len(counts):
            skipped[EMPTY] = len(counts) - len(kept)
        self.most_objects = int(counts.max())
        if split == "train" and self.most_objects > MOST_OBJECTS:
            raise DataError(
                f"annotation file {self.annotation_file} has {self.most_objects} objects in image "
                f"{found.names[int(counts.argmax())]}; training takes at most {MOST_OBJECTS} in an image: cut it into "
                "smaller images, or annotate groups as one object with iscrowd=1"
            )
        self.category_ids = found.category_ids
        self._image_ids = found.image_ids[kept]
        self._spans = np.column_stack((found.first[kept], found.first[kept + 1]))
        self._boxes, self._labels, self._masks = found.boxes, found.labels, found.masks
        self.skipped = skipped
        if not len(kept):
            self.require_annotations()
        self._real = os.path.realpath(folder)
        super().__init__(
            config,
            folder,
            [found.names[place] for place in kept.tolist()],
            found.classes,
            _digest(found),
            found.sizes[kept],
            skipped,
        )
        self.check()

    def open(self, index: int) -> CocoImage:
        self._check_place(index)
        opened = self._open_image(index)
        self._check_annotations(index, opened.size, decode=False)
        first, last = self._spans[index].tolist()
        masks = Masks(self._masks, range(first, last), opened.size)
        return CocoImage(opened, Objects(self._boxes[first:last], self._labels[first:last], masks))

    def require_annotations(self) -> None:
        if len(self._boxes):
            return
        found = ", ".join(f"{kind}: {count}" for kind, count in self.skipped.items() if kind != EMPTY)
        raise DataError(
            f"annotation file {self.annotation_file} has no usable object ({found or 'no annotations'}); an object "
            "needs iscrowd=0, a bbox with an area in its image, and a segmentation (polygons or run lengths)"
        )

    def image_id(self, index: int) -> int:
        """The id of an image in the annotation file."""
        return int(self._image_ids[index])

    def _check_annotations(self, index: int, size: Size, decode: bool) -> None:
        self._check_place(index)
        height, width = self._sizes[index].tolist()
        if size != (height, width):
            known = f"and {self.annotation_file} gives {height}x{width}"
            raise BadImage(self.name(index), "annotation", f"has {size[0]}x{size[1]} pixels (height x width), {known}")

    def _check_place(self, index: int) -> None:
        """The annotation file names the images: it must not lead to other files by links."""
        name = self.name(index)
        if not os.path.realpath(name).startswith(self._real + os.sep):
            raise BadImage(name, "unreadable", f"is a link out of {self._real}")


def _digest(found: Instances) -> bytes:
    """Identifies the annotations in a run."""
    digest = hashlib.sha256(repr(found.category_ids).encode())
    masks = found.masks
    for part in (found.image_ids, found.first, found.boxes, found.labels, masks.points, masks.polygons, masks.runs):
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()
