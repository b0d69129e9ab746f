"""The lines that a run logs at its start, and what its exit record adds about its end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from dmjd.builders.schedules import peak_lr, warmup_steps
from dmjd.builders.step import Step
from dmjd.config import PretrainConfig
from dmjd.data.build import STREAM, build_dataset
from dmjd.data.dataset import ImageDataset
from dmjd.data.stream.batches import TarStream
from dmjd.errors import ConfigError, UserError
from dmjd.interop.timm import timm_call
from dmjd.parallel.build import select_precision
from dmjd.parallel.world import World
from dmjd.runs.folder import RunFolder
from dmjd.train.data_pipeline import DataPipeline


def start_lines(config: PretrainConfig, data: DataPipeline, step: Step, world: World) -> Iterator[str]:
    """Images, device, size of the model, steps, learning rate and masks of a run."""
    yield _line("images", _images(config, data))
    spec, grid = step.prepare.mask_spec, step.prepare.grid
    precision = str(select_precision(config.engine.precision, world.device)).removeprefix("torch.")
    device = f"cpu, {torch.get_num_threads()} threads"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    processes = f", {world.size} processes ({config.engine.name})" if world.size > 1 else ""
    yield _line("device", f"{device}{processes}, {precision}")
    encoder, whole = (f"{count / 1e6:.2f} M" for count in step.parameters)
    yield _line("parameters", f"{encoder} in the encoder, {whole} with the heads of pre-training")
    steps, images = data.steps_per_epoch, config.batch_size * data.steps_per_epoch
    left = len(data.source) - images
    others = f"; {left} of the {len(data.source)} images are left out of each epoch, others in the next" if left else ""
    yield _line("steps", f"{steps} per epoch, {steps * config.epochs} in {_count(config.epochs, 'epoch')}{others}")
    warmup = warmup_steps(config, steps)
    yield _line(
        "schedule", f"peak learning rate {peak_lr(config, spec, grid):.3g} after {_count(warmup, 'step')} of warm-up"
    )
    rates, units = spec.true_rates(grid), spec.plan(grid)
    why = f" (mask.mask_ratio={spec.mask_ratio:g} is rounded to {units.hidden} of {units.units} masked units)"
    if spec.count is not None or abs(rates.m_corr - spec.mask_ratio) < 0.005:
        why = ""
    masked, predicted = (
        f"{100 * rates.m_corr:.3g} % masked in each{why}",
        f"{100 * rates.m_pred:.3g} % predicted in all",
    )
    yield _line("masks", f"{_count(spec.views, 'view')} of {grid[0]}x{grid[1]} tokens, {masked}, {predicted}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _line(title: str, text: str) -> str:
    return f"{title:11} {text}"


def _images(config: PretrainConfig, data: DataPipeline) -> str:
    source, classes = data.source, ", without labels"
    if isinstance(source, TarStream):
        classes = ""
    elif source.num_classes:
        classes = f" in {source.num_classes} classes"
    unreadable = f", {len(source.bad)} unreadable" if source.bad else ""
    added = f", without {data.added} added since the first start" if data.added else ""
    height, width = config.data.image_size
    return f"{len(data.source)}{classes}{unreadable}{added}; crops of {height}x{width} pixels"


def end_detail(run: RunFolder, total_steps: int) -> str:
    """The detail of a finished run's exit record: skipped steps, rollbacks, substituted images, a bad last loss."""
    events = run.read_rows(run.guard)
    skipped = len({row.get("step") for row in events if row.get("event") == "skipped"})
    rollbacks = sum(row.get("event") == "rollback" for row in events)
    replaced = sum(row.get("substitute") is not None for row in run.read_rows(run.quarantine))
    losses = [row.get("loss") for row in run.read_log() if "lr" in row][-1:]
    parts = ["all steps are done"]
    if skipped:
        parts.append(f"{skipped} of {total_steps} were skipped for a loss or gradient that is not finite (guard.jsonl)")
    if rollbacks:
        parts.append(f"{rollbacks} rollback(s) (guard.jsonl)")
    if any(not isinstance(loss, float) or not math.isfinite(loss) for loss in losses):
        parts.append("none was applied at the end: the run has diverged; start a new one with a lower optim.base_lr")
    if replaced:
        parts.append(f"{replaced} bad image(s) were substituted (quarantine.jsonl)")
    return ", ".join(parts)


def next_steps(config: PretrainConfig, run: RunFolder) -> str:
    """Commands that work on a finished run, with RUN for its folder."""
    held_out = _held_out(config)
    bad = len(run.read_rows(run.quarantine)) + (len(held_out.bad) if held_out else 0)
    commands = ["dmjd knn checkpoint=RUN"] if held_out and not bad else []
    commands.append("dmjd report RUN")
    with suppress(ConfigError):
        timm_call(config.backbone, config.data)
        commands.append("dmjd export checkpoint=RUN")
    why = f" (for scores, remove or replace {bad} bad image(s) first)" if held_out and bad else ""
    return ", ".join(commands) + why


def _held_out(config: PretrainConfig) -> ImageDataset | None:
    """The checked held-out images, if they have several classes."""
    data = config.data
    if data.name == STREAM:
        return None
    if data.val_percent and not data.max_bad_percent:  # the check at the start was of all files
        data = replace(data, check="none")
    try:
        dataset = build_dataset(replace(data, max_bad_percent=100.0), "test")
    except UserError:
        return None
    return dataset if dataset.num_classes > 1 else None
