"""Shards behind a real HTTP server that misbehaves when told to, and the cache of a node in front of it."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dmjd.config import DataConfig
from dmjd.data.build import build_dataset, fetch_ahead, training_batches
from dmjd.data.loader import make_loader
from dmjd.data.shards.cache import ShardCache, fetch_shard
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.shards.index import INDEX, Manifest, Shard, ShardSet, load, load_splits
from dmjd.data.shards.network import Patience
from dmjd.data.shards.prefetch import Prefetch
from dmjd.data.shards.sampler import ShardSampler, shard_sampler
from dmjd.errors import DataError
from dmjd.ops.philox import make_key
from tests.data.shards.http_server import SIZE, Server, content

pytest.importorskip("aiohttp", reason="needs aiohttp, with which fsspec reads HTTP")

QUICK = Patience(attempts=4, first_pause=0.01, longest_pause=0.02, stall=0.4)


def shard(name: str) -> Shard:
    return Shard(name, 10, SIZE, hashlib.sha256(content(name)).hexdigest())


def files_of(name: str) -> set[str]:
    """A shard in a cache, and the stamp of this user."""
    return {f"{shard(name).sha256}.tar", f"{shard(name).sha256}.{os.geteuid()}.stamp"}


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# One download


@pytest.mark.parametrize(
    "faults",
    [[], ["503"], ["429", "500"], ["cut"], ["short"], ["other"], ["stall"], ["cut", "503", "stall"]],
    ids=lambda faults: "+".join(faults) or "none",
)
def test_a_fault_that_passes_costs_another_attempt_and_nothing_else(
    server: Server, tmp_path: Path, faults: list[str]
) -> None:
    server.faults = list(faults)
    fetch_shard(server.url("a"), shard("a"), tmp_path / "a", QUICK)
    assert (tmp_path / "a").read_bytes() == content("a")
    assert server.requests["a"] == 1 + len(faults)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("503", "503"),
        ("cut", "."),
        ("short", "received 20000 bytes, not the 40000 of the manifest"),
        ("other", "the download has another sha256 than in the manifest"),
        ("stall", "."),
    ],
)
def test_a_fault_that_stays_is_one_sentence_after_the_last_attempt(
    server: Server, tmp_path: Path, fault: str, said: str
) -> None:
    server.faults = [fault] * 9
    begin = time.monotonic()
    with pytest.raises(DataError, match=said) as caught:
        fetch_shard(server.url("a"), shard("a"), tmp_path / "a", QUICK)
    assert time.monotonic() - begin < 4 * (QUICK.stall + 0.5)
    assert server.requests["a"] == 4
    assert str(caught.value).startswith(f"{server.url('a')} cannot be fetched: ")
    assert "at the last of 4 attempts" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["404", "403", "401", "410"])
def test_what_no_attempt_can_mend_is_said_at_once(server: Server, tmp_path: Path, fault: str) -> None:
    server.faults = [fault]
    with pytest.raises(DataError, match=r"cannot be fetched: \S"):
        fetch_shard(server.url("a"), shard("a"), tmp_path / "a", QUICK)
    assert server.requests["a"] == 1


def test_nobody_at_the_port_and_no_such_protocol(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"at the last of 4 attempts"):
        fetch_shard("http://127.0.0.1:9/a", shard("a"), tmp_path / "a", QUICK)
    with pytest.raises(DataError, match=r"gopher://x cannot be fetched: .*gopher"):
        fetch_shard("gopher://x", shard("a"), tmp_path / "a", QUICK)


def test_the_pauses_of_the_default_bridge_minutes_and_do_not_coincide() -> None:
    pauses = [[Patience().pause(failures) for failures in range(1, 10)] for _ in range(20)]
    assert all(120 < sum(row) < 250 for row in pauses)
    assert len({row[-1] for row in pauses}) > 10


# The cache


def test_reading_fetches_once_and_gives_parts(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "deep" / "cache", 3 * SIZE, QUICK)
    whole = content("a")
    assert cache.read(server.url("a"), shard("a"), 100, 50) == whole[100:150]
    assert cache.read(server.url("a"), shard("a"), SIZE - 7, 50) == whole[-7:]
    assert server.requests["a"] == 1
    assert [path.stat().st_size for path in (tmp_path / "deep" / "cache").glob("*.tar")] == [SIZE]


def test_files_are_told_apart_by_content_and_not_by_name(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 9 * SIZE, QUICK)
    assert cache.read(server.url("train/0.tar"), shard("train/0.tar"), 0, 9) == content("train/0.tar")[:9]
    assert cache.read(server.url("val/0.tar"), shard("val/0.tar"), 0, 9) == content("val/0.tar")[:9]
    assert cache.read("http://127.0.0.1:9/moved", shard("val/0.tar"), 0, 9) == content("val/0.tar")[:9]


def test_what_a_failed_download_leaves_is_never_read(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 9 * SIZE, QUICK)
    server.faults = ["cut"] * 4
    with pytest.raises(DataError):
        cache.read(server.url("a"), shard("a"), 0, 9)
    assert not list(tmp_path.glob("*.tar"))
    assert cache.read(server.url("a"), shard("a"), 0, SIZE) == content("a")


def test_the_oldest_goes_first_but_not_what_is_to_be_kept(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 3 * SIZE, QUICK)

    def held() -> set[str]:
        names = {shard(name).sha256: name for name in "abcdef"}
        return {names[path.stem] for path in tmp_path.glob("*.tar")}

    for name in "abc":
        cache.fetch(server.url(name), shard(name))
        time.sleep(0.01)
    cache.fetch(server.url("d"), shard("d"))
    assert held() == set("bcd")
    time.sleep(0.01)
    cache.fetch(server.url("e"), shard("e"), keep=lambda: [shard("b"), shard("c")])
    assert held() == set("bce")
    cache.fetch(server.url("f"), shard("f"), keep=lambda: [shard(name) for name in "bce"])
    assert held() == set("cef")  # the budget is stronger


def test_a_folder_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/cache cannot be written to .*; set data.cache"):
        ShardCache(tmp_path / "file" / "cache", 9 * SIZE, QUICK).fetch(server.url("a"), shard("a"))


def test_a_file_that_was_cut_is_fetched_again(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 9 * SIZE, QUICK)
    for length in (0, 17, SIZE - 1):
        cache.fetch(server.url("a"), shard("a"))
        os.truncate(next(tmp_path.glob("*.tar")), length)
        assert cache.read(server.url("a"), shard("a"), SIZE - 9, 9) == content("a")[-9:]
    assert server.requests["a"] == 4


def test_a_draft_stays_only_where_a_process_was_killed_and_goes_with_the_next_download(
    server: Server, tmp_path: Path
) -> None:
    cache = ShardCache(tmp_path, 9 * SIZE, QUICK)
    (tmp_path / f"{shard('gone').sha256}.part").write_bytes(b"half")
    held = tmp_path / f"{shard('held').sha256}.part"
    with held.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        server.faults = ["404"]
        with pytest.raises(DataError):
            cache.fetch(server.url("b"), shard("b"))
        assert [path.name for path in tmp_path.iterdir()] == [held.name]
        cache.fetch(server.url("a"), shard("a"))
        assert {path.name for path in tmp_path.iterdir()} == {held.name, *files_of("a")}
    cache.fetch(server.url("b"), shard("b"))
    assert {path.name for path in tmp_path.iterdir()} == {*files_of("a"), *files_of("b")}


def test_who_finds_that_somebody_was_faster_leaves_no_draft(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 9 * SIZE, QUICK)
    threads = [threading.Thread(target=cache.fetch, args=(server.url("a"), shard("a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.requests["a"] == 1
    assert {path.name for path in tmp_path.iterdir()} == files_of("a")


def read_in_child(folder: Path, url: str, start: float) -> None:
    time.sleep(max(start - time.time(), 0))
    assert ShardCache(folder, 9 * SIZE).read(url, shard("a"), 0, SIZE) == content("a")


def children(count: int, *arguments: object) -> list[multiprocessing.context.ForkProcess]:
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=read_in_child, args=arguments) for _ in range(count)]
    for child in started:
        child.start()
    return started


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_of_a_node_download_a_shard_once(server: Server, tmp_path: Path) -> None:
    started = children(3, tmp_path, server.url("a"), time.time() + 0.3)
    for child in started:
        child.join(20)
    assert [child.exitcode for child in started] == [0, 0, 0]
    assert server.requests["a"] == 1


def read_for_long(folder: Path, port: int, seed: int) -> None:
    cache = ShardCache(folder, 2 * SIZE, QUICK)
    for number in np.random.default_rng(seed).integers(0, 4, 60).tolist():
        name = "abcd"[number]
        assert cache.read(f"http://127.0.0.1:{port}/{name}", shard(name), 5, 60) == content(name)[5:65]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_share_a_cache_that_is_too_small_for_them_though_some_are_killed(
    server: Server, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    readers = [context.Process(target=read_for_long, args=(tmp_path, server.server_port, seed)) for seed in range(6)]
    for reader in readers:
        reader.start()
    for number, reader in enumerate(readers[:3]):
        wait_for(lambda number=number: server.requests.total() >= 4 * (number + 1))  # type: ignore[misc]
        reader.kill()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers[3:]] == [0, 0, 0]
    ShardCache(tmp_path, 2 * SIZE, QUICK).fetch(server.url("e"), shard("e"))
    assert {path.suffix for path in tmp_path.iterdir()} == {".tar", ".stamp"}
    assert sum(path.stat().st_size for path in tmp_path.glob("*.tar")) <= 2 * SIZE


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_killed_amid_a_download_blocks_nobody(server: Server, tmp_path: Path) -> None:
    server.faults = ["stall"]
    (child,) = children(1, tmp_path, server.url("a"), 0.0)
    while not any(path.stat().st_size for path in tmp_path.glob("*.part")):
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    assert ShardCache(tmp_path, 9 * SIZE, QUICK).read(server.url("a"), shard("a"), 0, SIZE) == content("a")
    assert server.requests["a"] == 2


def test_who_has_waited_for_a_draft_that_is_gone_locks_the_next_one(server: Server, tmp_path: Path) -> None:
    draft = tmp_path / f"{shard('a').sha256}.part"
    server.faults = ["stall"]
    with draft.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(
            target=ShardCache(tmp_path, 9 * SIZE, QUICK).fetch, args=(server.url("a"), shard("a"))
        )
        waiting.start()
        time.sleep(0.1)
        draft.rename(tmp_path / "evicted at once")
    wait_for(lambda: server.requests["a"] == 1)
    with draft.open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    waiting.join()
    assert [path.name for path in tmp_path.glob("*.tar")] == [f"{shard('a').sha256}.tar"]


def test_threads_that_read_while_others_evict_get_the_right_bytes(server: Server, tmp_path: Path) -> None:
    cache, names, wrong = ShardCache(tmp_path, 2 * SIZE, QUICK), "abcd", list[str]()

    def read(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(names), 25).tolist():
            name = names[number]
            if cache.read(server.url(name), shard(name), 5, 60) != content(name)[5:65]:
                wrong.append(name)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(path.stat().st_size for path in tmp_path.glob("*.tar")) <= 2 * SIZE


# Fetching ahead


NAMES = [f"{number}.tar" for number in range(12)]
SAMPLER = ShardSampler(
    np.full(12, 10), batch_size=4, streams=2, shuffle_samples=20
)  # 30 steps; about four shards are read at a time


def remote_set(server: Server) -> ShardSet:
    records = np.zeros(120, dtype=INDEX)
    records["shard"] = np.repeat(np.arange(12), 10)
    records["height"] = records["width"] = 64
    manifest = Manifest(tuple(shard(name) for name in NAMES), 120, 3, (), "", "test")
    return ShardSet(server.url(""), manifest, records)


def shards_read(steps: range, epoch: int = 0) -> list[str]:
    """The shards of some steps of an epoch, as they are first read."""
    ids = SAMPLER.order(make_key(5, epoch), 0, 4)[steps.start : steps.stop].flatten()
    return list(dict.fromkeys(NAMES[number // 10] for number in ids.tolist()))


def test_shards_come_in_the_order_of_the_plan_as_far_as_there_is_room(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 6 * SIZE, QUICK)
    ahead = Prefetch(cache, remote_set(server), SAMPLER, seed=5, columns=(0, 4))
    ahead.start(0, 60)
    wait_for(lambda: len(list(tmp_path.glob("*.tar"))) == 6)
    time.sleep(0.2)
    assert set(server.requests) == set(shards_read(range(30))[:6])  # and no further
    for step in range(60):
        ahead.reach(step)
        time.sleep(0.01)  # what a step takes
        for name in shards_read(range(step % 30, step % 30 + 1), step // 30):
            cache.read(server.url(name), shard(name), 0, 9)
    ahead.close()
    # Once an epoch at most, unless a shard goes at the very moment at which it is found to be here.
    assert server.requests.total() <= 24 + 2
    wait_for(lambda: sum(path.stat().st_size for path in tmp_path.glob("*.tar")) <= 6 * SIZE)


def test_a_resumed_run_fetches_for_what_is_left_of_it(server: Server, tmp_path: Path) -> None:
    ahead = Prefetch(ShardCache(tmp_path, 99 * SIZE, QUICK), remote_set(server), SAMPLER, seed=5, columns=(0, 2))
    ahead.start(25, 28)
    own = SAMPLER.order(make_key(5, 0), 0, 2)
    wanted = {NAMES[number // 10] for number in own[25:28].flatten().tolist()}
    wait_for(lambda: wanted <= set(server.requests))
    time.sleep(0.2)
    later = {NAMES[number // 10] for number in own[25:].flatten().tolist()}
    assert set(server.requests) <= later


def test_a_network_that_dies_ends_fetching_ahead_and_not_the_run(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults = ["404"] * 99
    ahead = Prefetch(ShardCache(tmp_path, 99 * SIZE, QUICK), remote_set(server), SAMPLER, seed=5, columns=(0, 4))
    ahead.start(0, 30)
    wait_for(lambda: "prefetching of shards stopped" in caplog.text)
    ahead.reach(3)
    ahead.close()


def test_a_budget_below_what_is_read_at_a_time_is_warned_of(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = Prefetch(ShardCache(tmp_path, 2 * SIZE, QUICK), remote_set(server), SAMPLER, seed=5, columns=(0, 4))
    ahead.start(0, 30)
    wait_for(lambda: "data.cache_gib=" in caplog.text)
    ahead.close()
    assert "some will be fetched more than once an epoch" in caplog.text


def test_tars_on_a_disk_take_nothing_of_the_budget(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a set that was indexed in place, one tar is far and the others are near."""
    far = remote_set(server)
    near = [replace(each, url=f"/{each.url}") for each in far.manifest.shards[1:]]
    mixed = far._replace(manifest=replace(far.manifest, shards=(far.manifest.shards[0], *near)))
    ahead = Prefetch(ShardCache(tmp_path, 2 * SIZE, QUICK), mixed, SAMPLER, seed=5, columns=(0, 4))
    ahead.start(0, 30)
    wait_for(lambda: server.requests.total() == 1)
    ahead.close()
    assert "data.cache_gib=" not in caplog.text


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_behind_a_url_gives_the_batches_of_the_same_set_on_a_disk(
    server: Server, finished: Path, tmp_path: Path, workers: int
) -> None:
    server.root = finished
    near, far = (
        DataConfig(name="shards", root=root, image_size=[32, 32], cache=str(tmp_path))
        for root in (str(finished), server.url("").rstrip("/"))
    )
    whole = training_batches(near, build_dataset(near, "train"), 8, seed=2)
    dataset = build_dataset(far, "train")
    ahead = fetch_ahead(dataset, 8, 2, rank=0, world=1, local_rank=0, local_world=1)
    assert ahead is not None
    loader = make_loader(training_batches(far, dataset, 8, seed=2), 1, 7, workers, False, None, ahead)
    for step, batch in enumerate(loader, 1):
        assert all(map(torch.equal, batch, whole[step]))
    tars = {name: count for name, count in server.requests.items() if name.endswith(".tar")}
    assert tars
    assert set(tars.values()) == {1}


