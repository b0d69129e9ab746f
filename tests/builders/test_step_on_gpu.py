"""One training step on CUDA: no host sync, the CPU's masks and losses, and bad steps skipped on the device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from dmjd.builders import build_mask_spec, build_objective, build_tokenizer, token_grid
from dmjd.builders.preparation import Preparation, Prepared
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.parallel.build import build_engine
from dmjd.parallel.engine import Engine
from dmjd.parallel.world import alone
from dmjd.train.guard import PendingStep, trapped
from dmjd.train.stop import ASKS, Requests
from dmjd.train.upload import Uploader

pytestmark = pytest.mark.gpu


def configured(*words: str) -> PretrainConfig:
    config = compose("pretrain", ["experiment=demo", "data=fashion_mnist", *words])
    assert isinstance(config, PretrainConfig)
    return config


def cast(config: PretrainConfig) -> tuple[Engine, Preparation]:
    grid = token_grid(config)
    spec, tokenizer = build_mask_spec(config.mask, grid), build_tokenizer(config)
    engine = build_engine(build_objective(config, tokenizer.dim), config.engine, config.optim)
    data = config.data
    statistics = tuple(data.mean), tuple(data.std)
    depth, drop_path = config.backbone.depth, config.backbone.drop_path
    return engine, Preparation(spec, grid, tokenizer, *statistics, True, config.seed, depth, drop_path)


def random_batch(size: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (size, 32, 32, 1), generator=generator, dtype=torch.uint8)
    return Batch(images, torch.arange(size), torch.zeros(size, dtype=torch.int64))


def train(engine: Engine, prepared: Prepared, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        with engine.micro_batch(last=True):
            loss = engine.module(*prepared.inputs)
            engine.backward(loss.total)
        engine.step(1e-3, 0.05)
        losses.append(loss.total.detach())
    return torch.stack(losses).tolist()


def test_masks_and_targets_are_those_of_the_cpu() -> None:
    _, prepare = cast(configured("engine.device=cpu"))
    batch = random_batch(64)
    on_cpu, on_gpu = prepare(batch, 3), prepare(batch.to(torch.device("cuda")), 3)
    assert torch.equal(on_cpu.crops, on_gpu.crops.cpu())
    for host, device in zip(on_cpu.masked_views.views, on_gpu.masked_views.views, strict=True):
        assert torch.equal(host, device.cpu())
    torch.testing.assert_close(on_cpu.targets, on_gpu.targets.cpu(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(on_cpu.images, on_gpu.images.cpu(), atol=1e-6, rtol=1e-6)


def test_float32_losses_equal_the_cpu_s() -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        curves = []
        for device in ("cpu", "cuda"):
            engine, prepare = cast(configured(f"engine.device={device}", "engine.precision=fp32"))
            curves.append(train(engine, prepare(random_batch().to(torch.device(device)), 0), steps=10))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert curves[0] == pytest.approx(curves[1], abs=2e-4)
    assert curves[0][-1] < curves[0][0]


def test_bfloat16_follows_float32_and_compile_follows_eager() -> None:
    curves = {}
    for name, words in {
        "fp32": ["engine.precision=fp32"],
        "bf16": ["engine.precision=bf16"],
        "blocks compiled": ["engine.precision=bf16", "engine.compile=block"],
        "model compiled": ["engine.precision=bf16", "engine.compile=model"],
        "recomputed": ["engine.precision=bf16", "engine.activation_checkpointing=full"],
    }.items():
        engine, prepare = cast(configured("engine.device=cuda", *words))
        curves[name] = train(engine, prepare(random_batch().to(engine.device), 0), steps=10)
    assert curves["recomputed"] == curves["bf16"]
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=0.02)
    for compiled in ("blocks compiled", "model compiled"):
        assert curves[compiled] == pytest.approx(curves["bf16"], rel=0.02)


def test_a_step_never_waits_for_the_device(tmp_path: Path) -> None:
    engine, prepare = cast(configured("engine.device=cuda", "optim.clip_grad=1.0", "backbone.drop_path=0.1"))
    upload = Uploader(engine.device)
    batch = Batch(*(field.pin_memory() for field in random_batch()))
    pending = None
    requests = Requests(tmp_path, alone(engine.device), deadline=0.0)  # which has passed, so that something is asked
    for step in range(4):
        if step:  # the first builds the optimizer's state
            torch.cuda.set_sync_debug_mode("error")
        try:
            prepared = prepare(upload(batch), epoch=0)
            with engine.micro_batch(last=True):
                losses = engine.module(*prepared.inputs)
                engine.backward(trapped(losses.total))
            result = engine.step(1e-3, 0.05)
            rates = torch.zeros(2, device=engine.device)
            pending = PendingStep(
                step, batch.sample_ids, losses, rates, result, requests.asks(step), alone(engine.device)
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert pending is not None
    reading = pending.read()
    assert reading.numbers.finite
    assert dict(zip(ASKS, reading.asked, strict=True))["time"] == 1


def test_a_non_finite_gradient_moves_nothing() -> None:
    engine, prepare = cast(configured("engine.device=cuda", "engine.precision=fp32"))
    batch = random_batch()
    prepared = prepare(batch.to(engine.device), 0)
    train(engine, prepared, steps=2)
    before = copy.deepcopy(engine.full_state_dict())
    poisoned = prepared._replace(targets=prepared.targets.clone().fill_(float("nan")))
    with engine.micro_batch(last=True):
        losses = engine.module(*poisoned.inputs)
        engine.backward(losses.total)
    result = engine.step(1e-3, 0.05)
    rates, asks = torch.zeros(2, device=engine.device), torch.zeros(len(ASKS), device=engine.device)
    pending = PendingStep(7, batch.sample_ids, losses, rates, result, asks, alone(engine.device))
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not pending.read().numbers.finite
