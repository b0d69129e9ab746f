"""The deterministic loader: the batch of a step is a pure function of the seed and the step number.

The content of a batch does not depend on the number of workers. Resuming starts the range of steps at another number.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from dmjd.config import DataConfig
from dmjd.data.batch import Batch
from dmjd.data.crops import CropDraws, evaluation_view
from dmjd.data.dataset import ImageDataset, pixels_in_memory
from dmjd.data.quarantine import Quarantine
from dmjd.data.shards.pool import shorten_socket_paths
from dmjd.data.substitution import Substitution, read_sample
from dmjd.data.transform import Transform
from dmjd.data.waiting import Limit, Progress, Stacks, Waiting, progress_mark
from dmjd.data.workers import PREFETCH, WorkerContext, begin_worker, check_shared_memory, uncollected
from dmjd.errors import DataError, UserError
from dmjd.ops.philox import Domain, keyed_bits, make_key

_ORDER_CHUNK = 1 << 20  # keeps the temporaries of an epoch's order small on data sets of many millions


def epoch_order(count: int, key: Tensor) -> Tensor:
    """A random permutation of ``range(count)``, int64 ``[count]``, as a pure function of ``key`` (seed and epoch)."""
    chunks = (torch.arange(start, min(start + _ORDER_CHUNK, count)) for start in range(0, count, _ORDER_CHUNK))
    bits = torch.cat([keyed_bits(ids, 1, key=key, domain=Domain.ORDER).flatten() for ids in chunks])
    return bits.argsort(stable=True)


class Sampler(Protocol):
    """The samples of each batch of an epoch."""

    @property
    def steps_per_epoch(self) -> int: ...

    def order(self, key: Tensor, start: int, stop: int) -> Tensor:
        """Integers ``[steps_per_epoch, stop - start]``: sample ids of columns ``start .. stop - 1`` of every batch, a
        pure function of ``key`` (seed and epoch)."""
        ...


class Ahead(Protocol):
    """Prefetches the files that steps will read."""

    def start(self, step: int, stop: int) -> None:
        """Prefetch for steps ``step .. stop - 1``; called after the workers are forked."""
        ...

    def reach(self, step: int) -> None:
        """Steps before ``step`` are done."""
        ...

    def close(self) -> None: ...


class Shuffle:
    """A :class:`Sampler` for random access: :func:`epoch_order`, cut into batches."""

    def __init__(self, count: int, batch_size: int) -> None:
        self._count = count
        self._batch_size = batch_size
        self.steps_per_epoch = count // batch_size

    def order(self, key: Tensor, start: int, stop: int) -> Tensor:
        whole = epoch_order(self._count, key)[: self.steps_per_epoch * self._batch_size]
        # A copy of the part, or every worker would keep the order of all ranks.
        return whole.view(self.steps_per_epoch, self._batch_size)[:, start:stop].contiguous()


class Batches(Protocol):
    """Batches by number, which any process can load."""

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        """A batch, and the substitutions of its bad images."""
        ...


class TrainingBatches(Batches, Protocol):
    """Batches by optimizer step."""

    def begin(self, step: int, workers: int) -> int:
        """Prepare to load steps from ``step`` on; returns the number of workers to use, at most ``workers``."""
        ...


class StepBatches:
    """``batches[step]``: the training batch of a step, the same in every process and after every restart.

    An epoch is a random order of the data set cut into ``steps_per_epoch`` batches; the remainder, another one
    each epoch, is dropped. An image that cannot be used is replaced by a substitute (:mod:`dmjd.data.substitution`), so
    batches keep their size.

    Args:
        dataset: the images, at least ``batch_size``.
        batch_size: unique images per step over all processes; a multiple of ``world``.
        crop: random transform of every image.
        seed: seed of the run, in ``[0, 2**32)``.
        rank, world: this process loads the ``rank``-th of ``world`` equal, contiguous parts of every batch.
        sampler: order of the samples, for this batch size; by default :class:`Shuffle`.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int,
        crop: Transform,
        seed: int,
        rank: int = 0,
        world: int = 1,
        sampler: Sampler | None = None,
    ) -> None:
        self._sampler = sampler or Shuffle(len(dataset), batch_size)
        self.steps_per_epoch = self._sampler.steps_per_epoch
        self._dataset = dataset
        part = batch_size // world
        self._columns = rank * part, (rank + 1) * part
        self.crop = crop
        self._seed = seed
        self._order = (-1, torch.empty(0, dtype=torch.int64))  # of the last epoch used

    def begin(self, step: int, workers: int) -> int:
        return workers

    def __getitem__(self, step: int) -> Batch:
        return self.load(step)[0]

    def load(self, step: int) -> tuple[Batch, Sequence[Substitution]]:
        """The batch of a step, and the substitutions of its bad images.

        Raises:
            DataError: if an image has no usable substitute, or the data set cannot be read at all.
        """
        assert step >= 0, "steps count from 0"
        epoch, number = divmod(step, self.steps_per_epoch)
        key = make_key(self._seed, epoch)
        if self._order[0] != epoch:
            self._order = epoch, self._sampler.order(key, *self._columns)
        sample_ids = self._order[1][number].long()
        draws, arrived = self.crop.draw(sample_ids, key), progress_mark()
        if isinstance(draws, CropDraws) and (pixels := pixels_in_memory(self._dataset, sample_ids.numpy())) is not None:
            views, labels = draws.cut_all(pixels), [self._dataset.label(index) for index in sample_ids.tolist()]
            arrived()
            return self.crop.batch(views, sample_ids, labels), ()
        samples = []
        for row, index in enumerate(sample_ids.tolist()):
            samples.append(read_sample(self._dataset, index, self._seed, partial(draws.cut, row)))
            arrived()
        substitutions = [sample.substitution for sample in samples if sample.substitution is not None]
        batch = self.crop.batch([each.view for each in samples], sample_ids, [each.label for each in samples])
        return batch, substitutions


