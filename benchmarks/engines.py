"""Images per second, peak memory per GPU and losses of each engine.

    torchrun --standalone --nproc-per-node=2 benchmarks/engines.py --output engines.jsonl [--engines ddp,fsdp]
        [--models vit_large,convvit_large:192] [--micro 64,256] [--input device,pinned,shards] [--shards FOLDER]
        [--save FOLDER] [engine.compile=block ...]

One launch measures all cells with one compiler cache, and rank 0 appends a line of JSON after each. ``--micro`` is the
number of images per GPU, for models without a number of their own. Further arguments are those of `dmjd pretrain`, for
every cell; the step is the one that it trains, with drop path, jitter and an average if configured.

Batches are the same for every engine: synthetic and on the device, or uploaded from pinned memory as in a run, or read
from shards (``workers=N``); a missing FOLDER is filled with photographs. Several inputs have a row each and share one
engine; ``start_seconds`` is the time until ten steps on this input are done. ``--save`` adds the checkpoint stalls to
the first row, and needs disk space for two checkpoints.

``host_ms`` is the time in which the host launches a step on an idle device; close to ``step_ms``, the step is bound by
the CPU. (On a busy device the host also waits for space in the launch queue.) ``own_ms`` of a rank is the time from the
batch to its losses, before it waits for other ranks: a slow GPU shows there.

    python benchmarks/engines.py --summary FILE ...

prints such files as tables, with the efficiency relative to one GPU (``scaling.py``).

    python benchmarks/engines.py --simulated 2,8 --output host.jsonl [--engines ddp,fsdp ...]

is one process that acts as rank 0 of 2 and then of 8 (``simulated_world.py``): engines do the host's work of that world
size, communication is free, and losses, which are wrong, are not stored. On a CPU a deep, very narrow model
(``backbone.embed_dim=64 method.decoder.dim=64``) leaves little but the host's time.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cell import Cell
from inputs import INPUTS, provide_shards
from scaling import summary
from simulated_world import SimulatedWorld, simulate_world

from dmjd.builders.step import flops_per_image
from dmjd.compose import compose
from dmjd.config import EngineConfig, PretrainConfig
from dmjd.data.decode import jpeg_decoder
from dmjd.parallel.build import select_device
from dmjd.parallel.world import World, join_world
from dmjd.train.throughput import Throughput

MODELS = {
    "vit_large": ("experiment=mae_vit_base", "backbone=vit_large"),
    "vit_2b": ("experiment=mae_vit_base", "backbone=vit_2b"),
    "vit_large_dm": ("experiment=mae_dm_vit_large",),
    "convvit_large": ("experiment=dmjd_convvit_large_hog",),
}
ENGINES = {
    "single": ("engine=single",),
    "ddp": ("engine=ddp",),
    "fsdp": ("engine=fsdp",),
    "fsdp_resharded": ("engine=fsdp", "engine.reshard_after_forward=true"),
    "fsdp_by_4": ("engine=fsdp", "engine.blocks_per_unit=4"),
    "ddp_25": ("engine=ddp", "engine.bucket_mb=25"),
    "hsdp": ("engine=hsdp",),
    "zero1": ("engine=zero1",),
    "zero2": ("engine=zero2",),
    "zero2_offloaded": ("engine=zero2", "engine.offload_optimizer=true"),
    "zero3": ("engine=zero3",),
    "zero3_offloaded": ("engine=zero3", "engine.offload_optimizer=true"),
    "zero3_resharded": ("engine=zero3", "engine.reshard_after_forward=true"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    act = parser.add_mutually_exclusive_group(required=True)
    act.add_argument("--output", type=Path)
    act.add_argument("--summary", type=Path, nargs="+", metavar="FILE", help="print these files as tables")
    parser.add_argument("--engines", default="ddp,fsdp", help=f"of {', '.join(ENGINES)}")
    parser.add_argument(
        "--models", default="vit_large,convvit_large", help=f"of {', '.join(MODELS)}; NAME or NAME:MICRO"
    )
    parser.add_argument("--micro", default="64")
    parser.add_argument("--input", default="device", help=f"of {', '.join(INPUTS)}")
    parser.add_argument("--shards", type=Path, metavar="FOLDER", help="for --input shards")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="measure checkpoint stalls; files are removed")
    parser.add_argument("--offload-activations", action="store_true", help="to host memory; without engine.compile")
    parser.add_argument("--simulated", metavar="RANKS", help="act as rank 0 of so many processes")
    options, overrides = parser.parse_known_args()
    if options.summary:
        print(summary(options.summary))
        return
    inputs = options.input.split(",")
    if unknown := set(inputs) - set(INPUTS):
        parser.error(f"--input {unknown.pop()} is none of {', '.join(INPUTS)}")
    if "shards" in inputs and options.shards is None:
        parser.error("--input shards needs --shards FOLDER")
    first = compose("pretrain", [*ENGINES[options.engines.split(",")[0]], *overrides])
    assert isinstance(first, PretrainConfig)
    device = select_device(first.engine.device)
    if options.simulated is None:
        meeting = EngineConfig("fsdp")  # a group of processes whatever their number, for all engines
        walk(options, overrides, join_world(device, meeting))
    else:
        for size in options.simulated.split(","):
            walk(options, overrides, simulate_world(device, int(size)))


def plan(options: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Model, images of a GPU, and engine of every cell."""
    models = [model.partition(":") for model in options.models.split(",")]
    return [
        (model, int(size), engine)
        for model, _, own in models
        for size in (own or options.micro).split(",")
        for engine in options.engines.split(",")
    ]


