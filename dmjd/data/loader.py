"""The deterministic loader: step ``s`` of a run is a pure function of the seed, so its whole state is the number ``s``.

Workers only decide who computes a batch, never what is in it. Resuming is starting the range of steps elsewhere.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from threading import Thread
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from dmjd.data.batch import Batch
from dmjd.data.crops import RandomResizedCrop, evaluation_view
from dmjd.data.dataset import ImageDataset
from dmjd.data.quarantine import Quarantine
from dmjd.data.stream.pipe import end_commands
from dmjd.data.substitution import Substitution, read_sample
from dmjd.errors import ConfigError, DataError
from dmjd.ops.philox import Domain, keyed_bits, make_key

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_ORDER_CHUNK = 1 << 20  # keeps the temporaries of an epoch's order small on data sets of many millions


def epoch_order(count: int, key: Tensor) -> Tensor:
    """A random permutation of ``range(count)``, int64 ``[count]``, as a pure function of ``key`` (seed and epoch)."""
    chunks = (torch.arange(start, min(start + _ORDER_CHUNK, count)) for start in range(0, count, _ORDER_CHUNK))
    bits = torch.cat([keyed_bits(ids, 1, key=key, domain=Domain.ORDER).flatten() for ids in chunks])
    return bits.argsort(stable=True)


class Plan(Protocol):
    """Which samples make which batch of an epoch."""

    @property
    def steps_per_epoch(self) -> int: ...

    def order(self, key: Tensor, start: int, stop: int) -> Tensor:
        """Integers ``[steps_per_epoch, stop - start]``: samples of columns ``start .. stop - 1`` of every batch, a pure
        function of ``key`` (seed and epoch)."""
        ...


class Ahead(Protocol):
    """Something that makes ready what steps will read."""

    def start(self, step: int, stop: int) -> None:
        """Steps ``step .. stop - 1`` will be read; no worker is forked any more."""
        ...

    def reach(self, step: int) -> None:
        """Steps before ``step`` have been read."""
        ...

    def close(self) -> None: ...


class Shuffle:
    """The plan of a data set that is read equally fast in any order: :func:`epoch_order`, cut into batches."""

    def __init__(self, count: int, batch_size: int) -> None:
        self._count = count
        self._batch_size = batch_size
        self.steps_per_epoch = count // batch_size

    def order(self, key: Tensor, start: int, stop: int) -> Tensor:
        """See :class:`Plan`."""
        whole = epoch_order(self._count, key)[: self.steps_per_epoch * self._batch_size]
        # A copy of the part, or every worker would keep the order of all ranks.
        return whole.view(self.steps_per_epoch, self._batch_size)[:, start:stop].contiguous()


class Batches(Protocol):
    """Batches by number: what a loader may compute in any process."""

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        """A batch, and which of its images stand in for bad ones."""
        ...


class TrainingBatches(Batches, Protocol):
    """Batches by optimizer step."""

    def begin(self, step: int, workers: int) -> int:
        """This launch will load steps from ``step`` on; returns how many of ``workers`` it has work for."""
        ...


class StepBatches:
    """``batches[step]``: the training batch of a step, the same in every process and after every restart.

    An epoch is a random order of the data set cut into ``steps_per_epoch`` batches; the remainder, other images each
    epoch, is dropped. ``plan`` says which order. An image that cannot be used has another in its place
    (:mod:`dmjd.data.substitution`), so a batch has its size whatever the state of the files; :meth:`load` says which.

    Args:
        dataset: where images come from.
        batch_size: unique images per step, over all processes.
        crop: what is cut out of every image.
        seed: of the run, in ``[0, 2**32)``.
        rank, world: which of how many equal parts of every batch this is; in the order of ranks they make the whole.
        plan: of batches of this size; a :class:`Shuffle` if left out.

    Raises:
        ConfigError: if the data set is smaller than a batch, or ``world`` does not divide a batch.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int,
        crop: RandomResizedCrop,
        seed: int,
        rank: int = 0,
        world: int = 1,
        plan: Plan | None = None,
    ) -> None:
        assert 0 <= rank < world
        if not 1 <= batch_size <= len(dataset):
            raise ConfigError(
                f"batch_size={batch_size} must be between 1 and the {len(dataset)} images of the data set"
            )
        if batch_size % world:
            raise ConfigError(f"batch_size={batch_size} must be a multiple of the {world} processes that share a batch")
        self._plan = plan or Shuffle(len(dataset), batch_size)
        self.steps_per_epoch = self._plan.steps_per_epoch
        self._dataset = dataset
        part = batch_size // world
        self._columns = rank * part, (rank + 1) * part
        self._crop = crop
        self._seed = seed
        self._order = (-1, torch.empty(0, dtype=torch.int64))  # of the epoch last asked for

    def begin(self, step: int, workers: int) -> int:
        """See :class:`TrainingBatches`."""
        return workers

    def __getitem__(self, step: int) -> Batch:
        return self.load(step)[0]

    def load(self, step: int) -> tuple[Batch, Sequence[Substitution]]:
        """The batch of a step, and which of its images stand in for bad ones.

        Raises:
            DataError: if no substitute was found either, or the data set as a whole cannot be read.
        """
        assert step >= 0, "steps count from 0"
        epoch, number = divmod(step, self.steps_per_epoch)
        key = make_key(self._seed, epoch)
        if self._order[0] != epoch:
            self._order = epoch, self._plan.order(key, *self._columns)
        sample_ids = self._order[1][number].long()
        draws = self._crop.draw(sample_ids, key)
        samples = [
            read_sample(self._dataset, index, self._seed, partial(draws.cut, row))
            for row, index in enumerate(sample_ids.tolist())
        ]
        substitutions = [sample.substitution for sample in samples if sample.substitution is not None]
        batch = Batch.of([sample.view for sample in samples], sample_ids, [sample.label for sample in samples])
        return batch, substitutions


