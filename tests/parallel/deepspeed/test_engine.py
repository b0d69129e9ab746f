"""What ZeRO has beyond the conformance suite: bf16, offload, whole runs and kills, and DeepSpeed's own launcher."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.config import OptimConfig
from dmjd.parallel import engines, store
from dmjd.parallel.apply import blocks
from dmjd.parallel.build import build_engine
from dmjd.parallel.deepspeed import files as zero_files
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.world import World, join_world
from dmjd.runs.checkpoint import newest
from tests.parallel import walk

STEPS = 3
ROOT = Path(__file__).parents[2]


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def look(rank: int, folder: Path, port: str) -> None:
    """The life of one of two ranks; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo",
        WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2",
    )  # fmt: skip
    world = join_world(walk.CPU, walk.engine("ddp"))
    seen: dict[str, Any] = {}
    for name in ("ddp", *walk.STAGES):
        config = walk.ENGINES[name]
        seen[f"{name} in bf16"] = taken(replace(config, precision="bf16"), world)
        if name in walk.STAGES:
            seen[f"{name} waits"] = waits(config, world)
            seen[f"{name} offloaded"] = taken(replace(config, offload_optimizer=True), world)
    seen["gathered"] = {reshard: gathered(reshard, world) for reshard in (None, True, False)}
    seen["ddp in bf16, last"] = taken(replace(walk.ENGINES["ddp"], precision="bf16"), world)
    if world.is_main:
        torch.save(seen, folder / "seen.pt")
    world.close()


def taken(config: Any, world: World) -> list[tuple[float, float, float]]:
    run = walk.Run(config, world)
    rows = run.take(STEPS)
    run.engine.close()
    return rows


def waits(config: Any, world: World) -> int:
    """How often DeepSpeed waits for all that the device has to do, in a few steps."""
    run = walk.Run(config, world)
    accelerator = zero_files.import_deepspeed("deepspeed.accelerator").get_accelerator()
    calls: list[Any] = []
    accelerator.synchronize = lambda *device: calls.append(device)
    run.take(STEPS)
    del accelerator.synchronize
    run.engine.close()
    return len(calls)


AHEAD, KEPT = 15_000, 50_000
"""Parameters: blocks have 12,704 each and their model 145,962."""


def gathered(reshard: bool | None, world: World) -> tuple[int, int, int]:
    """The most parameters that zero3 holds whole at a time, in forward and backward; those of a block; and of all."""
    engines.ZERO_BUCKET, engines.KEPT = AHEAD, KEPT  # in a process that ends with these tests
    objective = walk.make_objective(depth=8)
    parameters: list[Any] = list(objective.parameters())
    total = sum(p.numel() for p in parameters)
    block = sum(p.numel() for p in objective.model.encoder.blocks[0].parameters())
    config = walk.engine("zero3", reshard_after_forward=reshard)
    engine = build_engine(objective, config, OptimConfig(), world)
    missing = zero_files.import_deepspeed("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus.NOT_AVAILABLE
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(p.ds_numel for p in parameters if p.ds_status != missing))

    for each in blocks(objective.model):
        each.register_forward_pre_hook(count)
        next(each.parameters()).register_hook(count)
    for step in range(STEPS + 1):  # DeepSpeed fetches ahead from the third on
        images, views, targets = walk.make_batch(step, range(4))
        with engine.micro_batch(last=True):
            engine.backward(engine.module(images, views, targets).total)
        engine.step(1e-3, 0.05)
    engine.close()
    return most, block, total


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, port = tmp_path_factory.mktemp("seen"), free_port()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=look, args=(rank, folder, port)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    return torch.load(folder / "seen.pt", weights_only=True)


@pytest.fixture(scope="module")
def alone() -> list[tuple[float, float, float]]:
    return walk.reference().take(STEPS)


def assert_rows(ours: Any, theirs: Any, tolerance: float) -> None:
    assert len(ours) == len(theirs) == STEPS
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", walk.STAGES)
def test_bf16_is_that_of_ddp(name: str, seen: dict[str, Any], alone: Any) -> None:
    assert_rows(seen[f"{name} in bf16"], seen["ddp in bf16"], 1e-5)
    assert seen["ddp in bf16"] != alone, "something was computed in bfloat16"


@pytest.mark.parametrize("name", walk.STAGES)
def test_moments_on_the_host_change_nothing(name: str, seen: dict[str, Any], alone: Any) -> None:
    assert_rows(seen[f"{name} offloaded"], alone, 1e-5)


