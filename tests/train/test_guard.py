from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.builders.step import trapped
from dmjd.config import GuardConfig
from dmjd.errors import Alarm, Diverged, StorageError
from dmjd.parallel.engine import StepResult
from dmjd.parallel.world import World, alone
from dmjd.train.guard import Guard, PendingStep, Reading, StepNumbers

NAN, INF = float("nan"), float("inf")
CPU = torch.device("cpu")
IDS = 100 + torch.arange(4)


def pending(
    loss: float = 1.5, *, norm: float = 2.5, applied: float = 1.0, visible: float | None = 0.5, asked: float = 0.0
) -> PendingStep:
    def scalar(value: float) -> Tensor:
        return torch.tensor(value, requires_grad=True)

    values = {"loss": scalar(loss), "mim": scalar(1.0)} | ({} if visible is None else {"vis": scalar(visible)})
    result = StepResult(torch.tensor(norm), torch.tensor(applied))
    return PendingStep(41, IDS, values, result, torch.tensor((0.0, asked)), alone(CPU))


# Reading a step


def test_numbers_come_back_under_their_names() -> None:
    numbers, own_loss, asked = pending(asked=1.0).read()
    assert numbers == StepNumbers({"loss": 1.5, "mim": 1.0, "vis": 0.5}, grad_norm=2.5, applied=1.0)
    assert numbers.loss == 1.5
    assert (own_loss, asked) == (1.5, [0.0, 1.0])
    assert "vis" not in pending(visible=None).read().numbers.values


def test_numbers_are_of_the_moment_when_the_step_was_made() -> None:
    norm = torch.tensor(2.5)
    loss = torch.tensor(1.5)
    result = StepResult(norm, torch.tensor(1.0))
    step = PendingStep(0, IDS, {"loss": loss}, result, torch.zeros(1), alone(CPU))
    norm.fill_(99.0)  # an engine may use its tensors again
    loss.fill_(99.0)
    numbers = step.read().numbers
    assert (numbers.grad_norm, numbers.loss) == (2.5, 1.5)


class Sum(World):
    """Rank 1 of 2, whose partner had NaN in the first number and 1 in the last, and 0 in all others."""

    def mean(self, values: Tensor) -> Tensor:
        other = torch.zeros_like(values)
        other[0], other[-1] = NAN, 1
        return (values + other) / 2


def test_means_are_over_ranks_and_the_own_loss_is_not() -> None:
    values = {"loss": torch.tensor(3.0), "mim": torch.tensor(1.0)}
    result = StepResult(torch.tensor(1.0), torch.tensor(1.0))
    step = PendingStep(3, IDS, values, result, torch.zeros(2), Sum(1, 2, 1, CPU))
    numbers, own_loss, asked = step.read()
    assert not numbers.finite
    assert (numbers.values["mim"], own_loss, asked) == (0.5, 3.0, [0.0, 0.5])


@pytest.mark.parametrize(
    ("step", "finite"),
    [
        (pending(), True),
        (pending(NAN, norm=NAN, applied=0), False),
        (pending(INF, norm=NAN, applied=0), False),
        (pending(norm=NAN, applied=0), False),  # a finite loss whose gradient is not
        (pending(NAN, norm=1.0), False),  # a loss whose gradient hides that it is not finite
        (pending(applied=0.5), False),
    ],
)
def test_a_step_is_finite_if_its_loss_is_and_it_was_applied(step: PendingStep, finite: bool) -> None:
    assert step.read().numbers.finite is finite


@pytest.mark.parametrize("target", [INF, -INF, NAN])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(target: float) -> None:
    prediction = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = F.l1_loss(prediction, torch.tensor([0.0, target]))
    trapped(loss).backward()
    assert prediction.grad is not None
    assert not prediction.grad.isfinite().any(), "the gradient of L1 would be +-1/2, and the step be taken"


def test_a_finite_loss_keeps_the_bits_of_its_gradient() -> None:
    torch.manual_seed(0)
    values = torch.randn(100, requires_grad=True)
    gradients = []
    for wrap in (trapped, lambda loss: loss):
        gradients.append(torch.autograd.grad(wrap(values.exp().mean()) / 3, values)[0])
    assert torch.equal(*gradients)


# Judging


def reading(loss: float = 1.0, norm: float = 1.0) -> Reading:
    applied = float(torch.tensor((loss, norm)).isfinite().all())
    return Reading(StepNumbers({"loss": loss}, norm, applied), loss, [])


class Steps:
    """A guard, fed step by step."""

    def __init__(self, path: Path, **limits: Any) -> None:
        self.path = path / "guard.jsonl"
        self.guard = Guard(GuardConfig(**limits), self.path, alone(CPU))

    def feed(self, first: int, *losses: float) -> tuple[int, int] | None:
        """Steps from ``first`` on; what the alarm names, if there is one, at the last of them."""
        for step, loss in enumerate(losses, first):
            try:
                self.guard.check(step, step - 1, IDS, reading(loss))
            except Alarm as alarm:
                assert step == first + len(losses) - 1
                return alarm.first, alarm.last
        return None

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_skips_are_tolerated_up_to_the_limit_in_a_window(tmp_path: Path) -> None:
    steps = Steps(tmp_path, max_skips=2, window=10)
    assert steps.feed(1, NAN, 1, NAN) is None
    assert steps.feed(11, NAN) is None, "step 1 has left the window"
    assert steps.feed(12, 1, NAN) is None, "and so has step 3"
    assert steps.feed(14, 1, NAN) == (11, 15)


