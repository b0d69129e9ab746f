"""Our models against the official code: its outputs, losses, gradients and first steps of training, in float64.

``tests/golden/official/make.py`` ran the official code and says how; ``cases.py`` beside it makes both sides' inputs.
Outputs agree to 1e-14 where this was written. What keeps losses and gradients from that is the objective's float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmjd.builders.schedules import adaptive_lr, cosine
from dmjd.config import OptimConfig
from dmjd.masking import MaskedViews
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.objective import Losses, Objective
from dmjd.models.vit import ViTEncoder
from dmjd.ops.images import normalise, patchify
from dmjd.ops.views import Views
from dmjd.parallel.single import build_optimizer
from dmjd.targets.pixels import PixelTarget
from tests.golden.official import cases
from tests.golden.official.cases import CASES, GRID, IMAGE, MEAN, PATCH, STD, Case, summary
from tests.interop.official_files import OFFICIAL, from_official, to_official

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def recorded(case: Case) -> dict[str, Any]:
    folder = Path(cases.__file__).parent
    record: dict[str, Any] = json.loads((folder / f"{case.name}.json").read_text())
    return record


def build(case: Case) -> Objective:
    encoder: Encoder
    if len(case.depths) == 1:
        encoder = ViTEncoder(
            image_size=(IMAGE, IMAGE),
            patch_size=PATCH,
            in_chans=3,
            embed_dim=case.embed_dims[0],
            depth=case.depths[0],
            num_heads=case.num_heads,
            mlp_ratio=case.mlp_ratios[0],
        )
    else:
        encoder = ConvViTEncoder(
            image_size=(IMAGE, IMAGE),
            in_chans=3,
            embed_dims=case.embed_dims,
            depths=case.depths,
            mlp_ratios=case.mlp_ratios,
            num_heads=case.num_heads,
        )
    decoder = MAEDecoder(
        encoder_dim=encoder.embed_dim,
        grid=(GRID, GRID),
        prefix_tokens=encoder.num_prefix_tokens,
        dim=case.decoder_dim,
        depth=case.decoder_depth,
        num_heads=case.decoder_heads,
        mlp_ratio=case.decoder_mlp_ratio,
    )
    branch = None
    if case.visible_branch:
        branch = VisibleBranch(encoder_dim=encoder.embed_dim, width=case.decoder_dim, target_dim=case.target_dim)
    model = MaskedImageModel(encoder, decoder, branch, case.target_dim).double()
    official = {
        name: torch.from_numpy(cases.parameter(name, tuple(value.shape))) for name, value in to_official(model).items()
    }
    model.load_state_dict(from_official(official))
    return Objective(model)


def inputs(case: Case, step: int) -> tuple[Tensor, MaskedViews, Tensor]:
    """Images, views and targets, as the objective takes them."""
    images = normalise(torch.from_numpy(cases.images(case, step)), MEAN, STD, torch.float64)
    visible = torch.from_numpy(cases.visible(case, step))
    mask = torch.ones(*visible.shape[:2], GRID * GRID, dtype=torch.bool).scatter(2, visible, False)
    masked = mask.nonzero()[:, 2].view(*visible.shape[:2], -1)
    views = Views(visible, masked, torch.cat((visible, masked), dim=2).argsort(), mask)
    targets = pixels(images) if case.pixels else torch.from_numpy(cases.features(case, step))
    return images, MaskedViews(views, masked), targets


def pixels(images: Tensor) -> Tensor:
    """The formula of PixelTarget, which gives float32."""
    variance, mean = torch.var_mean(patchify(images, PATCH), dim=-1, keepdim=True)
    return (patchify(images, PATCH) - mean) / (variance + 1e-6).sqrt()


def observe(objective: Objective) -> dict[str, Tensor]:
    """What the parts of the model will give next, under the names of the recording."""
    model, values = objective.model, {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def hook(module: nn.Module, given: tuple[Any, ...], value: Tensor) -> None:
            values[name] = value.detach()

        return hook

    if isinstance(model.encoder, ConvViTEncoder):
        model.encoder.blocks1[-1].register_forward_hook(keep("stage1"))
        model.encoder.blocks2[-1].register_forward_hook(keep("stage2"))
    model.encoder.blocks[-1].register_forward_hook(keep("stage3"))
    assert isinstance(model.encoder.norm, nn.Module)
    model.encoder.norm.register_forward_hook(keep("encoded"))
    model.head.register_forward_hook(keep("masked"))
    if model.visible_branch is not None:
        model.visible_branch.register_forward_hook(keep("visible"))
    return values


def terms(losses: Losses) -> dict[str, float]:
    return {name: value.item() for name, value in losses._asdict().items() if value is not None}


def gradient_norms(model: MaskedImageModel) -> dict[str, float]:
    """Of every parameter, under its official name."""
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
    return {name: norm.item() for name, norm in OFFICIAL.write(norms).state.items()}


@each_case
def test_outputs_losses_and_gradients(case: Case) -> None:
    official, objective = recorded(case), build(case)
    values = observe(objective)
    losses = objective(*inputs(case, 0))
    losses.total.backward()

    assert values.keys() == official["stages"].keys()
    for name, value in values.items():
        ours, theirs = summary(value.numpy()), official["stages"][name]
        assert ours.pop("shape") == theirs.pop("shape")
        for statistic, number in ours.items():
            assert number == pytest.approx(theirs[statistic], rel=1e-9, abs=1e-10), (name, statistic)
    assert terms(losses) == pytest.approx(official["losses"], rel=1e-9)
    assert gradient_norms(objective.model) == pytest.approx(official["gradient_norms"], rel=1e-7)


@each_case
def test_losses_of_twenty_steps(case: Case) -> None:
    objective = build(case)
    optimizer = build_optimizer(dict(objective.named_parameters()), OptimConfig(), {})
    peak = adaptive_lr(case.base_lr, case.unique_batch, case.m_corr, case.m_pred)
    curve = []
    for step in range(cases.STEPS):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step, total=cases.STEPS, warmup=cases.WARMUP, peak=peak) * group["lr_scale"]
            group["weight_decay"] = cases.WEIGHT_DECAY * group["wd_scale"]
        optimizer.zero_grad()
        losses = objective(*inputs(case, step))
        losses.total.backward()
        optimizer.step()
        curve.append(losses.total.item())
    assert curve == pytest.approx(recorded(case)["curve"], rel=1e-7)


def test_pixel_target_is_the_one_compared_here() -> None:
    case = CASES[-1]
    images = torch.from_numpy(cases.images(case, 0))
    target = PixelTarget(PATCH, 3, MEAN, STD, norm="patch")
    torch.testing.assert_close(target(images).double(), inputs(case, 0)[2], rtol=1e-5, atol=1e-5)
