"""What one process of several does for the conformance suite: it walks all engines, and rank 0 writes what it saw.

One launch per number of processes, since starting them and meeting takes longer than the steps of so small a model.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dmjd.builders.average import ENCODER, Ema
from dmjd.builders.finetune import build_finetune_step
from dmjd.builders.schedules import cosine
from dmjd.config import (
    AttentionConfig,
    BackboneConfig,
    DataConfig,
    DenseOptimConfig,
    EngineConfig,
    FinetuneConfig,
    FinetuneOptimConfig,
    HeadConfig,
    OptimConfig,
    SegmentConfig,
    SegmentDataConfig,
    SegmentTestConfig,
    UperNetConfig,
)
from dmjd.data.batch import Batch
from dmjd.masking import MaskedViews, MaskSpec
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.objective import Objective
from dmjd.models.vit import ViTEncoder
from dmjd.parallel import engines
from dmjd.parallel.build import build_engine
from dmjd.parallel.deepspeed.files import is_zero
from dmjd.parallel.engine import Engine
from dmjd.parallel.world import World, alone, join_world

STEPS, BATCH, PARTS, SAVED_AT = 6, 8, 2, 3
TARGET_DIM = 5
CPU = torch.device("cpu")


def engine(name: str, **options: Any) -> EngineConfig:
    return EngineConfig(name=name, device="cpu", precision="fp32", grad_accum_steps=PARTS, **options)


STAGES = [name for name, spec in engines.ENGINES.items() if spec.stage]
ENGINES = {
    "ddp": engine("ddp"),
    "fsdp": engine("fsdp", reshard_after_forward=True, blocks_per_unit=4),
    "fsdp, kept gathered": engine("fsdp", reshard_after_forward=False, blocks_per_unit=1),
    "hsdp": engine("hsdp", replicas=2, blocks_per_unit=1),
    # With many small buckets, as they would be in a model of a thousand times the size.
    **{
        name: engine(
            name,
            deepspeed_config=str(Path(__file__).with_name(f"{name}.json")),
            reshard_after_forward=True if name == "zero3" else None,
        )
        for name in STAGES
    },
}
"""What is held to the single engine's results, by the name that results have."""

VARIANTS: dict[str, dict[str, Any]] = {
    "selectively recomputed": {"activation_checkpointing": "selective"},
    "recomputed": {"activation_checkpointing": "full"},
}
"""Transforms that change nothing; fine-tuning recomputes the MLPs."""

Cell = tuple[str, str, str, str]
"""An engine, what it compiles as one graph, how it recomputes, and its precision."""

COMPILED = (
    *(("ddp", "model"), ("zero2", "model")),
    *((name, "block") for name in ("ddp", "fsdp", "hsdp", "zero1", "zero3")),
)
"""Engines, and what they compile as one graph: those that shard parameters do not take the model."""

BUCKET = 16 << 10
"""Bytes."""


@dataclass
class Curve:
    """Rows of (loss of the whole batch, gradient norm, applied), and what the run holds at its end."""

    rows: list[tuple[float, float, float]]
    parameters: dict[str, Tensor]
    averages: dict[str, Tensor]


def make_objective(convolutional: bool = False, depth: int = 2) -> Objective:
    torch.manual_seed(0)
    encoder: Encoder
    if convolutional:
        encoder = ConvViTEncoder(
            image_size=(64, 64), in_chans=3, embed_dims=(8, 12, 32), depths=(1, 1, 1), mlp_ratios=(2, 2, 2), num_heads=4
        )
    else:
        encoder = ViTEncoder(image_size=(64, 64), patch_size=16, in_chans=3, embed_dim=32, depth=depth, num_heads=4)
    decoder = MAEDecoder(
        encoder_dim=32,
        grid=encoder.grid,
        prefix_tokens=encoder.num_prefix_tokens,
        dim=32,
        depth=2,
        num_heads=4,
        mlp_ratio=2.0,
    )
    branch = VisibleBranch(encoder_dim=32, width=16, target_dim=TARGET_DIM)
    return Objective(MaskedImageModel(encoder, decoder, branch, target_dim=TARGET_DIM))


