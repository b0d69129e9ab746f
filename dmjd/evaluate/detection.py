"""Object detection and instance segmentation: detections in COCO's format, and box and mask AP over all ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.data.batch import Batch
from dmjd.data.dataset import ImageDataset, OpenImage, Size, evenly
from dmjd.data.dense.coco import Coco
from dmjd.data.dense.detection import test_image
from dmjd.data.loader import BatchLoader
from dmjd.data.substitution import Substitution
from dmjd.data.waiting import Limit
from dmjd.data.workers import check_shared_memory
from dmjd.errors import DataError
from dmjd.evaluate.overlays import EXAMPLES, Objects, predictions_picture, write_validation
from dmjd.evaluate.share import Share, together
from dmjd.evaluate.validation import AVERAGE, TRAINED, Averaged, class_names
from dmjd.parallel.world import World
from dmjd.progress import Progress
from dmjd.runs.paths import RunPaths
from dmjd.safe_load import json_items

if TYPE_CHECKING:
    from dmjd.config import DetectConfig

MAX_DETECTIONS = 100
"""Detections of an image that COCO's AP counts, those of the highest scores."""
_THRESHOLD = 0.5
_GATHERED = 20_000
"""Detections of each rank that are sent at a time."""

Detect = Callable[[Tensor, Tensor], Sequence[Mapping[str, Tensor]]]
"""Images uint8 ``[B, H, W, C]`` and their (height, width) without padding, int64 ``[B, 2]`` -> of each image
``boxes [n, 4]`` in its pixels, ``scores [n]``, ``labels [n]``, ``masks [n, m, m]`` (probabilities in the boxes)."""
Entry = dict[str, Any]
"""One detection in COCO's results format."""


class Validated(Averaged, Protocol):
    """The parts of a detection step that a validation uses."""

    def detect(self, images: Tensor, sizes: Tensor) -> Sequence[Mapping[str, Tensor]]:
        """:data:`Detect`, in evaluation mode. Collective where the engine is."""
        ...


class DetectionScores(NamedTuple):
    """AP in per cent of boxes and masks.

    scores: ``box_ap`` and ``mask_ap`` (mean over IoU .5 to .95), ``*_ap50``, ``*_ap75``, and ``*_aps``, ``*_apm``,
    ``*_apl`` of small, medium and large objects; None if there are no such objects. of_classes: ``box_ap`` and
    ``mask_ap`` of each class, None for a class without objects.
    """

    scores: dict[str, float | None]
    of_classes: dict[str, list[float | None]]


def validate_detection(
    step: Validated, dataset: ImageDataset, config: DetectConfig, world: World, run: RunPaths | None = None, at: int = 0
) -> dict[str, float | None]:
    """AP of the current weights, and of their average if there is one, as columns of log.jsonl. Collective.

    Args:
        dataset: the validation images.
        run: gets a picture of detections and the AP of each class (:mod:`dmjd.evaluate.overlays`), of optimizer step
            ``at``; on rank 0.

    Returns:
        The scores of :class:`DetectionScores` as ``val_box_ap`` etc., and with ``ema_decay`` ``val_ema_box_ap`` etc.
        The same values on every rank.

    Raises:
        StopRequested: on every rank, if one is asked to stop meanwhile.
        DataError: on every rank, if an image cannot be read, or there are no objects.
    """
    assert isinstance(dataset, Coco)
    micro_batch = config.batch_size // (config.engine.grad_accum_steps * world.size)
    data = config.data
    size = data.image_size[0], data.image_size[1]

    def scores(prefix: str, main: bool) -> dict[str, float | None]:
        entries = detections(step.detect, dataset, size, micro_batch, config.workers, data.timeout, world)
        found = world.on_main(partial(score_detections, entries, dataset))
        if run is not None and main and world.is_main:
            write_validation(run, at, _picture(dataset, entries), class_names(dataset), found.of_classes)
        return {f"{prefix}{name}": value for name, value in found.scores.items()}

    trained = scores(TRAINED, not step.averages)
    if not step.averages:
        return trained
    with step.with_average():
        return trained | scores(AVERAGE, True)


