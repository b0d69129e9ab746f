"""Philox4x32-10: published vectors, an oracle on Python integers, and equality of every implementation."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from dmjd.ops._lib import reference, status
from dmjd.ops.philox import WORD_RANGE, Domain, keyed_bits, keyed_uniform, make_key, philox4x32

# Random123's kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


def oracle(counter: list[int], key: list[int]) -> list[int]:
    """The definition on Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 // 2**32 ^ c[1] ^ k[0], p1 % 2**32, p0 // 2**32 ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def random_words(*shape: int) -> Tensor:
    return torch.randint(WORD_RANGE, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter: str, key: str, result: str) -> None:
    assert torch.equal(philox4x32(words(counter), words(key)), words(result))
    assert torch.equal(reference("philox4x32")(words(counter), words(key)), words(result))


def test_equals_oracle() -> None:
    counter, key = random_words(3, 50, 4), words("deadbeef 00000007")
    expected = torch.tensor([[oracle(c, key.tolist()) for c in row] for row in counter.tolist()])
    assert torch.equal(philox4x32(counter, key), expected)
    assert torch.equal(reference("philox4x32")(counter, key), expected)


def test_native_kernel_serves_the_cpu_unless_disabled() -> None:
    disabled = os.environ.get("DMJD_DISABLE_EXT", "0") not in ("", "0")
    assert status()["philox4x32"]["CPU"] == ("reference: DMJD_DISABLE_EXT is set" if disabled else "native")


@pytest.mark.parametrize(
    "counter",
    [
        random_words(4),
        random_words(0, 4),
        random_words(5, 0, 4),
        random_words(4, 7).T,
        random_words(6, 9)[::2, 1:9:2],
        random_words(1, 4).expand(3, 4),
        random_words(20_000, 4),  # more than one thread's share
    ],
    ids=["one", "empty", "empty-inside", "transposed", "strided", "expanded", "large"],
)
def test_op_equals_reference(counter: Tensor) -> None:
    key = random_words(6)[1:5:3]  # not contiguous either
    result = torch.ops.dmjd.philox4x32(counter, key)
    assert torch.equal(result, reference("philox4x32")(counter, key))
    assert result.is_contiguous()
    assert result.shape == counter.shape


