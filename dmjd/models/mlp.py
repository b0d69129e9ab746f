"""The MLP of a block over the last axis, and recomputation of its hidden layer."""

from __future__ import annotations

from functools import cache

from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.recompute import recompute
from dmjd.ops.gelu_mlp import gelu_mlp


class Pointwise(nn.Conv2d):
    """A 1 x 1 convolution over the last axis, with a convolution's parameters and initialisation."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., C] -> [..., D]``."""
        return F.linear(x, self.weight.flatten(1), self.bias)


class PointwiseMlp(nn.Module):
    """``[..., C] -> [..., C]`` through one hidden layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Pointwise(dim, hidden)
        self.fc2 = Pointwise(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def recompute_hidden(mlp: nn.Module) -> None:
    """Make ``mlp`` keep only its input for the backward pass. Parameter names do not change.

    Two layers with an exact GELU between them go through :func:`~dmjd.ops.gelu_mlp.gelu_mlp`, whose kernels recompute
    at no cost on CUDA; anything else is checkpointed. As in :func:`~dmjd.models.recompute.recompute`, the module gets a
    subclass of its class.
    """
    if _is_plain(mlp):
        mlp.__class__ = _forgetting(type(mlp))  # type: ignore[arg-type]  # classes hash
    else:
        recompute(mlp)


def _is_plain(mlp: nn.Module) -> bool:
    if type(mlp) is PointwiseMlp:
        return True
    return (
        type(mlp) is Mlp
        and type(mlp.act) is nn.GELU
        and mlp.act.approximate == "none"
        and type(mlp.norm) is nn.Identity
        and mlp.drop1.p == mlp.drop2.p == 0
        and all(type(layer) is nn.Linear and layer.bias is not None for layer in (mlp.fc1, mlp.fc2))
    )


@cache
def _forgetting(kind: type[nn.Module]) -> type[nn.Module]:
    class Forgetting(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            # flatten: of a convolution's weight; a linear layer's does not change.
            return gelu_mlp(x, self.fc1.weight.flatten(1), self.fc1.bias, self.fc2.weight.flatten(1), self.fc2.bias)

    return Forgetting
