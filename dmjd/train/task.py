"""Interface between the training loop and a task: pre-training or fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from dmjd.builders.step import TrainStep
from dmjd.config import AugmentConfig
from dmjd.data.batch import Batch
from dmjd.data.dataset import ImageDataset
from dmjd.data.stream.batches import TarStream
from dmjd.runs.best import Best
from dmjd.runs.folder import RunFolder
from dmjd.targets import Tokenizer
from dmjd.train.preview import Samples
from dmjd.train.state import Stateful


class Task(Protocol):
    """All that the loop needs to know about a task.

    An implementation is built from the resolved configuration, the world and the initial weights; configuration errors
    are raised there, before the run folder is written.
    """

    @property
    def step(self) -> TrainStep[Any]: ...

    @property
    def augment(self) -> AugmentConfig | None:
        """Augmentation in the loader workers beyond the crop."""

    @property
    def views(self) -> int:
        """Views of an image that a step computes."""

    @property
    def peak_lr(self) -> float:
        """The learning rate at the end of warm-up."""

    @property
    def parameters(self) -> str:
        """The size of the model, for the start lines."""

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """Parts of the loop's state, besides those of every task."""

    @property
    def best(self) -> Best | None:
        """The best validations; None for a task without validation. A checkpoint is saved at each of them."""

    def open(self, source: ImageDataset | TarStream, run: RunFolder) -> None:
        """Open what evaluations need, and check it against the training images ``source``; on every rank."""

    def details(self) -> Iterator[tuple[str, str]]:
        """Further start lines: title and text."""

    def flops_per_image(self) -> int:
        """Model FLOPs of one training image, forward and backward; nothing is computed."""

    def forward_backward(self, batch: Batch, epoch: int, *, skip: bool = False) -> Mapping[str, Tensor]:
        """Accumulate gradients over the micro-batches of ``batch``, which is on the device. Collective.

        Args:
            epoch: keys the random draws.
            skip: make the loss NaN, so that the optimizer step changes nothing on any rank.

        Returns:
            0-d float32 tensors of this rank, "loss" among them; their means over ranks and steps are logged.
        """

    def evaluates(self, epoch: int) -> bool:
        """Whether :meth:`evaluate` is due after ``epoch`` epochs."""

    def evaluate(self, step: int, epoch: float) -> list[Mapping[str, float]] | None:
        """Rows for the log at the end of an epoch; None if the run is asked to stop meanwhile. Collective."""

    def samples(self, batch: Batch, epoch: int) -> tuple[Samples, Tokenizer] | None:
        """Predictions for the first images of ``batch``, to draw; on rank 0, of a task with pictures. Collective."""

    def record(self, run: RunFolder) -> None:
        """Write the task's own files at the start of a launch. For rank 0."""

    def files(self) -> Mapping[str, bytes]:
        """Further files of a checkpoint: name -> content. For rank 0."""

    def restore(self, run: RunFolder) -> None:
        """Replace the state of evaluations by that in the log of ``run``, at its start and after a rollback. For rank
        0."""

    def finish(self, run: RunFolder) -> tuple[str, str]:
        """Write the results of a run whose steps are all done. For rank 0.

        Returns:
            A detail for the exit record, which may be empty, and commands for the finished run, with RUN for its
            folder.
        """
