"""What is made of a checkpoint: scores, and files for others."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.data import DataConfig
from dmjd.config.fields import choice, number, numbers, path, positive
from dmjd.config.pretrain import PretrainConfig


@dataclass
class EncoderConfig:
    """A trained encoder, and where to put what is made of it.

    What model a file is of, ``experiment=NAME`` says, and ``backbone.KEY=VALUE`` beside it: they become ``model``.

    ``checkpoint``: a run folder, one of its checkpoints, or a file of weights, of ours or of another code base.
    ``output``: where to put it, by default beside the checkpoint.
    ``weights``: those of the last step, those that the run began with, or the average that ema_decay keeps.
    """

    checkpoint: str = path("???")
    model: PretrainConfig | None = None
    output: str | None = path()
    weights: str = choice("trained", "untrained", "ema")


@dataclass
class ScoreConfig(EncoderConfig):
    """What frozen features are judged by.

    ``output``: a folder for the score, by default the run's; a file's is named like it, without its suffix.
    ``pooling``: the patch tokens' mean, or the cls token.
    ``train_images``: use at most that many, evenly spaced.
    ``root``: where the images are, if no longer where the run read them; ``data.root=`` without ``data=`` sets it.
    """

    pooling: str = choice("mean", "cls")
    train_images: int | None = number(None, least=1)
    root: str | None = path()


@dataclass
class KnnConfig(ScoreConfig):
    """Weighted kNN on frozen features.

    ``neighbours``: how many vote. ``temperature``: of their votes.
    ``batch_size``: images encoded at once.
    ``workers``: processes that load images. ``device``: auto is a GPU where there is one.
    """

    neighbours: int = positive(20)
    temperature: float = positive(0.07)
    batch_size: int = positive(256)
    workers: int = number(8, least=0)
    device: str = choice("auto", "cpu", "cuda")
    data: DataConfig | None = None


@dataclass
class LinprobeConfig(ScoreConfig):
    """MAE's linear probe: affine-free BatchNorm and a linear layer on frozen features, trained with LARS.

    ``epochs``: of the probe. ``warmup_epochs``: those in which its learning rate grows.
    ``base_lr``: the highest learning rate, for 256 images a step.
    ``batch_size``: images a step.
    ``augment``: draw a new crop and flip of every image in each epoch; without it features are computed once.
    ``crop_scale``: least and greatest area of a crop, MAE's; ``data.crop_scale`` is pre-training's and not read here.
    ``seed``: of weights, order and crops.
    ``workers``: processes that load images. ``device``: auto is a GPU where there is one.
    """

    epochs: int = positive(90)
    warmup_epochs: int = number(10, least=0)
    base_lr: float = positive(0.1)
    batch_size: int = positive(16384)
    augment: bool = True
    crop_scale: list[float] = numbers(0.08, 1.0, length=2, above=0, most=1)
    seed: int = number(0, least=0, below=2**32)
    workers: int = number(8, least=0)
    device: str = choice("auto", "cpu", "cuda")
    data: DataConfig | None = None


@dataclass
class ExportConfig(EncoderConfig):
    """An encoder as safetensors for timm.

    ``output``: a file, by default ``RUN/export/encoder-....safetensors``.
    ``dtype``: what its tensors are rounded to.
    """

    dtype: str = choice("fp32", "bf16", "fp16")


@dataclass
class ConsolidateConfig:
    """A checkpoint in one safetensors file.

    ``checkpoint``: a run folder, or one of its checkpoints.
    ``output``: a file, by default a part of the checkpoint itself.
    """

    checkpoint: str = path("???")
    output: str | None = path()


# Those of dmjd.interop.layouts, which needs torch; a typo need not wait for it.
_LAYOUTS = ("timm", "ours", "mae", "convmae", "dmjd", "simmim", "beit", "maskfeat", "mmpretrain")


@dataclass
class ConvertConfig:
    """A checkpoint of one code base for another (docs/checkpoints.md).

    ``input``: a file, or a run folder or checkpoint of ours. ``output``: a file, whose suffix tells its format.
    ``source``: the layout of the input; auto tells it by its names. ``to``: the layout of the output.
    ``grid``: height and width in tokens, to which positions and relative position biases are interpolated.
    ``source_grid``: that of the input, where it is not square, or its rows may be of ``grid`` as well.
    ``bias_tables``: one for all blocks or one each; auto is what the target's models expect.
    ``unknown``: what to do with names that the source's layout does not have.
    """

    input: str = path("???")
    output: str = path("???")
    source: str = choice("auto", *_LAYOUTS)
    to: str = choice(*_LAYOUTS)  # "target" is a group of pre-training's, which Hydra would look into
    grid: list[int] | None = field(default=None, metadata={"bounds": {"least": 1}, "length": 2})
    source_grid: list[int] | None = field(default=None, metadata={"bounds": {"least": 1}, "length": 2})
    bias_tables: str = choice("auto", "shared", "per_block")
    unknown: str = choice("refuse", "drop")
