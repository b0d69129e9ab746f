from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from dmjd.config import DataConfig
from dmjd.data.batch import Batch
from dmjd.data.build import training_batches
from dmjd.data.crops import RandomResizedCrop, evaluation_view
from dmjd.data.dataset import InMemory, OpenImage, Pixels
from dmjd.data.loader import (
    BatchLoader,
    EvaluationBatches,
    Shuffle,
    StepBatches,
    epoch_order,
    evaluation_loader,
    make_loader,
)
from dmjd.data.quarantine import Quarantine
from dmjd.data.waiting import Limit
from dmjd.errors import BadImage, ConfigError, DataError, StorageError, UserError
from dmjd.ops.philox import make_key

# On a machine with one core torch warns that two workers are many; they are what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE = (8, 6)
CROP = RandomResizedCrop(SIZE)
NARROW = RandomResizedCrop(SIZE, scale=(0.5, 0.9), ratio=(0.8, 1.25))


class Noise:
    """Images of various sizes, each a function of its index; ``broken`` ones cannot be read, each for its reason."""

    num_classes = 5
    channels = 3
    bad: Mapping[int, BadImage] = MappingProxyType({})
    skipped: Mapping[str, int] = MappingProxyType({})

    def __init__(self, count: int, broken: Mapping[int, str] = MappingProxyType({})) -> None:
        self.count = count
        self.broken = broken

    def __len__(self) -> int:
        return self.count

    def open(self, index: int) -> OpenImage:
        return InMemory(self.image(index))

    def image(self, index: int) -> Pixels:
        if index in self.broken:
            raise BadImage(self.name(index), self.broken[index], "cannot be read as an image")
        rng = np.random.default_rng(index)
        height, width = rng.integers(6, 20, 2)
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)

    def label(self, index: int) -> int:
        return index % self.num_classes

    def name(self, index: int) -> str:
        return f"noise/{index}.png"


