"""Somebody else's files: a pickle that leaves a mark in every file of every artefact, and every command on them.

Digests agree with what is planted, as whoever plants it sees to that. A command may reject the file in one line, or end
well without reading it; no mark may be left, and no trace printed.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing.process
import os
import pickle
import shutil
import signal
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmjd.runs.checkpoint import MANIFEST
from tests.conftest import TINY

Command = Callable[..., tuple[int, str, str]]
Launch = Callable[..., multiprocessing.process.BaseProcess]

SMALL = ("device=cpu", "workers=0", "train_images=100", "untrained=false")
COLOUR = ("data.channels=3", "data.mean=[.5,.5,.5]", "data.std=[.2,.2,.2]")
CODES = ("method.mim_loss=cross_entropy", "method.visible_branch.enabled=false")
QUICK_PROBE = ("epochs=1", "warmup_epochs=0", "batch_size=50")


class Trap:
    """Makes the file ``mark`` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_bytes, (self.mark, b"")


def _pickled(mark: Path, before: bytes) -> bytes:
    return pickle.dumps({"model": Trap(mark)})


def _zipped(mark: Path, before: bytes) -> bytes:
    return _saved(Trap(mark), before, zipped=True)


def _legacy(mark: Path, before: bytes) -> bytes:
    return _saved(Trap(mark), before, zipped=False)


def _saved(trap: Trap, before: bytes, zipped: bool) -> bytes:
    """What was there, if torch has written it, and a trap beside it."""
    content: Any = {"model": torch.ones(2, 2)}
    if before[:2] == b"PK" and before.count(b"/data.pkl") == 2:  # in one archive, of which shards hold many
        content = torch.load(io.BytesIO(before), weights_only=False)
    content = {**content, "trap": trap} if isinstance(content, dict) else [content, trap]
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _array(mark: Path, before: bytes) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Trap(mark)], dtype=object), allow_pickle=True)
    return file.getvalue()


PLANTS: dict[str, Callable[[Path, bytes], bytes]] = {
    "pickle": _pickled,
    "zip": _zipped,
    "legacy": _legacy,
    "array": _array,
}


