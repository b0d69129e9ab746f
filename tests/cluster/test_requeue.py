"""What becomes of a job after a launch: decided by what the run left, and by whether it got anywhere."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from dmjd.cluster.doctor import examine
from tests.cluster.fake_slurm import LAUNCHERS, FakeSlurm


@dataclass
class Launches:
    """One job's launches, one after the other, of a run in ``run``."""

    slurm: FakeSlurm
    count: int = 0

    @property
    def run(self) -> Path:
        return self.slurm.folder / "run"

    def __call__(
        self, reason: str = "", step: int = 0, word: str = "", more: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A launch that commits ``step`` and leaves a last word of ``reason``, or ``word``, or neither."""
        srun = (
            [f"mkdir -p run/checkpoints/step-{step:08d}; touch run/checkpoints/step-{step:08d}/manifest.json"]
            if step
            else []
        )
        if reason:
            srun.append(f'printf "%s\\n" "{reason}: why it {reason}" "what to do" >"$DMJD_EXIT_RECORD"')
        if word:
            srun.append(f'echo "{word}" >"$DMJD_EXIT_RECORD"')
        restart = {"SLURM_RESTART_COUNT": str(self.count)} if self.count else {}
        self.count += 1
        script = "\n".join([*srun, more or "exit 1"])
        return self.slurm.submit(
            "pretrain.sbatch", "run=run", "epochs=2", FAKE_SRUN=script, **{**restart, **environment}
        )

    @property
    def requeues(self) -> int:
        return self.slurm.asked("scontrol").count("requeue")


@pytest.fixture
def launches(tmp_path: Path) -> Launches:
    return Launches(FakeSlurm(tmp_path))


@pytest.mark.parametrize("reason", ["finished", "file"])
def test_what_has_ended_is_left_alone(launches: Launches, reason: str) -> None:
    assert launches(reason, step=5).returncode == 0
    assert launches.requeues == 0


@pytest.mark.parametrize("reason", ["signal", "time", "lost", "crashed", "error", "interrupted", ""])
def test_what_got_somewhere_goes_on(launches: Launches, reason: str) -> None:
    for step in (5, 10, 15):
        done = launches(reason, step=step)
        assert done.returncode == 0, done.stderr
    assert launches.requeues == 3
    lines = (launches.run / "slurm/launches.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 5, 10]
    assert json.loads(lines[-1])["log"] == "/logs/job 7.out"


@pytest.mark.parametrize(
    ("reason", "tries"), [("", 3), ("lost", 3), ("signal", 3), ("crashed", 2), ("error", 1), ("diverged", 1)]
)
def test_what_gets_nowhere_has_so_many_tries(launches: Launches, reason: str, tries: int) -> None:
    assert launches("signal", step=5).returncode == 0
    said = [launches(reason) for _ in range(tries)]
    assert [done.returncode for done in said] == [0] * (tries - 1) + [1]
    assert launches.requeues == tries
    assert "not requeued: " in said[-1].stdout
    assert not reason or f"why it {reason}" in said[-1].stdout
    assert tries == 1 or f"{tries} launches in a row ended at step 5" in said[-1].stdout


def test_a_crash_that_was_overcome_does_not_count(launches: Launches) -> None:
    for reason, step in (("crashed", 0), ("signal", 5), ("crashed", 0), ("signal", 10), ("crashed", 0)):
        assert launches(reason, step=step).returncode == 0
    assert launches("crashed").returncode == 1


def test_a_site_may_have_less_patience(launches: Launches) -> None:
    assert launches("crashed", DMJD_IDLE_LIMIT="1").returncode == 1
    assert launches.requeues == 0


@pytest.mark.parametrize(("name", "value"), [("DMJD_REQUEUE", "True"), ("DMJD_IDLE_LIMIT", "0")])
def test_what_a_site_means_is_asked_before_the_launch(launches: Launches, name: str, value: str) -> None:
    """True was taken for false, so that a job did not come back, and a limit of 0 let none begin."""
    done = launches("signal", step=5, **{name: value})
    assert done.returncode == 2
    assert f"error: {name} must be" in done.stderr
    assert launches.slurm.asked("srun") == []


def test_the_other_nodes_of_an_elastic_job_are_not_ended_with_one(launches: Launches) -> None:
    four = {"SLURM_NNODES": "4", "DMJD_MIN_NODES": "2"}
    both = 'until grep -q overlap "$0.asked"; do /bin/sleep 0.01; done; exit 1'  # steps, of which one is the ranks'
    done = launches("lost", step=5, more=both, **four)
    assert "stopped at step 5 (began at 0): lost" in done.stdout
    assert launches.requeues == 1
    asked = launches.slurm.asked("srun")
    assert asked.count("--no-kill") == 2
    assert {"--kill-on-bad-exit=0", "--wait=0", "--overlap", "--nodes=3", "--exclude=n1"} < set(asked)
    assert asked[asked.index("--exclude=n1") + 1 :][1:5] == [
        f"{LAUNCHERS}/slurm/first_node.sh", "7", "/logs/job 7.out", "requeue",
    ]  # fmt: skip
    (launches.slurm.folder / "bin/srun.asked").unlink()
    launches("lost", step=6, more=both, DMJD_REQUEUE="false", **four)
    assert launches.slurm.asked("srun").count("cancel") == 1


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"DMJD_MIN_NODES": "4"}, "DMJD_MIN_NODES=4 must be an integer above 0 and below the 4 node(s) of the job"),
        ({"DMJD_MIN_NODES": "x"}, "DMJD_MIN_NODES=x must be an integer above 0"),
        ({"DMJD_MIN_NODES": "2", "DMJD_RENDEZVOUS": "static"}, "DMJD_MIN_NODES needs DMJD_RENDEZVOUS=c10d"),
    ],
)
def test_nodes_that_cannot_be_lost(launches: Launches, value: dict[str, str], error: str) -> None:
    done = launches("signal", step=5, SLURM_NNODES="4", **value)
    assert done.returncode == 2
    assert f"error: {error}" in done.stderr
    assert launches.slurm.asked("srun") == []


NODES = """
printf '%s\n' "$@" >>"$0.asked"
case "$1 $2" in
    "show job") echo "   NodeList=$(cat nodes)" ;;
    "show hostnames") echo "${3//,/$'\n'}" ;;
