"""Counter-based random bits: Philox4x32-10 (Salmon et al., SC'11), equal on every device and for every batch split.

All randomness in dmjd is a pure function of (seed, epoch, sample id, domain, lane), independent of batch size, rank,
number of workers and restarts. The 128-bit counter and 64-bit key are laid out as

    counter = (block, domain << 24 | lane, sample id low 32 bits, sample id high 32 bits)       key = (seed, epoch)

where each ``block`` gives four 32-bit words. Words are stored in int64, since torch has no full uint32 arithmetic.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from dmjd.ops._lib import define
from dmjd.ops.arguments import integer, require_tensors, shown

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW32 = 0xFFFFFFFF

WORD_RANGE = 1 << 32
"""Words are uniform in ``range(WORD_RANGE)``."""


class Domain(IntEnum):
    """The purpose of a draw. Different domains give independent random bits for the same sample."""

    MASK = 1
    PREDICT = 2
    ORDER = 3
    CROP = 4
    FLIP = 5
    SUBSTITUTE = 6
    DROP_PATH = 7
    RECTANGLE = 8


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of ``a * b`` for 32-bit values held in int64 (16-bit limbs, so nothing overflows)."""
    high = ((a >> 16) * b + ((a & 0xFFFF) * b >> 16)) >> 16
    low = (a * b) & _LOW32  # wraps modulo 2**64; the low 32 bits stay exact
    return high, low


def _fake(counter: Tensor, key: Tensor) -> Tensor:
    return torch.empty_like(counter, memory_format=torch.contiguous_format)


@define("philox4x32(Tensor counter, Tensor key) -> Tensor", fake=_fake)
def _reference(counter: Tensor, key: Tensor) -> Tensor:
    # The low 32 bits only, as in the kernels.
    c0, c1, c2, c3 = (counter & _LOW32).unbind(-1)
    # non_blocking: else every training step would synchronise with the host.
    k0, k1 = (key.to(counter.device, non_blocking=True) & _LOW32).unbind(-1)
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds of Philox4x32.

    Args:
        counter: int64 ``[..., 4]``, 32-bit words in ``[0, 2**32)``.
        key: int64 ``[2]``, 32-bit words; on the CPU (read at launch) or on ``counter``'s device.

    Returns:
        int64 of ``counter``'s shape, words in ``[0, 2**32)``.

    Raises:
        TypeError: if either is not int64. ValueError: on any other shape, or a key on a third device.
    """
    require_tensors("philox4x32", counter=counter, key=key)
    if counter.dtype != torch.int64 or key.dtype != torch.int64:
        raise TypeError(f"philox4x32: counter and key must be int64, got {counter.dtype} and {key.dtype}")
    if counter.ndim < 1 or counter.shape[-1] != 4 or key.shape != (2,):
        raise ValueError(
            f"philox4x32: counter must be [..., 4] and key [2], got {tuple(counter.shape)} and {tuple(key.shape)}"
        )
    if key.device.type != "cpu" and key.device != counter.device:
        raise ValueError(
            f"philox4x32: key must be on the CPU or on counter's device, got {key.device}, {counter.device}"
        )
    return torch.ops.dmjd.philox4x32(counter, key)


def make_key(seed: int | Tensor, epoch: int | Tensor) -> Tensor:
    """The int64 ``[2]`` key of (seed, epoch). Integers stay on the CPU; 0-d tensors keep their device (CUDA graphs).

    Raises:
        TypeError: if one is neither an integer nor an int64 tensor.
        ValueError: if an integer is outside ``[0, 2**32)``, or a tensor is not 0-d.
    """
    key: list[int | Tensor] = []
    for name, value in (("seed", seed), ("epoch", epoch)):
        word = value if isinstance(value, Tensor) else integer(name, value)
        if isinstance(value, Tensor):
            if value.dtype != torch.int64:
                raise TypeError(f"{name} must be an integer or an int64 tensor, got a tensor of {value.dtype}")
            if value.ndim:
                raise ValueError(f"{name} must be 0-d as a tensor, got shape {tuple(value.shape)}")
        elif not 0 <= word < WORD_RANGE:
            raise ValueError(f"{name} must be in [0, 2**32), got {shown(value)}")
        key.append(word)
    devices = [word.device for word in key if isinstance(word, Tensor)]
    if devices:
        return torch.stack([torch.as_tensor(word, dtype=torch.int64, device=devices[0]) for word in key])
    # Explicit device, since callers may have set another default.
    return torch.tensor(key, dtype=torch.int64, device="cpu")


def keyed_bits(sample_ids: Tensor, words: int, *, key: Tensor, domain: Domain, lane: int = 0) -> Tensor:
    """``words`` random 32-bit words per sample, a pure function of (key, sample id, domain, lane).

    Args:
        sample_ids: int64 ``[B]``.
        words: number of words per sample, at most 2**34.
        key: from :func:`make_key`.
        domain: purpose of the draw, in ``[0, 2**8)``.
        lane: view, attempt or layer, in ``[0, 2**24)``.

    Returns:
        int64 ``[B, words]`` on ``sample_ids``' device, values in ``[0, 2**32)``.

    Raises:
        TypeError: if sample_ids is not an int64 tensor, or a number not an integer. ValueError: if one is out of range.
    """
    require_tensors("keyed_bits", sample_ids=sample_ids, key=key)
    if sample_ids.dtype != torch.int64:
        raise TypeError(f"keyed_bits: sample_ids must be int64, got {sample_ids.dtype}")
    if sample_ids.ndim != 1:
        raise ValueError(f"keyed_bits: sample_ids must be one-dimensional [B], got shape {tuple(sample_ids.shape)}")
    words, lane = integer("keyed_bits: words", words), integer("keyed_bits: lane", lane)
    for name, value, end in (("domain", integer("keyed_bits: domain", domain), 8), ("lane", lane, 24)):
        if not 0 <= value < 1 << end:
            raise ValueError(f"keyed_bits: {name} must be in [0, 2**{end}), got {value}")
    if not 0 <= words <= 4 * WORD_RANGE:  # four per block number
        raise ValueError(f"keyed_bits: words must be in [0, 2**34], got {words}")
    blocks = -(-words // 4)
    block = torch.arange(blocks, device=sample_ids.device).expand(sample_ids.shape[0], blocks)
    stream = torch.full_like(block, int(domain) << 24 | lane)
    low = (sample_ids & _LOW32).unsqueeze(1).expand_as(block)
    high = (sample_ids >> 32 & _LOW32).unsqueeze(1).expand_as(block)
    counter = torch.stack((block, stream, low, high), dim=-1)
    return philox4x32(counter, key).flatten(1)[:, :words]


def keyed_uniform(sample_ids: Tensor, words: int, *, key: Tensor, domain: Domain, lane: int = 0) -> Tensor:
    """As :func:`keyed_bits`, but float64 in [0, 1) with 32 random bits each: exact, so equal on every device."""
    return keyed_bits(sample_ids, words, key=key, domain=domain, lane=lane).double() / WORD_RANGE
