"""Training steps of segmentation and detection on one GPU, and ViT-B's backbone beside detectron2's own.

    python benchmarks/dense_step.py [--detectron2 FOLDER] [--only PART ...] [--ways WAY ...] [--limit SECONDS]
    python benchmarks/dense_step.py --plan         afterwards, on any machine: `dmjd plan` beside the measured peaks
    python benchmarks/dense_step.py --table        the rows of docs/dense.md

Parts, in this order (--only takes names and patterns such as "coco_*"):

    depthwise, attention   the two operations of whole images, by several ways each (dense_ops.py)
    vit_base:4 vit_large:2 forward and backward of ViT, windows and decomposed relative positions, with the simple
                           feature pyramid, images of 1024 pixels: detectron2's own, as it is and compiled, and ours;
                           the number is that of images. FOLDER is a checkout of facebookresearch/detectron2
    convvit_base:512:16    feature maps of whole images of ConvViT, forward and backward: maps, or blocks of visible
    convvit_base:1024:4    tokens with every token visible
    ade20k_* coco_*        a training step of each preset: 512 pixels, 16 images, or 1024 pixels, 8 images, halved until
                           they fit
    repeat:PRESET          20 steps twice from one seed: the largest relative difference of their losses

bfloat16 autocast over float32 parameters on all sides; images, labels and objects are on the device. Rows are written
after each way, and those that FILE holds of this card and torch are not measured again, except with --again; after
SECONDS no other row is begun. --tiny tries all parts with small models, without a GPU too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import dense_ops
import detectron2_vit
import numpy
import timing
import torch
from step_record import Deadline, Record, clean, parse
from torch import Tensor, nn

from dmjd.accelerators import accelerator_of
from dmjd.builders.model import build_encoder
from dmjd.builders.plan import Plan
from dmjd.builders.tasks import builders_of
from dmjd.compose import compose
from dmjd.data.batch import Batch
from dmjd.models.flops import count_flops
from dmjd.ops.views import Views
from dmjd.parallel.build import select_device
from dmjd.parallel.world import alone
from dmjd.resources import configs_dir

WARMUP, STEPS = 4, 12
DIFFERENT = 2
CLASSES = {"segment": 150, "detect": 80}
IMAGES = {"segment": 16, "detect": 8}
OPS = ("depthwise", "attention")
BACKBONES = ("vit_base:4", "vit_large:2")
CONVVITS = ("convvit_base:512:16", "convvit_base:1024:4")
REPEATS = ("repeat:ade20k_mae_vit_base", "repeat:ade20k_dmjd_convvit_base", "repeat:coco_vitdet_base")
REPEATED = 20
KEY = ("part", "way", "case")
COMPILED = {"eager": "none", "blocks compiled": "block", "compiled": "model"}
WAYS = ("eager", "blocks compiled")
"""Of presets, unless --ways names others."""

TINY = {
    "vit": ("backbone.embed_dim=32", "backbone.depth=4", "backbone.num_heads=2"),
    "convvit": (
        *("backbone.embed_dim=32", "backbone.depth=5", "backbone.num_heads=2"),
        "backbone.conv_stages.embed_dims=[16,24]",
    ),
    "swin": ("backbone.embed_dim=64", "backbone.windows.depths=[1,1,2,1]", "backbone.windows.num_heads=[1,1,2,2]"),
}
TINY_COMMAND = {
    "segment": (
        *("data.image_size=[64,64]", "test.mode=slide", "test.stride=[32,32]"),
        *("head.maps=null", "head.channels=16", "head.auxiliary_channels=16"),
    ),
    "detect": (
        *("data.image_size=[64,64]", "head.channels=16", "head.box_width=32"),
        *("head.proposals_before=50", "head.proposals=20", "head.samples=16"),
    ),
}


def tiny_keys(command: str, preset: str) -> list[str]:
    """Keys that make ``preset`` small enough for a CPU."""
    config = compose(command, _keys(command, preset))
    keys = [*TINY[config.backbone.name], *TINY_COMMAND[command], "engine.device=cpu"]
    return [*keys, "attention.global_blocks=[1,3]"] if config.attention.global_blocks else keys


def _keys(command: str, preset: str) -> list[str]:
    return [f"preset={preset}"] if command.startswith("plan_") else ["init=null", f"preset={preset}"]


def presets() -> list[str]:
    """Names of the dense presets, those of segmentation first."""
    return [path.stem for kind in ("ade20k", "coco") for path in sorted(configs_dir().glob(f"preset/{kind}_*.yaml"))]


def command_of(preset: str) -> str:
    return "segment" if preset.startswith("ade20k") else "detect"


class OpTable(timing.Table):
    """Rows of dense_ops.py in the record."""

    def __init__(self, record: Record, part: str) -> None:
        super().__init__(part, str(record.head["device"]))
        self.record = record

    def add(self, *arguments: Any, **options: Any) -> timing.Row:
        row = super().add(*arguments, **options)
        own = {"part": self.benchmark, "way": row.way, "case": row.case, "us": row.median_us}
        self.record.add(own | {"over_floor": row.over_floor}, *KEY)
        return row


def timed(step: Callable[[int], Any], images: int, device: str, tiny: bool) -> dict[str, Any]:
    """Median milliseconds of ``step``, images per second, peak GiB."""
    warmup, steps = (1, 2) if tiny else (WARMUP, STEPS)
    for index in range(warmup):
        step(index)
    if device == "cpu":
        moments = [time.perf_counter()]
        for index in range(steps):
            step(index)
            moments.append(time.perf_counter())
        total, peak = 1000 * median(then - first for first, then in pairwise(moments)), None
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for index in range(steps):
            step(index)
            marks[index + 1].record()
        torch.cuda.synchronize()
        total = median(first.elapsed_time(then) for first, then in pairwise(marks))
        peak = torch.cuda.max_memory_allocated() / 2**30
    return {"step_ms": total, "images": images, "images_per_second": images / total * 1000, "peak_gib": peak}


def rates(row: dict[str, Any], flops_per_image: int) -> dict[str, Any]:
    """``row`` with model FLOPs, MFU, and the time that they take at the peak rate of the card."""
    gpu = accelerator_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    row["tflop_per_image"] = flops_per_image / 1e12
    if gpu is not None:
        row["floor_ms"] = 1000 * row["images"] * flops_per_image / (gpu.tflops * 1e12)
        row["mfu_percent"] = 100 * row["floor_ms"] / row["step_ms"]
    return row


# A training step of a preset


def regions_batch(images: int, size: tuple[int, int], classes: int, seed: int) -> Batch:
    """Smooth noise, and a class for each square of 32 pixels; one in sixteen has none."""
    draws = torch.Generator().manual_seed(seed)
    maps = torch.randint(0, classes, (images, 1, -(-size[0] // 32), -(-size[1] // 32)), generator=draws)
    maps[torch.rand(maps.shape, generator=draws) < 1 / 16] = 255
    maps = maps.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, 0, : size[0], : size[1]]
    return Batch(_noise(images, size, draws), _ids(images, seed), _ids(images, seed), maps=maps.byte().contiguous())


OBJECTS = 7
"""Of an image: COCO has 7.3."""


def objects_batch(images: int, size: tuple[int, int], classes: int, seed: int) -> Batch:
    """Smooth noise with :data:`OBJECTS` ellipses of 1/32 to 1/2 of the image's sides."""
    draws = torch.Generator().manual_seed(seed)
    sides = torch.tensor([size[1], size[0]]).float()
    extent = sides * 2.0 ** -(1 + 4 * torch.rand(images, OBJECTS, 2, generator=draws))
    first = (sides - extent) * torch.rand(images, OBJECTS, 2, generator=draws)
    centre = first + extent / 2
    x, y = torch.arange(size[1]) + 0.5, torch.arange(size[0]) + 0.5
    across = ((x - centre[..., :1]) / (extent[..., :1] / 2)) ** 2
    down = ((y - centre[..., 1:]) / (extent[..., 1:] / 2)) ** 2
    inside = across.unsqueeze(-2) + down.unsqueeze(-1) <= 1
    return Batch(
        _noise(images, size, draws),
        _ids(images, seed),
        torch.randint(0, classes, (images, OBJECTS), generator=draws),
        boxes=torch.cat((first, first + extent), -1),
        masks=torch.from_numpy(numpy.packbits(inside.numpy(), axis=-1)),
    )


