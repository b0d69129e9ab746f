"""What engines cost: images a second and peak memory per GPU, and whether they give the same losses.

    torchrun --standalone --nproc-per-node=2 benchmarks/engines.py --output engines.jsonl [--engines ddp,fsdp]
        [--models vit_large,convvit_large] [--micro 64,256] [engine.compile=block ...]

One launch walks all cells with one compiler cache, and rank 0 appends a line after each. Batches are synthetic and the
same for every engine; ``--micro`` counts images per GPU. Further words are those of `dmjd pretrain`, for every cell.

``host_ms`` is how long a step keeps the host where it finds an idle device: close to ``step_ms``, the host is the
bound. (Without the idle device it tells nothing: the host waits wherever its launches fill the device's queue.)

    python benchmarks/engines.py --simulated 2,8 --output host.jsonl [--engines ddp,fsdp ...]

is one process that takes itself for rank 0 of 2 and then of 8 (``simulated_world.py``): engines do on the host what
they do among so many, communication costs next to nothing, and losses, which would be wrong, are not kept. On a CPU a
model as deep and very narrow (``backbone.embed_dim=64 method.decoder.dim=64``) leaves little but the host's time.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from simulated_world import SimulatedWorld, answer_buckets, simulate_world

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
    "fsdp_by_1": ("engine=fsdp", "engine.blocks_per_unit=1"),
    "fsdp_by_2": ("engine=fsdp", "engine.blocks_per_unit=2"),
    "ddp_25": ("engine=ddp", "engine.bucket_mb=25"),
    "hsdp": ("engine=hsdp", "engine.replicas=2"),
    "zero1": ("engine=zero1",),
    "zero2": ("engine=zero2",),
    "zero3": ("engine=zero3", "engine.compile=none"),  # whose hooks cannot be compiled
}
WARMUP, STEPS, IDLE_STEPS, BATCHES = 10, 40, 10, 4
LR, WEIGHT_DECAY = 1e-4, 0.05


def measure(config: PretrainConfig, world: World, micro: int) -> dict[str, Any]:
    """Losses of all steps, and the speed and memory of those after the warm-up."""
    torch.manual_seed(0)
    torch._dynamo.reset()  # else a second batch size would compile for sizes in general
    grid = token_grid(config)
    spec, tokenizer = build_mask_spec(config.mask, grid), build_tokenizer(config)
    begin = time.perf_counter()
    engine = build_engine(build_objective(config, tokenizer.dim), config.engine, config.optim, world)
    simulated = isinstance(world, SimulatedWorld)
    if simulated:
        answer_buckets(engine)
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
    host = [on_idle_device(engine, prepare, pool[index % BATCHES]) for index in range(IDLE_STEPS)]
    engine.close()
    result = {
        "images_per_second_per_gpu": micro / seconds,
        "step_ms": 1000 * seconds,
        "host_ms": 1000 * median(host),
        "peak_gib": peaks,
        "start_seconds": started,
    }
    return result if simulated else result | {"losses": curve}


def step(engine: Engine, prepare: Preparation, batch: Batch) -> torch.Tensor:
    prepared = prepare(batch, 0)
    with engine.micro_batch(last=True):
        losses = engine.module(*prepared.inputs)
        engine.backward(losses.total)
    engine.step(LR, WEIGHT_DECAY)
    return losses.total.detach()


def on_idle_device(engine: Engine, prepare: Preparation, batch: Batch) -> float:
    """Seconds until the host has told an idle device all of a step."""
    synchronize(engine.device)
    begin = time.perf_counter()
    step(engine, prepare, batch)
    return time.perf_counter() - begin


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
    parser.add_argument("--simulated", metavar="RANKS", help="one process that takes itself for rank 0 of so many")
    options, words = parser.parse_known_args()
    first = compose("pretrain", [*ENGINES[options.engines.split(",")[0]], *words])
    assert isinstance(first, PretrainConfig)
    device = select_device(first.engine.device)
    if options.simulated is None:
        meeting = EngineConfig("fsdp")  # a group of processes whatever their number, for all engines
        walk(options, words, join_world(device, meeting))
    else:
        for size in options.simulated.split(","):
            walk(options, words, simulate_world(device, int(size)))


def walk(options: argparse.Namespace, words: list[str], world: World) -> None:
    """Measure every cell, and leave the world."""
    for model in options.models.split(","):
        for micro in (int(size) for size in options.micro.split(",")):
            for name in options.engines.split(","):
                batch = f"batch_size={micro * world.size}"
                own = [*words, *ENGINES[name]]
                config = compose("pretrain", [*MODELS[model], *own, batch])
                assert isinstance(config, PretrainConfig)
                cell = {"model": model, "engine": name, "gpus": world.size, "micro_batch": micro, "words": own}
                if isinstance(world, SimulatedWorld):
                    cell |= {"gpus": 1, "simulated": world.size}
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
