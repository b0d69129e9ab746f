"""A step of segmentation on CUDA: the CPU's losses, no host sync, and transforms that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.builders.segment import SegmentStep, build_segment_step
from dmjd.config import BackboneConfig, EngineConfig, SegmentConfig, WindowsConfig
from dmjd.data.batch import Batch
from dmjd.models.dense.grid_attention import attention_on_map
from dmjd.models.dense.upsample import upsample

pytestmark = pytest.mark.gpu

SIZE, BATCH, CLASSES = 128, 4, 7
BACKBONES: dict[str, dict[str, Any]] = {
    "vit": {"embed_dim": 128, "num_heads": 2, "depth": 4},
    "convvit": {"name": "convvit", "embed_dim": 128, "num_heads": 2, "depth": 4, "class_token": False},
    "swin": {
        "name": "swin", "embed_dim": 256, "patch_size": 32, "class_token": False, "masked_tokens": "mask_token",
        "windows": WindowsConfig(depths=[1, 2, 2, 1], num_heads=[1, 2, 4, 8], size=7),
    },
}  # fmt: skip


def build(backbone: str, device: str = "cuda", **engine: Any) -> SegmentStep:
    config = SegmentConfig(init=None, batch_size=BATCH)
    config.backbone = BackboneConfig(drop_path=0.2, **BACKBONES[backbone])
    config.data.image_size, config.test.stride = [SIZE, SIZE], [SIZE, SIZE]
    config.optim = replace(config.optim, eps=1e-3)
    config.head = replace(config.head, channels=64, auxiliary_channels=32)
    config.engine = EngineConfig(name="single", device=device, grad_accum_steps=1, **engine)
    if backbone != "swin":
        config.attention = replace(config.attention, window=3, global_blocks=[3], relative_positions="decomposed")
    return build_segment_step(config, CLASSES)


def batch(step: SegmentStep) -> Batch:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 256, (BATCH, SIZE, SIZE, 4), generator=generator, dtype=torch.uint8)
    empty = Batch.empty(BATCH, [(SIZE, SIZE)], 3)
    images, maps = drawn[..., :3].contiguous(), drawn[..., 3] % CLASSES
    return empty._replace(images=images, maps=maps, sample_ids=torch.arange(BATCH)).to(step.engine.device)


def curve(step: SegmentStep) -> list[float]:
    """Losses of four steps, and then the mean square of the logits of larger images."""
    seen, own = [], batch(step)
    for epoch in range(4):
        seen.append(step.forward_backward(own, epoch)["loss"])
        step.update(1e-2)
    seen.append(step.logits(own.images.repeat(1, 2, 1, 1)).square().mean())
    return torch.stack(seen).tolist()


@pytest.mark.parametrize("backbone", BACKBONES)
def test_float32_equals_the_cpu_s(backbone: str) -> None:
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        on_cpu, on_gpu = (curve(build(backbone, device, precision="fp32")) for device in ("cpu", "cuda"))
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    assert on_gpu == pytest.approx(on_cpu, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_recomputation_and_compilation_follow_eager(backbone: str) -> None:
    expected = curve(build(backbone, precision="bf16"))
    for engine in (
        *({"activation_checkpointing": mode} for mode in ("mlp", "selective", "full")),
        {"compile": "block"},
    ):
        torch._dynamo.reset()
        assert curve(build(backbone, precision="bf16", **engine)) == pytest.approx(expected, rel=0.05), engine


def test_a_step_never_waits_for_the_device() -> None:
    step = build("vit")
    own = batch(step)
    for epoch in range(4):
        if epoch:  # the first builds the optimizer's state
            torch.cuda.set_sync_debug_mode("error")
        try:
            step.forward_backward(own, epoch)
            step.update(1e-3)
            step.logits(own.images)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("batch_size", "side", "depth"), [(25, 14, 64), (1, 64, 64), (4, 7, 64), (2, 32, 80)])
def test_decomposed_positions_in_bf16(batch_size: int, side: int, depth: int) -> None:
    """As near to float64 as attention in bf16 with the whole bias, forward and backward."""
    torch.manual_seed(0)
    qkv = torch.randn(batch_size, side, side, 3, 2, depth, device="cuda")
    tables = [torch.randn(2 * side - 1, depth, device="cuda") * 0.3 for _ in range(2)]
    weight = torch.randn(batch_size, side, side, 2, depth, device="cuda")

    def found(dtype: torch.dtype, whole: bool) -> list[Tensor]:
        inputs = [each.to(dtype).requires_grad_() for each in (qkv, *tables)]
        out = _with_whole_bias(*inputs) if whole else attention_on_map(*inputs)
        return [each.double() for each in (out, *torch.autograd.grad(out, inputs, weight.to(dtype)))]

    exact = found(torch.float64, whole=True)
    for one, other, expected in zip(found(torch.bfloat16, False), found(torch.bfloat16, True), exact, strict=True):
        assert (one - expected).abs().mean() <= 2 * (other - expected).abs().mean()


def _with_whole_bias(qkv: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    h, w, depth = qkv.shape[1], qkv.shape[2], qkv.shape[-1]
    q, k, v = qkv.flatten(1, 2).permute(2, 0, 3, 1, 4)
    grid = q.unflatten(2, (h, w))
    of_rows, of_columns = (
        table[torch.arange(n, device="cuda")[:, None] - torch.arange(n, device="cuda") + n - 1]
        for table, n in ((rows, h), (columns, w))
    )
    bias = torch.einsum("bnhwd,hkd->bnhwk", grid, of_rows).unsqueeze(-1)
    bias = (bias + torch.einsum("bnhwd,wkd->bnhwk", grid, of_columns).unsqueeze(-2)).flatten(-2).flatten(2, 3)
    scores = (q * depth**-0.5) @ k.transpose(-1, -2) + bias
    return (scores.softmax(-1) @ v).transpose(1, 2).unflatten(1, (h, w))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_upsampling_are_exact_and_repeat_themselves(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64, 16, 16, device="cuda").contiguous(memory_format=layout)
    weight = torch.randn(2, 64, 128, 128, device="cuda").contiguous(memory_format=layout)

    def gradient(dtype: torch.dtype, function: Callable[[Tensor, Sequence[int]], Tensor]) -> Tensor:
        inputs = x.to(dtype).requires_grad_()
        return torch.autograd.grad(function(inputs, (128, 128)), inputs, weight.to(dtype))[0]

    def pytorchs(inputs: Tensor, size: Sequence[int]) -> Tensor:
        return F.interpolate(inputs, list(size), mode="bilinear", align_corners=False)

    exact = gradient(torch.float64, pytorchs)
    found = [(gradient(torch.bfloat16, each) - exact).abs().mean().item() for each in (upsample, pytorchs)]
    assert found[0] <= 1.5 * found[1]
    assert torch.equal(gradient(torch.bfloat16, upsample), gradient(torch.bfloat16, upsample))
    torch.testing.assert_close(gradient(torch.float32, upsample).double(), exact, rtol=1e-3, atol=1e-3)
