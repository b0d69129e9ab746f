"""The kernels of gather_tokens and scatter_tokens against the references, on every dtype and layout they take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dmjd.ops._lib import reference, status
from dmjd.ops.tokens import gather_tokens, scatter_tokens

OPS = ("gather_tokens", "gather_tokens_backward", "scatter_tokens", "scatter_tokens_backward")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# views, batch, tokens, visible, channels, prefix
SHAPES = (
    (2, 3, 12, 5, 64, 1),
    (1, 1, 6, 1, 1, 0),
    (3, 2, 9, 9, 3, 2),
    (4, 2, 33, 7, 7, 0),
    (2, 5, 40, 10, 40, 1),  # 80 bytes of bfloat16: more than one vector, less than a group of lanes
    (2, 0, 6, 2, 4, 1),
    (2, 3, 6, 2, 0, 1),
)
# Several blocks, tiles, chunks and column panels of the CUDA kernels.
LARGE_SHAPES = ((2, 70, 196, 76, 768, 0), (2, 33, 49, 20, 1028, 1), (3, 9, 300, 100, 2050, 2), (1, 2, 70_000, 9, 4, 0))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_views(views: int, batch: int, tokens: int, visible: int) -> tuple[Tensor, Tensor]:
    """(ids, restore) of random views."""
    order = torch.rand(views, batch, tokens, generator=torch.Generator().manual_seed(views)).argsort(-1)
    return order[:, :, :visible], order.argsort(-1)


def calls(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Callable[[Tensor], Tensor] = lambda x: x
) -> list[tuple[str, tuple[Any, ...]]]:
    """Every op with arguments of that shape, floating ones under ``layout``."""
    views, batch, tokens, visible, channels, prefix = shape
    ids, restore = random_views(views, batch, tokens, visible)
    x = layout(random(batch, prefix + tokens, channels, dtype=dtype))
    gathered = layout(random(views * batch, prefix + visible, channels, dtype=dtype, seed=1))
    full = layout(random(views * batch, prefix + tokens, channels, dtype=dtype, seed=2))
    mask_token = random(2 * channels, dtype=dtype, seed=3)[::2]
    positions = layout(random(1, tokens, channels, dtype=dtype, seed=4))[0]
    return [
        ("gather_tokens", (x, ids, prefix)),
        ("gather_tokens_backward", (gathered, ids, tokens, prefix)),
        ("scatter_tokens", (gathered, mask_token, restore, None, prefix)),
        ("scatter_tokens", (gathered, mask_token, restore, positions, prefix)),
        ("scatter_tokens_backward", (full, restore, visible, prefix, False)),
        ("scatter_tokens_backward", (full, restore, visible, prefix, True)),
    ]


def results(name: str, args: tuple[Any, ...], device: str = "cpu") -> tuple[Tensor, ...]:
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in args]
    result = getattr(torch.ops.dmjd, name)(*moved)
    return result if isinstance(result, tuple) else (result,)


def assert_equal_reference(name: str, args: tuple[Any, ...], device: str = "cpu") -> None:
    """Equal bits, but for the sums over a batch, whose order is the kernel's: those are near the sums in float64."""
    expected = reference(name)(*args)
    for index, (got, wanted) in enumerate(
        zip(results(name, args, device), expected if isinstance(expected, tuple) else (expected,), strict=True)
    ):
        assert got.is_contiguous()
        assert got.dtype == wanted.dtype
        if name == "scatter_tokens_backward" and index:
            exact = reference(name)(args[0].double(), *args[1:])[index]
            magnitude = reference(name)(args[0].double().abs(), *args[1:])[index]
            rounding = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
            bound = 8 * rounding * magnitude + torch.finfo(got.dtype).eps * exact.abs()
            assert got.shape == wanted.shape
            assert bool(((got.cpu().double() - exact).abs() <= bound).all())
        else:
            assert torch.equal(got.cpu(), wanted)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "sliced": lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]],
    "expanded": lambda x: x[:, :, :1].expand_as(x) if x.shape[2] else x,
    # Contiguous, but on no boundary of 16 bytes.
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_op_equals_its_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for name, args in calls(shape, dtype):
        assert_equal_reference(name, args)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_layout_of_inputs_and_gradients(layout: str, dtype: torch.dtype) -> None:
    for name, args in calls(SHAPES[0], dtype, LAYOUTS[layout]):
        assert_equal_reference(name, args)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_gather_moves_any_dtype(dtype: torch.dtype) -> None:
    ids, _ = random_views(2, 3, 6, 2)
    x = (random(3, 7, 5, dtype=torch.float32) * 9).to(dtype)
    expected = x[:, 1:].expand(2, -1, -1, -1).gather(2, ids.unsqueeze(-1).expand(-1, -1, -1, 5))
    assert torch.equal(gather_tokens(x, ids, 1)[:, 1:], expected.flatten(0, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    views, batch, tokens, channels = 4, 2, 5, 3
    everything = torch.arange(tokens).expand(views, batch, tokens)
    grad = random(views * batch, tokens, channels, dtype=dtype)
    (total,) = results("gather_tokens_backward", (grad, everything, tokens, 0))
    assert torch.equal(total, grad.unflatten(0, (views, batch)).float().sum(0).to(dtype))
    # 4096 ones: sums kept in 8 or 11 bits would stop at 256 or 2048.
    ones = torch.ones(4096, 2, 1, dtype=dtype)
    restore = torch.arange(2).expand(1, 4096, 2)
    _, mask_token, positions = results("scatter_tokens_backward", (ones, restore, 1, 0, True))
    assert mask_token.tolist() == [4096]
    assert positions.tolist() == [[4096], [4096]]


def test_native_kernels_serve_the_cpu_unless_disabled() -> None:
    disabled = os.environ.get("DMJD_DISABLE_EXT", "0") not in ("", "0")
    for name in OPS:
        assert status()[name]["CPU"].startswith("reference" if disabled else "native")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_opcheck() -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for shape in ((2, 3, 6, 2, 4, 1), (2, 0, 6, 2, 4, 1)):
        for name, args in calls(shape, torch.float32, LAYOUTS["transposed"]):
            leaves = tuple(
                value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
                for value in args
            )
            torch.library.opcheck(getattr(torch.ops.dmjd, name), leaves, test_utils=checks)


def step(x: Tensor, mask_token: Tensor, positions: Tensor, ids: Tensor, restore: Tensor) -> Tensor:
    return scatter_tokens(gather_tokens(x.sin(), ids, 1).cos(), mask_token, restore, positions, 1).square()


def gradients(function: Callable[..., Tensor], batch: int, tokens: int) -> list[Tensor | None]:
    ids, restore = random_views(2, batch, tokens, 3)
    shapes = ((batch, 1 + tokens, 5), (5,), (tokens, 5))
    leaves = [random(*shape, dtype=torch.float32, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    function(*leaves, ids, restore).sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole_with_its_gradients(dynamic: bool) -> None:
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch, tokens in ((3, 6), (4, 8)):
        torch.testing.assert_close(gradients(compiled, batch, tokens), gradients(step, batch, tokens))


def test_two_runs_give_equal_bits_for_any_number_of_threads() -> None:
    first = [results(name, args) for name, args in calls((2, 40, 20, 8, 96, 1), torch.float32)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = [results(name, args) for name, args in calls((2, 40, 20, 8, 96, 1), torch.float32)]
    finally:
        torch.set_num_threads(threads)
    for got, expected in zip(again, first, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_no_gradient_is_asked_of_what_needs_none() -> None:
    ids, restore = random_views(2, 3, 6, 2)
    x = random(6, 2, 4, dtype=torch.float32)
    assert not gather_tokens(random(3, 6, 4, dtype=torch.float32), ids).requires_grad
    mask_token = random(4, dtype=torch.float32).requires_grad_()
    positions = random(6, 4, dtype=torch.float32)
    scatter_tokens(x, mask_token, restore, positions).sum().backward()
    assert x.grad is None
    assert positions.grad is None
    assert mask_token.grad is not None


def test_wrong_types_and_devices_are_named() -> None:
    ids, restore = random_views(2, 3, 6, 2)
    x, gathered = random(3, 7, 4, dtype=torch.float32), random(6, 3, 4, dtype=torch.float32)
    mask_token, positions = torch.zeros(4), torch.zeros(6, 4)
    with pytest.raises(TypeError, match=r"gather_tokens: ids must be int64, got torch\.int32"):
        gather_tokens(x, ids.int())
    with pytest.raises(ValueError, match=r"gather_tokens: ids must be on x's device, got meta and cpu"):
        gather_tokens(x, ids.to("meta"))
    with pytest.raises(ValueError, match=r"gather_tokens: prefix_tokens must be in \[0, 7\].*got 8"):
        gather_tokens(x, ids, 8)
    with pytest.raises(TypeError, match=r"scatter_tokens: restore must be int64, got torch\.float32"):
        scatter_tokens(gathered, mask_token, restore.float())
    with pytest.raises(TypeError, match=r"scatter_tokens: x must be floating, got torch\.int64"):
        scatter_tokens(gathered.long(), mask_token, restore)
    for shape in ((1, 4, 1), (2, 2), (1, 1, 5), ()):
        with pytest.raises(ValueError, match=r"scatter_tokens: mask_token must be \[4\] .*got \("):
            scatter_tokens(gathered, torch.zeros(shape), restore)
    with pytest.raises(ValueError, match=r"scatter_tokens: positions must be \[6, 4\] .*got \(5, 4\)"):
        scatter_tokens(gathered, mask_token, restore, positions[:5])
    with pytest.raises(ValueError, match=r"scatter_tokens: mask_token must be on x's device, got meta and cpu"):
        scatter_tokens(gathered, mask_token.to("meta"), restore)
    with pytest.raises(ValueError, match=r"scatter_tokens: x must hold 1 to 6 tokens behind 3 of prefix.*\(6, 3, 4\)"):
        scatter_tokens(gathered, mask_token, restore, prefix_tokens=3)
    with pytest.raises(ValueError, match=r"scatter_tokens: x must hold 1 to 2 tokens.*restore \(2, 3, 2\)"):
        scatter_tokens(gathered, mask_token, restore[:, :, :2])


CHECKED = """
import sys
import torch
from dmjd.ops import gather_tokens, scatter_tokens

device = sys.argv[1]
x, ids = torch.zeros(1, 4, 2, device=device), torch.tensor([[[0, 3]]], device=device)
gathered, mask_token = torch.zeros(1, 2, 2, device=device), torch.zeros(2, device=device)
restore = torch.tensor([[[1, 0, 3, 2]]], device=device)
gather_tokens(x, ids)
scatter_tokens(gathered, mask_token, restore)
"""

WRONG_IDS = {
    "gather_tokens(x, ids + 1)": r"gather_tokens: ids .*must be in range\(number of tokens\)",
    "gather_tokens(x, ids - 1)": r"gather_tokens: ids .*must be in range\(number of tokens\)",
    "gather_tokens(x, ids * 0)": r"gather_tokens: ids .*must be unique within a view",
    "scatter_tokens(gathered, mask_token, restore + 1)": r"scatter_tokens: restore .*must be in range",
    "scatter_tokens(gathered, mask_token, restore // 2)": r"scatter_tokens: restore .*must be unique within a view",
}


def checked(device: str, *lines: str) -> subprocess.CompletedProcess[str]:
    source = "\n".join((CHECKED, *lines))
    environment = {**os.environ, "DMJD_CHECK_IDS": "1"}
    return subprocess.run(
        [sys.executable, "-c", source, device], env=environment, capture_output=True, text=True, check=False
    )


def test_check_ids_refuses_wrong_ids_on_the_cpu() -> None:
    lines = ["import re"]
    for call, message in WRONG_IDS.items():
        lines += [
            f"try: {call}",
            f"except ValueError as error: assert re.search({message!r}, str(error)), error",
            f"else: raise AssertionError({call!r})",
        ]
    lines += [
        "compiled = torch.compile(gather_tokens, fullgraph=True, backend='aot_eager')",
        "assert compiled(x, ids).shape == (1, 2, 2)",
        "try: compiled(x, ids + 1)",
        "except RuntimeError as error: assert 'must be in range' in str(error), error",
        "else: raise AssertionError('compiled')",
    ]
    done = checked("cpu", *lines)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE_SHAPES], ids=str)
def test_cuda_equals_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for name, args in calls(shape, dtype):
        assert status()[name]["CUDA"] == "native"
        assert_equal_reference(name, args, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_takes_any_layout(layout: str, dtype: torch.dtype) -> None:
    for name, args in calls(SHAPES[0], dtype):
        floating = [isinstance(value, Tensor) and value.ndim == 3 and value.is_floating_point() for value in args]
        placed = [LAYOUTS[layout](value.cuda()) if is_x else value for is_x, value in zip(floating, args, strict=True)]
        same = [value.cpu() if isinstance(value, Tensor) else value for value in placed]
        for got, expected in zip(results(name, tuple(placed), "cuda"), results(name, tuple(same)), strict=True):
            torch.testing.assert_close(got.cpu(), expected)


@pytest.mark.gpu
def test_cuda_runs_give_equal_bits() -> None:
    for name, args in calls(LARGE_SHAPES[0], torch.bfloat16):
        first, second = (results(name, args, "cuda") for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    # 2.4e9 elements: the last samples lie beyond 2^31. x and what scatter makes of it take 4.5 GiB each, a view half.
    batch, tokens, visible, channels = 3000, 400, 200, 2000
    x = torch.zeros(batch, tokens, channels, dtype=torch.bfloat16, device="cuda")
    token = torch.arange(tokens, device="cuda")
    ids = token[1::2].expand(1, batch, visible)
    restore = torch.where(token % 2 == 1, token // 2, visible + token // 2).expand(1, batch, tokens)
    x[-1] = torch.arange(tokens, device="cuda").unsqueeze(1)
    x[0] = -1
    gathered = gather_tokens(x, ids)
    assert torch.equal(gathered[-1], x[-1, 1::2])
    assert torch.equal(gathered[0], x[0, 1::2])
    (back,) = results("gather_tokens_backward", (gathered, ids, tokens, 0), "cuda")
    assert torch.equal(back[-1, 1::2], x[-1, 1::2])
    assert not bool(back[:, ::2].any())
    del back
    mask_token = torch.full((channels,), 7, dtype=torch.bfloat16, device="cuda")
    full = scatter_tokens(gathered, mask_token, restore)
    assert torch.equal(full[-1, 1::2], x[-1, 1::2])
    assert bool((full[-1, ::2] == 7).all())
    del x
    again, mask_sum, _ = results("scatter_tokens_backward", (full, restore, visible, 0, False), "cuda")
    assert torch.equal(again[-1], gathered[-1])
    assert mask_sum.tolist() == torch.full((channels,), 7.0 * batch * (tokens - visible)).bfloat16().tolist()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_and_not_the_current_one() -> None:
    assert torch.cuda.current_device() == 0
    for name, args in calls(SHAPES[0], torch.bfloat16):
        assert_equal_reference(name, args, "cuda:1")
    ids, _ = random_views(2, 3, 6, 2)
    with pytest.raises(ValueError, match=r"ids must be on x's device, got cuda:0 and cuda:1"):
        gather_tokens(torch.zeros(3, 6, 4, device="cuda:1"), ids.to("cuda:0"))


@pytest.mark.gpu
def test_devices_do_not_mix() -> None:
    ids, _ = random_views(2, 3, 6, 2)
    with pytest.raises(ValueError, match=r"ids must be on x's device, got cpu and cuda:0"):
        gather_tokens(torch.zeros(3, 6, 4, device="cuda"), ids)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what the compiler warns of is not ours
def test_captured_graphs_follow_their_inputs() -> None:
    """Kernels on another stream than torch's would run before the linear layer has written their input."""
    ids, restore = (index.cuda() for index in random_views(2, 8, 196, 49))
    linear = torch.nn.Linear(256, 256, device="cuda")
    mask_token = torch.nn.Parameter(torch.randn(256, device="cuda"))
    positions = torch.nn.Parameter(torch.randn(196, 256, device="cuda"))
    parameters = [*linear.parameters(), mask_token, positions]

    def train(x: Tensor) -> Tensor:
        return scatter_tokens(gather_tokens(linear(x), ids), mask_token, restore, positions).square().sum()

    compiled = torch.compile(train, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        x = random(8, 196, 256, dtype=torch.float32, seed=seed).cuda()
        expected = torch.autograd.grad(train(x), parameters)
        for got, wanted in zip(torch.autograd.grad(compiled(x), parameters), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
def test_check_ids_fails_on_the_device() -> None:
    wait = ("torch.cuda.synchronize()", "print('fine', flush=True)")
    done = checked("cuda", *wait)
    assert done.stdout == "fine\n", done.stderr
    for call in list(WRONG_IDS)[::3]:  # one of each op: a failed assertion costs the process its CUDA context
        done = checked("cuda", call, *wait)
        assert done.returncode != 0
        assert "fine" not in done.stdout
        assert "assert" in done.stderr
