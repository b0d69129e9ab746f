"""A cached probe of 50,000 images (768 values, 1000 classes) at 13 learning rates, after features: wall time.

    python benchmarks/cached_probe.py [--device cuda|cpu] [--images 50000] [--json FOLDER]

Batch and epochs are those of ``dmjd linprobe protocol=cached`` on 50,000 training images, of which 5000 choose the
rate; 10,000 test images. The floor is the time of the two matrix products of every step alone, measured here in the
same shapes: logits ``[512, 768] x [768, 13000]`` and the gradient of the weights. With fewer ``--images`` the time is
that of as many epochs of the same batch, scaled by the number of operations.
"""

from __future__ import annotations

import argparse
import os
import time

import timing
import torch

from dmjd.evaluate.features import Features
from dmjd.evaluate.sweep import RATES, SweepResult, batch_size_for, cached_probe, epochs_for, held_out_rows

IMAGES, TEST, DIM, CLASSES = 50_000, 10_000, 768, 1000


def features(count: int, seed: int) -> Features:
    """Noise around a centre per class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(count) % CLASSES
    return Features(centres[labels] + 5 * torch.randn(count, DIM, generator=generator), labels)


def products_us(batch: int, rates: int, device: str) -> float:
    """Time of the products of one step."""
    x, weight = torch.randn(batch, DIM, device=device), torch.randn(rates * CLASSES, DIM, device=device)
    gradient = torch.randn(batch, rates * CLASSES, device=device)

    def step() -> None:
        x @ weight.T
        gradient.T @ x

    return timing.device_us([step] * timing.BUFFERS)[0] if device == "cuda" else timing.host_us([step])


def steps_of(images: int, batch: int, epochs: int) -> dict[int, int]:
    """Number of rates -> steps: all rates without the images that are held out, then the chosen one."""
    return {len(RATES): epochs * (kept_of(images) // batch), 1: epochs * (images // batch)}


def kept_of(images: int) -> int:
    """Images that are not held out."""
    return images - int(held_out_rows(torch.arange(images) % CLASSES, 0).sum())


def operations(images: int, batch: int, epochs: int) -> int:
    """Of both products of all steps."""
    return sum(steps * rates * 4 * batch * DIM * CLASSES for rates, steps in steps_of(images, batch, epochs).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--json", default="benchmarks/results", metavar="FOLDER")
    options = parser.parse_args()
    train, test = features(options.images, 1), features(TEST * options.images // IMAGES, 2)
    batch = batch_size_for(kept_of(IMAGES))
    epochs = epochs_for(kept_of(IMAGES), batch)
    floor = sum(
        steps * products_us(batch, rates, options.device) for rates, steps in steps_of(IMAGES, batch, epochs).items()
    )

    def probe(epochs: int) -> SweepResult:
        device = torch.device(options.device)
        return cached_probe(train, test, CLASSES, rates=RATES, epochs=epochs, batch_size=batch, seed=0, device=device)

    probe(1)
    begin, busy = time.perf_counter(), time.process_time()
    result = probe(epochs)
    measured = operations(options.images, batch, epochs)
    scale = operations(IMAGES, batch, epochs) / measured
    seconds, busy = (time.perf_counter() - begin) * scale, (time.process_time() - busy) * scale
    notes = f"{seconds:.1f} s, {busy:.1f} s of CPU time; {epochs} epochs of {batch}; "
    notes += f"{measured * scale / seconds / 1e9:.0f} GFLOP/s; top-1 {result.top1:.2f} % at {result.lr:g}; "
    notes += f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    if options.images != IMAGES:
        notes += f"; measured on {options.images} images"
    table = timing.Table("cached_probe", timing.device_name(options.device))
    case = f"{IMAGES} x {DIM}, {CLASSES} classes, {len(RATES)} rates"
    table.add(case, "dmjd linprobe protocol=cached", seconds * 1e6, floor, notes)
    table.save(options.json)


if __name__ == "__main__":
    main()
