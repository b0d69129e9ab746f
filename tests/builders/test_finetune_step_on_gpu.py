"""A fine-tuning step on CUDA: the CPU's losses, no host sync, and compilation and CUDA graphs that change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmjd.builders.finetune import FinetuneStep, build_finetune_step
from dmjd.config import (
    BackboneConfig,
    DataConfig,
    EngineConfig,
    FinetuneConfig,
    FinetuneOptimConfig,
    HeadConfig,
    WindowsConfig,
)
from dmjd.data.batch import Batch

pytestmark = pytest.mark.gpu

SIZE, BATCH, CLASSES = 64, 16, 7
BACKBONES: dict[str, dict[str, Any]] = {
    "vit": {"embed_dim": 128, "num_heads": 2, "patch_size": 8},
    "beit": {
        "embed_dim": 128, "num_heads": 2, "patch_size": 8, "masked_tokens": "mask_token", "block": "beit",
        "positions": "relative", "bias_tables": "per_block", "layer_scale": 0.1,
    },
    "swin": {
        "name": "swin", "embed_dim": 256, "patch_size": 32, "class_token": False, "masked_tokens": "mask_token",
        "windows": WindowsConfig(depths=[1, 1, 2, 1], num_heads=[1, 2, 4, 8], size=2),
    },
}  # fmt: skip


def build(backbone: str, device: str = "cuda", freeze: int = 0, **engine: Any) -> FinetuneStep:
    config = FinetuneConfig(
        batch_size=BATCH,
        ema_decay=0.9,
        freeze=freeze,
        backbone=BackboneConfig(depth=3, drop_path=0.2, **BACKBONES[backbone]),
        data=DataConfig(image_size=[SIZE, SIZE]),
        optim=FinetuneOptimConfig(clip_grad=1.0, eps=1e-3, layer_decay=0.75),
        engine=EngineConfig(name="single", device=device, grad_accum_steps=2, **engine),
        head=HeadConfig(dropout=0.1, init_std=0.1, norm="encoder" if backbone == "swin" else "pooled"),
    )
    return build_finetune_step(config, CLASSES)


def batch(step: FinetuneStep) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH, SIZE, SIZE, 3), generator=generator, dtype=torch.uint8)
    return Batch(images, torch.arange(BATCH), torch.arange(BATCH) % CLASSES).to(step.engine.device)


def curve(step: FinetuneStep) -> list[float]:
    """Losses of six steps, and after the third two sums of logits: of the weights and of their average."""
    seen, own = [], batch(step)
    for epoch in range(6):
        seen.append(step.forward_backward(own, epoch)["loss"])
        step.update(1e-2)
        if epoch == 2:
            seen.append(step.logits(own.images).square().mean())
            with step.with_average():
                seen.append(step.logits(own.images).square().mean())
    return torch.stack(seen).tolist()


@pytest.mark.parametrize("backbone", BACKBONES)
def test_float32_equals_the_cpu_s(backbone: str) -> None:
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        on_cpu, on_gpu = (curve(build(backbone, device, precision="fp32")) for device in ("cpu", "cuda"))
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("freeze", [0, 2])
def test_compilation_and_graphs_follow_eager(backbone: str, freeze: int) -> None:
    expected = curve(build(backbone, freeze=freeze, precision="bf16"))
    for engine in (
        {"activation_checkpointing": "full"},
        {"compile": "block", "cuda_graphs": True},
        {"compile": "model"},
    ):
        torch._dynamo.reset()
        found = curve(build(backbone, freeze=freeze, precision="bf16", **engine))
        assert found == pytest.approx(expected, rel=0.03), engine


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
