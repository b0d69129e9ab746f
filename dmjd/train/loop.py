"""Pre-training: fetch, forward and backward, update, observe, persist."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dmjd.compose import to_yaml
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches
from dmjd.data.loader import make_loader
from dmjd.errors import ConfigError
from dmjd.masking import measured_rates
from dmjd.models.objective import Losses, mean_losses
from dmjd.parallel.build import build_engine
from dmjd.parallel.engine import StepResult
from dmjd.train import checkpoint
from dmjd.train.build import build_mask_spec, build_objective, build_tokenizer, peak_lr, token_grid
from dmjd.train.guard import PendingStep
from dmjd.train.metrics import RunLog, Stopwatch, Window
from dmjd.train.preparation import Preparation
from dmjd.train.preview import write_pictures
from dmjd.train.progress import Progress
from dmjd.train.run_folder import RunFolder
from dmjd.train.schedules import cosine

logger = logging.getLogger("dmjd")


def pretrain(config: PretrainConfig) -> RunFolder:
    """Run ``config`` to its end, continuing from the newest checkpoint in its run folder.

    Raises:
        UserError: before any work, where the configuration, the data or the run folder do not allow it.
        NonFiniteLoss: at the first step whose loss or gradient is not finite.
    """
    run = RunFolder(Path(config.run))
    run.check(config)
    with ExitStack() as stack:
        training = Pretraining(config, run, stack)
        training.play()
    return run


class Pretraining:
    """One run's cast. Everything that can be refused is refused here, before the run folder is touched."""

    def __init__(self, config: PretrainConfig, run: RunFolder, stack: ExitStack) -> None:
        self.config, self.run = config, run
        grid = token_grid(config)
        spec = build_mask_spec(config.mask, grid)
        tokenizer = build_tokenizer(config)
        if config.batch_size % config.engine.accumulation:
            raise ConfigError(
                f"engine.accumulation={config.engine.accumulation} does not divide batch_size={config.batch_size}"
            )
        self.engine = build_engine(build_objective(config, tokenizer.dim), config.engine, config.optim)
        stack.callback(self.engine.close)
        data = config.data
        self.batches = training_batches(data, build_dataset(data, "train"), config.batch_size, config.seed)
        self.prepare = Preparation(
            spec, grid, tokenizer, tuple(data.mean), tuple(data.std), flip=data.flip, seed=config.seed
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total_steps = config.epochs * self.steps_per_epoch
        self.peak_lr = peak_lr(config, spec, grid)
        self.warmup_steps = round(config.optim.warmup_epochs * self.steps_per_epoch)
        self.window = Window()
        self.done = 0
        state = self._resume()
        run.open(config, self.engine.device)
        self.log = RunLog(run.log, state["log_bytes"])
        stack.callback(self.log.close)
        self.clock = Stopwatch(state["seconds"])
        self.progress = stack.enter_context(Progress(self.total_steps, self.done))
        self.pending: PendingStep | None = None

    def play(self) -> None:
        """The whole run."""
        device = self.engine.device
        loader = make_loader(
            self.batches, self.done, self.total_steps, self.config.workers, pin_memory=device.type == "cuda"
        )
        self.engine.module.train()
        for batch in self.clock.waiting(loader):
            losses, rates = self._forward_backward(batch.to(device))
            result = self.engine.step(self._lr(self.done), self.config.optim.weight_decay)
            self._observe(batch, losses, rates, result)
            self.done += 1
            if self.done % self.config.checkpoint_every == 0 or self.done == self.total_steps:
                self._persist(batch)

    def _forward_backward(self, batch: Batch) -> tuple[Losses, torch.Tensor]:
        """Accumulate gradients of one step; losses and rates are means over its micro-batches."""
        epoch, parts = self.done // self.steps_per_epoch, self.config.engine.accumulation
        seen: list[Losses] = []
        rates = []
        for index, micro in enumerate(batch.split(parts)):
            prepared = self.prepare(micro, epoch)
            with self.engine.micro_batch(last=index + 1 == parts):
                losses = self.engine.module(prepared.images, prepared.masked_views, prepared.targets)
                self.engine.backward(losses.total / parts)
            seen.append(losses)
            rates.append(measured_rates(prepared.masked_views))
        return mean_losses(seen), torch.stack(rates).mean(dim=0)

    def _observe(self, batch: Batch, losses: Losses, rates: torch.Tensor, result: StepResult) -> None:
        """Queue this step's numbers and take in those of the step before."""
        self._settle()
        self.pending = PendingStep(self.done + 1, batch.sample_ids, losses, rates, result)

    def _settle(self) -> None:
        """Take in the pending step: guard, averages, log line, progress bar."""
        if self.pending is None:
            return
        step, numbers = self.pending.step, self.pending.read()
        self.pending = None
        self.window.add(numbers)
        self.progress.advance(numbers)
        if step % self.config.log_every and step != self.total_steps:
            return
        images = self.window.steps * self.config.batch_size
        seconds, waited = self.clock.lap()
        self.log.write(
            {
                "step": step,
                "epoch": step / self.steps_per_epoch,
                **self.window.flush(),
                "lr": self._lr(step - 1),
                "images_per_second": images / seconds,
                "data_wait_percent": 100 * waited / seconds,
                "seconds": self.clock.elapsed,
            }
        )

    def _persist(self, batch: Batch) -> None:
        """Commit a checkpoint and refresh the pictures."""
        self._settle()  # a step that was not finite must stop the run before it reaches the disk
        self.log.sync()
        state = {
            "step": self.done,
            "window": self.window.state_dict(),
            "log_bytes": self.log.offset,
            "seconds": self.clock.elapsed,
        }

        def write(folder: Path) -> None:
            self.engine.save(folder)
            checkpoint.write_loop_state(folder, state)
            (folder / checkpoint.CONFIG).write_text(to_yaml(self.config))

        checkpoint.commit(self.run.checkpoints, self.done, write, keep=self.config.keep_checkpoints)
        epoch = (self.done - 1) // self.steps_per_epoch
        write_pictures(self.run, self.engine, self.prepare(batch.to(self.engine.device), epoch), self.prepare.tokenizer)

    def _resume(self) -> dict[str, Any]:
        """Load the newest checkpoint, if there is one, and return its loop state."""
        found = checkpoint.newest(self.run.checkpoints)
        if found is None:
            return {"log_bytes": 0, "seconds": 0.0}
        self.engine.load(found)
        state = checkpoint.read_loop_state(found)
        self.done = state["step"]
        self.window.load_state_dict(state["window"])
        logger.info("continuing from %s (step %d of %d)", found, self.done, self.total_steps)
        return state

    def _lr(self, step: int) -> float:
        return cosine(
            step, total=self.total_steps, warmup=self.warmup_steps, peak=self.peak_lr, floor=self.config.optim.min_lr
        )
