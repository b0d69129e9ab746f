"""Fine-tuning as a task of the loop: a classifier, validation over all ranks, the best checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from dmjd.builders.finetune import build_finetune_step, classification_and_inputs, head_classes
from dmjd.builders.layer_decay import Group
from dmjd.builders.recipe import apply_recipe, training_images
from dmjd.builders.schedules import REFERENCE_BATCH
from dmjd.builders.weights import described_model
from dmjd.builders.weights import read_file as read_weights_file
from dmjd.compose import from_yaml_of_run, keys_of_preset
from dmjd.config import BackboneConfig, DataConfig, FinetuneConfig, TrainConfig
from dmjd.data import listed
from dmjd.data.batch import Batch
from dmjd.data.build import AUTO, build_dataset, resolve_auto
from dmjd.data.dataset import ImageDataset
from dmjd.data.folder import ImageFolder
from dmjd.data.identity import DataIdentity
from dmjd.data.stream.batches import TarStream
from dmjd.errors import ConfigError, DataError, StopRequested
from dmjd.evaluate.registry import seen_notes
from dmjd.evaluate.validate import record_finetune
from dmjd.evaluate.validation import class_names, main_prefix, main_score, validate, validation_dataset
from dmjd.files import read_file, replace_file
from dmjd.models.flops import count_flops
from dmjd.parallel.world import World
from dmjd.runs import checkpoint
from dmjd.runs.best import Best, write_best
from dmjd.runs.classes import CLASSES, pack_classes, read_classes
from dmjd.runs.folder import GROUPS, RunFolder
from dmjd.runs.paths import CONFIG
from dmjd.train.state import Stateful
from dmjd.train.summary import count

logger = logging.getLogger("dmjd")

_OWN = ("drop_path", "bias_tables")
"""Keys of ``backbone`` that belong to fine-tuning; a run's others describe its weights."""
_DATA_SET = ("name", "root", "endings", "skipped_folders", "skip_undecodable", "pad", "crop_pct")
_HELD_OUT = ("val_percent", "val_seed")
_CROPS = ("crop_scale", "crop_ratio", "interpolation", "flip", "jitter")
_OF_PRESET = ("data.image_size", "backbone.windows.size", *(f"data.{key}" for key in _CROPS))
"""Keys of a run that a preset replaces; it describes the model of a file of weights with others."""


def resolve(config: FinetuneConfig, run: RunFolder, world: World) -> FinetuneConfig:
    """``config`` with backbone and data of the run ``config.init``, its recipe, and the number of classes.

    Raises:
        UserError: for weights or images that cannot be fine-tuned; before any model is built.
    """
    initial = run.initial_weights(config.init)
    if initial:
        config = with_init(config, Path(initial["init_path"]))
    config = replace(config, data=resolve_auto(config.data))
    config = apply_recipe(config, world.device, world.size)
    train = training_images(config)  # the files are checked when the run opens them
    validation_dataset(replace(config.data, check="none"), train)
    if config.batch_size > len(train):
        raise ConfigError(
            f"batch_size={config.batch_size} exceeds the {len(train)} training images; set a smaller one, or "
            "preset=own_photos, which follows the number of images"
        )
    return replace(config, head=replace(config.head, num_classes=head_classes(config, train.num_classes)))


def with_init(config: FinetuneConfig, path: Path) -> FinetuneConfig:
    """``config`` with the backbone and data of the run that wrote the checkpoint ``path``, but for keys that are typed;
    without a preset also with its recipe. Of a file of weights the backbone, image size and normalisation that it shows
    (:func:`~dmjd.builders.weights.described_model`), unless ``backbone=NAME`` is typed.

    A configuration that was not made from overrides stays as it is.

    Raises:
        ConfigError: for images of other channels. CheckpointError: for a file that cannot be read.
    """
    if config.typed is None:
        return config
    typed = {name.partition("=")[0] for name in config.typed}
    if path.is_file():
        if "backbone" in typed:
            return config
        stored = _stored_in(path, config, typed)
    else:
        stored = from_yaml_of_run(read_file(path / CONFIG), path / CONFIG)
        stored = RunFolder(path.parent.parent).with_stored_data(stored)
    if not {"preset", "recipe"} & typed and stored.recipe != "none":  # published settings do not fit few images
        warmup = config.optim.warmup_epochs if "optim.warmup_epochs" in typed else None
        config = replace(config, recipe=stored.recipe, optim=replace(config.optim, warmup_epochs=warmup))
    presets = [name.partition("=")[2] for name in config.typed or () if name.startswith("preset=")]
    of_preset = {key for preset in presets for key in keys_of_preset(preset)}
    given = typed | of_preset.intersection(_OF_PRESET)
    data = _data(
        config.data, stored.data, {key.removeprefix("data.") for key in given if key.startswith("data.")}, typed
    )
    if "backbone" in of_preset - typed:
        _check_size(presets[-1], config.backbone, config.init, stored.backbone)
    if data.channels != stored.data.channels:
        raise ConfigError(
            f"data.channels={data.channels}, but the encoder of init={config.init} reads {stored.data.channels}; "
            f"choose images with {stored.data.channels}"
        )
    if isinstance(stored, FinetuneConfig):  # whose head, if its classes are those of the data, is loaded
        kept = [key for key in ("pooling", "norm") if f"head.{key}" not in typed | of_preset]
        config = replace(config, head=replace(config.head, **{key: getattr(stored.head, key) for key in kept}))
    return replace(
        config, data=data, backbone=config.backbone if "backbone" in typed else _backbone(config, stored, given)
    )


