"""``dmjd tsne``: t-SNE maps of embeddings, one panel per encoder, as a PNG and as a page with thumbnails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from dmjd.config.fields import choice, number, path, suggestion
from dmjd.errors import ConfigError, DataError, printable_message
from dmjd.explore.embeddings import embeddings_at
from dmjd.explore.registry import Tool
from dmjd.files import printable
from dmjd.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dmjd.explore.embeddings import Embeddings

CLASSES = 20
"""Classes that are drawn if the images are of more, as in the paper's figure."""
FEWEST = 10
"""Images of which a map can be made."""
ITERATIONS = (250, 500)
"""Of openTSNE: early exaggeration, then the optimisation proper."""
EXACT = 10_000
"""Images up to which the nearest neighbours are exact; beyond, openTSNE's approximation (Annoy) is faster."""
_EVERY = 25  # iterations between two updates of the progress bar
MOST_THUMBNAILS = 7_500_000  # bytes on a page; base64 adds a third
_LARGEST_THUMBNAIL = 1024  # pixels of a side
_LONGEST_SETTING = 500  # characters


@dataclass
class TsneConfig:
    """t-SNE maps of embeddings: one map per encoder, side by side, of the same images.

    embeddings: Files of dmjd embed, or run folders (the newest file of each).
    output: Folder of tsne.png and tsne.html. Default: RUN/explore; for a file, its folder.
    split: Images: all, or those of the split train or test.
    classes: Number of classes to draw at random, or a list of names such as [cat,dog]. null: 20, or all if there are
        fewer.
    images: Maximum number of images, evenly spaced, with equal numbers per class if possible. A map of 5,000 images
        with 384 features takes about 12 s per encoder on a CPU core.
    perplexity: t-SNE perplexity, roughly the number of neighbours that attract each image. At most a third of the
        number of images is used.
    seed: Random seed of the choice of classes and of t-SNE.
    """

    embeddings: list[str] = path("???")
    output: str | None = path()
    split: str = choice("all", "train", "test")
    classes: list[str] | None = None
    images: int = number(5000, least=FEWEST)
    perplexity: float = number(30.0, least=1)
    seed: int = number(0, least=0, below=2**32)


class Selection(NamedTuple):
    """Images of a map, and the numbers that they were selected from.

    rows: int64 ``[N]``, ascending, of the embeddings. labels: int64 ``[N]``, indices of ``classes``, which are names,
    none without labels. available: images of the split and these classes. present: classes of all images of the split.
    unlabelled: images that were left out, since others have labels.
    """

    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: list[str]
    available: int
    present: int
    unlabelled: int


def select(embeddings: Embeddings, config: TsneConfig) -> Selection:
    """The images of the split and the classes, at most ``config.images``: as many of each class as of every other that
    has as many, evenly spaced. If any image has a label, those without are left out.

    Raises:
        ConfigError: for classes that there are not.
        DataError: for fewer than :data:`FEWEST` images.
    """
    import numpy as np

    from dmjd.data.dataset import evenly

    candidates = np.arange(len(embeddings))
    if config.split != "all":
        candidates = candidates[np.asarray(embeddings.splits) == config.split]
    labels = embeddings.labels[candidates]
    unlabelled = int((labels < 0).sum()) if (labels >= 0).any() else 0
    if (labels >= 0).any():
        present = np.unique(labels[labels >= 0])
        chosen = _chosen_classes(config, [embeddings.classes[label] for label in present])
        kept = present[chosen]
        groups = [candidates[labels == label] for label in kept]
        classes, of = [embeddings.classes[label] for label in kept], len(present)
    elif config.classes is not None:
        raise ConfigError(f"classes={','.join(config.classes)}: these images have no labels; leave classes out")
    else:
        groups, classes, of = [candidates], [], 0
    counts = shares([len(group) for group in groups], config.images)
    spaced = [group[evenly(len(group), count)] for group, count in zip(groups, counts, strict=True)]
    rows, labels = np.concatenate(spaced), np.repeat(np.arange(len(groups)), counts)
    if len(rows) < FEWEST:
        which = "" if config.split == "all" else f" with split={config.split}"
        number_of = "there is 1 image" if len(rows) == 1 else f"there are {len(rows)} images"
        raise DataError(f"{number_of}{which}, and a t-SNE map needs at least {FEWEST}; embed more")
    order = rows.argsort()
    return Selection(rows[order], labels[order], classes, sum(map(len, groups)), of, unlabelled)


