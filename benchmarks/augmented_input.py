"""How many images does one core prepare for fine-tuning, from JPEG files to augmented crops of 224 x 224?

    python benchmarks/augmented_input.py [--images 192] [--rounds 9] [--json FOLDER]

Files are those of benchmarks/loader.py: JPEG of ImageNet's size, about 110 kB, with the noise of a sensor. Ways:

    timm      create_transform(224, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25,
              interpolation="bicubic") on Pillow images of torchvision's ImageFolder, stacked to batches of 64: crop,
              flip, RandAugment, normalisation, random erasing
    dmjd      dmjd.data.StepBatches: decoded region, crop and RandAugment; flip, normalisation, erasing and mixing
              follow on the device
    crops     the same without RandAugment, which shows its share

All in one process and on one thread. Times are those of the processor, so that other processes of the machine disturb
them little; ways take turns, and ratios are medians over rounds. Pillow 13 rejects timm's posterization to 0 bits,
which this policy draws for 1 image in 700; here it keeps 1 bit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import torch
from photographs import photograph
from PIL import ImageOps
from timing import Table, device_name
from timm.data import create_transform
from torchvision.datasets import ImageFolder as TorchvisionFolder

from dmjd.config import AugmentConfig, DataConfig
from dmjd.data.build import training_batches
from dmjd.data.folder import ImageFolder
from dmjd.data.loader import StepBatches

BATCH = 64
POLICY = "rand-m9-mstd0.5-inc1"
TIMM, OURS, CROPS = "timm on Pillow", "dmjd with RandAugment", "dmjd, crops alone"

Epoch = Callable[[int], None]


def ways(root: Path, images: int) -> dict[str, Epoch]:
    """Each prepares ``images`` images; its argument is the number of the epoch."""
    transform = create_transform(
        224, is_training=True, auto_augment=POLICY, re_prob=0.25, interpolation="bicubic", re_mode="pixel"
    )
    theirs = TorchvisionFolder(str(root), transform)
    dataset, steps = ImageFolder(str(root), "train", 3, "none", (224, 224)), images // BATCH
    data = DataConfig(crop_scale=[0.08, 1.0])
    ours = training_batches(data, dataset, BATCH, 0, augment=AugmentConfig(randaugment=POLICY))
    crops = training_batches(data, dataset, BATCH, 0)

    def timm(epoch: int) -> None:
        order = np.random.default_rng(epoch).permutation(images)
        for part in order.reshape(steps, BATCH):
            torch.stack([theirs[index][0] for index in part])

    def load(batches: StepBatches) -> Epoch:
        def epoch(number: int) -> None:
            for step in range(steps):
                batches[number * steps + step]

        return epoch

    return {TIMM: timm, OURS: load(ours), CROPS: load(crops)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    posterize = ImageOps.posterize
    ImageOps.posterize = lambda image, bits: posterize(image, max(bits, 1))
    table = Table("augmented_input", device_name("cpu"))
    for name in ("timm", "pillow", "torchvision", "numpy"):
        table.versions[name] = version(name)
    with tempfile.TemporaryDirectory() as scratch:
        rng, total = np.random.default_rng(0), 0
        for number in range(options.images):
            path = Path(scratch, f"class{number % 2}", f"{number:05d}.jpg")
            path.parent.mkdir(exist_ok=True)
            total += path.write_bytes(photograph(rng))
        epochs = ways(Path(scratch), options.images)
        times: dict[str, list[float]] = {name: [] for name in epochs}
        for round_ in range(options.rounds + 1):
            for name, epoch in epochs.items():
                start = time.process_time()
                epoch(round_)
                if round_:  # the first fills caches
                    times[name].append((time.process_time() - start) / options.images)
    case = f"JPEG {total / options.images / 1000:.0f} kB, one thread"
    for name, seconds in times.items():
        ratio = median(base / own for base, own in zip(times[TIMM], seconds, strict=True))
        table.add(case, name, median(seconds) * 1e6, None, f"{1 / median(seconds):.0f} images/s, {ratio:.2f} x timm")
    if options.json:
        table.save(options.json)


if __name__ == "__main__":
    main()
