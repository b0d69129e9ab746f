"""A run over shards goes on where it was killed, whoever goes on, and with nothing but the shards it began with."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch

import dmjd.train.loop as loop
from dmjd.compose import compose
from dmjd.config import DataConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches
from dmjd.data.loader import make_loader
from dmjd.data.quarantine import Quarantine
from dmjd.data.shards.index import INDEX, Shard, load, save
from dmjd.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT, BATCH, STEPS = 203, 16, 30  # 12 steps an epoch
BROKEN = (11, 57, 120)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, photo: Callable[..., bytes]) -> DataConfig:
    """203 small images in shards of 1 to 40, three of them not as their crc32 says."""
    folder, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    rows, shards, number = list[tuple[int, ...]](), list[Shard](), 0
    while number < COUNT:
        count = min(int(rng.integers(1, 41)), COUNT - number)
        images = [photo(number + place, size=(20, 24)) for place in range(count)]
        offset = 0
        for image in images:
            crc32 = zlib.crc32(image) ^ (len(rows) in BROKEN)
            rows.append((len(shards), offset, len(image), len(rows) % 7, crc32, 20, 24))
            offset += len(image)
        content = b"".join(images)
        name = f"{len(shards)}.tar"
        (folder / name).write_bytes(content)
        shards.append(Shard(name, count, len(content), hashlib.sha256(content).hexdigest()))
        number += count
    save(folder, shards, np.array(rows, dtype=INDEX), 3, tuple("abcdefg"), "test")
    return DataConfig(name="shards", root=str(folder), image_size=[8, 8], max_bad_percent=2.0)


@pytest.fixture(scope="module")
def whole(many: DataConfig) -> list[Batch]:
    """Every batch of an uninterrupted run of one process."""
    batches = training_batches(many, build_dataset(many, "train"), BATCH, seed=3)
    return [batches[step] for step in range(STEPS)]


def launch(config: DataConfig, folder: Path, start: int, stop: int, world: int, workers: int) -> list[Batch]:
    """Batches ``start .. stop - 1`` of a run that would go on: of all ranks, one behind another."""
    loaders = []
    for rank in range(world):
        dataset = build_dataset(config, "train")
        batches = training_batches(config, dataset, BATCH, 3, rank, world)
        quarantine = Quarantine(folder / "quarantine.jsonl", len(dataset), config.max_bad_percent)
        loaders.append(iter(make_loader(batches, start, STEPS, workers, False, quarantine)))
    steps = islice(zip(*loaders, strict=True), stop - start)
    return [Batch(*(torch.cat(parts) for parts in zip(*shares, strict=True))) for shares in steps]


LAUNCHES = [(world, workers) for world in (1, 2, 4, 8) for workers in (0, 1, 3)]


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_that_is_killed_again_and_again_is_the_uninterrupted_one(
    many: DataConfig, whole: list[Batch], tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kills = sorted(rng.choice(np.arange(1, STEPS), 3, replace=False).tolist())
    launches = cycle(rng.permutation(LAUNCHES)[seed % 2 :].tolist() if seed else LAUNCHES[::-1])
    seen: list[Batch] = []
    for start, stop in zip([0, *kills], [*kills, STEPS], strict=True):
        seen += launch(many, tmp_path, start, stop, *next(launches))
    for ours, theirs in zip(seen, whole, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("world", "workers"), LAUNCHES)
def test_every_number_of_ranks_and_workers_goes_on_with_the_same_batches(
    many: DataConfig, whole: list[Batch], tmp_path: Path, world: int, workers: int
) -> None:
    start = int(np.random.default_rng(100 * world + workers).integers(1, STEPS - 4))
    for ours, theirs in zip(launch(many, tmp_path, start, start + 4, world, workers), whole[start:], strict=False):
        assert all(map(torch.equal, ours, theirs))


def test_an_epoch_covers_the_set_but_for_the_remainder_and_epochs_differ(whole: list[Batch]) -> None:
    epochs = [torch.cat([batch.sample_ids for batch in whole[start : start + 12]]).tolist() for start in (0, 12)]
    for ids in epochs:
        assert len(ids) == len(set(ids)) == COUNT - COUNT % BATCH
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) != set(epochs[1])


def test_bad_samples_are_listed_and_leave_every_batch_its_size(
    many: DataConfig, whole: list[Batch], tmp_path: Path
) -> None:
    launch(many, tmp_path, 0, STEPS, 2, 0)
    rows = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(row["sample_id"] for row in rows) == sorted(BROKEN)
    assert {row["kind"] for row in rows} == {"crc"}
    assert {batch.images.shape for batch in whole} == {(BATCH, 8, 8, 3)}
    # Told apart by a name that the set keeps when it is moved, else they would count twice and stop the run.
    assert many.root is not None
    moved = replace(many, root=str(shutil.copytree(many.root, tmp_path / "elsewhere")))
    launch(moved, tmp_path, 0, STEPS, 2, 0)
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == len(rows)


def test_a_batch_larger_than_the_set_is_refused(many: DataConfig) -> None:
    with pytest.raises(ConfigError, match=r"batch_size=300 must be between 1 and the 203 images"):
        training_batches(many, build_dataset(many, "train"), 300, seed=3)


# Whole runs


@pytest.fixture
def words(
    tiny: Callable[..., list[str]], finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """``words(root, *more)``: twelve steps in four epochs over the shards at ``root``, checkpoints at 5, 10 and 12."""
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: None)
    shards = ("data=shards", "data.image_size=[16,16]", "epochs=4", "batch_size=8", "log_every=1", "checkpoint_every=5")

    def make(root: Path, *more: str) -> list[str]:
        return tiny(tmp_path / "run", *shards, f"data.root={root}", "keep_checkpoints=9", *more)

    return make


def test_a_run_goes_on_from_a_copy_of_its_shards_elsewhere(
    words: Callable[..., list[str]], finished: Path, tmp_path: Path
) -> None:
    run = loop.pretrain(compose("pretrain", words(finished)))
    log = run.log.read_bytes()
    assert len(log.splitlines()) == 12
    for step in (10, 12):
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
    copy = shutil.copytree(finished, tmp_path / "elsewhere")
    loop.pretrain(compose("pretrain", words(Path(copy), "workers=1", "data.cache_gib=7")))
    assert run.log.read_bytes() == log


def test_two_views_and_three_workers_change_no_number(words: Callable[..., list[str]], finished: Path) -> None:
    logs = []
    for workers in (0, 3):
        run = loop.pretrain(compose("pretrain", words(finished, "mask.views=2", f"workers={workers}")))
        logs.append(run.log.read_bytes())
        shutil.rmtree(run.path)
    assert logs[0] == logs[1]


def test_other_shards_and_another_seed_are_refused_by_name(
    words: Callable[..., list[str]], finished: Path, tmp_path: Path
) -> None:
    run = loop.pretrain(compose("pretrain", words(finished)))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    copy = Path(shutil.copytree(finished, tmp_path / "elsewhere"))
    shards = load(copy / "train")
    records = np.array(shards.records)
    records["label"][0] = 1
    other = save(copy / "train", shards.manifest.shards, records, 3, shards.manifest.classes, "test")
    before_and_now = (shards.manifest.fingerprint[:12], other.fingerprint[:12])
    both = "fingerprint {}, and data.root now has .* images of fingerprint {};".format(*before_and_now)
    with pytest.raises(ConfigError, match=both):
        loop.pretrain(compose("pretrain", words(copy)))
    with pytest.raises(ConfigError, match="was started with seed=0, and seed=1 is set now"):
        loop.pretrain(compose("pretrain", words(finished, "seed=1")))
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
