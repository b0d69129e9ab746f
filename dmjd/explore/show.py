"""``dmjd show``: pictures of a model: reconstructions, masks, HOG, attention maps and PCA of patch tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dmjd.config import ImagesConfig
from dmjd.config.fields import choice, number, path, recorded
from dmjd.errors import ConfigError
from dmjd.explore.registry import Tool

KINDS = ("reconstruction", "masks", "hog", "attention", "pca")


@dataclass
class ShowConfig(ImagesConfig):
    """Pictures of a model's masks, reconstructions and features, for any images.

    paths: Image files and folders; of a folder, evenly spaced images are taken (images=). Default: images of the run's
        data.
    images: Number of images from the data set or from each folder.
    split: Images of the run's data. auto: test images, or training images if there are none.
    kinds: List of pictures: reconstruction, masks, hog, attention, pca. null: all that the model supports.
    epoch: Epoch of the masks, from 0. Training images of a run have the masks of this epoch of training.
    seed: Seed of the masks. null: the run's.
    views: Number of views to show. null: all of the method's.
    query: Row and column of the patch whose attention is shown, as fractions of height and width such as [0.5,0.5].
        null: the class token; for encoders without one, the mean over all patches.
    max_kb: Maximum size of a picture in kB; its images are made smaller until it fits. Reports embed the files.
    output: Folder of the pictures. Default: RUN/pictures, which dmjd report includes; for a file of weights the folder
        pictures in a folder named like the file without its suffix.
    weights: auto: the exponential moving average of a fine-tuning with ema_decay, else trained. trained: the trained
        weights; the teacher's, if a file holds a student and a teacher (DINO, iBOT). untrained: initial weights. ema:
        exponential moving average, if the run (ema_decay) or the file has one. student: the student's weights of such a
        file.
    device: auto: CUDA if available, else CPU.
    data: By default those of pre-training; keys that are set replace single values. data.root=DIR reads the images of
        another folder. data.image_size=448 sets the size of all pictures; by default attention and PCA use twice the
        size of pre-training.
    """

    weights: str = choice("auto", "trained", "untrained", "ema", "student")
    paths: list[str] | None = path()
    images: int = number(6, least=1, most=64)
    split: str = choice("auto", "train", "test")
    kinds: list[str] | None = None
    epoch: int = number(0, least=0)
    seed: int | None = number(None, least=0)
    views: int | None = number(None, least=1)
    query: list[float] | None = None
    max_kb: int = number(300, least=20)
    output: str | None = path()
    workers: int | None = recorded()

    def check(self) -> None:
        super().check()
        for kind in self.kinds or ():
            if kind not in KINDS:
                raise ConfigError(f"kinds must be a list of {', '.join(KINDS)}, got {kind!r}")
        if self.kinds == []:
            raise ConfigError(f"kinds must hold at least one of {', '.join(KINDS)}, got []")
        if self.query is not None and not (len(self.query) == 2 and all(0 <= part <= 1 for part in self.query)):
            raise ConfigError(
                f"query must be [ROW,COLUMN] in fractions of height and width from 0 to 1, got {self.query}"
            )


def run(config: ShowConfig) -> list[str]:
    """Write the pictures; returns lines to print: the files, and the kinds that the model does not have."""
    from dmjd.evaluate.encoder import load_encoder
    from dmjd.explore.figures import Shown
    from dmjd.explore.sources import check_output, write_files

    frozen = load_encoder(config)
    folder = check_output(frozen.run.pictures if config.output is None else Path(config.output))
    figures, lines = (shown := Shown(config, frozen)).figures(config.kinds or KINDS, bool(config.kinds))
    names = {kind: f"{'-'.join(filter(None, ('show', kind)))}.png" for kind in figures}
    files = {names[kind]: shown.png(figure, 1000 * config.max_kb) for kind, figure in figures.items()}
    return [*write_files(folder, files), *lines]


TOOL = Tool(
    "show",
    "Draw reconstructions, masks, HOG, attention maps and PCA as PNG: dmjd show RUN [IMAGE ...]",
    ShowConfig,
    run,
)
