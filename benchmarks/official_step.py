"""Training steps beside the official DMJD and MAE code, as it is and compiled: same batch, same card, one process.

    python benchmarks/official_step.py --dmjd FOLDER --mae FOLDER [--json FILE] [CASE:IMAGES ...]
    python benchmarks/official_step.py --best --json FILE ...    the best batch of each way, from IMAGES on

FOLDERs are checkouts of the official repositories, which are imported unchanged. Cases: convvit_base, convvit_large
(DMJD, HOG, two block views at .6), vit_base, vit_large (MAE, normalised pixels, 75 % masked). Ways of a step:

    official            as its training script: fp16 autocast, GradScaler, AdamW, loss.item() at every step
    official, compiled  model and targets under torch.compile, bf16 autocast, fused AdamW, no loss.item()
    ours, ...           `dmjd pretrain`'s step

--best doubles the images of each way until its rate grows by less than 2 % or twice as many do not fit; rows that FILE
holds of this card and torch are not measured again, and after --limit SECONDS no other is begun.

MAE's blocks are those of the installed timm, whose attention is fused; it was written for timm 0.3.2, whose is not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy
import torch
from inputs import DIFFERENT
from pretrain_step import STEPS, WARMUP, measure
from step_record import Deadline, Record, best, card_gib, clean, measured, next_images
from torch import Tensor, nn

from dmjd.compose import compose

VARIANTS = {
    "ours, eager": (),
    "ours, blocks compiled": ("engine.compile=block",),
    "ours, compiled": ("engine.compile=model",),
    "ours, compiled, MLPs recomputed": ("engine.compile=model", "engine.activation_checkpointing=mlp"),
}
CASES = {
    "convvit_base": "experiment=dmjd_convvit_base_hog",
    "convvit_large": "experiment=dmjd_convvit_large_hog",
    "vit_base": "experiment=mae_vit_base",
    "vit_large": "experiment=mae_vit_large",
}


class Official(NamedTuple):
    """A model, and its loss for uint8 crops [B, H, W, 3] and their normalised images [B, 3, H, W]."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]


def dmjd(folder: Path, size: str, compiled: bool) -> Official:
    """``engine_pretrain.train_one_epoch``'s loss with HOG; ``size`` is base or large."""
    models, hog, whitening = _modules(folder, "models_dmjd", "util.hog_tensor", "util.instance_whitening")
    model = getattr(models, f"dmjd_convit_{size}_patch16_dec8_hog")(decoder_pred_dim=108).cuda()
    whiten = whitening.InstanceWhitening(9)

    def targets(crops: Tensor) -> Tensor:
        cells = whiten(hog.hog_torch(crops.permute(0, 3, 1, 2)))
        batch, channels, *_, bins = cells.shape
        patches = cells.reshape(batch, channels, 14, 2, 14, 2, bins).permute(0, 2, 4, 3, 5, 6, 1)
        return patches.reshape(batch, 196, -1)

    options = {"mask_ratio": 0.6, "mask_type": "block", "mim_loss_type": "l2", "vis_loss_type": "smooth_l1"}
    forward, make = (torch.compile(model), torch.compile(targets)) if compiled else (model, targets)
    precision = torch.bfloat16 if compiled else torch.float16

    def loss(crops: Tensor, images: Tensor) -> Tensor:
        cells = make(crops)
        with torch.autocast("cuda", precision):
            return forward(images, target=cells, **options)[0]

    return Official(model, loss)


def mae(folder: Path, size: str, compiled: bool) -> Official:
    """``engine_pretrain.train_one_epoch``'s loss with normalised pixels; ``size`` is base or large."""
    (models,) = _modules(folder, "models_mae")
    block = models.Block
    models.Block = lambda *arguments, qk_scale, **options: block(*arguments, **options)  # which timm has dropped
    model = getattr(models, f"mae_vit_{size}_patch16")(norm_pix_loss=True).cuda()
    models.Block = block
    forward = torch.compile(model) if compiled else model
    precision = torch.bfloat16 if compiled else torch.float16

    def loss(_: Tensor, images: Tensor) -> Tensor:
        with torch.autocast("cuda", precision):
            return forward(images, mask_ratio=0.75)[0]

    return Official(model, loss)


