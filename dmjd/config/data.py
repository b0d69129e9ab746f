"""The images of a run or of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from dmjd.config.fields import choice, number, numbers, numbers_or_none, path, positive


@dataclass
class DataConfig:
    """Images. ``mean`` and ``std`` are per channel, on the 0..1 scale; ``pad`` is a black border in pixels.

    ``max_bad_percent``: how many training images may be bad, each with another in its place, before the run stops.
    ``jitter`` is the strength of random brightness, contrast and saturation, 0 for none. ``second_size`` is that of
    the same crop for a target that reads another size, resampled by Lanczos as BEiT does; its tokenizer says which.
    ``crop_pct``: how much of an image's shorter side an evaluation sees, 0.875 being ImageNet's 224 of 256.
    ``cache`` (shards behind a URL) is a folder on a disk of the node, below TMPDIR if left out; ``cache_gib`` its GiB.
    ``samples`` (stream) is how many images count as an epoch, ``shuffle_buffer`` how many a reader draws the next from.
    """

    name: str = choice("folder", "fashion_mnist", "digits", "auto", "shards", "stream")
    root: str | None = path(between="::")
    image_size: list[int] = numbers(224, 224, length=2, least=1)
    channels: int = positive(3)
    pad: int = number(0, least=0)
    check: str = choice("header", "none", "decode")
    max_bad_percent: float = number(1.0, least=0, most=100)
    cache: str | None = path()
    cache_gib: float = positive(100.0)
    samples: int | None = number(None, least=1)
    shuffle_buffer: int = positive(1000)
    crop_scale: list[float] = numbers(0.2, 1.0, length=2, above=0, most=1)
    crop_ratio: list[float] = numbers(0.75, 4 / 3, length=2, above=0)
    interpolation: str = choice("bicubic", "bilinear")
    crop_pct: float = number(0.875, above=0, most=1)
    second_size: list[int] | None = numbers_or_none(length=2, least=1)
    flip: bool = True
    jitter: float = number(0.0, least=0, most=1)
    mean: list[float] = numbers(0.485, 0.456, 0.406)
    std: list[float] = numbers(0.229, 0.224, 0.225, above=0)
