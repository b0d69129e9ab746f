"""Pre-training: fetch, forward and backward, update, observe, persist, judge."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dmjd.compose import to_yaml
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, fetch_ahead, training_batches
from dmjd.data.loader import make_loader
from dmjd.data.quarantine import Quarantine
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.upload import Uploader
from dmjd.errors import ConfigError
from dmjd.masking import measured_rates
from dmjd.models.objective import Losses, Objective, mean_losses
from dmjd.parallel.build import build_engine, select_device
from dmjd.parallel.engine import StepResult
from dmjd.parallel.environment import prepare_environment
from dmjd.parallel.store import load_strictly, read_model
from dmjd.parallel.world import World, join_world
from dmjd.train import checkpoint
from dmjd.train.build import build_mask_spec, build_objective, build_tokenizer, peak_lr, token_grid
from dmjd.train.consolidate import SUFFIX
from dmjd.train.ema import EncoderEma
from dmjd.train.guard import PendingStep
from dmjd.train.journal import Journal
from dmjd.train.lock import only_run_in
from dmjd.train.preparation import Preparation
from dmjd.train.preview import SHOWN_IMAGES, write_pictures
from dmjd.train.run_folder import RunFolder
from dmjd.train.saver import Saver
from dmjd.train.schedules import cosine
from dmjd.train.state import DataIdentity, Position, RandomState, Registry
from dmjd.train.trackers import check_packages

logger = logging.getLogger("dmjd")


class Judge(Protocol):
    """Looks at the encoder at the end of every epoch, on rank 0, and says something for the log or nothing."""

    def __call__(self, encoder: nn.Module, step: int, epoch: float) -> Mapping[str, float] | None: ...

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in what earlier launches logged."""


def pretrain(config: PretrainConfig, judges: Sequence[Judge] = ()) -> RunFolder:
    """Run ``config`` to its end, continuing from the newest checkpoint in its run folder.

    Raises:
        UserError: before any work, where the configuration, the data or the run folder do not allow it.
        NonFiniteLoss: at the first step whose loss or gradient is not finite.
    """
    run = RunFolder(Path(config.run))
    prepare_environment(run.path)
    world = join_world(select_device(config.engine.device), config.engine)
    world.on_main(lambda: run.check(config))
    with ExitStack() as stack:
        training = Pretraining(config, run, world, judges)
        training.enter(stack)
        training.play()
        training.engine.close()
    world.close()
    return run