def test_one_process_of_a_host_fetches_ahead_for_all(server: Server, tmp_path: Path) -> None:
    dataset = ShardDataset(remote_set(server), ShardCache(tmp_path, 99 * SIZE, QUICK))
    ranks = [fetch_ahead(dataset, 4, 5, rank, 4, rank % 2, 2) for rank in range(4)]
    assert [ahead is not None for ahead in ranks] == [True, False, True, False]
    order = shard_sampler(dataset.sizes, 4).order(make_key(5, 0), 2, 4)
    assert ranks[2] is not None
    ranks[2].start(0, 30)
    wanted = {NAMES[number // 10] for number in order.flatten().tolist()}
    wait_for(lambda: len(list(tmp_path.glob("*.tar"))) == len(wanted))
    assert set(server.requests) == wanted


def test_shards_on_a_disk_need_no_fetching(finished: Path) -> None:
    dataset = build_dataset(DataConfig(name="shards", root=str(finished), image_size=[32, 32]), "train")
    assert fetch_ahead(dataset, 4, 5, 0, 1, 0, 1) is None


def test_manifests_and_indexes_are_asked_for_again(server: Server, finished: Path) -> None:
    """The first split's manifest, the second's, and an index: a fault of each passes, and nothing is lost."""
    server.root = finished
    expected = load_splits(finished)
    for faults in (["503"], ["", "503"], ["", "", "cut"], ["", "", "", "stall"], ["503", "429", "cut"]):
        server.faults = list(faults)
        found = load_splits(server.url(""), QUICK)
        assert not server.faults
        assert {split: shards.manifest for split, shards in found.items()} == {
            split: shards.manifest for split, shards in expected.items()
        }
        assert all(np.array_equal(found[split].records, expected[split].records) for split in expected)
    server.wake.set()


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_server_that_is_down_is_not_a_set_that_is_not_there(server: Server, finished: Path, split: str) -> None:
    server.root = finished
    server.faults = ["", *["503"] * 9] if split == "val" else ["503"] * 9
    with pytest.raises(DataError, match=rf"{split}/manifest.json cannot be fetched: 503.* at the last of 4 attempts"):
        load_splits(server.url(""), QUICK)


def test_a_port_that_nobody_serves_is_said(server: Server) -> None:
    url = server.url("set")
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match=r"cannot be fetched: .*at the last of 4 attempts"):
        load(url, QUICK)


def test_a_split_that_is_not_there_is_no_fault(server: Server, finished: Path) -> None:
    server.root = finished / "train"
    assert list(load_splits(server.url(""), QUICK)) == ["train"]
    with pytest.raises(DataError, match=r"is not a shard set: it has no manifest\.json"):
        load(server.url("elsewhere"), QUICK)
