"""Shared memory that a launch asks for: the compiler sees only what is static (and fails on too much of that)."""

from __future__ import annotations

from pathlib import Path

CUDA = Path(__file__).resolve().parents[2] / "csrc" / "ops" / "cuda"


def test_a_kernel_that_raises_its_limit_holds_it_against_the_smallest_card_or_its_own() -> None:
    sources = {path.name: path.read_text() for path in CUDA.iterdir()}
    assert "constexpr size_t kMaxSharedBytes = 163 * 1024;" in sources["launch.h"]
    raising = {name for name, text in sources.items() if "cudaFuncAttributeMaxDynamicSharedMemorySize" in text}
    # short_attention asks the card instead, and leaves what does not fit there to PyTorch.
    limits = ("kMaxSharedBytes", "cudaDevAttrMaxSharedMemoryPerBlockOptin")
    careless = {name for name in raising if not any(limit in sources[name] for limit in limits)}
    assert not careless, f"{careless} must compare what a launch asks for with kMaxSharedBytes of launch.h"
