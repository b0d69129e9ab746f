"""What is compiled, replayed as CUDA graphs: the same bits, in memory that does not grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.builders.step import Step, build_step
from dmjd.compose import compose
from dmjd.data.batch import Batch
from tests.compare import rows
from tests.train import shrunken
from tests.train.shrunken import configure, shrink, smooth_batch, write_dvae

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WORDS = ("experiment=demo", "data=fashion_mnist", "backbone.drop_path=0.2", "optim.clip_grad=1.0")
PARTS, STEPS, SETTLED = 2, 8, 4


@pytest.fixture(autouse=True)
def compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen by timing them, and a choice decides the order of sums: both runs of a test read the same."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def build(*words: str) -> Step:
    accumulated = f"engine.grad_accum_steps={PARTS}"
    return build_step(compose("pretrain", [*WORDS, "engine.device=cuda", accumulated, *words]))


def numbered_batch(number: int, size: int = 16 * PARTS) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (size, 32, 32, 1), generator=generator, dtype=torch.uint8)
    ids = torch.arange(size) + size * number
    return Batch(images, ids, ids).to(CUDA)


def train(step: Step, numbers: range) -> tuple[list[float], list[int]]:
    """Losses and gradient norms, and the bytes that torch holds after each step."""
    seen, held = [], []
    for number in numbers:
        losses, _ = step.forward_backward(numbered_batch(number), 0)
        seen += [losses.total, step.update(1e-3).grad_norm]
        held.append(torch.cuda.memory_reserved())
    return torch.stack(seen).tolist(), held


@pytest.mark.parametrize(
    ("unit", "mode"),
    [
        *(("block", "none"), ("block", "mlp"), ("block", "full"), ("block", "selective")),
        *(("model", "none"), ("model", "full"), ("model", "selective")),
    ],
)
def test_graphs_change_no_bit(unit: str, mode: str, tmp_path: Path) -> None:
    words = (f"engine.compile={unit}", f"engine.activation_checkpointing={mode}")
    torch._dynamo.reset()
    expected, _ = train(build(*words), range(STEPS))

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = build(*words, "engine.cuda_graphs=true")
    found, _ = train(step, range(SETTLED))
    step.engine.save(tmp_path, {})()
    rest, held = train(step, range(SETTLED, STEPS))
    assert found + rest == expected
    assert len(set(held)) == 1, "graphs are recorded once"
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]

    step.engine.load(tmp_path, {})  # as the guard does, into parameters that graphs know
    assert train(step, range(SETTLED, STEPS))[0] == rest


@pytest.mark.parametrize("unit", ["block", "model"])
@pytest.mark.parametrize("experiment", ["simmim_swin_base", "beit_vit_base", "data2vec_vit_base", "convmae_base"])
def test_graphs_change_no_bit_of_other_methods(experiment: str, unit: str, tmp_path: Path) -> None:
    weights = {"dvae": write_dvae(tmp_path / "dvae.pt")}
    losses = []
    for graphs in (False, True):
        torch._dynamo.reset()
        config = shrink(configure(experiment), weights, device="cuda", compile=unit, cuda_graphs=graphs)
        step = build_step(config)
        losses.append(shrunken.train(step, smooth_batch(step, 8), STEPS, 1e-3))
    assert losses[0] == losses[1]


def test_graphs_take_less_of_the_host() -> None:
    """Of 12 narrow blocks the host is the bound, which is what graphs are for."""
    milliseconds = []
    for graphs in ("false", "true"):
        torch._dynamo.reset()
        words = ("backbone.depth=12", "engine.compile=block", f"engine.cuda_graphs={graphs}")
        step = build(*words)
        train(step, range(STEPS))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        train(step, range(20))
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    assert milliseconds[1] < 0.8 * milliseconds[0]


@pytest.mark.parametrize(
    "size",
    [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"))],
)
def test_a_run_with_graphs_is_the_run_without(
    size: int, tmp_path: Path, tiny: Callable[..., list[str]], launch_world: Callable[..., Any]
) -> None:
    """With its checkpoints and pictures, accumulation, and the first backward of DDP that is thrown away."""
    curves = []
    for graphs in ("false", "true"):
        run = tmp_path / graphs
        words = tiny(run, "engine=ddp", "engine.device=cuda", "engine.compile=block", f"engine.cuda_graphs={graphs}")
        words += ["batch_size=64", "engine.grad_accum_steps=2", "log_every=1", "checkpoint_every=5", "workers=1"]
        processes = launch_world(size, ["pretrain", *words])
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [0] * size
        curves.append(rows(run))
    assert curves[0] == curves[1]
    assert len(curves[0]) == 22
