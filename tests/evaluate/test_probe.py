from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmjd.data.batch import Batch
from dmjd.errors import DataError
from dmjd.evaluate.features import Features
from dmjd.evaluate.knn import knn_accuracy, neighbours_for
from dmjd.evaluate.probe import (
    CachedFeatures,
    FeatureSource,
    ProbeResult,
    Recipe,
    RecomputedFeatures,
    linear_probe,
    make_head,
    make_lars,
    recipe_for,
    train_and_test,
)

DIM, CLASSES = 16, 4
CPU = torch.device("cpu")


def clusters(count: int, *, spread: float, seed: int) -> Features:
    """One centre per class at distance ~DIM**0.5, with ``spread`` of noise around it."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(count) % CLASSES
    return Features(centres[labels] + spread * torch.randn(count, DIM, generator=generator), labels)


def rows(count: int) -> Features:
    """Features that say which row they are, to read an order from."""
    return Features(torch.arange(count), torch.arange(count))


def probe(source: FeatureSource, test: Features, **options: object) -> ProbeResult:
    settings = {"epochs": 12, "batch_size": 64, "base_lr": 20.0, "warmup_epochs": 2, "seed": 0}
    return linear_probe(source, test, CLASSES, device=CPU, **(settings | options))  # type: ignore[arg-type]


def test_the_recipe_on_imagenet_is_maes() -> None:
    for images in (1_281_167, 1_281_024):  # all, and what augmentation in chunks of 256 leaves
        assert recipe_for(images) == (16384, 0.1, 90, 10)


@pytest.mark.parametrize("images", [2, 30, 64, 100, 240, 1437, 5000, 60_000, 126_689, 14_000_000])
def test_the_recipe_on_other_sizes_has_the_same_peak_rate_and_enough_steps(images: int) -> None:
    recipe = recipe_for(images)
    assert recipe.base_lr * recipe.batch_size / 256 == pytest.approx(6.4)
    assert min(64, images) <= recipe.batch_size <= min(16384, images)
    assert recipe.epochs * (images // recipe.batch_size) >= 1000
    assert recipe.epochs >= 90
    assert recipe.warmup_epochs == recipe.epochs // 9


def test_a_probe_of_few_images_is_on_a_par_with_knn() -> None:
    """With MAE's rates and a batch of 64, a probe of 240 images stayed 35 points below it."""
    train, test = clusters(240, spread=1.5, seed=1), clusters(512, spread=1.5, seed=2)
    device, k = CPU, neighbours_for(240, CLASSES)
    nearest = knn_accuracy(train, test, CLASSES, device=device, k=k).top1
    assert 80 < nearest < 97
    recipe = recipe_for(240)._asdict()
    assert probe(CachedFeatures(train, seed=0), test, **recipe).top1 > nearest - 3
    assert probe(CachedFeatures(train, seed=0), test, **recipe | {"base_lr": 0.1, "epochs": 90}).top1 < nearest - 3