@pytest.mark.parametrize("name", walk.STAGES)
def test_its_clock_does_not_make_a_step_wait(name: str, seen: dict[str, Any]) -> None:
    assert seen[f"{name} waits"] == 0


@pytest.mark.parametrize("reshard", [None, True, False])
def test_zero3_gathers_as_many_parameters_at_once_as_plan_counts(reshard: bool | None, seen: dict[str, Any]) -> None:
    most, block, total = seen["gathered"][reshard]
    beside = {None: KEPT, True: 2 * block, False: total}[reshard]
    one = 4 * 32 * 32  # fetched whole, the last parameter exceeds the limit
    assert beside - block < most < min(total, beside + block) + one


def test_it_leaves_no_trace_in_torch(seen: dict[str, Any]) -> None:
    assert seen["ddp in bf16, last"] == seen["ddp in bf16"]


CUT = """
import dmjd.train.loop as loop
save = loop.Trainer.save_checkpoint
def fault(self):
    save(self)
    self.saver.wait()
    os._exit(9)
loop.Trainer.save_checkpoint = fault
"""
KILL = "os.kill(os.getpid(), 9)"
KILLED_WHILE_IT_LAYS_OUT = f"""
import dmjd.parallel.deepspeed.files as zero_files
zero_files._complete = lambda *arguments: {KILL}
"""
LAST = "checkpoints/step-00000022"
WORDS = ("batch_size=64", "log_every=1", "checkpoint_every=8", "ema_decay=0.9", "backbone.depth=2")


