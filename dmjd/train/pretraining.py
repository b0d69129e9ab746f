"""Pre-training as a task of the loop: masked views, targets, callbacks, pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from dmjd.builders import peak_lr
from dmjd.builders.step import build_step, flops_per_image
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import STREAM, build_dataset
from dmjd.data.dataset import ImageDataset
from dmjd.data.stream.batches import TarStream
from dmjd.errors import ConfigError, StopRequested, UserError
from dmjd.interop.timm import timm_call
from dmjd.parallel.world import World
from dmjd.runs.folder import RunFolder
from dmjd.targets import Tokenizer
from dmjd.train.callbacks import Callback, gathered_uncompiled
from dmjd.train.preview import Samples, predict
from dmjd.train.state import Stateful
from dmjd.train.summary import count

Callbacks = Sequence[Callback] | Callable[[PretrainConfig], Sequence[Callback]]


class Pretraining:
    """Pre-training; see :class:`~dmjd.train.task.Task`.

    Args:
        initial: weights to begin with.
        callbacks: or a function that makes them from the configuration.
    """

    augment = None
    best = None
    parts: Mapping[str, Stateful] = {}

    def __init__(
        self, config: PretrainConfig, world: World, initial: Path | None = None, callbacks: Callbacks = ()
    ) -> None:
        self._config, self._world = config, world
        self._callbacks = callbacks(config) if callable(callbacks) else callbacks
        self.step = build_step(config, world, initial)
        self._prepare = self.step.prepare
        self.views = config.mask.views
        self.peak_lr = peak_lr(config, self._prepare.mask_spec, self._prepare.grid)
        encoder, whole = (f"{each / 1e6:.2f} M" for each in self.step.parameters)
        self.parameters = f"{encoder} in the encoder, {whole} with the heads of pre-training"

    def open(self, source: ImageDataset | TarStream, run: RunFolder) -> None:
        pass

    def details(self) -> Iterator[tuple[str, str]]:
        spec, grid = self._prepare.mask_spec, self._prepare.grid
        rates, units = spec.true_rates(grid), spec.plan(grid)
        why = f" (mask.mask_ratio={spec.mask_ratio:g} is rounded to {units.hidden} of {units.units} masked units)"
        if spec.count is not None or abs(rates.m_corr - spec.mask_ratio) < 0.005:
            why = ""
        masked, predicted = (
            f"{100 * rates.m_corr:.3g} % masked in each view{why}",
            f"{100 * rates.m_pred:.3g} % predicted over all views",
        )
        yield "masks", f"{count(spec.views, 'view')} of {grid[0]}x{grid[1]} tokens, {masked}, {predicted}"

    def flops_per_image(self) -> int:
        return flops_per_image(self._config)

    def forward_backward(self, batch: Batch, epoch: int, *, skip: bool = False) -> dict[str, Tensor]:
        losses, rates = self.step.forward_backward(batch, epoch, skip=skip)
        visible = {} if losses.visible is None else {"vis": losses.visible}
        return {"loss": losses.total, "mim": losses.masked, **visible, "m_corr": rates[0], "m_pred": rates[1]}

    def evaluates(self, epoch: int) -> bool:
        return bool(self._callbacks)

    def evaluate(self, step: int, epoch: float) -> list[Mapping[str, float]] | None:
        def call(encoder: nn.Module) -> list[Mapping[str, float]] | None:
            try:
                scores = [each.on_epoch_end(encoder, step, epoch) for each in self._callbacks]
            except StopRequested:
                return None
            return [row for row in scores if row is not None]

        with gathered_uncompiled(self.step.engine) as objective:
            return self._world.on_main(lambda: None if objective is None else call(objective.model.encoder))

    def samples(self, batch: Batch, epoch: int) -> tuple[Samples, Tokenizer] | None:
        predicted: list[Samples] = []

        def act() -> None:
            if objective is not None:
                predicted.append(predict(objective, self._prepare, batch, epoch))

        engine = self.step.engine
        with gathered_uncompiled(engine) as objective, engine.micro_batch(last=False):
            self._world.on_main(act)
        return (predicted[0], self._prepare.tokenizer) if predicted else None

    def record(self, run: RunFolder) -> None:
        pass

    def files(self) -> Mapping[str, bytes]:
        return {}

    def restore(self, run: RunFolder) -> None:
        rows = run.read_log() if self._callbacks else []
        for callback in self._callbacks:
            callback.restore(rows)

    def finish(self, run: RunFolder) -> tuple[str, str]:
        return "", next_steps(self._config, run)


def next_steps(config: PretrainConfig, run: RunFolder) -> str:
    """Commands that work on a finished run, with RUN for its folder."""
    held_out = _held_out(config)
    bad = len(run.read_rows(run.quarantine)) + (len(held_out.bad) if held_out else 0)
    commands = ["dmjd knn RUN"] if held_out and not bad else []
    commands.append("dmjd report RUN")
    with suppress(ConfigError):
        timm_call(config.backbone, config.data)
        commands.append("dmjd export RUN")
    why = f" (for scores, remove or replace {bad} bad image(s) first)" if held_out and bad else ""
    return ", ".join(commands) + why


def _held_out(config: PretrainConfig) -> ImageDataset | None:
    """The checked held-out images, if they have several classes."""
    data = config.data
    if data.name == STREAM:
        return None
    if data.val_percent and not data.max_bad_percent:  # the check at the start was of all files
        data = replace(data, check="none")
    try:
        dataset = build_dataset(replace(data, max_bad_percent=100.0), "test")
    except UserError:
        return None
    return dataset if dataset.num_classes > 1 else None
