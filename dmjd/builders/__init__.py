"""From a configuration to the objects of a run. Combinations that cannot work are rejected before data is read.

``step.py`` puts a training step together; the other files build its parts.
"""

from dmjd.builders.data import build_mask_spec, check_data, check_data_timeout, image_size, token_grid
from dmjd.builders.model import build_encoder, build_objective
from dmjd.builders.schedules import build_schedule, peak_lr
from dmjd.builders.targets import build_tokenizer, check_target, target_dim

__all__ = [
    "build_encoder",
    "build_mask_spec",
    "build_objective",
    "build_schedule",
    "build_tokenizer",
    "check_data",
    "check_data_timeout",
    "check_target",
    "image_size",
    "peak_lr",
    "target_dim",
    "token_grid",
]
