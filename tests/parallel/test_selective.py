"""Op-selective activation checkpointing: what is kept, what runs twice, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils._python_dispatch import TorchDispatchMode

from dmjd.config import EngineConfig
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import MaskedImageModel
from dmjd.models.objective import Objective
from dmjd.models.vit import EncoderBlock
from dmjd.parallel.apply import apply, checkpoint_block
from dmjd.parallel.memory import LiveBytes
from tests.parallel.batches import random_batch


class CountOps(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def convvit() -> Objective:
    torch.manual_seed(0)
    encoder = ConvViTEncoder(
        image_size=(64, 64), in_chans=3, embed_dims=(8, 16, 32), depths=(1, 1, 1), mlp_ratios=(4, 4, 4), num_heads=4
    )
    decoder = MAEDecoder(encoder_dim=32, grid=(4, 4), prefix_tokens=0, dim=32, depth=2, num_heads=4, mlp_ratio=4.0)
    return Objective(MaskedImageModel(encoder, decoder, VisibleBranch(encoder_dim=32, width=16, target_dim=5), 5))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_expensive_ops_run_once_and_the_rest_twice(precision: torch.dtype) -> None:
    runs = {}
    for mode in ("none", "selective", "full"):
        objective = convvit()
        apply(objective.model, EngineConfig(activation_checkpointing=mode))
        with CountOps() as count, torch.autocast("cpu", precision, enabled=precision != torch.float32):
            objective(*random_batch(64)).total.backward()
        runs[mode] = count.runs
    expensive = ("addmm", "_scaled_dot_product_flash_attention_for_cpu", "masked_depthwise_conv2d")
    for op in expensive:
        assert runs["selective"][op] == runs["none"][op] < runs["full"][op], op
    for op in ("native_layer_norm", "gelu"):
        assert runs["selective"][op] == runs["full"][op] > runs["none"][op], op


def test_what_a_block_keeps_is_what_arithmetic_says() -> None:
    """Of T tokens of width D in float32: input D, qkv 3 D, attention D, its logsumexp (one number a head), projection
    D, hidden layer 4 D; not the output of the MLP, though it is a product's."""
    rows, tokens, width, heads = 2, 10, 32, 4
    block = Block(width, heads, 4.0, qkv_bias=True)
    checkpoint_block(block, "selective")
    x = torch.randn(rows, tokens, width, requires_grad=True)
    with LiveBytes() as count:
        for parameter in block.parameters():
            count.set_aside(parameter)
        kept = block(x + 0)
        held = count.live - count.size(kept)
    assert held == rows * tokens * 4 * (width * (1 + 3 + 1 + 1 + 4) + heads)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks there itself
def test_a_compiled_selective_block_is_one_graph_and_computes_the_same() -> None:
    torch.manual_seed(0)
    plain = EncoderBlock(32, 4, 4.0, qkv_bias=True)
    compiled = EncoderBlock(32, 4, 4.0, qkv_bias=True)
    compiled.load_state_dict(plain.state_dict())
    checkpoint_block(compiled, "selective")
    torch._dynamo.reset()
    compiled.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    inputs = [torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    outputs: list[Tensor] = [block(x) for block, x in zip((plain, compiled), inputs, strict=True)]
    for output in outputs:
        output.square().mean().backward()
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-7)
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(_gradient(one), _gradient(other), atol=1e-6), name


@pytest.mark.long
def test_the_graph_of_a_compiled_selective_block_is_cached() -> None:
    counted = counters["aot_autograd"]
    with fresh_cache():
        for start in ("autograd_cache_saved", "autograd_cache_hit"):
            torch._dynamo.reset()
            counted.clear()
            block = EncoderBlock(32, 4, 4.0, qkv_bias=True)
            checkpoint_block(block, "selective")
            block.compile(fullgraph=True, dynamic=False)
            block(torch.randn(2, 5, 32)).sum().backward()
            assert counted[start] == 1, dict(counted)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