def detections(
    detect: Detect,
    dataset: Coco,
    size: Size,
    batch_size: int,
    workers: int,
    timeout: float,
    world: World,
) -> list[Entry]:
    """Detections of all images in COCO's results format, on rank 0; empty on the others. Collective over ``world``.

    Every rank calls ``detect`` equally often with batches of one size, as sharded engines need: where its images end,
    the last image of the data set is repeated and left out. The order is that of the images, for any number of ranks.

    Args:
        size: height and width to which images are resized without distortion, and padded.
        batch_size: images per forward pass and process, at most.
        workers: loader workers per process, at most one per batch. timeout: minutes, as ``data.timeout``.
    """
    share = Share(dataset, batch_size, world)
    workers = min(workers, share.passes) if share.passes > 1 else 0
    check_shared_memory(Batch.nbytes(share.batch_size, [size], dataset.channels), workers)
    squares = PaddedImages(share, share.batch_size, size)
    loader = BatchLoader(squares, 0, share.passes, workers, pin_memory=False, limit=Limit(timeout, finishes=False))
    own: list[Entry] = []
    images = share.batch_size * world.size
    with Progress("validation batch", share.passes, images=images) as bar, closing(iter(loader)) as batches:
        for _ in range(share.passes):
            batch = together(partial(next, batches), world)
            counted = share.counted(batch.sample_ids).tolist()
            found = detect(batch.images.to(world.device, non_blocking=True), batch.labels.to(world.device))
            places = share.originals(batch.sample_ids.tolist())
            for number, valid, each, counts in zip(places, batch.labels.tolist(), found, counted, strict=True):
                if counts:
                    placed = in_original(each, valid, dataset.size(number))
                    own += entries_of(placed, dataset.size(number), dataset.image_id(number), dataset.category_ids)
            bar.advance()
    return _gathered(own, world)


class PaddedImages:
    """Batches by number for a loader: images resized into ``size`` without distortion, and padded.

    ``images`` uint8 ``[B, H, W, C]``; ``labels`` int64 ``[B, 2]``: height and width without the padding.
    """

    def __init__(self, dataset: ImageDataset, batch_size: int, size: Size) -> None:
        self._dataset, self._batch_size, self._size = dataset, batch_size, size

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        start = number * self._batch_size
        ids = range(start, min(start + self._batch_size, len(self._dataset)))
        return padded_images([self._dataset.open(index) for index in ids], self._size, ids), ()


def padded_images(opened: Sequence[OpenImage], size: Size, ids: Sequence[int]) -> Batch:
    """A batch of :class:`PaddedImages`."""
    images, valid = zip(*(test_image(each, size) for each in opened), strict=True)
    return Batch(torch.stack(images), torch.tensor(ids), torch.tensor(valid))


def in_original(found: Mapping[str, Tensor], valid: Sequence[int], size: Size) -> dict[str, Tensor]:
    """``found`` of an image that was resized to ``valid`` (height, width), in the pixels of the image of ``size``.

    Boxes are clipped to the image, and those without area left out.
    """
    scale = torch.tensor([size[1] / valid[1], size[0] / valid[0]] * 2, device=found["boxes"].device)
    limit = torch.tensor([size[1], size[0]] * 2, device=scale.device)
    boxes = (found["boxes"].float() * scale).clamp(min=0).minimum(limit)
    kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
    return {name: (boxes if name == "boxes" else found[name])[kept] for name in ("boxes", "scores", "labels", "masks")}


def entries_of(
    found: Mapping[str, Tensor], size: Size, image_id: int | str, category_ids: Sequence[int]
) -> list[Entry]:
    """Detections in the original image, of ``size``, in COCO's results format.

    Args:
        found: of :func:`in_original`.
        category_ids: label -> COCO category id. Further labels, of a wider head, are left out.
    """
    known = found["labels"] < len(category_ids)
    found = {name: value[known] for name, value in found.items()}
    rows = zip(
        found["boxes"].tolist(),
        found["scores"].tolist(),
        found["labels"].tolist(),
        encoded(found["masks"], found["boxes"], size),
        strict=True,
    )
    return [
        {
            "image_id": image_id,
            "category_id": category_ids[label],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": score,
            "segmentation": mask,
        }
        for (x1, y1, x2, y2), score, label, mask in rows
    ]


def encoded(masks: Tensor, boxes: Tensor, size: Size) -> Iterator[dict[str, Any]]:
    """Compressed run lengths of masks in the image, in COCO's format; arguments as for :func:`paste`."""
    from faster_coco_eval.core import mask

    for top, left, part in paste(masks, boxes, size):
        runs = _runs(part.cpu().numpy(), top, left, size)
        counts = mask.frPyObjects({"size": list(size), "counts": runs}, *size)["counts"]
        yield {"size": list(size), "counts": counts.decode()}


