"""Data configuration of pre-training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from dmjd.config.fields import (
    FLOAT_LIMIT,
    choice,
    found_at_start,
    may_change,
    naming,
    number,
    numbers,
    path,
    pixel_values,
    positive,
    size,
)

ENDINGS: tuple[str, ...] = (
    *(".jpg", ".jpeg", ".jpe", ".jif", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".dib", ".webp"),
    *(".tif", ".tiff", ".avif", ".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpx"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga"),
)
"""Endings of image files. Endings of raw photos, icons, drawings and films are not among them."""

SKIPPED_FOLDERS = ("__MACOSX", "@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN", "lost+found")
"""Folders of thumbnails and deleted files, which archives, NAS devices and file systems create."""

FORMER_VALUES = {
    "data.endings": ".jpg .jpeg .png .bmp .webp .tif .tiff",
    "data.skipped_folders": "",
}
"""Key -> its value in configurations that were stored before it existed, so that these runs keep their sample ids."""


@dataclass
class DataConfig:
    """Data set and augmentation.

    name: Data set. folder: image files, in class folders or flat. shards: indexed tars (`dmjd shards build`). stream:
        tars read sequentially (docs/data.md). fashion_mnist, digits: small data sets. auto: Fashion-MNIST if it is
        found or can be downloaded, else digits.
    root: Folder of the images. shards: also a URL. stream: paths, URLs or pipe: commands, joined by "::".
    val_percent: (folder) Percentage of the images that are held out of training for evaluations, chosen by a hash of
        each image's path below root. 0: none. Shards: `dmjd shards build SRC DST val_percent=10`.
    val_seed: (folder) Seed that chooses the held-out images of val_percent.
    endings: (folder) File name extensions of images, separated by spaces; upper and lower case are equal. Files with
        other extensions are skipped and counted. null: all in docs/data.md. The run stores the list and keeps it when
        resumed.
    skip_undecodable: (folder) Skip and count files whose decoder is not installed (HEIC needs pillow-heif), and leave
        their extensions out of the stored data.endings. false: stop with an error.
    skipped_folders: (folder) Names of folders to skip, separated by spaces. null: those in docs/data.md. The run stores
        the list and keeps it when resumed.
    image_size: Height and width of the model's input, in pixels; one number for a square.
    channels: Image channels, 1 (grey) or 3 (RGB).
    pad: (fashion_mnist, digits) Black border added on each side, in pixels.
    check: Validation of the training images before the first step. none: no check. header: read every file's header.
        decode: decode every image.
    max_bad_percent: Stop the run if more than this percentage of the training images is unreadable. Each unreadable
        image is replaced by another one.
    timeout: Minutes to wait for the next batch, in evaluations too. Then the loader workers' stack traces are written
        and the run stops. With several processes it must be below engine.start_timeout and engine.step_timeout.
    cache: (shards) Folder on a local disk for shards downloaded from a URL. Default: below TMPDIR.
    cache_gib: (shards) Size limit of the cache, in GiB.
    samples: (stream) Images per epoch.
    shuffle_buffer: (stream) Shuffle buffer of each reader, in images.
    crop_scale: RandomResizedCrop scale: smallest and largest crop area, as fractions of the image's area.
    crop_ratio: RandomResizedCrop ratio: smallest and largest aspect ratio (width / height).
    interpolation: Interpolation (antialiased) that resizes crops to image_size.
    crop_pct: Center crop of evaluations, as a fraction of the image's shorter side. 0.875 is a 224-pixel crop of an
        image resized to 256.
    second_size: Height and width of a second copy of the same crop, for targets with another input size (dvae: 112 for
        224). Resized with Lanczos, as in BEiT.
    flip: Random horizontal flip with probability 0.5.
    jitter: Color jitter strength of brightness, contrast and saturation. 0 disables it.
    mean: Per-channel mean for normalisation, for pixel values in 0..1.
    std: Per-channel standard deviation for normalisation, for pixel values in 0..1.
    """

    name: str = choice("folder", "fashion_mnist", "digits", "auto", "shards", "stream")
    root: str | None = may_change(path(between="::"), where="shards")  # checkpoints store which images it holds
    val_percent: float = number(0.0, least=0, below=100)
    val_seed: int = number(0, least=0, below=2**32)
    endings: str | None = found_at_start(naming(None, "file name extensions such as .jpg .png, or be null"))
    skip_undecodable: bool = may_change(False)
    skipped_folders: str | None = found_at_start(None)
    image_size: list[int] = size(224, 224, least=1, most=16_384)
    channels: int = positive(3)
    pad: int = number(0, least=0)
    check: str = choice("header", "none", "decode")
    max_bad_percent: float = may_change(number(1.0, least=0, most=100))
    timeout: float = may_change(positive(5.0))
    cache: str | None = may_change(path())
    cache_gib: float = may_change(positive(100.0))
    samples: int | None = number(None, least=1)
    shuffle_buffer: int = positive(1000)
    crop_scale: list[float] = numbers(0.2, 1.0, length=2, above=0, most=1)
    crop_ratio: list[float] = numbers(0.75, 4 / 3, length=2, above=0)
    interpolation: str = choice("bicubic", "bilinear")
    crop_pct: float = may_change(number(0.875, least=0.1, most=1))
    second_size: list[int] | None = size(least=1, most=16_384)
    flip: bool = True
    jitter: float = number(0.0, least=0, most=1)
    mean: list[float] = pixel_values(0.485, 0.456, 0.406, least=-FLOAT_LIMIT)
    std: list[float] = pixel_values(0.229, 0.224, 0.225, above=0)
