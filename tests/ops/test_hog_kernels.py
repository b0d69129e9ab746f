"""The native HOG kernels against the reference: every flavour, type and layout."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from dmjd.ops._lib import reference, status
from dmjd.ops.hog import FLAVOURS, NORMS, Layout, hog

PIXELS = (torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16)
VALUES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random_images(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    images = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    if dtype in (torch.float32, torch.float64):
        return images.to(dtype) / 57 - 2  # not integers, so that gradients are rounded
    return images.to(dtype)


def in_layout(images: Tensor, layout: Any) -> Tensor:
    return images.permute(0, 3, 1, 2).contiguous() if layout == "nchw" else images


def check(
    images: Tensor, cell: int, bins: int, patch: int, flavour: Any, norm: Any, layout: Any, out: torch.dtype
) -> None:
    got = hog(images, cell, bins, patch, flavour, norm, layout, out)
    expected = reference("hog")(images.cpu(), cell, bins, patch, flavour, norm, layout, torch.float64)
    assert got.dtype == out
    assert got.is_contiguous()
    exact = images.dtype == out == torch.float64
    scale = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=0, atol=1e-9 if exact else TOLERANCE[out] * scale)


def test_native_kernel_serves_the_cpu_unless_disabled() -> None:
    disabled = os.environ.get("DMJD_DISABLE_EXT", "0") not in ("", "0")
    assert status()["hog"]["CPU"] == ("reference: DMJD_DISABLE_EXT is set" if disabled else "native")


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", PIXELS)
def test_kernel_equals_reference(flavour: Any, dtype: torch.dtype) -> None:
    for index, (layout, norm) in enumerate((layout, norm) for layout in ("nhwc", "nchw") for norm in NORMS):
        images = in_layout(random_images(2, 24, 40, 3, dtype=dtype), layout)
        check(images, 4, 9, 8, flavour, norm, layout, VALUES[index % len(VALUES)])


@pytest.mark.parametrize("out", VALUES)
@pytest.mark.parametrize("dtype", PIXELS)
def test_every_pair_of_dtypes(dtype: torch.dtype, out: torch.dtype) -> None:
    check(random_images(1, 32, 16, 3, dtype=dtype), 8, 9, 16, "dmjd", "layernorm", "nhwc", out)


@pytest.mark.parametrize("bins", range(1, 13))
def test_numbers_of_bins(bins: int) -> None:
    for channels in (1, 3, 5):
        check(random_images(2, 24, 40, channels), 4, bins, 8, "dmjd", "l2", "nhwc", torch.float32)


@pytest.mark.parametrize(
    ("size", "cell", "patch"),
    [((1, 1), 1, 1), ((2, 1), 1, 1), ((3, 6), 3, 3), ((14, 28), 7, 14), ((15, 45), 5, 15), ((64, 32), 32, 32)],
)
def test_sizes(size: tuple[int, int], cell: int, patch: int) -> None:
    for layout in ("nhwc", "nchw"):
        check(in_layout(random_images(2, *size, 2), layout), cell, 6, patch, "dmjd", "none", layout, torch.float32)


VIEWS = {
    "channels first in memory": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "cropped": lambda x: x[:, 8:, 16:, :],
    "every second": lambda x: x[::2, :, :, ::2],
    "flipped": lambda x: x.transpose(1, 2),
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "one channel": lambda x: x[..., 1:2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_memory(view: str) -> None:
    images = VIEWS[view](random_images(4, 40, 48, 3))
    assert not images.is_contiguous()
    for flavour in ("dmjd", "maskfeat_gauss"):
        expected = hog(images.contiguous(), 4, 9, 8, flavour)
        first = hog(images.permute(0, 3, 1, 2), 4, 9, 8, flavour, layout="nchw")
        torch.testing.assert_close(hog(images, 4, 9, 8, flavour), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(first, expected, rtol=0, atol=1e-5)


def test_empty_batch_and_batch_of_one() -> None:
    for flavour in FLAVOURS:
        assert hog(random_images(0, 16, 32, 3), flavour=flavour).shape == (0, 2, 108)
        check(random_images(1, 16, 32, 3), 8, 9, 16, flavour, "l2", "nhwc", torch.float32)


def test_many_rows_of_patches() -> None:
    check(random_images(3, 160, 16, 1), 2, 9, 2, "dmjd", "none", "nhwc", torch.float32)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_opcheck(flavour: Any) -> None:
    images = random_images(2, 16, 8, 3, dtype=torch.float32)
    torch.library.opcheck(torch.ops.dmjd.hog.default, (images, 4, 9, 8, flavour, "l2", "nhwc", torch.float32))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda images: hog(images, 4, 9, 8, "maskfeat", "l2") + 1, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for batch in (2, 3):
        images = random_images(batch, 16, 24, 3)
        assert torch.equal(compiled(images), hog(images, 4, 9, 8, "maskfeat", "l2") + 1)


def every_cell_one_byte_gradient() -> Tensor:
    """uint8 ``[1, 4088, 4088, 1]``: 511 x 511 cells of 8 pixels, in the middle of each another pair of differences."""
    difference = torch.arange(-255, 256)
    cells = torch.zeros(511, 8, 511, 8, dtype=torch.uint8)
    cells[:, 2, :, 3] = difference.clamp(max=0).neg()[:, None].to(torch.uint8)
    cells[:, 4, :, 3] = difference.clamp(min=0)[:, None].to(torch.uint8)
    cells[:, 3, :, 2] = difference.clamp(max=0).neg()[None].to(torch.uint8)
    cells[:, 3, :, 4] = difference.clamp(min=0)[None].to(torch.uint8)
    return cells.reshape(1, 4088, 4088, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype", PIXELS)
@pytest.mark.parametrize("cell", [8, 4])  # the kernel for cells of 8 pixels, and the one for any
def test_cuda_equals_cpu_reference(flavour: Any, dtype: torch.dtype, cell: int) -> None:
    assert status()["hog"]["CUDA"] == "native"
    for index, (layout, norm) in enumerate((layout, norm) for layout in ("nhwc", "nchw") for norm in NORMS):
        for shape in ((3, 48, 80, 3), (2, 16, 16, 1), (1, 32, 96, 5)):
            images = in_layout(random_images(*shape, dtype=dtype), layout).cuda()
            check(images, cell, 9, 16, flavour, norm, layout, VALUES[index % len(VALUES)])


@pytest.mark.gpu
@pytest.mark.parametrize("patch", [8, 16, 32, 256])  # pixels of a patch of 256 do not fit in shared memory
@pytest.mark.parametrize("width", [256, 1280])
def test_cuda_cuts_rows_of_any_length(patch: int, width: int) -> None:
    images = random_images(2, 256, width, 3).cuda()
    for flavour, out in (("dmjd", torch.bfloat16), ("maskfeat_gauss", torch.float32)):
        check(images, 8, 9, patch, flavour, "l2", "nhwc", out)


@pytest.mark.gpu
@pytest.mark.parametrize("bins", [1, 2, 4, 9, 12, 180])
def test_cuda_bins(bins: int) -> None:
    for dtype in (torch.uint8, torch.float64):
        check(random_images(2, 24, 40, 3, dtype=dtype).cuda(), 4, bins, 8, "dmjd", "none", "nhwc", torch.float64)


@pytest.mark.gpu
def test_cuda_bins_of_all_byte_gradients() -> None:
    images = every_cell_one_byte_gradient()
    for flavour in ("dmjd", "maskfeat"):
        expected = hog(images, 8, 9, 8, flavour, "none")
        got = hog(images.cuda(), 8, 9, 8, flavour, "none").cpu()
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-3)  # the weakest gradient in another bin: 1 / 64


@pytest.mark.gpu
@pytest.mark.parametrize("view", VIEWS)
def test_cuda_views_of_memory(view: str) -> None:
    images = VIEWS[view](random_images(4, 40, 48, 3).cuda())
    for cell in (8, 4):
        expected = hog(images.contiguous(), cell, 9, 8)
        assert torch.equal(hog(images, cell, 9, 8), expected)
        assert torch.equal(hog(images.permute(0, 3, 1, 2), cell, 9, 8, layout="nchw"), expected)


@pytest.mark.gpu
def test_cuda_images_that_start_anywhere() -> None:
    memory = random_images(1 + 2 * 32 * 48 * 3).cuda()
    for start in (0, 1):
        images = memory[start : start + 2 * 32 * 48 * 3].view(2, 32, 48, 3)
        check(images, 8, 9, 16, "dmjd", "l2", "nhwc", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [8, 4])
def test_cuda_twice_gives_equal_bits(cell: int) -> None:
    images = random_images(64, 224, 224, 3).cuda()
    first = hog(images, cell)
    for _ in range(3):
        assert torch.equal(hog(images, cell), first)
    assert torch.equal(torch.cat([hog(part, cell) for part in images.split(17)]), first)


@pytest.mark.gpu
def test_cuda_empty_batch() -> None:
    assert hog(random_images(0, 32, 32, 3).cuda()).shape == (0, 4, 108)


@pytest.mark.gpu
def test_cuda_graphs_of_torch_compile() -> None:
    # An op precedes it, so that a launch on any stream but the current one would read too early.
    compiled = torch.compile(lambda images: hog(images ^ 255), fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        images = random_images(8, 224, 224, 3).cuda() ^ seed
        torch.testing.assert_close(compiled(images), hog(images ^ 255), rtol=0, atol=0)


@pytest.mark.gpu
def test_cuda_more_than_2_31_elements() -> None:
    batch = 2**31 // (224 * 224 * 3) + 200
    images = torch.empty(batch, 224, 224, 3, dtype=torch.uint8, device="cuda")
    images.random_(0, 256, generator=torch.Generator("cuda").manual_seed(0))
    assert images.numel() > 2**31
    cases: tuple[tuple[int, Layout], ...] = ((8, "nhwc"), (8, "nchw"), (16, "nhwc"))
    for cell, layout in cases:
        whole = images.view(batch, 3, 224, 224) if layout == "nchw" else images
        values = hog(whole, cell, layout=layout, out_dtype=torch.bfloat16)
        for few in (slice(0, 2), slice(batch - 2, batch)):
            assert torch.equal(values[few], hog(whole[few].clone(), cell, layout=layout, out_dtype=torch.bfloat16))


@pytest.mark.gpu
def test_cuda_on_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    images = random_images(2, 32, 32, 3)
    for cell in (8, 4):
        got = hog(images.to("cuda:1"), cell)
        assert got.device == torch.device("cuda:1")
        torch.testing.assert_close(got.cpu(), hog(images, cell), rtol=0, atol=2e-5)