def assert_same(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_order_of_an_epoch_is_a_permutation_and_epochs_differ() -> None:
    first, second = (epoch_order(1000, make_key(5, epoch)) for epoch in (0, 1))
    assert first.sort().values.tolist() == list(range(1000))
    assert second.sort().values.tolist() == list(range(1000))
    assert (first == second).sum() < 10  # a random permutation has one fixed point on average
    assert (first == torch.arange(1000)).sum() < 10


def test_every_epoch_shows_each_image_at_most_once_and_drops_less_than_a_batch() -> None:
    batches = StepBatches(Noise(23), batch_size=5, crop=CROP, seed=1)
    assert batches.steps_per_epoch == 4
    epochs = [torch.cat([batches[4 * epoch + step].sample_ids for step in range(4)]).tolist() for epoch in range(3)]
    for ids in epochs:
        assert len(set(ids)) == 20
        assert set(ids) <= set(range(23))
    assert len({tuple(ids) for ids in epochs}) == 3
    assert len({frozenset(range(23)) - frozenset(ids) for ids in epochs}) > 1  # what is dropped changes


def test_a_batch_is_the_keyed_crops_of_its_images() -> None:
    dataset = Noise(30)
    batches = StepBatches(dataset, batch_size=7, crop=NARROW, seed=9)
    batch = batches[6]  # epoch 1, third batch
    ids = epoch_order(30, make_key(9, 1))[14:21]
    assert torch.equal(batch.sample_ids, ids)
    assert batch.labels.tolist() == [index % 5 for index in ids.tolist()]
    assert (batch.images.dtype, batch.images.shape) == (torch.uint8, (7, *SIZE, 3))
    assert batch.images.is_contiguous()
    for row, index in enumerate(ids.tolist()):
        image = dataset.open(index)
        box = NARROW.draw(ids[row : row + 1], make_key(9, 1)).box(0, *image.size)
        assert torch.equal(batch.images[row], *NARROW.cut(image, box))


def test_the_samples_of_an_epoch_do_not_depend_on_the_batch_size() -> None:
    large, small = (StepBatches(Noise(24), batch_size=size, crop=CROP, seed=2) for size in (8, 4))
    for epoch in range(2):
        ours = [small[6 * epoch + step] for step in range(6)]
        theirs = [large[3 * epoch + step] for step in range(3)]
        for a, b in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
            assert torch.equal(torch.cat(a), torch.cat(b))


def test_a_rank_keeps_its_part_of_an_order_and_no_more() -> None:
    part = Shuffle(1003, batch_size=100).order(make_key(7, 0), 20, 30)
    assert part.shape == (10, 10)
    assert part.untyped_storage().nbytes() == 10 * 10 * 8, "or every worker holds the order of all ranks"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_from_step_s_is_the_tail_of_one_from_0(workers: int) -> None:
    batches = StepBatches(Noise(23), batch_size=5, crop=CROP, seed=1)
    whole = [batches[step] for step in range(11)]  # two epochs and a part of the third
    assert_same(make_loader(batches, 0, 11, workers, pin_memory=False), whole)
    fresh = StepBatches(Noise(23), batch_size=5, crop=CROP, seed=1)
    tail = make_loader(fresh, 6, 11, workers, pin_memory=False)
    assert len(tail) == 5
    assert_same(tail, whole[6:])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_random_stream_alone(workers: int) -> None:
    before = torch.get_rng_state()
    list(make_loader(StepBatches(Noise(8), 4, CROP, seed=0), 0, 3, workers, pin_memory=False))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_one_sentence_after_the_good_batches(workers: int) -> None:
    batches = StepBatches(Noise(20), batch_size=4, crop=CROP, seed=3)
    broken = int(batches[2].sample_ids[1])
    damaged = StepBatches(Noise(20, {broken: "truncated"}), 4, CROP, seed=3)
    loader = iter(make_loader(damaged, 0, 5, workers, pin_memory=False))
    assert_same([next(loader), next(loader)], [batches[0], batches[1]])
    with pytest.raises(BadImage) as caught:
        next(loader)
    assert str(caught.value) == f"noise/{broken}.png cannot be read as an image; remove or replace it"
    assert (caught.value.name, caught.value.kind) == (f"noise/{broken}.png", "truncated")


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_replaces_nothing(workers: int) -> None:
    loader = iter(evaluation_loader(Noise(9, {5: "missing"}), batch_size=4, size=SIZE, workers=workers, crop_pct=1.0))
    next(loader)
    with pytest.raises(BadImage, match=r"noise/5\.png cannot be read"):
        next(loader)


def quarantine(folder: Path, count: int = 23, percent: float = 100) -> Quarantine:
    return Quarantine(folder / "quarantine.jsonl", count, percent)


BROKEN = {3: "missing", 4: "truncated", 11: "undecodable", 20: "truncated"}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 6])
def test_bad_images_change_their_own_places_and_nothing_else(tmp_path: Path, workers: int, start: int) -> None:
    sound, damaged = (StepBatches(Noise(23, broken), 5, CROP, seed=1) for broken in ({}, BROKEN))
    assert damaged.steps_per_epoch == sound.steps_per_epoch
    stop = 5 * sound.steps_per_epoch
    got = list(make_loader(damaged, start, stop, workers, pin_memory=False, quarantine=quarantine(tmp_path)))
    assert_same(got, [damaged[step] for step in range(start, stop)])
    replaced: dict[int, set[int]] = {index: set() for index in BROKEN}
    for batch, expected in zip(got, [sound[step] for step in range(start, stop)], strict=True):
        assert torch.equal(batch.sample_ids, expected.sample_ids)
        hurt = torch.tensor([index in BROKEN for index in batch.sample_ids.tolist()])
        assert torch.equal(batch.images[~hurt], expected.images[~hurt])
        assert torch.equal(batch.labels[~hurt], expected.labels[~hurt])
        for index, label in zip(batch.sample_ids[hurt].tolist(), batch.labels[hurt].tolist(), strict=True):
            replaced[index].add(label)
    assert [len(labels) for labels in replaced.values()] == [1] * 4  # in every epoch the same substitute


