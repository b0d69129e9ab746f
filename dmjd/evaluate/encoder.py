"""The frozen encoder of a checkpoint and the data that it is evaluated on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dmjd.builders import build_encoder, build_objective, check_data, target_dim, token_grid
from dmjd.builders.average import ENCODER
from dmjd.builders.weights import check_described, load_encoder_weights, load_weights
from dmjd.compose import from_yaml, to_yaml
from dmjd.config import DataConfig, EvaluationConfig, PretrainConfig
from dmjd.data.build import build_dataset, resolve_auto
from dmjd.data.dataset import EvenSubset, ImageDataset, Split
from dmjd.data.loader import evaluation_loader
from dmjd.errors import ConfigError, config_section
from dmjd.evaluate.features import Features, extract_features
from dmjd.files import read_file
from dmjd.models.masked_image_model import Encoder
from dmjd.parallel.build import select_device
from dmjd.parallel.store import read_average
from dmjd.redact import shown
from dmjd.runs import checkpoint
from dmjd.runs.checkpoint import weights_at
from dmjd.runs.folder import RunFolder
from dmjd.runs.paths import CONFIG

logger = logging.getLogger("dmjd")


@dataclass(frozen=True)
class FrozenEncoder:
    """An encoder on its device, with its data.

    trained: the configuration of its pre-training; text: the same as YAML.
    step: optimizer steps of the weights; 0 for untrained weights and for files, which do not record it.
    path: the checkpoint folder, or the file.
    run: the folder of the run that trained it; for a file, its name without the suffix, which may not exist; for a
        checkpoint that was moved out of its run, the checkpoint.
    """

    encoder: Encoder
    trained: PretrainConfig
    text: str
    data: DataConfig
    size: tuple[int, int]
    device: torch.device
    step: int
    path: Path
    run: RunFolder

    @property
    def source(self) -> str:
        """Name, folder and size of the images, which identify the data set among settings."""
        where = f" in {shown(self.data.root)}" if self.data.root else ""
        return f"{self.data.name}{where}, {self.size[0]}x{self.size[1]}"

    def dataset(self, split: Split, count: int | None = None) -> ImageDataset:
        """The labelled images of one split, or ``count`` of them."""
        # Substitutes for bad images would make it another score.
        dataset = build_dataset(replace(self.data, max_bad_percent=0.0), split)
        return dataset if count is None else EvenSubset(dataset, count)

    def features(self, dataset: ImageDataset, pooling: str, batch_size: int, workers: int) -> Features:
        """One vector per image, in order, without augmentation."""
        return extract_features(
            self.encoder,
            evaluation_loader(dataset, batch_size, self.size, workers, self.data.crop_pct, self.data.timeout),
            mean=self.data.mean,
            std=self.data.std,
            pooling=pooling,
            device=self.device,
        )


def load_encoder(config: EvaluationConfig) -> FrozenEncoder:
    """The encoder of ``config.checkpoint``, with its trained weights, its initial ones ("untrained") or the average.

    Raises:
        CheckpointError: if there is no complete checkpoint or file of weights, or it holds another model.
        ConfigError: if the model is described for a run, or not for a file; if ``config.data`` has another number of
            channels or a size that the encoder cannot read; if pooling=cls and there is no cls token.
    """
    device = select_device(config.device, "device")
    path = weights_at(config.checkpoint, "checkpoint")
    trained, text = _model_of(path, config)
    data = _evaluation_data(path, trained, config.data, config.root)
    encoder = _of_file(path, trained, config.weights) if path.is_file() else _of_run(path, trained, config.weights)
    encoder.requires_grad_(False).to(device).eval()
    if config.pooling == "cls" and not encoder.num_prefix_tokens:
        raise ConfigError("pooling=cls needs a cls token, and this encoder has none; use pooling=mean")
    size = data.image_size[0], data.image_size[1]
    with config_section("data.image_size"):
        encoder.grid_of(torch.empty(1, data.channels, *size, device="meta"))
    step = 0 if path.is_file() or config.weights == "untrained" else checkpoint.step_of(path)
    return FrozenEncoder(encoder, trained, text, data, size, device, step, path, RunFolder(_run_of(path)))


def _run_of(path: Path) -> Path:
    if path.is_file():
        return path.with_suffix("")
    return path.parent.parent if path.parent.name == checkpoint.FOLDER else path


def _of_run(folder: Path, trained: PretrainConfig, which: str) -> Encoder:
    check_described(folder, trained)
    objective = build_objective(trained, target_dim(trained))
    if which != "untrained":
        load_weights(objective, folder)
    elif trained.init is not None:
        raise ConfigError(
            f"weights=untrained: this run was initialised from init={trained.init}; evaluate that checkpoint instead"
        )
    encoder = objective.model.encoder
    if which == "ema":
        _load_average(encoder, folder)
    return encoder


def _of_file(path: Path, model: PretrainConfig, which: str) -> Encoder:
    """The encoder alone: a file need not have the decoder or other parts of pre-training."""
    if which == "untrained":
        raise ConfigError(f"weights=untrained needs a run, which records its initial weights, and {path} is a file")
    with config_section("backbone"):
        encoder = build_encoder(model)
    logger.info("weights of %s", load_encoder_weights(encoder, path, average=which == "ema"))
    return encoder


def _load_average(encoder: Encoder, path: Path) -> None:
    average = read_average(path)
    if not average:
        raise ConfigError(f"weights=ema, but {path} has no average; train with ema_decay=..., or use weights=trained")
    encoder.load_state_dict({name.removeprefix(ENCODER): value for name, value in average.items()})


def _model_of(path: Path, config: EvaluationConfig) -> tuple[PretrainConfig, str]:
    """The configuration of the model at ``path``, as an object and as YAML."""
    if path.is_file():
        if config.model is None:
            raise ConfigError(
                f"checkpoint={path} is a file, which does not describe its model: add experiment=NAME, such as "
                "mae_vit_base, and backbone.KEY=VALUE where it differs"
            )
        # With the data of the evaluation, so that tables of positions are interpolated once, to its grid.
        model = config.model if config.data is None else replace(config.model, data=config.data)
        return model, to_yaml(model)
    if config.model is not None:
        raise ConfigError(f"experiment and backbone describe files, and {path} has its own {CONFIG}")
    content = read_file(path / CONFIG)
    stored = from_yaml(PretrainConfig, content, path / CONFIG)
    return RunFolder(_run_of(path)).with_stored_data(stored), content.decode()


def _evaluation_data(path: Path, trained: PretrainConfig, other: DataConfig | None, root: str | None) -> DataConfig:
    """The data of pre-training, or other data with as many channels and a size divisible by the patch; in ``root``."""
    data = trained.data if other is None else other
    if data is trained.data and data.name == "auto" and path.is_dir():
        raise ConfigError(
            f"{path} stores data=auto without the name of the data set; add data=fashion_mnist or data=digits"
        )
    data = resolve_auto(data if root is None else replace(data, root=root))
    if other is not None and other.name == "auto" and path.is_dir() and data.name != trained.data.name:
        raise ConfigError(
            f"data=auto is {data.name} here, and {path} was trained on {trained.data.name}; leave data= out to "
            f"evaluate on the latter, or set data={data.name}"
        )
    if data.channels != trained.data.channels:
        raise ConfigError(f"data.channels={data.channels}, but the encoder was trained on {trained.data.channels}")
    token_grid(replace(trained, data=data))
    check_data(data)
    return replace(data, second_size=None)  # the size of a target's images, which evaluations do not use
