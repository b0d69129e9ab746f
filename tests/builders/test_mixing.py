from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from timm.data import mixup as timm_mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from dmjd.builders.augment import flip_by_coin
from dmjd.builders.mixing import Mixing, beta_quantile, check_augment, erase, pixel_noise
from dmjd.config import AugmentConfig, DataConfig, FinetuneConfig
from dmjd.data.batch import Batch
from dmjd.errors import ConfigError
from dmjd.ops import Domain, keyed_uniform, make_key

KEY = make_key(2, 7)
CLASSES = 5
GREY = DataConfig(channels=1, mean=[0.5], std=[0.25])


def batch(images: int, size: tuple[int, int] = (16, 12), channels: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, *size, channels), dtype=torch.uint8, generator=generator)
    return Batch(pixels, torch.arange(images) * 7 + 3, torch.arange(images) % CLASSES)


def only(**changes: Any) -> AugmentConfig:
    off: dict[str, Any] = {"randaugment": None, "mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0, "erase_prob": 0.0}
    return AugmentConfig(**off | changes)


def lambdas(augment: AugmentConfig, pairs: int, size: tuple[int, int] = (1, 1)) -> Tensor:
    """Lambda of each pair after the correction, read from the targets of two classes."""
    images = torch.zeros(2 * pairs, *size, 1, dtype=torch.uint8)
    both = Batch(images, torch.arange(2 * pairs), torch.arange(2 * pairs) % 2)
    return Mixing(augment, GREY, 2, 0)(both, 0)[1][::2, 0]


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.8, 1.0, 3.0, 100.0])
def test_quantiles_of_beta_have_an_error_below_1e_4(alpha: float) -> None:
    words = torch.arange(1, 50, dtype=torch.float64) / 2**32
    uniform = torch.cat((words, torch.linspace(0, 1, 2003, dtype=torch.float64)[1:-1], 1 - words))
    expected = stats.beta.ppf(uniform.numpy(), alpha, alpha)
    np.testing.assert_allclose(beta_quantile(uniform, alpha).numpy(), expected, rtol=0, atol=1e-4)


def test_lambda_of_mixup_has_numpys_beta_distribution() -> None:
    expected = np.random.default_rng(0).beta(0.8, 0.8, 20000)
    ours = lambdas(only(mixup=0.8), 4000).numpy()
    assert stats.ks_2samp(ours, expected).pvalue > 0.01
    assert stats.ks_2samp(ours, np.random.default_rng(0).beta(1.0, 1.0, 20000)).pvalue < 1e-3, "the test has power"
    assert (lambdas(only(mixup=0.8, mix_prob=0.3), 4000) == 1).float().mean() == pytest.approx(0.7, abs=0.03)


def test_lambda_of_cutmix_has_the_distribution_of_timms_clipped_boxes() -> None:
    np.random.seed(0)  # noqa: NPY002 -- timm draws from it
    drawn = np.random.default_rng(1).beta(1.0, 1.0, 4000)
    expected = [timm_mixup.cutmix_bbox_and_lam((3, 32, 24), lam)[1] for lam in drawn]
    ours = lambdas(only(cutmix=1.0), 4000, (32, 24)).numpy()
    assert stats.ks_2samp(ours, expected).pvalue > 0.01
    assert stats.ks_2samp(ours, drawn).pvalue < 1e-3, "without the correction it would be another one"