def test_a_limit_of_none_is_reached_at_once(tmp_path: Path) -> None:
    assert Steps(tmp_path, max_skips=0).feed(5, NAN) == (5, 5)


def test_a_gradient_alone_is_enough(tmp_path: Path) -> None:
    guard = Steps(tmp_path, max_skips=0).guard
    with pytest.raises(Alarm):
        guard.check(3, 2, IDS, reading(1.0, INF))


def test_every_skip_is_listed_with_its_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(tmp_path)
    steps.feed(7, 1, NAN)
    (line,) = steps.lines()
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "event": "skipped",
        "step": 8,
        "batch": 7,
        "loss": "nan",
        "grad_norm": 1.0,
        "ranks": [{"rank": 0, "loss": "nan", "samples": [100, 101, 102, 103]}],
    }
    (said,) = caplog.messages
    assert "step 8 gave a loss of nan" in said
    assert "samples 100, 101, 102, 103;" in said


class Ranks(World):
    """Rank 1 of 3, among others whose own loss was as given."""

    losses = (1.0, NAN, NAN)

    def gather(self, item: Any) -> list[Any]:
        return [{"rank": rank, "loss": loss, "samples": [rank]} for rank, loss in enumerate(self.losses)]

    def on_main(self, act: Any) -> Any:
        return act()


@pytest.mark.parametrize(("losses", "named"), [((1.0, NAN, NAN), [1, 2]), ((1.0, 2.0, 3.0), [0, 1, 2])])
def test_ranks_are_named_by_their_own_loss_or_else_all(
    tmp_path: Path, losses: tuple[float, ...], named: list[int]
) -> None:
    world = Ranks(1, 3, 1, CPU)
    object.__setattr__(world, "losses", losses)
    guard = Guard(GuardConfig(), tmp_path / "list", world)
    guard.check(3, 2, IDS, reading(NAN, NAN))
    (line,) = map(json.loads, (tmp_path / "list").read_text().splitlines())
    assert [row["rank"] for row in line["ranks"]] == named


def test_giving_up_names_steps_samples_and_the_reason_in_one_sentence(tmp_path: Path) -> None:
    steps = Steps(tmp_path, max_skips=1)
    assert steps.feed(3, NAN, 1, NAN) == (3, 5)
    with pytest.raises(Diverged) as caught:
        steps.guard.stop(Alarm(3, 5), "after 0 rollback(s)")
    sentence = str(caught.value)
    assert not caught.value.reported
    assert "\n" not in sentence
    for part in ("step 5 gave a loss of nan", "samples 100, 101", "the last of 2 bad steps since step 3", "after 0"):
        assert part in sentence
    assert steps.lines()[-1]["steps"] == [3, 5]


def test_only_the_first_samples_of_many_are_in_the_sentence(tmp_path: Path) -> None:
    for count, more in ((8, ""), (100, ", and 92 more")):
        guard = Guard(GuardConfig(max_skips=0), tmp_path / "list", alone(CPU))
        with pytest.raises(Alarm):
            guard.check(1, 0, torch.arange(count), reading(NAN))
        with pytest.raises(Diverged, match=f"samples 0, 1, 2, 3, 4, 5, 6, 7{more}; the run stops"):
            guard.stop(Alarm(1, 1), "why")


def test_a_spike_counts_its_high_losses_back_to_the_first(tmp_path: Path) -> None:
    steps = Steps(tmp_path, spike=5.0, spike_steps=3, window=10)
    calm = [1.0, 1.1, 0.9, 1.05, 0.95] * 2
    assert steps.feed(1, *calm) is None
    assert steps.feed(11, 9, 9, 1.0) is None, "two in a row are none"
    assert steps.feed(14, 9, 9, 9) == (14, 16)
    assert [(line["event"], line["step"]) for line in steps.lines()] == [
        ("high", step) for step in (11, 12, 14, 15, 16)
    ]
    assert steps.guard.in_doubt


def test_high_losses_are_no_skips_and_skips_are_no_losses(tmp_path: Path) -> None:
    steps = Steps(tmp_path, spike=5.0, spike_steps=3, window=10, max_skips=1)
    steps.feed(1, *[1.0, 1.1, 0.9, 1.05, 0.95] * 2)
    assert steps.feed(11, 9, NAN, 9) is None
    assert steps.feed(14, 9) == (12, 14), "a step that was skipped between them has no loss"


def test_a_guard_goes_on_from_its_state(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_skips": 1, "spike": 5.0, "window": 10}
    first, second = Steps(tmp_path, **limits), Steps(tmp_path, **limits)
    assert first.feed(1, *[1.0, 1.1, 0.9, 1.05, 0.95] * 2, 9, 9, NAN) is None
    state = first.guard.state_dict()
    torch.save(state, tmp_path / "state")
    second.guard.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert second.feed(14, 9) == (12, 14)
    second.guard.load_state_dict(state)
    assert second.feed(14, NAN) == (13, 14)


def test_a_guard_without_a_rule_takes_a_state_with_one_and_the_other_way_round(tmp_path: Path) -> None:
    plain, spiky = Steps(tmp_path), Steps(tmp_path, spike=5.0)
    for one, other in ((plain, spiky), (spiky, plain)):
        one.feed(1, NAN)
        other.guard.load_state_dict(one.guard.state_dict())
        assert other.guard.in_doubt


def test_a_list_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    guard = Guard(GuardConfig(), tmp_path / "missing" / "list", alone(CPU))
    with pytest.raises(StorageError, match="cannot write"):
        guard.check(1, 0, IDS, reading(NAN))