def _modules(folder: Path, *names: str) -> list[Any]:
    """Modules of a checkout; both have a package ``util``, so that of the other is forgotten."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "util"]:
        del sys.modules[name]
    setattr(numpy, "float", float)  # noqa: B010  # gone from numpy; the official position tables ask for it
    sys.path.insert(0, str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they import timm by names that timm has deprecated
        found = [importlib.import_module(name) for name in names]
    sys.path.pop(0)
    return found


def official_step(official: Official, batch: int, compiled: bool) -> Callable[[int], None]:
    """One training step over crops that are on the device."""
    trained = [p for p in official.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=compiled)
    scaler = torch.amp.GradScaler("cuda", enabled=not compiled)
    crops = [torch.randint(0, 256, (batch, 224, 224, 3), dtype=torch.uint8, device="cuda") for _ in range(DIFFERENT)]
    images = [crop.permute(0, 3, 1, 2).float().div(255).sub(0.45).div(0.22).contiguous() for crop in crops]

    def step(index: int) -> None:
        loss = official.loss(crops[index % DIFFERENT], images[index % DIFFERENT])
        if not compiled:
            loss.item()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def measure_official(make: Callable[[bool], Official], batch: int, compiled: bool) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    try:
        return measure_steps(official_step(make(compiled), batch, compiled), batch)
    finally:  # out of memory, too
        torch.backends.cudnn.benchmark = False


def measure_steps(step: Callable[[int], None], batch: int) -> dict[str, Any]:
    """Median milliseconds of ``step``, images per second and peak memory."""
    for index in range(WARMUP):
        step(index)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for index in range(STEPS):
        step(index)
        marks[index + 1].record()
    torch.cuda.synchronize()
    total = median(first.elapsed_time(then) for first, then in pairwise(marks))
    return {
        "step_ms": total,
        "images_per_second": batch / total * 1000,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dmjd", type=Path, metavar="FOLDER")
    parser.add_argument("--mae", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=tuple(VARIANTS), help="of our variants")
    parser.add_argument("--best", action="store_true", help="needs --json")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("cases", nargs="*", default=["convvit_base:128", "convvit_large:64", "vit_base:256"])
    arguments = parser.parse_args()
    if arguments.best:
        assert arguments.json is not None, "--best stores its rows; give --json FILE"
        best_batches(arguments)
        return
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        name, batch = case.split(":")[0], int(case.split(":")[1])
        ways = {way: partial(measure, batch) for way, measure in ways_of(name, arguments).items()}
        compare(case, ways, rows, arguments.json)


def ways_of(name: str, arguments: Any) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Way of a case -> function that measures it for so many images."""
    kind, _, size = name.partition("_")
    source = arguments.dmjd if kind == "convvit" else arguments.mae
    make = partial(dmjd if kind == "convvit" else mae, source, size)
    ways: dict[str, Callable[[int], dict[str, Any]]] = {}
    if source is not None:
        ways["official"] = partial(measure_official, make, compiled=False)
        ways["official, compiled"] = partial(measure_official, make, compiled=True)
    for way in arguments.only or VARIANTS:
        ways[way] = partial(measure_ours, name, way)
    return ways


def measure_ours(name: str, way: str, batch: int) -> dict[str, Any]:
    return measure(compose("pretrain", [CASES[name], f"batch_size={batch}", *VARIANTS[way]]))


def best_batches(arguments: Any) -> None:
    """Measure and store each way of the cases with more and more images; print the best of each."""
    deadline = Deadline(arguments.limit)
    record = Record(arguments.json, "official_step_best", "cuda")
    for case in arguments.cases:
        name, first = case.split(":")[0], int(case.split(":")[1])
        for way, of_images in ways_of(name, arguments).items():
            rows = [row for row in record.rows if (row["case"], row["way"]) == (name, way)]
            while (images := next_images(rows, first, card_gib())) is not None:
                if deadline.over:
                    print(f"{arguments.limit:.0f} s are over; the same command goes on with {case}, {way}")
                    return
                rows.append({"case": name, "way": way, **measured(of_images, images)})
                record.add(rows[-1], "case", "way", "images")
            if (most := best(rows)) is not None:
                line = f"{name:18} {way:32} {most['images']:5} images {most['images_per_second']:6.0f} images/s"
                print(f"{line} {most['peak_gib']:5.1f} GiB", flush=True)


def compare(
    case: str, ways: Mapping[str, Callable[[], dict[str, Any]]], rows: list[dict[str, Any]], file: Path | None
) -> None:
    """Measure the ways of a case one after the other, each without what the one before compiled and allocated."""
    for way, step in ways.items():
        clean()
        rows.append({"case": case, "way": way, **step()})
        report(rows, file)


def report(rows: list[dict[str, Any]], file: Path | None) -> None:
    """Print the newest row and store all: the next may outlast the time on a borrowed card."""
    row = rows[-1]
    text = f"{row['case']:18} {row['way']:32} {row['step_ms']:7.1f} ms {row['images_per_second']:6.0f} images/s"
    text += f" {row['peak_gib']:5.1f} GiB"
    for peer in rows:
        if peer["case"] == row["case"] and peer is not row and peer["way"].startswith("official"):
            ratio, memory = row["images_per_second"] / peer["images_per_second"], row["peak_gib"] / peer["peak_gib"]
            text += f"; {ratio:.2f} x {peer['way']} in {100 * memory:.0f} % of its memory"
    print(text + (f"; MFU {row['mfu_percent']:.1f} %" if row.get("mfu_percent") else ""), flush=True)
    if file is not None:
        record = {
            "benchmark": Path(sys.argv[0]).stem,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "rows": rows,
        }
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
