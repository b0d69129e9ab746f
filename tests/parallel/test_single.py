from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from dmjd.config import OptimConfig
from dmjd.errors import CheckpointError
from dmjd.masking import MaskedViews, MaskSpec
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import MaskedImageModel
from dmjd.models.objective import Objective
from dmjd.models.vit import ViTEncoder
from dmjd.ops.views import Views
from dmjd.parallel import store
from dmjd.parallel.engine import StepResult
from dmjd.parallel.single import SingleEngine

CPU = torch.device("cpu")
BETAS, EPS = (0.9, 0.95), 1e-8
SCHEDULE = [(1e-2, 0.05), (2e-2, 0.1), (5e-3, 0.0), (1e-2, 0.3)]
"""(lr, weight decay) of successive steps: both change, as the loop changes them."""


def make_objective(seed: int = 0, dim: int = 32, visible: bool = True) -> Objective:
    torch.manual_seed(seed)
    encoder = ViTEncoder(image_size=(16, 16), patch_size=4, in_chans=3, embed_dim=dim, depth=1, num_heads=4)
    decoder = MAEDecoder(
        encoder_dim=dim, grid=encoder.grid, prefix_tokens=1, dim=32, depth=1, num_heads=4, mlp_ratio=2.0
    )
    branch = VisibleBranch(encoder_dim=dim, width=16, target_dim=5) if visible else None
    return Objective(MaskedImageModel(encoder, decoder, branch, target_dim=5))


def make_engine(
    module: nn.Module | None = None,
    clip_grad: float | None = None,
    precision: torch.dtype = torch.float32,
    **options: bool,
) -> SingleEngine:
    config = OptimConfig(betas=list(BETAS), eps=EPS, clip_grad=clip_grad)
    objective = make_objective() if module is None else cast(Objective, module)
    return SingleEngine(objective, config, CPU, precision, **options)


