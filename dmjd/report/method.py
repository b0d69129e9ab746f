"""Names of a run's method, masks and losses, from the parts that its configuration turns on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmjd.report.format import ABSENT, look_up, name_of, plain
from dmjd.report.trainings import training_of

_METHODS = {name.lower(): name for name in ("MAE", "SimMIM", "BEiT", "MaskFeat", "ConvMAE", "MVP")}
_TARGETS = {
    "pixels": "pixels",
    "hog": "HOG",
    "clip": "CLIP features",
    "dvae": "dVAE codes",
    "vqkd": "VQ-KD codes",
    "teacher": "features of the averaged encoder",
}
_LOSSES = {
    "mse": "mean squared error",
    "l1": "L1 loss",
    "smooth_l1": "smooth L1 loss",
    "cosine": "cosine distance",
    "cross_entropy": "cross-entropy",
}


def base_and_additions(config: Mapping[str, Any]) -> tuple[str, str]:
    """("MAE", "+DMJD") in the paper's terms: DM is disjoint masking, JD joint distillation.

    ``method=dmjd`` is called after the parts that are on: DMJD, DM, JD or, without both, MIM.
    """
    training = training_of(config)
    if training is not None:
        return training.title, ""
    name = name_of(config.get("method"))
    added = "DM" * is_disjoint(config) + "JD" * distils(config)
    if name == "dmjd":
        return added or "MIM", ""
    return _METHODS.get(name, name), f"+{added}" if added else ""


def method_name(config: Mapping[str, Any]) -> str:
    """ "DMJD", "DM", "MAE", "MAE +DM"."""
    return " ".join(filter(None, base_and_additions(config)))


def is_disjoint(config: Mapping[str, Any]) -> bool:
    """Whether views mask disjoint sets of tokens as far as their rates allow."""
    views, regulation = (look_up(config, ("mask", key)) for key in ("views", "regulation"))
    if views is None and name_of(config.get("method")) == "dmjd":
        return True
    return isinstance(views, int) and views > 1 and regulation in (None, "disjoint")


def distils(config: Mapping[str, Any]) -> bool:
    """Whether the visible branch learns the targets of visible tokens."""
    enabled = look_up(config, ("method", "visible_branch", "enabled"))
    return enabled is True or (enabled is None and name_of(config.get("method")) == "dmjd")


def method_summary(config: Mapping[str, Any]) -> str:
    """One sentence: the method, its views, its target and its branches."""
    views = look_up(config, ("mask", "views"))
    kind = "disjoint views" if is_disjoint(config) else "independent views"
    masks = "1 view" if views == 1 else f"{plain(views)} {kind}"
    tokens = "masked and visible tokens" if distils(config) else "masked tokens"
    text = f"{method_name(config)}: {masks} of an image, {target_name(config)} as the target of {tokens}"
    missing = [
        *["disjoint masks"] * (not is_disjoint(config)),
        *["joint distillation (no visible branch)"] * (not distils(config)),
    ]
    if name_of(config.get("method")) == "dmjd" and missing:
        text += f"; method=dmjd without {' and without '.join(missing)}"
    return text + "."


def target_name(config: Mapping[str, Any]) -> str:
    """ "HOG", "pixels normalised per patch"."""
    name = name_of(config.get("target"))
    norm = " normalised per patch" if look_up(config, ("target", "norm")) == "patch" else ""
    return _TARGETS.get(name, name) + norm


def loss_meanings(config: Mapping[str, Any]) -> str:
    """The losses of the chart in the terms of the method."""
    mim = look_up(config, ("method", "mim_loss"))
    target, weight = target_name(config), look_up(config, ("method", "mim_weight"))
    kind = _LOSSES.get(mim, plain(mim)) if mim else "loss"
    text = f"L_mim: {kind} of {target} on masked tokens."
    if not distils(config):
        return text
    scale = "" if weight in (None, 1.0) else f"{plain(weight)} "
    return f"{text} L_vis: smooth L1 loss of {target} on visible tokens. Total: L_vis + {scale}L_mim."


def masks_caption(config: Mapping[str, Any]) -> str:
    """Title of the picture of several views' masks."""
    return "Disjoint masks" if is_disjoint(config) else "Independent masks"


def held_out(config: Mapping[str, Any]) -> str:
    """The images that were kept from training for the scores; a dash if the configuration has no such split."""
    percent, seed = (look_up(config, ("data", key)) for key in ("val_percent", "val_seed"))
    return f"{plain(percent)} % of the images, split seed {plain(seed or 0)}" if percent else ABSENT