def make_batch(step: int, rows: range) -> tuple[Tensor, MaskedViews, Tensor]:
    """Samples ``rows`` of the batch of ``step``, whoever asks for them."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 64, 64, generator=generator)
    targets = torch.randn(BATCH, 16, TARGET_DIM, generator=generator)
    views = MaskSpec(views=2, mask_ratio=0.6, pattern="uniform").draw(torch.tensor(rows), (4, 4), seed=0, epoch=step)
    return images[rows], views, targets[rows]


class Run:
    """A few steps of one engine, as the loop takes them: accumulation, clipping, schedule and average."""

    def __init__(self, config: EngineConfig, world: World, convolutional: bool = False, ema: bool = True) -> None:
        self.world = world
        # A large epsilon, since Adam otherwise turns the rounding noise of a gradient of zero into a full step.
        optim = OptimConfig(clip_grad=0.5, eps=1e-2)
        self.engine: Engine = build_engine(make_objective(convolutional), config, optim, world)
        self.ema = Ema(self.engine.local_shards(), 0.9, ENCODER) if ema else None
        self.engine.prepare_save(self.averages)
        self.step = 0

    def forward_backward(self, poisoned: bool = False) -> float:
        share = BATCH // self.world.size
        own = range(self.world.rank * share, (self.world.rank + 1) * share)
        total = torch.zeros(())
        for part in range(PARTS):
            size = share // PARTS
            images, views, targets = make_batch(self.step, own[part * size : (part + 1) * size])
            if poisoned and self.world.rank == self.world.size - 1:
                targets[0, 0, 0] = float("nan")
            with self.engine.micro_batch(last=part + 1 == PARTS):
                loss = self.engine.module(images, views, targets).total / PARTS
                self.engine.backward(loss)
            total += loss.detach()
        return float(self.world.mean(total))

    def take(self, steps: int, poisoned: bool = False) -> list[tuple[float, float, float]]:
        rows = []
        for _ in range(steps):
            loss = self.forward_backward(poisoned)
            result = self.engine.step(cosine(self.step, total=STEPS, warmup=2, peak=0.1, floor=0.0), 0.05)
            if self.ema is not None:
                self.ema.update(result.applied)
            self.step += 1
            rows.append((loss, float(result.grad_norm), float(result.applied)))
        return rows

    @property
    def averages(self) -> dict[str, Tensor]:
        return {} if self.ema is None else self.ema.averages

    def save(self, folder: Path) -> list[int]:
        """The buffers that this allocated, on each rank."""
        self.world.on_main(lambda: folder.mkdir(parents=True))
        before = buffers_of(self.engine)
        self.engine.save(folder, self.averages)()
        return self.world.gather(len(buffers_of(self.engine) - before))

    def load(self, folder: Path) -> None:
        self.engine.load(folder, self.averages)
        self.step = SAVED_AT

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all that this rank owns."""
        return {name: value.clone() for name, value in self.engine.local_shards().items()}


def buffers_of(engine: Any) -> set[int]:
    """The host buffers of saves, all that `prepare_save` allocates included."""
    engine._copies._join()
    return {id(buffer) for buffers in engine._copies._buffers.values() for buffer in buffers}


CLASSES, FREEZE = 3, 2


def finetune_config(config: EngineConfig) -> FinetuneConfig:
    return FinetuneConfig(
        batch_size=BATCH,
        ema_decay=0.8,
        freeze=FREEZE,
        backbone=BackboneConfig(patch_size=16, embed_dim=32, depth=2, num_heads=4, drop_path=0.2),
        data=DataConfig(image_size=[64, 64]),
        optim=FinetuneOptimConfig(clip_grad=0.5, eps=1e-2, layer_decay=0.5),
        engine=config,
        head=HeadConfig(dropout=0.1, init_std=0.5),
    )


