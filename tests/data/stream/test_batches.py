"""Streams of real commands that write real tars, read by two ranks with and without workers."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmjd.config import DataConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches, training_source
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.dataset import InMemory
from dmjd.data.loader import make_loader
from dmjd.data.quarantine import Quarantine
from dmjd.data.shards.network import Patience
from dmjd.data.skipped_batches import SkippedBatches
from dmjd.data.stream.batches import TarStream
from dmjd.errors import ConfigError, DataError
from dmjd.ops import make_key
from tests.compare import rows, telling
from tests.data.stream.conftest import SIZES, image

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

BATCH, STEPS = 8, 40  # 7 steps an epoch

QUICK = Patience(attempts=2, first_pause=0.01, stall=20)


def config(root: Path | str, **values: Any) -> DataConfig:
    defaults: dict[str, Any] = {"image_size": [8, 8], "check": "none", "samples": 60, "shuffle_buffer": 8}
    return DataConfig(name="stream", root=str(root), **{**defaults, **values})


def piped(tars: Path) -> str:
    return f"pipe:cat {tars}/{{0..5}}.tar"


def launch(of: DataConfig, folder: Path, start: int, stop: int, workers: int, world: int = 2) -> list[list[Batch]]:
    """The batches of every rank."""
    ranks = []
    for rank in range(world):
        stream = training_source(of)
        assert isinstance(stream, TarStream)
        batches = training_batches(of, replace(stream, patience=QUICK), BATCH, 3, rank, world)
        quarantine = Quarantine(folder / "quarantine.jsonl", len(stream), of.max_bad_percent)
        ranks.append(list(make_loader(batches, start, stop, workers, False, quarantine)))
    return ranks


def shown(batches: list[Batch]) -> list[int]:
    """The numbers of the images."""
    return [int(view[0, 0, 0]) for batch in batches for view in batch.images]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_rank_has_every_step_and_places_are_ids(tars: Path, tmp_path: Path, workers: int) -> None:
    ranks = launch(config(piped(tars)), tmp_path, 5, STEPS, workers)
    for step, parts in enumerate(zip(*ranks, strict=True), 5):
        assert [part.images.shape for part in parts] == [(BATCH // 2, 8, 8, 3)] * 2
        ids = torch.cat([part.sample_ids for part in parts])
        assert ids.tolist() == list(range(step * BATCH, (step + 1) * BATCH))
    assert len(ranks[0]) == len(ranks[1]) == STEPS - 5
    assert not (tmp_path / "quarantine.jsonl").exists()
    counts = torch.bincount(torch.tensor(shown(ranks[0]) + shown(ranks[1])), minlength=60)
    assert len(counts) == 60
    assert counts.min() >= 1  # 280 images of 60: every reader has come to all tars of several passes


def test_a_pass_gives_every_tar_one_reader_and_passes_and_starts_differ(tars: Path) -> None:
    stream = TarStream([f"pipe:cat {tars}/{number}.tar" for number in range(6)], 60, 3, 8)
    deals = set()
    for start, number in ((0, 0), (0, 1), (0, 2), (7, 0)):
        dealt = [stream.assign(3, (start, 1), number, reader, 4) for reader in range(4)]
        assert sorted(map(len, dealt)) == [1, 1, 2, 2]
        assert sorted(chain.from_iterable(dealt)) == stream.locations
        deals.add(str(dealt))
    assert len(deals) == 4
    for reader in range(4):
        expected = [tar for number in range(2) for tar in stream.assign(3, (0, 1), number, reader, 4)]
        images = stream.images(3, (0, 1), reader, 4, lambda bad: pytest.fail(str(bad)))
        counts = [int(location[-5]) for location in expected]
        names = [picture.name.rpartition(": ")[0] for picture in islice(images, sum(SIZES[tar] for tar in counts))]
        assert names == [tar for tar, count in zip(expected, counts, strict=True) for _ in range(SIZES[count])]


def test_a_launch_is_repeated_exactly_and_another_start_is_another_order(tars: Path, tmp_path: Path) -> None:
    of = config(piped(tars))
    first, again = (launch(of, tmp_path, 0, 12, 2) for _ in range(2))
    for ours, theirs in zip(chain(*first), chain(*again), strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert shown(launch(of, tmp_path, 12, 24, 2)[0]) != shown(first[0])


def test_images_are_shuffled_and_crops_differ_when_an_image_comes_again(tmp_path: Path, tars: Path) -> None:
    (batches,) = launch(config(f"{tars}/1.tar", samples=15), tmp_path, 0, 6, 0, world=1)
    numbers = shown(batches)
    assert numbers != sorted(numbers)
    assert set(numbers) == set(range(5, 20))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_and_tars_are_counted_and_leave_every_batch_its_size(
    tars: Path, tmp_path: Path, write_tar: Callable[..., Path], workers: int
) -> None:
    write_tar(tmp_path / "spoilt.tar", range(100, 108), {101: b"", 103: b"<html>", 105: image(105)[:40]})
    (tmp_path / "cut.tar").write_bytes((tars / "1.tar").read_bytes()[:9000])
    root = f"{piped(tars)}::pipe:cat {tmp_path}/spoilt.tar::pipe:cat {tmp_path}/cut.tar::pipe:cat {tars}/0.tar; exit 9"
    ranks = launch(config(root, samples=90, max_bad_percent=99.0), tmp_path, 0, STEPS, workers)
    assert {batch.images.shape for batches in ranks for batch in batches} == {(BATCH // 2, 8, 8, 3)}
    rows = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    kinds = {row["name"].rpartition("/")[2]: (row["kind"], row.get("images", 1)) for row in rows}
    assert kinds == {
        "spoilt.tar: 00101": ("truncated", 1),
        "spoilt.tar: 00103": ("undecodable", 1),
        "spoilt.tar: 00105": ("undecodable", 1),
        "cut.tar": ("truncated", 10),
        "0.tar; exit 9": ("unreadable", 10),
    }
    stream = training_source(config(root, samples=90))
    with pytest.raises(DataError, match=r"23 of 90 images are bad .*, more than data.max_bad_percent=25 allows"):
        Quarantine(tmp_path / "quarantine.jsonl", len(stream), 25.0)
    Quarantine(tmp_path / "quarantine.jsonl", len(stream), 26.0)


def test_a_tar_that_breaks_off_once_is_read_on_where_it_broke_off(tars: Path, tmp_path: Path) -> None:
    state = tmp_path / "tried"
    command = f"pipe:if [ -e {state} ]; then cat {tars}/1.tar; else touch {state}; head -c 9000 {tars}/1.tar; fi"
    images = TarStream([command], 15, 3, 1, QUICK).images(0, (0, 1), 0, 1, lambda bad: pytest.fail(str(bad)))
    names = [picture.name.rpartition(" ")[2] for picture in islice(images, 15)]
    assert names == [f"{number:05d}" for number in range(5, 20)]
    assert state.exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_where_nothing_comes_any_more_the_run_stops_instead_of_hanging(tmp_path: Path, workers: int) -> None:
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"no image can be read from any of 3 tar\(s\); the last: pipe:exit \d "):
        launch(config("pipe:exit {1..3}", max_bad_percent=100.0), tmp_path, 0, 5, workers, world=1)
    assert time.monotonic() - begin < 30


def test_workers_are_no_more_than_tars_to_read_and_it_is_said(
    tars: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (batches,) = launch(config(f"{tars}/{{1..2}}.tar"), tmp_path, 0, 12, 5, world=1)
    assert len(batches) == 12
    assert "2 tars for 1 process(es) are enough for 2 worker(s) each, not workers=5" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_where_nothing_that_comes_can_be_used_the_run_stops_instead_of_hanging(
    tmp_path: Path, write_tar: Callable[..., Path], workers: int
) -> None:
    write_tar(tmp_path / "bad.tar", range(20), dict.fromkeys(range(20), b"<html>"))
    with pytest.raises(DataError, match=r"1001 images of one batch cannot be used, the last: .*not a supported format"):
        launch(config(f"pipe:cat {tmp_path}/bad.tar"), tmp_path, 0, 5, workers, world=1)


@pytest.mark.parametrize(
    ("error", "said", "values"),
    [
        (DataError, "needs data.root, such as", {"root": None}),
        (DataError, "/absent/1.tar of data.root does not exist", {"root": "/absent/{1..2}.tar"}),
        (ConfigError, "has an unmatched brace", {"root": "pipe:cat {1..2.tar"}),
        (ConfigError, "needs data.samples", {"samples": None}),
        (ConfigError, "set data.check=none", {"check": "header"}),
        (ConfigError, "data.cache is for data.name=shards", {"cache": "/tmp"}),
        (ConfigError, "data.channels must be 1 or 3", {"channels": 2}),
    ],
)
def test_what_a_stream_cannot_have_is_said(error: type[Exception], said: str, values: dict[str, Any]) -> None:
    with pytest.raises(error, match=said):
        training_source(replace(config("pipe:true"), **values))


def test_what_is_only_for_streams_or_never_for_them_is_said(tars: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.samples is for data.name=stream"):
        build_dataset(DataConfig(name="digits", samples=3), "train")
    with pytest.raises(ConfigError, match=r"is for training only"):
        build_dataset(config(piped(tars)), "test")
    stream = training_source(config(piped(tars)))
    assert isinstance(stream, TarStream)
    for arguments, message in (
        ((61, 0), "batch_size=61 must be between 1 and the 60 images of an epoch"),
        ((8, 0, 0, 3), "is not divisible by 3 processes"),
        ((56, 0, 0, 7), r"data.root has 6 tar\(s\), fewer than 7 processes"),
    ):
        with pytest.raises(ConfigError, match=message):
            training_batches(DataConfig(), stream, *arguments)


def test_online_knn_of_a_stream_is_refused_before_anything_is_written(
    tars: Path, tmp_path: Path, tiny: Callable[..., list[str]], dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    words = tiny(
        tmp_path / "run", "data=stream", f"data.root='{piped(tars)}'", "data.samples=60", "online_knn.every_epochs=1"
    )
    code, _, said = dmjd("pretrain", *words)
    assert code == 2
    assert "is for training only" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_rolled_back_to_where_it_began_meets_other_images(tars: Path, workers: int) -> None:
    """Windows alone would only give the images that led there other numbers."""
    stream = training_source(config(piped(tars)))
    batches = training_batches(config(piped(tars)), stream, BATCH, 3)
    before, after, after_two = (
        list(make_loader(SkippedBatches(batches, windows), 3, 9, workers, False))
        for windows in ((), ((5, 6),), ((4, 6),))
    )
    assert [batch.sample_ids[0] // BATCH for batch in after] == [3, 4, 6, 7, 8, 9]
    assert len({str(shown(read[:2])) for read in (before, after, after_two)}) == 3
    again = training_batches(config(piped(tars)), stream, BATCH, 3)
    assert shown(list(make_loader(again, 3, 9, workers, False))) == shown(before)


def test_a_worker_that_is_ended_ends_its_commands_too(tars: Path, tmp_path: Path) -> None:
    """One that writes would end by itself when nobody reads; one that waits for its server need not."""
    of = config(f"pipe:echo $$ > {tmp_path / 'pid'}; cat {tars}/1.tar; sleep 60", samples=BATCH)
    batches = training_batches(of, training_source(of), BATCH, 3)
    with closing(iter(make_loader(batches, 0, 9, 1, False))) as loader:
        next(loader)
    command, end = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while Path(f"/proc/{command}").exists():
        assert time.monotonic() < end, "it sleeps on"
        time.sleep(0.01)


def test_crops_are_resampled_as_configured_and_a_second_time_for_the_target(
    tmp_path: Path, write_tar: Callable[..., Path]
) -> None:
    pixels, file = np.random.default_rng(0).integers(0, 256, (60, 50, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    tar = write_tar(tmp_path / "one.tar", range(1), {0: file.getvalue()})
    of = config(tar, image_size=[32, 32], second_size=[16, 16], interpolation="bilinear", samples=BATCH)
    ((batch,),) = launch(of, tmp_path, 1, 2, workers=0, world=1)
    crop = RandomResizedCrop((32, 32), interpolation="bilinear")
    draws = crop.draw(batch.sample_ids, make_key(3, 1))
    assert batch.second.shape == (BATCH, 16, 16, 3)
    for row in range(BATCH):
        top, left, height, width = box = draws.box(row, 60, 50)
        assert torch.equal(batch.images[row], *crop.cut(InMemory(pixels), box))
        part = Image.fromarray(pixels[top : top + height, left : left + width])
        np.testing.assert_array_equal(batch.second[row].numpy(), part.resize((16, 16), Image.Resampling.LANCZOS))


# Whole runs


@pytest.fixture
def words(tars: Path, tmp_path: Path, tiny: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """``words(*more)``: eight steps of eight images."""
    stream = (
        "data=stream",
        f"data.root='{piped(tars)}'",
        "data.samples=32",
        "data.shuffle_buffer=4",
        "data.image_size=[16,16]",
        "epochs=2",
        "batch_size=8",
        "log_every=1",
        "checkpoint_every=3",
    )

    def make(*more: str) -> list[str]:
        return tiny(tmp_path / "run", *stream, *more)

    return make


def columns(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(run)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_run_of_two_ranks_comes_to_its_end(
    words: Callable[..., list[str]], tmp_path: Path, launch_world: Callable[..., Any], workers: int
) -> None:
    command = ["pretrain", *words("engine=ddp", "engine.device=cpu", f"workers={workers}")]
    ranks = launch_world(2, command, telling(tmp_path / "said"))
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [step for step, _ in columns(tmp_path / "run")] == list(range(1, 9))
    assert (tmp_path / "said").read_text().count("data.name=stream does not resume exactly") == 1


def test_a_run_that_is_killed_goes_on_with_other_images_and_says_so(
    words: Callable[..., list[str]], tmp_path: Path, launch: Callable[..., Any]
) -> None:
    kill = """
import dmjd.train.loop as loop
save = loop.Trainer.save_checkpoint
def fault(self):
    save(self)
    os.kill(os.getpid(), 9)
loop.Trainer.save_checkpoint = fault
"""
    first = launch(["pretrain", *words("workers=1")], kill)
    first.join(60)
    assert first.exitcode == -9
    second = launch(["pretrain", *words("workers=1")], telling(tmp_path / "said"))
    second.join(60)
    assert second.exitcode == 0
    assert [step for step, _ in columns(tmp_path / "run")] == list(range(1, 9))
    assert "data.name=stream does not resume exactly" in (tmp_path / "said").read_text()
