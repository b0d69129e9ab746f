"""Preflight: each thing that is amiss is found, and its check says what to do."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dmjd.cluster import preflight
from dmjd.cluster.checks import GIB, Facts, Need, report, run_checks
from dmjd.cluster.preflight import need
from dmjd.compose import compose
from dmjd.parallel.world import World
from tests.train.shrunken import write_clip

ROOT = Path(__file__).parents[2]
GPU = {
    "index": "3",
    "ecc.errors.uncorrected.volatile.total": "0",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
    "memory.used": "3",
}
WELL = Facts(
    rank=0,
    host="n1",
    versions={"dmjd": "1", "torch": "2"},
    data="a" * 64,
    data_seconds=0.1,
    clock=100.0,
    shm_free=8 * GIB,
    disk_free=100 * GIB,
    gpus=[GPU],
    gigabytes_per_second=90.0,
)
OTHER = replace(WELL, rank=1, host="n2", clock=100.5)
NEED = Need(checkpoint=5 * GIB, checkpoints=4, shm=2 * GIB, nccl=True)


def test_all_is_well() -> None:
    checks = run_checks([WELL, OTHER], NEED)
    assert [check.fix for check in checks] == [""] * len(checks)
    assert "FAILS" not in report(checks)


@pytest.mark.parametrize(
    ("name", "found", "other"),
    [
        ("versions", "torch is 2 on n1 and 3 on n2", replace(OTHER, versions={"dmjd": "1", "torch": "3"})),
        (
            "data",
            "rank 1 on n2: data.root=/x is not a folder",
            replace(OTHER, data_error="data.root=/x is not a folder"),
        ),
        ("data", "on n2", replace(OTHER, data="b" * 64)),
        ("/dev/shm", "1.0 GiB free on n2, 2.0 GiB needed", replace(OTHER, shm_free=GIB)),
        ("/dev/shm", "64 MiB free on n2, 2.0 GiB needed", replace(OTHER, shm_free=64 << 20)),  # Docker's default
        ("run folder", "n2: /runs cannot", replace(OTHER, disk_error="/runs cannot be written to")),
        ("run folder", "19.0 GiB free, 20.0 GiB for 4 checkpoints", replace(OTHER, disk_free=19 * GIB)),
        ("clocks", "n2 is 30.0 s ahead of n1", replace(OTHER, clock=130.0)),
        ("GPUs", "GPU 3 of n2 has had 2", replace(OTHER, gpus=[{**GPU, "ecc.errors.uncorrected.volatile.total": "2"}])),
        ("GPUs", "slowed down", replace(OTHER, gpus=[{**GPU, "clocks_throttle_reasons.hw_slowdown": "Active"}])),
        ("GPUs", "40000 MiB in use", replace(OTHER, gpus=[{**GPU, "memory.used": "40000"}])),
        (
            "GPUs",
            "n2: nvidia-smi fails: no driver",
            replace(OTHER, gpus=[], gpu_error="nvidia-smi fails: no driver"),
        ),
        (
            "all-reduce",
            "rank 1 on n2: NCCL error",
            replace(OTHER, gigabytes_per_second=None, all_reduce_error="NCCL error"),
        ),
        ("all-reduce", "0.50 GB/s over 2 ranks on several nodes", replace(OTHER, gigabytes_per_second=0.5)),
    ],
)
def test_what_is_amiss_on_one_node(name: str, found: str, other: Facts) -> None:
    failed = [check for check in run_checks([WELL, other], NEED) if check.fix]
    assert [check.name for check in failed] == [name]
    assert found in failed[0].found
    assert f"fix: {failed[0].fix}" in report(failed)


def test_the_need_of_a_run() -> None:
    words = ["experiment=demo", "batch_size=128", "workers=3", "keep_checkpoints=5", "ema_decay=0.9"]
    config = compose("pretrain", words)
    world = World(0, 4, 0, torch.device("cpu"), local_size=2)
    needed = need(config, world, parameters=1000)
    height, width = config.data.image_size
    # 2 processes of the host, with 2 batches for each of 3 workers and 2 in use, of 32 images, ids and labels.
    assert needed.shm == 2 * (2 * 3 + 2) * 32 * (height * width * config.data.channels + 16)
    assert (needed.checkpoint, needed.checkpoints) == (16_000, 7)
    config.data.second_size = [4, 6]
    larger = 2 * (2 * 3 + 2) * 32 * ((height * width + 24) * config.data.channels + 16)
    assert need(config, world, parameters=1000).shm == larger
    config.workers = 0
    assert need(config, world, parameters=1000).shm == 0


@pytest.mark.long
def test_what_is_compiled_is_the_step_of_a_target_that_reads_another_size(
    tmp_path: Path, image_folder: Path, tiny: Callable[..., list[str]], launch: Callable[..., Any]
) -> None:
    images = ("data=folder", f"data.root={image_folder}", "data.channels=3")
    sizes = ("data.image_size=[32,32]", "data.second_size=[64,64]", "backbone.patch_size=8")
    statistics = ("data.mean=[0.4,0.4,0.4]", "data.std=[0.3,0.3,0.3]", "data.check=none", "batch_size=16")
    target = ("target=clip", f"target.weights={write_clip(tmp_path)}", "target.model=tiny-clip", "target.dim=20")
    words = tiny(tmp_path / "run", *images, *sizes, *statistics, *target)
    known = f"import open_clip; open_clip.add_model_config({str(tmp_path / 'tiny-clip.json')!r})"
    process = launch(["preflight", "warm=true", *words], known)
    process.join(300)
    assert process.exitcode == 0


def test_what_is_checked_follows_the_recipe_of_the_run(
    tmp_path: Path, image_folder: Path, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    words = ("experiment=own_photos", f"data.root={image_folder}", f"run={tmp_path}/run", "engine.device=cpu")
    code, said, error = dmjd("preflight", *words)
    assert code == 0, said + error
    assert "ok     data        48 images" in said, "crops of 16x16 pixels, and not of the 96x96 without a recipe"


@pytest.mark.parametrize(
    "choices",
    [("target=teacher", "target.layers=1", "ema_decay=0.99"), ("ema_decay=0.99",), ("backbone.drop_path=0.1",)],
)
def test_the_step_that_is_compiled_has_all_that_the_run_has(
    choices: tuple[str, ...], tmp_path: Path, tiny: Callable[..., list[str]], dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    code, said, error = dmjd("preflight", "warm=true", *tiny(tmp_path / "run", *choices))
    assert (code, error) == (0, "")
    assert "ok     compilation" in said


@pytest.mark.parametrize(
    ("words", "fault", "line"),
    [
        (("batch_size=8", "engine.grad_accum_steps=8"), "", "batch_size=8 is not divisible by engine.grad_accum_steps"),
        (("batch_size=8",), "ConfigError('no compiler')", "no compiler"),
        (("batch_size=8",), "RuntimeError('no memory')", "no memory"),
    ],
    ids=["batch", "rank 0", "crash of rank 0"],
)
def test_a_step_that_cannot_be_compiled_ends_all_ranks(
    words: tuple[str, ...],
    fault: str,
    line: str,
    tmp_path: Path,
    tiny: Callable[..., list[str]],
    launch_world: Callable[..., Any],
) -> None:
    prelude = f"""