class OfficialLars:
    """The LARS of facebookresearch/mae (util/lars.py) without weight decay, statement by statement.

    Matrices scale their gradient by 0.001 |w| / |g| (by 1 if a norm is 0); then m = 0.9 m + g and w -= lr m.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.pairs = [(p, torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for parameter, mu in self.pairs:
            assert parameter.grad is not None
            update = parameter.grad.clone()
            if parameter.ndim > 1:
                weight_norm, update_norm = torch.norm(parameter), torch.norm(update)
                one = torch.ones_like(weight_norm)
                ratio = torch.where(update_norm > 0, 0.001 * weight_norm / update_norm, one)
                update = update.mul(torch.where(weight_norm > 0, ratio, one))
            mu.mul_(0.9).add_(update)
            parameter.add_(mu, alpha=-lr)


@pytest.mark.parametrize("chunk", [7, 64])
def test_lars_and_accumulation_equal_the_official_formulas_bit_for_bit(chunk: int) -> None:
    """20 steps of batches that are collected from chunks: batch norm normalises over the whole batch."""
    data, epochs = clusters(136, spread=1.0, seed=1), 10
    batches = [torch.arange(start, start + 64) for _ in range(epochs) for start in (0, 64)]
    linear = nn.Linear(DIM, CLASSES)
    linear.load_state_dict(make_head(DIM, CLASSES, seed=0)[1].state_dict())
    start, lars = linear.weight.detach().clone(), OfficialLars(list(linear.parameters()))
    for step, rows in enumerate(batches):
        lr = 100 * step / 4 if step < 4 else 100 * 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))
        values = F.batch_norm(data.values[rows], None, None, training=True, eps=1e-6)
        linear.zero_grad()
        F.cross_entropy(linear(values), data.labels[rows]).backward()
        lars.step(lr)
    assert (linear.weight - start).abs().max() > 0.05, "the weights must have moved far beyond rounding"

    class Chunks:
        def __len__(self) -> int:
            return 136

        def epoch_features(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            return zip(data.values.split(chunk), data.labels.split(chunk), strict=True)

    head = make_head(DIM, CLASSES, seed=0)
    ours = head[1]
    assert isinstance(ours, nn.Linear)
    recipe = Recipe(batch_size=64, base_lr=400.0, epochs=epochs, warmup_epochs=2)
    train_and_test(head, make_lars(ours), Chunks(), [(data.values, data.labels)], CLASSES, recipe, device=CPU)
    assert torch.equal(ours.weight, linear.weight)
    assert torch.equal(ours.bias, linear.bias)


def test_lars_moves_a_weight_of_zeros() -> None:
    linear = nn.Linear(2, 2)
    nn.init.zeros_(linear.weight)
    optimizer = make_lars(linear)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    (linear(torch.ones(1, 2))[0, 0] * 3).backward()
    optimizer.step()
    assert torch.equal(linear.weight, torch.tensor([[-3.0, -3.0], [0.0, 0.0]]))


def test_head_starts_as_the_recipe_says_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    norm, linear = make_head(256, 1000, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(norm, nn.BatchNorm1d)
    assert not list(norm.parameters())
    assert norm.eps == 1e-6
    assert isinstance(linear, nn.Linear)
    assert not linear.bias.any()
    # The deviation of n normal draws is within 5 / sqrt(2 n) of the truth, relatively.
    assert linear.weight.std().item() == pytest.approx(0.01, rel=5 / math.sqrt(2 * linear.weight.numel()))


def test_separable_data_is_separated() -> None:
    result = probe(CachedFeatures(clusters(512, spread=0.1, seed=1), seed=0), clusters(128, spread=0.1, seed=2))
    assert result.top1 == 100.0
    assert result.lr == 5.0


def test_training_equals_a_replay_from_the_formulas() -> None:
    """The loss of the last epoch depends on every step before it: on order, batch norm, schedule and optimizer."""
    train, epochs, batch, warmup, peak = clusters(136, spread=1.0, seed=1), 30, 32, 8, 40.0 * 32 / 256
    weight = nn.Parameter(make_head(DIM, CLASSES, seed=0).get_parameter("1.weight").detach().double())
    bias = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
    optimizer = OfficialLars([weight, bias])
    losses: list[float] = []
    for epoch in range(epochs):
        order = torch.cat([labels for _, labels in CachedFeatures(rows(136), seed=0).epoch_features(epoch)])
        for ids in order[:128].split(batch):  # the last 8 of 136 do not fill a batch
            step = len(losses)
            cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (epochs * 4 - warmup)))
            values = train.values[ids].double()
            normalised = (values - values.mean(0)) / (values.var(0, correction=0) + 1e-6).sqrt()
            logits = normalised @ weight.T + bias
            loss = (logits.logsumexp(1) - logits.gather(1, train.labels[ids, None])[:, 0]).mean()
            weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            optimizer.step(peak * (step / warmup if step < warmup else cosine))
            losses.append(loss.item())
    result = probe(CachedFeatures(train, seed=0), train, epochs=epochs, batch_size=batch, base_lr=40.0)
    assert losses[-1] < 0.9 * losses[0], "the weights must have moved for the schedule to show"
    assert result.final_loss == pytest.approx(sum(losses[-4:]) / 4, rel=1e-5)


def test_every_test_image_is_judged_by_itself() -> None:
    """Statistics of the test batch would make the score of an image depend on the images beside it."""
    train, test = clusters(256, spread=2.0, seed=1), clusters(256, spread=2.0, seed=2)
    parts = [Features(test.values[test.labels == c], test.labels[test.labels == c]) for c in range(CLASSES)]
    alone = [probe(CachedFeatures(train, seed=0), part).top1 for part in parts]
    assert probe(CachedFeatures(train, seed=0), test).top1 == sum(alone) / CLASSES


def test_permuted_test_labels_give_chance() -> None:
    test = clusters(1024, spread=0.1, seed=2)
    permuted = Features(test.values, test.labels[torch.randperm(1024, generator=torch.Generator().manual_seed(3))])
    result = probe(CachedFeatures(clusters(512, spread=0.1, seed=1), seed=0), permuted)
    # Five binomial deviations of 1024 guesses among 4 classes.
    assert abs(result.top1 - 25.0) < 5 * 100 * math.sqrt(0.25 * 0.75 / 1024)


@pytest.mark.parametrize(("scale", "shift"), [(1024.0, 0.0), (1.0, 32.0)])
def test_scale_and_shift_of_the_features_do_not_matter(scale: float, shift: float) -> None:
    train, test = clusters(1024, spread=2.0, seed=1), clusters(1024, spread=2.0, seed=2)
    moved = [Features(data.values * scale + shift, data.labels) for data in (train, test)]
    plain = probe(CachedFeatures(train, seed=0), test)
    result = probe(CachedFeatures(moved[0], seed=0), moved[1])
    assert 40 < plain.top1 < 95, "must be hard enough for a difference to show"
    assert result.top1 == plain.top1
    assert result.final_loss == pytest.approx(plain.final_loss, abs=1e-5)


def test_equal_arguments_give_equal_bits_and_another_seed_does_not() -> None:
    train, test = clusters(256, spread=2.0, seed=1), clusters(256, spread=2.0, seed=2)
    first = probe(CachedFeatures(train, seed=0), test)
    torch.rand(3)  # the global generator is not part of the arguments
    assert probe(CachedFeatures(train, seed=0), test) == first
    assert probe(CachedFeatures(train, seed=0), test, seed=1).final_loss != first.final_loss
    assert probe(CachedFeatures(train, seed=1), test).final_loss != first.final_loss


@pytest.mark.parametrize("loader_batch", [7, 64, 300])
def test_cached_and_recomputed_features_give_equal_bits(loader_batch: int) -> None:
    """300 images in batches of 64 leave 44 over, and the loader's batches are cut otherwise than the probe's."""
    train, test = clusters(300, spread=2.0, seed=1), clusters(256, spread=2.0, seed=2)
    cached = CachedFeatures(train, seed=0)

    def epoch_batches(epoch: int) -> Iterator[Batch]:
        order = torch.cat([labels for _, labels in CachedFeatures(rows(300), seed=0).epoch_features(epoch)])
        for ids in order.split(loader_batch):
            yield Batch(torch.zeros(len(ids), 1, 1, 3, dtype=torch.uint8), ids, train.labels[ids])

    def encode(batch: Batch, epoch: int) -> Tensor:
        return train.values[batch.sample_ids]

    recomputed = RecomputedFeatures(epoch_batches, encode, images_per_epoch=300)
    assert probe(recomputed, test) == probe(cached, test)


def test_a_label_beyond_the_classes_is_refused_in_training_and_in_testing() -> None:
    good = clusters(300, spread=1.0, seed=1)
    bad = Features(good.values, good.labels + 1)
    for train, test in ((good, bad), (bad, good)):
        with pytest.raises(DataError, match="below num_classes=4, got 4"):
            probe(CachedFeatures(train, seed=0), test)


# Sources of features

FEATURES = Features(torch.arange(5000.0)[:, None], torch.arange(5000))


def one_epoch(source: FeatureSource, epoch: int) -> tuple[Tensor, Tensor]:
    values, labels = zip(*source.epoch_features(epoch), strict=True)
    return torch.cat(values), torch.cat(labels)


def test_every_epoch_holds_every_image_once_with_its_own_label() -> None:
    source = CachedFeatures(FEATURES, seed=7)
    values, labels = one_epoch(source, 3)
    assert len(source) == 5000
    assert torch.equal(labels.sort().values, FEATURES.labels)
    assert torch.equal(values[:, 0], labels.float())


def test_order_is_a_function_of_seed_and_epoch() -> None:
    orders = {(s, e): one_epoch(CachedFeatures(FEATURES, seed=s), e)[1] for s in (7, 8) for e in (0, 1)}
    source = CachedFeatures(FEATURES, seed=7)
    one_epoch(source, 0)
    assert torch.equal(one_epoch(source, 1)[1], orders[7, 1]), "an earlier epoch must leave no trace"
    distinct = list(orders.values())
    for i, order in enumerate(distinct):
        for other in distinct[i + 1 :]:
            # Two unrelated orders of n images agree in one position on average (Poisson); twelve is beyond 1e-9.
            assert int((order == other).sum()) < 12


def test_recomputed_features_are_encoded_anew_each_epoch() -> None:
    def epoch_batches(epoch: int) -> Iterator[Batch]:
        for ids in torch.arange(6).split(4):
            yield Batch(torch.full((len(ids), 2, 2, 3), epoch, dtype=torch.uint8), ids, ids % 2)

    def encode(batch: Batch, epoch: int) -> Tensor:
        return batch.images[:, 0, 0].float() + 10 * epoch

    source = RecomputedFeatures(epoch_batches, encode, images_per_epoch=6)
    values, labels = one_epoch(source, 2)
    assert len(source) == 6
    assert torch.equal(values, torch.full((6, 3), 22.0))
    assert torch.equal(labels, torch.tensor([0, 1, 0, 1, 0, 1]))


def test_recomputing_without_labels_is_refused() -> None:
    batch = Batch(torch.zeros(2, 2, 2, 3, dtype=torch.uint8), torch.arange(2), torch.tensor([0, -1]))
    source = RecomputedFeatures(lambda epoch: [batch], lambda batch, epoch: torch.zeros(2, 3), images_per_epoch=2)
    with pytest.raises(DataError, match="no labels"):
        one_epoch(source, 0)
