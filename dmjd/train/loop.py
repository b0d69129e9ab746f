"""Pre-training: fetch, forward and backward, update, observe, persist, judge."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
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
from dmjd.models.objective import Losses, mean_losses
from dmjd.parallel.build import build_engine, select_device
from dmjd.parallel.engine import StepResult
from dmjd.parallel.single import load_strictly, read_model
from dmjd.parallel.world import World, join_world
from dmjd.targets import TeacherTarget
from dmjd.train import checkpoint
from dmjd.train.build import build_mask_spec, build_objective, build_schedule, build_tokenizer, token_grid
from dmjd.train.ema import EncoderEma
from dmjd.train.guard import PendingStep
from dmjd.train.journal import Journal
from dmjd.train.lock import only_run_in
from dmjd.train.preparation import Preparation
from dmjd.train.preview import SHOWN_IMAGES, write_pictures
from dmjd.train.run_folder import RunFolder
from dmjd.train.state import DataIdentity, Position, RandomState, Registry
from dmjd.train.teacher import EmaTeacher
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
    world = join_world(select_device(config.engine.device), config.engine.name)
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
        self.engine = build_engine(objective, config.engine, config.optim, world)
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
            jitter=data.jitter,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total_steps = config.epochs * self.steps_per_epoch
        self.schedule = build_schedule(config, spec, grid, self.steps_per_epoch)

        encoder = self.engine.objective.model.encoder
        self.position = Position()
        self.journal = Journal(config, self.total_steps, self.steps_per_epoch)
        self.random = RandomState(config.seed, world)
        self.ema = EncoderEma(encoder, config.ema_decay) if config.ema_decay is not None else None
        if self.ema is not None and isinstance(tokenizer, TeacherTarget):
            tokenizer.teacher = EmaTeacher(encoder, self.ema, config.target.layers)
        self.registry = Registry()
        self.registry.add("position", self.position)
        self.registry.add("journal", self.journal)
        self.registry.add("random", self.random)
        if isinstance(self.dataset, ShardDataset):
            self.registry.add("data", DataIdentity(self.dataset.fingerprint))
        if self.ema is not None:
            self.registry.add("ema", self.ema)
        self.registry.check_complete(self)
        self.pending: PendingStep | None = None

    def enter(self, stack: ExitStack) -> None:
        """Take the run folder: lock it, continue from its newest checkpoint, begin to write."""
        run = self.run
        self.world.on_main(lambda: self._lock(stack))
        own = self.world.on_main(lambda: checkpoint.newest(run.checkpoints))
        if own is not None:
            self.engine.load(own)
            state = checkpoint.read_loop_state(own)
            self.world.together(lambda: self.registry.load_state_dict(state))
            if self.world.is_main:
                logger.info("continuing from %s (step %d of %d)", own, self.position.step, self.total_steps)
        self.world.on_main(lambda: self._begin_to_write(stack, anew=own is None))
        self.quarantine = self._quarantine()

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
        return checkpoint.resolve(Path(self.config.init), "init")

    def _quarantine(self) -> Quarantine:
        return Quarantine(self.run.quarantine, len(self.dataset), self.config.data.max_bad_percent)

    def _lock(self, stack: ExitStack) -> None:
        stack.enter_context(only_run_in(self.run.create()))

    def play(self) -> None:
        """The whole run."""
        device, stop = self.engine.device, self.total_steps
        pin, upload = device.type == "cuda", Uploader(device)
        world, config = self.world, self.config
        ranks = world.rank, world.size, world.local_rank, world.local_size
        ahead = fetch_ahead(self.dataset, config.batch_size, config.seed, *ranks)
        loader = make_loader(self.batches, self.position.step, stop, config.workers, pin, self.quarantine, ahead)
        self.engine.module.train()
        rehearsed = self.world.size == 1
        for batch in self.journal.clock.waiting(loader):
            if not rehearsed:
                self._forward_backward(upload(batch))
                self.engine.discard()
                # DDP lays its buckets out anew after the first backward, and the layout decides in which order three or
                # more ranks are added. From here on it is the same in every launch.
                rehearsed = True
            losses, rates = self._forward_backward(upload(batch))
            result = self._update()
            self._observe(batch, losses, rates, result)
            self.position.step += 1
            if self.position.step % self.steps_per_epoch == 0:
                self._judge()
            if self.position.step % self.config.checkpoint_every == 0 or self.position.step == stop:
                self._persist(batch)

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
        self._settle()
        self.pending = PendingStep(self.position.step + 1, batch.sample_ids, losses, rates, result, self.world)

    def _settle(self) -> None:
        """Take in the pending step: the guard sees it, then the journal."""
        if self.pending is not None:
            step, numbers = self.pending.step, self.pending.read()
            self.pending = None
            self.journal.take_in(step, numbers, self._lr(step - 1))

    def _judge(self) -> None:
        """Let every judge look at the encoder, and log what it says."""
        if not self.judges:
            return
        self._settle()
        step = self.position.step

        def hear() -> None:
            for judge in self.judges:
                verdict = judge(self.engine.objective.model.encoder, step, step / self.steps_per_epoch)
                if verdict is not None:
                    self.journal.note(step, verdict)

        self.world.on_main(hear)

    def _persist(self, batch: Batch) -> None:
        """Commit a checkpoint and refresh the pictures."""
        self._settle()  # a step that was not finite must stop the run before it reaches the disk
        self.world.on_main(self.journal.sync)
        state = self.registry.state_dict()
        step = self.position.step

        def write(folder: Path) -> None:
            self.engine.save(folder)
            checkpoint.write_loop_state(folder, state)
            (folder / checkpoint.CONFIG).write_text(to_yaml(self.config))

        def commit() -> None:
            keep, every = self.config.keep_checkpoints, self.config.keep_every
            checkpoint.commit(self.run.checkpoints, step, write, keep=keep, keep_every=every)

        self.world.on_main(commit)
        self.world.on_main(lambda: self._show(batch))

    def _show(self, batch: Batch) -> None:
        """Refresh the pictures. A run does not end for want of them."""
        step, shown = self.position.step, batch.map(lambda field: field[:SHOWN_IMAGES])
        prepared = self.prepare(shown.to(self.engine.device), (step - 1) // self.steps_per_epoch)
        try:
            self.journal.show(step, write_pictures(self.run, self.engine, prepared, self.prepare.tokenizer))
        except OSError as error:
            logger.warning("no pictures at step %d: %s", step, error)

    def _lr(self, step: int) -> float:
        return self.schedule(step)
