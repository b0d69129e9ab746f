"""A run over two processes that share its parameters: what it logs, and what is left of it when one is killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.errors import ConfigError
from dmjd.parallel import store
from dmjd.parallel.world import join_world
from dmjd.runs.checkpoint import newest
from tests.compare import KILL, PICTURES, rows, telling
from tests.parallel.walk import CPU, engine

pytestmark = pytest.mark.slow

Words = Callable[..., list[str]]
Launch = Callable[..., Any]

WORDS = (
    "batch_size=64",
    "log_every=4",
    "checkpoint_every=6",
    "ema_decay=0.9",
    # A large epsilon, since Adam otherwise turns the rounding noise of a gradient of zero into a full step.
    "optim.eps=1e-2",
    "optim.base_lr=1e-2",
    "online_knn.every_epochs=1",
    "engine.grad_accum_steps=2",
)


def finish(processes: list[Any]) -> list[int]:
    for process in processes:
        process.join(180)
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, tiny: Words, launch_world: Launch) -> Path:
    """A finished run of two processes under FSDP, with pictures."""
    folder: Path = tmp_path_factory.mktemp("sharded") / "run"
    assert finish(launch_world(2, ["pretrain", *tiny(folder, *WORDS, "engine=fsdp")], PICTURES)) == [0, 0]
    return folder


def test_it_is_the_run_of_one_process(sharded: Path, tmp_path: Path, tiny: Words, launch: Launch) -> None:
    assert finish([launch(["pretrain", *tiny(tmp_path / "run", *WORDS)])]) == [0]
    ours, theirs = rows(sharded), rows(tmp_path / "run")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        # A neighbour may change sides for the sake of a last bit: the score has steps of 1 in 360 images.
        assert row == pytest.approx(expected, rel=1e-5, abs=0.6 if "knn_top1" in row else 1e-5)
    last = "checkpoints/step-00000022"
    saved, alone = store.read(sharded / last), store.read(tmp_path / "run" / last)
    assert saved.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_its_pictures_are_of_whole_weights(sharded: Path) -> None:
    assert {path.name for path in (sharded / "pictures").iterdir()} == {"views.png", "masks.png", "loss.png"}


def test_what_its_checkpoints_cost_is_in_the_timing(sharded: Path) -> None:
    timing = rows(sharded, "timing")
    assert all(row["checkpoint_stall_seconds"] >= 0 for row in timing)
    assert any(row["checkpoint_stall_seconds"] > 0 for row in timing)
    assert any(row.get("save_seconds", 0) > 0 for row in timing)


MOMENTS = {
    "while one of them writes its tensors": (
        1,
        f"""
import torch.distributed.checkpoint.filesystem as filesystem
streams = []
write = filesystem._write_item
def fault(transforms, stream, *rest):
    if stream not in streams:
        streams.append(stream)
    {KILL} if len(streams) == 2 and stream.tell() > 100_000 else None
    return write(transforms, stream, *rest)
filesystem._write_item = fault
""",
    ),
    "when its tensors are written and not yet flushed": (
        1,
        f"""
import dmjd.runs.checkpoint as checkpoint
flush, flushed = checkpoint._flush, []
def fault(path):
    flushed.append(path)
    {KILL} if len(flushed) == 2 else flush(path)
checkpoint._flush = fault
""",
    ),
    "before the manifest": (
        0,
        f"""
import dmjd.runs.checkpoint as checkpoint
put, calls = checkpoint._put_manifest, []
def fault(*arguments):
    calls.append(arguments)
    {KILL} if len(calls) == 2 else put(*arguments)
checkpoint._put_manifest = fault
""",
    ),
    "before the rename": (
        0,
        f"""
from pathlib import Path
rename = Path.rename
def fault(self, target):
    {KILL} if str(target).endswith("step-00000012") else rename(self, target)
Path.rename = fault
""",
    ),
}


@pytest.mark.parametrize(
    "moment",
    [pytest.param(name, marks=[pytest.mark.long] * (not name.endswith("manifest"))) for name in MOMENTS],
)
def test_a_save_in_which_one_is_killed_leaves_the_one_before(
    moment: str, tmp_path: Path, sharded: Path, tiny: Words, launch_world: Launch
) -> None:
    rank, fault = MOMENTS[moment]
    run, command = tmp_path / "run", ["pretrain", *tiny(tmp_path / "run", *WORDS, "engine=fsdp")]
    killed = finish(launch_world(2, command, preludes={rank: fault}))
    assert killed[rank] == -9, "the fault was not reached"
    assert killed[1 - rank] != 0, "the other does not go on alone"
    found = newest(run / "checkpoints")
    assert found is not None
    assert found.name == "step-00000006"
    assert finish(launch_world(2, command)) == [0, 0]
    assert (run / "log.jsonl").read_bytes() == (sharded / "log.jsonl").read_bytes()
    ours, theirs = (store.read(path / "checkpoints/step-00000022") for path in (run, sharded))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


FULL = {
    "for the tensors of one": (
        1,
        """
