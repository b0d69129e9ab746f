"""One training step on CUDA: no host sync, the CPU's masks and losses, and bad steps skipped on the device."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmjd.builders.step import Step, build_step
from dmjd.compose import compose
from dmjd.data.batch import Batch
from dmjd.ops.images import normalise
from dmjd.parallel.world import alone
from dmjd.train.data_pipeline import Uploader
from dmjd.train.guard import PendingStep
from dmjd.train.stop import ASKS, Requests
from tests.train.shrunken import train

pytestmark = pytest.mark.gpu

LR = 1e-3


def build(*words: str) -> Step:
    return build_step(compose("pretrain", ["experiment=demo", "data=fashion_mnist", *words]))


def random_batch(size: int = 16, channels: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (size, 32, 32, channels), generator=generator, dtype=torch.uint8)
    return Batch(images, torch.arange(size), torch.zeros(size, dtype=torch.int64))


def test_masks_and_targets_are_those_of_the_cpu() -> None:
    prepare = build("engine.device=cpu").prepare
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
            step = build(f"engine.device={device}", "engine.precision=fp32")
            curves.append(train(step, random_batch().to(step.engine.device), 10, LR))
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
        step = build("engine.device=cuda", *words)
        curves[name] = train(step, random_batch().to(step.engine.device), 10, LR)
    assert curves["recomputed"] == curves["bf16"]
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=0.02)
    for compiled in ("blocks compiled", "model compiled"):
        assert curves[compiled] == pytest.approx(curves["bf16"], rel=0.02)


COLOUR = ("data.channels=3", "data.mean=[.5,.5,.5]", "data.std=[.2,.2,.2]", "data.jitter=.4")


def test_a_compiled_preparation_is_that_of_eager_mode() -> None:
    compiled = build("engine.device=cuda", "engine.compile=block", "target=pixels", *COLOUR).prepare
    eager = replace(compiled, compiled=False, compiled_target=False)
    assert compiled.compiled
    assert compiled.compiled_target
    batch = random_batch(64, channels=3).to(torch.device("cuda"))
    for epoch in (3, 4):
        expected, found = eager(batch, epoch), compiled(batch, epoch)
        # Jitter rounds down, and products that are added without rounding may be below a whole number.
        apart = (found.crops.int() - expected.crops.int()).abs()
        assert apart.max() <= 1
        assert apart.float().mean() < 1e-3
        torch.testing.assert_close(found.images, normalise(found.crops, eager.mean, eager.std), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.targets, compiled.tokenizer(found.crops), atol=1e-4, rtol=1e-4)


def test_a_step_never_waits_for_the_device(tmp_path: Path) -> None:
    accumulated = ("engine.grad_accum_steps=2", "optim.clip_grad=1.0", "backbone.drop_path=0.1", "ema_decay=.9")
    step = build("engine.device=cuda", *accumulated, *COLOUR)
    device = step.engine.device
    upload = Uploader(device)
    batch = Batch(*(field.pin_memory() for field in random_batch(channels=3)))
    pending = None
    requests = Requests(tmp_path, alone(device), deadline=0.0)  # which has passed, so that something is asked
    for number in range(4):
        if number:  # the first builds the optimizer's state
            torch.cuda.set_sync_debug_mode("error")
        try:
            losses, _ = step.forward_backward(upload(batch), 0)
            result = step.update(LR)
            asked = requests.asks(number)
            pending = PendingStep(number, batch.sample_ids, {"loss": losses.total}, result, asked, alone(device))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert pending is not None
    reading = pending.read()
    assert reading.numbers.finite
    assert dict(zip(ASKS, reading.asked, strict=True))["time"] == 1


def test_a_non_finite_gradient_moves_nothing() -> None:
    step = build("engine.device=cuda", "engine.precision=fp32")
    engine, batch = step.engine, random_batch()
    on_device = batch.to(engine.device)
    train(step, on_device, 2, LR)
    before = copy.deepcopy(engine.full_state_dict())
    prepared = step.prepare(on_device, 0)
    poisoned = prepared._replace(targets=prepared.targets.clone().fill_(float("nan")))
    spoiled = replace(step, prepare=lambda *_: poisoned)  # type: ignore[arg-type]
    losses, _ = spoiled.forward_backward(on_device, 0)
    result = step.update(LR)
    asks = torch.zeros(len(ASKS), device=engine.device)
    pending = PendingStep(7, batch.sample_ids, {"loss": losses.total}, result, asks, alone(engine.device))
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not pending.read().numbers.finite
