"""timm's ViT with dmjd's attention for short sequences, for a trainer of your own. Needs torch, timm and dmjd.ops.

python docs/examples/timm_vit.py

Prints how far the two differ; on a GPU also the time of a forward and backward pass of ViT-B with each, compiled, in
bfloat16.
"""

from __future__ import annotations

from copy import deepcopy

import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from dmjd.ops import short_attention_packed


class ShortAttention(Attention):
    """timm's attention as most of its ViTs have it: no norms of queries and keys, no gate, no dropout, no mask."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, N, 3, heads, C / heads], nothing is transposed
        return self.proj(short_attention_packed(qkv).flatten(2))


def with_short_attention(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that computes attention by dmjd's op; its parameters have the same names and values."""
    model = deepcopy(model)
    for module in model.modules():
        if type(module) is Attention:
            module.__class__ = ShortAttention
    return model


def step(model: nn.Module) -> Tensor:
    """Forward and backward pass; the logits."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        logits: Tensor = model(images)
    logits.float().square().mean().backward()
    return logits.detach()


cuda = torch.cuda.is_available()
name, batch = ("vit_base_patch16_224", 128) if cuda else ("vit_tiny_patch16_224", 2)
device = torch.device("cuda" if cuda else "cpu")
images = torch.randn(batch, 3, 224, 224, device=device)
timms = timm.create_model(name).to(device)
ours = with_short_attention(timms)
print(f"{name}: logits differ by at most {(step(timms) - step(ours)).abs().max():.1e}")
for way, model in (("timm's attention", timms), ("short_attention", ours)) if cuda else ():
    compiled = torch.compile(model)
    step(compiled)
    time = Timer("step(model)", globals={"step": step, "model": compiled}).timeit(50).mean
    print(f"{way}: {time * 1e3:.1f} ms, {batch / time:.0f} images/s")