sys.stdout = sys.stderr = open({str(tmp_path / "output")!r}, "a")
from dmjd.builders import tasks
from dmjd.errors import ConfigError
def fail(*arguments):
    raise {fault}
"""
    prelude += "tasks.build_step = fail" if fault else ""
    ranks = launch_world(2, ["preflight", "warm=true", *tiny(tmp_path / "run", "engine=ddp", *words)], prelude)
    try:
        for process in ranks:
            process.join(120)
        assert all(process.exitcode for process in ranks), "engine.start_timeout is 30 minutes"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert line in (tmp_path / "output").read_text()


@pytest.mark.long
def test_two_processes_measure(tmp_path: Path, tiny: Callable[..., list[str]]) -> None:
    def preflight(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "launchers/agent.py"), "--standalone", "--nproc-per-node=2", "-m", "dmjd"]
        return subprocess.run(
            [*command, "preflight", *tiny(tmp_path / "run", "engine=ddp", *words)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    done = preflight()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 7
    assert "GB/s over 2 ranks on one node" in done.stdout
    assert list((tmp_path / "run").iterdir()) == []

    done = preflight("data=folder", "data.root=/nowhere", "warm=true")
    assert done.returncode != 0
    assert "data.root=/nowhere is not a folder" in done.stdout
    assert done.stderr.count("error: 1 check(s) failed: data") == 1
    assert "ok     compilation" in done.stdout


def test_what_is_amiss_everywhere_is_no_nodes_fault() -> None:
    (data,) = [
        check
        for check in run_checks([replace(WELL, data_error="x"), replace(OTHER, data_error="x")], NEED)
        if check.fix
    ]
    assert "the same on every node" in data.fix


@pytest.mark.parametrize(
    ("body", "says"),
    [("exec sleep 60", "does not respond within"), ("echo no driver; exit 9", "no driver"), ("exit 2", "")],
)
def test_a_gpu_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight, "SMI_SECONDS", 0.5)
    gpus, error = preflight._gpus()
    assert gpus == []
    assert says in error
    assert bool(says) == bool(error)
    assert [
        check.fix for check in run_checks([replace(WELL, gpus=[], gpu_error=error)], replace(NEED, nccl=False))
    ] == [""] * 7


FAULTS = {
    "an all-reduce that one rank never enters": (
        {1: "import torch.distributed as dist\ndist.all_reduce = lambda *words: None"},
        r"FAILS  all-reduce  rank 0 on \S+: it does not end within 3 s",
    ),
    "a network that refuses": (
        {
            1: "import torch.distributed as dist\ndef refuse(*words): raise RuntimeError('NCCL: no route to host')\n"
            "dist.all_reduce = refuse"
        },
        r"FAILS  all-reduce  rank 1 on \S+: NCCL: no route to host",
    ),
    "a run folder that is gone on one node": (
        {
            1: "import shutil\ndef gone(path): raise OSError(116, 'Stale file handle', 'runs/x')\n"
            "shutil.disk_usage = lambda path: gone(path) if 'run' in str(path) else kept(path)"
        },
        r"FAILS  run folder  \S+: the file that rank 0 has written is not visible: runs/x .*Stale file handle",
    ),
    "data that are gone on one node": (
        {1: "def gone(*words): raise OSError(116, 'Stale file handle', '/data')\npreflight.training_source = gone"},
        r"FAILS  data        rank 1 on \S+: \[Errno 116\] Stale file handle: '/data'",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_of_one_rank_does_not_keep_the_rest_from_being_told(
    fault: str, tmp_path: Path, tiny: Callable[..., list[str]], launch_world: Callable[..., Any]
) -> None:
    preludes, line = FAULTS[fault]
    prelude = f"""