def _runs(part: npt.NDArray[np.bool_], top: int, left: int, size: Size) -> list[int]:
    """Lengths of runs of zeros and ones in turn, down the columns of an image whose mask is ``part`` at (top, left)."""
    columns = np.pad(part.T, ((0, 0), (1, 1)))
    column, row = np.nonzero(columns[:, 1:] != columns[:, :-1])
    changes = (left + column) * size[0] + top + row
    # A run that goes on in the next column has two changes in one place.
    changes = changes[(np.diff(changes, prepend=-1) != 0) & (np.diff(changes, append=-1) != 0)]
    runs: list[int] = np.diff(changes, prepend=0, append=size[0] * size[1]).tolist()
    return runs if runs[-1] else runs[:-1]


def paste(masks: Tensor, boxes: Tensor, size: Size) -> Iterator[tuple[int, int, Tensor]]:
    """Masks of boxes as masks of the image, with detectron2's rule: bilinear sampling at the pixels' centres, >= .5.

    Args:
        masks: float ``[n, m, m]``, probabilities. boxes: ``[n, 4]`` of positive area in an image of ``size``.

    Yields:
        top, left and bool ``[h, w]``: the part of each mask that is not 0.
    """
    for each, box in zip(masks.float(), boxes.tolist(), strict=True):
        left, right = _pixels(box[0], box[2], size[1])
        top, bottom = _pixels(box[1], box[3], size[0])
        x = _places(left, right, box[0], box[2], masks.device)
        y = _places(top, bottom, box[1], box[3], masks.device)
        grid = torch.stack(torch.broadcast_tensors(x[None, :], y[:, None]), dim=-1)
        sampled = F.grid_sample(each[None, None], grid[None], align_corners=False)
        yield top, left, sampled[0, 0] >= _THRESHOLD


def _pixels(low: float, high: float, side: int) -> tuple[int, int]:
    """First and last + 1 of the pixels that a side of a box touches."""
    return max(int(np.floor(low)) - 1, 0), min(int(np.ceil(high)) + 1, side)


def _places(start: int, stop: int, low: float, high: float, device: torch.device) -> Tensor:
    """Centres of the pixels in the coordinates of grid_sample: -1 and 1 are the sides of the box."""
    centres = torch.arange(start, stop, device=device, dtype=torch.float32) + 0.5
    return (centres - low) / (high - low) * 2 - 1


def _gathered(own: list[Entry], world: World) -> list[Entry]:
    """The entries of all ranks in their order, on rank 0; in parts, so that other ranks never hold all of them."""
    if world.size == 1:
        return own
    every: list[list[Entry]] = [[] for _ in range(world.size)]
    for start in range(0, max(world.gather(len(own))), _GATHERED):
        parts = world.gather(own[start : start + _GATHERED])
        if world.is_main:
            for found, part in zip(every, parts, strict=True):
                found += part
    return [entry for part in every for entry in part]


def write_results(file: Path, entries: Sequence[Entry]) -> None:
    """Write detections as a COCO results file."""
    from dmjd.files import replace_file

    replace_file(file, json.dumps(entries) + "\n")


