"""dmjd._core, the numpy face of csrc/core."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dmjd import _core
from dmjd.ops._lib import reference


def random_words(*shape: int) -> NDArray[np.uint32]:
    return np.random.default_rng(0).integers(2**32, size=shape, dtype=np.uint32)


@pytest.mark.parametrize(
    "counter",
    [random_words(4), random_words(0, 4), random_words(7, 3, 4), random_words(4, 5).T, random_words(6, 9)[::2, 1:9:2]],
    ids=["one", "empty", "batch", "transposed", "strided"],
)
def test_philox_equals_the_torch_reference(counter: NDArray[np.uint32]) -> None:
    key = random_words(6)[1:5:3]
    expected = reference("philox4x32")(
        torch.from_numpy(counter.astype(np.int64)), torch.from_numpy(key.astype(np.int64))
    )
    result = _core.philox4x32(counter, key)
    assert result.dtype == np.uint32
    assert np.array_equal(result, expected.numpy())


def test_philox_releases_the_gil() -> None:
    counter, key = np.zeros((4_000_000, 4), np.uint32), random_words(2)
    entered, finished = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        _core.philox4x32(counter, key)
        finished.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the worker keeps the GIL unless the call itself lets go of it
    try:
        worker = threading.Thread(target=work)
        worker.start()
        entered.wait()
        assert not finished.is_set()
        worker.join()
    finally:
        sys.setswitchinterval(interval)


def test_errors_name_the_argument() -> None:
    good, key = random_words(2, 4), random_words(2)
    with pytest.raises(TypeError, match="counter must be uint32, got int64"):
        _core.philox4x32(good.astype(np.int64), key)
    with pytest.raises(TypeError, match="key must be uint32, got float64"):
        _core.philox4x32(good, key.astype(np.float64))
    with pytest.raises(ValueError, match=r"counter must be \[\.\.\., 4\]"):
        _core.philox4x32(good[:, :3], key)
    with pytest.raises(ValueError, match=r"key must be \[2\]"):
        _core.philox4x32(good, random_words(3))


def test_build_info_says_what_the_libraries_run_on() -> None:
    info = _core.build_info()
    assert info["torch_target"] == "2.11"
    assert (info["cuda"] is None) == (info["cuda_archs"] == [])
    assert info["compiler"].startswith(("GCC ", "Clang "))