class FineTuned:
    """Some steps of fine-tuning with all that its step has: factors of learning rates, frozen layers, mixed images."""

    def __init__(self, config: EngineConfig, world: World) -> None:
        self.step = build_finetune_step(finetune_config(config), CLASSES, world)
        self.world = world

    def batch(self, number: int, whole: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(number)
        images = torch.randint(0, 256, (BATCH, 64, 64, 3), dtype=torch.uint8, generator=generator)
        batch = Batch(images, torch.arange(BATCH), torch.arange(BATCH) % CLASSES)
        return batch if whole else batch.split(self.world.size)[self.world.rank]

    def take(self, first: int, last: int) -> list[tuple[float, float, float]]:
        rows = []
        for number in range(first, last):
            loss = self.step.forward_backward(self.batch(number), number)["loss"]
            result = self.step.update(0.1)
            rows.append((float(self.world.mean(loss)), float(result.grad_norm), float(result.applied)))
        return rows

    def logits(self) -> Tensor:
        """Of one batch, which every process computes."""
        return self.step.logits(self.batch(0, whole=True).images)

    def look(self, folder: Path, saved: dict[str, Path]) -> dict[str, Any]:
        """Losses of four steps; logits of the weights and of their average after two, which leave no trace; and losses
        after a return to them, by its own save and those of other engines."""
        rows, engine = self.take(0, 2), self.step.engine
        self.world.on_main(folder.mkdir)
        engine.save(folder, self.step.averages)()
        self.world.gather(None)
        logits = [self.logits()]
        with self.step.with_average():
            logits.append(self.logits())
        logits.append(self.logits())
        rows += self.take(2, 4)
        parameters = engine.full_state_dict()
        seen = {"curve": rows, "logits": logits, "parameters": parameters}
        for origin, path in {"again": folder, **saved}.items():
            for shard in engine.local_shards().values():
                shard.add_(1)  # frozen ones must come back too
            engine.load(path, self.step.averages)
            seen[origin] = self.take(2, 4)
        engine.close()
        return seen


class Segmented:
    """Some steps of segmentation, whose batch normalisation has the statistics of all processes."""

    def __init__(self, config: EngineConfig, world: World) -> None:
        # Of one micro-batch: statistics are those of the images that are computed together.
        from dmjd.builders.segment import build_segment_step  # imports transformers, for seconds

        self.step = build_segment_step(segment_config(replace(config, grad_accum_steps=1)), CLASSES, world)
        self.world = world

    def batch(self, number: int, whole: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(number)
        images = torch.randint(0, 256, (BATCH, 64, 64, 3), dtype=torch.uint8, generator=generator)
        maps = torch.randint(0, CLASSES, (BATCH, 64, 64), dtype=torch.uint8, generator=generator)
        batch = Batch.empty(BATCH, [(64, 64)], 3)._replace(images=images, sample_ids=torch.arange(BATCH), maps=maps)
        return batch if whole else batch.map(lambda field: field.chunk(self.world.size)[self.world.rank])

    def look(self) -> dict[str, Any]:
        """Losses, parameters and running statistics of two steps; logits then; and those of the gathered model."""
        rows = []
        for number in range(2):
            losses = self.step.forward_backward(self.batch(number), number)
            result = self.step.update(0.1)
            rows.append([float(self.world.mean(each)) for each in losses.values()] + [float(result.grad_norm)])
        engine, images = self.step.engine, self.batch(5, whole=True).images
        seen = {"curve": rows, "parameters": engine.full_state_dict(), "logits": self.step.logits(images)}
        seen["buffers"] = {n: buffer.clone() for n, buffer in engine.objective.named_buffers()}
        with engine.gathered() as objective, torch.no_grad():
            if objective is not None:
                seen["gathered"] = objective.eval()(self.step.prepare(self.batch(5, whole=True), 0).images)
                objective.train()
        engine.close()
        return seen


def segment_config(config: EngineConfig) -> SegmentConfig:
    return SegmentConfig(
        init=None,
        batch_size=BATCH,
        backbone=BackboneConfig(patch_size=16, embed_dim=32, depth=2, num_heads=4, drop_path=0.2),
        data=SegmentDataConfig(image_size=[64, 64]),
        test=SegmentTestConfig(stride=[64, 64]),
        optim=DenseOptimConfig(clip_grad=0.5, eps=1e-2, layer_decay=0.5),
        engine=config,
        head=UperNetConfig(channels=8, auxiliary_channels=4),
        attention=AttentionConfig(window=3, global_blocks=[1], relative_positions="decomposed"),
    )


def walk(rank: int, size: int, folder: Path, port: int, saved: dict[str, Path], variants: bool) -> None:
    """The life of one rank. Writes ``folder/NAME.pt`` of every engine, and ``folder/NAME/`` after three steps of it."""
    world = join(rank, size, port)
    for name, config in ENGINES.items():
        seen = _look_at(config, world, folder / name, saved, variants)
        if world.is_main:
            torch.save(seen, folder / f"{name}.pt")
    world.close()


def walk_compiled(rank: int, size: int, folder: Path, port: int, backend: str, cells: list[Cell]) -> None:
    """The life of one rank that compiles. Writes ``folder/seen.pt``: of every cell its rows, the number of its graphs,
    and how often the host reads a tensor in the last step, for which it would wait on a GPU."""
    world = join(rank, size, port)
    # DDP's buckets, at whose ends its graph is cut, hold more than this model.
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = BUCKET  # type: ignore[attr-defined]
    counted = Counted(backend)
    torch.compile = partial(torch.compile, backend=counted)  # which nn.Module.compile calls
    seen = {}
    for cell in cells:
        name, unit, mode, precision = cell
        torch._dynamo.reset()
        counted.graphs = 0
        config = replace(ENGINES[name], compile=unit, activation_checkpointing=mode, precision=precision)
        run = Run(config, world, ema=False)
        if isinstance(run.engine.module, DistributedDataParallel):
            run.engine.module.bucket_bytes_cap = BUCKET
        rows = run.take(2)
        with profile(activities=[ProfilerActivity.CPU]) as step:
            rows += run.take(1)
        reads = sum(event.name == "aten::_local_scalar_dense" for event in step.events())
        seen[cell] = rows, counted.graphs, reads
        run.engine.close()
    if world.is_main:
        torch.save(seen, folder / "seen.pt")
    world.close()


class Sent(TorchDispatchMode):
    """Keeps the names of the ops that run. (torch has CommDebugMode, which in 2.11 loses its way among modules.)"""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


class Counted:
    """A backend of torch.compile that counts the graphs that it is given."""

    def __init__(self, name: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend  # takes a second, of those who compile

        self._compile = lookup_backend(name)
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs)


def live(rank: int, size: int, port: int, name: str) -> None:
    """A short life of one engine that ends as an interpreter ends, where a child of multiprocessing would not."""
    world = join(rank, size, port)
    run = Run(ENGINES[name], world)
    run.take(2)
    run.engine.close()
    world.close()
    ctypes.pythonapi.Py_Exit(0)


def join(rank: int, size: int, port: int) -> World:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
        WORLD_SIZE=str(size), RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
    )  # fmt: skip
    return join_world(CPU, engine("ddp"))


def _look_at(
    config: EngineConfig, world: World, folder: Path, saved: dict[str, Path], variants: bool
) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    run = Run(config, world)
    run.forward_backward()
    run.engine.discard()  # as the loop's rehearsal; it must leave no trace
    rows = run.take(SAVED_AT)
    seen["allocated in the first save"] = run.save(folder)
    rows += run.take(STEPS - SAVED_AT)
    seen["curve"] = rows
    seen["parameters"] = run.engine.full_state_dict()
    before, moments = run.snapshot(), folder.with_name(f"{folder.name}-before")
    run.save(moments)
    seen["poisoned"] = run.take(1, poisoned=True)
    seen["moved"] = world.gather([n for n, value in run.snapshot().items() if not torch.equal(value, before[n])])
    run.save(folder.with_name(f"{folder.name}-after"))
    with run.engine.gathered() as objective:
        if objective is not None:
            with torch.no_grad():
                seen["gathered"] = objective(*make_batch(0, range(BATCH))).total
            seen["gathered parameters"] = {n: p.detach().clone() for n, p in objective.named_parameters()}
    run.load(folder)
    seen["rolled back"] = run.take(STEPS - SAVED_AT)
    for origin, path in saved.items():
        if is_zero(path) and config.name not in STAGES:
            continue  # native engines read the consolidated file
        other = Run(config, world)
        other.load(path)
        seen[f"from {origin}"] = other.take(STEPS - SAVED_AT)
        other.engine.close()
    if variants:
        for variant, options in VARIANTS.items():
            seen[variant] = Run(replace(config, **options), world, ema=False).take(2)
        seen["bfloat16"] = Run(replace(config, precision="bf16"), world, ema=False).take(STEPS)
        seen["convolutional"] = Run(config, world, convolutional=True).take(2)
        of_ddp = {"from ddp": folder.with_name("ddp-fine-tuned")}
        of_mlps = replace(config, activation_checkpointing="mlp")
        seen["fine-tuned"] = FineTuned(of_mlps, world).look(folder.with_name(f"{folder.name}-fine-tuned"), of_ddp)
        recomputed = replace(config, activation_checkpointing="full")
        seen["segmented"] = Segmented(recomputed, world).look()
        seen["convolutional, recomputed"] = Run(recomputed, world, convolutional=True).take(2)
        if engines.ENGINES[config.name].mesh:
            with Sent() as sent:
                Run(config, world, ema=False).forward_backward()
            seen["sent"] = [sent.ops.count(f"c10d::{op}") for op in ("_allgather_base_", "_reduce_scatter_base_")]
    run.engine.close()
    return seen


def reference(convolutional: bool = False) -> Run:
    """One process by itself."""
    return Run(engine("single"), alone(CPU), convolutional)