def test_opcheck() -> None:
    for counter in (random_words(3, 4), random_words(0, 4), random_words(4, 3).T):
        torch.library.opcheck(torch.ops.dmjd.philox4x32, (counter, random_words(2)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    compiled = torch.compile(
        lambda ids, key: keyed_bits(ids, 6, key=key, domain=Domain.MASK),
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    key = make_key(3, 1)
    for batch in (4, 5):
        ids = torch.arange(batch)
        assert torch.equal(compiled(ids, key), keyed_bits(ids, 6, key=key, domain=Domain.MASK))


def test_keyed_bits_follow_the_documented_counter() -> None:
    sample = 5 + 7 * WORD_RANGE
    bits = keyed_bits(torch.tensor([sample]), 7, key=make_key(11, 13), domain=Domain.CROP, lane=9)
    blocks = [oracle([block, Domain.CROP << 24 | 9, 5, 7], [11, 13]) for block in range(2)]
    assert bits.tolist() == [(blocks[0] + blocks[1])[:7]]


def test_keyed_bits_do_not_depend_on_batch_split_or_order() -> None:
    ids, key = torch.tensor([8, 1, 2**40 + 1, 0, 5]), make_key(7, 2)

    def draw(some: Tensor) -> Tensor:
        return keyed_bits(some, 10, key=key, domain=Domain.MASK, lane=3)

    whole = draw(ids)
    assert torch.equal(torch.cat([draw(ids[:2]), draw(ids[2:])]), whole)
    assert torch.equal(draw(ids.flip(0)), whole.flip(0))
    assert torch.equal(keyed_bits(ids, 3, key=key, domain=Domain.MASK, lane=3), whole[:, :3])


def test_every_part_of_the_key_changes_the_bits() -> None:
    def draw(sample: int = 1, seed: int = 0, epoch: int = 0, domain: Domain = Domain.MASK, lane: int = 0) -> list[int]:
        key = make_key(seed, epoch)
        bits: list[int] = keyed_bits(torch.tensor([sample]), 4, key=key, domain=domain, lane=lane)[0].tolist()
        return bits

    draws = [draw(), draw(sample=1 + WORD_RANGE), draw(seed=1), draw(epoch=1), draw(domain=Domain.FLIP), draw(lane=1)]
    assert len({tuple(bits) for bits in draws}) == len(draws)


def test_keyed_uniform_is_the_bits_as_a_fraction() -> None:
    ids, key = torch.arange(3), make_key(0, 0)
    bits = keyed_bits(ids, 5, key=key, domain=Domain.FLIP)
    uniform = keyed_uniform(ids, 5, key=key, domain=Domain.FLIP)
    assert uniform.dtype == torch.float64
    assert torch.equal(uniform * WORD_RANGE, bits.double())


def test_make_key_from_tensors_equals_make_key_from_integers() -> None:
    assert torch.equal(make_key(torch.tensor(5), 6), make_key(5, 6))
    assert torch.equal(make_key(5, torch.tensor(6)), make_key(5, 6))


def test_errors_name_the_argument() -> None:
    good, key = random_words(2, 4), random_words(2)
    with pytest.raises(TypeError, match=r"counter and key must be int64, got torch\.int32"):
        philox4x32(good.int(), key)
    with pytest.raises(ValueError, match=r"counter must be \[\.\.\., 4\].*got \(2, 3\)"):
        philox4x32(good[:, :3], key)
    with pytest.raises(ValueError, match=r"key \[2\].*\(3,\)"):
        philox4x32(good, random_words(3))
    with pytest.raises(ValueError, match=r"epoch must be in \[0, 2\*\*32\), got -1"):
        make_key(0, -1)


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    assert status()["philox4x32"]["CUDA"] == "native"
    counter, key = random_words(6, 100_000, 4), random_words(2)
    expected = philox4x32(counter, key)
    for key_device in ("cpu", "cuda"):
        assert torch.equal(philox4x32(counter.cuda(), key.to(key_device)).cpu(), expected)
        assert torch.equal(
            philox4x32(counter.cuda().transpose(0, 1), key.to(key_device)).cpu(), expected.transpose(0, 1)
        )
        assert philox4x32(counter.cuda()[:0], key.to(key_device)).shape == (0, 100_000, 4)


@pytest.mark.gpu
def test_cuda_graph_follows_a_key_on_the_device() -> None:
    counter, key = random_words(1000, 4).cuda(), make_key(1, 0).cuda()
    philox4x32(counter, key)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = philox4x32(counter, key)
    for epoch in (1, 2):
        key.copy_(make_key(1, epoch))
        graph.replay()
        assert torch.equal(result.cpu(), philox4x32(counter.cpu(), make_key(1, epoch)))


@pytest.mark.gpu
def test_cuda_graphs_of_torch_compile_follow_a_key_on_the_device() -> None:
    # An op precedes it, so that a launch on any stream but the current one would read too early.
    compiled = torch.compile(lambda counter, key: philox4x32(counter ^ 1, key), fullgraph=True, mode="reduce-overhead")
    for epoch in range(4):
        counter, key = random_words(512, 4) ^ epoch, make_key(1, epoch)
        assert torch.equal(compiled(counter.cuda(), key.cuda()).cpu(), philox4x32(counter ^ 1, key))


@pytest.mark.gpu
def test_cuda_key_with_cpu_counter_is_refused() -> None:
    with pytest.raises((RuntimeError, ValueError), match="key must be on the CPU or on counter's device"):
        philox4x32(random_words(2, 4), random_words(2).cuda())
