from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmjd.models.objective import Losses
from dmjd.parallel.engine import StepResult
from dmjd.parallel.world import World, alone
from dmjd.train.guard import NonFiniteLoss, PendingStep, StepNumbers

NAN, INF = float("nan"), float("inf")

CPU = torch.device("cpu")


def pending(
    loss: float = 1.5, *, norm: float = 2.5, applied: float = 1.0, visible: float | None = 0.5, ids: int = 4
) -> PendingStep:
    def scalar(value: float) -> Tensor:
        return torch.tensor(value, requires_grad=True)

    losses = Losses(scalar(loss), scalar(1.0), None if visible is None else scalar(visible))
    rates = torch.tensor((0.625, 1.0))
    result = StepResult(torch.tensor(norm), torch.tensor(applied))
    return PendingStep(41, 100 + torch.arange(ids), losses, rates, result, alone(CPU))


def test_numbers_come_back_under_their_names() -> None:
    assert pending().read() == StepNumbers(
        loss=1.5, mim=1.0, vis=0.5, grad_norm=2.5, applied=1.0, m_corr=0.625, m_pred=1.0
    )
    assert pending(visible=None).read().vis is None


def test_numbers_are_of_the_moment_when_the_step_was_made() -> None:
    norm = torch.tensor(2.5)
    losses = Losses(torch.tensor(1.5), torch.tensor(1.0), None)
    step = PendingStep(
        0, torch.arange(2), losses, torch.tensor((0.5, 1.0)), StepResult(norm, torch.tensor(1.0)), alone(CPU)
    )
    norm.fill_(99.0)  # an engine may use its tensors again
    losses.total.fill_(99.0)
    assert (step.read().grad_norm, step.read().loss) == (2.5, 1.5)


@pytest.mark.parametrize(
    "step",
    [
        pending(NAN, norm=NAN, applied=0),
        pending(INF, norm=NAN, applied=0),
        pending(-INF, norm=INF, applied=0),
        pending(norm=NAN, applied=0),  # a finite loss whose gradient is not
        pending(NAN, norm=1.0, applied=1),  # a loss whose gradient hides that it is not finite
    ],
)
def test_what_is_not_finite_names_the_step_and_the_samples(step: PendingStep) -> None:
    with pytest.raises(NonFiniteLoss) as caught:
        step.read()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "step 41 " in sentence
    assert "100, 101, 102, 103" in sentence


def test_only_the_first_samples_of_many_are_listed() -> None:
    with pytest.raises(NonFiniteLoss, match=r"100, 101, .*, 107, and 92 more"):
        pending(NAN, applied=0, ids=100).read()
    with pytest.raises(NonFiniteLoss) as caught:
        pending(NAN, applied=0, ids=8).read()
    assert "107" in str(caught.value)
    assert "more" not in str(caught.value)


def test_the_sentence_does_not_deny_an_update_that_was_made() -> None:
    # The engine looks at gradients alone: L1 of an infinite target has a gradient of +-1, and the parameters moved.
    with pytest.raises(NonFiniteLoss) as caught:
        pending(INF, norm=1.0, applied=1).read()
    assert "not applied" not in str(caught.value)
    with pytest.raises(NonFiniteLoss, match="not applied"):
        pending(INF, norm=NAN, applied=0).read()


class TwoRanks(World):
    """Rank 1 of 2, whose partner had a loss of NaN or of 1."""

    def mean(self, values: Tensor) -> Tensor:
        return values * NAN


@pytest.mark.parametrize(
    ("own", "part"), [(NAN, "on rank 1, samples 100, 101"), (1.0, "rank 1: its own loss was 1.0, so look at another")]
)
def test_only_the_rank_whose_loss_it_was_names_samples(own: float, part: str) -> None:
    losses = Losses(torch.tensor(own), torch.tensor(1.0), None)
    result = StepResult(torch.tensor(1.0), torch.tensor(1.0))
    world = TwoRanks(1, 2, 1, CPU)
    with pytest.raises(NonFiniteLoss) as caught:
        PendingStep(3, 100 + torch.arange(4), losses, torch.ones(2), result, world).read()
    assert part in str(caught.value)
