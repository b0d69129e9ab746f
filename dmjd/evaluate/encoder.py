"""The frozen encoder of a checkpoint and the data that it is evaluated on."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmjd.builders import build_encoder, build_objective, check_data, target_dim, token_grid
from dmjd.builders.average import ENCODER
from dmjd.builders.model import build_classification
from dmjd.builders.trained import check_described, trained_objective
from dmjd.builders.weights import described_model, load_classifier, load_encoder_weights, load_weights
from dmjd.builders.weights import read_file as read_weights_file
from dmjd.compose import from_yaml_of_run, to_yaml
from dmjd.config import (
    DataConfig,
    DenseDataConfig,
    DownstreamConfig,
    EvaluationConfig,
    FinetuneConfig,
    HeadConfig,
    ImagesConfig,
    PretrainConfig,
    TrainConfig,
)
from dmjd.data.build import AUTO, build_dataset, report, resolve_auto
from dmjd.data.dataset import EvenSubset, ImageDataset, Split
from dmjd.data.held_out import HeldOut
from dmjd.data.loader import evaluation_loader
from dmjd.errors import CheckpointError, ConfigError, config_section
from dmjd.evaluate.features import Features, encoded, extract_features
from dmjd.evaluate.registry import SEEN, SEEN_WITH_LABELS
from dmjd.files import read_file
from dmjd.interop.state_file import is_of_hugging_face
from dmjd.interop.weights_file import WeightsFile
from dmjd.models.classifier import Classifier
from dmjd.models.masked_image_model import Encoder
from dmjd.models.norm import layer_norm
from dmjd.models.objective import Trainable
from dmjd.ops.images import normalise
from dmjd.parallel import store
from dmjd.parallel.build import select_device
from dmjd.redact import shown
from dmjd.runs import checkpoint
from dmjd.runs.checkpoint import weights_at
from dmjd.runs.classes import CLASSES, read_classes
from dmjd.runs.folder import RunFolder
from dmjd.runs.paths import CHECKPOINTS, CONFIG, RunPaths

logger = logging.getLogger("dmjd")


@dataclass(frozen=True)
class FrozenEncoder:
    """An encoder on its device, with its data.

    trained: the configuration of its pre-training; text: the same as YAML.
    differs: settings of the images that differ from those of pre-training, for records (docs/evaluation.md).
    step: optimizer steps of the weights; 0 for untrained weights and for files, which do not record it.
    path: the checkpoint folder, or the file.
    run: the folder of the run that trained it; for a file, its name without the suffix, which may not exist, or its
        folder if that is one of Hugging Face; for a checkpoint that was moved out of its run, the checkpoint.
    weights: "trained", "ema" or "untrained".
    classifier: of a fine-tuned run, on the device; ``encoder`` is its encoder, and its ``fc_norm`` that of pooled
        features (:func:`~dmjd.evaluate.features.pool_features`).
    classes: names of the classes of a fine-tuned, segmentation or detection run: of the first logits, if the head has
        more.
    objective: of a run of segmentation or detection the whole model, on the device in evaluation mode; ``encoder`` is
        its encoder.
    """

    encoder: Encoder
    trained: TrainConfig
    text: str
    data: DataConfig
    differs: dict[str, Any]
    size: tuple[int, int]
    device: torch.device
    step: int
    path: Path
    run: RunFolder
    weights: str = "trained"
    classifier: Classifier | None = None
    classes: Sequence[str] = ()
    objective: Trainable | None = None

    @property
    def source(self) -> str:
        """See :func:`image_source`."""
        return image_source(self.data)

    @property
    def class_labels(self) -> list[str]:
        """A name for each logit of the classifier: the class's, or a number if the head has more than the data."""
        assert self.classifier is not None
        more = range(len(self.classes), self.classifier.head.out_features)
        return [*self.classes, *map(str, more)]

    def logits(self, images: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of the classifier for uint8 ``[B, H, W, C]`` on the device."""
        assert self.classifier is not None
        with torch.no_grad():
            logits: Tensor = self.classifier(normalise(images, self.data.mean, self.data.std))
        return logits

    def dataset(self, split: Split, count: int | None = None) -> ImageDataset:
        """The labelled images of one split, or ``count`` of them."""
        # Substitutes for bad images would make it another score.
        dataset = build_dataset(replace(self.data, max_bad_percent=0.0), split)
        if split == "train" or not self.data.val_percent:  # else both list the same folder
            report(dataset)
        return dataset if count is None else EvenSubset(dataset, count)

    def features(
        self,
        dataset: ImageDataset,
        pooling: str,
        batch_size: int,
        workers: int | None,
        dtype: torch.dtype = torch.float32,
    ) -> Features:
        """One vector per image (or more: ``pooling``), in order, without augmentation. ``workers``: None as for
        :func:`loader_workers`."""
        return extract_features(**self._images(dataset, pooling, batch_size, workers), dtype=dtype)

    def encoded(
        self, dataset: ImageDataset, pooling: str, batch_size: int, workers: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As :meth:`features`, but (values, labels) batch by batch, on the device."""
        return encoded(**self._images(dataset, pooling, batch_size, workers))

    def _images(self, dataset: ImageDataset, pooling: str, batch_size: int, workers: int | None) -> dict[str, Any]:
        workers = loader_workers(len(dataset), batch_size) if workers is None else workers
        data = self.data
        self.report_norm()
        return {
            "encoder": self.encoder,
            "loader": evaluation_loader(dataset, batch_size, self.size, workers, data.crop_pct, data.timeout),
            "mean": data.mean,
            "std": data.std,
            "pooling": pooling,
            "device": self.device,
            "total": len(dataset),
        }

    def report_norm(self) -> None:
        """Log that features have a norm that was not trained, of a run of segmentation or detection."""
        if self.objective is not None:
            _report_norm(self.path)

    def cost(self, images: int) -> int:
        """Multiply-adds of ``images`` forward passes, estimated as parameters x tokens."""
        height, width = self.encoder.grid_of(torch.empty(1, self.data.channels, *self.size, device="meta"))
        return images * height * width * sum(each.numel() for each in self.encoder.parameters())


@cache
def _report_norm(path: Path) -> None:
    """Once, although an evaluation encodes several sets of images."""
    logger.info("%s has no final norm: its features get one of weight 1 and bias 0", path)


def image_source(data: DataConfig) -> str:
    """Name, folder and size of the images, which identify the data set among settings."""
    where = f" in {shown(data.root)}" if data.root else ""
    held_out = f", {HeldOut(data.val_percent, data.val_seed)}" if data.val_percent else ""
    return f"{data.name}{where}{held_out}, {data.image_size[0]}x{data.image_size[1]}"


def loader_workers(images: int, batch_size: int) -> int:
    """DataLoader workers that pay for an evaluation: one per batch, at most 8 and one per core; 0 for a single batch,
    which a worker would only delay."""
    batches = -(-images // batch_size)
    return min(8, len(os.sched_getaffinity(0)), batches) if batches > 1 else 0


def load_encoder(config: ImagesConfig) -> FrozenEncoder:
    """The encoder of ``config.checkpoint``, with its trained weights, its initial ones ("untrained") or the average
    ("ema"; with "auto" that of a fine-tuned run, if it has one). Of a fine-tuned run its classifier, too.

    Raises:
        CheckpointError: if there is no complete checkpoint or file of weights, or it holds another model.
        ConfigError: if the model is described for a run, or not for a file; if ``config.data`` has another number of
            channels or a size that the encoder cannot read; if pooling=cls and there is no class token.
    """
    device = select_device(config.device, "device")
    path = weights_at(config.checkpoint, "checkpoint", config.which)
    file = _file(path, config.weights) if path.is_file() else None
    if file is None and config.weights == "student":
        raise ConfigError(f"weights=student, but {path} has no student beside a teacher; use weights=trained")
    trained, text = _model_of(path, config) if file is None else _model_of_file(file, config)
    data = _evaluation_data(path, trained, config)
    trainings = [trained]
    if isinstance(trained, DownstreamConfig):
        trainings += [each for _, each in trainings_before(RunPaths(_run_of(path)), trained)]
    differs = _differences(trained.data, data) | seen_images(trainings, data)
    if file is not None and config.data is not None:  # tables of positions are interpolated once, to this data's grid
        trained = replace(trained, data=data)
        text = to_yaml(trained)
    weights = config.weights
    if weights == "auto":
        weights = "trained" if file is not None or not _averages_all(trained) else "ema"
    classifier: Classifier | None = None
    objective: Trainable | None = None
    if isinstance(trained, DownstreamConfig):
        if weights == "untrained":
            _check_drawn(trained)
        objective = trained_objective(path, trained, weights).requires_grad_(False).to(device).eval()
        encoder = objective.model.encoder
        if isinstance(objective.model, Classifier):
            classifier, objective = objective.model, None
            if isinstance(classifier.fc_norm, nn.LayerNorm):
                encoder.fc_norm = classifier.fc_norm
        else:
            _complete_encoder(encoder)
    else:
        assert isinstance(trained, PretrainConfig)
        encoder = _of_run(path, trained, weights) if file is None else _of_file(file, trained)
        encoder.requires_grad_(False).to(device).eval()
    if isinstance(config, EvaluationConfig) and config.pooling == "cls" and not encoder.num_prefix_tokens:
        raise ConfigError("pooling=cls needs a class token, and this encoder has none; use pooling=mean")
    size = data.image_size[0], data.image_size[1]
    with config_section("data.image_size"):
        encoder.grid_of(torch.empty(1, data.channels, *size, device="meta"))
    step = 0 if file is not None or weights == "untrained" else checkpoint.step_of(path)
    run = RunFolder(_run_of(path))
    names = read_classes(path) if isinstance(trained, DownstreamConfig) else []
    if classifier is not None and len(names) > classifier.head.out_features:
        raise CheckpointError(f"{path / CLASSES} has {len(names)} names, and the head {classifier.head.out_features}")
    return FrozenEncoder(
        encoder, trained, text, data, differs, size, device, step, path, run, weights, classifier, names, objective
    )


def with_head(frozen: FrozenEncoder) -> FrozenEncoder:
    """The classifier of a fine-tuned file of weights; ``frozen`` itself if the file has no head.

    A file with ``fc_norm`` pools the mean of the patch tokens before it (MAE, BEiT); another one normalises first and
    reads the class token, or the mean without one (DeiT, Swin). Its classes have no names.

    Raises:
        CheckpointError: as :func:`~dmjd.builders.weights.load_classifier`.
    """
    file = _file(frozen.path, frozen.weights)
    if HEAD not in file.weights:
        return frozen
    pooled = hasattr(frozen.encoder, "fc_norm")
    pooling = "mean" if pooled or not frozen.encoder.num_prefix_tokens else "cls"
    head = HeadConfig(pooling=pooling, norm="pooled" if pooled else "encoder")
    trained = FinetuneConfig(init=None, backbone=frozen.trained.backbone, data=frozen.data, head=head)
    objective = build_classification(trained, len(file.weights[HEAD]))
    logger.info("classifier of %s", load_classifier(objective, frozen.path, frozen.weights, file=file))
    classifier = objective.model.requires_grad_(False).to(frozen.device).eval()
    if pooled:
        classifier.encoder.fc_norm = classifier.fc_norm
    return replace(frozen, classifier=classifier, encoder=classifier.encoder)


HEAD = "classifier.weight"
"""Name of the head's weights in a file of a fine-tuned model, as dmjd.interop reads it."""


def trainings_before(run: RunPaths, config: TrainConfig) -> Iterator[tuple[Path, TrainConfig]]:
    """The checkpoints, with their configurations, from which ``run`` and the runs before it began, the latest first; as
    far as they can be read."""
    seen = set[Path]()
    while config.init is not None and not _draws_weights(config):
        path = run.initial_path() or Path(config.init)
        path = next(reversed(checkpoint.committed(path / CHECKPOINTS)), path)
        if path.is_file():
            return
        run = RunPaths(_run_of(path))
        stored = next((file for file in (path / CONFIG, run.config) if file.is_file()), None)
        if stored is None or path in seen:
            return
        seen.add(path)
        try:
            config = from_yaml_of_run(read_file(stored), stored)
        except (ConfigError, OSError):  # of another version
            return
        yield path, config


def _complete_encoder(encoder: Encoder) -> None:
    """Give the encoder of a model of feature maps what its features need: a final norm, which such models leave out, of
    weight 1 and bias 0; and with attention on a grid no place for a class token."""
    encoder.norm = layer_norm(encoder.embed_dim).to(next(encoder.parameters()).device).requires_grad_(False)
    if encoder.on_grid and encoder.num_prefix_tokens:
        if (table := getattr(encoder, "pos_embed", None)) is not None:
            encoder.pos_embed = nn.Parameter(table[:, encoder.num_prefix_tokens :], requires_grad=False)
        encoder.num_prefix_tokens = 0


def _averages_all(trained: TrainConfig) -> bool:
    """Whether the run has an average of its whole model, and not of its encoder alone."""
    return isinstance(trained, DownstreamConfig) and trained.ema_decay is not None


def _draws_weights(config: TrainConfig) -> bool:
    """Whether the run takes the configuration of its ``init`` alone."""
    return isinstance(config, DownstreamConfig) and config.weights == "untrained"


def _run_of(path: Path) -> Path:
    if path.is_file():
        if is_of_hugging_face(path):
            return path.parent
        return path.with_name(path.name.removesuffix(".tar")).with_suffix("")  # MoCo v3 names its files .pth.tar
    return path.parent.parent if path.parent.name == checkpoint.FOLDER else path


def _of_run(folder: Path, trained: PretrainConfig, which: str) -> Encoder:
    check_described(folder, trained)
    objective = build_objective(trained, target_dim(trained))
    if which != "untrained":
        load_weights(objective, folder)
    else:
        _check_drawn(trained)
    encoder = objective.model.encoder
    if which == "ema":
        _load_average(encoder, folder)
    return encoder


def _check_drawn(trained: TrainConfig) -> None:
    if trained.init is not None and not _draws_weights(trained):
        raise ConfigError(
            f"weights=untrained: this run was initialised from init={trained.init}; evaluate that checkpoint instead"
        )


def _file(path: Path, weights: str) -> WeightsFile:
    if weights == "untrained":
        raise ConfigError(f"weights=untrained needs a run, and {path} is a file; use weights=trained")
    return read_weights_file(path, "trained" if weights == "auto" else weights)


def _of_file(file: WeightsFile, model: PretrainConfig) -> Encoder:
    """The encoder alone: a file need not have the decoder or other parts of pre-training. Of a fine-tuned one with
    ``fc_norm``, as that of a fine-tuned run."""
    with config_section("backbone"):
        encoder = build_encoder(model)
    if "encoder.fc_norm.weight" in file.weights and "encoder.norm.weight" not in file.weights:
        encoder.norm, encoder.fc_norm = nn.Identity(), layer_norm(encoder.embed_dim)
    logger.info("weights of %s", load_encoder_weights(encoder, file))
    return encoder


def _load_average(encoder: Encoder, path: Path) -> None:
    encoder.load_state_dict({name.removeprefix(ENCODER): value for name, value in _average(path).items()})


def _average(path: Path) -> dict[str, Tensor]:
    average = store.read_average(path)
    if not average:
        raise ConfigError(
            f"weights=ema, but {path} has no EMA weights; train with ema_decay=..., or use weights=trained"
        )
    return average


def _model_of(path: Path, config: ImagesConfig) -> tuple[TrainConfig, str]:
    """The configuration of the model in the checkpoint folder ``path``, as an object and as YAML."""
    if config.model is not None:
        raise ConfigError(f"experiment and backbone describe files, and {path} has its own {CONFIG}; leave them out")
    content = read_file(path / CONFIG)
    stored = from_yaml_of_run(content, path / CONFIG)
    return RunFolder(_run_of(path)).with_stored_data(stored), content.decode()


def _model_of_file(file: WeightsFile, config: ImagesConfig) -> tuple[PretrainConfig, str]:
    """As :func:`_model_of`, of a file: as ``experiment`` or ``backbone`` describes it, else from its tensors, with the
    keys of ``backbone`` that are given."""
    model, typed = config.model, [] if config.model is None else config.model.typed or []
    groups = [name.partition("=")[0] for name in typed if "." not in name]
    if model is None or (model.typed is not None and not groups):
        given = {name.partition(".")[2]: reduce(getattr, name.split("."), model) for name in typed}
        model = described_model(file, given, config.data)
    return model, to_yaml(model)


OF_DATA_SET = ("root", "pad", "check", "samples", "cache", "cache_gib", "val_percent", "val_seed")
"""Keys that describe a data set: another ``data.name`` sets them. The others are the run's unless they are given."""


def _evaluation_data(path: Path, trained: TrainConfig, config: ImagesConfig) -> DataConfig:
    """The data of pre-training with the keys that are given, on which the encoder can run."""
    other = config.data
    own = trained.data
    named = other is not None and (config.data_keys is None or "name" in config.data_keys)
    if isinstance(own, DenseDataConfig) and named:  # another data set, without annotations
        own = DataConfig(**{item.name: getattr(own, item.name) for item in fields(DataConfig)})
    data = own if other is None else _with_given(own, other, config.data_keys)
    if other is None and data.name == "auto" and path.is_dir():
        raise ConfigError(
            f"{path} stores data=auto without the name of the data set; add data=fashion_mnist or data=digits"
        )
    data = resolve_auto(data)
    if other is not None and other.name == "auto" and path.is_dir() and data.name != trained.data.name:
        raise ConfigError(
            f"data=auto is {data.name} here, and {path} was trained on {trained.data.name}; leave data= out to "
            f"evaluate on the latter, or set data={data.name}"
        )
    channels = trained.data.channels
    if data.name in AUTO and channels != 1:
        raise ConfigError(
            f"data={data.name} has grey images, and the encoder reads {channels} channels; choose data=folder or "
            "data=shards, whose images are converted"
        )
    if data.channels != channels:
        raise ConfigError(
            f"data.channels={data.channels}, but the encoder was trained on {channels}; remove data.channels"
        )
    token_grid(replace(trained, data=data))
    check_data(data)
    return replace(data, second_size=None)  # the size of a target's images, which evaluations do not use


def _with_given(own: DataConfig, other: DataConfig, keys: Collection[str] | None) -> DataConfig:
    """``own`` with the values that ``other`` has for ``keys`` (None: for all)."""
    if keys is None:
        return other
    keys = set(keys)
    if "name" in keys and other.name != own.name:
        keys |= {item.name for item in fields(other)} & {*OF_DATA_SET}
        keys |= {"channels"} if other.name not in ("folder", "shards") else set()  # which convert to the run's channels
    # A command for annotated images has keys that others lack; it then raises an error for the kind of the run.
    return replace(own, **{key: getattr(other, key) for key in keys if hasattr(own, key)})


def _differences(trained: DataConfig, data: DataConfig) -> dict[str, Any]:
    """Settings of a record where the images are prepared otherwise than in training."""
    found: dict[str, Any] = {}
    if data.image_size != trained.image_size:
        found["trained_size"] = "{}x{}".format(*trained.image_size)
    for key in ("mean", "std"):
        if getattr(data, key) != getattr(trained, key):
            found[f"trained_{key}"] = getattr(trained, key)
    return found


def seen_images(trainings: Iterable[TrainConfig], data: DataConfig) -> dict[str, Any]:
    """Settings of a score on the test images of ``data``, of which some were training images of ``trainings``."""
    found: dict[str, Any] = {}
    for config in trainings:
        trained = config.data
        unseen = data.val_seed == trained.val_seed and data.val_percent <= trained.val_percent
        if data.val_percent and _place(data) == _place(trained) and not unseen:
            found[SEEN_WITH_LABELS if isinstance(config, DownstreamConfig) else SEEN] = True
    return found


def _place(data: DataConfig) -> tuple[str, str | None]:
    return data.name, data.root and os.path.realpath(data.root)
