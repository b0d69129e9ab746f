"""``dmjd embed``: the features of every image of a data set, by one or several encoders, in one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dmjd.config import DataConfig, PretrainConfig
from dmjd.config.fields import choice, choices, number, path, positive, recorded
from dmjd.errors import ConfigError
from dmjd.explore.registry import Tool


@dataclass
class EmbedConfig:
    """Features of images, in a file.

    checkpoints: Run folders (their newest checkpoints), checkpoint folders, or files of weights of dmjd or of another
        code base; several are written side by side.
    output: .npz or .parquet file. Default: RUN/embeddings/WEIGHTS-step########.npz; several checkpoints need it.
    which: Checkpoint of a run folder. newest: of the most steps. best: of a fine-tuning, with the highest validation
        score.
    model: experiment=NAME, backbone=NAME and backbone.KEY=VALUE describe the model of a file of weights; not for runs.
    weights: trained: weights of the last step. untrained: weights at initialisation. ema: exponential moving average
        (needs a run with ema_decay).
    pooling: Image feature: mean of the patch tokens, or cls, the cls token. One for all checkpoints, or a list with one
        for each.
    split: Images: all, or those of the split train or test.
    images: Maximum number of images, evenly spaced. null: all.
    dtype: Data type of the stored features.
    thumbnail: Longest side in pixels of the stored thumbnails; 0: none.
    batch_size: Images per forward pass.
    workers: DataLoader workers. null: one per batch, at most 8 and at most one per CPU core.
    device: auto: CUDA if available, else CPU.
    data: Data of pre-training, of which only the keys that are given differ: data.root=DIR names other images, with or
        without labels. Several checkpoints embed the images of the first one's data.
    data_keys: The keys of data that are given; set by the command line. null: all of them.
    """

    checkpoints: list[str] = path("???")
    output: str | None = path()
    which: str = choice("newest", "best")
    model: PretrainConfig | None = None
    weights: str = choice("trained", "untrained", "ema")
    pooling: list[str] = choices("mean", "cls")
    split: str = choice("all", "train", "test")
    images: int | None = number(None, least=1)
    dtype: str = choice("float32", "float16")
    thumbnail: int = number(64, least=0, most=512)
    batch_size: int = positive(256)
    workers: int | None = number(None, least=0)
    device: str = choice("auto", "cpu", "cuda")
    data: DataConfig | None = None
    data_keys: list[str] | None = recorded()

    def check(self) -> None:
        """Raise ConfigError for values that cannot be combined; before a checkpoint is loaded."""
        if not self.checkpoints:
            raise ConfigError("checkpoints must name at least one run folder or file of weights, got []")
        if len(self.pooling) not in (1, len(self.checkpoints)):
            raise ConfigError(
                f"pooling has {len(self.pooling)} values for {len(self.checkpoints)} checkpoint(s); give one, or "
                "one for each"
            )


def run(config: EmbedConfig) -> Iterator[str]:
    """Write the file."""
    raise NotImplementedError
    yield ""


TOOL = Tool("embed", "Write the features of images to a .npz or .parquet file", EmbedConfig, run)
