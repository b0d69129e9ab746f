"""The mask specification of a configuration."""

from __future__ import annotations

from dataclasses import fields

from dmjd.config import MaskConfig
from dmjd.errors import config_section
from dmjd.masking import MaskSpec


def build_mask_spec(config: MaskConfig, grid: tuple[int, int]) -> MaskSpec:
    """The mask specification, known to be possible on ``grid``."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    values["block"] = tuple(values["block"])
    with config_section("mask"):
        spec = MaskSpec(**values)
        spec.plan(grid)
    return spec
