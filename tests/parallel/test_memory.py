"""Bytes counted on tensors without bytes are the bytes of a real run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dmjd.builders.step import objective_and_inputs
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.models.objective import Losses
from dmjd.parallel.apply import apply
from dmjd.parallel.memory import LiveBytes, trace_step

SMALL = ("data.image_size=[64,64]", "backbone.embed_dim=64", "backbone.depth=2", "backbone.num_heads=4")
VIT = ("backbone=vit_tiny", *SMALL)
CONVVIT = ("backbone=convvit_base", *SMALL, "backbone.conv_stages.embed_dims=[8,16]")
MODELS = {
    "mae": ("method=mae", "target=pixels", "target.norm=patch", *VIT),
    "dmjd": VIT,
    "convvit": CONVVIT,
    "linear": ("method.decoder.name=linear", "backbone.masked_tokens=mask_token", "backbone.drop_path=0.1", *VIT),
}


def config(model: str, mode: str) -> PretrainConfig:
    small = ("method.decoder.dim=64", "method.decoder.depth=2", "method.decoder.num_heads=4")
    made: PretrainConfig = compose("pretrain", [*MODELS[model], *small, f"engine.activation_checkpointing={mode}"])
    return made


def planned(made: PretrainConfig, images: int, **options: Any) -> Any:
    with FakeTensorMode():
        objective, prepared = objective_and_inputs(made, images)
        apply(objective.model, made.engine)
        return trace_step(objective, prepared.inputs, **options)


def bytes_seen_by_hooks(objective: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Bytes of the storages that autograd saves, each once, without parameters, buffers and inputs."""
    held = [*objective.parameters(), *objective.buffers(), *(x for x in tree_leaves(inputs) if isinstance(x, Tensor))]
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # a storage that died could lend its address to another

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        objective(*inputs)
    return sum(saved.values())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", ["none", "mlp", "full"])
def test_planned_activations_are_those_that_autograd_saves(model: str, mode: str) -> None:
    made = config(model, mode)
    objective, prepared = objective_and_inputs(made, 3)
    apply(objective.model, made.engine)
    assert planned(made, 3).saved == bytes_seen_by_hooks(objective, prepared.inputs)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("selective", {}),  # whose activations are kept where no hook sees them
        ("none", {"precision": torch.bfloat16, "as_on_cuda": True}),
        ("selective", {"precision": torch.bfloat16, "as_on_cuda": True}),
    ],
)
def test_a_real_step_holds_what_a_fake_one_does(model: str, mode: str, options: dict[str, Any]) -> None:
    made = config(model, mode)
    objective, prepared = objective_and_inputs(made, 2)
    apply(objective.model, made.engine)
    real, fake = trace_step(objective, prepared.inputs, **options), planned(made, 2, **options)
    assert fake.saved == real.saved
    # Kernels that are Python (the ops' references) hold more for a moment; the fake ones do not run.
    assert fake.transient <= real.transient


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_are_affine_in_the_batch(mode: str) -> None:
    sizes = [planned(config("dmjd", mode), images).saved for images in (2, 3, 5)]
    assert (sizes[2] - sizes[1]) == 2 * (sizes[1] - sizes[0])


def test_less_is_kept_the_more_is_recomputed() -> None:
    none, mlp, selective, full = (planned(config("mae", mode), 4) for mode in ("none", "mlp", "selective", "full"))
    assert full.saved < min(mlp.saved, selective.saved) < max(mlp.saved, selective.saved) < 0.75 * none.saved
    assert full.transient < min(mlp.transient, selective.transient) < none.transient


def test_gradients_count_apart() -> None:
    made = config("mae", "none")
    with FakeTensorMode():
        objective, prepared = objective_and_inputs(made, 1)
        memory = trace_step(objective, prepared.inputs)
        gradients = 4 * sum(parameter.numel() for parameter in objective.parameters())
        assert all(parameter.grad is None for parameter in objective.parameters())
    assert memory.with_gradients >= gradients
    assert memory.with_gradients <= memory.transient + gradients


def test_live_bytes_follow_storages_not_tensors() -> None:
    with LiveBytes(block=512) as count:
        x = torch.empty(100)
        view = x[:10].view(2, 5)
        assert (count.live, count.peak) == (512, 512)
        del x
        assert count.live == 512, "a view keeps its storage"
        y = view + 1
        assert count.live == 1024
        del view, y
        gc.collect()
        assert (count.live, count.peak) == (0, 1024)


def test_rehearsing_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    objective_and_inputs(config("mae", "none"), 1)
    assert torch.equal(torch.rand(3), expected)


class Attending(nn.Module):
    """Attention with a learned bias that all images share."""

    def __init__(self, heads: int, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, tokens, tokens, dtype=dtype))

    def forward(self, x: Tensor) -> Losses:
        bias = self.bias.expand(len(x), -1, -1, -1)
        total = nn.functional.scaled_dot_product_attention(x, x, x, bias).sum()
        return Losses(total, total, None)


@pytest.mark.parametrize(("tokens", "aligned"), [(64, None), (65, 80)])
def test_attention_with_a_learned_bias_keeps_no_scores_on_cuda(tokens: int, aligned: int | None) -> None:
    """But its output, a number for each row, and a copy of a bias for each image if its rows are not aligned."""
    images, heads, width = 8, 2, 16
    with FakeTensorMode():
        step = Attending(heads, tokens), (torch.zeros(images, heads, tokens, width),)
        on_cpu, on_cuda = (trace_step(*step, as_on_cuda=as_on_cuda).saved for as_on_cuda in (False, True))
    rows = images * heads * tokens
    kept = 4 * rows * (width + 1 + (aligned or 0))
    assert kept <= on_cuda < kept + 4 * rows
    assert on_cpu >= 4 * rows * tokens, "the scores"


def test_short_attention_copies_no_bias_on_cuda() -> None:
    images, heads, tokens, width = 8, 2, 49, 32
    with FakeTensorMode():
        x = torch.zeros(images, heads, tokens, width, dtype=torch.bfloat16)
        saved = trace_step(Attending(heads, tokens, x.dtype), (x,), as_on_cuda=True).saved
    rows = images * heads * tokens
    kept = 2 * rows * width + 4 * rows + 2 * heads * tokens**2  # the output, a number for each row, the bias once
    assert kept <= saved < kept + 4 * rows