esac
"""


def test_the_second_node_requeues_a_job_that_has_lost_the_first(launches: Launches) -> None:
    slurm = launches.slurm
    (slurm.folder / "bin/scontrol").write_text(f"#!/bin/bash\n{NODES}")
    (slurm.folder / "bin/sleep").write_text("#!/bin/bash\nmv next nodes 2>/dev/null || kill $PPID\n")

    def watch(before: str, after: str, name: str) -> str:
        (slurm.folder / "nodes").write_text(before)
        (slurm.folder / "next").write_text(after)
        subprocess.run(
            ["bash", str(LAUNCHERS / "slurm/first_node.sh"), "7", "a log", "requeue"],
            cwd=slurm.folder,
            env={**os.environ, "PATH": f"{slurm.folder}/bin:{os.environ['PATH']}", "DMJD_HEAD": "n1"}
            | {"SLURMD_NODENAME": name},
            timeout=60,
        )
        log = slurm.folder / "a log"
        return log.read_text() if log.exists() else ""

    for after, name in (("n1,n2,n3", "n2"), ("n1,n3", "n3"), ("n2,n3", "n3"), ("n10,n11", "n11")):
        assert watch("n1,n2,n3", after, name) == ""
    assert launches.requeues == 0
    line = watch("n1,n2,n3", "n2,n3", "n2")
    assert line.endswith("first node n1 is lost, with the batch script and the store of the rendezvous: requeue\n")
    assert launches.requeues == 1


def test_the_exit_record_of_a_launch_that_never_became_a_run(launches: Launches) -> None:
    assert launches(word="crashed: rank 1 on n2: RuntimeError: no CUDA").returncode == 0
    done = launches(word="error: data.root=/nowhere: is not a folder")
    assert done.returncode == 1
    assert "data.root=/nowhere: is not a folder" in done.stdout
    assert launches.requeues == 1


def test_the_word_of_an_earlier_launch_says_nothing_of_this_one(launches: Launches) -> None:
    launches("finished", step=5)
    assert "stopped at step 5 (began at 5): killed" in launches().stdout


def test_a_job_that_waited_for_the_folder_does_not_take_the_word_of_the_job_before(launches: Launches) -> None:
    """The second job's script starts, and its run holds the folder, before the first one's script has looked."""
    launchers = shlex.quote(str(LAUNCHERS))
    run = 'echo {} >run/STOP_REASON; echo "{}: so it is" >"$DMJD_EXIT_RECORD"\n'
    second = "rm -f run/STOP_REASON; " + run.format("second", "signal")
    script = (
        f"SLURM_JOB_ID=8 FAKE_SRUN={shlex.quote(second)} bash {launchers}/slurm/pretrain.sbatch run=run epochs=2 || :"
    )
    done = launches("finished", step=5, more=f"echo first >run/STOP_REASON\n{script}")
    first, said = (
        [line for line in done.stdout.splitlines() if "stopped at" in line][number] for number in (1, 0)
    )  # the second one's lines come first: it ran within the first
    assert "finished, why it finished" in first
    assert "signal, so it is" in said
    assert done.returncode == 0
    asked = launches.slurm.asked("scontrol")
    assert [asked[number + 1] for number, word in enumerate(asked) if word == "requeue"] == ["8"]


def test_a_job_removes_words_of_its_own_alone(launches: Launches) -> None:
    launches("signal", step=5)
    launches("signal", step=10, SLURM_JOB_ID="70")
    launches("signal", step=15)
    words = sorted(path.name for path in (launches.run / "slurm").glob("last_word*"))
    assert words == ["last_word-7-2", "last_word-70-1"]


def test_the_run_is_where_submit_says_and_not_where_its_words_seem_to_say(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path)
    srun = 'echo "finished: all" >"$DMJD_LAST_WORD"'  # the former name, which an older dmjd in a container knows
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    for words in (["experiment=demo"], ["run='runs/lr=1-%a'"], ["run=runs/lr=${seed}-2"]):
        done = slurm.submit("pretrain.sbatch", *words, FAKE_SRUN=srun, DMJD_RUN="runs/lr=1-%a", **task)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "finished, all" in done.stdout
    assert "requeue" not in slurm.asked("scontrol")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["lr=1-2"]


@pytest.mark.parametrize("words", [["experiment=demo"], ["run='a b'"], ["run=runs/${seed}"]])
def test_by_hand_the_run_has_to_be_named_plainly(tmp_path: Path, words: list[str]) -> None:
    slurm = FakeSlurm(tmp_path)
    done = slurm.submit("pretrain.sbatch", *words)
    assert done.returncode == 2
    assert "must contain run=FOLDER, without quotes" in done.stderr
    assert slurm.asked("srun") == []


@pytest.mark.parametrize("name", ["step-00000009_2", "step-00000009-v2", "step-00000009.tmp", "step-9"])
def test_copies_beside_the_checkpoints_are_not_counted(launches: Launches, name: str) -> None:
    copy = launches.run / "checkpoints" / name
    copy.mkdir(parents=True)
    (copy / "manifest.json").touch()
    done = launches("signal", step=5)
    assert "stopped at step 5 (began at 0): signal" in done.stdout + done.stderr
    assert launches.requeues == 1


def test_a_launch_is_one_line_of_json_whatever_its_log_is_called(launches: Launches) -> None:
    log = '/runs/lr=1 C:\\a "b" wd=0/7.out'
    assert launches("finished", step=5, FAKE_LOG=log).returncode == 0
    assert json.loads((launches.run / "slurm/launches.jsonl").read_text())["log"] == log


@pytest.mark.parametrize("name", ["lr=1", "-x", "-n", "a 'b'", "*", "x/lr=1e-3", "75%a"])
def test_launches_are_counted_whatever_the_folder_is_called(tmp_path: Path, name: str) -> None:
    """awk took the list in lr=1/slurm for an assignment, counted nothing, and a broken job came back for ever."""
    slurm = FakeSlurm(tmp_path)
    for restart in range(3):
        task = {"DMJD_RUN": name} if "'" in name else {}
        done = slurm.submit(
            "pretrain.sbatch", f"run={name}", SLURM_RESTART_COUNT=str(restart), FAKE_SRUN="exit 1", **task
        )
    assert done.returncode == 1
    assert "not requeued: 3 launches in a row ended at step 0" in done.stdout
    assert slurm.asked("scontrol").count("requeue") == 2
    assert len((tmp_path / name / "slurm/launches.jsonl").read_text().splitlines()) == 3
    assert slurm.asked("srun")[-1] == f"run={name}"


def test_a_cancelled_job_does_not_come_back(launches: Launches) -> None:
    done = launches("signal", step=5, more="kill -TERM $PPID")
    assert done.returncode == 143
    assert launches.requeues == 0


def test_a_launch_that_slurm_has_given_up_leaves_the_next_one_alone(launches: Launches) -> None:
    done = launches("lost", step=5, FAKE_RESTARTS="1")
    assert done.returncode == 1
    assert "Slurm has restarted this job on other nodes" in done.stdout
    assert launches.requeues == 0


def test_a_controller_that_is_busy_is_asked_again(launches: Launches) -> None:
    assert launches("signal", step=5, FAKE_FAILURES="2").returncode == 0
    assert launches.requeues == 3
    done = launches("signal", step=10, FAKE_FAILURES="99")
    assert done.returncode == 2
    assert "submit it again" in done.stderr


def test_a_site_that_does_not_requeue(launches: Launches) -> None:
    done = launches("signal", step=5, DMJD_REQUEUE="false")
    assert done.returncode == 1
    assert "submit it again" in done.stdout
    assert launches.requeues == 0


def test_a_chain_ends_for_all_its_jobs(launches: Launches) -> None:
    def job(number: int, reason: str, step: int = 0) -> subprocess.CompletedProcess[str]:
        return launches(reason, step=step, DMJD_CHAIN="chain-1", SLURM_JOB_ID=str(number))

    assert "the next job of the chain" in job(7, "signal", step=5).stdout
    assert job(8, "crashed").returncode == 0
    assert job(9, "crashed").returncode == 1, "counted over jobs"
    done = job(10, "finished", step=9)
    assert done.returncode == 0
    assert "nothing to do: gave up: 2 launches in a row ended at step 5" in done.stdout
    assert launches.requeues == 0


START_NODE = 'while [[ $1 == --* ]]; do shift; done; SLURM_NNODES=1 SLURM_GPUS_ON_NODE=1 DMJD_RENDEZVOUS=c10d exec "$@"'
"""For FAKE_SRUN: what srun runs on a node."""


def interpreter(folder: Path, kind: str) -> str:
    """DMJD_PYTHON of a site that has something wrong."""
    path = folder / "python"
    if kind == "folder":
        path.mkdir()
    elif kind == "not executable":
        path.write_text("")
    elif kind == "module":
        path.write_text("#!/bin/bash\nset -e\nmodule load python\nexec python3\n")
        path.chmod(0o755)
    elif kind == "environment":
        venv.create(folder / "venv", symlinks=True)
        return f"{folder}/venv/bin/python"
    return str(path)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "No such file or directory"),
        ("folder", "Is a directory"),
        ("not executable", "Permission denied"),
        ("module", "module: command not found"),
        ("environment", "No module named 'torch'"),
    ],
)
def test_a_site_whose_interpreter_is_missing_is_not_requeued(launches: Launches, kind: str, says: str) -> None:
    launches(step=5)  # launches before have made progress
    python = interpreter(launches.slurm.folder, kind)
    done = launches(more=START_NODE, DMJD_PYTHON=python, PYTHONPATH="")
    assert (done.returncode, launches.requeues) == (1, 1), done.stdout + done.stderr
    found = "\n".join(finding.what for finding in examine(launches.run))
    assert f"run ended before its first step (error): DMJD_PYTHON={python}" in found
    assert says in found


@pytest.mark.parametrize("kind", ["no image", "a folder of images", "no apptainer", "no image for pyxis", "registry"])
def test_a_site_whose_container_is_missing_is_not_requeued(launches: Launches, kind: str) -> None:
    folder = launches.slurm.folder
    images = {
        "no image": folder / "none.sif",
        "a folder of images": folder / "images/dmjd.sqsh",
        "no apptainer": folder / "dmjd.sif",
        "no image for pyxis": folder / "none.sqsh",
        "registry": "registry#none:1",
    }
    (folder / "dmjd.sif").touch()
    if kind != "no apptainer":
        (folder / "bin/apptainer").symlink_to("/bin/true")
    done = launches(more="exit 1", DMJD_CONTAINER=str(images[kind]))
    assert (done.returncode, launches.requeues) == (1, 0), done.stdout + done.stderr
    assert f"before its first step (error): DMJD_CONTAINER={images[kind]} " in examine(launches.run)[0].what


@pytest.mark.parametrize("end", ["rm -r run", "rm -r run; touch run", "rm -r run; mkdir run"])
def test_a_job_whose_run_folder_is_gone_is_not_requeued(launches: Launches, end: str) -> None:
    done = launches(step=5, more=f"{end}; exit 1")
    assert (done.returncode, launches.requeues) == (1, 0)
    assert "not requeued: run=run was removed" in done.stdout


@pytest.mark.parametrize(("count", "chain"), [(1, ""), (0, "chain-1")], ids=["requeued", "chain"])
def test_a_later_launch_does_not_make_a_run_folder_anew(launches: Launches, count: int, chain: str) -> None:
    launches.count = count
    done = launches(DMJD_RUN="run", DMJD_CHAIN=chain)
    assert done.returncode == 2
    assert "run=run existed when this job was submitted and was removed" in done.stderr
    assert not launches.run.exists()
