"""``dmjd predict``: the classes of images with their probabilities, by a classifier or by neighbours, as a CSV file; of
segmentation and detection runs :mod:`dmjd.explore.predict_dense`."""

from __future__ import annotations

import csv
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

from dmjd.config import ImagesConfig
from dmjd.config.fields import choice, number, path, positive
from dmjd.errors import BadFeatures, BadImage, ConfigError, NoSplit
from dmjd.evaluate.miou import MapTestConfig
from dmjd.explore.embed import name_below
from dmjd.explore.embeddings import plain_name
from dmjd.explore.labelled import bank_of_file, bank_of_run
from dmjd.explore.neighbours import SAME
from dmjd.explore.registry import Tool
from dmjd.files import drafted
from dmjd.progress import Progress
from dmjd.redact import shown

if TYPE_CHECKING:
    from torch import Tensor

    from dmjd.data.dataset import ImageDataset, OpenImage, Pixels, Split
    from dmjd.evaluate.encoder import FrozenEncoder

FILE_PARTS = 2
"""Paths in the name of the default file."""
RANKS = 5
"""Classes of the columns of probabilities=top5."""
MOST_CLASSES = 5
"""Predicted classes in the lines that are printed."""
PRINTED = 10
"""Up to this many images, the prediction of each is printed."""
UNREADABLE = -2
"""Label of an image that cannot be decoded."""

logger = logging.getLogger("dmjd")

Predictor: TypeAlias = "Callable[[Tensor], tuple[Tensor, Tensor]]"
"""uint8 images ``[B, H, W, C]`` on the device -> probabilities ``[B, classes]``, and whether each image equals one of
those that vote, bool ``[B]``."""


@dataclass
class PredictConfig(ImagesConfig):
    """Predict the class of each image, with probabilities, as CSV; or segmentation masks, or detections.

    A fine-tuned run or file of weights predicts with its classifier. An encoder predicts by kNN on labelled images, as
    dmjd knn does. A segmentation run writes a PNG of class numbers for each image. A detection run writes boxes and
    masks as COCO's JSON. Both also write a CSV with a row for each image.

    paths: Image files and folders; all images of a folder are predicted. Default: the images of data.
    output: CSV file, or for segmentation and detection a folder; an existing one is replaced. Default:
        RUN/predictions/WEIGHTS-step########.csv, or a folder of that name. The images (paths, data.root or data) and
        the split are added to the name if they are set.
    weights: auto: the exponential moving average of a fine-tuning with ema_decay, else trained. trained: the trained
        weights; the teacher's, if a file holds a student and a teacher (DINO, iBOT). untrained: initial weights. ema:
        exponential moving average, if the run (ema_decay) or the file has one. student: the student's weights of such a
        file.
    split: Images of the data set. auto: the test images of the run's own data, if it has any; all images of other data.
    probabilities: Columns beside the class with the highest probability. all: p_CLASS for each class. top5: classes and
        probabilities of ranks 2 to 5. top1: none.
    labelled: File of dmjd embed, or run folder (its newest file), with labelled features of this encoder for kNN. null:
        the training images of the run.
    neighbours: Number of neighbours (k) of kNN. null: as dmjd knn.
    temperature: Softmax temperature of the neighbours' cosine similarities.
    pooling: Image feature of kNN. mean: mean of the patch tokens. cls: class token.
    batch_size: Images per forward pass. Segmentation: windows, at most 8. Detection: at most 4 images.
    overlays: (segmentation, detection) Also write each image with its prediction drawn over it, as JPEG.
    min_score: (detection) Minimum score of a detection. null: head.min_score of the run.
    test: Segmentation only.
    """

    paths: list[str] | None = path()
    weights: str = choice("auto", "trained", "untrained", "ema", "student")
    split: str = choice("auto", "all", "train", "test")
    probabilities: str = choice("all", "top1", "top5")
    labelled: str | None = path()
    neighbours: int | None = number(None, least=1)
    temperature: float = positive(0.07)
    pooling: str = choice("mean", "cls")
    batch_size: int = positive(64)
    overlays: bool = False
    min_score: float | None = number(None, least=0, below=1)
    test: MapTestConfig = field(default_factory=MapTestConfig)

    def check(self) -> None:
        super().check()
        if self.paths and {"name", "root"} & {*(self.data_keys or ())}:
            raise ConfigError("paths and data both name images; give one of them")


