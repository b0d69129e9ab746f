"""What a run says when a step does not fit the GPU."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.cli import main
from dmjd.compose import compose
from dmjd.errors import OutOfMemory
from dmjd.parallel.single import SingleEngine
from dmjd.parallel.world import alone
from dmjd.runs import checkpoint
from dmjd.train.out_of_memory import explain_out_of_memory

Words = Callable[..., list[str]]


def said(*words: str) -> str:
    config = compose("pretrain", words)
    with (
        pytest.raises(OutOfMemory) as caught,
        explain_out_of_memory(config, Path("unused"), alone(torch.device("cpu"))),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return str(caught.value)


def test_the_next_smaller_micro_batch_and_the_next_mode_are_what_to_try() -> None:
    sentence = said("batch_size=96", "engine.grad_accum_steps=4", "engine.activation_checkpointing=selective")
    assert "engine.grad_accum_steps=6 (micro-batches of 16 images)" in sentence
    assert "engine.activation_checkpointing=mlp" in sentence
    assert "dmjd plan" in sentence


def test_where_one_image_is_too_much_more_gpus_are_the_advice() -> None:
    sentence = said("batch_size=2", "engine.grad_accum_steps=2", "engine.activation_checkpointing=full")
    assert "use more GPUs, or a sharded engine" in sentence


def test_other_errors_pass() -> None:
    config = compose("pretrain", [])
    with (
        pytest.raises(RuntimeError, match="something else"),
        explain_out_of_memory(config, Path(), alone(torch.device("cpu"))),
    ):
        raise RuntimeError("something else")


def test_a_run_ends_with_one_sentence_and_an_intact_checkpoint(
    tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(100))
    step = SingleEngine.step

    def fail_late(self: SingleEngine, *args: Any) -> Any:
        if next(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, *args)

    monkeypatch.setattr(SingleEngine, "step", fail_late)
    run = tmp_path / "run"
    assert main(["pretrain", *tiny(run, "checkpoint_every=4")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: rank 0 ran out of the memory in a step; try engine.grad_accum_steps=")
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000004"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("history", [False, True])
def test_a_snapshot_of_the_memory_is_kept(tmp_path: Path, history: bool) -> None:
    config = compose("pretrain", [f"memory_history={str(history).lower()}"])
    kept = []
    with (
        pytest.raises(OutOfMemory, match=r"GiB of .* in a step; .*; memory snapshot: .*rank-00000\.pickle$"),
        explain_out_of_memory(config, tmp_path, alone(torch.device("cuda", 0))),
    ):
        kept += [torch.zeros(12345678, device="cuda"), torch.empty(2**43, dtype=torch.uint8, device="cuda")]
    snapshot = pickle.loads((tmp_path / "out_of_memory" / "rank-00000.pickle").read_bytes())
    assert snapshot["segments"] or snapshot["device_traces"]
    assert any(snapshot["device_traces"]) == history
