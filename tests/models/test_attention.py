"""Attention of every model: timm's where PyTorch computes it, and of sizes that the kernels have."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from torch.utils._python_dispatch import TorchDispatchMode

from dmjd.builders.step import objective_and_inputs
from dmjd.compose import compose
from dmjd.models.swin import SwinEncoder
from dmjd.ops.short_attention import MOST_TOKENS


def test_swin_and_its_gradients_are_timms_shifted_windows_included() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"depths": (2, 2, 2, 1), "num_heads": (1, 1, 2, 2), "in_chans": 3}
    ours = SwinEncoder(image_size=(64, 128), embed_dim=32, window=4, **sizes)
    plain: dict[str, Any] = {"num_classes": 0, "global_pool": "", "drop_path_rate": 0.0}
    timms = SwinTransformer((64, 128), embed_dim=4, window_size=4, **plain, **sizes)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    assert any(block.attn_mask is not None for block in ours.blocks), "some windows are shifted"
    timms.load_state_dict({name: value for name, value in ours.state_dict().items() if name != "mask_token"})
    images = torch.randn(3, 3, 64, 128)
    found, expected = ours(images), timms(images).flatten(1, 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    for output in (found, expected):
        (output * weights).sum().backward()
    gradients, of_timm = (
        {name: parameter.grad for name, parameter in model.named_parameters() if name != "mask_token"}
        for model in (ours, timms)
    )
    torch.testing.assert_close(gradients, of_timm)


class Attentions(TorchDispatchMode):
    """Counts calls of short_attention, and keeps the shapes of other scores."""

    def __init__(self) -> None:
        super().__init__()
        self.served = 0
        self.others: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.served += func is torch.ops.dmjd.short_attention_packed.default
        if "softmax" in str(func) and args[0].ndim == 4:
            self.others.append(tuple(args[0].shape[-2:]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("experiment", "served", "others"),
    [
        ("mae_vit_huge", 32 + 7, [(192, 257)]),
        ("dmjd_convvit_base_hog", 11 + 7, [(120, 196)]),
        ("data2vec_vit_base", 12, []),
        ("simmim_swin_base", 24, []),
    ],
)
def test_the_kernels_serve_all_blocks_but_the_decoders_last(
    experiment: str, served: int, others: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one has fewer queries than keys."""

    def has_a_kernel(q: torch.Tensor, scale: float) -> bool:
        return 0 < q.shape[1] <= MOST_TOKENS.get(q.shape[3], 0)

    monkeypatch.setattr(sys.modules["dmjd.ops.short_attention"], "_served", has_a_kernel)
    with torch.device("meta"), torch.no_grad(), Attentions() as attentions:
        objective, prepared = objective_and_inputs(compose("pretrain", [f"experiment={experiment}"]), 1)
        objective(*prepared.inputs)
    assert (attentions.served, attentions.others) == (served, others)
