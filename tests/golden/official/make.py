"""Runs the official code of DMJD and MAE on ``cases.py`` and records what comes out, one JSON file per case.

    python -m tests.golden.official.make DMJD MAE TIMM

DMJD: a checkout of mx-mark/DMJD (881b21d). MAE: one of facebookresearch/mae (efb2a80). TIMM: where
``pip install --no-deps --target TIMM timm==0.3.2`` put the version that they were written for.

Everything is float64, but for the fixed positions: the official code rounds its float64 table to float32, and so do we.

Masks replace what the masking methods draw. Ids of visible tokens ascend, because the official visible branch pairs
predictions in the order of ids_keep with targets in raster order; with its own shuffled ids no two implementations
that align them could agree. To everything else the order is nothing but a permutation.
"""

from __future__ import annotations

import collections.abc
import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tests.golden.official.cases import (
    BATCH,
    BETAS,
    CASES,
    GRID,
    IMAGE,
    MEAN,
    PATCH,
    STD,
    STEPS,
    WARMUP,
    WEIGHT_DECAY,
    Case,
    features,
    images,
    parameter,
    summary,
    visible,
)


class Masks(NamedTuple):
    """As the official code has them: K views of B images in K*B rows."""

    keep: Tensor
    mask: Tensor
    restore: Tensor


class Losses(NamedTuple):
    """visible: None where the case has no such branch."""

    total: Tensor
    masked: Tensor
    visible: Tensor | None


Observe = Callable[[str, Tensor], None]


def main(dmjd: str, mae: str, timm: str) -> None:
    old_environment()
    sys.path.insert(0, timm)
    models_dmjd = from_checkout(dmjd, "models_dmjd")
    models_mae = from_checkout(mae, "models_mae")
    adjust_learning_rate = from_checkout(mae, "util.lr_sched").adjust_learning_rate
    add_weight_decay = importlib.import_module("timm.optim.optim_factory").add_weight_decay
    for case in CASES:
        official: Run = ViTRun(case, models_mae) if len(case.depths) == 1 else ConvViTRun(case, models_dmjd, models_mae)
        record = recorded(official, add_weight_decay, adjust_learning_rate)
        Path(__file__).with_name(f"{case.name}.json").write_text(json.dumps(record, indent=1) + "\n")


def old_environment() -> None:
    """What old timm and the official code expect of torch and numpy."""
    six = ModuleType("torch._six")
    six.__dict__.update(container_abcs=collections.abc, string_classes=str, int_classes=int)
    sys.modules["torch._six"] = six
    np.__dict__["float"] = float


