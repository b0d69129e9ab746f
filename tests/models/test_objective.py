from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmjd.masking import MaskedViews, MaskSpec
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import MaskedImageModel, Prediction
from dmjd.models.objective import Losses, Objective, mean_losses
from dmjd.models.vit import ViTEncoder

GRID, B, TARGET_DIM = (4, 4), 3, 5
N = GRID[0] * GRID[1]

ELEMENT_LOSSES: dict[str, Callable[[float], float]] = {
    "mse": lambda d: d * d,
    "l1": abs,
    "smooth_l1": lambda d: 0.25 * d * d if abs(d) <= 2 else abs(d) - 1,  # Eq. 5 at beta 2
}


class FixedModel(nn.Module):
    """Predicts the same two tensors whatever it sees."""

    def __init__(self, masked: Tensor, visible: Tensor | None) -> None:
        super().__init__()
        self.masked = nn.Parameter(masked)
        self.visible = nn.Parameter(visible) if visible is not None else None

    def forward(self, images: Tensor, masked_views: MaskedViews, branch_scales: Tensor | None = None) -> Prediction:
        return Prediction(self.masked, self.visible)


def make_objective(masked: Tensor, visible: Tensor | None, **options: Any) -> Objective:
    return Objective(FixedModel(masked, visible), **options)  # type: ignore[arg-type]


def random(*shape: int, seed: int = 0) -> Tensor:
    """Wide enough for smooth L1 to be on both of its sides."""
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw(views: int = 2, **options: Any) -> MaskedViews:
    spec = MaskSpec(views=views, mask_ratio=0.6, pattern="uniform", **options)
    return spec.draw(torch.arange(B), GRID, seed=0, epoch=0)


def predictions(masked_views: MaskedViews) -> tuple[Tensor, Tensor]:
    views, predicted = masked_views
    rows = views.visible.shape[0] * B
    return (
        random(rows, predicted.shape[-1], TARGET_DIM, seed=1),
        random(rows, views.visible.shape[-1], TARGET_DIM, seed=2),
    )


def loop_mean(prediction: Tensor, targets: Tensor, ids: Tensor, loss: Callable[[float], float]) -> float:
    """The mean of ``loss`` over views, samples, tokens ``ids [K, B, P]`` and channels, in Python's doubles."""
    total, terms = 0.0, 0
    for k in range(ids.shape[0]):
        for b in range(B):
            for slot, token in enumerate(ids[k, b].tolist()):
                for channel in range(TARGET_DIM):
                    total += loss(prediction[k * B + b, slot, channel].item() - targets[b, token, channel].item())
                    terms += 1
    return total / terms


@pytest.mark.parametrize("mim_loss", ["mse", "l1", "smooth_l1"])
@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize("mim_weight", [1.0, 0.3])
def test_losses_equal_loops_over_tokens(mim_loss: str, views: int, mim_weight: float) -> None:
    masked_views, targets = draw(views), random(B, N, TARGET_DIM)
    masked, visible = predictions(masked_views)
    losses = make_objective(masked, visible, mim_loss=mim_loss, mim_weight=mim_weight)(
        torch.empty(0), masked_views, targets
    )
    mim = loop_mean(masked, targets, masked_views.predicted, ELEMENT_LOSSES[mim_loss])
    vis = loop_mean(visible, targets, masked_views.views.visible, ELEMENT_LOSSES["smooth_l1"])
    assert losses.masked.item() == pytest.approx(mim, rel=1e-6)
    assert losses.visible.item() == pytest.approx(vis, rel=1e-6)
    assert losses.total.item() == pytest.approx(vis + mim_weight * mim, rel=1e-6)
    assert all(loss.shape == () for loss in losses)


@pytest.mark.parametrize("loss_ratio", [0.3, 0.9])
def test_predicting_less_or_more_than_is_hidden(loss_ratio: float) -> None:
    masked_views, targets = draw(1, loss_ratio=loss_ratio), random(B, N, TARGET_DIM)
    assert masked_views.predicted.shape[-1] != masked_views.views.masked.shape[-1]
    masked, visible = predictions(masked_views)
    losses = make_objective(masked, visible)(torch.empty(0), masked_views, targets)
    expected = loop_mean(masked, targets, masked_views.predicted, ELEMENT_LOSSES["mse"])
    assert losses.masked.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("difference", "at_two", "at_half"),
    [(0.0, 0.0, 0.0), (0.5, 0.0625, 0.25), (1.0, 0.25, 0.75), (2.0, 1.0, 1.75), (-2.0, 1.0, 1.75), (5.0, 4.0, 4.75)],
)
def test_smooth_l1_is_quadratic_up_to_beta(difference: float, at_two: float, at_half: float) -> None:
    masked_views = draw()
    masked, visible = (torch.full_like(prediction, difference) for prediction in predictions(masked_views))
    for options, expected in (({}, at_two), ({"beta": 0.5}, at_half)):
        for mim_loss, mim in (("mse", difference**2), ("smooth_l1", expected)):
            losses = make_objective(masked, visible, mim_loss=mim_loss, **options)(
                torch.empty(0), masked_views, torch.zeros(B, N, TARGET_DIM)
            )
            assert (losses.visible.item(), losses.masked.item()) == (expected, mim)


