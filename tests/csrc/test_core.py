"""dmjd._core, the numpy face of csrc/core."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dmjd import _core
from dmjd.ops._lib import reference
from dmjd.ops.hog import FLAVOURS


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


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_hog_equals_the_torch_reference(flavour: str, dtype: type[np.uint8] | type[np.float32]) -> None:
    pixels: NDArray[Any] = np.random.default_rng(0).integers(256, size=(4, 24, 40, 3)).astype(dtype)
    for layout in ("nhwc", "nchw"):
        for images in (pixels, pixels[::2, :, 8:], pixels[:0], pixels.transpose(0, 2, 1, 3)):
            images = images if layout == "nhwc" else images.transpose(0, 3, 1, 2)
            expected = reference("hog")(torch.from_numpy(images), 4, 9, 8, flavour, "l2", layout, torch.float32)
            result = _core.hog(images, cell=4, patch=8, flavour=flavour, norm="l2", layout=layout)
            assert result.dtype == np.float32
            np.testing.assert_allclose(result, expected.numpy(), rtol=0, atol=1e-6)


def test_hog_releases_the_gil() -> None:
    images = np.zeros((64, 224, 224, 3), np.uint8)
    entered, finished = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        _core.hog(images)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flavour": "opencv"}, "flavour must be one of dmjd, maskfeat, maskfeat_gauss, skimage, got 'opencv'"),
        ({"norm": "l1"}, "norm must be one of none, l2, layernorm, got 'l1'"),
        ({"layout": "hwc"}, "layout must be one of nhwc, nchw, got 'hwc'"),
        ({"bins": 0}, r"bins must be in 1\.\.180, got 0"),
        ({"bins": 181}, r"bins must be in 1\.\.180, got 181"),
        ({"patch": 0}, "patch must be at least 1 pixel, got 0"),
        ({"cell": 5}, "cell must be a divisor of patch 16, got 5"),
        ({"layout": "nchw"}, "multiples of patch 16, got 48 x 3"),
        ({"images": np.zeros((32, 48, 3), np.uint8)}, "images must have 4 axes, got 3"),
        ({"images": np.zeros((1, 16, 16, 0), np.uint8)}, "at least 1 channel, got 0"),
        ({"images": np.zeros((1, 1, 8, 3), np.uint8), "flavour": "maskfeat", "cell": 1, "patch": 1}, "got 1 x 8"),
    ],
)
def test_hog_errors_name_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.hog(**{"images": np.zeros((1, 32, 48, 3), np.uint8), **arguments})


def test_hog_names_a_wrong_dtype() -> None:
    with pytest.raises(TypeError, match="images must be uint8 or float32, got float64"):
        _core.hog(np.zeros((1, 16, 16, 3)))