def engine_overrides(name: str, world: World) -> tuple[str, ...]:
    """Those of ``ENGINES``; HSDP's copies are the hosts or, on one host, its two halves."""
    halves = name == "hsdp" and world.local_size == world.size and world.size % 2 == 0
    return (*ENGINES[name], "engine.replicas=2") if halves else ENGINES[name]


def walk(options: argparse.Namespace, overrides: list[str], world: World) -> None:
    """Measure every cell, append each row at once, and leave the world."""
    cells = plan(options)
    shards: list[str] = []  # not stored with the other overrides: they name a folder of this machine
    if options.shards is not None:
        shards = ["data=shards", f"data.root={options.shards}"]
        provide_shards(options.shards, max(micro for _, micro, _ in cells) * world.size, world)
    throughputs: dict[str, Throughput] = {}  # of each model once, since FLOPs are counted
    for model, micro, name in cells:
        own = [*overrides, *engine_overrides(name, world)]
        config = compose("pretrain", [*MODELS[model], *own, *shards, f"batch_size={micro * world.size}"])
        assert isinstance(config, PretrainConfig)
        if model not in throughputs:
            throughputs[model] = Throughput.of(config.mask.views, partial(flops_per_image, config), world)
        named = {"model": model, "engine": name, "gpus": world.size, "micro_batch": micro, "words": own}
        if options.offload_activations:
            named["offload_activations"] = True
        if isinstance(world, SimulatedWorld):
            named |= {"gpus": 1, "simulated": world.size}
        if world.device.type == "cuda":
            named["card"] = torch.cuda.get_device_name()
        named |= {"torch": torch.__version__, "date": date.today().isoformat()}
        for row in measure(config, world, micro, throughputs[model], options):
            if world.is_main:
                append(options.output, named | row)
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    world.close()


def measure(
    config: PretrainConfig, world: World, micro: int, throughput: Throughput, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row per input; the last has ``out_of_memory`` if memory ran out."""
    kinds = options.input.split(",")
    row: dict[str, Any] = {"input": kinds[0]}
    try:
        cell = Cell(config, world, micro, throughput, offload_activations=options.offload_activations)
        for kind in kinds:
            row = {"input": kind}
            if kind == "shards":
                row |= {"workers": config.workers, "decoder": jpeg_decoder()}
            yield row | cell.measure(kind, options.save if kind == kinds[0] else None)
        cell.close()
    except torch.OutOfMemoryError as error:  # on every rank alike: they hold the same
        yield row | {"out_of_memory": str(error).splitlines()[0]}


def append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    print({key: value for key, value in row.items() if key not in ("losses", "words", "ranks")}, flush=True)


if __name__ == "__main__":
    main()