class Pretraining:
    """One run's cast. What can be refused is refused while it is built, before the run folder is touched."""

    def __init__(self, config: PretrainConfig, run: RunFolder, world: World, judges: Sequence[Judge]) -> None:
        self.config, self.run, self.world, self.judges = config, run, world, judges
        check_packages(tensorboard=config.tensorboard, wandb_project=config.wandb)
        grid = token_grid(config)
        spec = build_mask_spec(config.mask, grid)
        tokenizer = build_tokenizer(config)
        data, parts = config.data, config.engine.accumulation
        if config.batch_size % (parts * world.size):
            raise ConfigError(
                f"batch_size={config.batch_size} is not divisible by engine.accumulation={parts} times "
                f"{world.size} process(es)"
            )
        objective = build_objective(config, tokenizer.dim)
        initial = world.on_main(self._initial_checkpoint)
        if initial is not None:
            load_strictly(objective, read_model(initial), initial)
        self.engine = build_engine(
            objective, config.engine, config.optim, world, config.batch_size // (parts * world.size)
        )
        self.dataset = world.together(lambda: build_dataset(data, "train"))
        self.batches = training_batches(data, self.dataset, config.batch_size, config.seed, world.rank, world.size)
        self.prepare = Preparation(
            spec,
            grid,
            tokenizer,
            tuple(data.mean),
            tuple(data.std),
            flip=data.flip,
            seed=config.seed,
            depth=len(self.engine.objective.model.encoder.blocks),
            drop_path=config.backbone.drop_path,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total_steps = config.epochs * self.steps_per_epoch
        self.peak_lr = peak_lr(config, spec, grid)
        self.warmup_steps = round(config.optim.warmup_epochs * self.steps_per_epoch)

        self.saver = Saver(
            run.checkpoints,
            world,
            keep=config.keep_checkpoints,
            keep_every=config.keep_every,
            asynchronous=config.checkpoint_async,
        )
        self.position = Position()
        self.journal = Journal(config, self.total_steps, self.steps_per_epoch)
        self.random = RandomState(config.seed, world)
        decay = config.ema_decay
        self.ema = EncoderEma(self.engine.local_shards(), decay) if decay is not None else None
        self.registry = Registry()
        self.registry.add("position", self.position)
        self.registry.add("journal", self.journal)
        self.registry.add("random", self.random)
        if isinstance(self.dataset, ShardDataset):
            self.registry.add("data", DataIdentity(self.dataset.fingerprint))
        self.registry.check_complete(self)
        self.pending: PendingStep | None = None

    def enter(self, stack: ExitStack) -> None:
        """Take the run folder: lock it, continue from its newest checkpoint, begin to write."""
        run = self.run
        self.world.on_main(lambda: self._lock(stack))
        own = self.world.on_main(lambda: checkpoint.newest(run.checkpoints))
        if own is not None:
            self._restore(own)
            if self.world.is_main:
                logger.info("continuing from %s (step %d of %d)", own, self.position.step, self.total_steps)
        self.world.on_main(lambda: self._begin_to_write(stack, anew=own is None))
        self.quarantine = self._quarantine()
        stack.callback(self.saver.close)

    def _restore(self, path: Path) -> None:
        """Become what was saved in ``path``, on all ranks or on none."""

        def load() -> None:
            self.engine.load(path, self._averages())
            self.registry.load_state_dict(checkpoint.read_loop_state(path))

        self.saver.wait()
        self.world.together(load)

    def _averages(self) -> Mapping[str, torch.Tensor]:
        return {} if self.ema is None else self.ema.averages

    def _begin_to_write(self, stack: ExitStack, anew: bool) -> None:
        if anew:  # as the log does; another data set may have filled the list before the first checkpoint
            self.run.quarantine.unlink(missing_ok=True)
        self._quarantine().admit(self.dataset.bad)
        self.run.record(self.config, self.world)
        self.journal.open(self.run, self.position.step, stack)
        for judge in self.judges:
            judge.restore(self.run.read_log())

    def _initial_checkpoint(self) -> Path | None:
        """What ``init`` names, unless the run has a checkpoint of its own: one command line starts and restarts."""
        if self.config.init is None or checkpoint.committed(self.run.checkpoints):
            return None
        file = Path(self.config.init)
        return file if file.suffix == SUFFIX and file.is_file() else checkpoint.resolve(file, "init")

    def _quarantine(self) -> Quarantine:
        return Quarantine(self.run.quarantine, len(self.dataset), self.config.data.max_bad_percent)

    def _lock(self, stack: ExitStack) -> None:
        stack.enter_context(only_run_in(self.run.create()))

    def play(self) -> None:
        """The whole run."""
        device, stop = self.engine.device, self.total_steps
        self.first_step = self.position.step + 1
        pin, upload = device.type == "cuda", Uploader(device)
        world, config = self.world, self.config
        ranks = world.rank, world.size, world.local_rank, world.local_size
        ahead = fetch_ahead(self.dataset, config.batch_size, config.seed, *ranks)
        loader = make_loader(self.batches, self.position.step, stop, config.workers, pin, self.quarantine, ahead)
        self.engine.module.train()
        rehearsed = not self.engine.rehearses
        for batch in self.journal.clock.waiting(loader):
            if not rehearsed:
                self._forward_backward(upload(batch))
                self.engine.discard()
                rehearsed = True
            losses, rates = self._forward_backward(upload(batch))
            result = self._update()
            self._observe(batch, losses, rates, result)
            self.position.step += 1
            if self.position.step % self.steps_per_epoch == 0:
                self._judge()
            if self.position.step % self.config.checkpoint_every == 0 or self.position.step == stop:
                self._persist(batch)
        self.saver.wait()
        self._note_saved()

    def _forward_backward(self, batch: Batch) -> tuple[Losses, torch.Tensor]:
        """Accumulate gradients of one step; losses and rates are means over its micro-batches."""
        epoch, parts = self.position.step // self.steps_per_epoch, self.config.engine.accumulation
        seen: list[Losses] = []
        rates = []
        for index, micro in enumerate(batch.split(parts)):
            prepared = self.prepare(micro, epoch)
            with self.engine.micro_batch(last=index + 1 == parts):
                losses = self.engine.module(*prepared.inputs)
                self.engine.backward(losses.total / parts)
            seen.append(losses)
            rates.append(measured_rates(prepared.masked_views))
        return mean_losses(seen), torch.stack(rates).mean(dim=0)

    def _update(self) -> StepResult:
        """One optimizer step, and one of the average behind it."""
        result = self.engine.step(self._lr(self.position.step), self.config.optim.weight_decay)
        if self.ema is not None:
            self.ema.update()
        return result

    def _observe(self, batch: Batch, losses: Losses, rates: torch.Tensor, result: StepResult) -> None:
        """Queue this step's numbers and take in those of the step before."""
        self._note_saved()
        self._settle()
        step, alarm = self.position.step + 1, self.saver.failed
        self.pending = PendingStep(step, batch.sample_ids, losses, rates, result, self.world, alarm)

    def _settle(self) -> None:
        """Take in the pending step: the guard sees it, then the journal."""
        if self.pending is not None:
            step, numbers, alarm = self.pending.step, self.pending.read(), self.pending.alarm
            self.pending = None
            if alarm:
                self.saver.wait()  # which raises, on every rank
            if step == self.first_step:
                self.world.expect_steps(timedelta(minutes=self.config.engine.step_timeout))
            self.journal.take_in(step, numbers, self._lr(step - 1))

    def _note_saved(self) -> None:
        saved = self.saver.finished()
        if saved is not None:
            self.journal.saved(saved.seconds)

    def _judge(self) -> None:
        """Let every judge look at the encoder, and log what it says."""
        if not self.judges:
            return
        self._settle()
        step = self.position.step

        def hear(encoder: nn.Module) -> None:
            for judge in self.judges:
                verdict = judge(encoder, step, step / self.steps_per_epoch)
                if verdict is not None:
                    self.journal.note(step, verdict)

        with self.engine.gathered() as objective:
            self.world.on_main(lambda: None if objective is None else hear(objective.model.encoder))

    def _persist(self, batch: Batch) -> None:
        """Commit a checkpoint and refresh the pictures."""
        self._settle()  # a step that was not finite must stop the run before it reaches the disk
        self.world.on_main(self.journal.sync)
        files = {
            checkpoint.LOOP_STATE: checkpoint.pack_loop_state(self.registry.state_dict()),
            checkpoint.CONFIG: to_yaml(self.config).encode(),
        }
        stalled = self.saver.save(self.position.step, lambda draft: self.engine.save(draft, self._averages()), files)
        self.journal.stalled(stalled)
        with self.engine.gathered() as objective, self.engine.micro_batch(last=False):
            self.world.on_main(lambda: None if objective is None else self._show(batch, objective))

    def _show(self, batch: Batch, objective: Objective) -> None:
        """Refresh the pictures. A run does not end for want of them."""
        step, shown = self.position.step, Batch(*(field[:SHOWN_IMAGES] for field in batch))
        prepared = self.prepare(shown.to(self.engine.device), (step - 1) // self.steps_per_epoch)
        try:
            self.journal.show(step, write_pictures(self.run, objective, prepared, self.prepare.tokenizer))
        except OSError as error:
            logger.warning("no pictures at step %d: %s", step, error)

    def _lr(self, step: int) -> float:
        return cosine(
            step, total=self.total_steps, warmup=self.warmup_steps, peak=self.peak_lr, floor=self.config.optim.min_lr
        )
