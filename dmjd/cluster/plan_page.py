"""A plan as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dmjd.cluster.plan import RESERVE_GIB, Plan
from dmjd.parallel.apply import MODES


def page(plan: Plan, engine: str | None = None) -> Iterator[str]:
    """The lines of ``plan``; ``engine`` leaves out the others."""
    config = plan.config
    engines = plan.engines if engine is None else (engine,)
    yield f"parameters            {plan.parameters / 1e6:.1f} M, {plan.encoder_parameters / 1e6:.1f} M in the encoder"
    views, gpus = config.mask.views, config.gpus
    yield f"FLOPs per image       {plan.flops_per_image / 1e9:.1f} G, forward and backward, {views} view(s)"
    yield f"batch                 {config.batch_size} images a step, {plan.images_per_gpu} on each of {gpus} GPU(s)"
    yield (
        f"time                  {plan.gpu_hours:.0f} GPU hours, {plan.gpu_hours / gpus:.1f} h on {gpus}, for "
        f"{config.epochs} epochs of {config.images} images"
    )
    yield f"                      at {config.mfu:g} % of {plan.gpu.tflops:g} TFLOP/s ({config.gpu})"
    yield ""
    yield "Memory of a GPU that does not depend on the batch, GiB"
    rows: list[tuple[str, ...]] = [("engine", "weights", "gradients", "optimizer", "gathered")]
    rows += [(name, *map(_gib, plan.state(name))) for name in engines]
    yield from _table(rows)
    yield ""
    yield "Activations by mode of activation checkpointing; fixed are weights in the precision of computation"
    rows = [("mode", "fixed, GiB", "saved, MiB an image", "peak, MiB an image")]
    for mode in MODES:
        some = plan.activations[mode]
        (fixed, saved), (_, peak) = some.saved.of_large_batches, some.transient.of_large_batches
        rows.append((mode, _gib(fixed), f"{saved / 2**20:.1f}", f"{peak / 2**20:.1f}"))
    yield from _table(rows)
    yield ""
    yield (
        f"Largest micro-batch x accumulation in {plan.gpu.memory_gib:g} - {RESERVE_GIB:g} GiB, and its peak "
        "(eager; compiled steps take about as much or less)"
    )
    rows = [("engine", *MODES)]
    for name in engines:
        fits = [plan.fit(name, mode) for mode in MODES]
        cells = ("does not fit" if f is None else f"{f.micro_batch} x {f.accumulation}, {_gib(f.peak)}" for f in fits)
        rows.append((name, *cells))
    yield from _table(rows)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
