"""Duration of a training step and of its parts, on one GPU; synthetic uint8 batches that are on the device.

    python benchmarks/pretrain_step.py experiment=mae_dm_vit_base batch_size=256 [engine.compile=block] ...

Takes the arguments of `dmjd pretrain` and times the step that it trains. Prints the median step, its parts, images and
views per second, peak memory and MFU (bf16); --json FILE appends them with card, versions and date. family_steps.py
times all methods, and fine-tuning, with it.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from inputs import CLASSES, DIFFERENT, synthetic

from dmjd.accelerators import accelerator_of
from dmjd.builders.tasks import builders_of
from dmjd.compose import compose
from dmjd.config import FinetuneConfig, PretrainConfig
from dmjd.data.batch import Batch
from dmjd.models.flops import count_flops
from dmjd.parallel.build import select_device
from dmjd.parallel.world import alone

WARMUP, STEPS = 5, 20


def measure(config: PretrainConfig | FinetuneConfig, steps: int = STEPS) -> dict[str, Any]:
    """The median of ``steps`` steps and of their parts; a CPU's times are for trials of the benchmark alone."""
    assert config.engine.grad_accum_steps == 1, "parts of a step are timed; set engine.grad_accum_steps=1"
    builders = builders_of(config)
    step = builders.step(config, CLASSES, alone(select_device(config.engine.device)))
    device, module = step.engine.device, step.engine.module
    cuda = device.type == "cuda"
    module.train()
    pool = [synthetic(config, config.batch_size, config.batch_size * index).to(device) for index in range(DIFFERENT)]
    marks: list[Any] = []

    def mark(*_: Any) -> None:
        if not cuda:
            marks.append(time.perf_counter())
            return
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    module.register_forward_pre_hook(mark)
    module.register_forward_hook(mark)

    def train(batch: Batch) -> list[Any]:
        """Moments around the parts of a step."""
        marks.clear()
        mark()
        step.forward_backward(batch, 0)
        mark()
        step.update(1e-4)
        mark()
        return list(marks)

    def elapsed(first: Any, last: Any) -> float:
        return float(first.elapsed_time(last) if cuda else 1000 * (last - first))

    for index in range(min(WARMUP, steps)):
        train(pool[index % DIFFERENT])
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    timed = [train(pool[index % DIFFERENT]) for index in range(steps)]
    if cuda:
        torch.cuda.synchronize()
    parts = {
        name: median(elapsed(moments[at], moments[at + 1]) for moments in timed)
        for at, name in enumerate(("prepare", "forward", "backward", "optimizer"))
    }
    total = median(elapsed(moments[0], moments[-1]) for moments in timed)
    with torch.device("meta"):
        objective, prepared = builders.objective_and_inputs(config, CLASSES, builders.pair)
        flops = count_flops(objective, prepared.inputs) / builders.pair
    images = config.batch_size / total * 1000
    gpu = accelerator_of(torch.cuda.get_device_name(device)) if cuda else None
    return {
        "step_ms": total,
        **{f"{name}_ms": value for name, value in parts.items()},
        "images_per_second": images,
        **({"views_per_second": images * config.mask.views} if isinstance(config, PretrainConfig) else {}),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "tflop_per_image": flops / 1e12,
        "mfu_percent": 100 * flops * images / (gpu.tflops * 1e12) if gpu else None,
    }


def main() -> None:
    overrides = sys.argv[1:]
    target = None
    if "--json" in overrides:
        at = overrides.index("--json")
        target = Path(overrides[at + 1])
        del overrides[at : at + 2]
    config = compose("pretrain", overrides)
    assert torch.cuda.is_available(), "step times of a CPU say nothing about training; run this on a GPU"
    row = {
        "words": overrides,
        **measure(config),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    for name, value in row.items():
        print(f"{name:20} {value:.4g}" if isinstance(value, float) else f"{name:20} {value}")
    if target is not None:
        rows = json.loads(target.read_text()) if target.is_file() else []
        target.write_text(json.dumps([*rows, row], indent=1) + "\n")


if __name__ == "__main__":
    main()
