"""Tokenizers tkn(.): what a masked image model has to predict, one vector per patch."""

from __future__ import annotations

from dmjd.targets.hog import HogTarget
from dmjd.targets.pixels import PixelTarget
from dmjd.targets.tokenizer import Tokenizer

__all__ = ["HogTarget", "PixelTarget", "Tokenizer"]
