from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmjd.compose import compose
from dmjd.errors import ConfigError, DataError
from dmjd.evaluate import describe, evaluate, knn
from dmjd.evaluate.encoder import FrozenEncoder
from dmjd.evaluate.features import Features, accuracies
from dmjd.evaluate.knn import KnnResult, knn_accuracy, knn_table, neighbours_for

CPU = torch.device("cpu")


def random_features(count: int, classes: int, *, seed: int, dim: int = 12) -> Features:
    """Unit-variance noise around one weak centre per class: hard enough that neighbours disagree."""
    generator = torch.Generator().manual_seed(seed)
    centres = 0.7 * torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, classes, (count,), generator=generator)
    return Features(centres[labels] + torch.randn(count, dim, generator=generator), labels)


def oracle(train: Features, test: Features, classes: int, k: int, temperature: float) -> tuple[float, float]:
    """Top-1 and top-5 in percent: float64, one query, one neighbour and one vote at a time."""
    bank = [row / math.sqrt(float(row @ row)) for row in train.values.double().numpy()]
    hits1 = hits5 = 0
    for row, label in zip(test.values.double().numpy(), test.labels.tolist(), strict=True):
        query = row / math.sqrt(float(row @ row))
        ranked = sorted(((float(query @ other), int(train.labels[i])) for i, other in enumerate(bank)), reverse=True)
        votes = np.zeros(classes)
        for similarity, neighbour in ranked[:k]:
            votes[neighbour] += math.exp(similarity / temperature)
        best = [c for c in np.argsort(-votes) if votes[c] > 0]
        hits1 += label == best[0]
        hits5 += label in best[:5]
    return 100 * hits1 / len(test), 100 * hits5 / len(test)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (5, 0.07), (20, 0.07), (20, 1.0), (300, 0.5)])
@pytest.mark.parametrize("block", [1 << 26, 300 * 7])
def test_equals_a_loop_over_single_votes(
    k: int, temperature: float, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn, "_SIMILARITIES_PER_BLOCK", block)
    train, test = random_features(300, 10, seed=1), random_features(120, 10, seed=2)
    result = knn_accuracy(train, test, 10, device=CPU, k=k, temperature=temperature)
    top1, top5 = oracle(train, test, 10, k, temperature)
    assert 20 < top1 < 90, "too easy or too hard to tell implementations apart"
    assert result.top1 == pytest.approx(top1)
    assert result.top5 == pytest.approx(top5)