class Part(NamedTuple):
    """Images to predict. name: of their split; empty without splits. classes: of the labels of ``images``."""

    name: str
    images: ImageDataset
    classes: Sequence[str]


class Prediction(NamedTuple):
    """Of one image. label: its class, empty if it is not known. ranked: the most probable classes with their
    probabilities, the first one first. probabilities: of all classes. fault: why there are none. votes: whether it is
    one of the images that vote."""

    name: str
    label: str
    ranked: Sequence[tuple[str, float]] = ()
    probabilities: Sequence[float] = ()
    fault: str = ""
    votes: bool = False


class Tolerant:
    """A data set in which an image that cannot be decoded is a black one with the label :data:`UNREADABLE`."""

    def __init__(self, dataset: ImageDataset) -> None:
        self._dataset = dataset
        self._unreadable = set[int]()  # of this process; a label is read after its image
        self.num_classes, self.channels = dataset.num_classes, dataset.channels
        self.bad: Mapping[int, BadImage] = {}
        self.skipped: Mapping[str, int] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def open(self, index: int) -> OpenImage:
        from dmjd.data.dataset import InMemory

        return InMemory(self.image(index))

    def image(self, index: int) -> Pixels:
        import numpy as np

        try:
            return self._dataset.image(index)
        except BadImage:
            self._unreadable.add(index)
            return np.zeros((1, 1, self.channels), np.uint8)

    def label(self, index: int) -> int:
        return UNREADABLE if index in self._unreadable else self._dataset.label(index)

    def name(self, index: int) -> str:
        return self._dataset.name(index)


@dataclass
class Tally:
    """Counts of one part."""

    images: int = 0
    labelled: int = 0
    correct: int = 0
    unreadable: int = 0
    voting: int = 0
    first_fault: str = ""
    predicted: Counter[str] = field(default_factory=Counter)

    def add(self, found: Prediction, classes: Collection[str]) -> None:
        """Count an image; its label counts if it is one of ``classes``, and if the image does not vote for itself."""
        self.images += 1
        if found.fault:
            self.unreadable += 1
            self.first_fault = self.first_fault or f"{found.name} {found.fault}"
            return
        best, _ = found.ranked[0]
        self.predicted[best] += 1
        self.voting += found.votes
        if not found.votes:
            self.labelled += found.label in classes
            self.correct += found.label == best


