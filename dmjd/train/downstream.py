"""Base of fine-tuning, segmentation and detection as tasks of the loop: validations and the best checkpoint."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from dmjd.builders.layer_decay import Group
from dmjd.builders.schedules import REFERENCE_BATCH
from dmjd.builders.step import DownstreamStep
from dmjd.config import AugmentConfig, DownstreamConfig
from dmjd.data import listed
from dmjd.data.batch import Batch
from dmjd.data.dataset import ImageDataset
from dmjd.data.folder import ImageFolder
from dmjd.data.identity import DataIdentity
from dmjd.data.stream.batches import TarStream
from dmjd.errors import DataError, StopRequested
from dmjd.evaluate.validation import class_names, main_prefix, main_score
from dmjd.files import replace_file
from dmjd.parallel.world import World
from dmjd.runs import checkpoint
from dmjd.runs.best import Best, write_best
from dmjd.runs.classes import CLASSES, pack_classes, read_classes
from dmjd.runs.folder import GROUPS, RunFolder
from dmjd.train.state import Stateful
from dmjd.train.summary import count

C = TypeVar("C", bound=DownstreamConfig)


class Downstream(ABC, Generic[C]):
    """Training of an encoder with a head, validated after epochs; see :class:`~dmjd.train.task.Task`.

    Attributes:
        score: name of the score, in per cent, that selects the best checkpoint. score_title: its name for readers.
    """

    views = 1
    augment: AugmentConfig | None = None
    score: ClassVar[str]
    score_title: ClassVar[str]

    def __init__(self, config: C, world: World, step: DownstreamStep[C]) -> None:
        self._config, self._world, self.step = config, world, step
        self.peak_lr = config.optim.base_lr * config.batch_size / REFERENCE_BATCH
        encoder, whole = (f"{each / 1e6:.2f} M" for each in step.parameters)
        self.parameters = f"{encoder} in the encoder, {whole} with the head"
        self.best = Best()
        self.parts: dict[str, Stateful] = {"best": self.best}
        if step.buffers:
            self.parts["buffers"] = step.buffers
        self._last: tuple[int, dict[str, float | None]] | None = None  # step and scores of the last validation

    @abstractmethod
    def _test_images(self, train: ImageDataset) -> ImageDataset:
        """The images of validations. Raises DataError if they do not fit ``train``."""

    @abstractmethod
    def _validate(self, step: int) -> dict[str, float | None]:
        """Scores of the current weights by column of the log, the same on every rank. Collective; raises StopRequested
        on every rank if one is asked to stop."""

    @abstractmethod
    def _record(self, run: RunFolder, step: int, scores: Mapping[str, float | None]) -> dict[str, Any]:
        """Write the record of a finished run to its evaluations, and return it."""

    @abstractmethod
    def flops_per_image(self) -> int: ...

    def open(self, source: ImageDataset | TarStream, run: RunFolder) -> None:
        assert not isinstance(source, TarStream), "resolve has rejected it"
        self._run = run
        self._train, self._test = source, self._test_images(source)
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
                    f"run={run.path} was started with {count(len(stored), 'class')} ({_few(stored)}), and data.root "
                    f"now has {len(names)} ({_few(names)}); restore its classes, or name another folder"
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

    def forward_backward(self, batch: Batch, epoch: int, *, skip: bool = False) -> Mapping[str, Tensor]:
        return self.step.forward_backward(batch, epoch, skip=skip)

    def evaluates(self, epoch: int) -> bool:
        return epoch % self._config.val_every == 0 or epoch == self._config.epochs

    def evaluate(self, step: int, epoch: float) -> list[Mapping[str, float]] | None:
        try:
            scores = self._validate(step)
        except StopRequested:
            return None
        self.best.add(step, main_score(scores, self.score))
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
        rows = [row for row in run.read_log() if f"val_{self.score}" in row]
        self._last = None
        if rows:
            step = rows[-1]["step"]
            self._last = step, {name: value for name, value in rows[-1].items() if name.startswith("val_")}
        write_best(run.path, self.best.history)

    def finish(self, run: RunFolder) -> tuple[str, str]:
        assert self._last is not None, "the last epoch is validated"
        step, scores = self._last
        best = self.best.history[-1]
        notes = self._notes(self._record(run, step, scores))
        detail = f"{self.score_title} {main_score(scores, self.score):.2f} % of {len(self._test)} test images"
        if best.step != step:
            detail += f" (best {best.score:.2f} % at step {best.step})"
        return "; ".join([detail, *notes]), self._advice

    _advice: ClassVar[str]
    """Commands for a finished run."""

    def _notes(self, record: Mapping[str, Any]) -> Sequence[str]:
        """Remarks on a score."""
        return ()


def complete(scores: Mapping[str, float | None], *names: str) -> dict[str, float | None]:
    """``scores`` with None for scores ``names`` that the log leaves out."""
    prefix = main_prefix(scores)
    return {f"{each}{name}": None for each in {"val_", prefix} for name in names} | dict(scores)


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


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)
