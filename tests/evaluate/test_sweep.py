from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from dmjd.compose import compose
from dmjd.errors import ConfigError, DataError
from dmjd.evaluate import describe, evaluate, sweep
from dmjd.evaluate.encoder import FrozenEncoder
from dmjd.evaluate.features import Features
from dmjd.evaluate.probe import CachedFeatures, make_head
from dmjd.evaluate.sweep import Heads, SweepResult, cached_probe, held_out_rows, train_heads

CPU = torch.device("cpu")
CLASSES, DIM = 5, 24
RATES = [0.001, 0.02, 0.1, 0.5]


def clusters(count: int, *, spread: float = 2.0, seed: int = 1) -> Features:
    """Noise around a centre per class, of unequal scale and far from 0."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    values = centres[labels] + spread * torch.randn(count, DIM, generator=generator)
    return Features(values * torch.logspace(-2, 2, DIM) + 3, labels)


def heads(data: Features, rates: list[float], rows: Tensor | None = None, **options: Any) -> Heads:
    settings: dict[str, Any] = {"epochs": 6, "batch_size": 32, "seed": 3, "device": CPU} | options
    rows = torch.arange(len(data)) if rows is None else rows
    return train_heads(data.values, data.labels, rows, CLASSES, rates=rates, **settings)


def probe(train: Features, test: Features, **options: Any) -> SweepResult:
    settings: dict[str, Any] = {"rates": RATES, "epochs": 6, "batch_size": 32, "seed": 3, "device": CPU} | options
    return cached_probe(train, test, CLASSES, **settings)


def trained_by_torch(data: Features, lr: float) -> tuple[nn.Linear, Tensor, float]:
    """The head of one rate by autograd and PyTorch's optimizer and schedule, in the order of a probe with cached
    features; the features that it reads; the mean loss of its last epoch."""
    values = data.values.double()
    x = ((values - values.mean(0)) / (values.var(0, correction=0) + 1e-6).sqrt()).float()
    linear = make_head(DIM, CLASSES, seed=3)[1]
    assert isinstance(linear, nn.Linear)
    optimizer = torch.optim.SGD(linear.parameters(), lr=lr, momentum=0.9)
    steps = len(data) // 32
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6 * steps)
    places = Features(torch.arange(len(data)), torch.arange(len(data)))
    for epoch in range(6):
        order = torch.cat([rows for rows, _ in CachedFeatures(places, seed=3).epoch_features(epoch)])
        losses = []
        for rows in order[: 32 * steps].split(32):
            loss = F.cross_entropy(linear(x[rows]), data.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return linear, x, sum(losses) / len(losses)


def test_every_head_equals_one_that_pytorch_trains_alone() -> None:
    data = clusters(170)  # the last 10 of an epoch fill no batch
    together = heads(data, RATES)
    start = make_head(DIM, CLASSES, seed=3).get_parameter("1.weight")
    moved = []
    for number, rate in enumerate(RATES):
        linear, x, loss = trained_by_torch(data, rate)
        alone = heads(data, [rate])
        for mine in (together, alone):
            at = slice(number * CLASSES, (number + 1) * CLASSES) if mine is together else slice(None)
            torch.testing.assert_close(mine.weight[at], linear.weight.detach(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(mine.bias[at], linear.bias.detach(), rtol=1e-6, atol=1e-6)
        assert together.losses[number] == pytest.approx(loss, rel=1e-5)
        hits, losses = together.score(data.values, data.labels)
        logits = linear(x)
        assert losses[number] == pytest.approx(F.cross_entropy(logits, data.labels).item(), rel=1e-5)
        assert torch.equal(hits[number], logits.argmax(1) == data.labels)
        moved.append((linear.weight - start).abs().max().item())
    assert moved == sorted(moved)
    assert moved[0] > 1e-3, "the weights must have moved far beyond the tolerance, and more at higher rates"


def test_a_full_batch_ends_at_the_optimum_of_scikit_learn() -> None:
    """Without weight decay, where classes overlap, logistic regression has one optimum."""
    data = clusters(400, spread=4.0)
    (loss,) = heads(data, [1.0], batch_size=400, epochs=700).losses
    x = ((data.values - data.values.mean(0)) / data.values.std(0)).double().numpy()
    best = LogisticRegression(C=np.inf, max_iter=2000, tol=1e-6).fit(x, data.labels)
    optimum = F.cross_entropy(torch.from_numpy(best.decision_function(x)), data.labels).item()
    assert 0.3 < optimum < 1.2
    assert loss == pytest.approx(optimum, rel=1e-3)


def test_the_held_out_images_choose_and_all_training_images_train() -> None:
    train, test = clusters(300), clusters(500, seed=2)
    held = held_out_rows(train.labels, 3)
    hits, losses = heads(train, RATES, (~held).nonzero()[:, 0]).score(train.values[held], train.labels[held])
    correct = [int(each.sum()) for each in hits]
    best = max(range(len(RATES)), key=lambda number: (correct[number], -losses[number]))
    final = heads(train, [RATES[best]])
    result = probe(train, test)
    assert result.lr == RATES[best]
    assert [rate.held_out_top1 for rate in result.rates] == [100 * right / int(held.sum()) for right in correct]
    assert [rate.held_out_loss for rate in result.rates] == losses
    assert result.top1 == 100 * int(final.score(test.values, test.labels)[0].sum()) / 500
    assert result.final_loss == final.losses[0]
    assert {rate.top1 for rate in result.rates} == {None}
    # The test images have no part in the choice.
    others = Features(test.values, (test.labels + 1) % CLASSES)
    assert probe(train, others)[2:] == result[2:]


def test_scores_of_all_rates_on_the_test_images_leave_the_others_alone() -> None:
    train, test = clusters(300), clusters(500, seed=2)
    plain, best = probe(train, test), probe(train, test, test_best=True)
    assert best[:4] == plain[:4]
    assert [rate[:3] for rate in best.rates] == [rate[:3] for rate in plain.rates]
    hits, _ = heads(train, RATES).score(test.values, test.labels)
    assert [rate.top1 for rate in best.rates] == [100 * int(each.sum()) / 500 for each in hits]
    assert len({rate.top1 for rate in best.rates}) > 2, "rates must matter"


def test_of_rates_with_equal_accuracy_the_one_with_the_lower_loss_is_chosen() -> None:
    """Well separated classes: every rate has all held-out images right."""
    train = clusters(300, spread=0.1)
    result = probe(train, train, rates=[0.05, 0.1, 0.2])
    assert {rate.held_out_top1 for rate in result.rates} == {100.0}
    assert result.lr == min(result.rates, key=lambda rate: rate.held_out_loss).lr


def test_equal_arguments_give_equal_bits_and_leave_the_global_generator_alone() -> None:
    train, test = clusters(300), clusters(100, seed=2)
    first, state = probe(train, test), torch.get_rng_state()
    assert probe(train, test) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert probe(train, test, seed=4).final_loss != first.final_loss


def test_a_tenth_of_every_class_is_held_out() -> None:
    counts = [1, 2, 9, 19, 20, 1000, 0, 105]
    labels = torch.cat([torch.full((count,), number) for number, count in enumerate(counts)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    held = held_out_rows(labels, 3)
    assert labels[held].bincount(minlength=8).tolist() == [0, 1, 1, 1, 2, 100, 0, 10]
    assert torch.equal(held_out_rows(labels, 3), held)
    # Unrelated choices of a tenth agree in a hundredth of the images.
    assert int((held & held_out_rows(labels, 4)).sum()) < 30
    # Evenly over the rows: 10 % of each half, within five deviations.
    assert abs(int(held[: len(held) // 2].sum()) - int(held.sum()) / 2) < 5 * (0.09 * len(held) / 4) ** 0.5


def test_one_image_of_each_class_cannot_choose() -> None:
    with pytest.raises(DataError, match="protocol=cached chooses its learning rate on training images that it holds"):
        held_out_rows(torch.arange(5), 0)


def test_two_images_of_one_class_are_enough() -> None:
    train = clusters(40)
    few = Features(train.values[:3], torch.tensor([0, 1, 1]))
    assert probe(few, few, batch_size=2, rates=[0.1]).rates[0].held_out_top1 in (0.0, 100.0)


@pytest.mark.parametrize(
    ("images", "batch_size", "epochs"), [(2, 2, 2000), (270, 64, 500), (45_000, 512, 23), (1_153_051, 1024, 10)]
)
def test_the_recipe_follows_the_number_of_images(images: int, batch_size: int, epochs: int) -> None:
    assert sweep.batch_size_for(images) == batch_size
    assert sweep.epochs_for(images, batch_size) == epochs


# dmjd linprobe protocol=cached


def measure(run: Path, *words: str) -> dict[str, Any]:
    quick = ("protocol=cached", "workers=0", "device=cpu", "untrained=false", "train_images=600", "epochs=4")
    return evaluate("linprobe", compose("linprobe", [f"checkpoint={run}", *quick, *words]))


def test_it_keeps_its_record(finished_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    record = measure(run, "seed=2", "test_best=true")
    held = 0
    for count in Features(torch.zeros(600), _labels_of_digits(600)).labels.bincount().tolist():
        held += count // 10
    assert record["settings"] == {
        "protocol": "cached",
        "pooling": "mean",
        "augment": False,
        "train_images": 600,
        "data": "digits, 32x32",
        "crop_pct": 1.0,
        "mean": [0.219],
        "std": [0.333],
        "seed": 2,
        "epochs": 4,
        "batch_size": 64,
        "rates": list(sweep.RATES),
        "chosen_by": f"{held} held-out training images",
    }
    rows = record["table"]
    assert [row["lr"] for row in rows] == list(sweep.RATES)
    chosen = max(rows, key=lambda row: (row["held_out_top1"], -row["held_out_loss"]))
    assert record["chosen"] == {"lr": chosen["lr"]}
    assert 30 < record["top1"] == chosen["top1"] <= record["top1_best_on_test"] == max(row["top1"] for row in rows)
    (line,) = describe(record)
    assert f", best on the test images {record['top1_best_on_test']:.2f}; " in line
    assert f"protocol cached, lr {chosen['lr']:g}, digits" in line
    plain = measure(run, "seed=2")
    assert plain["top1"] == record["top1"]
    assert "top1_best_on_test" not in plain
    assert set(plain["table"][0]) == {"lr", "held_out_top1", "held_out_loss"}
    assert len(list((run / "evaluations").iterdir())) == 1, "the same conditions"


def _labels_of_digits(count: int) -> Tensor:
    from dmjd.data.small import Digits

    digits = Digits("train")
    return torch.tensor([digits.label(index * len(digits) // count) for index in range(count)])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("augment=true", "protocol=cached computes the features once: remove augment=true"),
        ("base_lr=0.1", "protocol=cached has several learning rates: set rates, not base_lr=0.1"),
        ("warmup_epochs=1", "protocol=cached has no warm-up: remove warmup_epochs=1"),
        ("rates=[]", r"rates must hold at least one number, got \[\]"),
        ("rates=[0.1,-1]", "rates must be above 0, got -1"),
        ("protocol=auto rates=[0.1]", "rates needs protocol=cached, got protocol=auto"),
        ("protocol=mae test_best=true", "test_best needs protocol=cached, got protocol=mae"),
        ("batch_size=600", r"batch_size must be at most 5\d\d, the training images without \d\d that choose"),
        ("pooling=cls", "pooling=cls needs a class token"),
    ],
)
def test_values_that_cannot_be_combined_are_rejected_before_images_are_encoded(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, words: str, error: str
) -> None:
    monkeypatch.setattr(FrozenEncoder, "features", lambda *arguments: pytest.fail("images were encoded"))
    with pytest.raises(ConfigError, match=error):
        measure(finished_run, *words.split())


@pytest.mark.gpu
def test_on_a_gpu_it_equals_the_cpu_and_repeats_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = clusters(300), clusters(100, seed=2)
    cuda = torch.device("cuda")
    first = probe(train, test, device=cuda, test_best=True)
    assert probe(train, test, device=cuda, test_best=True) == first
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))  # features stay on the host
    assert probe(train, test, device=cuda, test_best=True) == first
    on_cpu = probe(train, test, test_best=True)
    assert first.lr == on_cpu.lr
    assert first.final_loss == pytest.approx(on_cpu.final_loss, rel=1e-4)