def test_images_and_targets_are_timms_for_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws are read from the words of a pair's first image: mixed, cutmix, probability of lambda, center."""
    augment = only(mixup=0.8, cutmix=1.0, mix_prob=0.8, smoothing=0.1)
    inputs = batch(64)
    images, targets = Mixing(augment, DataConfig(flip=False), CLASSES, seed=2)(inputs, epoch=7)
    plain, _ = Mixing(only(), DataConfig(flip=False), CLASSES, seed=2)(inputs, epoch=7)
    uniform = keyed_uniform(inputs.sample_ids[::2], 5, key=KEY, domain=Domain.MASK).numpy()
    cuts = 0
    for pair, (mixed, switch, chance, row, column) in enumerate(uniform):
        cut = bool(switch < 0.5)
        alpha = 1.0 if cut else 0.8
        lam = np.float32(stats.beta.ppf(chance, alpha, alpha) if mixed < 0.8 else 1.0)
        centers = iter((int(row * 16), int(column * 12)))
        timm = timm_mixup.Mixup(0.8, 1.0, mode="pair", label_smoothing=0.1, num_classes=CLASSES)
        monkeypatch.setattr(
            timm, "_params_per_elem", lambda count, lam=lam, cut=cut: (np.array([lam]), np.array([cut]))
        )
        monkeypatch.setattr(np.random, "randint", lambda low, high, size=None, centers=centers: next(centers))
        rows = slice(2 * pair, 2 * pair + 2)
        expected = timm(plain[rows].clone(), inputs.labels[rows])
        torch.testing.assert_close(images[rows], expected[0], rtol=0, atol=1e-3)
        torch.testing.assert_close(targets[rows], expected[1], rtol=0, atol=1e-4)
        cuts += int(cut and lam < 1)
    assert 6 < cuts < 20


def test_without_mixing_targets_are_timms_and_the_number_of_images_may_be_odd() -> None:
    inputs = batch(7)
    for smoothing in (0.0, 0.1):
        images, targets = Mixing(only(smoothing=smoothing), DataConfig(), CLASSES, 2)(inputs, 7)
        assert torch.equal(targets, timm_mixup.mixup_target(inputs.labels, CLASSES, 1.0, smoothing))
    flipped = flip_by_coin(inputs.images, inputs.sample_ids, KEY).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (DataConfig().mean, DataConfig().std))
    torch.testing.assert_close(images, (flipped - mean) / std)


@pytest.fixture(scope="module")
def erased() -> tuple[Tensor, Tensor]:
    """Where ours and timm's RandomErasing erase 3000 images of 40 x 32: bool ``[2, N, H, W]``; and our noise."""
    images, ids = torch.zeros(3000, 1, 40, 32), torch.arange(3000)
    ours = erase(images, ids, KEY, 0.6, 1)
    random.seed(0)
    torch.manual_seed(0)
    theirs = RandomErasing(0.6, mode="pixel", device="cpu")(images.clone())
    return torch.stack((ours, theirs)).squeeze(2) != 0, ours[ours != 0]


def test_rectangles_have_the_distribution_of_timms(erased: tuple[Tensor, Tensor]) -> None:
    masks = erased[0]
    some = masks.flatten(2).any(2)
    assert some.float().mean(1).tolist() == pytest.approx([0.6, 0.6], abs=0.03)
    rows, columns = masks.any(3), masks.any(2)
    for values in (rows.sum(2), columns.sum(2), rows.byte().argmax(2), columns.byte().argmax(2)):
        assert stats.ks_2samp(*(each[where].numpy() for each, where in zip(values, some, strict=True))).pvalue > 0.01
    area, box = masks.sum((2, 3)), rows.sum(2) * columns.sum(2)
    assert (area == box).all(), "each is one rectangle"
    shares = area[0][some[0]] / (40 * 32)
    assert 0.015 < shares.min() < 0.03
    assert 0.31 < shares.max() < 0.35


def test_noise_is_standard_normal_and_independent(erased: tuple[Tensor, Tensor]) -> None:
    noise = pixel_noise(torch.arange(40), KEY, torch.empty(40, 3, 15, 15))
    for values in (noise.flatten(), erased[1][:20000]):
        assert stats.kstest(values.numpy(), "norm").pvalue > 0.01
    flat = noise.flatten(1)
    assert np.abs(np.corrcoef(flat.numpy())[np.triu_indices(40, 1)]).max() < 4.5 / math.sqrt(675)
    half = flat[:, :338], flat[:, 337:]  # the two numbers of one word
    assert abs(float((half[0] * half[1]).mean())) < 4 / math.sqrt(40 * 338)


