"""The lines that a run logs at its start, and what its exit record adds about its end."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dmjd.builders.schedules import warmup_steps
from dmjd.config import TrainConfig
from dmjd.data.stream.batches import TarStream
from dmjd.parallel.build import select_precision
from dmjd.parallel.world import World
from dmjd.runs.folder import RunFolder
from dmjd.train.data_pipeline import DataPipeline
from dmjd.train.task import Task


def start_lines(config: TrainConfig, data: DataPipeline, task: Task, world: World) -> Iterator[str]:
    """Images, device, size of the model, steps, learning rate of a run, and the details of its task."""
    yield _line("images", _images(config, data))
    precision = str(select_precision(config.engine.precision, world.device)).removeprefix("torch.")
    device = f"cpu, {torch.get_num_threads()} threads"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    processes = f", {world.size} processes ({config.engine.name})" if world.size > 1 else ""
    yield _line("device", f"{device}{processes}, {precision}")
    yield _line("parameters", task.parameters)
    steps, images = data.steps_per_epoch, config.batch_size * data.steps_per_epoch
    left = len(data.source) - images
    others = f"; {left} of the {len(data.source)} images are dropped in each epoch, others in the next" if left else ""
    yield _line("steps", f"{steps} per epoch, {steps * config.epochs} in {count(config.epochs, 'epoch')}{others}")
    warmup = warmup_steps(config, steps)
    short = "; the run ends before, lower optim.warmup_epochs" if warmup >= steps * config.epochs else ""
    yield _line("schedule", f"peak learning rate {task.peak_lr:.3g} after {count(warmup, 'step')} of warm-up{short}")
    for title, text in task.details():
        yield _line(title, text)


def count(number: int, noun: str) -> str:
    """ "1 step", "2 steps", "2 classes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


def _line(title: str, text: str) -> str:
    return f"{title:11} {text}"


def _images(config: TrainConfig, data: DataPipeline) -> str:
    source, classes = data.source, ", without labels"
    if isinstance(source, TarStream):
        classes = ""
    elif source.num_classes:
        classes = f" in {count(source.num_classes, 'class')}"
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
        parts.append(
            "the last steps were all skipped: the run has diverged; start a new one with a lower optim.base_lr"
        )
    if replaced:
        parts.append(f"{replaced} bad image(s) were substituted (quarantine.jsonl)")
    return ", ".join(parts)
