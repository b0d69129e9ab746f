"""ConViT training steps beside the official DMJD code: same batch, same card, one process.

    python benchmarks/convvit_step.py --official FOLDER [--json FILE] [base:128 large:64 ...]

FOLDER is a checkout of the official repository, which is imported and timed unchanged, as its README trains: fp16
autocast, GradScaler, AdamW, HOG of every batch, loss.item() at every step. Ours is `dmjd pretrain`'s step, eager and
compiled. Cases are SIZE:UNIQUE_IMAGES; every image gives two block views at .6.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
from inputs import DIFFERENT
from pretrain_step import STEPS, WARMUP, measure

from dmjd.compose import compose

VARIANTS = {
    "ours, eager": (),
    "ours, blocks compiled": ("engine.compile=block",),
    "ours, compiled": ("engine.compile=model",),
    "ours, compiled, MLPs recomputed": ("engine.compile=model", "engine.activation_checkpointing=mlp"),
}


def official_step(folder: Path, size: str, batch: int) -> Callable[[int], None]:
    """One step of ``engine_pretrain.train_one_epoch`` over uint8 crops that are on the device."""
    sys.path.insert(0, str(folder))
    setattr(numpy, "float", float)  # noqa: B010  # gone from numpy; the official position table asks for it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports timm by names that timm has deprecated
        models = importlib.import_module("models_dmjd")
        hog_torch = importlib.import_module("util.hog_tensor").hog_torch
        whitening = importlib.import_module("util.instance_whitening").InstanceWhitening(9)
    sys.path.pop(0)
    model = getattr(models, f"dmjd_convit_{size}_patch16_dec8_hog")(decoder_pred_dim=108).cuda()
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.05}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cuda")
    torch.backends.cudnn.benchmark = True
    crops = [torch.randint(0, 256, (batch, 224, 224, 3), dtype=torch.uint8, device="cuda") for _ in range(DIFFERENT)]
    images = [crop.permute(0, 3, 1, 2).float().div(255).sub(0.45).div(0.22) for crop in crops]

    def step(index: int) -> None:
        cells = whitening(hog_torch(crops[index % DIFFERENT].permute(0, 3, 1, 2)))
        batch, channels, *_, bins = cells.shape
        patches = cells.reshape(batch, channels, 14, 2, 14, 2, bins).permute(0, 2, 4, 3, 5, 6, 1)
        with torch.autocast("cuda", torch.float16):
            loss, *_ = model(
                images[index % DIFFERENT],
                target=patches.reshape(batch, 196, -1),
                mask_ratio=0.6,
                mask_type="block",
                mim_loss_type="l2",
                vis_loss_type="smooth_l1",
            )
        loss.item()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def measure_official(folder: Path, size: str, batch: int) -> dict[str, Any]:
    step = official_step(folder, size, batch)
    for index in range(WARMUP):
        step(index)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for index in range(STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(index)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    total = median(times)
    return {
        "step_ms": total,
        "images_per_second": batch / total * 1000,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--official", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=tuple(VARIANTS), help="of our variants")
    parser.add_argument("cases", nargs="*", default=["base:128", "large:64"])
    arguments = parser.parse_args()
    rows = []
    for case in arguments.cases:
        size, batch = case.split(":")[0], int(case.split(":")[1])
        peer = None
        if arguments.official is not None:
            peer = measure_official(arguments.official, size, batch)
            rows.append({"case": case, "way": "official", **peer})
            report(rows, peer, arguments.json)
        for way, overrides in VARIANTS.items():
            if arguments.only and way not in arguments.only:
                continue
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
            config = compose("pretrain", [f"experiment=dmjd_convvit_{size}_hog", f"batch_size={batch}", *overrides])
            rows.append({"case": case, "way": way, **measure(config)})
            report(rows, peer, arguments.json)
        gc.collect()
        torch.cuda.empty_cache()


def report(rows: list[dict[str, Any]], peer: dict[str, Any] | None, file: Path | None) -> None:
    """Print the newest row and store all: the next may outlast the time on a borrowed card."""
    show(rows[-1], peer)
    if file is not None:
        record = {
            "benchmark": "convvit_step",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "rows": rows,
        }
        file.write_text(json.dumps(record, indent=1) + "\n")


def show(row: dict[str, Any], peer: dict[str, Any] | None) -> None:
    beside = ""
    if peer is not None:
        speed = row["images_per_second"] / peer["images_per_second"]
        beside = f"{speed:5.2f} x the official speed, {100 * row['peak_gib'] / peer['peak_gib']:4.0f} % of its memory"
    parts = " ".join(f"{name}={row[name]:.1f}" for name in ("prepare_ms", "forward_ms", "backward_ms") if name in row)
    mfu = f"MFU {row['mfu_percent']:.1f} %" if row.get("mfu_percent") else ""
    print(
        f"{row['case']:10} {row['way']:34} {row['step_ms']:8.1f} ms {row['images_per_second']:8.0f} images/s "
        f"{row['peak_gib']:6.1f} GiB {beside} {mfu} {parts}",
        flush=True,
    )


if __name__ == "__main__":
    main()
