"""Tokenizers tkn(.): the targets that a masked image model predicts, one vector or code per patch.

A target is one module: its class, and a call of :func:`register`. It is imported here.
"""

from __future__ import annotations

from dmjd.targets.clip import ClipTarget
from dmjd.targets.codebook import CodebookTarget
from dmjd.targets.hog import HogTarget
from dmjd.targets.pixels import PixelTarget
from dmjd.targets.teacher import TeacherTarget
from dmjd.targets.tokenizer import TARGETS, TargetSpec, Tokenizer, check_grid, register

__all__ = [
    "TARGETS",
    "ClipTarget",
    "CodebookTarget",
    "HogTarget",
    "PixelTarget",
    "TargetSpec",
    "TeacherTarget",
    "Tokenizer",
    "check_grid",
    "register",
]