def _stored_in(path: Path, config: FinetuneConfig, typed: set[str]) -> TrainConfig:
    """A file of weights as the configuration of the run that might have written it."""
    own = [name.partition(".")[2] for name in typed if name.startswith("backbone.")]
    given = {key: reduce(getattr, key.split("."), config.backbone) for key in own}
    weights = "trained" if config.weights == "untrained" else config.weights
    stored = described_model(read_weights_file(path, weights), given, config.data)
    data, shown = config.data, stored.data
    stored.data = replace(data, image_size=shown.image_size, channels=shown.channels, mean=shown.mean, std=shown.std)
    return stored


def _check_size(preset: str, own: BackboneConfig, init: str | None, stored: BackboneConfig) -> None:
    """Raise ConfigError if the settings of ``preset`` are for another architecture, and warn for another size."""
    if own.name != stored.name:
        raise ConfigError(
            f"preset={preset} is for backbone.name={own.name}, and the encoder of init={init} is {stored.name}; choose "
            f"a preset for {stored.name}, or preset=own_photos"
        )
    sizes = [f"embed_dim={each.embed_dim} depth={each.depth}" for each in (own, stored)]
    if sizes[0] != sizes[1]:
        logger.warning(
            "preset=%s is for an encoder of %s, and that of init=%s has %s; its learning rate, layer_decay and "
            "drop_path may not fit",
            *(preset, sizes[0], init, sizes[1]),
        )


def _backbone(config: FinetuneConfig, stored: TrainConfig, given: set[str]) -> BackboneConfig:
    keys = {key.removeprefix("backbone.") for key in given if key.startswith("backbone.")}
    backbone, own = stored.backbone, config.backbone
    sections = {name: getattr(backbone, name) for name in ("windows", "conv_stages")}
    for key in keys:
        section, _, name = key.partition(".")
        if name:
            sections[section] = replace(sections[section], **{name: getattr(getattr(own, section), name)})
    plain = {key: getattr(own, key) for key in {*_OWN, *keys} if "." not in key}
    if backbone.bias_tables == "per_block" and "bias_tables" not in keys:
        plain["bias_tables"] = "per_block"  # its tables differ, so they cannot be shared
    return replace(backbone, **sections, **plain)


def _data(own: DataConfig, stored: DataConfig, given: set[str], typed: set[str]) -> DataConfig:
    """``own`` with the values of ``stored`` for the normalisation, the image size and the data set."""
    taken = {"mean", "std", "channels", "image_size"}
    if "data" in typed and own.name != stored.name:
        if own.name not in ("folder", "shards"):  # these convert to the run's channels
            taken.remove("channels")
    else:
        taken |= {*_DATA_SET}
        if "root" not in given or _same_folder(own.root, stored.root):
            taken |= {*_HELD_OUT}
        if stored.name in AUTO:  # small images, whose group has crops for them
            taken |= {*_CROPS}
    return replace(own, **{key: getattr(stored, key) for key in taken - given})


def _same_folder(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)


