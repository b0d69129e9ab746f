"""What engines cost: images a second and peak memory per GPU, and whether they give the same losses.

    torchrun --standalone --nproc-per-node=2 benchmarks/engines.py --output engines.jsonl [--engines ddp,fsdp]
        [--models vit_large,convvit_large] [--micro 64,256] [engine.compile=block ...]

One launch walks all cells with one compiler cache, and rank 0 appends a line after each. Batches are synthetic and the
same for every engine; ``--micro`` counts images per GPU. Further words are those of `dmjd pretrain`, for every cell.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from dmjd.compose import compose
from dmjd.config import EngineConfig, PretrainConfig
from dmjd.data.batch import Batch
from dmjd.parallel.build import build_engine, select_device
from dmjd.parallel.engine import Engine
from dmjd.parallel.world import World, join_world
from dmjd.train.builders import build_mask_spec, build_objective, build_tokenizer, image_size, token_grid
from dmjd.train.preparation import Preparation

MODELS = {
    "vit_large": ("experiment=mae_vit_base", "backbone=vit_large"),
    "convvit_large": ("experiment=dmjd_convvit_large_hog",),
}
ENGINES = {
    "single": ("engine=single",),
    "ddp": ("engine=ddp",),
    "fsdp": ("engine=fsdp",),
    "fsdp_gathered": ("engine=fsdp", "engine.reshard_after_forward=false"),
    "hsdp": ("engine=hsdp", "engine.replicas=2"),
    "zero1": ("engine=zero1",),
    "zero2": ("engine=zero2",),
    "zero3": ("engine=zero3",),
}
WARMUP, STEPS, BATCHES = 10, 40, 4
LR, WEIGHT_DECAY = 1e-4, 0.05


def measure(config: PretrainConfig, world: World, micro: int) -> dict[str, Any]:
    """Losses of all steps, and the speed and memory of those after the warm-up."""
    torch.manual_seed(0)
    torch._dynamo.reset()  # else a second batch size would compile for sizes in general
    grid = token_grid(config)
    spec, tokenizer = build_mask_spec(config.mask, grid), build_tokenizer(config)
    begin = time.perf_counter()
    engine = build_engine(build_objective(config, tokenizer.dim), config.engine, config.optim, world)
    data = config.data
    prepare = Preparation(spec, grid, tokenizer, tuple(data.mean), tuple(data.std), flip=data.flip, seed=0)
    pool = [synthetic(config, world, micro, index) for index in range(BATCHES)]
    losses = [step(engine, prepare, pool[index % BATCHES]) for index in range(WARMUP)]
    synchronize(world.device)
    started = time.perf_counter() - begin
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    losses += [step(engine, prepare, pool[index % BATCHES]) for index in range(WARMUP, WARMUP + STEPS)]
    synchronize(world.device)
    seconds = (time.perf_counter() - begin) / STEPS
    peaks = world.gather(torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else None)
    curve = world.mean(torch.stack(losses)).tolist()
    engine.close()
    return {
        "images_per_second_per_gpu": micro / seconds,
        "step_ms": 1000 * seconds,
        "peak_gib": peaks,
        "start_seconds": started,
        "losses": curve,
    }


def step(engine: Engine, prepare: Preparation, batch: Batch) -> torch.Tensor:
    prepared = prepare(batch, 0)
    with engine.micro_batch(last=True):
        losses = engine.module(*prepared.inputs)
        engine.backward(losses.total)
    engine.step(LR, WEIGHT_DECAY)
    return losses.total.detach()


def synthetic(config: PretrainConfig, world: World, micro: int, index: int) -> Batch:
    """Smooth noise: there is something to learn, and HOG of white noise would be the same everywhere."""
    generator = torch.Generator().manual_seed(1000 * index + world.rank)
    height, width = image_size(config)
    coarse = torch.rand(micro, config.data.channels, height // 16, width // 16, generator=generator)
    images = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    ids = torch.arange(micro) + micro * (world.rank + world.size * index)
    return Batch((255 * images).byte().permute(0, 2, 3, 1).contiguous(), ids, ids).to(world.device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engines", default="ddp,fsdp", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--micro", default="64")
    options, words = parser.parse_known_args()
    models, engines = options.models.split(","), options.engines.split(",")
    sizes = [int(size) for size in options.micro.split(",")]
    first = compose("pretrain", [*ENGINES[engines[0]], *words])
    assert isinstance(first, PretrainConfig)
    meeting = EngineConfig("fsdp")  # a group of processes whatever their number, for all engines
    world = join_world(select_device(first.engine.device), meeting)
    for model in models:
        for micro in sizes:
            for name in engines:
                batch = f"batch_size={micro * world.size}"
                config = compose("pretrain", [*MODELS[model], *ENGINES[name], batch, *words])
                cell = {"model": model, "engine": name, "gpus": world.size, "micro_batch": micro, "words": words}
                try:
                    cell |= measure(config, world, micro)
                except torch.OutOfMemoryError as error:  # on every rank alike: they hold the same
                    cell["out_of_memory"] = str(error).splitlines()[0]
                gc.collect()
                if world.device.type == "cuda":
                    torch.cuda.empty_cache()
                    cell["card"] = torch.cuda.get_device_name()
                cell |= {"torch": torch.__version__, "date": date.today().isoformat()}
                if world.is_main:
                    with options.output.open("a") as file:
                        file.write(json.dumps(cell) + "\n")
                    print({key: value for key, value in cell.items() if key not in ("losses", "words")}, flush=True)
    world.close()


if __name__ == "__main__":
    main()