import errno, dmjd.parallel.native_files as native_files
save, saves = native_files.save_shards, []
class Full(native_files.FileSystemWriter):
    def write_data(self, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device")
def fault(*arguments, **options):
    saves.append(arguments)
    if len(saves) == 2:
        options["storage_writer"] = Full(options["storage_writer"].path)
    return save(*arguments, **options)
native_files.save_shards = fault
""",
    ),
    "for the loop's state": (
        0,
        """
import errno
from pathlib import Path
write = Path.write_bytes
def fault(self, content):
    if self.name == "loop.pt" and "step-00000012" in str(self):
        raise OSError(errno.ENOSPC, "No space left on device")
    return write(self, content)
Path.write_bytes = fault
""",
    ),
}


@pytest.mark.parametrize("disk", FULL)
def test_a_disk_that_is_full_for_one_stops_all_at_the_next_step(
    disk: str, tmp_path: Path, tiny: Words, launch_world: Launch
) -> None:
    rank, fault = FULL[disk]
    run, said = tmp_path / "run", tmp_path / "said"
    words = ["pretrain", *tiny(run, *WORDS, "online_knn.every_epochs=0", "epochs=20", "engine=fsdp")]
    codes = finish(launch_world(2, words, telling(said), {rank: fault}))
    assert codes == [2, 2]
    errors = [line for line in said.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "cannot write" in errors[0]
    assert "step-00000012" in errors[0]
    assert "No space left on device" in errors[0]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000006"]
    assert rows(run)[-1]["step"] < 40, "long before its end at 440"


HANGING = """
import time
import dmjd.train.loop as loop
update, steps = loop.Trainer.log_finished, []
def fault(self):
    steps.append(self.position.step)
    time.sleep(600) if len(steps) == 5 else None
    return update(self)
loop.Trainer.log_finished = fault
"""


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2"])
def test_a_rank_that_hangs_in_a_step_does_not_hold_the_others_for_long(
    name: str, tmp_path: Path, tiny: Words, launch_world: Launch
) -> None:
    # Half an hour is granted until the first step is done, and 3 seconds after it.
    words = [
        "pretrain",
        *tiny(tmp_path / "run", *WORDS, f"engine={name}", "engine.step_timeout=0.05", "data.timeout=0.04"),
    ]
    ends, hangs = launch_world(2, words, telling(tmp_path / "said"), {1: HANGING})
    begin = time.monotonic()
    ends.join(120)
    hangs.kill()
    hangs.join()
    assert ends.exitcode == 1
    assert time.monotonic() - begin < 120


def test_processes_that_do_not_fit_are_refused_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"engine\.replicas=3 does not divide 4 process"):
        join_world(CPU, engine("hsdp", replicas=3))
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"6 process"):  # one and a half hosts
        join_world(CPU, engine("hsdp", replicas=4))


@pytest.mark.parametrize(
    ("other", "options", "names"),
    [
        ("ddp", {"offload_optimizer": True}, "zero1, zero2, zero3"),
        ("ddp", {"deepspeed_config": "some.json"}, "zero1, zero2, zero3"),
        ("ddp", {"replicas": 2}, "hsdp"),
        ("ddp", {"reshard_after_forward": False}, "fsdp, hsdp, zero3"),
        ("ddp", {"blocks_per_unit": 2}, "fsdp, hsdp"),
        ("fsdp", {"bucket_mb": 25}, "ddp"),
        ("fsdp", {"cuda_graphs": True}, "single, ddp"),
    ],
)
def test_options_of_another_engine_are_refused(other: str, options: dict[str, Any], names: str) -> None:
    (key,) = options
    with pytest.raises(ConfigError, match=rf"^engine\.{key} is for engine={names}, got engine={other}; leave it out$"):
        join_world(CPU, engine(other, **options))


@pytest.mark.parametrize(("compiled", "device"), [("none", "cuda"), ("block", "cpu")])
def test_cuda_graphs_are_of_what_is_compiled_for_cuda(compiled: str, device: str) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.cuda_graphs=true needs engine\.compile=block .* CUDA device"):
        join_world(torch.device(device), engine("ddp", compile=compiled, cuda_graphs=True))


def test_a_model_that_ddp_cuts_does_not_become_cuda_graphs() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.cuda_graphs=true with engine=ddp needs engine\.compile=block"):
        join_world(torch.device("cuda"), engine("ddp", compile="model", cuda_graphs=True))


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_a_model_that_is_one_graph_is_not_sharded(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^engine\.compile=model .* engine={name}; use .*=block, or engine=single, ddp, zero1, zero2$",
    ):
        join_world(CPU, engine(name, compile="model"))


def test_one_process_can_shard_by_itself(tmp_path: Path, tiny: Words, launch: Launch, finished_run: Path) -> None:
    assert finish([launch(["pretrain", *tiny(tmp_path / "run", "engine=fsdp")])]) == [0]
    for row, expected in zip(rows(tmp_path / "run"), rows(finished_run), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
