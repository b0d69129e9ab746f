"""Textured shapes before textured backgrounds, with annotations in the formats of ADE20K and COCO.

python docs/examples/generated_scenes/scenes.py FOLDER --images 5000 --val-images 500

writes, for `dmjd segment data.root=FOLDER` and `dmjd detect data.root=FOLDER`,

    images/{training,validation}/*.jpg         annotations/{training,validation}/*.png    objectInfo150.txt
    {train2017,val2017}/*.jpg                  annotations/instances_{train2017,val2017}.json

The two folders of images are the same files (hard links). An image depends on the seed, its split, its number, the size
and the classes, and on nothing else. Needs numpy and Pillow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

SHAPES = ("disc", "square", "triangle", "star", "cross")
TEXTURES = ("plain", "striped", "checked", "dotted")
CLASSES = (
    "plain disc",
    "striped disc",
    "plain square",
    "checked square",
    "striped triangle",
    "dotted triangle",
    "checked star",
    "dotted cross",
)
"""Classes of objects, "TEXTURE SHAPE"; colours are random."""
BACKGROUNDS = ("waves", "bricks", "grain")
"""Classes of backgrounds, which follow those of objects in ADE20K's numbers; COCO's annotations have none."""
FEWEST_PIXELS = 12
"""Objects of which fewer pixels are visible have no annotation in COCO's format."""

_SPLITS = (("training", "train2017"), ("validation", "val2017"))
_TRIES = 20  # of places for an object

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass
class Thing:
    """One object. mask: its visible pixels, bool ``[H, W]``; outline: float ``[n, 2]`` of (x, y), all of it."""

    label: int
    outline: npt.NDArray[np.float64]
    mask: Bools
    area: int
    crowd: bool = False


@dataclass
class Scene:
    """pixels: uint8 ``[H, W, 3]``; classes: uint8 ``[H, W]``, 0 for none, then objects, then backgrounds."""

    pixels: npt.NDArray[np.uint8]
    classes: npt.NDArray[np.uint8]
    things: list[Thing]


def write_scenes(
    folder: Path | str,
    images: int,
    val_images: int = 0,
    size: tuple[int, int] = (256, 256),
    classes: Sequence[str] = CLASSES,
    seed: int = 0,
) -> Path:
    """Write ``images`` training and ``val_images`` validation scenes into ``folder``, which is returned.

    Args:
        size: greatest (height, width). The first image of a split has it; the sides of the others are between 3/4 of it
            and it, odd ones among them.
        classes: names "TEXTURE SHAPE" of objects. ADE20K's numbers: 0 for none, then ``classes``, then
            :data:`BACKGROUNDS`. COCO's category ids have gaps: 1, 2, 4, 5, 7, 8, ...
        seed: any number >= 0.

    The second image of a split has no objects. One in five has a group of small objects that is one crowd annotation in
    COCO's format, one in five a grey bar of no class.
    """
    folder = Path(folder)
    for split, count in enumerate((images, val_images)):
        ade, coco = _SPLITS[split]
        for below in (f"images/{ade}", f"annotations/{ade}", coco):
            (folder / below).mkdir(parents=True, exist_ok=True)
        records: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            scene = make_scene(size, classes, seed, split, number)
            name = f"scene_{number + 1:06d}"
            image = folder / "images" / ade / f"{name}.jpg"
            Image.fromarray(scene.pixels).save(image, quality=92)
            labels = Image.fromarray(scene.classes)
            labels.putpalette(_palette(len(classes) + len(BACKGROUNDS) + 1))
            labels.save(folder / "annotations" / ade / f"{name}.png")
            _link(image, folder / coco / image.name)
            height, width = scene.classes.shape
            image_id = 1000 * (split + 1) + 3 * number
            records.append({"id": image_id, "file_name": image.name, "height": height, "width": width})
            for thing in scene.things:
                annotation = _annotation(thing, image_id, len(annotations) + 1)
                if annotation is not None:
                    annotations.append(annotation)
        categories = [
            {"id": category_id(label), "name": name, "supercategory": name.split()[-1]}
            for label, name in enumerate(classes)
        ]
        content = {"info": {}, "licenses": [], "images": records, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{coco}.json").write_text(json.dumps(content))
    names = [*(f"{name}, {name.split()[-1]}" for name in classes), *BACKGROUNDS]
    rows = [f"{number}\t0.1\t{images}\t{val_images}\t{int(n in BACKGROUNDS)}\t{n}" for number, n in enumerate(names, 1)]
    (folder / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]) + "\n")
    return folder


def category_id(label: int) -> int:
    """COCO's category id of a class of objects, numbered from 0."""
    return label + label // 2 + 1


def make_scene(size: tuple[int, int], classes: Sequence[str], seed: int, split: int, number: int) -> Scene:
    """Scene ``number`` of ``split`` (0: training, 1: validation)."""
    rng = np.random.default_rng([seed, split, number])
    height, width = size
    if number:
        height, width = (int(rng.integers(math.ceil(side * 3 / 4), side + 1)) for side in size)
    pixels, labels = _background(rng, height, width, len(classes))
    things: list[Thing] = []
    if number != 1:
        for _ in range(int(rng.integers(1, 7))):
            label = int(rng.integers(len(classes)))
            radius = min(height, width) * math.exp(rng.uniform(math.log(0.08), math.log(0.3)))
            _place(rng, pixels, labels, things, classes, label, radius)
        if rng.random() < 0.2:
            _place_crowd(rng, pixels, labels, things, classes)
    if rng.random() < 0.2:
        bar = max(2, int(height * rng.uniform(0.04, 0.12)))
        rows = slice(0, bar) if rng.random() < 0.5 else slice(height - bar, height)
        pixels[rows], labels[rows] = 0.5 + 0.1 * rng.standard_normal((), dtype=np.float32), 0
        for thing in things:
            thing.mask[rows] = False
    pixels += 0.02 * rng.standard_normal(pixels.shape, dtype=np.float32)
    return Scene((pixels.clip(0, 1) * 255).round().astype(np.uint8), labels, things)


def _background(
    rng: np.random.Generator, height: int, width: int, objects: int
) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """One or two backgrounds on both sides of a line: pixels float32 ``[H, W, 3]`` in [0, 1], and their classes."""
    y, x = np.mgrid[:height, :width].astype(np.float32)
    first, second = rng.permutation(len(BACKGROUNDS))[:2].tolist()
    angle, offset = rng.uniform(0, math.pi), rng.uniform(-0.5, 0.5)
    line = (x / width - 0.5) * math.cos(angle) + (y / height - 0.5) * math.sin(angle) < offset
    pixels = _stuff(rng, first, y, x)
    pixels[~line] = _stuff(rng, second, y, x)[~line]
    return pixels, np.where(line, objects + 1 + first, objects + 1 + second).astype(np.uint8)


def _stuff(rng: np.random.Generator, kind: int, y: Floats, x: Floats) -> Floats:
    if BACKGROUNDS[kind] == "waves":
        period, phase = rng.uniform(10, 20), rng.uniform(0, 6)
        blend = 0.5 + 0.5 * np.sin((y + 3 * np.sin(x / rng.uniform(6, 12))) * (2 * math.pi / period) + phase)
    elif BACKGROUNDS[kind] == "bricks":
        tall = int(rng.integers(7, 12))
        row = y // tall
        blend = (((y % tall) < 2) | (((x + (row % 2) * tall) % (2 * tall)) < 2)).astype(np.float32)
    else:
        small = rng.random((y.shape[0] // 3 + 1, y.shape[1] // 3 + 1), dtype=np.float32)
        blend = small.repeat(3, 0).repeat(3, 1)[: y.shape[0], : y.shape[1]]
    return _mix(rng, blend, 0.35)


def _mix(rng: np.random.Generator, blend: Floats, contrast: float) -> Floats:
    """Two random colours, mixed by ``blend`` in [0, 1]; ``contrast``: their least difference in one channel."""
    first = rng.random(3, dtype=np.float32)
    second = rng.random(3, dtype=np.float32)
    channel = int(rng.integers(3))
    second[channel] = (first[channel] + contrast + (1 - 2 * contrast) * second[channel]) % 1
    return first + blend[..., None].astype(np.float32) * (second - first)


def _outline(rng: np.random.Generator, shape: str, radius: float) -> npt.NDArray[np.float64]:
    """Corners (x, y) of a shape around (0, 0), turned at random."""
    if shape == "disc":
        angles, radii = np.arange(32) * (2 * np.pi / 32), np.ones(32)
    elif shape == "star":
        angles, radii = np.arange(10) * (np.pi / 5), np.tile([1.0, 0.45], 5)
    elif shape == "cross":
        arm = 0.3
        corners = np.array([(1, -arm), (1, arm), (arm, arm)])
        turns = [corners @ np.array([[c, s], [-s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
        points = np.concatenate(turns)
        angles, radii = np.arctan2(points[:, 1], points[:, 0]), np.hypot(points[:, 0], points[:, 1])
    else:
        corners_of = {"square": 4, "triangle": 3}[shape]
        angles, radii = np.arange(corners_of) * (2 * np.pi / corners_of), np.ones(corners_of)
    turned = angles + rng.uniform(0, 2 * math.pi)
    return radius * radii[:, None] * np.stack([np.cos(turned), np.sin(turned)], 1)


def _inside(outline: npt.NDArray[np.float64], y: Floats, x: Floats) -> Bools:
    """Pixels whose centre is inside, by the even-odd rule; ``y`` ``[h, 1]`` and ``x`` ``[1, w]``: their centres."""
    inside = np.zeros((y.shape[0], x.shape[1]), dtype=bool)
    for (x0, y0), (x1, y1) in zip(outline, np.roll(outline, -1, 0), strict=True):
        if y0 == y1:
            continue
        crossed = (y >= min(y0, y1)) & (y < max(y0, y1))
        inside ^= crossed & (x < x0 + (y - y0) * ((x1 - x0) / (y1 - y0)))
    return inside


def _texture(rng: np.random.Generator, texture: str, y: Floats, x: Floats, radius: float) -> Floats:
    period = max(4.0, radius / rng.uniform(2.5, 3.5))
    angle = rng.uniform(0, math.pi)
    u, v = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    if texture == "striped":
        blend = (u % period < period / 2) + 0 * v
    elif texture == "checked":
        blend = (u % period < period / 2) ^ (v % period < period / 2)
    elif texture == "dotted":
        blend = np.hypot(u % period - period / 2, v % period - period / 2) < period * 0.3
    else:
        blend = np.zeros(np.broadcast_shapes(y.shape, x.shape), dtype=np.float32)
    return _mix(rng, np.asarray(blend, dtype=np.float32), 0.35)


def _place(
    rng: np.random.Generator,
    pixels: Floats,
    labels: npt.NDArray[np.uint8],
    things: list[Thing],
    classes: Sequence[str],
    label: int,
    radius: float,
) -> None:
    """Draw an object where at least half of it and of every earlier one stays visible; none if there is no place."""
    height, width = labels.shape
    texture, shape = classes[label].split()
    corners = _outline(rng, shape, radius)
    for _ in range(_TRIES):
        outline = corners + rng.uniform((0, 0), (width, height))
        left, top = np.floor(outline.min(0)).astype(int).clip(0, (width - 1, height - 1)).tolist()
        right, bottom = np.ceil(outline.max(0)).astype(int).clip((left + 1, top + 1), (width, height)).tolist()
        y = np.arange(top, bottom, dtype=np.float32)[:, None] + np.float32(0.5)
        x = np.arange(left, right, dtype=np.float32)[None] + np.float32(0.5)
        inside = _inside(outline, y, x)
        box = slice(top, bottom), slice(left, right)
        hidden = [int((thing.mask[box] & inside).sum()) for thing in things]
        whole = abs(float(_area(outline)))
        enough = int(inside.sum()) >= max(FEWEST_PIXELS, whole / 2)
        if enough and all(2 * (int(t.mask.sum()) - h) >= t.area for t, h in zip(things, hidden, strict=True)):
            break
    else:
        return
    for thing in things:
        thing.mask[box] &= ~inside
    pixels[box][inside] = _texture(rng, texture, y, x, radius)[inside]
    labels[box][inside] = label + 1
    mask = np.zeros((height, width), dtype=bool)
    mask[box] = inside
    things.append(Thing(label, outline, mask, int(inside.sum())))


def _place_crowd(
    rng: np.random.Generator,
    pixels: Floats,
    labels: npt.NDArray[np.uint8],
    things: list[Thing],
    classes: Sequence[str],
) -> None:
    """Small objects of one class, which become one crowd."""
    label, radius = int(rng.integers(len(classes))), min(labels.shape) * 0.05
    group = list(things)
    for _ in range(5):
        _place(rng, pixels, labels, group, classes, label, radius)
    members = group[len(things) :]
    if members:
        mask = np.logical_or.reduce([each.mask for each in members])
        things.append(Thing(label, members[0].outline, mask, int(mask.sum()), crowd=True))


def _area(outline: npt.NDArray[np.float64]) -> float:
    x, y = outline.T
    return float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def _annotation(thing: Thing, image_id: int, number: int) -> dict[str, Any] | None:
    """COCO's annotation; a polygon if all of the object is visible, else run lengths; None if too little is visible."""
    area = int(thing.mask.sum())
    if area < FEWEST_PIXELS:
        return None
    height, width = thing.mask.shape
    rows, columns = thing.mask.any(1).nonzero()[0], thing.mask.any(0).nonzero()[0]
    left, top = float(columns[0]), float(rows[0])
    box = [left, top, float(columns[-1] + 1) - left, float(rows[-1] + 1) - top]
    whole = area >= thing.area and (thing.outline >= 0).all() and (thing.outline <= (width, height)).all()
    segmentation: Any
    if whole and not thing.crowd:
        segmentation = [thing.outline.round(2).ravel().tolist()]
    else:
        counts = _run_lengths(thing.mask)
        # COCO's own files have lists for crowds; tools that mark images write the compressed form.
        segmentation = {"size": [height, width], "counts": counts if thing.crowd else _compressed(counts)}
    return {
        "id": number,
        "image_id": image_id,
        "category_id": category_id(thing.label),
        "iscrowd": int(thing.crowd),
        "bbox": box,
        "area": area,
        "segmentation": segmentation,
    }


def _run_lengths(mask: Bools) -> list[int]:
    """COCO's run lengths, column by column: the first run is of zeros."""
    flat = np.concatenate([[False], mask.ravel(order="F"), [False]])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    ends = np.concatenate([[0], changes, [mask.size]]) if changes[-1] < mask.size else np.concatenate([[0], changes])
    return np.diff(ends).tolist()


def _compressed(counts: list[int]) -> str:
    """COCO's compressed run lengths: differences to the run before the last, in groups of 5 bits."""
    text = []
    for number, count in enumerate(counts):
        value = count - counts[number - 2] if number > 2 else count
        while True:
            bits, value = value & 31, value >> 5
            more = value != -1 if bits & 16 else value != 0
            text.append(chr((bits | 32 if more else bits) + 48))
            if not more:
                break
    return "".join(text)


def _palette(count: int) -> list[int]:
    """Distinct colours of the class numbers, 0 black."""
    hues = np.arange(256) * 0.618034 % 1
    waves = 0.5 + 0.5 * np.cos(2 * np.pi * (hues[:, None] + np.array([0, 1 / 3, 2 / 3])))
    colours = (waves * 255).astype(np.uint8)
    colours[0] = 0
    return colours[:count].ravel().tolist()


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--val-images", type=int, default=500)
    parser.add_argument("--size", type=int, nargs=2, default=(256, 256), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_scenes(given.folder, given.images, given.val_images, tuple(given.size), seed=given.seed)


if __name__ == "__main__":
    main()