import shutil
kept = shutil.disk_usage
from dmjd.cluster import preflight
preflight.ALL_REDUCE_SECONDS = 3.0
sys.stdout = open({str(tmp_path / "said")!r}, "a")
"""
    ranks = launch_world(2, ["preflight", *tiny(tmp_path / "run", "engine=ddp")], prelude, preludes)
    try:
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [2, 2]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    said = (tmp_path / "said").read_text()
    assert re.search(line, said), said
    assert said.count("FAILS") == 1
    assert said.count("\nok ") + said.startswith("ok ") == 6


def test_a_stream_is_read_as_the_run_will_read_it(
    tmp_path: Path, tiny: Callable[..., list[str]], dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    with tarfile.open(tmp_path / "some.tar", "w") as tar:
        for number in range(16):
            content = io.BytesIO()
            Image.new("RGB", (16, 16), (number, 0, 0)).save(content, "png")
            member = tarfile.TarInfo(f"{number}.png")
            member.size = content.tell()
            content.seek(0)
            tar.addfile(member, content)
    words = tiny(tmp_path / "run", "data=stream", f"data.root={tmp_path}/some.tar", "data.samples=16", "batch_size=8")
    code, out, error = dmjd("preflight", *words, "data.image_size=[16,16]")
    assert code == 0, out + error
    assert "16 images, the first batch in" in out
