"""The mask specification of a configuration."""

from __future__ import annotations

from dataclasses import fields

from dmjd.config import MaskConfig
from dmjd.masking import MaskSpec
from dmjd.train.builders.refusal import refusing


def build_mask_spec(config: MaskConfig, grid: tuple[int, int]) -> MaskSpec:
    """The mask specification, known to be possible on ``grid``."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    values["block"] = tuple(values["block"])
    with refusing("mask"):
        spec = MaskSpec(**values)
        spec.plan(grid)
    return spec
