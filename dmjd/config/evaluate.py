"""Configurations of commands that read a checkpoint. Each evaluation keeps its own in its module."""

from __future__ import annotations

from dataclasses import dataclass

from dmjd.config.data import DataConfig
from dmjd.config.fields import choice, number, path, recorded, size
from dmjd.config.pretrain import PretrainConfig


@dataclass
class EncoderConfig:
    """A trained encoder to evaluate or export.

    checkpoint: Run folder (its newest checkpoint), checkpoint folder, or file of weights of any known code base.
    which: Checkpoint of a run folder. newest: with the most steps. best: with the highest validation score (of
        fine-tuning, segmentation and detection runs).
    model: Model of a file of weights; not for runs. By default it is inferred from the file's tensors. experiment=NAME
        or backbone=NAME sets the whole model, backbone.KEY=VALUE a single value.
    output: Output path. Default: beside the checkpoint.
    weights: trained: the trained weights; the teacher's, if a file holds a student and a teacher (DINO, iBOT).
        untrained: initial weights. ema: exponential moving average, if the run (ema_decay) or the file has one.
        student: the student's weights of such a file.
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
    data: By default those of pre-training; keys that are set replace single values. data.root=DIR reads the images of
        another folder, data=NAME another data set in the run's image size and normalisation.
    data_keys: The keys of data that are given; set by the command line. null: all of them.
    """

    workers: int | None = number(None, least=0, most=1024)
    device: str = choice("auto", "cpu", "cuda", rejected={"gpu": "is called cuda"})
    data: DataConfig | None = None
    data_keys: list[str] | None = recorded()


@dataclass
class EvaluationConfig(ImagesConfig):
    """Evaluation of frozen features.

    output: Folder of the score's JSON file. Default: the run folder; for a file of weights, a folder named like the
        file without its suffix.
    pooling: Image feature. mean: mean of the patch tokens. cls: class token.
    train_images: Maximum number of training images, evenly spaced. null: all.
    few_shot: Percentage of each class's training images to use, such as 1 or 10; at least one image of each class. The
        choice depends on the file names only. null: all.
    labels: Text file with one image name per line: only these training images are used. ImageNet's published lists of 1
        % and 10 % have this form. null: all.
    untrained: Also evaluate the initial weights, as a baseline; doubles the time. null: only if that is cheap
        (docs/evaluation.md).
    """

    pooling: str = choice("mean", "cls")
    train_images: int | None = number(None, least=1)
    few_shot: float | None = number(None, above=0, below=100)
    labels: str | None = path()
    untrained: bool | None = None


@dataclass
class ExportConfig(EncoderConfig):
    """Export an encoder or a whole model for timm, ONNX, torch.export or Hugging Face.

    format: timm: .safetensors file for timm.create_model. onnx: .onnx file with a dynamic batch size (needs the extra
        dmjd[onnx]). torch_export: .pt2 file for torch.export.load, also with a dynamic batch size. Of segmentation and
        detection runs, onnx and torch_export hold the whole model, for images of data.image_size (detection: one
        image). huggingface: folder for transformers' ViTModel (ViT with a class token). huggingface_mae: folder for
        ViTMAEForPreTraining, with the decoder (target pixels and square images).
    output: Output file or folder. Default: RUN/export/NAME-..., where NAME is encoder, classifier, segmentation or
        detection.
    weights: auto: the exponential moving average of a fine-tuning with ema_decay, else trained. trained: the trained
        weights; the teacher's, if a file holds a student and a teacher (DINO, iBOT). untrained: initial weights. ema:
        exponential moving average, if the run (ema_decay) or the file has one. student: the student's weights of such a
        file.
    dtype: Data type of the exported tensors. onnx, torch_export: fp32 only.
    shard_size: (huggingface, huggingface_mae) Maximum size of a file of weights, such as 5GB; larger weights are split
        into model-00001-of-0000N.safetensors and an index. null: one file.
    data: For a file of weights: image_size, channels, mean and std of the export. By default those of the file; keys
        that are set replace single values.
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
    source: Code base of the input's parameter names. ours: this package. dmjd: the official DMJD code. auto: detected
        from the names.
    to: Code base of the output's parameter names, as for source.
    grid: Height and width in tokens to which position embeddings and relative position biases are interpolated. null:
        no interpolation.
    source_grid: Height and width in tokens of the input's position embeddings. Needed only for learned embeddings of a
        grid that is not square.
    bias_tables: Relative position biases. shared: one table for all blocks. per_block: one table per block. auto: the
        output's usual form.
    unknown: Parameter names that the source does not have. refuse: stop with an error. drop: leave these tensors out.
    nonfinite: Weights with NaN or infinity. refuse: stop with an error. keep: convert them.
    weights: trained: the trained weights; the teacher's, if a file holds a student and a teacher (DINO, iBOT). ema:
        exponential moving average, if the input has one. student: the student's weights of such a file.
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
