"""How long is a training step, and where does it go? Synthetic uint8 batches, already on the device.

    python benchmarks/pretrain_step.py experiment=mae_dm_vit_base batch_size=256 [engine.compile=block] ...

Takes the words of `dmjd pretrain`. Prints the median step, its parts, images and views a second, peak memory and the
share of the device's bf16 peak that the counted FLOPs reach; --json FILE keeps them with card, versions and date.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dmjd.accelerators import accelerator_of
from dmjd.builders import build_mask_spec, build_objective, build_tokenizer, image_size, token_grid
from dmjd.builders.preparation import Preparation
from dmjd.builders.step import flops_per_image
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.parallel.build import build_engine

WARMUP, STEPS, BATCHES = 5, 20, 4


def measure(config: PretrainConfig) -> dict[str, Any]:
    grid = token_grid(config)
    spec, tokenizer = build_mask_spec(config.mask, grid), build_tokenizer(config)
    engine = build_engine(build_objective(config, tokenizer.dim), config.engine, config.optim)
    device, data = engine.device, config.data
    assert device.type == "cuda", "step times of a CPU say nothing about training; run this on a GPU"
    prepare = Preparation(spec, grid, tokenizer, tuple(data.mean), tuple(data.std), flip=data.flip, seed=0)
    shape = (config.batch_size, *image_size(config), data.channels)
    ids = torch.arange(config.batch_size, device=device)
    # Several batches in turn: one alone would sit in the L2 cache.
    pool = [Batch(torch.randint(0, 256, shape, dtype=torch.uint8, device=device), ids, ids) for _ in range(BATCHES)]

    def step(batch: Batch, marks: list[torch.cuda.Event]) -> None:
        def mark() -> None:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

        mark()
        prepared = prepare(batch, 0)
        mark()
        with engine.micro_batch(last=True):
            losses = engine.module(prepared.images, prepared.masked_views, prepared.targets)
            mark()
            engine.backward(losses.total)
        mark()
        engine.step(1e-4, 0.05)
        mark()

    for index in range(WARMUP):
        step(pool[index % BATCHES], [])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    timed: list[list[torch.cuda.Event]] = [[] for _ in range(STEPS)]
    for index, marks in enumerate(timed):
        step(pool[index % BATCHES], marks)
    torch.cuda.synchronize()
    parts = {
        name: median(marks[at].elapsed_time(marks[at + 1]) for marks in timed)
        for at, name in enumerate(("prepare", "forward", "backward", "optimizer"))
    }
    total = median(marks[0].elapsed_time(marks[-1]) for marks in timed)
    peak = torch.cuda.max_memory_allocated() / 2**30
    flops = flops_per_image(config)
    images = config.batch_size / total * 1000
    card = torch.cuda.get_device_name(device)
    gpu = accelerator_of(card)
    return {
        "step_ms": total,
        **{f"{name}_ms": value for name, value in parts.items()},
        "images_per_second": images,
        "views_per_second": images * spec.views,
        "peak_gib": peak,
        "tflop_per_image": flops / 1e12,
        "mfu_percent": 100 * flops * images / (gpu.tflops * 1e12) if gpu else None,
    }


def main() -> None:
    words = sys.argv[1:]
    target = None
    if "--json" in words:
        at = words.index("--json")
        target = Path(words[at + 1])
        del words[at : at + 2]
    config = compose("pretrain", words)
    row = {
        "words": words,
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