class EvaluationBatches:
    """``batches[i]``: every image once, in order, without augmentation; the last batch may be short.

    A bad image raises :class:`dmjd.errors.BadImage`: scores over different images cannot be compared.

    Args:
        dataset: the images.
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
        arrived, views = progress_mark(), []
        for index in sample_ids.tolist():
            views.append((evaluation_view(self._dataset.open(index), self._size, self._crop_pct),))
            arrived()
        return Batch.of(views, sample_ids, [self._dataset.label(index) for index in sample_ids.tolist()])

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        """``batches[number]``, without substitutions."""
        return self[number], ()


class BatchLoader:
    """Batches ``start .. stop - 1`` in order, loaded by ``workers`` processes (0: in this process).

    Bad images of a batch are added to ``quarantine`` before the batch is returned; without a quarantine they raise.
    ``ahead`` is notified of the progress. ``limit`` bounds the wait for a batch (:class:`dmjd.data.waiting.Waiting`).
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
        limit: Limit | None = None,
    ) -> None:
        self._batches, self._workers, self._pin_memory = batches, workers, pin_memory
        self._start, self._stop = start, stop
        self._quarantine = quarantine
        self._ahead = ahead
        self._limit = limit or Limit(DataConfig().timeout)

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Generator[Batch]:
        progress, stacks, finished = Progress(), Stacks(), False
        before = multiprocessing.active_children()
        items = self._items(progress, stacks)
        workers = [child for child in multiprocessing.active_children() if child not in before]
        waiting = Waiting(items, workers, progress, stacks, self._limit)
        # Dropping the last reference ends the workers. If a traceback kept this frame alive, the loader would
        # be collected in a cycle, and torch would wait five seconds for each worker.
        del items
        if self._ahead is not None:
            self._ahead.start(self._start, self._stop)
        try:
            for number in range(self._start, self._stop):
                item = waiting.next()
                if self._ahead is not None:
                    self._ahead.reach(number)
                yield self._admit(number, item)
            finished = True
        except (OSError, EOFError) as error:
            if not workers or str(error).startswith("Caught "):  # raised in a worker and passed on by torch
                raise
            raise RuntimeError(f"DataLoader worker was killed while it passed on a batch ({error})") from error
        finally:
            waiting.close(finished)
            stacks.close()
            if self._ahead is not None:
                self._ahead.close()

    def _items(self, progress: Progress, stacks: Stacks) -> Iterator[_Item]:
        batches, numbers = _ErrorsAsItems(self._batches), range(self._start, self._stop)
        if not self._workers:
            return map(batches.__getitem__, numbers)
        shorten_socket_paths()
        # Torch gives each worker one thread. Workers live for one pass over the range of steps.
        loader = DataLoader(
            batches,
            batch_size=None,
            sampler=numbers,
            num_workers=self._workers,
            prefetch_factor=PREFETCH,
            pin_memory=self._pin_memory,
            multiprocessing_context=WorkerContext(),
            worker_init_fn=partial(begin_worker, progress, stacks),
            generator=torch.Generator(),  # else drawing the workers' unused seed would advance the global generator
        )
        with uncollected():
            return iter(loader)

    def _admit(self, number: int, item: _Item) -> Batch:
        if isinstance(item, UserError):
            raise item
        batch, substitutions = item
        if self._quarantine is not None:
            self._quarantine.add(number, substitutions)
        elif substitutions:
            raise substitutions[0].bad
        return batch.map(Tensor.pin_memory) if self._pin_memory and not self._workers else batch


def make_loader(
    batches: TrainingBatches,
    start_step: int,
    stop_step: int,
    workers: int,
    pin_memory: bool,
    quarantine: Quarantine | None = None,
    ahead: Ahead | None = None,
    limit: Limit | None = None,
) -> BatchLoader:
    """Loader of steps ``start_step .. stop_step - 1``. Raises a worker's DataError unchanged.

    With a ``quarantine`` bad images are listed and substituted until there are too many; without one the first raises.
    A stream uses at most as many workers as it has tars.
    """
    workers = batches.begin(start_step, workers)
    return BatchLoader(batches, start_step, stop_step, workers, pin_memory, quarantine, ahead, limit)


def evaluation_loader(
    dataset: ImageDataset,
    batch_size: int,
    size: tuple[int, int],
    workers: int,
    crop_pct: float,
    timeout: float | None = None,
) -> BatchLoader:
    """Loader of :class:`EvaluationBatches`; ``timeout``: minutes, as ``data.timeout``.

    Raises:
        ConfigError: if shared memory cannot hold the batches of the workers.
    """
    check_shared_memory(Batch.nbytes(batch_size, [size], dataset.channels), workers)
    batches = EvaluationBatches(dataset, batch_size, size, crop_pct)
    limit = Limit(DataConfig().timeout if timeout is None else timeout, finishes=False)
    return BatchLoader(batches, 0, len(batches), workers, pin_memory=False, limit=limit)


_Item = tuple[Batch, Sequence[Substitution]] | UserError


class _ErrorsAsItems(TorchDataset[_Item]):
    """Returns errors of the data instead of raising them, since torch would add the worker's traceback."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, number: int) -> _Item:
        try:
            return self._batches.load(number)
        except DataError as error:
            return error
        except (OSError, MemoryError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            return DataError(f"batch {number} cannot be loaded ({reason}); the same command continues once it can")
