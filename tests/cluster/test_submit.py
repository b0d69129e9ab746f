"""dmjd submit: the script it makes, what it refuses, and the copy of the source that the script runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import dmjd
from dmjd.cluster.submit import plan, submit, verbs
from dmjd.errors import ConfigError
from dmjd.source import snapshot, source_state

ROOT = Path(__file__).parents[2]


def header(script: str) -> dict[str, str]:
    """Options as sbatch reads them: split at spaces, with a shell's quotes."""
    lines = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    words = [shlex.split(line) for line in lines]
    assert all(len(word) == 1 for word in words)
    return dict(word[0].removeprefix("--").partition("=")[::2] for word in words)


def test_a_site_and_words_fill_the_script(tmp_path: Path) -> None:
    site = tmp_path / "mine.env"
    site.write_text(
        "# ours\nSBATCH_PARTITION=gpu\nSBATCH_TIMELIMIT=1:00:00\nDMJD_GPUS=4\n"
        "DMJD_PYTHON=/env/bin/python\nNCCL_SOCKET_IFNAME=^lo,docker\n#NCCL_IB_HCA=no\n"
    )
    words = [f"site={site}", "nodes=2", "account=me", f"run={tmp_path}/a run", "experiment=demo", "batch_size=128"]
    job = plan("pretrain", words)
    options = header(job.script)
    assert options["partition"] == "gpu"
    assert (options["nodes"], options["gpus-per-node"], options["account"]) == ("2", "4", "me")
    assert options["time"] == "1:00:00"
    assert options["output"] == f"{tmp_path}/a run/slurm/%x-%j.out"
    assert {"requeue", "exclusive", "signal", "open-mode"} <= options.keys()
    assert "export NCCL_SOCKET_IFNAME='^lo,docker'" in job.script
    assert "NCCL_IB_HCA" not in job.script
    assert f"set -- engine=ddp 'run={tmp_path}/a run' experiment=demo batch_size=128" in job.script
    assert header(plan("pretrain", [*words, "time=2:00:00"]).script)["time"] == "2:00:00"
    assert options["chdir"] == str(Path.cwd())
    assert not (tmp_path / "a run").exists()


def test_a_script_has_a_home_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell looks for the markers of the run in RUN, and would make a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.env").write_text("SBATCH_PARTITION=gpu\n")
    for words, run, folder in ((("run=~/run",), "run", "run"), (("array=0-1", "run=~/run-%a"), "run-%a", "run-array")):
        job = plan("pretrain", ["site=~/mine.env", "gpus=1", "experiment=demo", "data.root=~/images", *words])
        assert f"set -- experiment=demo data.root={tmp_path}/images run={tmp_path}/{run}\n" in job.script
        assert job.folder == tmp_path / folder
        assert header(job.script)["partition"] == "gpu"


def test_preflight_takes_the_words_of_the_run_that_it_is_for(tmp_path: Path) -> None:
    words = ["nodes=2", "gpus=4", f"run={tmp_path}/run", "experiment=demo", "batch_size=128", "warm=true"]
    job = plan("preflight", words)
    assert f"set -- engine=ddp run={tmp_path}/run experiment=demo batch_size=128 warm=true" in job.script
    with pytest.raises(ConfigError, match="batch_size=129 is not divisible by"):
        plan("preflight", [*words, "batch_size=129"])
    with pytest.raises(ConfigError, match="warm is not a key"):
        plan("preflight", [*words, "warm=yes"])


def test_in_a_container_its_own_code_runs_under_a_copy_of_the_launchers(tmp_path: Path) -> None:
    (tmp_path / "site.env").write_text("DMJD_CONTAINER=/images/dmjd.sqsh\n")
    words = [f"site={tmp_path}/site.env", f"run={tmp_path}/run", "gpus=1", "experiment=demo"]
    job = plan("pretrain", words, tmp_path / "copy")
    assert f"export DMJD_LAUNCHERS={tmp_path}/copy/launchers" in job.script
    assert "DMJD_START" not in job.script
    assert "DMJD_PYTHON" not in job.script
    assert any(note.startswith("container: /images/dmjd.sqsh") for note in job.notes)
    (tmp_path / "site.env").write_text("")
    assert f"export DMJD_START={tmp_path}/copy/start.py" in plan("pretrain", words, tmp_path / "copy").script


def test_a_chain_is_for_sites_that_do_not_requeue(tmp_path: Path) -> None:
    job = plan("pretrain", ["chain=3", "gpus=1", f"run={tmp_path}/run", "experiment=demo"])
    assert "requeue" not in header(job.script)
    assert "no-requeue" in header(job.script)
    assert job.chain == 3
    assert "export DMJD_CHAIN=" in job.script


@pytest.mark.parametrize(
    ("verb", "words", "sentence"),
    [
        ("train", (), "choose from linprobe, preflight, pretrain"),
        ("pretrain", ("site=nowhere",), "neither a file nor one of a100-40, a100-80, h100"),
        ("pretrain", ("nodes=two",), "nodes must be a whole number above 0, got 'two'"),
        ("pretrain", ("epocs=3",), "did you mean epochs"),
        ("pretrain", ("nodes=3", "batch_size=128"), "batch_size=128 is not divisible by"),
        ("pretrain", ("array=0-3", "gpus=1"), "write run=runs/NAME-%a"),
        ("pretrain", ("array=0-3", "chain=2"), "chain and array do not go together"),
        ("linprobe", ("checkpoint=nowhere",), "neither a run folder with checkpoints nor in one"),
    ],
)
def test_mistakes_are_met_before_the_queue(verb: str, words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plan(verb, words)


def test_without_slurm_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch here"):
        submit("pretrain", [f"run={tmp_path}/run", "gpus=1", "experiment=demo"])
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_script_and_writes_nothing(
    tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = dmjd("submit", "pretrain", f"run={tmp_path}/run", "nodes=2", "experiment=demo", "--dry-run")
    assert code == 0
    assert out.startswith("#!/usr/bin/env bash\n#SBATCH")
    assert "nothing was submitted" in out
    subprocess.run(["bash", "-n"], input=out, text=True, check=True)
    assert not (tmp_path / "run").exists()


def test_a_copy_of_the_source_runs_whatever_lies_around(tmp_path: Path) -> None:
    copy = snapshot(tmp_path / "code")
    assert snapshot(tmp_path / "code") == copy
    (tmp_path / "dmjd").mkdir()
    (tmp_path / "dmjd" / "__init__.py").write_text("raise SystemExit('the one in the current folder')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(copy / "start.py"), "submit", "pretrain", f"run={tmp_path}/run", "gpus=1", "--dry-run"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"export DMJD_LAUNCHERS={copy}/launchers" in done.stdout


def test_a_copy_knows_of_which_commit_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = source_state()
    copy = snapshot(tmp_path / "code")
    monkeypatch.setattr(dmjd, "__file__", str(copy / "dmjd" / "__init__.py"))
    assert source_state() == state
    # Another source is another copy; the first, which a job may be running, is not touched.
    before = (copy / "dmjd" / "resources.py").read_text() + "# edited\n"
    (copy / "dmjd" / "resources.py").write_text(before)
    assert snapshot(tmp_path / "code") != copy
    assert (copy / "dmjd" / "resources.py").read_text() == before
    assert json.loads((copy / "SOURCE.json").read_text()) == {"git_sha": state[0]}


def test_every_verb_with_a_script_exists() -> None:
    from dmjd.cli import VERBS

    assert set(verbs()) <= VERBS.keys()