def test_weights_decide_against_the_majority() -> None:
    """Two far neighbours outvote one near one at a high temperature, and not at a low one."""
    angles = torch.tensor([0.1, 0.8, 0.8])
    train = Features(torch.stack((angles.cos(), angles.sin()), dim=1), torch.tensor([1, 0, 0]))
    test = Features(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    # cos 0.1 - cos 0.8 = 0.298: the near neighbour weighs exp(0.298 / T), which passes 2 at T = 0.43.
    # At 1e-4 exp(cosine / T) itself is infinite for all three.
    for temperature, top1 in ((1e-4, 100.0), (0.42, 100.0), (0.44, 0.0)):
        assert knn_accuracy(train, test, 2, device=CPU, k=3, temperature=temperature).top1 == top1


@pytest.mark.parametrize(
    ("images", "classes", "k"), [(1_281_167, 1000, 20), (60_000, 10, 20), (240, 10, 6), (30, 10, 1), (5, 50, 1)]
)
def test_neighbours_follow_the_images_of_a_class_up_to_dinos(images: int, classes: int, k: int) -> None:
    assert neighbours_for(images, classes) == k


def test_the_balanced_score_counts_every_class_once() -> None:
    """Class 0 has 3 of 4 right, class 2 has 0 of 1, and class 1 has no test images."""
    hits, labels = torch.tensor([True, True, True, False, False]), torch.tensor([0, 0, 0, 0, 2])
    assert accuracies(hits, labels) == (60.0, 37.5)


def planted(count: int, *, seed: int) -> Features:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 8
    return Features(10 * torch.eye(8)[labels] + 0.1 * torch.randn(count, 8, generator=generator), labels)


def test_planted_clusters_are_found_at_any_scale() -> None:
    train, test = planted(400, seed=1), planted(80, seed=2)
    enlarged = Features(test.values * 1000, test.labels)
    assert knn_accuracy(train, enlarged, 8, device=CPU) == KnnResult(100.0, 100.0, 100.0)


@pytest.mark.parametrize("count", [11, 22, 39])
def test_all_hits_are_100_percent_exactly(count: int) -> None:
    """100 / 11 * 11 is not 100, and scores are compared unrounded."""
    data = planted(count, seed=1)
    assert knn_accuracy(data, data, 8, device=CPU, k=1) == KnnResult(100.0, 100.0, 100.0)


def test_permuted_labels_give_chance() -> None:
    train, test = planted(400, seed=1), planted(1600, seed=2)
    permuted = Features(test.values, test.labels[torch.randperm(1600, generator=torch.Generator().manual_seed(3))])
    # Permuted labels do not depend on the predictions: 1600 guesses among 8 classes, within five binomial deviations.
    result = knn_accuracy(train, permuted, 8, device=CPU)
    assert abs(result.top1 - 100 / 8) < 5 * 100 * math.sqrt(1 / 8 * 7 / 8 / 1600)


def test_top5_counts_only_classes_with_votes_and_needs_six_classes() -> None:
    train, test = planted(400, seed=1), planted(80, seed=2)
    # Every query's only neighbour is of its own cluster; a class nobody voted for must not fill up the five.
    wrong = Features(test.values, (test.labels + 1) % 8)
    assert knn_accuracy(train, wrong, 8, device=CPU, k=1) == KnnResult(0.0, 0.0, 0.0)
    few = Features(train.values, train.labels % 5)
    assert knn_accuracy(few, few, 5, device=CPU, k=1).top5 is None


@pytest.mark.parametrize("temperature", [0.07, 0.001])
def test_a_far_neighbours_vote_counts_at_a_low_temperature_too(temperature: float) -> None:
    """The fifth of six neighbours is 0.17 of cosine behind the first: at 0.001 its vote is 1e-76 of the first's."""
    angles = torch.tensor([0.0, 0.3, 0.4, 0.5, 0.6, 0.7])
    train = Features(torch.stack((angles.cos(), angles.sin()), dim=1), torch.arange(6))
    test = Features(torch.tensor([[1.0, 0.0]]), torch.tensor([4]))
    assert knn_accuracy(train, test, 6, device=CPU, k=6, temperature=temperature).top5 == 100.0


def test_a_label_beyond_the_classes_is_refused() -> None:
    with pytest.raises(DataError, match="below num_classes=7, got 7"):
        knn_accuracy(planted(400, seed=1), planted(8, seed=2), 7, device=CPU)


# Several k and temperatures


@pytest.mark.parametrize("block", [1 << 26, 300 * 7])
def test_every_pair_of_a_table_is_what_it_is_alone(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "_SIMILARITIES_PER_BLOCK", block)
    train, test = random_features(300, 10, seed=1), random_features(120, 10, seed=2)
    table = knn_table(train, test, 10, device=CPU, neighbours=[1, 5, 20, 300], temperatures=[0.04, 0.5])
    assert list(table) == [(k, t) for k in (1, 5, 20, 300) for t in (0.04, 0.5)]
    for (k, temperature), result in table.items():
        assert result == knn_accuracy(train, test, 10, device=CPU, k=k, temperature=temperature)
    assert len({result.top1 for result in table.values()}) > 4, "k and temperature must matter"


@pytest.mark.parametrize("block", [1 << 26, 60 * 7])
def test_leave_one_out_is_a_search_of_the_other_images(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 3 and row 40 are the same image: each is the other's nearest neighbour, and not its own."""
    monkeypatch.setattr(knn, "_SIMILARITIES_PER_BLOCK", block)
    data = random_features(60, 6, seed=1)
    data.values[40] = data.values[3]
    own = torch.arange(0, 60, 3)
    queries = Features(data.values[own], data.labels[own])
    table = knn_table(data, queries, 6, device=CPU, neighbours=[1, 4, 59], temperatures=[0.1, 1.0], own=own)
    for (k, temperature), result in table.items():
        alone = []
        for row in own.tolist():
            others = torch.arange(60) != row
            bank = Features(data.values[others], data.labels[others])
            alone.append(oracle(bank, Features(data.values[[row]], data.labels[[row]]), 6, k, temperature))
        top1, top5 = np.mean(alone, axis=0)
        assert result.top1 == pytest.approx(top1)
        assert result.top5 == pytest.approx(top5)


def test_evenly_spaced_images_choose_in_a_large_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "LEFT_OUT", 20)
    data = random_features(60, 6, seed=1)
    own = torch.arange(0, 60, 3)
    queries = Features(data.values[own], data.labels[own])
    expected = knn_table(data, queries, 6, device=CPU, neighbours=[4], temperatures=[0.1], own=own)
    assert knn._left_out(data, 6, CPU, [4], [0.1]) == expected


def search(run: Path, *words: str) -> dict[str, Any]:
    quick = ("workers=0", "device=cpu", "untrained=false", "train_images=400")
    return evaluate("knn", compose("knn", [f"checkpoint={run}", *quick, *words]))


def test_the_training_images_choose_and_the_best_on_test_is_marked(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    record = search(run, "neighbours=100,2,10", "temperature=[0.07,0.2]")
    settings = record["settings"]
    assert (settings["k"], settings["temperature"]) == ([2, 10, 100], [0.07, 0.2])
    assert settings["chosen_by"] == "leave-one-out, 400 images"
    rows = record["table"]
    assert [(row["k"], row["temperature"]) for row in rows] == [(k, t) for k in (2, 10, 100) for t in (0.07, 0.2)]
    chosen = max(rows, key=lambda row: row["left_out_top1"])
    assert record["chosen"] == {"k": chosen["k"], "temperature": chosen["temperature"]}
    assert record["top1"] == chosen["top1"]
    assert record["top1_best_on_test"] == max(row["top1"] for row in rows)
    (line,) = describe(record)
    assert f"k-nearest-neighbour top-1 {chosen['top1']:.2f} %  (" in line
    assert f", best on the test images {record['top1_best_on_test']:.2f}; trained, step 11, k {chosen['k']}, " in line
    alone = search(run, f"neighbours={chosen['k']}", f"temperature={chosen['temperature']}")
    assert {key: alone[key] for key in ("top1", "top5", "balanced_top1")} == {
        key: chosen[key] for key in ("top1", "top5", "balanced_top1")
    }
    assert not {"chosen", "table", "top1_best_on_test"} & alone.keys()
    assert (alone["settings"]["k"], alone["settings"]["temperature"]) == (chosen["k"], chosen["temperature"])
    assert len(list((run / "evaluations").iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("neighbours=[5,400]", r"neighbours=400 must be at most 399, the training images beside the one that is left"),
        ("neighbours=[5,401] temperature=0.1", "neighbours=401 must be at most 399, the training images beside"),
        ("neighbours=401", "neighbours=401 must be at most the number of training images, 400"),
        ("neighbours=[]", r"neighbours must hold at least one number, got \[\]"),
        ("temperature=[0.1,0]", "temperature must be above 0, got 0"),
        ("neighbours=[0,1]", "neighbours must be above 0, got 0"),
    ],
)
def test_values_that_cannot_be_searched_are_rejected_before_images_are_encoded(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, words: str, error: str
) -> None:
    monkeypatch.setattr(FrozenEncoder, "features", lambda *arguments: pytest.fail("images were encoded"))
    with pytest.raises(ConfigError, match=error):
        search(finished_run, *words.split())
