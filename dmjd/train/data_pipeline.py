"""The data pipeline of a run: its images, the batches they make in order, and the list of bad images."""

from __future__ import annotations

import platform
from collections.abc import Generator
from functools import cached_property
from pathlib import Path

import torch

from dmjd.config import AugmentConfig, FinetuneConfig, TrainConfig
from dmjd.data import listed
from dmjd.data.batch import Batch
from dmjd.data.build import fetch_ahead, training_batches, training_source, training_transform
from dmjd.data.dataset import ImageDataset
from dmjd.data.few_shot import few_shot_subset
from dmjd.data.folder import ImageFolder
from dmjd.data.identity import DataIdentity
from dmjd.data.loader import make_loader
from dmjd.data.quarantine import Quarantine
from dmjd.data.skipped_batches import SkippedBatches, SkippedBatchesAhead
from dmjd.data.stream.batches import TarStream
from dmjd.data.waiting import Limit
from dmjd.data.workers import check_shared_memory
from dmjd.errors import DataError, StoppedBefore, StopRequested, UserError
from dmjd.parallel.world import World
from dmjd.redact import shown
from dmjd.train.state import Position
from dmjd.train.stop import Requests

STACKS = "stacks"
"""Folder in the run folder: stacks of a rank and its loader workers, written when no data came within data.timeout."""


class DataPipeline:
    """The training batches of one rank.

    Args:
        bad_images: path of the run's list of bad images.
        resumed: whether the run has a checkpoint; then images that were added to a folder since are left out.
        augment: augmentation in the loader workers beyond the crop.

    Raises:
        UserError: on all ranks, if the data cannot be read or differ between ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        bad_images: Path,
        world: World,
        resumed: bool = False,
        augment: AugmentConfig | None = None,
    ) -> None:
        self._config, self._bad_images, self._world = config, bad_images, world
        self._whole = world.all_or_none(lambda: training_source(config.data))
        self._list = bad_images.parent / listed.FILE
        self.added = 0
        if resumed and isinstance(self._whole, ImageFolder):
            self.added = listed.leave_out_added(self._whole, self._list)
        self.source = world.all_or_none(self._selected)
        self.identity = DataIdentity.of(self.source)
        first = world.on_main(lambda: str(self.identity))
        world.all_or_none(lambda: self._check_identity(first))
        self._stacks = bad_images.parent / STACKS / f"rank-{world.rank:05d}.txt"
        self._batches = training_batches(
            config.data, self.source, config.batch_size, config.seed, world.rank, world.size, augment
        )
        self.steps_per_epoch = self._batches.steps_per_epoch
        self._transform = training_transform(config.data, dataset=self.source)
        self._shape = config.batch_size // world.size, config.data.channels
        size = self._transform.nbytes(*self._shape)
        world.all_or_none(lambda: check_shared_memory(size, config.workers, world.local_size))

    def _selected(self) -> ImageDataset | TarStream:
        """The images that are trained on: all, or in fine-tuning a few-shot subset."""
        config = self._config
        if not isinstance(config, FinetuneConfig) or isinstance(self._whole, TarStream):
            return self._whole
        return few_shot_subset(self._whole, config.few_shot, config.labels)

    def _check_identity(self, first: str) -> None:
        """Compare with rank 0's data: an incomplete copy on one node's disk would give this rank other samples."""
        if str(self.identity) != first:
            raise DataError(
                f"data.root={shown(self._config.data.root or '')} has {first} for rank 0, and {self.identity} for "
                f"rank {self._world.rank} ({platform.node()}); all have to read the same"
            )

    @cached_property
    def _quarantine(self) -> Quarantine:
        return Quarantine(self._bad_images, len(self.source), self._config.data.max_bad_percent)

    def list_images(self, is_new: bool) -> None:
        """List the images of a new run, and the bad ones that the check found. For one rank, before batches are read.

        Raises:
            DataError: if there are more than ``data.max_bad_percent``. StorageError: if the list cannot be written.
        """
        self._quarantine.admit(self.source.bad)
        if is_new and isinstance(self._whole, ImageFolder):
            listed.write_list(self._whole, self._list)

    def batches(self, position: Position, stop: int, requests: Requests) -> Generator[Batch]:
        """The batches of the steps from ``position`` to ``stop``; empty batches once this rank cannot read any.

        Raises:
            StoppedBefore: if a run of one process is asked to stop while it waits for data.
        """
        config, world, windows = self._config, self._world, position.passed_over
        ranks = world.rank, world.size, world.local_rank, world.local_size
        try:
            ahead = fetch_ahead(self.source, config.batch_size, config.seed, *ranks)
            yield from make_loader(
                SkippedBatches(self._batches, windows),
                position.step,
                stop,
                config.workers,
                world.device.type == "cuda",
                self._quarantine,
                None if ahead is None else SkippedBatchesAhead(ahead, windows),
                Limit(config.data.timeout, self._stacks),
            )
        except StopRequested:
            if world.size == 1:
                raise StoppedBefore(position.step + 1) from None
            requests.lack_batch()
        except UserError as error:
            requests.fail(error)
        else:
            return
        # The results of these steps are never saved: all ranks stop at the next exchange of requests.
        while True:
            yield self._transform.empty(*self._shape)


class Uploader:
    """Copies batches to ``device``.

    On CUDA the copy runs on a stream of its own, from pinned memory, and overlaps with the step before: the loop asks
    for the next batch as soon as a step is queued. The host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        if self._stream is None:
            return batch.to(self._device)
        user = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = batch.to(self._device)
        user.wait_stream(self._stream)
        for field in copy:
            field.record_stream(user)  # else the allocator reuses the memory while this stream still reads it
        return copy
