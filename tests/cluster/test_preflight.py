"""Preflight: each thing that is amiss is found, and its check says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.cluster.preflight import GIB, Facts, Need, judge, need, report
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
    checks = judge([WELL, OTHER], NEED)
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
        ("/dev/shm", "1.0 GiB free on n2, 2.00 GiB needed", replace(OTHER, shm_free=GIB)),
        ("run folder", "n2: /runs cannot", replace(OTHER, disk_error="/runs cannot be written to")),
        ("run folder", "19.0 GiB free, 20.0 GiB for 4 checkpoints", replace(OTHER, disk_free=19 * GIB)),
        ("clocks", "n2 is 30.0 s ahead of n1", replace(OTHER, clock=130.0)),
        ("GPUs", "GPU 3 of n2 has had 2", replace(OTHER, gpus=[{**GPU, "ecc.errors.uncorrected.volatile.total": "2"}])),
        ("GPUs", "slowed down", replace(OTHER, gpus=[{**GPU, "clocks_throttle_reasons.hw_slowdown": "Active"}])),
        ("GPUs", "40000 MiB in use", replace(OTHER, gpus=[{**GPU, "memory.used": "40000"}])),
        ("all-reduce", "0.50 GB/s over 2 ranks on several nodes", replace(OTHER, gigabytes_per_second=0.5)),
    ],
)
def test_what_is_amiss_on_one_node(name: str, found: str, other: Facts) -> None:
    failed = [check for check in judge([WELL, other], NEED) if check.fix]
    assert [check.name for check in failed] == [name]
    assert found in failed[0].found
    assert f"fix: {failed[0].fix}" in report(failed)


def test_the_need_of_a_run() -> None:
    words = ["experiment=demo", "batch_size=128", "workers=3", "keep_checkpoints=5", "ema_decay=0.9"]
    config = compose("pretrain", words)
    world = World(0, 4, 0, torch.device("cpu"), local_size=2)
    needed = need(config, world, parameters=1000)
    height, width = config.data.image_size
    assert needed.shm == 2 * 3 * 3 * 32 * height * width * config.data.channels
    assert (needed.checkpoint, needed.checkpoints) == (16_000, 7)
    config.data.second_size = [4, 6]
    assert need(config, world, parameters=1000).shm == 2 * 3 * 3 * 32 * (height * width + 24) * config.data.channels


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