class Finetuning:
    """Fine-tuning; see :class:`~dmjd.train.task.Task`. ``config`` comes from :func:`resolve`.

    Args:
        initial: weights to begin with.
    """

    views = 1

    def __init__(self, config: FinetuneConfig, world: World, initial: Path | None = None) -> None:
        assert config.head.num_classes is not None, "resolve has set it"
        self._config, self._world, self._classes = config, world, config.head.num_classes
        self.augment = config.augment
        initial = None if config.weights == "untrained" else initial
        names = world.on_main(lambda: _names(config, initial))
        self.step = build_finetune_step(config, self._classes, world, initial, names)
        self.peak_lr = config.optim.base_lr * config.batch_size / REFERENCE_BATCH
        encoder, whole = (f"{each / 1e6:.2f} M" for each in self.step.parameters)
        self.parameters = f"{encoder} in the encoder, {whole} with the head"
        self.best = Best()
        self.parts: dict[str, Stateful] = {"best": self.best}
        self._last: tuple[int, dict[str, float | None]] | None = None  # step and scores of the last validation

    def open(self, source: ImageDataset | TarStream, run: RunFolder) -> None:
        assert not isinstance(source, TarStream), "resolve has rejected it"
        self._train, self._test = source, validation_dataset(self._config.data, source)
        names, saved = class_names(source), checkpoint.committed(run.checkpoints)[-1:]
        self._resumed, self._added = bool(saved), 0
        if self._resumed and isinstance(self._test, ImageFolder):
            self._added = listed.leave_out_added(self._test, run.path / listed.TEST_FILE)
        identity = DataIdentity.of(self._test)
        if identity is not None:
            self.parts["test"] = identity
        for path in saved:
            stored = read_classes(path)
            if stored != names:
                raise DataError(
                    f"run={run.path} was started with {len(stored)} classes ({_few(stored)}), and data.root now has "
                    f"{len(names)} ({_few(names)}); restore its class folders, or name another folder"
                )

    def details(self) -> Iterator[tuple[str, str]]:
        added = f", without {self._added} added since the first start" if self._added else ""
        images = f"{len(self._test)} test images{added}"
        yield "classes", f"{self._train.num_classes}; {images}, validated {self._every()}"
        lines = [_groups_in_short(self.step.groups)] if self._resumed else _group_lines(self.step.groups)
        for number, text in enumerate(lines):
            yield "" if number else "groups", text

    def _every(self) -> str:
        epochs = self._config.val_every
        return "after each epoch" if epochs == 1 else f"every {epochs} epochs"

    def flops_per_image(self) -> int:
        with torch.device("meta"):
            objective, inputs = classification_and_inputs(self._config, self._classes, images=2)  # a pair is mixed
            return count_flops(objective, inputs.inputs) // 2

    def forward_backward(self, batch: Batch, epoch: int, *, skip: bool = False) -> Mapping[str, Tensor]:
        return self.step.forward_backward(batch, epoch, skip=skip)

    def evaluates(self, epoch: int) -> bool:
        return epoch % self._config.val_every == 0 or epoch == self._config.epochs

    def evaluate(self, step: int, epoch: float) -> list[Mapping[str, float]] | None:
        try:
            scores = validate(self.step, self._test, self._config, self._world)
        except StopRequested:
            return None
        self.best.add(step, main_score(scores))
        self._last = step, scores
        return [{name: value for name, value in scores.items() if value is not None}]

    def samples(self, batch: Batch, epoch: int) -> None:
        return None

    def files(self) -> Mapping[str, bytes]:
        return {CLASSES: pack_classes(class_names(self._train))}

    def record(self, run: RunFolder) -> None:
        rows = [group._asdict() for group in self.step.groups]
        replace_file(run.path / GROUPS, json.dumps(rows, indent=1) + "\n")
        if not self._resumed and isinstance(self._test, ImageFolder):
            listed.write_list(self._test, run.path / listed.TEST_FILE)

    def restore(self, run: RunFolder) -> None:
        rows = [row for row in run.read_log() if "val_top1" in row]
        self._last = None
        if rows:
            step = rows[-1]["step"]
            self._last = step, {name: value for name, value in rows[-1].items() if name.startswith("val_")}
        write_best(run.path, self.best.history)

    def finish(self, run: RunFolder) -> tuple[str, str]:
        assert self._last is not None, "the last epoch is validated"
        step, scores = self._last
        prefix, best = main_prefix(scores), self.best.history[-1]
        complete = {f"{each}top5": None for each in {"val_", prefix}} | scores  # the log has no empty columns
        record = record_finetune(self._config, run, step, complete, self._train, self._test, best)
        detail = f"top-1 {main_score(scores):.2f} % of {len(self._test)} test images"
        if best.step != step:
            detail += f" (best {best.score:.2f} % at step {best.step})"
        detail = "; ".join([detail, *seen_notes(record["settings"])])
        return detail, "dmjd validate RUN, dmjd report RUN, dmjd export RUN"


def _group_lines(groups: Sequence[Group]) -> Iterator[str]:
    """A line for the groups of each learning rate: with a layer decay those of a layer."""
    for scale, found in groupby(groups, lambda group: group.lr_scale):
        rows = list(found)
        layers = " and ".join(dict.fromkeys(row.layers for row in rows))
        sizes = [f"{count(row.tensors, 'tensor')}, {row.parameters:,} parameters" for row in rows]
        if not scale:
            yield f"layer {layers}: frozen, {sizes[0]}"
            continue
        decays = [f"{row.weight_decay:g} ({size})" for row, size in zip(rows, sizes, strict=True)]
        yield f"layer {layers}: learning rate x {scale:.3g}, weight decay {' and '.join(decays)}"


def _groups_in_short(groups: Sequence[Group]) -> str:
    scales = [group.lr_scale for group in groups if group.lr_scale]
    rates = f"{min(scales):.3g} to {max(scales):.3g}" if min(scales) < max(scales) else f"{scales[0]:.3g}"
    decay = max(group.weight_decay for group in groups)
    return f"{count(len(groups), 'group')}, learning rate x {rates}, weight decay {decay:g} ({GROUPS} has the table)"


def _names(config: FinetuneConfig, initial: Path | None) -> list[str] | None:
    """Names of the data's classes, if ``initial`` is a checkpoint of a fine-tuning, with which they are compared."""
    if initial is None or not initial.is_dir() or not read_classes(initial):
        return None
    return class_names(build_dataset(replace(config.data, check="none"), "train"))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