def _chosen_classes(config: TsneConfig, present: Sequence[str]) -> list[int]:
    """Ascending indices of the chosen classes among those that have images."""
    import numpy as np

    from dmjd.explore.scatter import MAX_CLASSES

    if config.classes is not None and not (len(config.classes) == 1 and config.classes[0].isdecimal()):
        for name in config.classes:
            if name not in present:
                hint = suggestion(name, present) or f"; there are {len(present)}, such as {', '.join(present[:5])}"
                raise ConfigError(f"classes: no image is of the class {printable(name)!r}{hint}")
        chosen = sorted({present.index(name) for name in config.classes})
        if not 2 <= len(chosen) <= MAX_CLASSES:
            raise ConfigError(f"classes must name between 2 and {MAX_CLASSES} classes, got {len(chosen)}")
        return chosen
    count = min(CLASSES, len(present)) if config.classes is None else int(config.classes[0])
    if config.classes is not None and not 2 <= count <= min(MAX_CLASSES, len(present)):
        raise ConfigError(
            f"classes={count} must be at least 2 and at most {min(MAX_CLASSES, len(present))}: the images are of "
            f"{len(present)} classes, and {MAX_CLASSES} have distinct marks; several names choose classes: [NAME,NAME]"
        )
    drawn = np.random.default_rng(config.seed).permutation(len(present))[:count]
    return sorted(int(index) for index in drawn)


