from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dmjd.config import EngineConfig, OptimConfig
from dmjd.errors import ConfigError
from dmjd.masking import MaskedViews, MaskSpec
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import MaskedImageModel
from dmjd.models.objective import Objective
from dmjd.models.vit import ViTEncoder
from dmjd.parallel.apply import apply, blocks, units
from dmjd.parallel.build import build_engine, select_device, select_precision
from dmjd.parallel.single import SingleEngine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def make_objective(kind: str = "decoder", depth: int = 2) -> Objective:
    torch.manual_seed(0)
    masked_tokens = "drop" if kind == "decoder" else "mask_token"
    encoder = ViTEncoder(
        image_size=(16, 16),
        patch_size=4,
        in_chans=3,
        embed_dim=32,
        depth=depth,
        num_heads=4,
        masked_tokens=masked_tokens,
    )
    decoder = MAEDecoder(
        encoder_dim=32, grid=encoder.grid, prefix_tokens=1, dim=32, depth=1, num_heads=4, mlp_ratio=2.0
    )
    branch = VisibleBranch(encoder_dim=32, width=16, target_dim=5)
    return Objective(MaskedImageModel(encoder, decoder if kind == "decoder" else None, branch, target_dim=5))


def make_batch() -> tuple[Tensor, MaskedViews, Tensor]:
    generator = torch.Generator().manual_seed(1)
    spec = MaskSpec(views=2, mask_ratio=0.6, pattern="uniform")
    masked_views = spec.draw(torch.arange(3), (4, 4), seed=0, epoch=0)
    return torch.randn(3, 3, 16, 16, generator=generator), masked_views, torch.randn(3, 16, 5, generator=generator)


def count_runs(model: MaskedImageModel) -> Counter[int]:
    """How often each block's first norm runs, counted from now on.

    Not the MLP: recomputation stops at the last activation that backward needs, before a block's MLP has ended.
    """
    runs: Counter[int] = Counter()
    for index, block in enumerate(blocks(model)):

        def count(*_: Any, index: int = index) -> None:
            runs[index] += 1

        block.norm1.register_forward_pre_hook(count)  # type: ignore[union-attr]
    return runs


@pytest.mark.parametrize(("kind", "expected"), [("decoder", 3), ("linear", 2)])
def test_blocks_are_those_of_encoder_and_decoder(kind: str, expected: int) -> None:
    model = make_objective(kind).model
    found = list(blocks(model))
    assert len(found) == expected
    assert found[:2] == list(model.encoder.blocks)
    assert found[2:] == ([] if model.decoder is None else list(model.decoder.blocks))


@pytest.mark.parametrize(
    ("kind", "size", "sizes"), [("decoder", 2, [2, 2, 1, 1]), ("decoder", 9, [5, 1]), ("linear", 3, [3, 2])]
)
def test_units_are_runs_of_blocks_that_never_cross_into_the_decoder(kind: str, size: int, sizes: list[int]) -> None:
    model = make_objective(kind, depth=5).model
    found = list(units(model, size))
    assert [len(unit) for unit in found] == sizes
    assert [block for unit in found for block in unit] == list(blocks(model))


