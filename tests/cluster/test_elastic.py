"""Elastic launches of several agents on this machine, through the script for several hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dmjd.parallel import store
from dmjd.runs import checkpoint
from tests.compare import same
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
QUICK = {
    "PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3",
    "DMJD_PYTHON": sys.executable,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
}
WORDS = ("epochs=12", "checkpoint_every=20", "keep_checkpoints=20", "log_every=10", "ema_decay=0.9")


class Hosts:
    """Agents of one launch, each with one rank; the first has the rendezvous store and the last is rank 0's."""

    def __init__(self, count: int, folder: Path, words: list[str]) -> None:
        self.run = folder / "run"
        self.logs = [folder / f"host{host}.log" for host in range(count)]
        self.agents: list[subprocess.Popen[bytes]] = []
        common = {"HOSTS": str(count), "HEAD": "127.0.0.1", "PORT": free_port(), "PROCESSES": "1", "MIN_HOSTS": "1"}
        for host, log in enumerate(self.logs):
            # Group ranks are in the order of addresses.
            own = {"PET_LOCAL_ADDR": f"127.0.0.{count - host}"}
            with log.open("wb") as file:
                self.agents.append(
                    subprocess.Popen(
                        ["bash", str(ROOT / "launchers/torchrun/several_hosts.sh"), *words],
                        cwd=ROOT,
                        env={**os.environ, **QUICK, **common, **own},
                        stdout=file,
                        stderr=file,
                    )
                )
            if host == 0:
                self.until(lambda: _listens(int(common["PORT"])))

    def until(self, holds: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.log()
            time.sleep(0.05)

    def kill(self, host: int) -> None:
        """The agent and its rank, as when a node loses its power."""
        pids = _tree(self.agents[host].pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.agents[host].wait(30)

    def log(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def step(self) -> int:
        """The last step in the log of the run."""
        rows = (self.run / "log.jsonl").read_text().split("\n")[:-1]
        return int(json.loads(rows[-1])["step"]) if rows else 0

    def worlds(self) -> list[int]:
        """Number of ranks that train, of each start."""
        return [start["world_size"] for start in json.loads((self.run / "provenance.json").read_text())["launches"]]

    def close(self) -> None:
        for host, agent in enumerate(self.agents):
            if agent.poll() is None:
                self.kill(host)


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _tree(int(child)))]


def _listens(port: int) -> bool:
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines.splitlines()[1:])


@pytest.fixture
def hosts(tmp_path: Path, tiny: Callable[..., list[str]]) -> Iterator[Callable[..., Hosts]]:
    """``hosts(count, *words)``: that many hosts, which have committed a checkpoint."""
    started: list[Hosts] = []

    def start(count: int, *words: str) -> Hosts:
        launched = Hosts(count, tmp_path, tiny(tmp_path / "run", *WORDS, *words))
        started.append(launched)
        launched.until(lambda: bool(checkpoint.committed(launched.run / "checkpoints")))
        return launched

    yield start
    for launched in started:
        launched.close()


