"""Whole tensors in one file or several: part of their checkpoint, and enough to go on from or to begin from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dmjd.builders import build_objective, target_dim
from dmjd.builders.weights import load_weights
from dmjd.compose import compose
from dmjd.errors import CheckpointError
from dmjd.evaluate.encoder import load_encoder
from dmjd.interop.shards import write_shards
from dmjd.parallel import native_files, store
from dmjd.runs import checkpoint
from dmjd.train.loop import pretrain

Words = Callable[..., list[str]]
Command = Callable[..., tuple[int, str, str]]
WORDS = ("ema_decay=0.9", "checkpoint_every=6", "keep_checkpoints=2")


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory, tiny: Words) -> Path:
    """A finished run of eleven steps with checkpoints at 6 and 11. Only to be read."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: {})
        pretrain(compose("pretrain", tiny(folder, *WORDS)))
    return folder


@pytest.fixture
def run(averaged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(averaged, tmp_path / "run"))


def test_the_file_holds_what_the_shards_hold(run: Path, dmjd: Command) -> None:
    folder = run / "checkpoints" / "step-00000011"
    shards = store.read(folder)
    code, said, _ = dmjd("consolidate", str(run))
    file = folder / native_files.CONSOLIDATED
    assert (code, said) == (0, f"{file}\n")
    assert file.stat().st_mode == (folder / "loop.pt").stat().st_mode
    with safe_open(file, "pt") as tensors:
        assert set(tensors.keys()) == shards.keys()
        assert all(torch.equal(tensors.get_tensor(name), value) for name, value in shards.items())
    assert all(value.dtype == torch.float32 for value in shards.values())
    assert checkpoint.newest(folder.parent) == folder
    file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors is not the file that was saved"):
        checkpoint.resolve(folder)


def of_another_engine(folder: Path) -> None:
    """Leave the consolidated file alone, as beside the shards of an engine that this one cannot read."""
    for path in (folder / ".metadata", *folder.glob("*.distcp")):
        path.unlink()
    manifest = folder / checkpoint.MANIFEST
    files = [path for path in folder.iterdir() if path != manifest]
    manifest.unlink()
    draft = folder.rename(folder.with_name(f"{folder.name}.tmp"))
    checkpoint.commit(draft, lambda: [draft / path.name for path in files], keep=9)


def test_a_run_goes_on_from_it_in_the_same_bits(
    run: Path, averaged: Path, tiny: Words, dmjd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: {})
    shutil.rmtree(run / "checkpoints" / "step-00000011")
    half = run / "checkpoints" / "step-00000006"
    of_another_engine(half)
    code, _, errors = dmjd("pretrain", *tiny(run, *WORDS))
    assert code == 2
    assert f"{half} was written by another kind of engine; dmjd consolidate {half} makes" in errors
    shutil.copytree(averaged / "checkpoints" / "step-00000006", half, dirs_exist_ok=True)
    assert dmjd("consolidate", str(half))[0] == 0
    of_another_engine(half)
    assert dmjd("pretrain", *tiny(run, *WORDS))[0] == 0
    assert (run / "log.jsonl").read_bytes() == (averaged / "log.jsonl").read_bytes()
    ours, theirs = (store.read(path / "checkpoints" / "step-00000011") for path in (run, averaged))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_another_run_begins_from_it_and_evaluation_reads_it(
    run: Path, tmp_path: Path, tiny: Words, dmjd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: {})
    file = tmp_path / "weights.safetensors"
    assert dmjd("consolidate", str(run), f"output={file}")[0] == 0
    assert not (run / "checkpoints" / "step-00000011" / native_files.CONSOLIDATED).exists()
    second = tmp_path / "second"
    assert dmjd("pretrain", *tiny(second, f"init={file}", "optim.base_lr=1e-9", "optim.weight_decay=0"))[0] == 0
    began = store.read_model(run / "checkpoints" / "step-00000011")
    for name, value in store.read_model(second / "checkpoints" / "step-00000011").items():
        torch.testing.assert_close(value, began[name], atol=1e-6, rtol=0)
    encoder = compose("knn", [f"checkpoint={run}", "weights=ema", "device=cpu"])
    expected = load_encoder(encoder).encoder.state_dict()
    assert dmjd("consolidate", str(run))[0] == 0
    of_another_engine(run / "checkpoints" / "step-00000011")
    found = load_encoder(encoder).encoder.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_the_bytes_are_those_of_the_safetensors_library(run: Path, tmp_path: Path, dmjd: Command) -> None:
    file, expected = tmp_path / "weights.safetensors", tmp_path / "expected.safetensors"
    assert dmjd("consolidate", str(run), f"output={file}")[0] == 0
    save_file(store.read(run / "checkpoints" / "step-00000011"), expected)
    assert file.read_bytes() == expected.read_bytes()
    halves = {"b": torch.rand(3).half(), "a": torch.rand(2, 2).bfloat16(), "é": torch.rand(()), "c": torch.rand(0, 4)}
    assert write_shards(file, halves, halves.__getitem__, metadata={"format": "pt"}) == [file]
    save_file(halves, expected, {"format": "pt"})
    assert file.read_bytes() == expected.read_bytes()


