"""A plan as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dmjd.builders.auto import MOST_GPUS, available, choose, describe, fewest_gpus
from dmjd.builders.plan import RESERVE_GIB, Fit, Plan
from dmjd.config import PlanConfig
from dmjd.parallel.engines import AUTO, ENGINES


def page(plan: Plan, engine: str | None = None) -> Iterator[str]:
    """The lines of ``plan``, for one ``engine`` or for all."""
    engines = plan.engines if engine is None else (engine,)
    config, gpus = plan.config, plan.config.gpus
    yield f"parameters            {plan.parameters / 1e6:.1f} M, of which {plan.encoder_parameters / 1e6:.1f} M encoder"
    if isinstance(config, PlanConfig):
        target, passes = config.target.name, f"forward and backward, {config.mask.views} view(s)"
        further = {"moving average of the encoder": plan.averaged, f"frozen target {target}": plan.target_parameters}
    else:
        passes, further = "forward and backward", {"moving average": plan.averaged}
        frozen = (plan.parameters - plan.trained) / 1e6
        yield f"head                  {plan.classes} classes" + f"; {frozen:.1f} M frozen parameters" * (frozen > 0)
    if any(further.values()):
        texts = (f"{count / 1e6:.1f} M {name}" for name, count in further.items() if count)
        yield f"further weights       {', '.join(texts)}"
    yield f"images                {plan.images} ({plan.images_from})"
    yield f"FLOPs per image       {plan.flops_per_image / 1e9:.1f} G, {passes}"
    yield f"batch                 {config.batch_size} images per step, {plan.images_per_gpu} on each of {gpus} GPU(s)"
    yield (
        f"time                  {_hours(plan.gpu_hours)} GPU hours, {_hours(plan.gpu_hours / gpus)} h on {gpus} GPU(s)"
        f", for {config.epochs} epochs of {plan.images} images"
    )
    kind = "bf16" if plan.gpu.bf16 else "fp16"
    yield f"                      at {config.mfu:g} % MFU of {plan.gpu.tflops:g} TFLOP/s ({config.gpu}, {kind})"
    if not plan.gpu.bf16:
        yield f"                      {config.gpu} has no bf16 tensor cores; bf16 and fp32 are far below this peak"
    if config.batch_size > plan.images:
        rejected = f"batch_size={config.batch_size}: there are {plan.images} images"
        yield f"                      {config.command} rejects {rejected}"
    yield ""
    yield "Model states per GPU, GiB (gathered: unsharded weights, gradients and buffers within a step)"
    rows: list[tuple[str, ...]] = [("engine", "weights", "gradients", "optimizer", "gathered")]
    rows += [(name, *map(_gib, plan.state(name))) for name in engines]
    yield from _table(rows)
    yield ""
    yield "Activations by engine.activation_checkpointing (weights: autocast copies)"
    rows = [("mode", "weights, GiB", "saved for backward, MiB per image", "peak, MiB per image")]
    for mode in plan.modes:
        some = plan.activations(mode)
        (fixed, saved), (_, peak) = some.saved.of_large_batches, some.transient.of_large_batches
        rows.append((mode, _gib(fixed), f"{saved / 2**20:.1f}", f"{peak / 2**20:.1f}"))
    yield from _table(rows)
    yield ""
    yield f"Largest micro-batch within {plan.gpu.memory_gib:g} - {RESERVE_GIB:g} GiB, per GPU, in eager mode:"
    yield "images x engine.grad_accum_steps, peak memory in GiB"
    rows = [("engine", *plan.modes)]
    for name in engines:
        fits = [plan.fit(name, mode) for mode in plan.modes]
        rows.append((name, *("does not fit" if f is None else _fit(f) for f in fits)))
    yield from _table(rows)
    if len(plan.modes) > 1 or config.engine.activation_checkpointing != "none":
        yield ""
        yield from _fewest(plan, engine)
    if config.engine.name == AUTO:
        yield describe(*choose(plan))
    if len(plan.modes) == 1 and config.engine.activation_checkpointing == "none" and len(engines) == len(plan.engines):
        yield "Other modes are slower and not needed: the whole batch fits."


def _fewest(plan: Plan, engine: str | None) -> Iterator[str]:
    """The smallest number of GPUs under each engine; HSDP shards as FSDP on one node."""
    most = _gib(available(plan.gpu))
    yield f"Fewest GPUs ({plan.config.gpu}) whose memory suffices, with a peak of at most {most} GiB:"
    rows: list[tuple[str, ...]] = [("engine", "GPUs", "activation_checkpointing", "images x grad_accum_steps, peak")]
    for name, spec in ENGINES.items():
        if engine != name and (engine is not None or "replicas" in spec.options):
            continue
        for offload in (False, True) if "offload_optimizer" in spec.options else (False,):
            label = f"{name}, offload_optimizer" if offload else name
            found = fewest_gpus(plan, name, offload=offload)
            if found is None:
                rows.append((label, "none"))
            else:
                gpus, chosen, peak = found
                micro = plan.config.batch_size // gpus // chosen.grad_accum_steps
                fit = Fit(micro, chosen.grad_accum_steps, peak)
                rows.append((label, str(gpus), chosen.activation_checkpointing, _fit(fit)))
    yield from _table([row + ("",) * (len(rows[0]) - len(row)) for row in rows])
    if any(row[1] == "none" for row in rows):
        yield f"none: no number of GPUs up to {MOST_GPUS} that divides batch_size={plan.config.batch_size} suffices"


def _fit(fit: Fit) -> str:
    return f"{fit.micro_batch} x {fit.grad_accum_steps}, {_gib(fit.peak)}"


def _hours(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