def _noise(images: int, size: tuple[int, int], draws: torch.Generator) -> Tensor:
    coarse = torch.rand(images, 3, 16, 16, generator=draws)
    fine = nn.functional.interpolate(coarse, size, mode="bilinear")
    return (255 * fine).byte().permute(0, 2, 3, 1).contiguous()


def _ids(images: int, seed: int) -> Tensor:
    return images * seed + torch.arange(images)


def preset_row(preset: str, way: str, images: int, device: str, tiny: bool, recompute: str) -> dict[str, Any]:
    """Halves ``images`` until they fit."""
    while True:
        try:
            return _preset_row(preset, way, images, device, tiny, recompute)
        except torch.OutOfMemoryError:
            if images == 1:
                raise
            images //= 2
        clean()


def _preset_row(preset: str, way: str, images: int, device: str, tiny: bool, recompute: str) -> dict[str, Any]:
    command = command_of(preset)
    engine = [f"engine.compile={COMPILED[way]}", f"engine.activation_checkpointing={recompute}"]
    keys = [*_keys(command, preset), f"batch_size={images}", *engine, *(tiny_keys(command, preset) if tiny else [])]
    config = compose(command, keys)
    step, pool = step_and_batches(command, config, images)

    def train(index: int) -> None:
        step.forward_backward(pool[index % DIFFERENT], index)
        step.update(1e-4)

    row = timed(train, images, device, tiny)
    with torch.device("meta"):
        objective, inputs = builders_of(config).objective_and_inputs(config, CLASSES[command], 1)
        row = rates(row, count_flops(objective, inputs.inputs))
    return row | {"keys": keys}


