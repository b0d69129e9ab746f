"""Each test image is counted once, whatever the number of processes and the batch size."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, recall_score, top_k_accuracy_score
from torch import Tensor, nn

from dmjd.config import DataConfig
from dmjd.data.build import check_labels
from dmjd.data.dataset import ArrayDataset, OpenImage
from dmjd.data.folder import ImageFolder
from dmjd.data.waiting import interrupted_by
from dmjd.errors import BadImage, DataError, StopRequested, UserError
from dmjd.evaluate.validation import (
    check_same_classes,
    evaluate_classifier,
    main_score,
    validate,
    validation_dataset,
)
from dmjd.parallel.world import World
from dmjd.train.stop import Requests
from tests.evaluate.worlds import in_worlds

SIZE, CPU = 4, torch.device("cpu")
DATA = DataConfig(image_size=[SIZE, SIZE], crop_pct=1.0, channels=1, mean=[0.5], std=[0.5])


def images(count: int, classes: int, seed: int = 0) -> ArrayDataset:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, SIZE, SIZE, 1), dtype=np.uint8)
    return ArrayDataset(pixels, rng.integers(0, classes, count), classes, "test")


class Step:
    """A linear classifier of pixels in place of a fine-tuning step. ``average``: weights of its average."""

    def __init__(self, classes: int, average: float | None = None) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(SIZE * SIZE, classes)
        self.averages: Mapping[str, Tensor] = (
            {} if average is None else {"weight": self.linear.weight.detach() * average}
        )
        self.passes: list[int] = []

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        self.passes.append(len(images))
        return self.linear(images.flatten(1).float() / 255)

    @contextmanager
    def with_average(self) -> Iterator[None]:
        before = self.linear.weight.data
        self.linear.weight.data = self.averages["weight"]
        yield
        self.linear.weight.data = before


def configuration(batch_size: int) -> Any:
    return SimpleNamespace(batch_size=batch_size, engine=SimpleNamespace(grad_accum_steps=1), workers=0, data=DATA)


def of_sklearn(step: Step, dataset: ArrayDataset, classes: int) -> dict[str, Any]:
    pixels = torch.stack([torch.from_numpy(dataset.image(i)) for i in range(len(dataset))])
    labels = np.array([dataset.label(i) for i in range(len(dataset))])
    logits = step.logits(pixels).double()
    every = np.arange(classes)
    return {
        "top1": 100 * float((logits.argmax(1).numpy() == labels).mean()),
        "top5": 100 * top_k_accuracy_score(labels, logits.numpy(), k=5, labels=every) if classes > 5 else None,
        "balanced_top1": 100 * recall_score(labels, logits.argmax(1), labels=np.unique(labels), average="macro"),
        "loss": log_loss(labels, logits.softmax(1).numpy(), labels=every),
    }


@pytest.mark.parametrize(("count", "classes", "batch"), [(23, 7, 12), (1, 7, 12), (24, 2, 6), (50, 30, 6), (7, 3, 99)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_scores_equal_scikit_learns_for_any_number_of_processes(
    size: int, count: int, classes: int, batch: int
) -> None:
    dataset = images(count, classes)
    steps = {rank: Step(classes, average=-1.0) for rank in range(size)}
    found = in_worlds(size, lambda world: validate(steps[world.rank], dataset, configuration(batch), world))
    assert all(scores == found[0] for scores in found), "every rank has the same scores"
    step = Step(classes, average=-1.0)
    expected = {f"val_{name}": value for name, value in of_sklearn(step, dataset, classes).items()}
    with step.with_average():
        expected |= {f"val_ema_{name}": value for name, value in of_sklearn(step, dataset, classes).items()}
    assert found[0].keys() == expected.keys()
    for name, value in expected.items():
        assert found[0][name] == (None if value is None else pytest.approx(value, rel=1e-6)), name
    assert main_score(found[0]) == found[0]["val_ema_top1"]
    assert len({tuple(step.passes) for step in steps.values()}) == 1, "equally many passes of equal sizes on every rank"
    assert len(set(steps[0].passes)) == 1
    assert max(steps[0].passes) <= batch // size


def test_without_an_average_the_main_score_is_that_of_the_weights() -> None:
    scores = validate(Step(7), images(20, 7), configuration(8), World(0, 1, 0, CPU))
    assert sorted(scores) == ["val_balanced_top1", "val_loss", "val_top1", "val_top5"]
    assert main_score(scores) == scores["val_top1"]


def test_equal_logits_and_numbers_that_are_not_finite() -> None:
    """Equal logits rank by class, as in a stable sort; an image without finite logits is no hit."""
    dataset = ArrayDataset(np.zeros((4, SIZE, SIZE, 1), np.uint8), np.array([0, 1, 5, 6]), 7, "test")
    table = torch.zeros(4, 7)
    assert evaluate_classifier(lambda images: table[: len(images)].bfloat16(), dataset, DATA, 4, 0)[:3] == (25, 50, 25)
    assert evaluate_classifier(lambda images: torch.zeros(4, 9), dataset, DATA, 4, 0)[:3] == (25, 50, 25), (
        "a wider head"
    )
    table[0, 3] = float("nan")
    assert evaluate_classifier(lambda images: table[: len(images)], dataset, DATA, 4, 0)[:2] == (0, 25)


class Failing(ArrayDataset):
    """Its last image cannot be read."""

    def open(self, index: int) -> OpenImage:
        if index == len(self) - 1:
            raise BadImage("last.png", "undecodable", "cannot be decoded")
        return super().open(index)


def test_a_bad_image_or_a_request_to_stop_at_one_rank_ends_the_validation_on_all() -> None:
    bad = Failing(np.zeros((9, SIZE, SIZE, 1), np.uint8), np.zeros(9, int), 2, "test")
    errors = in_worlds(3, lambda world: validate(Step(2), bad, configuration(3), world))
    assert [type(error) for error in errors] == [UserError, UserError, BadImage]
    assert all("last.png cannot be decoded" in str(error) for error in errors)
    assert [error.reported for error in errors] == [True, True, False], "one rank prints it"

    stopping = threading.Event()

    class Stopped(Step):
        def logits(self, images: Tensor) -> Tensor:
            if len(self.passes) == 2:
                stopping.set()
            return super().logits(images)

    steps = {rank: (Stopped if rank == 1 else Step)(2) for rank in range(2)}
    with interrupted_by(lambda: stopping.is_set()):
        ends = in_worlds(2, lambda world: validate(steps[world.rank], images(40, 2), configuration(4), world))
    assert [type(end) for end in ends] == [StopRequested, StopRequested]
    assert len(steps[0].passes) == len(steps[1].passes) < 10


def test_a_request_to_one_rank_is_the_reason_of_all(tmp_path: Path) -> None:
    def ask(world: World) -> str | None:
        requests = Requests(tmp_path, world, None)
        if world.rank == 1:
            requests._on_signal(signal.SIGTERM)
        requests.stop_now()
        return requests.reason

    assert in_worlds(2, ask) == ["signal", "signal"]


def test_images_without_the_classes_of_the_training_are_an_error(image_folder: Path) -> None:
    data = DataConfig(root=str(image_folder), image_size=[16, 16], channels=1, mean=[0.5], std=[0.5])
    train = ImageFolder(str(image_folder), "train", 1)
    assert len(validation_dataset(data, train)) == 12
    with pytest.raises(DataError, match="the test images have 2 classes, and the training images 3; use images"):
        validation_dataset(data, images(8, 3))
    with pytest.raises(DataError, match=r"^the test images have no labels; put those of each class into a folder"):
        check_labels(ArrayDataset(np.zeros((1, 4, 4, 1), np.uint8), np.array([-1]), 0, "x"), "the test images")
    with pytest.raises(DataError, match=r"^the training images have one class, and a score needs two or more"):
        validation_dataset(data, images(8, 1))
    for label in (3, -1):
        beyond = ArrayDataset(np.zeros((2, 4, 4, 1), np.uint8), np.array([0, label]), 3, "x")
        with pytest.raises(DataError, match=rf"^the test images must have labels 0 to 2, and x\[1\] has {label};"):
            check_labels(beyond, "the test images")
    test = validation_dataset(data, train)
    check_same_classes(test, ["down", "up"], "this run")
    with pytest.raises(DataError, match="class 1 of the test images is 'up', and of this run 'left'; use images of"):
        check_same_classes(test, ["down", "left"], "this run")
    check_same_classes(images(8, 2), ["0", "1"], "this run")