@pytest.mark.parametrize("kind", ["decoder", "linear"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["mlp", "selective", "full"])
def test_recomputation_changes_no_bit_and_no_name(kind: str, precision: torch.dtype, mode: str) -> None:
    plain, recomputed = make_objective(kind), make_objective(kind)
    names = list(recomputed.state_dict())
    apply(recomputed.model, EngineConfig(activation_checkpointing=mode))
    assert list(recomputed.state_dict()) == names
    results = []
    for objective in (plain, recomputed):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            losses = objective(*make_batch())
            losses.total.backward()
        results.append(losses)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    for (name, one), (_, other) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("kind", ["decoder", "linear"])
@pytest.mark.parametrize(("mode", "runs_per_step"), [("full", 2), ("none", 1)])
def test_backward_runs_checkpointed_blocks_a_second_time(kind: str, mode: str, runs_per_step: int) -> None:
    objective = make_objective(kind)
    apply(objective.model, EngineConfig(activation_checkpointing=mode))
    runs = count_runs(objective.model)
    total = objective(*make_batch()).total
    assert set(runs.values()) == {1}
    total.backward()
    assert runs == dict.fromkeys(range(3 if kind == "decoder" else 2), runs_per_step)


def test_recomputed_blocks_keep_fewer_activations() -> None:
    kept = {}
    for mode in ("none", "mlp", "full"):
        objective = make_objective()
        apply(objective.model, EngineConfig(activation_checkpointing=mode))
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            objective(*make_batch())
        kept[mode] = sum(sizes)
    assert kept["full"] < kept["none"] / 2
    assert kept["full"] < kept["mlp"] < 0.8 * kept["none"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks there itself
@pytest.mark.parametrize(
    ("unit", "mode"),
    [
        *(("block", "none"), ("block", "mlp"), ("block", "selective"), ("model", "none"), ("model", "full")),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("block", "full"), ("model", "mlp"))),
        pytest.param("model", "selective", marks=pytest.mark.long),
    ],
)
def test_compilation_changes_no_gradient(unit: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By blocks, with more than torch compiles versions of one function: those of a kind have to share theirs."""
    depth = 10 if unit == "block" else 2
    plain, compiled = make_objective(depth=depth), make_objective(depth=depth)
    compile_module, units = torch.nn.Module.compile, []

    def compile_quickly(module: torch.nn.Module, **options: Any) -> None:
        units.append(module)
        compile_module(module, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_quickly)
    torch._dynamo.reset()
    apply(compiled.model, EngineConfig(activation_checkpointing=mode, compile=unit))
    assert units == ([compiled.model] if unit == "model" else list(blocks(compiled.model)))
    losses = [objective(*make_batch()).total for objective in (plain, compiled)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses)
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("unit", ["block", "model"])
def test_all_that_is_compiled_becomes_cuda_graphs_or_nothing(
    unit: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **o: asked.append(o.get("options")))
    model = make_objective().model
    apply(model, EngineConfig("single", compile=unit, cuda_graphs=graphs))
    times = 1 if unit == "model" else len(list(blocks(model)))
    assert asked == times * [{"triton.cudagraphs": True} if graphs else None]


@torch.no_grad()
def test_each_size_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in general slow kernels down, and the shape reasoning over a Swin's blocks did not end."""
    graphs: list[bool] = []

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        sizes = [size for each in inputs for size in (each.shape if isinstance(each, Tensor) else [each])]
        graphs.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph

    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **o: compile_(module, backend=backend, **o))
    torch._dynamo.reset()
    model = make_objective().model
    apply(model, EngineConfig("single", compile="block"))
    block = next(blocks(model))
    for images in range(2, 14):  # more than the eight sizes that torch allows by itself
        block(torch.randn(images, 3 + images, 32))
    assert graphs == [False] * 12


def test_recomputation_is_invisible_without_gradients() -> None:
    plain, recomputed = make_objective().eval(), make_objective().eval()
    apply(recomputed.model, EngineConfig(activation_checkpointing="full"))
    images = make_batch()[0]
    assert torch.equal(recomputed.model.encoder(images), plain.model.encoder(images))


def test_build_engine_transforms_the_model_it_hands_over() -> None:
    objective = make_objective()
    config = EngineConfig(device="cpu", precision="bf16", activation_checkpointing="full")
    engine = build_engine(objective, config, OptimConfig(clip_grad=1e-3))
    assert isinstance(engine, SingleEngine)
    assert engine.module is objective
    assert engine.device == CPU
    runs = count_runs(objective.model)
    images, masked_views, targets = make_batch()
    with engine.micro_batch(last=True):
        assert objective.model(images, masked_views).masked.dtype == torch.bfloat16
        runs.clear()
        engine.backward(objective(images, masked_views, targets).total)
    assert runs == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("available", [True, False])
def test_auto_takes_cuda_where_there_is_one(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert select_device("auto") == (CUDA if available else CPU)
    assert select_device("cpu") == CPU
    if available:
        assert select_device("cuda") == CUDA
    else:
        with pytest.raises(ConfigError, match=r"engine\.device=cuda, .* use cpu or auto$"):
            select_device("cuda")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", CPU, torch.float32),
        ("auto", CUDA, torch.bfloat16),
        ("fp32", CUDA, torch.float32),
        ("fp32", CPU, torch.float32),
        ("bf16", CPU, torch.bfloat16),
    ],
)
def test_precision(name: str, device: torch.device, expected: torch.dtype) -> None:
    assert select_precision(name, device) == expected