def seal(folder: Path) -> None:
    """Give the checkpoint or the shards in ``folder`` a manifest that agrees with its files."""

    def facts(name: str) -> dict[str, Any]:
        content = (folder / name).read_bytes()
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except ValueError:  # it is the manifest that was planted
        return
    for name in manifest.get("files", ()):
        manifest["files"][name] = facts(name)
    for shard in manifest.get("shards", ()):
        shard.update(facts(shard["url"]))
    if "index_sha256" in manifest:
        manifest["index_sha256"] = facts("index.npy")["sha256"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def plant(file: Path, kind: str, mark: Path) -> None:
    """Put a trap in the place of ``file``."""
    content = PLANTS[kind](mark, file.read_bytes() if file.is_file() else b"")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    for folder in file.parents:
        if (folder / MANIFEST).is_file():
            seal(folder)


class Trials:
    """Commands on planted files, and how they ended."""

    def __init__(self, dmjd: Command, mark: Path) -> None:
        self._dmjd, self.mark = dmjd, mark
        self.lost: list[str] = []
        self.ends: Counter[str] = Counter()

    def tried(self, what: str, *words: str) -> None:
        try:
            code, _, err = self._dmjd(*words)
        except Exception as error:
            fault = f"a trace of {type(error).__name__}: {error}"
            self.ends["traces"] += 1
        else:
            said = [line for line in err.splitlines() if line.startswith("error: ")]
            advice = "weights_only" in err or "Traceback" in err
            fault = "" if len(said) == (code != 0) and not advice else f"exit code {code} and {err!r}"
            self.ends["rejected" if code else "ended well"] += 1
        if self.mark.exists():
            self.mark.unlink()
            fault = "the trap was sprung"
        if fault:
            self.ends["lost"] += 1
            self.lost.append(f"dmjd {words[0]}, {what}: {fault}")


@pytest.fixture(scope="module")
def ends(pytestconfig: pytest.Config) -> Iterator[Counter[str]]:
    """How all commands of this module ended; printed behind its last test."""
    counts = Counter[str]()
    yield counts
    capture = pytestconfig.pluginmanager.get_plugin("capturemanager")
    assert capture is not None
    lost = counts["lost"]
    tried = counts["rejected"] + counts["ended well"] + counts["traces"]
    with capture.global_and_fixture_disabled():
        print(f"\nplanted: {tried} tried / {tried - lost} survived / {lost} lost ({dict(counts)})")


@pytest.fixture
def trials(dmjd: Command, tmp_path: Path, ends: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: {})  # which take most of a run
    made = Trials(dmjd, tmp_path / "mark")
    yield made
    ends.update(made.ends)
    assert made.lost == []


@pytest.fixture(scope="module")
def run(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with all that commands and clusters leave in one."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(finished_run, folder)
    (folder / "flight").mkdir(exist_ok=True)
    (folder / "flight" / "rank_0").write_bytes(pickle.dumps({"entries": []}))
    (folder / "slurm").mkdir()
    launch = {"of": "7", "job": "7", "restart": 0, "step": 0, "nodes": "a", "when": "2026-01-01T00:00:00Z", "log": ""}
    (folder / "slurm" / "launches.jsonl").write_text(json.dumps(launch) + "\n")
    (folder / "slurm" / "last_word-7-0").write_text("finished: all steps are done\n")
    (folder / "slurm" / "job-7.out").write_text("step 11/11\n")
    score = {"verb": "knn", "weights": "trained", "step": 11, "top1": 50.0, "settings": {}}
    (folder / "evaluations" / "knn.json").write_text(json.dumps(score))
    return folder


def copy(run: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "planted"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    return folder


def on_weights(trials: Trials, what: str, folder: Path, at: Path) -> None:
    """Every command that reads weights, of the run in ``folder`` or one of its checkpoints ``at``."""
    out = folder.parent
    trials.tried(what, "knn", str(at), *SMALL)
    trials.tried(what, "linprobe", str(at), *SMALL, *QUICK_PROBE)
    trials.tried(what, "export", str(at), f"output={out}/export.safetensors")
    trials.tried(what, "consolidate", str(at), f"output={out}/whole.safetensors")
    trials.tried(what, "convert", f"input={at}", f"output={out}/timm.pth", "to=timm")
    shutil.rmtree(out / "begun", ignore_errors=True)
    trials.tried(what, "pretrain", *TINY, f"run={out}/begun", f"init={at}")


def on_run(trials: Trials, what: str, folder: Path, *words: str) -> None:
    trials.tried(what, "doctor", str(folder))
    trials.tried(what, "report", str(folder))
    trials.tried(what, "report", str(folder), str(folder), f"output={folder.parent}/comparison")
    trials.tried(what, "pretrain", *TINY, f"run={folder}", *words)


CHECKPOINT = "checkpoints/step-00000011"


@pytest.mark.parametrize("kind", PLANTS)
def test_a_trap_springs_where_it_is_loaded_as_it_should_not_be(kind: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "file"
    plant(file, kind, mark)
    if kind == "array":
        np.load(file, allow_pickle=True)
    elif kind == "pickle":
        pickle.loads(file.read_bytes())
    else:
        torch.load(file, weights_only=False)
    assert mark.exists()


def every(kinds: Iterable[str], names: Iterable[str], always: str) -> list[Any]:
    """All pairs, of which those of another kind than the first are long, but for the name ``always``."""
    first, *others = kinds
    quick = [(name, first) for name in names] + [(always, kind) for kind in others]
    rest = [pytest.param(name, kind, marks=pytest.mark.long) for name in names for kind in others if name != always]
    return quick + rest


@pytest.mark.parametrize(
    ("name", "kind"),
    every(("zip", "pickle", "legacy"), (".metadata", "__0_0.distcp", "loop.pt", "config.yaml", MANIFEST), "loop.pt"),
)
def test_in_a_checkpoint(name: str, kind: str, run: Path, tmp_path: Path, trials: Trials) -> None:
    folder = copy(run, tmp_path)
    plant(folder / CHECKPOINT / name, kind, trials.mark)
    on_weights(trials, f"{name} as {kind}", folder, folder)
    on_run(trials, f"{name} as {kind}", folder)


def test_beside_the_files_of_a_checkpoint(run: Path, tmp_path: Path, trials: Trials) -> None:
    """Files that a manifest does not list, or lists though no engine writes them."""
    for name in ("__0_1.distcp", "extra.pt", "consolidated.safetensors", "zero.json", "averages/.metadata"):
        for listed in (False, True):
            folder = copy(run, tmp_path)
            if listed:
                (folder / CHECKPOINT / name).parent.mkdir(exist_ok=True)
                manifest = json.loads((folder / CHECKPOINT / MANIFEST).read_bytes())
                manifest["files"][name] = {}
                (folder / CHECKPOINT / MANIFEST).write_text(json.dumps(manifest))
            plant(folder / CHECKPOINT / name, "pickle", trials.mark)
            trials.tried(name, "knn", str(folder), *SMALL)
            trials.tried(name, "pretrain", *TINY, f"run={folder}")


@pytest.mark.parametrize("kind", ["pickle", pytest.param("zip", marks=pytest.mark.long)])
def test_in_a_run_folder(kind: str, run: Path, tmp_path: Path, trials: Trials) -> None:
    names = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    names = [name for name in names if not name.is_relative_to("checkpoints")]
    assert {"config.yaml", "provenance.json", "log.jsonl", "STOP_REASON"} <= set(map(str, names))
    for name in names:
        folder = copy(run, tmp_path)
        plant(folder / name, kind, trials.mark)
        on_run(trials, str(name), folder)


class Waits(BaseException):
    """A command waits; no handler of the command catches it."""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise Waits

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pipe(file: Path) -> None:
    """Put a named pipe without a writer in the place of ``file``."""
    file.unlink(missing_ok=True)
    os.mkfifo(file)


@pytest.mark.parametrize("name", [MANIFEST, "config.yaml"])
def test_named_pipes_in_a_checkpoint_are_not_waited_for(name: str, run: Path, tmp_path: Path, trials: Trials) -> None:
    folder = copy(run, tmp_path)
    pipe(folder / CHECKPOINT / name)
    manifest = json.loads((run / CHECKPOINT / MANIFEST).read_bytes())
    if manifest["files"].pop(name, None):  # the manifest agrees, as whoever plants it sees to that
        (folder / CHECKPOINT / MANIFEST).write_text(json.dumps(manifest))
    with limit(60):
        on_weights(trials, f"{name} as a pipe", folder, folder)
        on_run(trials, f"{name} as a pipe", folder)


@pytest.mark.parametrize("words", [["convert", "output=timm.pth", "to=timm", "input="], ["pretrain", *TINY, "init="]])
def test_a_named_pipe_called_safetensors_is_not_waited_for(
    words: list[str], tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: no signal wakes the reader of safetensors."""
    pipe(tmp_path / "weights.safetensors")
    monkeypatch.chdir(tmp_path)
    process = launch([*words[:-1], f"{words[-1]}{tmp_path}/weights.safetensors"])
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 2


def test_named_pipes_in_a_run_folder_are_not_waited_for(run: Path, tmp_path: Path, trials: Trials) -> None:
    folder = copy(run, tmp_path)
    names = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    for name in names:
        if not name.is_relative_to("checkpoints"):
            pipe(folder / name)
    with limit(60):
        on_run(trials, "pipes", folder)


@pytest.mark.parametrize(
    ("suffix", "kind"), every(PLANTS, (".pth", ".pt", ".bin", ".safetensors", ".pkl", ".tar", ".npz"), ".pth")
)
def test_in_a_file_of_weights(suffix: str, kind: str, tmp_path: Path, trials: Trials) -> None:
    file = tmp_path / f"weights{suffix}"
    plant(file, kind, trials.mark)
    trials.tried("weights", "knn", str(file), "experiment=demo", *SMALL)
    trials.tried("weights", "convert", f"input={file}", f"output={tmp_path}/timm.pth", "to=timm")
    for words in (
        [f"init={file}"],
        [*COLOUR, "target=clip", "target.model=ViT-B-16-quickgelu", f"target.weights={file}", "target.dim=512"],
        [*COLOUR, *CODES, "target=dvae", f"target.weights={file}", "data.second_size=[64,64]"],
        [*COLOUR, *CODES, "target=vqkd", f"target.weights={file}"],
    ):
        trials.tried("weights", "pretrain", *TINY, f"run={tmp_path}/run", *words)


def test_in_an_archive_of_torchscript(tmp_path: Path, trials: Trials) -> None:
    file = tmp_path / "script.pt"
    with zipfile.ZipFile(file, "w") as archive:
        for part in ("data.pkl", "constants.pkl"):
            archive.writestr(f"script/{part}", pickle.dumps(Trap(trials.mark), protocol=2))
    trials.tried("script", "convert", f"input={file}", f"output={tmp_path}/timm.pth", "to=timm")
    trials.tried("script", "pretrain", *TINY, f"run={tmp_path}/run", f"init={file}")


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("index", [False, True])
def test_in_a_shard_set(
    index: bool, kind: str, image_folder: Path, tmp_path: Path, trials: Trials, dmjd: Command
) -> None:
    built = tmp_path / "shards"
    code, _, err = dmjd("shards", "build", str(image_folder), str(built), "workers=1", "channels=1")
    assert code == 0, err
    names = [path.relative_to(built) for path in built.rglob("*") if path.is_file()]
    for name in (name for name in names if (name.suffix == ".npy") == index):
        folder = copy(built, tmp_path)
        plant(folder / name, kind, trials.mark)
        trials.tried(str(name), "shards", "verify", str(folder), "workers=1")
        trials.tried(str(name), "shards", "stat", str(folder))
        trials.tried(str(name), "shards", "show", str(folder), "2", f"output={tmp_path}/sheet.png")
        trials.tried(str(name), "shards", "build", str(image_folder), str(folder), "workers=1", "channels=1")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")  # DeepSpeed's calls, as in zero_files.py
@pytest.mark.parametrize(
    ("engine", "kinds"),
    [
        ("zero3", ("zip",)),
        pytest.param("zero3", ("pickle", "zip"), marks=pytest.mark.long),
        pytest.param("zero2", ("pickle", "zip"), marks=pytest.mark.long),
    ],
)
def test_in_a_run_of_deepspeed(
    engine: str, kinds: tuple[str, ...], tmp_path: Path, trials: Trials, dmjd: Command
) -> None:
    words = (f"engine={engine}", "epochs=1", "ema_decay=0.9")
    made = tmp_path / "run"
    code, _, err = dmjd("pretrain", *TINY, f"run={made}", *words)
    assert code == 0, err
    names = [path.relative_to(made / CHECKPOINT) for path in (made / CHECKPOINT).rglob("*") if path.is_file()]
    assert sum(name.suffix == ".pt" for name in names) == 3
    for name in names:
        for kind in kinds if name.suffix == ".pt" else ("pickle",):
            folder = copy(made, tmp_path)
            plant(folder / CHECKPOINT / name, kind, trials.mark)
            trials.tried(f"{name} as {kind}", "knn", str(folder), *SMALL)
            trials.tried(f"{name} as {kind}", "consolidate", str(folder), f"output={tmp_path}/whole.safetensors")
            trials.tried(f"{name} as {kind}", "export", str(folder), f"output={tmp_path}/export.safetensors")
            trials.tried(f"{name} as {kind}", "pretrain", *TINY, f"run={folder}", *words)
            other = "zero3" if engine == "zero2" else "zero2"
            trials.tried(f"{name} as {kind}", "pretrain", *TINY, f"run={folder}", *words, f"engine={other}")