def test_shards_are_those_of_hugging_face(run: Path, tmp_path: Path, tiny: Words, dmjd: Command) -> None:
    whole = store.read(run / "checkpoints" / "step-00000011")
    folder, limit = tmp_path / "weights", 100_000
    folder.mkdir()
    file = folder / "model.safetensors"
    code, said, _ = dmjd("consolidate", str(run), f"output={file}", "shard_size=100KB")
    index = folder / "model.safetensors.index.json"
    assert (code, said) == (0, f"{index}\n")
    content = json.loads(index.read_text())
    parts = sorted(folder.glob("*.safetensors"))
    count = len(parts)
    assert count > 2
    assert [part.name for part in parts] == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert len(list(folder.iterdir())) == count + 1, "no drafts are left"
    assert content["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert content["weight_map"].keys() == whole.keys()
    for part in parts:
        with safe_open(part, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers reads no other
            held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 -- it is no mapping
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= limit
        assert all(torch.equal(value, whole[name]) for name, value in held.items())
        assert {content["weight_map"][name] for name in held} == {part.name}
    read = store.read_model(index)
    assert read.keys() == {name.removeprefix("parameter/") for name in whole if name.startswith("parameter/")}
    config = compose("pretrain", tiny(tmp_path / "new", f"init={index}"))
    objective = build_objective(config, target_dim(config))
    load_weights(objective, index)
    assert all(torch.equal(value, read[name]) for name, value in objective.named_parameters())
    code, _, errors = dmjd("pretrain", *tiny(tmp_path / "new", f"init={folder}"))
    assert code == 2
    assert f"name the file of weights in it, as init={index}" in errors


def test_a_run_goes_on_from_shards(run: Path, dmjd: Command) -> None:
    folder = run / "checkpoints" / "step-00000011"
    whole = store.read(folder)
    assert dmjd("consolidate", str(run), "shard_size=100KB")[0] == 0
    assert checkpoint.newest(folder.parent) == folder, "its manifest lists the files"
    of_another_engine(folder)
    own = {name: torch.full_like(value, -1) for name, value in whole.items()}
    native_files.read_into(folder, own)
    assert all(torch.equal(value, own[name]) for name, value in whole.items())


def test_other_weights_in_the_same_shards_have_another_fingerprint(tmp_path: Path) -> None:
    """A run that was killed before its first checkpoint begins again from the same weights, or not at all."""
    first, second = ({f"parameter/{name}": torch.full((10,), value) for name in "abc"} for value in (1.0, 2.0))
    index = write_shards(tmp_path / "w.safetensors", first, first.__getitem__, 100)[-1]
    before = index.read_bytes(), checkpoint.fingerprint(index)
    assert checkpoint.fingerprint(index) == before[1]
    write_shards(tmp_path / "w.safetensors", second, second.__getitem__, 100)
    assert index.read_bytes() == before[0]
    assert checkpoint.fingerprint(index) != before[1]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda listed: {name: f"../{file}" for name, file in listed.items()}, "is not a file beside it"),
        (lambda listed: {**listed, "parameter/more": min(listed.values())}, "lack tensors that it lists"),
        (lambda listed: dict(list(listed.items())[1:]), "holds other tensors than it lists"),
        (lambda listed: dict.fromkeys(listed, 3), "is not a file beside it"),
        (lambda listed: dict.fromkeys(listed, ".."), "'..' is not a file beside it"),
        (lambda listed: dict.fromkeys(listed, "pipe"), "'pipe' is not a file beside it"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_an_error(
    edit: Callable[[dict[str, str]], Any], message: str, tmp_path: Path
) -> None:
    tensors = {f"parameter/{name}": torch.rand(10) for name in "abc"}
    index = write_shards(tmp_path / "w.safetensors", tensors, tensors.__getitem__, 100)[-1]
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": edit(content["weight_map"])}))
    os.mkfifo(tmp_path / "pipe")  # safetensors would wait for a writer
    with pytest.raises(CheckpointError, match=message):
        store.read_model(index)


def test_headers_are_read_once_however_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"parameter/{number}": torch.full((10,), float(number)) for number in range(20)}
    index = write_shards(tmp_path / "w.safetensors", tensors, tensors.__getitem__, 100)[-1]
    opened = list[Any]()

    def opening(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return safe_open(*arguments, **options)

    monkeypatch.setattr("safetensors.safe_open", opening)  # torch imports it for each call
    like, read = native_files.open_tensors(index)
    assert all(torch.equal(read(name), tensors[name]) for name in like)
    assert len(opened) <= 2 * len(tensors), "ten files, and the file of each tensor"


def test_a_tensor_of_another_type_is_an_error(tmp_path: Path, dmjd: Command) -> None:
    draft = checkpoint.begin(tmp_path, 1)
    state = {"parameter/a": torch.ones(3), "parameter/b": torch.arange(3)}
    folder = checkpoint.commit(draft, partial(native_files.write, draft, state, None), keep=1)
    code, _, errors = dmjd("consolidate", str(folder))
    assert code == 2
    assert "has parameter/b in torch.int64, and dmjd saves float32" in errors


MEASURE = """
import json, sys
from pathlib import Path
import dmjd.parallel.deepspeed.files
from dmjd.config import ConsolidateConfig
from dmjd.runs.consolidate import consolidate

def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10

consolidate(ConsolidateConfig(sys.argv[1], sys.argv[1] + "/../small.safetensors"))
before = most()
consolidate(ConsolidateConfig(sys.argv[2], sys.argv[2] + "/../large.safetensors", sys.argv[3]))
print(json.dumps(most() - before))
"""


def test_memory_is_that_of_a_tensor(tmp_path: Path) -> None:
    """Of 128 MiB in tensors of 4 MiB, beside a small checkpoint that was read before."""
    folders = []
    for count in (1, 32):
        draft = checkpoint.begin(tmp_path / str(count), 1)
        tensors = {f"parameter/{number}": torch.full((1 << 20,), float(number)) for number in range(count)}
        write = partial(native_files.write, draft, tensors, None)
        folders.append(str(checkpoint.commit(draft, write, keep=1)))
    run = [sys.executable, "-c", MEASURE, *folders, "50MB"]
    grown = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert grown < 40 << 20
    assert sum(path.stat().st_size for path in tmp_path.rglob("large*")) > 128 << 20


@pytest.mark.parametrize(
    "word", ["output=weights.pt", "output=nowhere/weights.safetensors", "shard_size=0GB", "shard_size=GB"]
)
def test_a_place_that_cannot_be_written_is_refused(run: Path, dmjd: Command, word: str) -> None:
    before = sorted(run.rglob("*"))
    code, _, errors = dmjd("consolidate", str(run), word)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert sorted(run.rglob("*")) == before
