"""A plan as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dmjd.cluster.plan import RESERVE_GIB, Fit, Plan
from dmjd.parallel.apply import MODES


def page(plan: Plan, engine: str | None = None) -> Iterator[str]:
    """The lines of ``plan``, for one ``engine`` or for all."""
    engines = plan.engines if engine is None else (engine,)
    config, gpus = plan.config, plan.config.gpus
    yield f"parameters            {plan.parameters / 1e6:.1f} M, of which {plan.encoder_parameters / 1e6:.1f} M encoder"
    yield f"FLOPs per image       {plan.flops_per_image / 1e9:.1f} G, forward and backward, {config.mask.views} view(s)"
    yield f"batch                 {config.batch_size} images per step, {plan.images_per_gpu} on each of {gpus} GPU(s)"
    yield (
        f"time                  {plan.gpu_hours:.0f} GPU hours, {plan.gpu_hours / gpus:.1f} h on {gpus} GPU(s), for "
        f"{config.epochs} epochs of {config.images} images"
    )
    yield f"                      at {config.mfu:g} % MFU of {plan.gpu.tflops:g} TFLOP/s ({config.gpu}, bf16)"
    yield ""
    yield "Model states per GPU, GiB (gathered: unsharded weights, gradients and buffers within a step)"
    rows: list[tuple[str, ...]] = [("engine", "weights", "gradients", "optimizer", "gathered")]
    rows += [(name, *map(_gib, plan.state(name))) for name in engines]
    yield from _table(rows)
    yield ""
    yield "Activations by engine.activation_checkpointing (weights: copies in the precision of computation)"
    rows = [("mode", "weights, GiB", "saved for backward, MiB per image", "peak, MiB per image")]
    for mode in MODES:
        some = plan.activations[mode]
        (fixed, saved), (_, peak) = some.saved.of_large_batches, some.transient.of_large_batches
        rows.append((mode, _gib(fixed), f"{saved / 2**20:.1f}", f"{peak / 2**20:.1f}"))
    yield from _table(rows)
    yield ""
    yield f"Largest micro-batch within {plan.gpu.memory_gib:g} - {RESERVE_GIB:g} GiB, per GPU, in eager mode:"
    yield "images x engine.grad_accum_steps, peak memory in GiB"
    rows = [("engine", *MODES)]
    for name in engines:
        fits = [plan.fit(name, mode) for mode in MODES]
        rows.append((name, *("does not fit" if f is None else _fit(f) for f in fits)))
    yield from _table(rows)


def _fit(fit: Fit) -> str:
    return f"{fit.micro_batch} x {fit.grad_accum_steps}, {_gib(fit.peak)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
