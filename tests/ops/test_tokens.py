from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmjd.ops.tokens import gather_tokens, scatter_tokens

B, N, C, V = 3, 6, 4, 2


def random(*shape: int, seed: int = 0) -> Tensor:
    """fp64 leaf that asks for a gradient."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_()


def random_ids(views: int, batch: int = B, tokens: int = N, visible: int = V) -> tuple[Tensor, Tensor]:
    """(visible ids, restore), in no particular order within a view: the ops ask for unique ids only."""
    generator = torch.Generator().manual_seed(views)
    orders = [[torch.randperm(tokens, generator=generator) for _ in range(batch)] for _ in range(views)]
    order = torch.stack([torch.stack(rows) for rows in orders]) if batch else torch.empty(views, 0, tokens).long()
    restore = torch.empty_like(order)
    for k in range(views):
        for b in range(batch):
            for slot, token in enumerate(order[k, b].tolist()):
                restore[k, b, token] = slot
    return order[:, :, :visible], restore


@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_gather_and_its_gradient_equal_loops(views: int, prefix: int) -> None:
    x, (ids, _) = random(B, prefix + N, C), random_ids(views)
    cotangent = random(views * B, prefix + V, C, seed=1).detach()
    expected, gradient = torch.full_like(cotangent, torch.nan), torch.zeros_like(x)
    for k in range(views):
        for b in range(B):
            sources = [*range(prefix), *(prefix + int(token) for token in ids[k, b])]
            for slot, source in enumerate(sources):
                expected[k * B + b, slot] = x.detach()[b, source]
                gradient[b, source] += cotangent[k * B + b, slot]
    result = gather_tokens(x, ids, prefix)
    assert torch.equal(result, expected)
    result.backward(cotangent)
    torch.testing.assert_close(x.grad, gradient, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("with_positions", [False, True])
def test_scatter_and_its_gradients_equal_loops(views: int, prefix: int, with_positions: bool) -> None:
    x, mask_token, positions = random(views * B, prefix + V, C), random(C, seed=1), random(N, C, seed=2)
    _, restore = random_ids(views)
    cotangent = random(views * B, prefix + N, C, seed=3).detach()
    expected = torch.full_like(cotangent, torch.nan)
    gradients = torch.zeros_like(x), torch.zeros_like(mask_token), torch.zeros_like(positions)
    for k in range(views):
        for b in range(B):
            row = k * B + b
            expected[row, :prefix] = x.detach()[row, :prefix]
            gradients[0][row, :prefix] += cotangent[row, :prefix]
            for token in range(N):
                slot = int(restore[k, b, token])
                value = x.detach()[row, prefix + slot] if slot < V else mask_token.detach()
                expected[row, prefix + token] = value + positions.detach()[token] if with_positions else value
                into = gradients[0][row, prefix + slot] if slot < V else gradients[1]
                into += cotangent[row, prefix + token]
                gradients[2][token] += cotangent[row, prefix + token]
    result = scatter_tokens(x, mask_token, restore, positions if with_positions else None, prefix)
    assert torch.equal(result, expected)
    result.backward(cotangent)
    leaves = (x, mask_token, positions) if with_positions else (x, mask_token)
    for leaf, gradient in zip(leaves, gradients, strict=False):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("prefix", [0, 1])
def test_first_and_second_derivatives_are_consistent(prefix: int) -> None:
    ids, restore = random_ids(2)
    gather_inputs = (random(B, prefix + N, C),)
    scatter_inputs = (random(2 * B, prefix + V, C), random(C, seed=1), random(N, C, seed=2))

    def gather(x: Tensor) -> Tensor:
        return gather_tokens(x, ids, prefix) ** 2  # linear maps alone have no second derivative to check

    def scatter(x: Tensor, mask_token: Tensor, positions: Tensor) -> Tensor:
        return scatter_tokens(x, mask_token, restore, positions, prefix) ** 2

    assert torch.autograd.gradcheck(gather, gather_inputs)
    assert torch.autograd.gradgradcheck(gather, gather_inputs)
    assert torch.autograd.gradcheck(scatter, scatter_inputs)
    assert torch.autograd.gradgradcheck(scatter, scatter_inputs)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("prefix", [0, 2])
def test_scatter_undoes_gather(views: int, prefix: int) -> None:
    x, mask_token = random(B, prefix + N, C).detach(), random(C, seed=1).detach()
    ids, restore = random_ids(views)
    back = scatter_tokens(gather_tokens(x, ids, prefix), mask_token, restore, prefix_tokens=prefix)
    hidden = torch.nn.functional.pad(restore >= V, (prefix, 0)).flatten(0, 1)
    assert torch.equal(back[~hidden], x.repeat(views, 1, 1)[~hidden])
    assert torch.equal(back[hidden], mask_token.expand(int(hidden.sum()), C))
    assert int(hidden.sum()) == views * B * (N - V)


def test_scatter_with_nothing_hidden_is_a_reordering() -> None:
    x, (ids, restore) = random(B, N, C).detach(), random_ids(1, visible=N)
    poison = torch.full((C,), torch.nan, dtype=x.dtype)
    assert torch.equal(scatter_tokens(gather_tokens(x, ids), poison, restore), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_move_without_rounding(dtype: torch.dtype) -> None:
    x, (ids, restore) = random(B, N, C).detach().to(dtype), random_ids(2)
    gathered = gather_tokens(x, ids)
    assert gathered.dtype == dtype
    for row, tokens in enumerate(ids.flatten(0, 1)):
        assert torch.equal(gathered[row], x[row % B][tokens])
    mask_token = torch.full((C,), 1 / 3, requires_grad=True)
    full = scatter_tokens(gathered, mask_token, restore)
    assert full.dtype == dtype
    assert torch.equal(full[restore.flatten(0, 1) >= V].unique(), mask_token.detach().to(dtype).unique())
    full.sum().backward()
    assert mask_token.grad is not None
    assert mask_token.grad.dtype == torch.float32
    assert mask_token.grad.tolist() == [2 * B * (N - V)] * C


def test_strided_inputs_give_the_same_values() -> None:
    ids, restore = random_ids(2)
    x = random(C, N, B).detach().permute(2, 1, 0)
    ids_strided = ids.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    restore_strided = restore.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not x.is_contiguous()
    assert not ids_strided.is_contiguous()
    gathered = gather_tokens(x, ids_strided)
    assert torch.equal(gathered, gather_tokens(x.contiguous(), ids))
    mask_token = random(2 * C).detach()[::2]
    assert torch.equal(
        scatter_tokens(gathered, mask_token, restore_strided),
        scatter_tokens(gathered.contiguous(), mask_token.contiguous(), restore),
    )


@pytest.mark.parametrize("prefix", [0, 1])
def test_empty_batch(prefix: int) -> None:
    ids, restore = random_ids(2, batch=0)
    gathered = gather_tokens(torch.empty(0, prefix + N, C), ids, prefix)
    assert gathered.shape == (0, prefix + V, C)
    mask_token = torch.ones(C, requires_grad=True)
    full = scatter_tokens(gathered, mask_token, restore, torch.ones(N, C), prefix)
    assert full.shape == (0, prefix + N, C)
    full.sum().backward()
    assert mask_token.grad is not None
    assert mask_token.grad.tolist() == [0] * C


@pytest.mark.parametrize(
    ("x_shape", "ids_shape"), [((B, N, C), (2, B + 1, V)), ((B, N, C), (B, V)), ((N, C), (1, N, V))]
)
def test_gather_refuses_shapes_that_do_not_belong_together(
    x_shape: tuple[int, ...], ids_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"gather_tokens: x must be \[B, N, C\] and ids \[K, B, V\], got .*\d"):
        gather_tokens(torch.zeros(x_shape), torch.zeros(ids_shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("x_shape", "restore_shape"), [((2 * B, V, C), (1, B, N)), ((B, V, C), (2, B, N)), ((2 * B, V), (2, B, N))]
)
def test_scatter_refuses_shapes_that_do_not_belong_together(
    x_shape: tuple[int, ...], restore_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"scatter_tokens: x must be \[K\*B, V, C\] and restore \[K, B, N\], got .*\d"):
        scatter_tokens(torch.zeros(x_shape), torch.zeros(C), torch.zeros(restore_shape, dtype=torch.int64))