def test_a_substitute_is_cropped_by_the_draw_of_the_place_it_takes() -> None:
    dataset = Noise(23, BROKEN)
    batches = StepBatches(dataset, 5, NARROW, seed=1)
    seen = 0
    for step in range(2 * batches.steps_per_epoch):
        batch, substitutions = batches.load(step)
        for item in substitutions:
            row = batch.sample_ids.tolist().index(item.sample_id)
            source = int(item.substitute.removeprefix("noise/").removesuffix(".png"))
            image, key = dataset.open(source), make_key(1, step // batches.steps_per_epoch)
            box = NARROW.draw(torch.tensor([item.sample_id]), key).box(0, *image.size)
            assert torch.equal(batch.images[row], *NARROW.cut(image, box))
            assert batch.labels[row] == dataset.label(source)
            seen += 1
    assert seen >= 4


def test_two_bad_images_in_one_batch_are_both_replaced_and_listed(tmp_path: Path) -> None:
    first, second = StepBatches(Noise(20), 4, CROP, seed=3)[0].sample_ids[[1, 3]].tolist()
    broken = {first: "missing", second: "truncated"}
    held = quarantine(tmp_path, 20)
    (batch,) = make_loader(StepBatches(Noise(20, broken), 4, CROP, seed=3), 0, 1, 0, False, held)
    assert batch.images.shape == (4, *SIZE, 3)
    rows = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["sample_id"], row["kind"], row["step"]) for row in rows] == [
        (first, "missing", 1),
        (second, "truncated", 1),
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_bad_image_is_listed_once_over_epochs_and_a_resume(tmp_path: Path, workers: int) -> None:
    damaged = StepBatches(Noise(23, BROKEN), 5, CROP, seed=1)
    for start, stop in ((0, 2), (1, 20)):  # killed after two steps, continued from a checkpoint of one
        held = quarantine(tmp_path)
        list(make_loader(damaged, start, stop, workers, False, held))
    rows = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(row["sample_id"] for row in rows) == sorted(BROKEN)
    assert all(row["kind"] == BROKEN[row["sample_id"]] for row in rows)
    assert held.counts == {"missing": 1, "truncated": 2, "undecodable": 1}
    for row in rows:
        steps = [step for step in range(20) if row["sample_id"] in damaged[step].sample_ids]
        assert row["step"] == steps[0] + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_bad_image_beyond_the_rate_stops_with_one_sentence(tmp_path: Path, workers: int) -> None:
    damaged = StepBatches(Noise(200, dict.fromkeys(range(0, 200, 40), "truncated")), 1, CROP, seed=1)
    asked = [step for step in range(200) if int(damaged[step].sample_ids) % 40 == 0]
    held = quarantine(tmp_path, 200, percent=1)
    loader = iter(make_loader(damaged, 0, 200, workers, False, held))
    assert_same(islice(loader, asked[2]), [damaged[step] for step in range(asked[2])])  # two of 200 are 1 %
    with pytest.raises(DataError) as caught:
        next(loader)
    sentence = str(caught.value)
    assert "3 of 200 images are bad (3 truncated)" in sentence
    assert f"the first of them noise/{int(damaged[asked[0]].sample_ids)}.png" in sentence
    assert str(tmp_path / "quarantine.jsonl") in sentence
    assert "data.max_bad_percent=1 " in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_without_any_substitute_stops_the_run(tmp_path: Path, workers: int) -> None:
    ruined = StepBatches(Noise(6, dict.fromkeys(range(6), "missing")), 2, CROP, seed=1)
    with pytest.raises(DataError, match=r"^noise/\d\.png cannot be read .* no substitute can be used") as caught:
        next(iter(make_loader(ruined, 0, 3, workers, False, quarantine(tmp_path, 6))))
    assert not isinstance(caught.value, BadImage)


class Gone(Noise):
    """A data set that has lost its server."""

    def image(self, index: int) -> Pixels:
        raise DataError("the server is gone")


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_with_the_whole_data_set_is_not_papered_over(tmp_path: Path, workers: int) -> None:
    loader = make_loader(StepBatches(Gone(6), 2, CROP, seed=1), 0, 3, workers, False, quarantine(tmp_path, 6))
    with pytest.raises(DataError, match=r"^the server is gone$"):
        next(iter(loader))


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (4, 0)])
def test_the_parts_of_all_ranks_make_the_whole_batch(tmp_path: Path, world: int, workers: int) -> None:
    dataset = Noise(43, BROKEN)
    whole = StepBatches(dataset, 8, CROP, seed=1)
    parts = [StepBatches(dataset, 8, CROP, seed=1, rank=rank, world=world) for rank in range(world)]
    assert all(part.steps_per_epoch == whole.steps_per_epoch for part in parts)
    held = [quarantine(tmp_path, 43) for _ in parts]  # one list for all
    loaders = [make_loader(part, 3, 15, workers, False, own) for part, own in zip(parts, held, strict=True)]
    for step, shares in zip(range(3, 15), zip(*loaders, strict=True), strict=True):
        for ours, theirs in zip(zip(*shares, strict=True), whole[step], strict=True):
            assert torch.equal(torch.cat(ours), theirs)
    rows = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(row["sample_id"] for row in rows) == sorted(BROKEN)
    assert quarantine(tmp_path, 43).counts == {"missing": 1, "truncated": 2, "undecodable": 1}


class Slow:
    """Two batches, of which the second tells the worker's process id only after a while."""

    def __init__(self, seconds: float = 0.5) -> None:
        self.seconds = seconds

    def load(self, number: int) -> tuple[Batch, tuple[()]]:
        if number:
            time.sleep(self.seconds)
        return Batch(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.tensor([os.getpid()]), torch.zeros(1)), ()


def test_a_worker_outlives_the_signals_that_reach_a_whole_job() -> None:
    loader = iter(BatchLoader(Slow(), 0, 2, workers=1, pin_memory=False))
    worker = int(next(loader).sample_ids)
    assert worker != os.getpid()
    for number in (signal.SIGUSR1, signal.SIGINT):
        os.kill(worker, number)
    subprocess.run(["kill", "-TERM", str(worker)], check=True)  # as from a launcher: not from this process
    assert int(next(loader).sample_ids) == worker


