"""The variables of launchers, as a shell, an old job or another scheduler may leave them: one line for each error."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.config import EngineConfig
from dmjd.errors import ConfigError, NotMet
from dmjd.parallel.launch import Launch, in_slurm_job, read_launch, slurm_step, slurm_times
from dmjd.parallel.world import join_world
from tests.conftest import free_port

Command = Callable[..., tuple[int, str, str]]
PAIR = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NUMBERS = ("", " ", "two", "-1", "1.5", "1e1", "0x2", "1_0", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 5000, "nan")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``launched(NAME=value, ...)``: these variables of launchers and no others."""

    def setting(**variables: str) -> None:
        for name in [*os.environ]:
            if name.startswith(("SLURM_", "MASTER_", "LOCAL_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE"):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    setting()
    return setting


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, Launch(0, 1, 0, 1)),
        ({"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "junk"}, Launch(0, 1, 0, 1)),
        (PAIR, Launch(1, 2, 1, 1)),  # as DeepSpeed's launcher leaves them
        ({**PAIR, "LOCAL_WORLD_SIZE": "2"}, Launch(1, 2, 1, 2)),
        ({**PAIR, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "fe80::1%eth0"}, Launch(1, 2, 0, 1)),
    ],
)
def test_a_launch_is_read(launched: Callable[..., None], variables: dict[str, str], launch: Launch) -> None:
    launched(**variables)
    assert read_launch() == launch


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("WORLD_SIZE", (*NUMBERS, "0"), "from 1"),
        ("RANK", (*NUMBERS, "2"), "from 0 to 1, below WORLD_SIZE=2"),
        ("LOCAL_RANK", (*NUMBERS, "2"), "from 0 to 1"),
        ("LOCAL_WORLD_SIZE", (*NUMBERS, "0", "3"), "from 1 to 2, not above WORLD_SIZE=2"),
        ("MASTER_PORT", (*NUMBERS, "0", "65536", "tcp://1.2.3.4:80"), "from 1 to 65535"),
        ("MASTER_ADDR", ("", " ", "n1 n2", "n[1-4]", "a\nb", "http://n1"), "the name or address of rank 0's host"),
    ],
)
def test_each_variable_that_is_wrong_is_named_with_its_value_and_a_cure(
    launched: Callable[..., None], name: str, values: tuple[str, ...], allowed: str
) -> None:
    for value in values:
        launched(**{**PAIR, name: value})
        with pytest.raises(ConfigError) as caught:
            read_launch()
        line = str(caught.value)
        assert line.startswith(f"{name}={value[:40]!r}")
        assert allowed in line
        assert "torchrun" in line
        assert len(line.splitlines()) == 1
        assert len(line) < 400


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing_is_named(launched: Callable[..., None], name: str) -> None:
    launched(**{key: value for key, value in PAIR.items() if key != name})
    with pytest.raises(ConfigError, match=f"WORLD_SIZE=2 is set and {name} is not; .*`unset WORLD_SIZE`"):
        read_launch()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_rank_without_a_number_of_processes_is_not_rank_0(launched: Callable[..., None], name: str) -> None:
    """It would train by itself, beside others that do the same, and print nothing."""
    launched(**{name: "1"})
    with pytest.raises(ConfigError, match=f"{name}='1' must be 0, without WORLD_SIZE.*`unset {name}`"):
        read_launch()


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"])
def test_slurms_numbers_are_numbers(launched: Callable[..., None], name: str) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}
    launched(**step)
    assert (slurm_step(), in_slurm_job()) == ("of step 7.0 in launch 2", True)
    launched(**{**step, name: "7;reboot"})
    with pytest.raises(ConfigError, match=f"{name}='7;reboot' must be a whole number .*`unset {name}`"):
        slurm_step()


