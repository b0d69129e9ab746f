"""The frozen encoder inside a checkpoint, and the data it is judged on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dmjd.compose import from_yaml
from dmjd.config import DataConfig, KnnConfig, LinprobeConfig, PretrainConfig
from dmjd.data.build import build_dataset
from dmjd.data.dataset import EvenSubset, ImageDataset, Split
from dmjd.data.loader import evaluation_loader
from dmjd.errors import ConfigError
from dmjd.evaluate.features import Features, extract_features
from dmjd.models.masked_image_model import Encoder
from dmjd.parallel.build import select_device
from dmjd.parallel.store import load_strictly, read_average, read_model
from dmjd.train import checkpoint
from dmjd.train.build import build_objective, check_data, image_size, target_dim, token_grid
from dmjd.train.ema import ENCODER
from dmjd.train.run_folder import RunFolder


@dataclass(frozen=True)
class FrozenEncoder:
    """An encoder on its device, with what is needed to feed it.

    step: optimizer steps behind the weights; 0 for untrained ones.
    run: the folder of the run that trained it.
    """

    encoder: Encoder
    data: DataConfig
    size: tuple[int, int]
    device: torch.device
    seed: int
    step: int
    run: RunFolder

    @property
    def source(self) -> str:
        """What the encoder is judged on, in a few words that tell two data sets apart."""
        where = f" in {self.data.root}" if self.data.root else ""
        return f"{self.data.name}{where}, {self.size[0]}x{self.size[1]}"

    def dataset(self, split: Split, count: int | None = None) -> ImageDataset:
        """The labelled images of one split, or ``count`` of them."""
        # A score over other images would be another score: none may be bad, and none is substituted.
        dataset = build_dataset(replace(self.data, max_bad_percent=0.0), split)
        return dataset if count is None else EvenSubset(dataset, count)

    def features(self, dataset: ImageDataset, pooling: str, batch_size: int, workers: int) -> Features:
        """One vector per image, in order, without augmentation."""
        return extract_features(
            self.encoder,
            evaluation_loader(dataset, batch_size, self.size, workers),
            mean=self.data.mean,
            std=self.data.std,
            pooling=pooling,
            device=self.device,
        )


def load_encoder(config: KnnConfig | LinprobeConfig) -> FrozenEncoder:
    """The encoder of ``config.checkpoint``; "untrained" weights are those its run began with, "ema" the average.

    Raises:
        CheckpointError: if there is no complete checkpoint, or it holds another model.
        ConfigError: if ``config.data`` has another number of channels, or pooling asks for an absent cls token.
    """
    device = select_device(config.device, "device")
    folder = checkpoint.resolve(Path(config.checkpoint))
    trained: PretrainConfig = from_yaml(
        PretrainConfig, (folder / checkpoint.CONFIG).read_text(), folder / checkpoint.CONFIG
    )
    objective = build_objective(trained, target_dim(trained))
    step = 0
    if config.weights != "untrained":
        load_strictly(objective, read_model(folder), folder)
        step = checkpoint.step_of(folder)
    elif trained.init is not None:
        raise ConfigError(
            f"weights=untrained: this run began from init={trained.init}; evaluate that checkpoint instead"
        )
    if config.weights == "ema":
        average = read_average(folder)
        if not average:
            raise ConfigError(
                f"weights=ema, but {folder} has no average; train with ema_decay=..., or use weights=trained"
            )
        objective.model.encoder.load_state_dict({name.removeprefix(ENCODER): v for name, v in average.items()})
    encoder = objective.model.encoder.requires_grad_(False).to(device).eval()
    if config.pooling == "cls" and not encoder.num_prefix_tokens:
        raise ConfigError("pooling=cls needs a cls token, and this encoder has none; use pooling=mean")
    if config.data is not None:
        if config.data.channels != trained.data.channels:
            raise ConfigError(
                f"data.channels={config.data.channels}, but the encoder was trained on {trained.data.channels}"
            )
        trained.data = config.data
        token_grid(trained)
        check_data(trained.data)
    trained.data.second_size = None  # that of a target, which nothing is predicted of here
    return FrozenEncoder(
        encoder, trained.data, image_size(trained), device, trained.seed, step, RunFolder(folder.parent.parent)
    )
