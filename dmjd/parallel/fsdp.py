"""Sharded parameters, gradients and moments: torch's FSDP2 behind the engine protocol, in one dimension or in two."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dmjd.config import OptimConfig
from dmjd.models.objective import Trainable
from dmjd.parallel.apply import units
from dmjd.parallel.single import SingleEngine
from dmjd.parallel.world import World


class FSDPEngine(SingleEngine):
    """Every rank owns a slice of each matrix, along its first dimension, and the moments of that slice; and all of each
    vector (biases, LayerNorm), with its moments.

    FSDP's Python takes as long for a vector as for a matrix, and two thirds of a ViT's parameters are vectors, which
    hold a thousandth of its weights. So FSDP ignores them, and their gradients are averaged by one reduction in a step.

    The optimizer works on the slices as plain tensors, so a step is :class:`SingleEngine`'s but for the norm, which is
    that of all slices. Gradients of matrices are reduced after each micro-batch: deferring would keep all of them,
    whole and in float32, on every rank.

    Args:
        mesh: of dimension "shard", or "replicate" and "shard" (HSDP: sharded within, averaged across).
        bare: :func:`without_parameters` of the objective before any transform.
        reshard_after_forward: whether a block's parameters are dropped after forward and gathered again for backward.
        blocks_per_unit: how many consecutive blocks are gathered, dropped and reduced together.
    """

    def __init__(
        self,
        objective: Trainable,
        bare: Trainable,
        config: OptimConfig,
        world: World,
        mesh: DeviceMesh,
        precision: torch.dtype,
        *,
        reshard_after_forward: bool = True,
        blocks_per_unit: int,
    ) -> None:
        self._world, self._mesh, self._bare = world, mesh, bare
        self._shards = mesh.get_group("shard")
        # Autocast decides what computes in which type, as in the other engines: the residual stream, norms and losses
        # stay float32, which casting inputs and outputs to bfloat16 would undo. Matrices come in bfloat16, to which
        # autocast would round them anyway, so they travel and are kept for backward at half the size. Parameters
        # outside of the blocks stay float32, since tokens and positions decide the type of the stream.
        in_blocks = None if precision == torch.float32 else precision
        policy = MixedPrecisionPolicy(in_blocks, torch.float32, cast_forward_inputs=False)
        whole = {p for p in objective.parameters() if p.ndim < 2}
        for unit in units(objective.model, blocks_per_unit):
            fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward, ignored_params=whole
            )
        outside = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(objective, mesh=mesh, mp_policy=outside, ignored_params=whole)
        super().__init__(objective, config, world.device, precision)
        self._reduces_all = True
        self._saving = world.new_group()
        # For what is copied to the host; a slice moves to the device of its mesh, and nothing is sent over this one.
        self._host_mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)

    def _own(self) -> dict[str, nn.Parameter]:
        parameters = dict(self.objective.named_parameters())
        self._sharded = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
        return {
            name: nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad) if isinstance(p, DTensor) else p
            for name, p in parameters.items()
        }

    @torch.no_grad()  # with gradients, to_local() is an autograd function and takes microseconds per parameter
    def _norm(self) -> Tensor:
        slices: list[Tensor] = []
        vectors: list[nn.Parameter] = []
        for name, owned in self._owned.items():
            sharded = self._sharded.get(name)
            if sharded is None:
                vectors += [owned] * (owned.grad is not None)
                continue
            owned.grad = None if sharded.grad is None else _sharded(sharded.grad).to_local()
            slices += [] if owned.grad is None else [owned.grad]
        square = nn.utils.get_total_norm(slices).square()
        dist.all_reduce(square, group=self._shards)
        if vectors:
            mean = self._world.mean(torch.cat([p.grad.reshape(-1) for p in vectors if p.grad is not None]))
            for vector, gradient in zip(vectors, mean.split([p.numel() for p in vectors]), strict=True):
                vector.grad = gradient.view_as(vector)
            square += mean.square().sum()
        return square.sqrt()

    def _laid_out(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._slice(tensor, *name.split("/", 1)) for name, tensor in state.items()}

    def _slice(self, tensor: Tensor, kind: str, name: str) -> Tensor:
        """``tensor`` as a slice of what the parameter ``name`` is as a whole."""
        if kind == "step" or name not in self._sharded:
            return tensor
        like = self._sharded[name]
        mesh = self._host_mesh if tensor.device.type == "cpu" else self._mesh
        return DTensor.from_local(
            tensor, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._saving.group

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # Across replicas once a step: what waits is a slice, not a whole gradient.
        if last != self._reduces_all:
            assert isinstance(self.objective, FSDPModule)
            self.objective.set_requires_all_reduce(last)  # walks all modules
            self._reduces_all = last
        with super().micro_batch(last):
            yield

    @contextmanager
    def inference(self) -> Iterator[None]:
        with super().inference():
            yield
        for module in self.objective.modules():  # what is kept for a backward pass that does not come
            if isinstance(module, FSDPModule):
                module.reshard()

    def discard(self) -> None:
        super().discard()
        for parameter in self._sharded.values():
            parameter.grad = None

    def full_state_dict(self) -> dict[str, Tensor]:
        return self._whole(torch.device("cpu"))

    def gathered(self) -> AbstractContextManager[Trainable | None]:
        return filled(self._bare, self._whole(self.device))

    def _whole(self, device: torch.device) -> dict[str, Tensor]:
        """Every parameter on ``device`` of rank 0, one gathered after the other; empty elsewhere."""
        whole = {}
        for name, parameter in self.objective.named_parameters():
            value = parameter.detach()
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if self._world.is_main:
                whole[name] = value.to(device)
        return whole


def without_parameters(objective: Trainable) -> Trainable:
    """A copy on the same device whose parameters are shapes alone, and which shares the buffers: running statistics
    follow the training."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in objective.parameters()}
    return copy.deepcopy(objective, memo | {id(buffer): buffer for buffer in objective.buffers()})


@contextmanager
def filled(bare: Trainable, state: dict[str, Tensor]) -> Iterator[Trainable | None]:
    """``bare`` of :func:`without_parameters` with the parameters of ``state``, and none of them afterwards; None where
    ``state`` is empty."""
    if not state:
        yield None
        return
    nothing = bare.state_dict()
    bare.load_state_dict(nothing | state, assign=True)
    try:
        yield bare
    finally:
        bare.load_state_dict(nothing, assign=True)


def _sharded(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor
