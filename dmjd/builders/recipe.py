"""``recipe=small_data``: sizes of a run that follow the training images and the device (docs/own_photos.md).

Pre-training sets sizes of the model, the crops and the schedule; fine-tuning the schedule and the augmentation.

The rules are applied once, at the first start. Keys that were typed keep their value, and the other rules follow it.
"""

from __future__ import annotations

import logging
import math
import os
import textwrap
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from statistics import median
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensorMode

from dmjd.builders.tasks import builders_of
from dmjd.config import DataConfig, FinetuneConfig, PretrainConfig, TrainConfig
from dmjd.data.build import build_dataset
from dmjd.data.dataset import EvenSubset, ImageDataset
from dmjd.data.few_shot import few_shot_subset
from dmjd.errors import BadImage, ConfigError, DataError, NoSplit
from dmjd.parallel.build import select_precision
from dmjd.parallel.engines import state_bytes
from dmjd.parallel.memory import trace_step

logger = logging.getLogger("dmjd")

Config = TypeVar("Config", bound=TrainConfig)

SIZES = (224, 128, 96, 64, 48, 32, 24, 16)
"""Image sizes in pixels that the rules select from."""
LEAST_PATCH = 4
MEASURED = 1000
"""Images whose size is read."""
SMALLEST = 0.01
"""Share of the images that may be smaller than the crop, as data.max_bad_percent."""
WARMUP_PERCENT = 10.0
VAL_PERCENT = 10.0
MEMORY = 0.8
"""Share of a GPU's free memory that a step may take."""


@dataclass(frozen=True)
class Schedule:
    """Schedule of a training on one kind of device.

    batch: images per step. epochs: passes over :data:`REFERENCE` images. Fewer images have more epochs in proportion,
    at most 10 times as many; with more images they fall with the root of the number.
    """

    batch: int
    epochs: int
    base_lr: float


@dataclass(frozen=True)
class Machine:
    """Constants of the rules for one kind of device.

    size: largest image size, in pixels. grid: least tokens per side. large: training images from which the larger
    encoder is used. encoders: (embed_dim, depth) below that number, and from it on; a head has 64 dimensions. decoder:
    (dim, depth, num_heads).
    """

    size: int
    grid: int
    large: int
    encoders: tuple[tuple[int, int], tuple[int, int]]
    decoder: tuple[int, int, int]
    pretrain: Schedule
    finetune: Schedule


REFERENCE = 300
MACHINES: Mapping[str, Machine] = {
    "cpu": Machine(
        size=96,
        grid=8,
        large=2000,
        encoders=((192, 6), (192, 6)),
        decoder=(128, 2, 4),
        pretrain=Schedule(batch=32, epochs=100, base_lr=5e-3),
        finetune=Schedule(batch=32, epochs=50, base_lr=8e-3),
    ),
    "cuda": Machine(
        size=224,
        grid=12,
        large=2000,
        encoders=((192, 12), (384, 12)),
        decoder=(256, 4, 8),
        pretrain=Schedule(batch=128, epochs=800, base_lr=2e-3),
        finetune=Schedule(batch=64, epochs=100, base_lr=4e-3),
    ),
}
FINETUNE = {
    "optim.layer_decay": 0.75,
    "backbone.drop_path": 0.0,
    "augment.mixup": 0.2,
    "augment.cutmix": 0.0,
    "augment.erase_prob": 0.0,
}
"""Values of fine-tuning on any device."""


@dataclass(frozen=True)
class Images:
    """The training images: number, and the shorter side in pixels that all but :data:`SMALLEST` of them reach, and
    that half of them reach."""

    count: int
    least_side: int
    median_side: int


def apply_recipe(config: Config, device: torch.device, processes: int = 1, *, fit_memory: bool = True) -> Config:
    """``config`` with the values of its recipe in all keys that were not typed; logs them.

    A typed group counts as all keys of its section. Reads the training images' names, and sizes of some of them.

    Args:
        fit_memory: on CUDA, halve the batch until a step fits the free memory of the current GPU.

    Raises:
        UserError: as :func:`~dmjd.data.build.build_dataset`.
        ConfigError: if the images are too small.
    """
    if config.recipe == "none":
        return config
    if config.data.name == "stream":
        raise ConfigError(
            "data.name=stream has no list of the training images, from which recipe=small_data chooses a run's sizes; "
            "choose data=folder or data=shards, or recipe=none and the sizes on the command line"
        )
    config = deepcopy(config)
    rules = _Rules(config, MACHINES["cuda" if device.type == "cuda" else "cpu"], processes)
    held_out = rules.hold_out()
    images = measure(training_images(config))
    if isinstance(config, PretrainConfig):
        rules.apply_to_pretraining(config, images, held_out)
    elif isinstance(config, FinetuneConfig):
        rules.apply_to_finetuning(config, images)
    if fit_memory and device.type == "cuda":
        _fit_memory(rules, device)
    values = textwrap.wrap(" ".join(rules.resolved), 100, break_on_hyphens=False)
    logger.info(
        "recipe=small_data: %d training image%s, shorter side %d pixels, %s\n  %s",
        *(images.count, "s" * (images.count > 1), images.median_side, device.type, "\n  ".join(values)),
    )
    return config


def training_images(config: TrainConfig) -> ImageDataset:
    """The images that a run of ``config`` trains on, without a check of their files; of fine-tuning, the few-shot
    subset."""
    dataset = build_dataset(replace(config.data, check="none"), "train")
    if isinstance(config, FinetuneConfig):
        return few_shot_subset(dataset, config.few_shot, config.labels)
    return dataset


def measure(dataset: ImageDataset) -> Images:
    """Count the images and read the sizes of at most :data:`MEASURED` of them, evenly spaced."""
    sides = []
    subset = EvenSubset(dataset, min(MEASURED, len(dataset)))
    for index in range(len(subset)):
        try:
            sides.append(min(subset.open(index).size))
        except BadImage:
            continue  # the run counts and reports it
    if not sides:
        raise DataError(f"none of the first {len(subset)} images of data.root can be read; repair or replace them")
    sides.sort()
    return Images(len(dataset), sides[int(SMALLEST * len(sides))], int(median(sides)))


class _Rules:
    """Sets keys of ``config`` in order; a later rule reads what an earlier one set, or what was typed."""

    def __init__(self, config: TrainConfig, machine: Machine, processes: int) -> None:
        self.config, self.machine, self.processes = config, machine, processes
        self.resolved: list[str] = []
        """``KEY=VALUE`` of each rule."""
        self._typed = {name.partition("=")[0] for name in config.typed or ()} - {"data", "method"}
        if isinstance(config, PretrainConfig) and config.backbone.name != "vit":
            if "backbone.class_token" not in self._typed:
                config.backbone.class_token = False
            self._typed.add("backbone")
        if "backbone" in self._typed:  # its preset has a decoder
            self._typed |= {f"method.decoder.{name}" for name in ("dim", "depth", "num_heads")}

    def is_typed(self, key: str) -> bool:
        """Whether ``key`` or its group was typed."""
        return key in self._typed or key.partition(".")[0] in self._typed

    def set(self, key: str, value: Any) -> None:
        """Set ``key`` unless it was typed."""
        if self.is_typed(key):
            return
        *sections, name = key.split(".")
        setattr(reduce(getattr, sections, self.config), name, value)
        shown = f"[{','.join(f'{item:g}' for item in value)}]" if isinstance(value, list) else f"{value:g}"
        self.resolved = [text for text in self.resolved if not text.startswith(f"{key}=")] + [f"{key}={shown}"]

    def hold_out(self) -> bool:
        """Hold images of two classes or more out by their hash, unless there is a test split or the images are too few.

        Returns:
            Whether held-out images have labels of two classes or more.
        """
        data = self.config.data
        classes = _test_classes(data)
        if classes is None and data.name == "folder" and not self.is_typed("data.val_percent"):
            self.set("data.val_percent", VAL_PERCENT)
            classes = _test_classes(data)
            if classes is None or classes < 2:
                self.set("data.val_percent", 0.0)
                reason = "there are too few" if classes is None else "scores need at least two class folders"
                logger.info("recipe=small_data: no images are held out for evaluation: %s", reason)
        return (classes or 0) > 1

    def apply_to_pretraining(self, config: PretrainConfig, images: Images, held_out: bool) -> None:
        """All rules of pre-training but that of the memory."""
        machine = self.machine
        self._set_sizes(images.least_side)
        width, depth = machine.encoders[images.count >= machine.large]
        self.set("backbone.embed_dim", width)
        self.set("backbone.depth", depth)
        width = config.backbone.embed_dim
        self.set("backbone.num_heads", next(heads for heads in range(-(-width // 64), 0, -1) if not width % heads))
        for key, value in zip(("dim", "depth", "num_heads"), machine.decoder, strict=True):
            self.set(f"method.decoder.{key}", value)
        self._set_crops(images)
        self.set("batch_size", max(1, min(machine.pretrain.batch, images.count // self.processes)) * self.processes)
        self._set_schedule(machine.pretrain, images)
        self.set("online_knn.every_epochs", max(1, config.epochs // 10) if held_out else 0)

    def apply_to_finetuning(self, config: FinetuneConfig, images: Images) -> None:
        """All rules of fine-tuning but that of the memory. A batch has pairs of images."""
        schedule = self.machine.finetune
        self._set_crops(images)
        pairs = max(1, min(schedule.batch, images.count // self.processes) // 2)
        self.set("batch_size", 2 * pairs * self.processes)
        self._set_schedule(schedule, images)
        self.set("val_every", max(1, config.epochs // 10))
        for key, value in FINETUNE.items():
            self.set(key, value)

    def _set_crops(self, images: Images) -> None:
        share = (max(self.config.data.image_size) / images.median_side) ** 2
        self.set("data.crop_scale", [round(min(0.5, max(0.2, share)), 2), 1.0])

    def _set_schedule(self, schedule: Schedule, images: Images) -> None:
        ratio = REFERENCE / images.count
        self.set("epochs", max(10, round(schedule.epochs * (min(10, ratio) if ratio > 1 else math.sqrt(ratio)))))
        self.set("optim.base_lr", schedule.base_lr)
        if self.config.optim.warmup_epochs is None:
            self.set("optim.warmup_percent", WARMUP_PERCENT)
        self.set("workers", max(1, min(8, len(os.sched_getaffinity(0)) // 2)))

    def _set_sizes(self, least: int) -> None:
        """Image size: the largest that nearly all images reach. Patch: the largest that gives enough tokens."""
        data, backbone, grid = self.config.data, self.config.backbone, self.machine.grid
        if self.is_typed("backbone.patch_size"):
            unit = 2 * backbone.patch_size  # an even number of tokens, for masked units of 2 x 2
            side = min(least, max(self.machine.size, 8 * backbone.patch_size)) // unit * unit
        else:
            side = next((size for size in SIZES if size <= min(least, self.machine.size)), 0)
        if not side and not self.is_typed("data.image_size"):
            raise ConfigError(
                f"recipe=small_data needs images of at least {SIZES[-1]} pixels per side; 1 in 100 of data.root is "
                f"below {least + 1}; remove the small ones, or set data.image_size"
            )
        self.set("data.image_size", [side, side])
        common = math.gcd(*data.image_size)
        patches = [patch for patch in range(LEAST_PATCH, common + 1, 2) if not common % (2 * patch)]
        enough = [patch for patch in patches if min(data.image_size) // patch >= grid]
        self.set("backbone.patch_size", max(enough, default=min(patches, default=backbone.patch_size)))


def _test_classes(data: DataConfig) -> int | None:
    """Classes of the held-out images, 0 without labels; None if no images are held out.

    Raises:
        DataError: if a folder cannot be read, or has a test split that cannot be used.
    """
    try:
        return build_dataset(replace(data, check="none"), "test").num_classes
    except NoSplit:
        return None
    except DataError as error:
        if data.name == "folder" and not (data.val_percent and "holds out" in str(error)):
            raise
        return None


def _fit_memory(rules: _Rules, device: torch.device) -> None:
    """Halve the batch until the estimate of a step's memory fits into the free memory of the GPU."""
    config, free = rules.config, torch.cuda.mem_get_info(device)[0]
    unit = rules.processes * builders_of(config).pair
    while config.batch_size > 2 * rules.processes and not rules.is_typed("batch_size"):
        if step_bytes(config, config.batch_size // rules.processes, device) <= MEMORY * free:
            break
        rules.set("batch_size", config.batch_size // 2 // unit * unit)


def step_bytes(config: TrainConfig, images: int, device: torch.device) -> float:
    """Estimated peak bytes of a step of ``images`` on one GPU: weights, gradients, AdamW's state and activations."""
    with FakeTensorMode():
        classes = config.head.num_classes or 2 if isinstance(config, FinetuneConfig) else 0
        objective, prepared = builders_of(config).objective_and_inputs(config, classes, images)
        precision = select_precision(config.engine.precision, device)
        step = trace_step(objective, prepared.inputs, precision=precision, as_on_cuda=True)
        parameters = sum(parameter.numel() for parameter in objective.parameters())
    state = state_bytes("single", parameters, 0, 1)
    return state.weights + state.optimizer + step.with_gradients
