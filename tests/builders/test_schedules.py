from __future__ import annotations

import warnings

import pytest
import torch

from dmjd.builders.schedules import adaptive_lr, classic_lr, cosine, multistep


def torch_schedule(total: int, warmup: int, peak: float, floor: float) -> list[float]:
    """Torch's schedulers, which step along a recurrence where ours is a closed form."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=floor)
    rates = [peak * step / warmup for step in range(warmup)]
    for _ in range(total - warmup):
        rates.append(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wants optimizer.step() in between
            scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("total", "warmup", "peak", "floor"),
    [(100, 10, 2e-3, 0.0), (37, 5, 1.0, 0.1), (20, 0, 3e-4, 1e-5), (7, 6, 1.0, 0.0)],
)
def test_cosine_equals_torchs_schedulers(total: int, warmup: int, peak: float, floor: float) -> None:
    ours = [cosine(step, total=total, warmup=warmup, peak=peak, floor=floor) for step in range(total)]
    assert ours == pytest.approx(torch_schedule(total, warmup, peak, floor), rel=1e-9)


def test_cosine_at_its_corners() -> None:
    def at(step: int, warmup: int = 10) -> float:
        return cosine(step, total=110, warmup=warmup, peak=4.0, floor=1.0)

    assert at(0) == 0.0
    assert at(5) == 2.0
    assert at(10) == 4.0
    assert at(60) == pytest.approx(2.5, rel=1e-12)
    assert 1.0 < at(109) < 1.001
    assert at(110) == at(111) == at(10**9) == 1.0
    assert at(0, warmup=0) == 4.0
    assert at(0, warmup=110) == 0.0
    assert at(109, warmup=110) == pytest.approx(4.0 * 109 / 110)
    assert cosine(0, total=1, warmup=0, peak=4.0) == 4.0


def test_cosine_rises_then_falls_and_never_leaves_its_range() -> None:
    rates = [cosine(step, total=1000, warmup=50, peak=1.0, floor=0.01) for step in range(1000)]
    assert rates[:51] == sorted(rates[:51])
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert max(rates) == rates[50] == 1.0
    assert min(rates[50:]) > 0.01


def test_cosine_depends_on_the_step_alone() -> None:
    steps = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = {step: cosine(step, total=100, warmup=10, peak=1.0) for step in steps}
    assert [shuffled[step] for step in range(100)] == [cosine(s, total=100, warmup=10, peak=1.0) for s in range(100)]


def test_the_official_recipe_gives_the_published_learning_rate() -> None:
    # Base 6e-4, 512 images that are distinct, rates .6 and 1: the official script's 2.0e-3.
    assert adaptive_lr(6e-4, 512, m_corr=0.6, m_pred=1.0) == pytest.approx(2.0e-3, rel=1e-12)
    # 30 of 49 blocks are hidden in truth.
    assert adaptive_lr(6e-4, 512, m_corr=30 / 49, m_pred=1.0) == pytest.approx(1.96e-3, rel=1e-12)
    assert classic_lr(6e-4, 512, views=2) == pytest.approx(2.4e-3, rel=1e-12)


def test_one_view_that_predicts_what_it_hides_makes_the_rules_agree_with_mae() -> None:
    # MAE: 1.5e-4 * 4096 / 256.
    assert adaptive_lr(1.5e-4, 4096, m_corr=0.75, m_pred=0.75) == pytest.approx(2.4e-3, rel=1e-12)
    assert classic_lr(1.5e-4, 4096, views=1) == pytest.approx(2.4e-3, rel=1e-12)


def test_multistep_equals_torchs_scheduler_after_a_warm_up_from_its_start() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=4e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[20, 30], gamma=0.1)
    expected = []
    for _ in range(40):
        expected.append(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    ours = [multistep(step, milestones=[20, 30], warmup=4, peak=4e-4, start=2e-6) for step in range(40)]
    assert ours[4:] == pytest.approx(expected[4:], rel=1e-9)
    assert ours[:4] == pytest.approx([2e-6 + step / 4 * (4e-4 - 2e-6) for step in range(4)])
    assert cosine(1, total=9, warmup=4, peak=4e-4, start=2e-6) == ours[1]
