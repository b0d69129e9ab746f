"""The confusion matrix and its scores, against plain loops and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score

from dmjd.errors import DataError
from dmjd.evaluate.confusion import ConfusionMatrix
from tests.evaluate.worlds import CPU, in_worlds

CLASSES = 7
ABSENT = 4  # neither in a truth nor in a prediction
ONLY_PREDICTED = 5


@pytest.fixture
def maps() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Predictions and truths of five images of other sizes, some pixels ignored."""
    rng = np.random.default_rng(0)
    found = []
    for height, width in ((7, 9), (1, 1), (20, 3), (16, 16), (5, 31)):
        truth = rng.choice([0, 1, 2, 3, 6, 255], (height, width)).astype(np.uint8)
        guess = rng.choice([0, 1, 2, 3, ONLY_PREDICTED, 6], (height, width))
        predicted = np.where(rng.random((height, width)) < 0.5, guess, np.where(truth == 255, 0, truth))
        found.append((torch.from_numpy(predicted.astype(np.uint8)), torch.from_numpy(truth)))
    return found


def matrix_of(maps: list[tuple[torch.Tensor, torch.Tensor]], classes: int = CLASSES) -> ConfusionMatrix:
    matrix = ConfusionMatrix(classes, CPU)
    for predicted, truth in maps:
        matrix.add(predicted, truth)
    return matrix


def test_counts_and_scores_equal_scikit_learns_and_plain_loops(maps: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    matrix = matrix_of(maps)
    predicted, truth = (torch.cat([each[part].flatten() for each in maps]).numpy() for part in (0, 1))
    known = truth != 255
    every = np.arange(CLASSES)
    assert (matrix.counts[:, :CLASSES].numpy() == confusion_matrix(truth[known], predicted[known], labels=every)).all()
    assert int(matrix.counts[:, CLASSES:].sum()) == 0
    found = matrix.scores()
    occurring = [number for number in range(CLASSES) if number != ABSENT]
    iou = 100 * jaccard_score(truth[known], predicted[known], labels=occurring, average=None)
    assert [found.iou[number] for number in occurring] == pytest.approx(iou.tolist())
    assert found.iou[ABSENT] is None
    assert found.iou[ONLY_PREDICTED] == 0, "it is predicted, so it counts"
    assert found.occurring == len(occurring)
    assert found.miou == pytest.approx(iou.mean())
    plain = list[float]()
    for number in range(CLASSES):
        pixels = [(p, t) for p, t in zip(predicted.tolist(), truth.tolist(), strict=True) if t == number]
        right = sum(p == t for p, t in pixels)
        if pixels:
            plain.append(100 * right / len(pixels))
            assert found.accuracy[number] == pytest.approx(plain[-1])
        else:
            assert found.accuracy[number] is None
    assert found.macc == pytest.approx(np.mean(plain))
    assert found.aacc == pytest.approx(100 * (predicted[known] == truth[known]).mean())


def test_classes_of_a_wider_head_are_wrong_and_no_classes(maps: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """As if they were another wrong class: the union of the true class counts them."""
    wider = [(torch.where(p == ONLY_PREDICTED, 200, p), t) for p, t in maps]
    found, before = matrix_of(wider).scores(), matrix_of(maps).scores()
    assert found.iou[ONLY_PREDICTED] is None
    assert [each for number, each in enumerate(found.iou) if number != ONLY_PREDICTED] == [
        each for number, each in enumerate(before.iou) if number != ONLY_PREDICTED
    ]
    assert found.aacc == before.aacc


def test_the_sum_over_ranks_is_that_of_one(maps: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    found = in_worlds(3, lambda world: matrix_of(maps[world.rank :: 3]).scores(world))
    assert found == [matrix_of(maps).scores()] * 3


def test_counts_beyond_the_integers_of_float32_are_exact() -> None:
    matrix = ConfusionMatrix(2, CPU)
    matrix.counts += 2**40
    matrix.add(torch.zeros(1, 1, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
    assert int(matrix.counts[0, 0]) == 2**40 + 1


@pytest.mark.gpu
def test_counts_of_a_gpu_are_those_of_the_cpu(maps: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    matrix = ConfusionMatrix(CLASSES, torch.device("cuda"))
    for predicted, truth in maps:
        matrix.add(predicted.cuda(), truth.cuda())
    assert matrix.counts.cpu().equal(matrix_of(maps).counts)
    assert matrix.scores() == matrix_of(maps).scores()


def test_no_pixel_with_a_class_is_an_error() -> None:
    matrix = ConfusionMatrix(2, CPU)
    matrix.add(torch.zeros(3, 3, dtype=torch.uint8), torch.full((3, 3), 255, dtype=torch.uint8))
    with pytest.raises(DataError, match="no pixel of the validation images has a class"):
        matrix.scores()
