"""dmjd submit: the script it makes, what it refuses, and the copy of the source that the script runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import dmjd
from dmjd.cluster.submit import on_one_gpu, plan, submit, submittable
from dmjd.compose import compose
from dmjd.errors import ConfigError
from dmjd.evaluate import EVALUATIONS
from dmjd.resources import launchers_dir
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


def test_a_job_that_may_lose_nodes(tmp_path: Path) -> None:
    words = ["experiment=mae_vit_base", "nodes=4", "batch_size=1024"]
    job = plan("pretrain", [*words, "min_nodes=2"])
    assert "no-kill" in header(job.script)
    assert "export DMJD_MIN_NODES=2\n" in job.script
    assert "min_nodes" not in job.script
    assert "no-kill" not in header(plan("pretrain", words).script)
    with pytest.raises(ConfigError, match="min_nodes=4 must be below nodes=4"):
        plan("pretrain", [*words, "min_nodes=4"])
    with pytest.raises(ConfigError, match="min_nodes must be an integer above 0, got '0'"):
        plan("pretrain", [*words, "min_nodes=0"])
    with pytest.raises(ConfigError, match="needs one of the commands pretrain, finetune, segment, detect"):
        plan("preflight", [*words, "min_nodes=2"])
    site = tmp_path / "static.env"
    site.write_text("DMJD_RENDEZVOUS=static\n")
    with pytest.raises(ConfigError, match="min_nodes needs DMJD_RENDEZVOUS=c10d"):
        plan("pretrain", [*words, "min_nodes=2", f"site={site}"])


@pytest.mark.parametrize(
    ("word", "run"),
    [
        ("seed=3", "runs/mae_vit_base"),  # as the experiment has it
        ("run='runs/lr=1e-3, x'", "runs/lr=1e-3, x"),
        ("run=runs/${mask.pattern}-${seed}", "runs/uniform-0"),
        ("run=runs/75%", "runs/75%"),
    ],
)
def test_the_job_is_told_where_the_run_is(word: str, run: str) -> None:
    job = plan("pretrain", ["experiment=mae_vit_base", "gpus=1", word])
    assert f"export DMJD_RUN={shlex.quote(run)}\n" in job.script
    assert job.folder == Path(run)
    assert header(job.script)["output"] == f"{Path.cwd()}/{run}/slurm/%x-%j.out"


def test_an_array_is_told_by_its_index_where_each_run_is() -> None:
    words = ["experiment=mae_vit_base", "gpus=1", "array=3-4", "seed=%a", "run='runs/lr=1 %a'"]
    job = plan("pretrain", words)
    assert "export DMJD_RUN='runs/lr=1 %a'\n" in job.script
    assert job.folder == Path("runs/lr=1 array")
    assert job.look == "follow it with dmjd doctor 'runs/lr=1 %a'", "in the array's own folder is nothing to be seen"


def test_an_array_whose_folders_only_the_run_could_tell_is_refused() -> None:
    words = ["experiment=mae_vit_base", "gpus=1", "array=3-4", "seed=%a", "run=runs/${seed}-%a"]
    with pytest.raises(ConfigError, match="must not refer to an argument with %a"):
        plan("pretrain", words)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('SBATCH_PARTITION="gpu"', "line 1 of SITE must be NAME=value, without quotes"),
        ("# ours\n\nexport DMJD_GPUS=4", "line 3 of SITE must be NAME=value"),
        (
            "DMJD_PYTHON=/env/bin/python  # ours",
            "line 1 of SITE must be NAME=value, without quotes, export or a comment",
        ),
        ("DMJD_REQUEUE=True", "line 1 of SITE: DMJD_REQUEUE must be true or false, got 'True'"),
        ("\nDMJD_RENDEZVOUS=etcd", "line 2 of SITE: DMJD_RENDEZVOUS must be c10d or static, got 'etcd'"),
        ("DMJD_CONTAINR=a.sif", "line 1 of SITE: DMJD_CONTAINR must be one of DMJD_GPUS, DMJD_PYTHON, DMJD_CONTAINER"),
        ("DMJD_IDLE_LIMIT=0", "DMJD_IDLE_LIMIT must be an integer above 0, got '0'"),
        ("DMJD_GPUS=eight", "DMJD_GPUS must be an integer above 0, got 'eight'"),
    ],
)
def test_a_site_that_a_job_would_read_otherwise(tmp_path: Path, lines: str, sentence: str) -> None:
    site = tmp_path / "mine.env"
    site.write_text(lines + "\n")
    with pytest.raises(ConfigError, match=re.escape(sentence.replace("SITE", str(site)))):
        plan("pretrain", [f"site={site}", "experiment=demo"])
    site.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        plan("pretrain", [f"site={site}", "experiment=demo"])


def test_kinds_of_gpus_and_lines_of_other_systems(tmp_path: Path) -> None:
    site = tmp_path / "mine.env"
    site.write_bytes(b"SBATCH_GPUS_PER_NODE=a100:4 \r\nhttp_proxy=http://proxy:3128\r\nDMJD_PROCESSES=2\r\n")
    words = [f"site={site}", f"run={tmp_path}/run", "experiment=demo", "batch_size=6"]
    script = plan("pretrain", words).script
    assert header(script)["gpus-per-node"] == "a100:4"
    assert "export http_proxy=http://proxy:3128\n" in script
    assert header(plan("pretrain", [*words, "gpus=2"]).script)["gpus-per-node"] == "a100:2"
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    probe = plan("linprobe", [f"site={site}", f"checkpoint={tmp_path}/run"])
    assert header(probe.script)["gpus-per-node"] == "a100:1"


@pytest.fixture
def fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``fake_sbatch(body)``: replace sbatch by a shell script."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def write(body: str) -> None:
        program = tmp_path / "bin" / "sbatch"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "echo 'sbatch: error: invalid partition: x' >&2; echo 'sbatch: error: failed' >&2; exit 1",
            "sbatch: error: failed",
        ),
        ("exit 9", "sbatch exited with code 9 without a message"),
        ("echo queued", "but 'queued\\n'; see squeue --me"),
    ],
)
def test_what_slurm_refuses_is_one_line(
    body: str,
    says: str,
    tmp_path: Path,
    fake_sbatch: Callable[[str], None],
    dmjd: Callable[..., tuple[int, str, str]],
) -> None:
    fake_sbatch(f"if [ -e {tmp_path}/first ]; then {body}; else touch {tmp_path}/first; echo 7; fi")
    code, _, error = dmjd("submit", "pretrain", f"run={tmp_path}/run", "gpus=1", "experiment=demo", "chain=3")
    assert code == 2
    assert error.count("\n") == 1
    assert error.endswith(f"{says}; submitted so far: 7\n")


def test_an_sbatch_that_hangs_is_one_line(
    tmp_path: Path,
    fake_sbatch: Callable[[str], None],
    dmjd: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dmjd.cluster.submit.SBATCH_SECONDS", 1.0)
    fake_sbatch(f"if [ -e {tmp_path}/first ]; then sleep 20; else touch {tmp_path}/first; echo 7; fi")
    code, _, error = dmjd("submit", "pretrain", f"run={tmp_path}/run", "gpus=1", "experiment=demo", "chain=2")
    assert (code, error.count("\n")) == (2, 1)
    assert "sbatch did not return within 1 s for " in error
    assert error.endswith("with squeue --me whether the job is queued; submitted so far: 7\n")


def test_variables_of_the_job_that_submits_do_not_reach_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_sbatch: Callable[[str], None]
) -> None:
    fake_sbatch(f"env >{tmp_path}/around; echo Welcome; echo '7;cluster'")
    of_a_job = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_END_TIME", "DMJD_CHAIN", "DMJD_EXIT_RECORD"
    for name in (*of_a_job, "DMJD_LAST_WORD", "SLURM_CONF", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "5")
    said = submit("pretrain", [f"run={tmp_path}/run", "gpus=1", "experiment=demo"])
    assert said[-1].startswith("submitted: 7; ")
    around = (tmp_path / "around").read_text()
    assert set(re.findall(r"^((?:SLURM|SBATCH|DMJD_[CEL])\w+)=", around, re.MULTILINE)) == {
        "SLURM_CONF",
        "SBATCH_PARTITION",
    }


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
    assert plan("preflight", [*words[:-1], "warm=yes"]).script == job.script
    assert plan("preflight", [*words, "warm=off"]).script == plan("preflight", words[:-1]).script
    with pytest.raises(ConfigError, match="warm must be true or false, got 'twice'"):
        plan("preflight", [*words, "warm=twice"])
    with pytest.raises(ConfigError, match="warm is not a key"):
        plan("pretrain", words)  # the job would fail


def test_a_fine_tuning_has_the_script_of_a_pre_training(tmp_path: Path) -> None:
    words = ["nodes=2", "gpus=4", "batch_size=64", f"run={tmp_path}/run"]
    job = plan("finetune", [f"{tmp_path}/first", *words])
    assert f"export DMJD_COMMAND=finetune\nexport DMJD_RUN={tmp_path}/run\n" in job.script
    assert f"set -- engine=ddp init={tmp_path}/first batch_size=64 run={tmp_path}/run\n" in job.script
    assert 'train "${DMJD_COMMAND:-pretrain}" "$@"' in job.script
    assert {"requeue", "signal", "exclusive"} <= header(job.script).keys()
    assert "export DMJD_COMMAND=pretrain\n" in plan("pretrain", [*words, "experiment=demo"]).script
    checked = plan("preflight", ["finetune", f"{tmp_path}/first", *words])
    assert f"set -- finetune engine=ddp init={tmp_path}/first batch_size=64" in checked.script


def test_an_evaluation_takes_its_run_without_a_key(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert f"set -- knn checkpoint={tmp_path}/run\n" in plan("knn", [f"{tmp_path}/run"]).script


def test_in_a_container_its_own_code_runs_under_a_copy_of_the_launchers(tmp_path: Path) -> None:
    (tmp_path / "site.env").write_text("DMJD_CONTAINER=/images/dmjd.sqsh\n")
    words = [f"site={tmp_path}/site.env", f"run={tmp_path}/run", "gpus=1", "experiment=demo"]
    job = plan("pretrain", words, tmp_path / "copy")
    assert f"export DMJD_LAUNCHERS={tmp_path}/copy/launchers" in job.script
    assert "DMJD_START" not in job.script
    assert "DMJD_PYTHON" not in job.script
    assert any(note.startswith("container: /images/dmjd.sqsh") for note in job.explanation)
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
        (
            "train",
            (),
            "'train' cannot be submitted; did you mean pretrain? choose from pretrain, finetune, segment, detect, preflight, knn, linprobe",
        ),
        ("pretrain", ("site=nowhere",), "neither a file nor one of a100-40, a100-80, h100"),
        ("pretrain", ("nodes=two",), "nodes must be an integer above 0, got 'two'"),
        ("pretrain", ("epocs=3",), "did you mean epochs"),
        ("pretrain", ("nodes=3", "batch_size=128"), "batch_size=128 is not divisible by"),
        ("pretrain", ("array=0-3", "gpus=1"), "set run=runs/pretrain-%a"),
        ("pretrain", ("nodes=²",), "nodes must be an integer above 0, got '²'"),
        ("pretrain", ("time=",), "time needs a value of one line, got ''"),
        ("pretrain", ("account=a\n#SBATCH --mem=1",), "account needs a value of one line"),
        ("pretrain", ("name=a/b", "gpus=1"), "name=a/b is part of the log's file name"),
        ("pretrain", ("run=runs/%j", "gpus=1"), "a file name pattern of Slurm such as %j"),
        ("pretrain", ("run=runs/75%%", "gpus=1"), "a file name pattern of Slurm such as %j"),
        ("pretrain", ("run=runs/%a", "gpus=1"), "(%a is the index of an array)"),
        ("pretrain", ("seed=%a", "gpus=1"), "seed must be an integer at least 0 and below 4294967296, got '%a'"),
        ("linprobe", ("nodes=2", "checkpoint=nowhere"), "linprobe runs on one GPU"),
        ("pretrain", ("array=0-3", "chain=2"), "chain and array cannot be combined"),
        ("linprobe", ("checkpoint=nowhere",), "neither a run folder with checkpoints nor in one"),
    ],
)
def test_mistakes_are_met_before_the_queue(verb: str, words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plan(verb, words)


def test_words_that_the_run_folder_refuses_are_met_before_the_queue(
    finished_run: Path, tiny: Callable[..., list[str]]
) -> None:
    words = tiny(finished_run, "gpus=1")
    assert plan("pretrain", words).folder == finished_run
    with pytest.raises(ConfigError, match=r"was started with seed=0, and seed=1 is set now"):
        plan("pretrain", [*words, "seed=1"])
    with pytest.raises(ConfigError, match="has checkpoints and resume=never"):
        plan("pretrain", [*words, "resume=never"])


def test_without_slurm_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not installed here"):
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


def test_every_command_that_can_be_submitted_exists_and_has_a_script() -> None:
    from dmjd.cli import COMMANDS

    assert set(submittable()) <= {*COMMANDS, *EVALUATIONS}
    scripts = {*on_one_gpu().values(), "pretrain", "preflight"}
    assert {path.stem for path in (launchers_dir() / "slurm").glob("*.sbatch")} == scripts


@pytest.mark.parametrize(
    "words", [["embed", "output=all.npz", "split=test"], ["predict", "new photos"]], ids=["embed", "predict"]
)
def test_a_command_for_a_trained_encoder_is_a_job_on_one_gpu(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    command, *rest = words
    job = plan(command, [str(tmp_path), *rest, "time=1:00:00"])
    assert job.folder == tmp_path
    (line,) = (line for line in job.script.splitlines() if line.startswith("set -- "))
    _, _, typed, *arguments = shlex.split(line)
    config = compose(typed, arguments)
    assert typed == command
    assert str(tmp_path) in (getattr(config, "checkpoint", None), *getattr(config, "checkpoints", []))
    assert "#SBATCH --gpus-per-node=1" in job.script
    with pytest.raises(ConfigError, match="runs on one GPU"):
        plan(command, [str(tmp_path), *rest, "nodes=2"])


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_interpreter_that_is_none_is_met_before_the_queue(tmp_path: Path, kind: str) -> None:
    python, site = tmp_path / "python", tmp_path / "site.env"
    python.mkdir() if kind == "folder" else python.touch(0o644)
    site.write_text(f"DMJD_PYTHON={python}\n")
    with pytest.raises(ConfigError, match=f"DMJD_PYTHON={python} is not an executable file"):
        plan("pretrain", [f"site={site}", "gpus=1", f"run={tmp_path}/run", "experiment=demo"])


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("DMJD_PYTHON=/nope/python", "is not on this machine"),
        ("DMJD_PYTHON=false", "does not run on this machine: exit code 1"),
        ("DMJD_PYTHON=VENV", "lacks packages on this machine: torch, hydra"),
        ("DMJD_CONTAINER=/nope/dmjd.sif", "is not on this machine"),
        ("DMJD_CONTAINER=registry#dmjd:1", ""),
        (f"DMJD_PYTHON={sys.executable}", ""),
        ("DMJD_PYTHON=", ""),
        ("DMJD_CONTAINER=", ""),
    ],
)
def test_what_only_compute_nodes_may_have_is_a_warning(
    tmp_path: Path, line: str, warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if "VENV" in line:
        venv.create(tmp_path / "venv", symlinks=True)
    site, line = tmp_path / "site.env", line.replace("VENV", f"{tmp_path}/venv/bin/python")
    site.write_text(line + "\n")
    job = plan("pretrain", [f"site={site}", "gpus=1", f"run={tmp_path}/run", "experiment=demo"])
    if line.endswith("="):  # as if the site did not name it
        assert f"export DMJD_PYTHON={sys.executable}\n" in job.script
    found = [note for note in job.explanation if note.startswith("warning: ")]
    assert len(found) == bool(warning)
    assert all(f"{line} {warning}" in note for note in found), found