@pytest.fixture(scope="module")
def pretrain(tiny: Callable[..., list[str]], launch_world: Callable[..., Any]) -> Callable[..., list[int]]:
    """``pretrain(folder, processes, *words, prelude="", preludes={})``: exit codes of that many processes."""

    def run(folder: Path, size: int, *words: str, **preludes: Any) -> list[int]:
        processes = launch_world(size, ["pretrain", *tiny(folder, *WORDS, *words)], **preludes)
        for process in processes:
            process.join(180)
        return [process.exitcode for process in processes]

    return run


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, pretrain: Callable[..., list[int]]) -> Callable[[str], Path]:
    """``straight(engine)``: a run of two processes that nothing happened to. Only to be read."""

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("straight") / "run"
        assert pretrain(folder, 2, f"engine={name}") == [0, 0]
        return folder

    return run


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def curve(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_run_that_was_cut_goes_on(
    name: str,
    tmp_path: Path,
    pretrain: Callable[..., list[int]],
    straight: Callable[[str], Path],
    dmjd: Callable[..., tuple[int, str, str]],
) -> None:
    cut, fewer = tmp_path / "cut", tmp_path / "fewer"
    assert pretrain(cut, 2, f"engine={name}", prelude=CUT) == [9, 9]
    shutil.copytree(cut, fewer)
    assert pretrain(cut, 2, f"engine={name}") == [0, 0]
    undisturbed = straight(name)
    assert (cut / "log.jsonl").read_bytes() == (undisturbed / "log.jsonl").read_bytes(), "the same bits"
    assert pretrain(fewer, 1, f"engine={name}", prelude=KILLED_WHILE_IT_LAYS_OUT) == [-9]
    assert hidden(fewer / "checkpoints")
    assert pretrain(fewer, 1, f"engine={name}") == [0]
    assert not hidden(fewer / "checkpoints")
    for row, expected in zip(curve(fewer), curve(undisturbed), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)
    # What evaluations read, here where there are no other processes.
    last = undisturbed / LAST
    trained, average = store.read_model(last), store.read_average(last)
    assert trained.keys() > average.keys()
    for parameter, value in average.items():
        assert value.shape == trained[parameter].shape
    code, out, err = dmjd("knn", f"checkpoint={undisturbed}", "workers=0", "device=cpu", "weights=ema")
    assert (code, err) == (0, "")
    assert out.startswith("knn: k-nearest-neighbour top-1 ")
    settings = json.loads((undisturbed / "deepspeed.json").read_text())
    assert settings["train_micro_batch_size_per_gpu"] == 32
    assert settings["zero_optimization"]["stage"] == ENGINES[name].stage


KILLS = {
    "halfway through a file": (
        1,
        f"""
import torch
save = torch.save
def fault(content, file, *rest, **options):
    save(content, file, *rest, **options)
    if "step-00000016" in str(file):
        os.truncate(file, os.path.getsize(file) // 2)
        {KILL}
torch.save = fault
""",
    ),
    "between two of its files": (
        0,
        f"""
import torch
save, saved = torch.save, []
def fault(content, file, *rest, **options):
    if "step-00000016" in str(file):
        saved.append(file)
        {KILL} if len(saved) == 2 else None
    return save(content, file, *rest, **options)
torch.save = fault
""",
    ),
    "when its files are written and not yet flushed": (
        1,
        f"""
import dmjd.runs.checkpoint as checkpoint
flush = checkpoint._flush
checkpoint._flush = lambda path: {KILL} if "step-00000016" in str(path) else flush(path)
""",
    ),
    "before the manifest": (
        0,
        f"""
import dmjd.runs.checkpoint as checkpoint
put = checkpoint._put_manifest
checkpoint._put_manifest = lambda draft, files: {KILL} if draft.stem == "step-00000016" else put(draft, files)
""",
    ),
    "before the rename": (
        0,
        f"""
from pathlib import Path
rename = Path.rename
Path.rename = lambda self, target: {KILL} if str(target).endswith("step-00000016") else rename(self, target)
""",
    ),
}
"""Which rank is killed, and where in the save of step 16."""


@pytest.mark.parametrize("moments", [pytest.param(list(KILLS), marks=pytest.mark.long), ["between two of its files"]])
def test_a_save_in_which_one_is_killed_leaves_the_one_before(
    moments: list[str], tmp_path: Path, pretrain: Callable[..., list[int]], straight: Callable[[str], Path]
) -> None:
    run = tmp_path / "run"
    for moment in moments:  # one run meets them all
        rank, fault = KILLS[moment]
        codes = pretrain(run, 2, "engine=zero2", preludes={rank: fault})
        assert codes[rank] == -9, f"{moment}: not reached"
        assert codes[1 - rank] != 0, f"{moment}: the other does not go on alone"
        found = newest(run / "checkpoints")
        assert found is not None
        assert found.name == "step-00000008", moment
    assert pretrain(run, 2, "engine=zero2") == [0, 0]
    undisturbed = straight("zero2")
    assert (run / "log.jsonl").read_bytes() == (undisturbed / "log.jsonl").read_bytes()
    ours, theirs = store.read(run / LAST), store.read(undisturbed / LAST)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


FULL = """
import errno, torch
save = torch.save
def fault(content, file, *rest, **options):
    if "step-00000016" in str(file):
        raise OSError(errno.ENOSPC, "No space left on device")
    return save(content, file, *rest, **options)
torch.save = fault
"""


def test_a_disk_that_is_full_for_one_stops_all(tmp_path: Path, pretrain: Callable[..., list[int]]) -> None:
    run, said = tmp_path / "run", tmp_path / "said"
    telling = f"sys.stderr = open({str(said)!r}, 'a', buffering=1)"
    assert pretrain(run, 2, "engine=zero2", "epochs=20", prelude=telling, preludes={1: FULL}) == [2, 2]
    (error,) = [line for line in said.read_text().splitlines() if line.startswith("error: ")]
    assert "step-00000016" in error
    assert "No space left on device" in error
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000008"]


def test_a_conflicting_file_is_one_line_and_touches_nothing(tmp_path: Path, pretrain: Callable[..., list[int]]) -> None:
    (tmp_path / "mine.json").write_text('{"gradient_clipping": 1.0}')
    said = tmp_path / "said"
    prelude = f"sys.stderr = open({str(said)!r}, 'a', buffering=1)"
    words = ("engine=zero1", f"engine.deepspeed_config={tmp_path / 'mine.json'}")
    assert pretrain(tmp_path / "run", 2, *words, prelude=prelude) == [2, 2]
    assert said.read_text().count("error: ") == 1
    assert "sets gradient_clipping=1.0; that is for optim.clip_grad" in said.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_deepspeeds_launcher_starts_the_command_line(tmp_path: Path, tiny: Callable[..., list[str]]) -> None:
    words = tiny(tmp_path / "run", *WORDS, "engine=zero2")
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ["--num_gpus", "2", "--master_port", free_port()]  # without --no_local_rank: the stray word does no harm
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "PATH": f"{launcher.parent}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        [launcher, *options, "--module", "dmjd", "pretrain", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path / 'run'}: finished" in done.stdout
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["world_size"] == 2
    assert len(curve(tmp_path / "run")) == 22


def test_a_stray_local_rank_is_no_word_of_ours(dmjd: Callable[..., tuple[int, str, str]]) -> None:
    assert dmjd("--local_rank=1", "--version") == dmjd("--version")
