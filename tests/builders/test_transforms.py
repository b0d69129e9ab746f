"""Recomputation and compilation change no loss and no gradient: of windows, biases of attention, frozen teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.builders.step import Step, build_step
from dmjd.parallel.apply import blocks
from tests.train.shrunken import configure, gradient, shrink, smooth_batch, write_clip, write_dvae

WINDOWS, BIAS, CODES, CLIP = "simmim_swin_base", "simmim_dm_vit_base", "beit_dm_vit_base", "mvp_vit_base"
TEACHER, TEACHER_AND_DECODER = "data2vec_vit_base", "dmjd_vit_base_teacher"
STEPS, LR = 2, 1e-3


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("weights")
    return {"clip": write_clip(folder), "dvae": write_dvae(folder / "dvae.pt")}


def build(experiment: str, weights: dict[str, str], **engine: str) -> Step:
    return build_step(shrink(configure(experiment), weights, **engine))


def steps(step: Step) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient of each of a few steps; the teacher's targets of the second follow the first."""
    batch, seen = smooth_batch(step, 2), []
    for _ in range(STEPS):
        losses, _ = step.forward_backward(batch, 0)
        seen.append((losses.total, gradient(step)))
        step.update(LR)
    return seen


@pytest.mark.parametrize(
    ("experiment", "mode"),
    [
        *((experiment, mode) for experiment in (WINDOWS, BIAS, TEACHER) for mode in ("mlp", "selective", "full")),
        (CODES, "selective"),
        (CLIP, "full"),
        (TEACHER_AND_DECODER, "mlp"),
        (TEACHER_AND_DECODER, "full"),
    ],
)
def test_recomputation_changes_no_bit(experiment: str, mode: str, weights: dict[str, str]) -> None:
    plain, recomputed = build(experiment, weights), build(experiment, weights, activation_checkpointing=mode)
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    first = next(blocks(recomputed.engine.objective.model))
    first.norm1.register_forward_pre_hook(count)  # type: ignore[union-attr]
    for (loss, expected), (found, found_gradient) in zip(steps(plain), steps(recomputed), strict=True):
        assert torch.equal(found, loss)
        assert torch.equal(found_gradient, expected)
    assert runs == STEPS * (1 if mode == "mlp" else 2), "a block runs again in the backward pass"


BOTH = ("block", "model")
QUICK = [(TEACHER, "block", "none")]
THOROUGH = [
    *((experiment, unit, "none") for experiment in (WINDOWS, BIAS, CODES, CLIP) for unit in BOTH),
    *((experiment, "model", "none") for experiment in (TEACHER, TEACHER_AND_DECODER)),
    (WINDOWS, "block", "mlp"),  # under "full" torch's reasoning about the shapes of four stages takes minutes
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks there itself
@pytest.mark.parametrize(
    ("experiment", "unit", "mode"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in THOROUGH)]
)
def test_compilation_changes_no_gradient(
    experiment: str, unit: str, mode: str, weights: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, differentiated and recomputed as for CUDA, but run by PyTorch's own kernels: generated ones are tried on
    a GPU (test_methods_on_gpu.py)."""
    compile_module = torch.nn.Module.compile

    def compile_quickly(module: torch.nn.Module, **options: Any) -> None:
        compile_module(module, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_quickly)
    torch._dynamo.reset()
    plain = build(experiment, weights)
    compiled = build(experiment, weights, compile=unit, activation_checkpointing=mode)
    for (loss, expected), (found, found_gradient) in zip(steps(plain), steps(compiled), strict=True):
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(found_gradient, expected, rtol=1e-4, atol=1e-6)