@pytest.mark.parametrize("value", ["soon", "-1", "1e9", "2026-11-29T00:00:00", "9" * 15])
def test_slurms_times_are_times(launched: Callable[..., None], value: str) -> None:
    launched(SLURM_JOB_END_TIME="2000000000", SLURM_JOB_START_TIME="")
    assert slurm_times() == (None, 2000000000)
    launched(SLURM_JOB_END_TIME=value)
    with pytest.raises(ConfigError, match=r"SLURM_JOB_END_TIME=.* seconds since 1970; .*time_budget=null"):
        slurm_times()


@pytest.mark.parametrize("verb", ["pretrain", "preflight"])
def test_the_command_line_prints_one_line_and_touches_nothing(
    launched: Callable[..., None], tmp_path: Path, tiny: Callable[..., list[str]], dmjd: Command, verb: str
) -> None:
    for variables in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": ""}, {"RANK": ""}, {**PAIR, "RANK": "two"}):
        launched(**variables)
        code, out, err = dmjd(verb, *tiny(tmp_path / "run"))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: ")
    assert not (tmp_path / "run").exists()


def test_a_job_whose_end_is_past_is_another_job(
    launched: Callable[..., None], tmp_path: Path, tiny: Callable[..., list[str]], dmjd: Command
) -> None:
    launched(SLURM_JOB_END_TIME="1700000000")
    code, out, err = dmjd("pretrain", *tiny(tmp_path / "run"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "SLURM_JOB_END_TIME=1700000000 is 2023-11-14 22:13:20+00:00, in the past" in err
    assert "time_budget=null" in err
    assert not (tmp_path / "run").exists()


def test_other_commands_do_not_read_what_launchers_left(
    launched: Callable[..., None], finished_run: Path, dmjd: Command
) -> None:
    launched(WORLD_SIZE="x", RANK="", SLURM_JOB_END_TIME="soon", SLURM_RESTART_COUNT="x")
    assert dmjd("doctor", str(finished_run))[0] == 0


@pytest.mark.alone
def test_an_error_of_one_rank_is_printed_at_once(launched: Callable[..., None], dmjd: Command) -> None:
    for variables in ({**PAIR, "WORLD_SIZE": "16", "RANK": "9"}, {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}):
        launched(**variables)
        began = time.monotonic()
        code, _, err = dmjd("pretrain", "epochs=0")
        assert time.monotonic() - began < 2
        assert code == 2
        assert err.startswith("error: epochs must be")


def test_a_rank_without_a_gpu_of_its_own_is_named(
    launched: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(**PAIR)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    line = r"LOCAL_RANK=1 has no GPU: torch finds 1 \(CUDA_VISIBLE_DEVICES=3\); start at most one process per GPU"
    with pytest.raises(ConfigError, match=line):
        join_world(torch.device("cuda"), EngineConfig(name="ddp"))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("alone", r"rank 0 did not connect to the others at MASTER_ADDR=127.0.0.1 .*: .*; start all 2 within"),
        ("port", r"MASTER_PORT=\d+: .*EADDRINUSE.*; set MASTER_PORT to a free port"),
    ],
)
def test_processes_that_do_not_meet_are_one_line(launched: Callable[..., None], fault: str, says: str) -> None:
    import socket

    with socket.socket() as other:
        port = free_port()
        if fault == "port":
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = str(other.getsockname()[1])
        launched(**{**PAIR, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port})
        with pytest.raises(NotMet, match=says) as caught:
            join_world(torch.device("cpu"), EngineConfig(name="ddp", start_timeout=1 / 60))
    assert "\n" not in str(caught.value)


def test_an_interface_that_is_not_there_is_named(
    tmp_path: Path, tiny: Callable[..., list[str]], launch_world: Callable[..., Any]
) -> None:
    said = [f"sys.stderr = open({str(tmp_path / str(rank))!r}, 'w')" for rank in (0, 1)]
    fault = "os.environ['GLOO_SOCKET_IFNAME'] = 'nope0'"
    for process in launch_world(2, ["pretrain", *tiny(tmp_path / "run", "engine=ddp")], fault, dict(enumerate(said))):
        process.join(60)
        assert process.exitcode == 2
    line = (tmp_path / "0").read_text()
    assert "nope0; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface" in line
    assert line.count("\n") == 1