def make_batch(step: int, batch: int = 8) -> tuple[Tensor, MaskedViews, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(batch, 3, 16, 16, generator=generator)
    targets = torch.randn(batch, 16, 5, generator=generator)
    spec = MaskSpec(views=2, mask_ratio=0.6, pattern="uniform")
    return images, spec.draw(torch.arange(batch), (4, 4), seed=0, epoch=step), targets


def split(batch: tuple[Tensor, MaskedViews, Tensor], parts: int) -> Iterator[tuple[Tensor, MaskedViews, Tensor]]:
    images, (views, predicted), targets = batch
    for rows in torch.arange(len(images)).chunk(parts):
        some = Views(*(field[:, rows] for field in views))
        yield images[rows], MaskedViews(some, predicted[:, rows]), targets[rows]


def train_step(engine: SingleEngine, step: int, parts: int = 1) -> tuple[float, StepResult]:
    """One step as the loop takes it; the loss it had, and the engine's result."""
    total = 0.0
    for index, micro in enumerate(split(make_batch(step), parts)):
        with engine.micro_batch(last=index + 1 == parts):
            loss = engine.module(*micro).total / parts
            engine.backward(loss)
        total += loss.item()
    return total, engine.step(*SCHEDULE[step % len(SCHEDULE)])


def set_gradients(engine: SingleEngine, step: int, scale: float = 1.0) -> list[Tensor]:
    """Random gradients by way of a loss that is linear in the parameters."""
    generator = torch.Generator().manual_seed(200 + step)
    parameters = list(engine.module.parameters())
    gradients = [scale * torch.randn(p.shape, generator=generator) for p in parameters]
    with engine.micro_batch(last=True):
        terms = [(p * g).sum() for p, g in zip(parameters, gradients, strict=True)]
        engine.backward(torch.stack(terms).sum())
    return gradients


def snapshot(engine: SingleEngine, folder: Path) -> dict[str, Tensor]:
    """Parameters, both moments and step counts by name, as a checkpoint would hold them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    engine.save(folder, {})()
    return store.read(folder)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def norm_of(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients))


@pytest.mark.parametrize("clip_grad", [None, 5.0])
def test_steps_equal_adamw_written_by_hand(clip_grad: float | None) -> None:
    engine = make_engine(clip_grad=clip_grad)
    weights = [p.detach().double() for p in engine.module.parameters()]
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    for step, (lr, weight_decay) in enumerate(SCHEDULE, start=1):
        gradients = set_gradients(engine, step, scale=10.0 ** (step % 3 - 2))  # norms on both sides of the clip
        norm = norm_of(gradients)
        factor = 1.0 if clip_grad is None else min(1.0, clip_grad / norm)
        for w, m, v, g in zip(weights, first, second, gradients, strict=True):
            g = g.double() * factor
            m += (1 - BETAS[0]) * (g - m)
            v += (1 - BETAS[1]) * (g * g - v)
            if w.ndim > 1:
                w *= 1 - lr * weight_decay
            w -= lr * (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        result = engine.step(lr, weight_decay)
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-6)  # before clipping
        for parameter, expected in zip(engine.module.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_clipping_equals_torchs_on_a_twin(tmp_path: Path) -> None:
    engine = make_engine(clip_grad=1.0)
    twin = copy.deepcopy(engine.module)
    decayed = [p for p in twin.parameters() if p.ndim > 1]
    others = [p for p in twin.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], betas=BETAS, eps=EPS, fused=True)
    for step, (lr, weight_decay) in enumerate(SCHEDULE):
        gradients = set_gradients(engine, step, scale=10.0 ** -(step % 3 + 1))
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        for group, decay in zip(optimizer.param_groups, (weight_decay, 0.0), strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        optimizer.step()
        result = engine.step(lr, weight_decay)
        assert torch.equal(result.grad_norm, norm)
        assert result.applied.item() == 1
    saved = snapshot(engine, tmp_path)
    for name, parameter in twin.named_parameters():
        assert torch.equal(saved[f"parameter/{name}"], parameter.detach()), name
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved[f"{moment}/{name}"], optimizer.state[parameter][moment])


def test_matrices_convolutions_and_tokens_decay_and_vectors_do_not() -> None:
    engine = make_engine()
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with engine.micro_batch(last=True):  # a gradient of zero leaves weight decay as the only thing that moves
        engine.backward(sum((p.sum() for p in engine.module.parameters()), torch.zeros(())) * 0)
    result = engine.step(lr=0.5, weight_decay=0.25)
    assert result.grad_norm.item() == 0
    assert result.applied.item() == 1
    decayed = set()
    for name, parameter in engine.module.named_parameters():
        expected = before[name] * (1 - 0.5 * 0.25) if parameter.ndim > 1 else before[name]
        assert torch.equal(parameter.detach(), expected), name
        if parameter.ndim > 1:
            decayed.add(name)
    assert {"model.encoder.cls_token", "model.decoder.mask_token", "model.encoder.patch_embed.proj.weight"} < decayed
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)


def test_frozen_parameters_stay() -> None:
    objective = make_objective()
    objective.model.encoder.requires_grad_(False)
    before = copy.deepcopy(objective.model.encoder.state_dict())
    engine = make_engine(objective)
    _, result = train_step(engine, 0)
    assert result.applied.item() == 1
    assert_same(dict(objective.model.encoder.state_dict()), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip_grad", [None, 1.0])
def test_a_gradient_that_is_not_finite_moves_nothing(bad: float, clip_grad: float | None, tmp_path: Path) -> None:
    engine, twin = make_engine(clip_grad=clip_grad), make_engine(clip_grad=clip_grad)
    for step in range(2):
        train_step(engine, step)
        train_step(twin, step)
    before = snapshot(engine, tmp_path / "before")
    assert before["exp_avg_sq/model.head.weight"].any()
    assert before["step/model.head.weight"].item() == 2
    set_gradients(engine, 0)
    gradient = engine.module.get_parameter("model.encoder.cls_token").grad
    assert gradient is not None
    gradient[0, 0, 3] = bad
    result = engine.step(0.1, 0.05)
    assert result.applied.item() == 0
    assert not result.grad_norm.isfinite()
    assert_same(snapshot(engine, tmp_path / "after"), before)
    assert all(p.grad is None for p in engine.module.parameters())
    for step in (2, 3):
        assert train_step(engine, step) == train_step(twin, step)
    assert_same(snapshot(engine, tmp_path / "after"), snapshot(twin, tmp_path / "before"))


def test_a_bad_first_step_leaves_no_trace() -> None:
    engine, twin = make_engine(), make_engine()
    set_gradients(engine, 0, scale=math.nan)
    assert engine.step(0.1, 0.05).applied.item() == 0
    for step in range(2):
        assert train_step(engine, step) == train_step(twin, step)
    assert_same(dict(engine.module.state_dict()), dict(twin.module.state_dict()))


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_add_up_to_the_batch(parts: int) -> None:
    whole, parted = make_engine(), make_engine()
    for step in range(2):
        for engine, count in ((whole, 1), (parted, parts)):
            for micro in split(make_batch(step), count):
                with engine.micro_batch(last=False):
                    engine.backward(engine.module(*micro).total / count)
        pairs = list(zip(whole.module.parameters(), parted.module.parameters(), strict=True))
        for one, other in pairs:
            torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-6)
        whole.step(0.0, 0.0)  # keeps the weights alike: only what accumulates is compared
        parted.step(0.0, 0.0)
    losses = [train_step(engine, 2, count)[0] for engine, count in ((whole, 1), (parted, parts))]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def test_gradients_that_graphs_hand_over_are_kept_elsewhere() -> None:
    """A graph writes each gradient where it wrote the last; to keep that tensor is to keep the last one alone."""
    kept, plain = make_engine(clip_grad=1.0, cuda_graphs=True), make_engine(clip_grad=1.0)
    places = [p.grad.data_ptr() for p in kept.module.parameters() if p.grad is not None]
    for engine in (kept, plain):
        set_gradients(engine, 0, scale=math.nan)
        assert engine.step(0.1, 0.05).applied.item() == 0
        train_step(engine, 8)
        with engine.micro_batch(last=True):
            engine.backward(engine.module(*make_batch(9)).total)
        engine.discard()
    for step in range(4):
        assert train_step(kept, step, parts=2) == train_step(plain, step, parts=2)
    assert_same(dict(kept.module.state_dict()), dict(plain.module.state_dict()))
    assert places == [p.grad.data_ptr() for p in kept.module.parameters() if p.grad is not None]
    assert len(places) == len(list(kept.module.parameters()))


def test_a_fresh_engine_continues_bit_for_bit(tmp_path: Path) -> None:
    engine = make_engine(make_objective(seed=0), clip_grad=1.0)
    for step in range(3):
        train_step(engine, step)
    engine.save(tmp_path, {})()
    resumed = make_engine(make_objective(seed=1), clip_grad=1.0)
    train_step(resumed, 9)  # its own moments must not survive
    resumed.load(tmp_path, {})
    for step in range(3, 6):
        assert train_step(resumed, step) == train_step(engine, step)
    assert_same(snapshot(resumed, tmp_path / "resumed"), snapshot(engine, tmp_path / "engine"))


@pytest.mark.parametrize(
    ("saved", "built", "what"),
    [
        ({"visible": False}, {}, "12 missing"),
        ({}, {"visible": False}, "12 unknown"),
        ({"dim": 48}, {}, "model.encoder.cls_token is (1, 1, 48) there and (1, 1, 32) here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    saved: dict[str, int], built: dict[str, int], what: str, tmp_path: Path
) -> None:
    other = make_engine(make_objective(seed=1, **saved))  # type: ignore[arg-type]
    train_step(other, 0)
    other.save(tmp_path, {})()
    engine = make_engine(make_objective(seed=0, **built))  # type: ignore[arg-type]
    train_step(engine, 0)
    before = snapshot(engine, tmp_path / "before")
    with pytest.raises(CheckpointError) as caught:
        engine.load(tmp_path, {})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path} is a checkpoint of another model: ")
    assert what in message
    assert "\n" not in message
    assert_same(snapshot(engine, tmp_path / "after"), before)


def test_bfloat16_is_for_computing_and_not_for_keeping() -> None:
    objective = make_objective()
    engine, batch = make_engine(objective, precision=torch.bfloat16), make_batch(0)
    with engine.micro_batch(last=True):
        assert objective.model(*batch[:2]).masked.dtype == torch.bfloat16
        engine.backward(engine.module(*batch).total)
    assert not torch.is_autocast_enabled("cpu")
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in engine.module.parameters() if p.grad is not None} == {torch.float32}
    result = engine.step(1e-3, 0.05)
    assert result.grad_norm.dtype == result.applied.dtype == torch.float32
    assert result.grad_norm.shape == result.applied.shape == ()


def test_float32_computes_in_float32() -> None:
    objective = make_objective()
    with make_engine(objective).micro_batch(last=True):
        assert objective.model(*make_batch(0)[:2]).masked.dtype == torch.float32


def test_master_parameters_must_be_float32() -> None:
    with pytest.raises(AssertionError, match="master parameters are float32"):
        make_engine(make_objective().bfloat16())


def test_full_state_dict_is_every_parameter_as_it_was() -> None:
    engine = make_engine()
    state = engine.full_state_dict()
    before = copy.deepcopy(state)
    assert_same(state, {name: p.detach() for name, p in engine.module.named_parameters()})
    assert all(value.dtype == torch.float32 and value.device == CPU for value in state.values())
    assert not any(value.requires_grad for value in state.values())
    train_step(engine, 0)
    assert_same(state, before)