def step_and_batches(command: str, config: Any, images: int) -> tuple[Any, list[Batch]]:
    step: Any = builders_of(config).step(config, CLASSES[command], alone(select_device(config.engine.device)))
    step.engine.module.train()
    make = {"segment": regions_batch, "detect": objects_batch}[command]
    size = tuple(config.data.image_size)
    return step, [make(images, size, CLASSES[command], seed).to(step.engine.device) for seed in range(DIFFERENT)]


def repeat_row(preset: str, tiny: bool) -> dict[str, Any]:
    """Relative differences of the losses of two trainings from one seed, at the first step and the largest."""
    command = command_of(preset)
    keys = [*_keys(command, preset), "batch_size=4", *(tiny_keys(command, preset) if tiny else [])]
    losses = []
    for _ in range(2):
        clean()
        step, pool = step_and_batches(command, compose(command, keys), 4)
        for index in range(REPEATED):
            losses.append(step.forward_backward(pool[index % DIFFERENT], index)["loss"].double())
            step.update(1e-4)
    first, second = torch.stack(losses).view(2, REPEATED)
    differences = ((first - second).abs() / first).tolist()
    return {"steps": REPEATED, "first": differences[0], "largest": max(differences)}


# The backbone beside detectron2's


def trains(
    forward: Callable[[Tensor], Sequence[Tensor]], module: nn.Module, images: list[Tensor]
) -> Callable[..., Any]:
    """Forward and backward of maps, whose gradients are given, under autocast; parameters' gradients are dropped."""
    kind = images[0].device.type

    def run(x: Tensor) -> Sequence[Tensor]:
        with torch.autocast(kind, torch.bfloat16):
            return forward(x)

    with torch.no_grad():
        gradients = [torch.randn_like(each) for each in run(images[0])]

    def step(index: int) -> None:
        torch.autograd.backward(list(run(images[index % len(images)])), gradients)
        for parameter in module.parameters():
            parameter.grad = None

    return step


def normalised(images: int, side: int, device: str) -> list[Tensor]:
    return [torch.randn(images, 3, side, side, device=device) for _ in range(DIFFERENT)]


