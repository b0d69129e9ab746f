"""From a configuration to the objects of a run, refusing combinations that cannot be before any data is read.

One file per object; what others use of them is named here.
"""

from dmjd.builders.data import check_data, check_data_timeout, image_size, token_grid
from dmjd.builders.masks import build_mask_spec
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
