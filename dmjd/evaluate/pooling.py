"""From the tokens of an image to one vector."""

from __future__ import annotations

from torch import Tensor

from dmjd.errors import ConfigError

POOLINGS = ("mean", "cls")
"""``mean`` of the patch tokens (ConvMAE, DMJD), or the ``cls`` token (MAE)."""


def pool(tokens: Tensor, num_prefix_tokens: int, how: str) -> Tensor:
    """One vector per image.

    Args:
        tokens: ``[B, prefix + N, D]``, after the encoder's final norm.
        num_prefix_tokens: how many leading tokens are not patches; the first of them is the cls token.
        how: one of :data:`POOLINGS`.

    Returns:
        ``[B, D]`` in ``tokens``' dtype.

    Raises:
        ConfigError: for another ``how``, and for ``cls`` without a cls token. Token 0 would then be the top-left patch,
            which probes without complaint and scores far too low.
    """
    if how == "mean":
        return tokens[:, num_prefix_tokens:].mean(dim=1)
    if how != "cls":
        raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}, got {how!r}")
    if num_prefix_tokens == 0:
        raise ConfigError("pooling=cls needs a cls token and this encoder has none; the allowed value is pooling=mean")
    return tokens[:, 0]