@pytest.mark.parametrize("mim_weight", [1.0, 0.3])
def test_without_the_visible_branch_the_total_is_the_weighted_mim_loss(mim_weight: float) -> None:
    masked_views, targets = draw(), random(B, N, TARGET_DIM)
    masked, _ = predictions(masked_views)
    losses = make_objective(masked, None, mim_weight=mim_weight)(torch.empty(0), masked_views, targets)
    assert losses.visible is None
    assert losses.total.item() == pytest.approx(mim_weight * losses.masked.item(), rel=1e-7)


def test_each_loss_counts_its_own_tokens_only() -> None:
    masked_views = draw(1)
    masked, visible = predictions(masked_views)
    objective = make_objective(masked, visible)
    targets = random(B, N, TARGET_DIM)
    before = objective(torch.empty(0), masked_views, targets)
    for hidden in (True, False):
        changed = targets.clone()
        changed[masked_views.views.mask[0] == hidden] += 1
        after = objective(torch.empty(0), masked_views, changed)
        assert torch.equal(after.masked, before.masked) != hidden
        assert torch.equal(after.visible, before.visible) == hidden


@pytest.mark.parametrize("views", [1, 2, 3])
def test_targets_are_aligned_token_by_token(views: int) -> None:
    masked_views, targets = draw(views), random(B, N, TARGET_DIM)
    views_drawn, predicted = masked_views
    masked = torch.stack([targets[b, predicted[k, b]] for k in range(views) for b in range(B)])
    visible = torch.stack([targets[b, views_drawn.visible[k, b]] for k in range(views) for b in range(B)])
    aligned = make_objective(masked, visible)(torch.empty(0), masked_views, targets)
    assert [loss.item() for loss in aligned] == [0, 0, 0]
    shuffled = make_objective(masked.roll(1, dims=1), visible.roll(1, dims=1))(torch.empty(0), masked_views, targets)
    assert all(loss.item() > 0.1 for loss in shuffled)
    swapped = make_objective(masked.roll(1, dims=0), visible.roll(1, dims=0))(torch.empty(0), masked_views, targets)
    assert all(loss.item() > 0.1 for loss in swapped)


def test_gradients_reach_each_branch_with_its_weight() -> None:
    masked_views, targets = draw(), random(B, N, TARGET_DIM)
    masked, visible = predictions(masked_views)
    objective = make_objective(masked, visible, mim_weight=0.3)
    objective(torch.empty(0), masked_views, targets).total.backward()
    model = objective.model
    for k in range(2):
        for b in range(B):
            row = k * B + b
            d = masked[row] - targets[b, masked_views.predicted[k, b]]
            torch.testing.assert_close(model.masked.grad[row], 0.3 * 2 * d / masked.numel())  # type: ignore[index]
            d = visible[row] - targets[b, masked_views.views.visible[k, b]]
            torch.testing.assert_close(model.visible.grad[row], (d / 2).clamp(-1, 1) / visible.numel())  # type: ignore[index]


@pytest.mark.parametrize("mim_loss", ["mse", "l1", "smooth_l1"])
def test_losses_are_float32_under_bfloat16_autocast(mim_loss: str) -> None:
    torch.manual_seed(0)
    encoder = ViTEncoder(image_size=(16, 16), patch_size=4, in_chans=3, embed_dim=32, depth=1, num_heads=4)
    decoder = MAEDecoder(encoder_dim=32, grid=GRID, prefix_tokens=1, dim=32, depth=1, num_heads=4, mlp_ratio=2.0)
    branch = VisibleBranch(encoder_dim=32, width=16, target_dim=TARGET_DIM)
    objective = Objective(MaskedImageModel(encoder, decoder, branch, TARGET_DIM), mim_loss=mim_loss)
    images, masked_views, targets = torch.randn(B, 3, 16, 16), draw(), random(B, N, TARGET_DIM)
    with torch.autocast("cpu", torch.bfloat16):
        prediction = objective.model(images, masked_views)
        losses = objective(images, masked_views, targets)
    assert prediction.masked.dtype == prediction.visible.dtype == torch.bfloat16
    assert all(loss.dtype == torch.float32 for loss in losses)
    mim = loop_mean(prediction.masked, targets, masked_views.predicted, ELEMENT_LOSSES[mim_loss])
    vis = loop_mean(prediction.visible, targets, masked_views.views.visible, ELEMENT_LOSSES["smooth_l1"])
    assert losses.masked.item() == pytest.approx(mim, rel=1e-6)
    assert losses.visible.item() == pytest.approx(vis, rel=1e-6)
    assert losses.total.item() == pytest.approx(vis + mim, rel=1e-6)


@pytest.mark.parametrize("mim_loss", ["", "MSE", "cross-entropy"])
def test_unknown_loss_is_refused(mim_loss: str) -> None:
    with pytest.raises(ValueError, match=f"mim_loss must be one of mse, l1, .*, got '{mim_loss}'"):
        make_objective(torch.zeros(1), None, mim_loss=mim_loss)


def test_mean_losses_is_the_mean_and_leaves_the_graph() -> None:
    weight = torch.tensor(1.0, requires_grad=True)
    parts = [Losses(weight * total, weight * masked, weight * vis) for total, masked, vis in ((1, 2, 3), (3, 6, 4))]
    mean = mean_losses(parts)
    assert [loss.item() for loss in mean if loss is not None] == [2, 4, 3.5]
    assert not any(loss.requires_grad for loss in mean if loss is not None)
    assert mean_losses([part._replace(visible=None) for part in parts]).visible is None
