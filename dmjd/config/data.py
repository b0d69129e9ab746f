"""The images of a run or of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from dmjd.config.fields import choice, may_change, number, numbers, numbers_or_none, path, positive


@dataclass
class DataConfig:
    """Images.

    ``name``: a folder of images, tars (docs/data.md), or a small data set; auto is Fashion-MNIST, found or fetched, or
    else digits.
    ``root``: where the images are; a URL too for shards, several between "::" for stream.
    ``image_size``: height and width that every image is brought to.
    ``channels``: 1 or 3.
    ``pad``: a black border in pixels, of small data sets.
    ``check``: what is looked at before the first step: nothing, the headers of images, or all of them.
    ``max_bad_percent``: how many training images may be bad, each with another in its place, before the run stops.
    ``timeout``: minutes to wait for images while none arrives, also in evaluations; then the stacks of the workers are
    written and the run ends. With several processes it must be below engine.step_timeout.
    ``cache`` (shards behind a URL): a folder on a disk of the node, below TMPDIR if left out.
    ``cache_gib`` (the same): its size in GiB.
    ``samples`` (stream): how many images count as an epoch.
    ``shuffle_buffer`` (stream): how many images a reader draws the next from.
    ``crop_scale``: least and greatest area of a training crop, as parts of the image's.
    ``crop_ratio``: least and greatest width / height of a training crop.
    ``interpolation``: of crops to ``image_size``, antialiased.
    ``crop_pct``: how much of an image's shorter side an evaluation sees, 0.875 being ImageNet's 224 of 256.
    ``second_size``: that of the same crop for a target that reads another size, resampled by Lanczos as BEiT does; its
    tokenizer says which.
    ``flip``: mirror images, each with probability 1/2.
    ``jitter``: the strength of random brightness, contrast and saturation, 0 for none.
    ``mean`` and ``std``: of each channel, on the 0..1 scale.
    """

    name: str = choice("folder", "fashion_mnist", "digits", "auto", "shards", "stream")
    root: str | None = may_change(path(between="::"), where="shards")  # checkpoints know which images it holds
    image_size: list[int] = numbers(224, 224, length=2, least=1, most=16_384)
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
    crop_pct: float = may_change(number(0.875, above=0, most=1))
    second_size: list[int] | None = numbers_or_none(length=2, least=1, most=16_384)
    flip: bool = True
    jitter: float = number(0.0, least=0, most=1)
    mean: list[float] = numbers(0.485, 0.456, 0.406, least=-1e6, most=1e6)
    std: list[float] = numbers(0.229, 0.224, 0.225, above=0, most=1e6)
