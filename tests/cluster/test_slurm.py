"""Runs on a real Slurm, through the scripts as they are shipped: nothing that ends a launch changes what a run becomes.

All jobs see the machine through one process a node; the GPUs they ask for are none.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.cluster.doctor import examine
from dmjd.parallel.store import read_model
from dmjd.runs import checkpoint
from tests.cluster.slurm import Cluster
from tests.compare import rows

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
STEPS = 88
# No planned checkpoint but where a test needs one: the pictures that come with it take longer than twenty steps.
WORDS = ("epochs=8", "checkpoint_every=1000", "log_every=2", "keep_checkpoints=3", "ema_decay=0.9")
NODE = {"DMJD_PROCESSES": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Site:
    """What a user on a login node of this cluster does."""

    def __init__(self, cluster: Cluster, folder: Path, tiny: Callable[..., list[str]]) -> None:
        self.cluster, self.folder, self.tiny = cluster, folder, tiny

    def submit(self, *words: str | Path, run: str, verb: str = "pretrain", **environment: str) -> list[str]:
        """``dmjd submit`` of a tiny run; the ids of its jobs."""
        own = self.tiny(self.folder / run, *WORDS) if verb == "pretrain" else []
        done = subprocess.run(
            [sys.executable, "-m", "dmjd", "submit", verb, *own, *map(str, words)],
            cwd=self.folder,
            env={**self.cluster.environment, **NODE, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        ids = done.stdout.splitlines()[-1].partition(": ")[2].partition(";")[0]
        return ids.split(", ")

    def under_way(self, run: str, after: int = 4) -> Callable[[], bool]:
        """Whether the newest launch of a run has got beyond step ``after``."""

        def is_so() -> bool:
            record = self.folder / run / "provenance.json"
            begun = json.loads(record.read_text())["launches"] if record.is_file() else []
            return 0 < len(begun) == len(self.launches(run)) and self.logged(run) > after

        return is_so

    def logged(self, run: str) -> int:
        """The last step in the log."""
        log = self.folder / run / "log.jsonl"
        rows = (
            log.read_text().split("\n")[:-1] if log.is_file() else []
        )  # behind the last newline a row may be half there
        return json.loads(rows[-1])["step"] if rows else 0

    def launches(self, run: str) -> list[dict[str, Any]]:
        lines = (self.folder / run / "slurm" / "launches.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def log(self, run: str) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / run / "slurm").glob("*.out")))

    def marker(self, run: str) -> dict[str, Any]:
        path = self.folder / run / "STOP_REASON"
        return json.loads(path.read_text()) if path.is_file() else {}


@pytest.fixture(scope="module")
def site(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]]) -> Site:
    return Site(cluster, tmp_path_factory.mktemp("site"), tiny)


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Path:
    """The run of two processes that nothing happens to, through the launcher for one host."""
    folder = site.folder / "undisturbed"
    done = subprocess.run(
        ["bash", str(ROOT / "launchers/torchrun/one_host.sh"), *site.tiny(folder, *WORDS)],
        cwd=ROOT,
        env={**os.environ, **NODE, "PROCESSES": "2", "DMJD_PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return folder


def assert_same(run: Path, other: Path) -> None:
    assert (run / "log.jsonl").read_bytes() == (other / "log.jsonl").read_bytes()
    states = [read_model(checkpoint.resolve(folder)) for folder in (run, other)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_signal_before_the_time_limit(site: Site, undisturbed: Path) -> None:
    (job,) = site.submit("nodes=2", "time=30", "time_margin=30", run="signal")
    site.cluster.wait(job, site.under_way("signal"))
    site.cluster("scancel", "--signal=USR1", job)
    site.cluster.wait(job, lambda: len(site.launches("signal")) == 2)
    stopped = site.launches("signal")[1]["step"]
    assert 4 < stopped < STEPS
    assert f"stopped at step {stopped} (began at 0): signal, SIGUSR1 at rank 0" in site.log("signal")
    assert site.cluster.wait(job) == "COMPLETED"
    assert [launch["restart"] for launch in site.launches("signal")] == [0, 1]
    assert site.marker("signal")["reason"] == "finished"
    assert_same(site.folder / "signal", undisturbed)
    # Both launches ran the copy, though the checkout was at hand.
    record = json.loads((site.folder / "signal" / "provenance.json").read_text())
    assert len(record["launches"]) == 2
    assert all(str(site.folder / "signal" / "code") in launch["command"][0] for launch in record["launches"])


@pytest.mark.long  # a minute; the shell tests meet the same ends on a fake Slurm
def test_a_stopped_rank_a_killed_daemon_a_killed_rank_and_a_dead_node(
    site: Site, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, run = site.cluster, site.folder / "killed"
    (job,) = site.submit("nodes=2", "time=30", "time_margin=30", "checkpoint_every=30", run="killed")
    cluster.wait(job, lambda: bool(checkpoint.committed(run / "checkpoints")))
    _, node = cluster.nodes_of(job)
    (rank,) = cluster.ranks(node)

    # The run hangs. The doctor looks from the login node, which sees no process of a node but through Slurm.
    os.kill(rank, signal.SIGSTOP)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    found = "\n".join(f"{what} -> {advice}" for what, advice in examine(run, now=time.time() + 120))
    assert f"rank 1 (process {rank} on {node})" in found
    assert f"is stopped (SIGSTOP): all other ranks wait for it -> on {node}: kill -CONT {rank}" in found
    assert f"Slurm: job {job} is RUNNING" in found

    # A daemon that dies and is started again, as systemd would, takes nothing along.
    stood = site.logged("killed")
    cluster.kill_slurmd(node)
    cluster.start_node(node)
    os.kill(rank, signal.SIGCONT)
    cluster.wait(job, site.under_way("killed", stood + 2))
    assert len(site.launches("killed")) == 1

    os.kill(rank, signal.SIGKILL)
    began = time.monotonic()
    cluster.wait(job, lambda: len(site.launches("killed")) == 2)
    assert time.monotonic() - began < 60, "the other rank waited for the dead one"
    saved = site.launches("killed")[1]["step"]
    assert saved > 0
    assert saved % 30 == 0
    assert "killed by SIGKILL" in site.log("killed")
    assert f"stopped at step {saved} (began at 0): lost, rank 0 on " in site.log("killed")

    cluster.wait(job, site.under_way("killed", saved))
    victim = cluster.nodes_of(job)[-1]
    cluster.kill_node(victim)
    try:
        cluster.wait(job, lambda: len(site.launches("killed")) == 3)
    finally:
        cluster.start_node(victim)
    assert cluster.wait(job) == "COMPLETED"
    assert_same(run, undisturbed)


def test_cancelling_leaves_a_checkpoint_from_which_another_number_of_nodes_goes_on(
    site: Site, undisturbed: Path
) -> None:
    (job,) = site.submit("nodes=2", "time=30", "time_margin=30", run="cancelled")
    site.cluster.wait(job, site.under_way("cancelled"))
    site.cluster("scancel", job)
    assert site.cluster.wait(job) == "CANCELLED"
    site.cluster.wait_until(lambda: not site.cluster.ranks_anywhere())
    assert len(site.launches("cancelled")) == 1
    assert site.marker("cancelled")["reason"] == "signal"
    found = checkpoint.resolve(site.folder / "cancelled")
    assert checkpoint.step_of(found) == site.marker("cancelled")["step"]
    assert read_model(found).keys() == read_model(checkpoint.resolve(undisturbed)).keys()

    (again,) = site.submit("nodes=1", "gpus=1", "time=30", "time_margin=30", run="cancelled")
    assert site.cluster.wait(again) == "COMPLETED"
    ours, theirs = (
        [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in (site.folder / "cancelled", undisturbed)
    )
    assert len(ours) == len(theirs)
    for row, other in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4), row["step"]


def test_launches_that_get_nowhere_come_to_an_end(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'RANK' in os.environ:\n    os._exit(9)\n")
    (job,) = site.submit("nodes=1", "gpus=1", run="to nowhere", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert site.cluster.wait(job) == "FAILED"
    assert [launch["restart"] for launch in site.launches("to nowhere")] == [0, 1, 2]
    assert "not requeued: 3 launches in a row ended at step 0" in site.log("to nowhere")


def test_a_refused_run_is_not_tried_again(site: Site) -> None:
    # By hand, as the script's own head says.
    run, out = site.folder / "refused", site.folder / "refused.out"
    words = site.tiny(run, "data=folder", f"data.root={site.folder}/nowhere", "engine=ddp")
    environment = {**NODE, "DMJD_LAUNCHERS": str(ROOT / "launchers"), "DMJD_PYTHON": sys.executable}
    script = ROOT / "launchers/slurm/pretrain.sbatch"
    job = site.cluster.submit("--nodes=2", "--time=10", f"--output={out}", script, *words, **environment)
    assert site.cluster.wait(job) == "FAILED"
    assert len(site.launches("refused")) == 1
    assert f"not requeued: data.root={site.folder}/nowhere" in out.read_text()


def test_nodes_are_checked_with_the_words_of_the_run(site: Site) -> None:
    (job,) = site.submit(*site.tiny(site.folder / "checked"), "nodes=2", "gpus=1", run="checked", verb="preflight")
    assert site.cluster.wait(job) == "COMPLETED", site.log("checked")
    said = dict(re.findall(r"^ok +(\S+(?: folder)?) +(.*)$", site.log("checked"), re.MULTILINE))
    assert said.keys() == {"versions", "data", "/dev/shm", "run folder", "clocks", "GPUs", "all-reduce"}
    assert "over 2 ranks on several nodes" in said["all-reduce"]
    assert not (site.folder / "checked" / "config.yaml").exists()


@pytest.mark.long  # five minutes, two of which are Slurm's between a requeue and the next start
def test_a_lost_node_of_four_and_then_the_one_of_the_batch_script(site: Site) -> None:
    cluster, run = site.cluster, site.folder / "elastic"
    quick = {"PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"}
    words = ("nodes=4", "min_nodes=1", "time=30", "time_margin=30", "checkpoint_every=20", "epochs=60")
    (job,) = site.submit(*words, run="elastic", **quick)
    cluster.wait(job, lambda: bool(checkpoint.committed(run / "checkpoints")))
    first, victim, *_ = cluster.nodes_of(job)

    def worlds() -> list[int]:
        return [launch["world_size"] for launch in json.loads((run / "provenance.json").read_text())["launches"]]

    saved = checkpoint.step_of(checkpoint.resolve(run))
    cluster.kill_node(victim)
    try:
        cluster.wait(job, lambda: len(worlds()) > 1 and site.logged("elastic") > saved + 40)
        assert worlds() == [4, 2]
        # Slurm notices the loss after SlurmdTimeout.
        cluster.wait(job, lambda: victim not in cluster.nodes_of(job))
        assert cluster.state(job) == "RUNNING"
        assert len(site.launches("elastic")) == 1
        assert "2 of 4 process(es) train, 1 stay idle, 1 are missing: the most that divide" in site.log("elastic")
        cluster.kill_node(first)
        cluster.wait_until(lambda: cluster.job(job)["Restarts"] == "1", 120, lambda: str(cluster.job(job)))
    finally:
        for name in {first, victim} - cluster.slurmd.keys():
            cluster.start_node(name)
    assert "with the batch script and the store of the rendezvous: requeue" in site.log("elastic")
    assert site.marker("elastic")["reason"] == "lost"
    # With the two minutes of a requeue: without them Slurm may end the launch as the one before.
    cluster.wait_until(lambda: len(site.launches("elastic")) == 2, 300, lambda: str(cluster.job(job)))
    assert site.launches("elastic")[1]["step"] >= saved
    assert cluster.wait(job, seconds=600) == "COMPLETED", site.log("elastic")
    assert site.marker("elastic")["reason"] == "finished"
    assert [row["step"] for row in rows(run)] == [*range(2, 60 * STEPS // 8 + 1, 2)]


def test_four_nodes_without_names(site: Site) -> None:
    (site.folder / "here.env").write_text("SBATCH_PARTITION=all\nDMJD_RENDEZVOUS=static\nDMJD_GPUS=8\n")
    (job,) = site.submit(f"site={site.folder}/here.env", "nodes=4", "epochs=1", run="four")
    asked = site.cluster.job(job)
    assert site.cluster.wait(job) == "COMPLETED", site.log("four")
    assert asked["NumNodes"].startswith("4")
    assert "gres/gpu=32" in asked["TRES"] or "gres:gpu:8" in asked["TresPerNode"]
    assert json.loads((site.folder / "four" / "provenance.json").read_text())["world_size"] == 4
    assert site.marker("four")["reason"] == "finished"


@pytest.mark.long
def test_jobs_of_an_array_whose_time_is_over_requeue_themselves_alone(site: Site) -> None:
    # Their time is over as soon as they have begun, until they are given more.
    words = ("nodes=1", "gpus=1", "time=10", "time_margin=599", "array=0-1", "seed=%a", "epochs=2")
    (array,) = site.submit(*words, f"run='{site.folder}/seed=%a'", run="unused")
    jobs = f"{array}_0", f"{array}_1"
    for job in jobs:
        site.cluster.wait(job, lambda job=job: site.cluster.job(job)["Restarts"] == "1")  # type: ignore[misc]
        site.cluster("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    for job, run in zip(jobs, ("seed=0", "seed=1"), strict=True):
        assert site.cluster.wait(job) == "COMPLETED"
        first, second = site.launches(run)
        assert (first["job"], second["job"]) == (job, job)
        assert 0 < second["step"] < 22
        assert "time, the time limit was reached" in Path(second["log"]).read_text()
    logs = [(site.folder / f"seed={seed}" / "log.jsonl").read_bytes() for seed in range(2)]
    assert logs[0] != logs[1]


def test_a_chain_goes_on_where_its_last_job_stopped(site: Site) -> None:
    words = ("nodes=1", "gpus=1", "time=30", "time_margin=30", "chain=3", "epochs=5")
    first, second, third = site.submit(*words, run="chain")
    site.cluster.wait(first, site.under_way("chain"))
    site.cluster("scancel", "--signal=USR1", first)
    for job in (first, second, third):
        assert site.cluster.wait(job) == "COMPLETED"
    assert [launch["job"] for launch in site.launches("chain")] == [first, second]  # the third had nothing to do
    assert site.marker("chain")["reason"] == "finished"
    # While it is at hand: what else can be submitted about a run.
    (probe,) = site.submit(
        f"checkpoint={site.folder}/chain",
        "epochs=2",
        "warmup_epochs=1",
        "batch_size=256",
        "workers=0",
        run="chain",
        verb="linprobe",
    )
    assert site.cluster.wait(probe) == "COMPLETED", site.log("chain")
    assert "linprobe: linear-probing top-1" in site.log("chain")
