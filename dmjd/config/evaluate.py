"""Configurations of commands that read a checkpoint. Each evaluation keeps its own in its module."""

from __future__ import annotations

from dataclasses import dataclass

from dmjd.config.data import DataConfig
from dmjd.config.fields import choice, number, path, recorded, size
from dmjd.config.pretrain import PretrainConfig


@dataclass
class EncoderConfig:
    """A trained encoder to evaluate or export.

    checkpoint: Run folder (its newest checkpoint), a checkpoint folder, or a file of weights of dmjd or of another
        code base.
    which: Checkpoint of a run folder. newest: of the most steps. best: of a fine-tuning, segmentation or detection,
        with the highest validation score.
    model: Model of a file of weights; not for runs. By default it follows from the file's tensors. experiment=NAME or
        backbone=NAME set it, backbone.KEY=VALUE single values.
    output: Output path. Default: beside the checkpoint.
    weights: trained: weights of the last step; of a file with a student and a teacher (DINO, iBOT) the teacher.
        untrained: weights at initialisation. ema: exponential moving average (of a run with ema_decay, or of a file
        that has one). student: the student of a file with a teacher.
    """

    checkpoint: str = path("???")
    which: str = choice("newest", "best")
    model: PretrainConfig | None = None
    output: str | None = path()
    weights: str = choice("trained", "untrained", "ema", "student")

    def check(self) -> None:
        """Raise ConfigError for values that cannot be combined; before the checkpoint is loaded."""


@dataclass
class ImagesConfig(EncoderConfig):
    """A trained encoder and the images that it reads.

    workers: DataLoader workers. null: one per batch, at most 8 and at most one per CPU core.
    device: auto: CUDA if available, else CPU.
    data: Data of pre-training, of which only the keys that are given differ: data.root=DIR moves the images, data=NAME
        is another data set in the run's size and normalisation.
    data_keys: The keys of data that are given; set by the command line. null: all of them.
    """

    workers: int | None = number(None, least=0)
    device: str = choice("auto", "cpu", "cuda", rejected={"gpu": "is called cuda"})
    data: DataConfig | None = None
    data_keys: list[str] | None = recorded()


@dataclass
class EvaluationConfig(ImagesConfig):
    """Evaluation of frozen features.

    output: Folder of the score's JSON file. Default: the run folder; for a file of weights, a folder named like the
        file without its suffix.
    pooling: Image feature. mean: mean of the patch tokens. cls: cls token.
    train_images: Maximum number of training images, evenly spaced. null: all.
    few_shot: Percentage of each class's training images that are used, such as 1 or 10: a fixed choice by the files'
        names, at least one image of each class. null: all.
    labels: Text file with the name of an image in each line: only these training images are used, such as ImageNet's
        published lists of 1 % and 10 %.
    untrained: Also evaluate the initial weights, as a baseline beside the score (doubles the time). null: if that is
        cheap (docs/evaluation.md).
    """

    pooling: str = choice("mean", "cls")
    train_images: int | None = number(None, least=1)
    few_shot: float | None = number(None, above=0, below=100)
    labels: str | None = path()
    untrained: bool | None = None


@dataclass
class ExportConfig(EncoderConfig):
    """Export an encoder or a whole model for timm, ONNX, torch.export or Hugging Face.

    format: timm: .safetensors file for timm.create_model. onnx: .onnx file with a dynamic batch (needs the extra
        dmjd[onnx]). torch_export: .pt2 file for torch.export.load, likewise. Of segmentation and detection runs these
        two hold the whole model, for images of data.image_size; of detection for one image. huggingface: folder for
        transformers' ViTModel (ViT with a class token). huggingface_mae: folder for ViTMAEForPreTraining, with the
        decoder (target pixels and square images).
    output: Output file or folder. Default: RUN/export/encoder-..., of a fine-tuning RUN/export/classifier-..., of a
        whole model segmentation-... or detection-....
    weights: auto: of a fine-tuning with ema_decay the exponential moving average, else those of the last step. trained:
        weights of the last step; of a file with a student and a teacher the teacher. untrained: weights at
        initialisation. ema: exponential moving average. student: the student of a file with a teacher.
    dtype: Data type of the exported tensors. onnx, torch_export: fp32 only.
    shard_size: (huggingface, huggingface_mae) Maximum size of a file of weights, such as 5GB; larger weights are split
        into model-00001-of-0000N.safetensors and an index. null: one file.
    data: For a file of weights: image_size, channels, mean and std of the export, of which only the keys that are given
        differ from the file's.
    data_keys: The keys of data that are given; set by the command line. null: all of them.
    """

    format: str = choice("timm", "onnx", "torch_export", "huggingface", "huggingface_mae")
    dtype: str = choice("fp32", "bf16", "fp16")
    shard_size: str | None = None
    weights: str = choice("auto", "trained", "untrained", "ema", "student")
    data: DataConfig | None = None
    data_keys: list[str] | None = recorded()


@dataclass
class ConsolidateConfig:
    """Merge a sharded checkpoint into whole tensors in safetensors files.

    checkpoint: Run folder (its newest checkpoint) or a checkpoint folder.
    output: Output file. Default: a file inside the checkpoint.
    shard_size: Maximum size of a file, such as 5GB. A larger output FILE.safetensors is split into
        FILE-00001-of-0000N.safetensors and an index, FILE.safetensors.index.json. null: one file.
    """

    checkpoint: str = path("???")
    output: str | None = path()
    shard_size: str | None = None


# Equal to dmjd.interop.layouts.LAYOUTS, which imports torch: a rejected argument should not wait for that.
_LAYOUTS = (
    *("timm", "ours", "mae", "convmae", "dmjd", "simmim", "beit", "maskfeat", "mmpretrain"),
    *("cae", "dino", "ibot", "mocov3"),
)


@dataclass
class ConvertConfig:
    """Convert a checkpoint between code bases (docs/checkpoints.md).

    input: File of weights, or a dmjd run folder or checkpoint.
    output: Output file. Its suffix sets the format: .safetensors, .pth or .pt.
    source: Code base whose parameter names the input has. ours: this package. dmjd: the official DMJD code. auto:
        detected from the names.
    to: Code base whose parameter names the output has, as for source.
    grid: Height and width in tokens to which position embeddings and relative position biases are interpolated. null:
        keep.
    source_grid: Height and width in tokens of the input's position embeddings, needed only if they are not square and
        learned.
    bias_tables: Relative position biases. shared: one table for all blocks. per_block: one table per block. auto: the
        output's usual form.
    unknown: Parameter names that the source does not have. refuse: stop with an error. drop: leave them out.
    nonfinite: Weights that hold NaN or infinity. refuse: stop with an error. keep: convert them.
    weights: trained: weights of the last step; of a file with a student and a teacher the teacher. ema: exponential
        moving average, if the input has one. student: the student of a file with a teacher.
    """

    input: str = path("???")
    output: str = path("???")
    source: str = choice("auto", *_LAYOUTS)
    to: str = choice(*_LAYOUTS)  # not "target": Hydra would take it for the config group
    grid: list[int] | None = size(least=1)
    source_grid: list[int] | None = size(least=1)
    bias_tables: str = choice("auto", "shared", "per_block")
    unknown: str = choice("refuse", "drop")
    nonfinite: str = choice("refuse", "keep")
    weights: str = choice("trained", "ema", "student")
