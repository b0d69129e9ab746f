"""Duration of a training step and of its parts, on one GPU; synthetic uint8 batches that are on the device.

    python benchmarks/pretrain_step.py experiment=mae_dm_vit_base batch_size=256 [engine.compile=block] ...

Takes the arguments of `dmjd pretrain` and times the step that it trains. Prints the median step, its parts, images and
views per second, peak memory and MFU (bf16); --json FILE appends them with card, versions and date.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from inputs import DIFFERENT, synthetic

from dmjd.accelerators import accelerator_of
from dmjd.builders.step import build_step, flops_per_image
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch

WARMUP, STEPS = 5, 20


def measure(config: PretrainConfig) -> dict[str, Any]:
    assert config.engine.grad_accum_steps == 1, "parts of a step are timed; set engine.grad_accum_steps=1"
    step = build_step(config)
    device, module = step.engine.device, step.engine.module
    assert device.type == "cuda", "step times of a CPU say nothing about training; run this on a GPU"
    pool = [synthetic(config, config.batch_size, config.batch_size * index).to(device) for index in range(DIFFERENT)]
    marks: list[torch.cuda.Event] = []

    def mark(*_: Any) -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    module.register_forward_pre_hook(mark)
    module.register_forward_hook(mark)

    def train(batch: Batch) -> list[torch.cuda.Event]:
        """Events around the parts of a step."""
        marks.clear()
        mark()
        step.forward_backward(batch, 0)
        mark()
        step.update(1e-4)
        mark()
        return list(marks)

    for index in range(WARMUP):
        train(pool[index % DIFFERENT])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    timed = [train(pool[index % DIFFERENT]) for index in range(STEPS)]
    torch.cuda.synchronize()
    parts = {
        name: median(events[at].elapsed_time(events[at + 1]) for events in timed)
        for at, name in enumerate(("prepare", "forward", "backward", "optimizer"))
    }
    total = median(events[0].elapsed_time(events[-1]) for events in timed)
    peak = torch.cuda.max_memory_allocated() / 2**30
    flops = flops_per_image(config)
    images = config.batch_size / total * 1000
    card = torch.cuda.get_device_name(device)
    gpu = accelerator_of(card)
    return {
        "step_ms": total,
        **{f"{name}_ms": value for name, value in parts.items()},
        "images_per_second": images,
        "views_per_second": images * config.mask.views,
        "peak_gib": peak,
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