def test_several_rectangles_share_the_area() -> None:
    counts = erase(torch.zeros(1000, 1, 48, 48), torch.arange(1000), KEY, 1.0, 4) != 0
    one = erase(torch.zeros(1000, 1, 48, 48), torch.arange(1000), KEY, 1.0, 1) != 0
    both = [float(mask.float().mean()) for mask in (counts, one)]
    mean = (0.02 + 1 / 3) / 2
    assert both[1] == pytest.approx(mean, abs=0.012)
    assert 0.8 * mean < both[0] < mean, "rectangles overlap"
    extents = counts.any(3).sum(2).float().mean() / one.any(3).sum(2).float().mean()
    assert extents > 1.2, "and lie apart"


def test_a_batch_is_its_micro_batches_of_whole_pairs() -> None:
    inputs = batch(24)
    mixing = Mixing(AugmentConfig(), DataConfig(jitter=0.3), CLASSES, 1)
    whole = mixing(inputs, 4)
    assert torch.isfinite(whole[0]).all()
    torch.testing.assert_close(whole[1].sum(1), torch.ones(24))
    for parts in (2, 4, 12):
        split = [mixing(part, 4) for part in inputs.split(parts)]
        for ours, pieces in zip(whole, zip(*split, strict=True), strict=True):
            assert torch.equal(ours, torch.cat(pieces))
    for other in (mixing(inputs, 5), Mixing(AugmentConfig(), DataConfig(jitter=0.3), CLASSES, 2)(inputs, 4)):
        assert not torch.equal(other[1], whole[1])


@pytest.mark.parametrize(
    ("changes", "size", "parts", "processes", "message"),
    [
        ({}, 6, 1, 2, r"batch_size=6 over 2 process\(es\) .*grad_accum_steps=1 gives micro-batches of 3; .* of 4, or"),
        (
            {},
            12,
            4,
            1,
            r"batch_size=12 over 1 process.*grad_accum_steps=4 gives micro-batches of 3; set a multiple of 8",
        ),
        ({"mixup": 0.0}, 7, 1, 1, "micro-batches of 7"),
        ({"mixup": 0.0, "cutmix": 0.0}, 7, 1, 1, None),
        ({}, 8, 2, 2, None),
        ({"randaugment": "rand-9"}, 8, 1, 1, "augment.randaugment=rand-9 is not a RandAugment policy"),
        ({"cutmix": 1e-100}, 8, 1, 1, "augment.cutmix must be 0, for none, or at least 0.001, got 1e-100"),
        ({"mixup": 0.001}, 8, 1, 1, None),
    ],
)
def test_pairs_need_even_micro_batches_a_policy_and_an_alpha_that_can_be_drawn(
    changes: dict[str, Any], size: int, parts: int, processes: int, message: str | None
) -> None:
    config = FinetuneConfig(batch_size=size, augment=AugmentConfig(**changes))
    config.engine.grad_accum_steps = parts
    if message is None:
        return check_augment(config, processes)
    with pytest.raises(ConfigError, match=message):
        check_augment(config, processes)


@pytest.mark.gpu
def test_it_never_waits_for_the_device_and_gives_what_the_cpu_gives() -> None:
    inputs, mixing = batch(32, (32, 32)), Mixing(AugmentConfig(), DataConfig(jitter=0.2), CLASSES, 1)
    on_device = inputs.to(torch.device("cuda"))
    mixing(on_device, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        images, targets = mixing(on_device, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = mixing(inputs, 3)
    torch.testing.assert_close(targets.cpu(), expected[1], rtol=0, atol=1e-5)
    # Colour jitter rounds down, so that an ulp changes a pixel by 1 / 255 of about 4.5 deviations.
    assert ((images.cpu() - expected[0]).abs() > 1e-3).float().mean() < 0.01