@pytest.mark.long  # half a minute
def test_two_hosts_go_on_without_the_third_as_a_run_that_two_resume(
    hosts: Callable[..., Hosts], tmp_path: Path, tiny: Callable[..., list[str]]
) -> None:
    launched = hosts(3, "batch_size=120", "backbone.drop_path=0.2")
    launched.kill(2)
    assert [agent.wait(120) for agent in launched.agents[:2]] == [0, 0], launched.log()
    assert launched.worlds() == [3, 2]
    assert "2 of 3 process(es) train, 0 stay idle, 1 are missing: the most that divide batch_size=120" in launched.log()
    run, alone = launched.run, tmp_path / "alone"
    _, _, line = launched.log().partition("continuing from ")
    newest = Path(line.split()[0])

    shutil.copytree(run, alone)
    for path in checkpoint.committed(alone / "checkpoints"):
        if path.name > newest.name:
            shutil.rmtree(path)
    words = tiny(alone, *WORDS, "batch_size=120", "backbone.drop_path=0.2", "engine.grad_accum_steps=2")
    done = subprocess.run(
        ["bash", str(ROOT / "launchers/torchrun/one_host.sh"), *words],
        cwd=ROOT,
        env={**os.environ, **QUICK, "PROCESSES": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"continuing from {alone / 'checkpoints' / newest.name} " in done.stderr + done.stdout
    assert (run / "log.jsonl").read_bytes() == (alone / "log.jsonl").read_bytes()
    assert same(*(store.read(checkpoint.resolve(folder)) for folder in (run, alone)))


@pytest.mark.long  # a minute
def test_an_idle_host_takes_the_place_of_the_next_one_that_is_lost(hosts: Callable[..., Hosts]) -> None:
    launched = hosts(4, "batch_size=128", "epochs=30")
    launched.kill(3)
    launched.until(lambda: launched.worlds() == [4, 2] and launched.step() > 40)
    assert "2 of 4 process(es) train, 1 stay idle, 1 are missing: the most that divide batch_size=128" in launched.log()
    launched.kill(2)
    assert [agent.wait(120) for agent in launched.agents[:2]] == [0, 0], launched.log()
    assert "2 of 4 process(es) train, 0 stay idle, 2 are missing: the most that divide batch_size=128" in launched.log()
    assert launched.worlds() == [4, 2, 2]
    assert json.loads((launched.run / "STOP_REASON").read_text())["reason"] == "finished"


@pytest.mark.long
def test_without_the_rendezvous_store_the_launch_ends_and_its_log_has_the_reason(hosts: Callable[..., Hosts]) -> None:
    launched = hosts(3, "batch_size=120", "epochs=1000")
    launched.kill(0)
    assert [agent.wait(120) for agent in launched.agents[1:]] == [1, 1], launched.log()
    assert launched.log().count("torchrun: the rendezvous store, on the agent of the first node, is lost to ") == 2
    assert json.loads((launched.run / "STOP_REASON").read_text())["reason"] == "lost"
    assert launched.worlds() == [3]


@pytest.mark.long  # a minute: torchrun waits half of it for the stopped rank
def test_a_stopped_rank_is_killed_and_trains_again(hosts: Callable[..., Hosts]) -> None:
    launched = hosts(2, "batch_size=120", "epochs=30", "engine.step_timeout=0.05", "data.timeout=0.04")
    (rank,) = _tree(launched.agents[1].pid)[1:]
    os.kill(rank, signal.SIGSTOP)
    assert [agent.wait(180) for agent in launched.agents] == [0, 0], launched.log()
    assert launched.worlds() == [2, 2]


RANK = """
import os, signal, sys, time
from pathlib import Path
from dmjd.runs.heartbeat import Heartbeat

if not Path("first").exists():
    Path("first").touch()
    with Heartbeat(Path(), 0, step_limit=2.5, limit=600.0) as heartbeat:
        for step in range(4):
            heartbeat.beat(step, "step", 0.0, 0.0)
            time.sleep(0.7)
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
with open(os.environ["DMJD_EXIT_RECORD"], "x") as record:
    record.write("error: a full disk\\n")
sys.exit(2)
"""


def test_a_rank_whose_heartbeat_is_overdue_is_killed_and_an_error_of_the_user_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=x")
    options = ("--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-conf=last_call_timeout=1")
    launched = subprocess.run(
        [sys.executable, str(ROOT / "launchers/agent.py"), *options, *meet, "rank.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DMJD_FULL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert launched.returncode == 1
    assert launched.stderr.count(" is killed: its heartbeat is overdue\n") == 1, launched.stderr
    assert launched.stderr.count("starting the ranks again\n") == 1
    assert launched.stderr.endswith("of local rank 0 exited with code 2\n")
    assert (tmp_path / "stopped").exists(), "each heartbeat has renewed the timer"