def from_checkout(folder: str, module: str) -> ModuleType:
    """Both checkouts call a package of theirs ``util``."""
    for name in [name for name in sys.modules if name.split(".")[0] == "util"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(folder)


def recorded(run: Run, add_weight_decay: Any, adjust_learning_rate: Any) -> dict[str, Any]:
    """Outputs and gradients of the first step, and the losses of all, with the official groups and schedule."""
    case = run.case
    stages: dict[str, Any] = {}
    losses = run(0, lambda name, value: stages.update({name: summary(value.detach().numpy())}))
    losses.total.backward()
    named = [(name, p) for name, p in run.model.named_parameters() if p.grad is not None]
    norms = {name: float(p.grad.norm()) for name, p in named if p.grad is not None}

    # main_pretrain.py of DMJD: batch * pred_ratio / mask_ratio; for MAE the ratios are the same.
    effective_batch = case.unique_batch * (case.m_pred / case.m_corr)
    schedule = SimpleNamespace(lr=case.base_lr * effective_batch / 256, min_lr=0.0, epochs=STEPS, warmup_epochs=WARMUP)
    optimizer = torch.optim.AdamW(add_weight_decay(run.model, WEIGHT_DECAY), lr=schedule.lr, betas=BETAS)
    curve = []
    for step in range(STEPS):
        adjust_learning_rate(optimizer, step, schedule)
        optimizer.zero_grad()
        now = run(step)
        now.total.backward()
        optimizer.step()
        curve.append(now.total.item())
    return {
        "stages": stages,
        "losses": {name: value.item() for name, value in losses._asdict().items() if value is not None},
        "gradient_norms": norms,
        "curve": curve,
    }


class Run:
    """An official model, filled, and one evaluation of its losses."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case = case
        self.model = model.double()
        for name, value in self.model.named_parameters():
            if value.requires_grad:
                value.data.copy_(torch.from_numpy(parameter(name, tuple(value.shape))))

    def __call__(self, step: int, observe: Observe = lambda name, value: None) -> Losses:
        raise NotImplementedError

    def images(self, step: int) -> Tensor:
        """Normalised, ``[B, 3, H, W]``."""
        pixels = (images(self.case, step) / 255 - np.array(MEAN)) / np.array(STD)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()

    def masks(self, step: int) -> Masks:
        keep = torch.from_numpy(visible(self.case, step)).flatten(0, 1)
        mask = torch.ones(self.case.views * BATCH, GRID * GRID, dtype=torch.float64).scatter(1, keep, 0)
        shuffle = mask.argsort(dim=1, stable=True)
        assert shuffle[:, : keep.shape[1]].equal(keep)
        return Masks(keep, mask, shuffle.argsort(dim=1))

    def observe_decoder(self, observe: Observe, prediction: Tensor, masks: Masks) -> None:
        """Predictions of hidden tokens, ascending ids."""
        observe("masked", prediction[masks.mask.bool()].unflatten(0, (masks.mask.shape[0], -1)))


class ConvViTRun(Run):
    def __init__(self, case: Case, dmjd: ModuleType, mae: ModuleType) -> None:
        model = dmjd.DMJDConvViT(
            img_size=[IMAGE, IMAGE // 4, IMAGE // 8],
            patch_size=[4, 2, 2],
            embed_dim=list(case.embed_dims),
            depth=list(case.depths),
            num_heads=case.num_heads,
            decoder_embed_dim=case.decoder_dim,
            decoder_depth=case.decoder_depth,
            decoder_num_heads=case.decoder_heads,
            mlp_ratio=list(case.mlp_ratios),  # the decoder takes the first
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            decoder_pred_dim=case.target_dim,
        )
        super().__init__(case, model)
        self.mae = mae.MaskedAutoencoderViT
        if not case.visible_branch:
            # ConvMAE lacks it: here, at theta = 0, its gradients would be zeros and its weights decay.
            model.proj_embed.requires_grad_(False)
            model.predictor.requires_grad_(False)

    def __call__(self, step: int, observe: Observe = lambda name, value: None) -> Losses:
        model: Any = self.model
        masks = self.masks(step)
        model.block_masking = model.random_masking = lambda x, mask_ratio, pred_ratio: masks
        hooks = [
            blocks[-1].register_forward_hook(
                lambda module, given, value, name=name: observe(name, self.shown(value, masks.keep))
            )
            for name, blocks in (("stage1", model.blocks1), ("stage2", model.blocks2), ("stage3", model.blocks3))
        ]
        inputs = self.images(step)
        encoded, mask, restore = model.forward_encoder(inputs, self.case.m_corr)
        for hook in hooks:
            hook.remove()
        observe("encoded", encoded)
        prediction = model.forward_decoder(encoded, restore)
        self.observe_decoder(observe, prediction[0], masks)
        target = self.pixels(inputs) if self.case.pixels else torch.from_numpy(features(self.case, step))
        masked = model.forward_loss(inputs, prediction, target, mask, theta=0.0)
        if not self.case.visible_branch:
            return Losses(masked, masked, None)
        observe("visible", prediction[1])
        total = model.forward_loss(inputs, prediction, target, mask)
        return Losses(total, masked, total - masked)

    @staticmethod
    def shown(value: Tensor, keep: Tensor) -> Tensor:
        """Maps ``[R, C, H, W]`` -> what visible tokens have of them, ``[R, V, q, q, C]``. Tokens stay as they are."""
        if value.ndim == 3:
            return value
        side = value.shape[-1] // GRID
        blocks = value.unflatten(3, (GRID, side)).unflatten(2, (GRID, side)).permute(0, 2, 4, 3, 5, 1).flatten(1, 2)
        return torch.stack([row[ids] for row, ids in zip(blocks, keep, strict=True)])

    def pixels(self, inputs: Tensor) -> Tensor:
        """MAE's target with norm_pix_loss, by its own method for patches."""
        cut = SimpleNamespace(patch_embed=SimpleNamespace(patch_size=(PATCH, PATCH)))
        target: Tensor = self.mae.patchify(cut, inputs)
        return (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5


class ViTRun(Run):
    def __init__(self, case: Case, mae: ModuleType) -> None:
        model = mae.MaskedAutoencoderViT(
            img_size=IMAGE,
            patch_size=PATCH,
            embed_dim=case.embed_dims[0],
            depth=case.depths[0],
            num_heads=case.num_heads,
            decoder_embed_dim=case.decoder_dim,
            decoder_depth=case.decoder_depth,
            decoder_num_heads=case.decoder_heads,
            mlp_ratio=case.mlp_ratios[0],
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            norm_pix_loss=True,
        )
        super().__init__(case, model)

    def __call__(self, step: int, observe: Observe = lambda name, value: None) -> Losses:
        model: Any = self.model
        masks = self.masks(step)
        model.random_masking = lambda x, mask_ratio: (
            torch.stack([row[ids] for row, ids in zip(x, masks.keep, strict=True)]),
            masks.mask,
            masks.restore,
        )
        hook = model.blocks[-1].register_forward_hook(lambda module, given, value: observe("stage3", value))
        inputs = self.images(step)
        encoded, mask, restore = model.forward_encoder(inputs, self.case.m_corr)
        hook.remove()
        observe("encoded", encoded)
        prediction = model.forward_decoder(encoded, restore)
        self.observe_decoder(observe, prediction, masks)
        masked = model.forward_loss(inputs, prediction, mask)
        return Losses(masked, masked, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