def backbone_ways(size: str, images: int, folder: Path | None, device: str, tiny: bool) -> Iterator[tuple[str, Any]]:
    """Way -> function that measures it."""
    side = 64 if tiny else 1024
    preset = {"vit_base": "coco_vitdet_base", "vit_large": "coco_vitdet_large"}[size]
    more = tiny_keys("detect", preset) if tiny else []
    keys = [*_keys("detect", preset), f"batch_size={images}", *more]
    config = compose("detect", keys)
    with torch.device("meta"):
        model: Any = builders_of(config).objective_and_inputs(config, CLASSES["detect"], 1)[0].model
        flops = count_maps(model, lambda x: model.pyramid(model.encoder.feature_maps(x)), side)

    def measure(forward: Any, module: nn.Module) -> dict[str, Any]:
        return rates(timed(trains(forward, module, normalised(images, side, device)), images, device, tiny), flops)

    def theirs(compiled: bool) -> dict[str, Any]:
        assert folder is not None
        changes = {"embed_dim": 32, "depth": 4, "num_heads": 2} if tiny else {}
        module = detectron2_vit.backbone(folder, size, side, **changes).to(device).train()
        forward = torch.compile(module) if compiled else module
        return measure(lambda x: tuple(forward(x).values()), module)

    def ours(way: str) -> dict[str, Any]:
        own = compose("detect", [*keys, f"engine.compile={COMPILED[way]}"])
        step = builders_of(own).step(own, CLASSES["detect"], alone(torch.device(device)))
        model: Any = step.engine.objective.model
        rate = config.backbone.drop_path
        scales = torch.rand(len(model.encoder.blocks), 2, images, device=device)
        scales = (scales >= torch.linspace(0, rate, len(scales), device=device)[:, None, None]).float()

        def forward(x: Tensor) -> Sequence[Tensor]:
            return tuple(model.pyramid(model.encoder.feature_maps(x, scales)))

        return measure(torch.compile(forward) if way == "compiled" else forward, model)

    if folder is not None:
        yield "detectron2", partial(theirs, False)
        yield "detectron2, compiled", partial(theirs, True)
    for way in COMPILED:
        yield f"ours, {way}", partial(ours, way)


class _Sum(NamedTuple):
    total: Tensor