def test_a_worker_that_is_busy_ends_when_its_parent_says_so() -> None:
    loader = iter(BatchLoader(Slow(seconds=600), 0, 2, workers=1, pin_memory=False))
    worker = int(next(loader).sample_ids)
    (process,) = [child for child in multiprocessing.active_children() if child.pid == worker]
    process.terminate()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"batch_size": 21},
            "batch_size=21 must be between 1 and the 20 images of an epoch; set a smaller one, or experiment=",
        ),
        ({"batch_size": 0}, "batch_size=0 must be between 1 and the 20 images"),
        ({"rank": 1, "world": 3}, "batch_size=4 is not divisible by 3 processes"),
    ],
)
def test_impossible_batch_sizes_are_rejected(options: dict[str, int], sentence: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 4, "seed": 0} | options
    with pytest.raises(ConfigError) as caught:
        training_batches(DataConfig(), Noise(20), **arguments)
    assert sentence in str(caught.value)


class Collecting(Noise):
    """Images whose reading collects garbage."""

    def image(self, index: int) -> Pixels:
        gc.collect()
        return super().image(index)


class Cycle:
    """Garbage that must not be collected in another process, as a CUDA graph."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os.abort()


def test_workers_do_not_collect_the_garbage_of_their_parent() -> None:
    gc.collect()
    Cycle()
    loader = evaluation_loader(Collecting(8), 4, SIZE, workers=1, crop_pct=1)
    assert sum(len(batch.sample_ids) for batch in loader) == 8
    assert not gc.get_freeze_count()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["graph", "event", "tensor"])
def test_workers_do_not_collect_objects_of_the_gpu(kind: str) -> None:
    value = torch.ones(1000, device="cuda")
    event = torch.cuda.Event()
    event.record()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value + 1
    garbage = [{"graph": graph, "event": event, "tensor": value}[kind]]
    garbage.append(garbage)
    del garbage, value, event, graph
    assert len(list(evaluation_loader(Collecting(8), 4, SIZE, workers=1, crop_pct=1))) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_shows_every_image_once_in_order(workers: int) -> None:
    dataset = Noise(11)
    loader = evaluation_loader(dataset, batch_size=4, size=SIZE, workers=workers, crop_pct=0.9)
    assert len(loader) == 3
    for _ in range(2):  # it can be walked again
        batches = list(loader)
        assert [len(batch.images) for batch in batches] == [4, 4, 3]
        assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(11))
        assert torch.cat([batch.labels for batch in batches]).tolist() == [index % 5 for index in range(11)]
        images = torch.cat([batch.images for batch in batches])
        assert all(torch.equal(images[i], evaluation_view(dataset.open(i), SIZE, 0.9)) for i in range(11))


def test_evaluation_batches_end() -> None:
    batches = EvaluationBatches(Noise(8), batch_size=4, size=SIZE, crop_pct=1.0)
    assert len(batches) == 2
    with pytest.raises(IndexError):
        batches[2]


class Unpicklable:
    """A batch that no queue can take."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def load(self, number: int) -> tuple[Batch, tuple[()]]:
        batch, rest = Slow(0).load(number)
        return batch._replace(labels=_Raising(self.error)), rest  # type: ignore[arg-type]


class _Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind", "cure"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError, "or workers=0, or enlarge /dev/shm"),
        (OSError("AF_UNIX path too long"), DataError, "set TMPDIR to a shorter path, such as TMPDIR=/tmp"),
        (OSError(errno.EMFILE, "Too many open files"), DataError, r"raise the limit of open files \(ulimit -n\)"),
        (MemoryError(), DataError, "set fewer workers, or workers=0"),
        (TypeError("cannot pickle"), DataError, "set workers=0 to load in the main process"),
    ],
)
def test_a_failure_of_a_feeder_thread_is_one_line_with_its_cure(
    error: Exception, kind: type[UserError], cure: str
) -> None:
    with pytest.raises(kind, match=f"^a loader worker cannot send a batch .*{cure}") as caught:
        next(iter(BatchLoader(Unpicklable(error), 0, 4, workers=1, pin_memory=False)))
    assert "\n" not in str(caught.value)


@pytest.mark.alone
def test_a_stopped_worker_keeps_nobody_for_longer_than_the_limit(capfd: pytest.CaptureFixture[str]) -> None:
    loader = iter(BatchLoader(Slow(30), 0, 2, workers=1, pin_memory=False, limit=Limit(minutes=0.02)))
    worker = int(next(loader).sample_ids)
    os.kill(worker, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"^no data arrived for 0\.02 minute\(s\)"):
        next(loader)
    assert time.monotonic() - begin < 8
    assert f"loader worker {worker}, state T" in capfd.readouterr().err
    assert worker not in [child.pid for child in multiprocessing.active_children()]
