"""Batch normalisation over processes: against ``nn.BatchNorm2d`` on the batch of all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

from dmjd.models.dense.batch_norm import BatchNorm2d, with_batch_norm


class Sum:
    """An all-reduce of threads in place of processes."""

    def __init__(self, size: int) -> None:
        self._barrier, self._parts = Barrier(size, timeout=60), dict[int, Tensor]()
        self.calls = [0] * size

    def of(self, rank: int, tensor: Tensor) -> Tensor:
        self.calls[rank] += 1
        self._parts[rank] = tensor
        self._barrier.wait()
        total = torch.stack([self._parts[each] for each in sorted(self._parts)]).sum(0)
        self._barrier.wait()
        return total


def drawn(layer: nn.BatchNorm2d) -> nn.BatchNorm2d:
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            assert tensor is not None
            tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(3)) + 0.5)
    return layer


@pytest.mark.parametrize("sizes", [(4,), (3, 3), (1, 2, 3)])
def test_equals_torch_on_the_whole_batch(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 6, 5, 4) * 3 + torch.arange(6.0).view(-1, 1, 1) * 100
    weight = torch.randn_like(x)
    expected = drawn(nn.BatchNorm2d(6))
    of_torch = x.clone().requires_grad_()
    outputs = [expected(of_torch)]
    (outputs[0] * weight).sum().backward()
    total, parts = Sum(len(sizes)), list(x.split(sizes))
    layers = [BatchNorm2d(6) for _ in sizes]
    for layer in layers:
        drawn(layer)

    def rank(index: int) -> Tensor:
        layer = layers[index]
        if len(sizes) > 1:
            layer.reduce = lambda tensor: total.of(index, tensor)
        parts[index] = parts[index].clone().requires_grad_()
        y = layer(parts[index])
        (y * weight.split(sizes)[index]).sum().backward()
        assert isinstance(y, Tensor)
        return y.detach()

    with ThreadPoolExecutor(len(sizes)) as threads:
        found = list(threads.map(rank, range(len(sizes))))
    torch.testing.assert_close(torch.cat(found), outputs[0].detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        torch.cat([part.grad for part in parts if part.grad is not None]), of_torch.grad, rtol=1e-4, atol=1e-5
    )
    for name, parameter in expected.named_parameters():
        gradients = [dict(layer.named_parameters())[name].grad for layer in layers]
        summed = torch.stack([gradient for gradient in gradients if gradient is not None]).sum(0)
        torch.testing.assert_close(summed, parameter.grad, rtol=1e-4, atol=1e-4)
    for layer in layers:
        assert layer.state_dict().keys() == expected.state_dict().keys()
        torch.testing.assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()))
    assert total.calls == ([2] * len(sizes) if len(sizes) > 1 else [0])
    y = torch.randn(2, 6, 3, 3)
    torch.testing.assert_close(layers[0].eval()(y), expected.eval()(y))


def test_gradients_by_differences() -> None:
    torch.manual_seed(0)
    layer = BatchNorm2d(3).double()

    def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        result = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        assert isinstance(result, Tensor)
        return result

    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 2, 2), (3,), (3,))]
    assert torch.autograd.gradcheck(normalised, tuple(inputs))


@pytest.mark.parametrize("processes", ["one", "several"])
def test_bf16_maps_have_float32_statistics_and_keep_their_type_and_layout(processes: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 4, 32, 32) + 100).to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    layer = BatchNorm2d(4)
    if processes == "several":
        layer.reduce = Tensor.clone
    y = layer(x)
    assert (y.dtype, layer.running_mean.dtype) == (torch.bfloat16, torch.float32)
    exact = x.detach().double()
    torch.testing.assert_close(layer.running_mean.double(), 0.1 * exact.mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.running_var.double(), 0.9 + 0.1 * exact.var((0, 2, 3)), rtol=1e-5, atol=1e-5)
    y.float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_a_single_value_for_each_channel_gives_the_bias() -> None:
    layer = BatchNorm2d(3)
    drawn(layer)
    torch.testing.assert_close(layer(torch.randn(1, 3, 1, 1)).flatten(), layer.bias, rtol=0, atol=1e-3)
    assert layer.running_var.isfinite().all()


def test_layers_of_torch_are_replaced_in_place() -> None:
    part = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sequential(nn.BatchNorm2d(2)))
    names = list(part.state_dict())
    with_batch_norm(part)
    assert [type(each) for each in part.modules()].count(BatchNorm2d) == 1
    assert list(part.state_dict()) == names