def run(config: PredictConfig) -> Iterator[str]:
    """Predict, write the file, and describe it."""
    from dmjd.evaluate.encoder import load_encoder, with_head
    from dmjd.explore.sources import check_output

    for each in config.paths or ():
        if not os.path.lexists(each):
            raise ConfigError(f"{plain_name(each)} does not exist; name image files or folders of images")
    if config.output is not None and Path(config.output).suffix:
        check_output(Path(config.output), (".csv",))
    frozen = load_encoder(config)
    if frozen.objective is not None:
        from dmjd.explore.predict_dense import predict_dense

        yield from predict_dense(frozen, config)
        return
    for key, off in (("overlays", False), ("min_score", None), ("test", MapTestConfig())):
        if getattr(config, key) != off:
            raise ConfigError(f"{key} is for segmentation and detection, and {frozen.path} has no maps; remove it")
    if config.output is not None:
        check_output(Path(config.output), (".csv",))
    if frozen.path.is_file() and config.labelled is None:
        frozen = with_head(frozen)
    default = frozen.run.path / "predictions" / f"{default_name(frozen, config)}.csv"
    output = Path(config.output) if config.output is not None else check_output(default, (".csv",))
    if frozen.classifier is not None:
        classes, predict = _by_classifier(frozen, config)
    else:
        classes, predict = _by_neighbours(frozen, config)
    parts = _parts(frozen, config, classes)
    classes = list(map(plain_name, classes))
    if frozen.classifier is not None and not frozen.classes and len(parts[0].classes) == len(classes):
        classes = list(parts[0].classes)  # of a file of weights, which has no names
    tallies = {part.name: Tally() for part in parts}
    known = set(classes)
    few = sum(len(part.images) for part in parts) <= PRINTED
    replaced = output.exists()
    output.parent.mkdir(parents=True, exist_ok=True)
    with drafted(output) as draft, open(draft, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\r\n")
        head = _head(classes, config.probabilities)
        rows.writerow(head)
        for part in parts:
            for found in _predictions(part, classes, predict, frozen, config):
                row = _row(found, config.probabilities)
                rows.writerow([*row, *[""] * (len(head) - len(row))])
                tallies[part.name].add(found, known)
                if few:
                    yield _line(found)
    yield from _described(tallies)
    if replaced:
        yield f"replaced the earlier {output.name}"
    yield str(output)


def _by_classifier(frozen: FrozenEncoder, config: PredictConfig) -> tuple[list[str], Predictor]:
    import torch

    given = [key for key in ("labelled", "neighbours") if getattr(config, key) is not None]
    if given:
        raise ConfigError(f"{given[0]} is for encoders, and checkpoint={config.checkpoint} has a classifier; remove it")

    def predict(images: Tensor) -> tuple[Tensor, Tensor]:
        found = frozen.logits(images).softmax(dim=1)
        return found, found.new_zeros(len(found), dtype=torch.bool)

    return frozen.class_labels, predict


def _by_neighbours(frozen: FrozenEncoder, config: PredictConfig) -> tuple[list[str], Predictor]:
    import torch.nn.functional as F

    from dmjd.evaluate.features import encode
    from dmjd.evaluate.knn import neighbours_for, votes

    if config.pooling == "cls" and not frozen.encoder.num_prefix_tokens:
        raise ConfigError("pooling=cls needs a class token, and this encoder has none; use pooling=mean")
    bank, classes = bank_of_run(frozen, config) if config.labelled is None else bank_of_file(frozen, config)
    k = config.neighbours or neighbours_for(len(bank), len(classes))
    if k > len(bank):
        raise ConfigError(f"neighbours={k} must be at most the number of labelled images, {len(bank)}")
    values, labels = F.normalize(bank.values.to(frozen.device), dim=1), bank.labels.to(frozen.device)

    def predict(images: Tensor) -> tuple[Tensor, Tensor]:
        features = encode(frozen.encoder, images, mean=frozen.data.mean, std=frozen.data.std, pooling=config.pooling)
        similarity, nearest = (F.normalize(features, dim=1) @ values.T).topk(k, dim=1)
        found = votes(similarity, labels[nearest], len(classes), config.temperature)
        return found / found.sum(dim=1, keepdim=True), similarity[:, 0] >= SAME

    return classes, predict


def _parts(frozen: FrozenEncoder, config: PredictConfig, classes: Sequence[str]) -> list[Part]:
    """The images to predict, by split."""
    from dmjd.data.build import AUTO, build_dataset
    from dmjd.data.image_files import ImageFiles
    from dmjd.evaluate.validation import class_names

    if config.paths:
        channels = cast(Literal[1, 3], frozen.data.channels)
        return [Part("", ImageFiles(config.paths, channels, classes), list(map(plain_name, classes)))]
    data = replace(frozen.data, check="none", max_bad_percent=100.0)
    typed = config.data_keys or []
    own = config.data is None or not {"name", "root"} & set(typed)
    if not own and "val_percent" not in typed:
        data = replace(data, val_percent=0.0)
    trained = frozen.trained.data.name
    unlike = {trained, data.name} <= AUTO.keys() and trained != data.name  # other classes of the same names, 0 to 9

    def part(split: Split) -> Part:
        images = build_dataset(data, split)
        known = [] if unlike or not images.num_classes else class_names(images)
        return Part(split, images, list(map(plain_name, known)))

    if config.split in ("train", "test"):
        return [part(cast("Split", config.split))]
    try:
        test = [part("test")]
    except NoSplit:
        test = []
    return test if test and own and config.split == "auto" else [part("train"), *test]


def _predictions(
    part: Part, classes: Sequence[str], predict: Predictor, frozen: FrozenEncoder, config: PredictConfig
) -> Iterator[Prediction]:
    """The prediction of each image, in order."""
    from dmjd.data.loader import evaluation_loader
    from dmjd.evaluate.encoder import loader_workers

    images, data = part.images, frozen.data
    workers = loader_workers(len(images), config.batch_size) if config.workers is None else config.workers
    loader = evaluation_loader(Tolerant(images), config.batch_size, frozen.size, workers, data.crop_pct, data.timeout)
    with Progress("images", len(images), images=1) as bar:
        for batch in loader:
            probabilities, votes = predict(batch.images.to(frozen.device, non_blocking=True))
            probabilities = probabilities.cpu()
            if not bool(probabilities.isfinite().all()):
                raise BadFeatures(f"the predictions of {frozen.path} hold NaN or infinity; use an earlier checkpoint")
            highest, order = probabilities.sort(dim=1, descending=True, stable=True)
            rows = zip(
                *(batch.sample_ids.tolist(), batch.labels.tolist(), probabilities.tolist()),
                *(highest[:, :RANKS].tolist(), order[:, :RANKS].tolist(), votes.tolist()),
                strict=True,
            )
            for index, label, every, best, ranks, own_vote in rows:
                name = images.name(index)
                name = plain_name(name) if config.paths else name_below(name, data.root)
                own = images.label(index)
                known = part.classes[own] if own >= 0 and part.classes else ""
                if label == UNREADABLE:
                    yield Prediction(name, known, fault=fault_of(images, index))
                else:
                    ranked = [(classes[rank], value) for rank, value in zip(ranks, best, strict=True)]
                    yield Prediction(name, known, ranked, every, votes=own_vote)
            bar.advance(len(batch.labels))


def fault_of(images: ImageDataset, index: int) -> str:
    """Why an image could not be read."""
    try:
        images.image(index)
    except BadImage as error:
        return error.fault
    return "could not be read at first"


# The file and the lines -----------------------------------------------------------------------------------------------


def _head(classes: Sequence[str], columns: str) -> list[str]:
    fixed = ["name", "label", "predicted", "probability", "error"]
    if columns == "all":
        return [*fixed, *(f"p_{name}" for name in classes)]
    ranks = range(2, min(RANKS, len(classes)) + 1) if columns == "top5" else ()
    return [*fixed, *(f"{column}_{rank}" for rank in ranks for column in ("predicted", "probability"))]


def _row(found: Prediction, columns: str) -> list[str]:
    if found.fault:
        return [found.name, found.label, "", "", found.fault]
    (best, highest), *others = found.ranked
    fixed = [found.name, found.label, best, f"{highest:.6g}", ""]
    if columns == "all":
        return [*fixed, *(f"{value:.6g}" for value in found.probabilities)]
    ranked = others if columns == "top5" else []
    return [*fixed, *(cell for name, value in ranked for cell in (name, f"{value:.6g}"))]


def _line(found: Prediction) -> str:
    """The prediction of one image for the terminal."""
    if found.fault:
        return f"{found.name}: {found.fault}"
    return f"{found.name}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.ranked[:3])


def _described(tallies: Mapping[str, Tally]) -> Iterator[str]:
    """Lines about the images of each part."""
    for name, tally in tallies.items():
        parts = [f"{tally.images} image{'s' * (tally.images != 1)}"]
        if tally.unreadable:
            parts.append(f"{tally.unreadable} of them cannot be read, the first: {tally.first_fault}")
        if tally.labelled:
            parts.append(f"top-1 {100 * tally.correct / tally.labelled:.2f} % of {tally.labelled} labelled ones")
        if tally.voting:
            parts.append(f"{tally.voting} of them are among the labelled kNN images and not counted in the accuracy")
        yield f"{name}: " * bool(name) + "; ".join(parts)
        if tally.predicted:
            most = tally.predicted.most_common(MOST_CLASSES)
            more = f" and {len(tally.predicted) - len(most)} more classes" if len(tally.predicted) > len(most) else ""
            yield "predicted: " + ", ".join(f"{label} ({count})" for label, count in most) + more


def default_name(frozen: FrozenEncoder, config: PredictConfig) -> str:
    """The name of the default file or folder; it has the images and the split if they are given."""
    of = config.paths or []
    if not of and config.data is not None:
        of = [frozen.data.root or frozen.data.name]
    images = "-".join(_label(each) for each in of[:FILE_PARTS])
    if len(of) > FILE_PARTS:
        images += f"-and-{len(of) - FILE_PARTS}-more"
    split = "" if config.paths or config.split == "auto" else config.split
    return "-".join(filter(None, (frozen.weights, f"step{frozen.step:08d}", images, split)))


def _label(images: str) -> str:
    """The last two parts of a path, of at most 30 characters, for the name of a file."""
    parts = [part for part in Path(shown(images)).parts[-2:] if part not in ("..", os.sep)]
    return re.sub(r"[^\w.-]+", "_", "_".join(parts))[-30:]


TOOL = Tool(
    "predict",
    "Predict classes, maps of classes or objects of images: dmjd predict RUN [IMAGE|FOLDER ...]",
    PredictConfig,
    run,
)
