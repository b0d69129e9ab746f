"""One file with everything in it: whole, part of its checkpoint, and enough to go on from or to begin from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dmjd.compose import compose
from dmjd.errors import CheckpointError
from dmjd.evaluate.encoder import load_encoder
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


@pytest.mark.parametrize("word", ["output=weights.pt", "output=nowhere/weights.safetensors"])
def test_a_place_that_cannot_be_written_is_refused(run: Path, dmjd: Command, word: str) -> None:
    before = sorted(run.rglob("*"))
    code, _, errors = dmjd("consolidate", str(run), word)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert sorted(run.rglob("*")) == before