class EvaluationBatches:
    """``batches[i]``: every image once, in order, without augmentation; the last batch may be short.

    A bad image raises :class:`dmjd.errors.BadImage`, since a score over other images would be another score.

    Args:
        dataset: where images come from.
        batch_size: images per batch.
        size: (height, width) of the views.
        crop_pct: as for :func:`dmjd.data.crops.evaluation_view`.
    """

    def __init__(self, dataset: ImageDataset, batch_size: int, size: tuple[int, int], crop_pct: float) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._size = size
        self._crop_pct = crop_pct

    def __len__(self) -> int:
        return -(-len(self._dataset) // self._batch_size)

    def __getitem__(self, number: int) -> Batch:
        start = range(len(self))[number] * self._batch_size
        sample_ids = torch.arange(start, min(start + self._batch_size, len(self._dataset)))
        views = [
            (evaluation_view(self._dataset.open(index), self._size, self._crop_pct),) for index in sample_ids.tolist()
        ]
        return Batch.of(views, sample_ids, [self._dataset.label(index) for index in sample_ids.tolist()])

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        """``batches[number]``, in which nothing stands in for anything."""
        return self[number], ()


class BatchLoader:
    """Batches ``start .. stop - 1`` in order, computed ahead by ``workers`` processes (0: in this one).

    Each has been entered into ``quarantine`` when it is handed out; without a quarantine a bad image raises. ``ahead``
    is told how far they are.
    """

    def __init__(
        self,
        batches: Batches,
        start: int,
        stop: int,
        workers: int,
        pin_memory: bool,
        quarantine: Quarantine | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self._start, self._stop = start, stop
        self._quarantine = quarantine
        self._ahead = ahead
        # Torch gives each worker one thread, so workers do not fight over cores. They live for one pass: the whole run.
        self._loader = DataLoader(
            _ErrorsAsItems(batches),
            batch_size=None,
            sampler=range(start, stop),
            num_workers=workers,
            pin_memory=pin_memory,
            # Forked, whatever the default of this Python, so that workers share the index and are this process's own.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # else the workers' seed, which nothing uses, would advance the global stream
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        items = iter(self._loader)
        if self._ahead is not None:
            self._ahead.start(self._start, self._stop)
        try:
            for number, item in enumerate(items, self._start):
                if self._ahead is not None:
                    self._ahead.reach(number)
                yield self._admit(number, item)
        except (OSError, EOFError) as error:
            if not self._loader.num_workers or str(error).startswith("Caught "):  # in a worker, and handed on by torch
                raise
            raise RuntimeError(f"DataLoader worker was killed while it handed over a batch ({error})") from error
        finally:
            # Workers end here, and not with a traceback that holds this frame: in a cycle that the garbage collector
            # finds, torch waits five seconds for each of them.
            del items
            if self._ahead is not None:
                self._ahead.close()

    def _admit(self, number: int, item: tuple[Batch, Sequence[Substitution]] | DataError) -> Batch:
        if isinstance(item, DataError):
            raise item
        batch, substitutions = item
        if self._quarantine is not None:
            self._quarantine.add(number, substitutions)
        elif substitutions:
            raise substitutions[0].bad
        return batch


def make_loader(
    batches: TrainingBatches,
    start_step: int,
    stop_step: int,
    workers: int,
    pin_memory: bool,
    quarantine: Quarantine | None = None,
    ahead: Ahead | None = None,
) -> BatchLoader:
    """The batches of steps ``start_step .. stop_step - 1``; a worker's DataError is raised here, in its own words.

    With a ``quarantine`` bad images are listed and have others in their place, until there are too many; without one
    the first raises. A stream has no more workers than tars to read.
    """
    workers = batches.begin(start_step, workers)
    return BatchLoader(batches, start_step, stop_step, workers, pin_memory, quarantine, ahead)


def evaluation_loader(
    dataset: ImageDataset, batch_size: int, size: tuple[int, int], workers: int, crop_pct: float
) -> BatchLoader:
    """Every image of ``dataset`` once, as :class:`EvaluationBatches` has them."""
    batches = EvaluationBatches(dataset, batch_size, size, crop_pct)
    return BatchLoader(batches, 0, len(batches), workers, pin_memory=False)


class _ErrorsAsItems(TorchDataset[tuple[Batch, Sequence[Substitution]] | DataError]):
    """Returns a DataError instead of raising it: torch would wrap it into a page of the worker's traceback."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, number: int) -> tuple[Batch, Sequence[Substitution]] | DataError:
        try:
            return self._batches.load(number)
        except DataError as error:
            return error


def _begin_worker(worker: int) -> None:
    # Ctrl-C and the signals of a launcher (Slurm's warning is USR1, torchrun's end TERM) reach every process of a job;
    # only the main process decides what to do. It needs its workers to write a last checkpoint, and ends them by TERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # A killed parent cannot end its workers. Torch's look for it every five seconds, or for ever if it died first. To
    # the kernel the parent is the thread that forked: a loader is to be begun in one that stays.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:
        os._exit(1)
    Thread(target=_end_with_the_parent, args=(parent.pid,), daemon=True).start()


def _end_with_the_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    end_commands()
    os._exit(0)