def shares(counts: Sequence[int], total: int) -> list[int]:
    """Images of each class, at most ``counts`` and ``total`` in all, as equal as the counts allow."""
    found = [0] * len(counts)
    left = total
    smallest_first = sorted(range(len(counts)), key=counts.__getitem__)
    for rank, index in enumerate(smallest_first):
        found[index] = min(counts[index], left // (len(counts) - rank))
        left -= found[index]
    return found


def tsne(
    features: NDArray[np.float32], perplexity: float, seed: int, advance: Callable[[int], object] | None = None
) -> NDArray[np.float64]:
    """t-SNE of ``features [N, D]`` in two dimensions, ``[N, 2]``: cosine distance, PCA as initialisation, one thread,
    so that equal arguments give equal maps on one machine.

    advance: called with the number of iterations since its last call.

    Source: openTSNE (Policar et al., 2024); its other settings are its defaults.
    """
    import numpy as np
    from openTSNE import TSNE

    def progress(iteration: int, error: float, embedding: NDArray[np.float64]) -> None:
        if advance is not None:
            advance(_EVERY)

    early, iterations = ITERATIONS
    fitted = TSNE(
        perplexity=perplexity,
        early_exaggeration_iter=early,
        n_iter=iterations,
        initialization="pca",
        metric="cosine",
        neighbors="exact" if len(features) <= EXACT else "auto",
        n_jobs=1,
        callbacks=progress,
        callbacks_every_iters=_EVERY,
        random_state=seed,
    ).fit(features)
    return np.asarray(fitted, dtype=np.float64)


def perplexity_for(images: int, perplexity: float) -> float:
    """``perplexity``, or the most that ``images`` allow: each takes its three times as many neighbours into account."""
    return min(perplexity, (images - 1) / 3)


def fitting(thumbnails: Sequence[bytes], limit: int) -> list[bytes]:
    """``thumbnails`` if they have at most ``limit`` bytes in all, else smaller ones: WebP files with fewer pixels. One
    that cannot be decoded is an empty file then."""
    size = sum(map(len, thumbnails))
    if size <= limit:
        return list(thumbnails)
    import io

    from PIL import Image

    found = []
    scale = min(1.0, (1.5 * limit / size) ** 0.5)  # WebP takes about half the bytes of JPEG
    for content in thumbnails:
        file = io.BytesIO()
        try:
            with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
                if max(image.size) > _LARGEST_THUMBNAIL:
                    raise ValueError("no thumbnail")
                sides = tuple(max(1, round(scale * side)) for side in image.size)
                image.convert("RGB").resize(sides, Image.Resampling.LANCZOS).save(file, "WEBP", quality=60)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            file = io.BytesIO()
        found.append(file.getvalue())
    return found


def run(config: TsneConfig) -> Iterator[str]:
    """Compute the maps, and write the PNG and the page; returns the lines to print."""
    if find_spec("openTSNE") is None:
        raise ModuleNotFoundError("dmjd tsne needs openTSNE", name="openTSNE")  # before the files are read
    if not config.embeddings:
        raise ConfigError("embeddings must name at least one file or run folder, got []")
    import numpy as np
    import torch

    from dmjd.evaluate.features import Features
    from dmjd.evaluate.knn import LEFT_OUT, leave_one_out
    from dmjd.explore.scatter import Panel, scatter_png
    from dmjd.explore.scatter_page import scatter_page
    from dmjd.explore.sources import origin, output_folder, read_together, write_files

    folder = output_folder(config.embeddings[0], config.output)
    embeddings = read_together(config.embeddings)
    selection = select(embeddings, config)
    count, classes = len(selection.rows), selection.classes
    perplexity = perplexity_for(count, config.perplexity)
    chosen = {name: values[selection.rows] for name, values in embeddings.features.items()}
    for name, values in chosen.items():
        lengths = np.linalg.norm(values, axis=1)
        if values.shape[1] < 2:
            raise DataError(f"{name} has one feature per image, and a map in two dimensions needs at least 2")
        if not np.ptp(values, axis=0).any() or not (lengths > 0).all() or not np.isfinite(lengths).all():
            raise DataError(
                f"the features of {name} are equal, zero or too large for a cosine distance; embed the images with "
                "another checkpoint"
            )
    panels, lines = [], []
    with Progress("t-SNE iterations", sum(ITERATIONS) * len(chosen)) as bar:
        for name, values in chosen.items():
            points = tsne(values, perplexity, config.seed, bar.advance)
            notes = [origin(embeddings, name, ("weights", "step"), 40)]
            if len(classes) > 1:
                bank = Features(torch.from_numpy(values), torch.from_numpy(selection.labels))
                result, k = leave_one_out(bank, len(classes), torch.device("cpu"))
                notes.append(f"kNN top-1 {result.top1:.1f} %")
                lines.append(f"{name}: {notes[-1]} (k {k}, leave-one-out, {min(count, LEFT_OUT):,} images)")
            panels.append(Panel(printable_message(name), ": ".join(filter(None, notes)), points))
    training = int((np.asarray(embeddings.splits)[selection.rows] == "train").sum())
    about = [images_line(config, selection, training), map_line(config, perplexity)]
    if lines:
        about.append(
            f"kNN top-1: accuracy of the class predicted from the {k} nearest other images, by cosine similarity of "
            "the features (not by distance in the map)."
        )
    order = np.random.default_rng(0).permutation(count)  # else the last class would cover the others
    png = scatter_png(panels, selection.labels, classes, order, " ".join(about))
    thumbnails = embeddings.thumbnails
    page = scatter_page(
        "t-SNE of " + (panels[0].title if len(panels) == 1 else f"{len(panels)} encoders"),
        about,
        panels,
        names=[embeddings.names[row] for row in selection.rows],
        splits=[str(embeddings.splits[row]) for row in selection.rows],
        labels=selection.labels,
        classes=classes,
        thumbnails=thumbnails and fitting([thumbnails[row] for row in selection.rows], MOST_THUMBNAILS),
        order=order,
        settings=_settings(config, embeddings),
        png=png,
    )
    return iter([*about[:2], *lines, *write_files(folder, {"tsne.png": png, "tsne.html": page})])


def images_line(config: TsneConfig, selection: Selection, training: int) -> str:
    """The images of the maps, how they were selected, and the number of training images among them, which a fine-tuned
    encoder has seen with their labels."""
    import numpy as np

    count, classes = len(selection.rows), selection.classes
    text = f"{count:,} images" + (
        f" of {len(classes)} class{'es' * (len(classes) > 1)}" if classes else " without labels"
    )
    if len(classes) < selection.present and (config.classes is None or len(config.classes) == 1):
        text += f" drawn from {selection.present:,} (seed {config.seed})"
    of_each = np.bincount(selection.labels)
    if count < selection.available:
        least, most = int(of_each.min()), int(of_each.max())
        each = f"{least:,} to {most:,}" if least < most else f"{most:,}"
        text += f"; {each} of each class, evenly spaced" if classes else ", evenly spaced"
        text += f", of {selection.available:,} images"
    if selection.unlabelled:
        text += f"; {selection.unlabelled:,} without a label left out"
    if config.split != "all":
        return f"{text}; split {config.split}."
    return f"{text}; {training:,} training and {count - training:,} test images."


def map_line(config: TsneConfig, perplexity: float) -> str:
    """The settings of t-SNE."""
    reduced = f" (the most for so few images; {config.perplexity:g} was set)" if perplexity < config.perplexity else ""
    return (
        f"t-SNE by openTSNE: cosine distance, PCA initialisation, perplexity {perplexity:.3g}{reduced}, seed "
        f"{config.seed}."
    )


def _settings(config: TsneConfig, embeddings: Embeddings) -> list[tuple[str, str]]:
    """Names and values: the files, t-SNE's version, and all that the files record of their encoders and data; of images
    that were left out the number."""
    import openTSNE

    from dmjd.explore.sources import shortened

    rows = [("files", ", ".join(embeddings_at(source).name for source in config.embeddings))]
    rows.append(("openTSNE", openTSNE.__version__))
    settings = embeddings.settings
    encoders, left_out = settings.get("encoders"), settings.get("left_out")
    if isinstance(encoders, dict):
        rows += [(f"encoder {name}", _plain(encoders.get(name))) for name in embeddings.features]
    rows += [(key, _plain(settings[key])) for key in ("data", "split", "dmjd") if key in settings]
    if isinstance(left_out, dict):
        rows.append(("images left out", str(len(left_out))))
    return [
        (printable_message(key), shortened(printable_message(printable(value)), _LONGEST_SETTING))
        for key, value in rows
    ]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_leaf(each)}" for key, each in value.items())
    return _leaf(value)


def _leaf(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


TOOL = Tool("tsne", "Draw t-SNE maps of embeddings as PNG and HTML: dmjd tsne RUN|FILE [RUN|FILE ...]", TsneConfig, run)