def score_detections(entries: Sequence[Entry], dataset: Coco) -> DetectionScores:
    """AP of ``entries`` on the images of ``dataset``, with its annotation file.

    Raises:
        DataError: if the images have no objects.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    truth = COCO(_truth(dataset), print_function=_quiet)
    scores: dict[str, float | None] = {}
    of_classes: dict[str, list[float | None]] = {}
    for name, kind in (("box", "bbox"), ("mask", "segm")):
        # Without the boxes, sizes of detections are areas of masks.
        keys = ("image_id", "category_id", "score", kind if kind == "bbox" else "segmentation")
        found = truth.loadRes([{key: entry[key] for key in keys} for entry in entries])
        evaluation = COCOeval_faster(truth, found, kind, print_function=_quiet)
        evaluation.params.maxDets = [1, 10, MAX_DETECTIONS]
        evaluation.evaluate()
        evaluation.accumulate()
        precision = np.asarray(evaluation.eval["precision"])[..., -1]  # [IoU, recall, class, size of objects]
        parts = {
            "ap": precision[..., 0],
            "ap50": precision[0, ..., 0],
            "ap75": precision[5, ..., 0],
            **{f"ap{size}": precision[..., place] for place, size in enumerate("sml", 1)},
        }
        scores |= {f"{name}_{key}": _mean(part) for key, part in parts.items()}
        of_classes[f"{name}_ap"] = [_mean(precision[:, :, place, 0]) for place in range(precision.shape[2])]
    if scores["box_ap"] is None:
        raise DataError(f"{dataset.annotation_file} has no objects in the validation images, so there is no AP")
    return DetectionScores(scores, of_classes)


def _mean(precision: np.ndarray[Any, Any]) -> float | None:
    known = precision[precision > -1]
    return 100 * float(known.mean()) if known.size else None


def _quiet(*_: object) -> None:
    """In place of print."""


def _truth(dataset: Coco) -> dict[str, Any]:
    """The annotations of the data set's images in COCO's format, crowds included; their file was checked when the data
    set was opened.

    Annotations are numbered from 1, as COCO's code takes 0 for "not matched".
    """
    images = {dataset.image_id(number): dataset.size(number) for number in range(len(dataset))}
    annotations = list[dict[str, Any]]()
    with dataset.annotation_file.open("rb") as file:
        for _, each in json_items(file, ("annotations",)):
            size, box, area = images[each["image_id"]], each["bbox"], each.get("area")
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": each["image_id"],
                    "category_id": each["category_id"],
                    "bbox": box,
                    "area": area if isinstance(area, (int, float)) else box[2] * box[3],
                    "iscrowd": int(each.get("iscrowd", 0)),
                    "segmentation": _drawable(each.get("segmentation"), size),
                }
            )
    return {
        "images": [{"id": name, "height": size[0], "width": size[1]} for name, size in images.items()],
        "categories": [{"id": each} for each in dataset.category_ids],
        "annotations": annotations,
    }


def _drawable(segmentation: Any, size: Size) -> Any:
    """A mask that COCO's code draws in little memory: run lengths as they are; polygons of three corners or more, of
    which corners far outside the image are moved nearer; empty run lengths without any."""
    if isinstance(segmentation, dict):
        return segmentation
    polygons = [polygon for polygon in segmentation or () if len(polygon) >= 6]
    if not polygons:
        return {"size": list(size), "counts": [size[0] * size[1]]}
    height, width = size
    near = []
    for polygon in polygons:
        corners = np.array(polygon, dtype=np.float64).reshape(-1, 2)
        near.append(corners.clip((-width, -height), (2 * width, 2 * height)).ravel().tolist())
    return near


def _picture(dataset: Coco, entries: Sequence[Entry]) -> bytes:
    """Annotations and detections of some images, evenly spaced."""
    chosen = evenly(len(dataset), EXAMPLES).tolist()
    images = [dataset.image(number) for number in chosen]
    truths = [annotated_objects(dataset, number) for number in chosen]
    found = defaultdict[int, list[Entry]](list)
    for entry in entries:
        found[entry["image_id"]].append(entry)
    labels = {category: label for label, category in enumerate(dataset.category_ids)}
    shown = [objects_of(found[dataset.image_id(number)], labels, SHOWN_SCORE) for number in chosen]
    return predictions_picture(images, truths, shown, class_names(dataset))


SHOWN_SCORE = 0.5
"""Lowest score of the detections in pictures."""


def objects_of(entries: Sequence[Entry], labels: Mapping[int, int], min_score: float = 0.0) -> Objects:
    """Detections in COCO's format as objects to draw. ``labels``: COCO category id -> label."""
    from faster_coco_eval.core import mask

    chosen = [entry for entry in entries if entry["score"] >= min_score]
    boxes = np.array([entry["bbox"] for entry in chosen], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return Objects(
        boxes,
        np.array([labels[entry["category_id"]] for entry in chosen], dtype=np.int64),
        np.array([entry["score"] for entry in chosen]),
        [mask.decode(entry["segmentation"]).astype(bool) for entry in chosen],
    )


def annotated_objects(dataset: Coco, number: int) -> Objects:
    """The annotations of an image, without crowd regions, as objects to draw."""
    found = dataset.open(number).objects()
    height, width = dataset.size(number)
    masks = [found.masks.render(place, (0, 0, width, height), (height, width)) for place in range(len(found.masks))]
    return Objects(found.boxes, found.labels, None, [each.astype(bool) for each in masks])
