"""Tokenizers tkn(.): what a masked image model has to predict, one vector or code per patch."""

from __future__ import annotations

from dmjd.targets.clip import ClipTarget
from dmjd.targets.codebook import CodebookTarget
from dmjd.targets.hog import HogTarget
from dmjd.targets.pixels import PixelTarget
from dmjd.targets.teacher import TeacherTarget
from dmjd.targets.tokenizer import Tokenizer

__all__ = ["ClipTarget", "CodebookTarget", "HogTarget", "PixelTarget", "TeacherTarget", "Tokenizer"]