class _Maps(nn.Module):
    """Feature maps as an objective, whose FLOPs can be counted."""

    def __init__(self, module: nn.Module, maps: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.module, self.maps = module, maps

    def forward(self, images: Tensor) -> _Sum:
        return _Sum(torch.stack([each.sum() for each in self.maps(images)]).sum())


def count_maps(module: nn.Module, maps: Callable[[Tensor], Sequence[Tensor]], side: int) -> int:
    """FLOPs of maps of one image and their backward pass, on the meta device."""
    counted: Any = _Maps(module, maps)
    return count_flops(counted, (torch.empty(1, 3, side, side),))


# Whole images of ConvViT


def convvit_ways(name: str, side: int, images: int, device: str, tiny: bool) -> Iterator[tuple[str, Any]]:
    """Way -> function that measures it."""
    more = TINY["convvit"] if tiny else ()
    keys = [f"backbone={name}", f"data.image_size=[{side},{side}]", "init=null", "test.mode=whole", *more]
    config = compose("segment", keys)

    def every_token(encoder: Any, x: Tensor) -> Sequence[Tensor]:
        """The path of pre-training's views."""
        grid = encoder.grid_of(x)
        tokens = torch.arange(grid[0] * grid[1], device=x.device).expand(1, x.shape[0], -1).contiguous()
        views = Views(tokens, tokens[..., :0], tokens, torch.zeros_like(tokens, dtype=torch.bool))
        stages = encoder.forward_stages(x, views)
        sides = (4, 2, 1)
        blocks = [stage.reshape(len(x), -1, q * q, stage.shape[-1]) for stage, q in zip(stages, sides, strict=True)]
        return [dense_ops.from_blocks(each, q).permute(0, 3, 1, 2) for each, q in zip(blocks, sides, strict=True)]

    forms: dict[str, Callable[[Any, Tensor], Sequence[Tensor]]] = {
        "feature_maps": lambda encoder, x: encoder.feature_maps(x),
        "every token visible": every_token,
    }
    with torch.device("meta"):
        encoder = build_encoder(config)
        flops = count_maps(encoder, partial(forms["feature_maps"], encoder), side)

    def measure(form: str, compiled: bool) -> dict[str, Any]:
        encoder = build_encoder(config).to(device)
        forward = partial(forms[form], encoder)
        steps = trains(torch.compile(forward) if compiled else forward, encoder, normalised(images, side, device))
        return rates(timed(steps, images, device, tiny), flops)

    for form in forms:
        for compiled in (False, True):
            yield f"{form}, {'compiled' if compiled else 'eager'}", partial(measure, form, compiled)


# The plan beside the measured peaks


def plan(record: Record) -> None:
    """Print and store the estimate of each preset's row, computed on the CPU."""
    for row in record.rows:
        if not row["part"].startswith(("ade20k", "coco")) or row["peak_gib"] is None:
            continue
        keys = [key for key in row["keys"] if not key.startswith(("init=", "engine.compile"))]
        config = compose(f"plan_{command_of(row['part'])}", [*keys, "gpus=1", "images=1000"])
        mode = config.engine.activation_checkpointing
        row["plan_gib"] = Plan(config).peak("single", mode, row["images"]) / 2**30
        error = 100 * (row["plan_gib"] / row["peak_gib"] - 1)
        text = f"{row['part']:28} {row['way']:18} {row['images']:3} images: {row['peak_gib']:6.2f} GiB measured, "
        print(f"{text}{row['plan_gib']:6.2f} planned, {error:+5.1f} %", flush=True)
        record.write()


def table(record: Record) -> None:
    """Print rows of Markdown: steps of presets and of backbones."""
    for row in record.rows:
        if row.get("peak_gib") is None:
            continue
        cells = [f"`{row['part']}`", row["way"], str(row["images"]), f"{row['step_ms']:.1f}"]
        cells += [f"{row['images_per_second']:.1f}", f"{row['mfu_percent']:.1f}", f"{row['peak_gib']:.1f}"]
        cells.append(f"{row['plan_gib']:.1f}" if "plan_gib" in row else "")
        print(f"| {' | '.join(cells)} |")


def ways_of(part: str, options: Any, device: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Way of a part -> function that measures it."""
    name, *numbers = part.split(":")
    if part in BACKBONES:
        for way, measured in backbone_ways(name, int(numbers[0]), options.detectron2, device, options.tiny):
            if "compiled" not in way or options.ways != ["eager"]:
                yield way, measured
    elif part in CONVVITS:
        side, images = (64, 1) if options.tiny else (int(numbers[0]), int(numbers[1]))
        yield from convvit_ways(name, side, images, device, options.tiny)
    elif part in REPEATS:
        yield "eager", partial(repeat_row, numbers[0], options.tiny)
    else:
        images = 2 if options.tiny else options.images or IMAGES[command_of(part)]
        for way in options.ways:
            text = way if options.recompute == "none" else f"{way}, recompute {options.recompute}"
            yield text, partial(preset_row, part, way, images, device, options.tiny, options.recompute)


def report(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    if "largest" in row:
        text = f"losses of two trainings of {row['steps']} steps differ by {row['first']:.1e} at the first step"
        print(f"{row['part']:34} {text} and by at most {row['largest']:.1e}", flush=True)
        return
    text = f"{row['part']:28} {row['way']:34} {row['step_ms']:8.1f} ms {row['images_per_second']:7.1f} images/s"
    if row["peak_gib"] is not None:
        text += f" {row['peak_gib']:6.2f} GiB"
    if "mfu_percent" in row:
        text += f", MFU {row['mfu_percent']:.1f} %, floor {row['floor_ms']:.1f} ms"
    for peer in rows:
        if peer["part"] == row["part"] and peer["way"].startswith("detectron2") and peer["way"] != row["way"]:
            text += f"; {row['images_per_second'] / peer['images_per_second']:.2f} x {peer['way']}"
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detectron2", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=tuple(COMPILED),
        default=[*WAYS],
        help="of presets; eager alone leaves out all that is compiled",
    )
    parser.add_argument(
        "--recompute", default="none", metavar="MODE", help="engine.activation_checkpointing of presets"
    )
    parser.add_argument("--images", type=int, help="of a preset's step, instead of 16 or 8")
    options, device, file = parse(parser, "dense_step")
    deadline = Deadline(options.limit)
    if options.plan or options.table:
        (plan if options.plan else table)(Record.read(file))
        return
    record = Record(file, "dense_step", device, options.again)
    parts = [*OPS, *BACKBONES, *CONVVITS, *presets(), *REPEATS]
    for part in [each for each in parts if not options.only or any(fnmatch(each, one) for one in options.only)]:
        if part in OPS:
            if not any(row["part"] == part for row in record.rows) or options.again:
                more = (options.detectron2,) if part == "attention" else ()
                getattr(dense_ops, part)(OpTable(record, part), device, options.tiny, *more)
            continue
        for way, measured in ways_of(part, options, device):
            if record.has(part=part, way=way):
                continue
            if deadline.over:
                print(f"{options.limit:.0f} s are over; the same command goes on with {part}, {way}")
                return
            clean()
            record.add({"part": part, "way": way, **measured()}, *KEY)
            report(record.rows[-1], record.rows)


if __name__ == "__main__":
    main()
