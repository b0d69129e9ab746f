"""The paper's experiments made so narrow and shallow that a test can train them; images and masks stay as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from dmjd.builders.step import Step
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.targets.codebook import DVaeEncoder

CODES = 32

CLIP = {
    "embed_dim": 20,
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 64, "patch_size": 16, "head_width": 32},
    "text_cfg": {"context_length": 8, "vocab_size": 16, "width": 16, "heads": 2, "layers": 1},
}


def configure(experiment: str) -> PretrainConfig:
    config: PretrainConfig = compose("pretrain", [f"experiment={experiment}"])
    return config


def write_dvae(path: Path) -> str:
    """The file ``path``, of a dVAE with random weights."""
    torch.manual_seed(0)
    dvae = DVaeEncoder(codes=CODES, width=8, blocks=1)
    for parameter in dvae.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.save(dvae.state_dict(), path)
    return str(path)


def write_clip(folder: Path) -> str:
    """A file in ``folder`` of a CLIP with random weights, and its model known to open_clip as "tiny-clip"."""
    import open_clip  # which a machine with a GPU need not have

    (folder / "tiny-clip.json").write_text(json.dumps(CLIP))
    open_clip.add_model_config(folder / "tiny-clip.json")
    torch.manual_seed(0)
    torch.save(open_clip.create_model("tiny-clip").state_dict(), folder / "clip.pt")
    return str(folder / "clip.pt")


def shrink(config: PretrainConfig, weights: dict[str, str], **engine: Any) -> PretrainConfig:
    """The same experiment, small. ``weights`` are files by the target's name; ``engine`` are keys of that group."""
    stages = replace(config.backbone.conv_stages, embed_dims=[4, 8], depths=[1, 1], mlp_ratios=[2.0, 2.0])
    windows = replace(config.backbone.windows, depths=[1, 1, 2, 1], num_heads=[1, 1, 2, 2])
    backbone = replace(config.backbone, embed_dim=32, depth=2, num_heads=2, conv_stages=stages, windows=windows)
    decoder = replace(config.method.decoder, dim=16, depth=1, num_heads=2)
    branch = replace(config.method.visible_branch, width=16)
    target = replace(
        config.target, weights=weights.get(config.target.name), model="tiny-clip", dim=20, codes=CODES, layers=2
    )
    method = replace(config.method, decoder=decoder, visible_branch=branch)
    on = replace(config.engine, **{"device": "cpu", **engine})
    return replace(config, backbone=backbone, method=method, target=target, engine=on)


def smooth_batch(step: Step, images: int) -> Batch:
    """Smooth random images on the device of ``step``, the same for every step of one experiment."""
    data, ids = step.config.data, torch.arange(images)
    coarse = torch.rand(images, data.channels, 16, 16, generator=torch.Generator().manual_seed(0))

    def of_size(size: list[int]) -> torch.Tensor:
        fine = F.interpolate(coarse, size, mode="bicubic", antialias=True).clamp(0, 1)
        return (fine * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    second = {} if data.second_size is None else {"second": of_size(data.second_size)}
    return Batch(of_size(data.image_size), ids, torch.zeros_like(ids), **second).to(step.engine.device)


def gradient(step: Step) -> torch.Tensor:
    """The accumulated gradient of all parameters in one vector, on the CPU."""
    parameters = step.engine.objective.named_parameters()
    gradients = {name: parameter.grad for name, parameter in parameters if parameter.requires_grad}
    idle = [name for name, gradient in gradients.items() if gradient is None]
    assert not idle, f"{idle} take no part"
    return torch.cat([gradient.flatten().cpu() for gradient in gradients.values() if gradient is not None])


def train(step: Step, batch: Batch, steps: int, lr: float) -> list[float]:
    """Losses of ``steps`` steps on one batch in one epoch; targets are made anew in each."""
    losses = []
    for _ in range(steps):
        losses.append(step.forward_backward(batch, 0)[0].total)
        step.update(lr)
    return torch.stack(losses).tolist()
