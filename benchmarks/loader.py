"""How many training images does one core read, decode and crop, and what does a worker weigh?

    python benchmarks/loader.py [--images 200] [--rounds 7] [--json FOLDER]

Images are JPEG files of ImageNet's size (500 x 375 or 375 x 500, about 110 kB), cut at the start from scikit-image's
photographs with the noise of a sensor added. Ways to make batches of 64 crops of 224 x 224:

    MAE               Pillow, torchvision's RandomResizedCrop (bicubic), flip, ToTensor, Normalize, from a folder
    webdataset        the same transform on webdataset's pipeline, from a tar
    dmjd, K views     dmjd.data.StepBatches from the folder or from shards, and masks for K views; the device flips and
                      normalises

Times are those the processor spends on one thread, so other processes of the machine disturb them little, as medians
over rounds in which all ways take turns. Reading is from a set ten times as large, so that the page cache serves it and
no cache of the processor does. Cold is wall time after the kernel was told to forget the files,
the least of the rounds, for other processes of the machine would count. Memory is what one
worker process has for itself (USS), early in an epoch over many tiny images and at its end.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import webdataset
from photographs import photograph
from PIL import Image
from timing import Table, device_name
from torchvision import transforms
from torchvision.datasets import ImageFolder as TorchvisionFolder

from dmjd.data import decode
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.dataset import ImageDataset
from dmjd.data.folder import ImageFolder
from dmjd.data.loader import StepBatches
from dmjd.data.shards.build import build_shards
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.shards.index import load
from dmjd.data.shards.local import OpenFiles
from dmjd.data.shards.sampler import shard_sampler
from dmjd.masking import MaskSpec

BATCH, CROP, GRID = 64, RandomResizedCrop((224, 224)), (14, 14)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COPIES = 10
LINKS = 30_000

Epoch = Callable[[], Iterable[Any]]


def write_images(root: Path, count: int) -> float:
    """A folder of two classes and the same images in a tar; returns their mean size in kB."""
    rng = np.random.default_rng(0)
    files = [photograph(rng) for _ in range(count)]
    with webdataset.TarWriter(str(root / "images.tar")) as tar:
        for number, file in enumerate(files):
            path = root / "folder" / f"class{number % 2}" / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file)
            for copy in range(COPIES):
                link = root / "copies" / f"class{number % 2}" / f"{number:05d}_{copy}.jpg"
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, link)
            tar.write({"__key__": f"{number:05d}", "jpg": file, "cls": number % 2})
    for name in ("folder", "copies"):
        build_shards(str(root / name), str(root / "shards" / name), workers=1, shard_mb=64)
    return sum(map(len, files)) / count / 1000


def mae_transform() -> Callable[[Image.Image], torch.Tensor]:
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(CROP.size, CROP.scale, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def mae_epoch(root: Path) -> Epoch:
    folder = TorchvisionFolder(str(root / "folder"), mae_transform())
    return lambda: torch.utils.data.DataLoader(folder, BATCH, shuffle=True, drop_last=True)


def webdataset_epoch(root: Path) -> Epoch:
    pipeline = webdataset.WebDataset(str(root / "images.tar"), shardshuffle=False).shuffle(100).decode("pilrgb")
    batches = pipeline.to_tuple("jpg", "cls").map_tuple(mae_transform(), int).batched(BATCH, partial=False)
    return lambda: batches


def our_epoch(dataset: ImageDataset, views: int) -> Epoch:
    sampler = shard_sampler(dataset.sizes, BATCH) if isinstance(dataset, ShardDataset) else None
    batches = StepBatches(dataset, BATCH, CROP, seed=0, sampler=sampler)
    spec = MaskSpec(views=views, mask_ratio=0.6 if views < 4 else 0.75)

    def epoch() -> Iterator[Any]:
        for step in range(batches.steps_per_epoch):
            batch = batches[step]
            yield batch, spec.draw(batch.sample_ids, GRID, seed=0, epoch=0)

    return epoch


def shards(path: Path) -> ShardDataset:
    return ShardDataset(load(path), None)


def seconds_per_image(epoch: Epoch, clock: Callable[[], float]) -> float:
    start, count = clock(), 0
    for _ in epoch():
        count += BATCH
    return (clock() - start) / count


def forget(folder: Path) -> None:
    """Drop the files of ``folder`` from the page cache, as far as the file system lets us."""
    for path in folder.rglob("*.*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_page_cache(folder: Path) -> None:
    """As reading from a disk fills it: in larger pages than writing a file bit by bit does."""
    forget(folder)
    for path in folder.rglob("*.*"):
        path.read_bytes()


def readers(root: Path) -> dict[str, Callable[[], float]]:
    """Ways to read the larger set in random order; each gives seconds an image."""
    paths = sorted(map(str, (root / "folder").rglob("*.jpg")))
    dataset = shards(root / "shards" / "copies")
    records, files = dataset.shards.records, OpenFiles()
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    places = [(dataset.shards.location(shard), offset, size) for shard, offset, size, *_ in records[order].tolist()]

    def timed(read: Callable[[Any], Any], items: list[Any]) -> Callable[[], float]:
        def run() -> float:
            start = time.process_time()
            for item in items:
                read(item)
            return (time.process_time() - start) / len(items)

        return run

    return {
        "files of a folder": timed(decode.read_bytes, paths),
        "dmjd's shards, crc32 checked": timed(dataset.read, order),
        "of which one pread": timed(lambda place: files.read(*place), places),
    }


def private_mib() -> float:
    """Private memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def worker_memory(make: Callable[[], tuple[int, Callable[[int], Any]]]) -> tuple[float, float]:
    """MiB at a thirtieth and at the end of an epoch, in a forked worker as torch's loader has them."""
    count, item = make()
    reader, writer = os.pipe()
    if os.fork() == 0:
        gc.collect()  # else the first collection, which writes to every object of the process, would look like growth
        order = np.random.default_rng(0).permutation(count)
        sizes = []
        for number, index in enumerate(order.tolist()):
            item(index)
            if number + 1 in (count // 30, count):
                sizes.append(private_mib())
        os.write(writer, " ".join(map(str, sizes)).encode())
        os._exit(0)
    os.wait()
    start, end = map(float, os.read(reader, 100).split())
    return start, end


def measure_memory(table: Table, root: Path) -> None:
    (root / "small" / "class0").mkdir(parents=True)
    original = root / "small" / "class0" / "original.jpg"
    Image.new("RGB", (24, 24)).save(original)
    for number in range(LINKS):
        folder = root / "small" / f"class{number // 1000}"
        folder.mkdir(exist_ok=True)
        os.link(original, folder / f"{'a_name_as_long_as_those_of_imagenet'}_{number:06d}.jpg")

    def torchvisions() -> tuple[int, Callable[[int], Any]]:
        folder = TorchvisionFolder(str(root / "small"))
        return len(folder), folder.__getitem__

    def ours() -> tuple[int, Callable[[int], Any]]:
        folder = ImageFolder(str(root / "small"), "train", 3, check="none")
        return len(folder), lambda index: (folder.image(index), folder.label(index))

    build_shards(str(root / "small"), str(root / "shards" / "small"), workers=1, shard_mb=1)

    def our_shards() -> tuple[int, Callable[[int], Any]]:
        dataset = shards(root / "shards" / "small")
        return len(dataset), lambda index: (dataset.image(index), dataset.label(index))

    ways = (("torchvision's ImageFolder", torchvisions), ("dmjd, folder", ours), ("dmjd, shards", our_shards))
    for way, make in ways:
        begin = time.perf_counter()
        start, end = worker_memory(make)
        microseconds = (time.perf_counter() - begin) * 1e6 / LINKS
        growth = (end - start) * 2**20 / LINKS
        notes = f"worker's own memory {start:.1f} -> {end:.1f} MiB, {growth:.0f} bytes an image"
        table.add(f"memory, {LINKS} tiny files", way, microseconds, notes=notes)


def measure_epochs(table: Table, case: str, root: Path, rounds: int) -> None:
    native, torchcodec = decode._native, decode._find_torchcodec()
    folder, packed = ImageFolder(str(root / "folder"), "train", 3), shards(root / "shards" / "folder")
    mae = "MAE's chain"
    ways: dict[str, tuple[Epoch, Any, Any]] = {
        mae: (mae_epoch(root), native, None),
        "webdataset": (webdataset_epoch(root), native, None),
        "dmjd, folder, 1 view, Pillow decodes": (our_epoch(folder, 1), None, None),
    }
    if torchcodec:
        ways["dmjd, folder, 1 view, torchcodec decodes"] = our_epoch(folder, 1), None, torchcodec
    if native:
        for name, dataset in (("folder", folder), ("shards", packed)):
            for views in (1, 2, 4):
                way = f"dmjd, {name}, {views} view{'s'[: views - 1]}, dmjd._jpeg decodes"
                ways[way] = our_epoch(dataset, views), native, None
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (epoch, *decoders) in ways.items():
            decode._native, decode._torchcodec = decoders
            times[way].append(seconds_per_image(epoch, time.process_time))
    decode._native, decode._torchcodec = native, None if native else torchcodec
    for way, taken in times.items():
        # Of each round a ratio: what slows the machine for a while slows both.
        ratio = median(mine / other for mine, other in zip(times[mae], taken, strict=True))
        table.add(case, way, median(taken) * 1e6, notes=f"{1 / median(taken):.0f} images/s, {ratio:.2f} x MAE")


def measure_reading(table: Table, case: str, root: Path, rounds: int) -> None:
    for name in ("folder", "shards/copies"):
        fill_page_cache(root / name)
    ways = readers(root)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            times[way].append(run())
    for way, taken in times.items():
        notes = f"least {min(taken) * 1e6:.1f} us"
        table.add(f"reading alone, {case}", way, median(taken) * 1e6, notes=notes)


def measure_caches(table: Table, root: Path, rounds: int) -> None:
    walls: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, folder in (("folder", root / "folder"), ("shards", root / "shards" / "folder")):
            for cache in ("cold", "warm"):
                if cache == "cold":
                    forget(folder)
                dataset = ImageFolder(str(folder), "train", 3, check="none") if name == "folder" else shards(folder)
                walls.setdefault((cache, name), []).append(seconds_per_image(our_epoch(dataset, 1), time.perf_counter))
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    for (cache, name), taken in walls.items():
        table.add(
            f"{cache} page cache, least wall time of {rounds} passes",
            f"dmjd, {name}, {decode.jpeg_decoder()} decodes",
            min(taken) * 1e6,
            notes=f"{1 / min(taken):.0f} images/s; {load}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("loader", device_name("cpu"))
    for name in ("pillow", "torchvision", "webdataset", "torchcodec", "isal"):
        with suppress(PackageNotFoundError):
            table.versions[name] = version(name)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        case = f"JPEG {write_images(root, options.images):.0f} kB, one thread"
        measure_epochs(table, case, root, options.rounds)
        measure_reading(table, case, root, options.rounds)
        measure_caches(table, root, options.rounds)
        measure_memory(table, root)
    if options.json:
        table.save(options.json)


if __name__ == "__main__":
    main()
