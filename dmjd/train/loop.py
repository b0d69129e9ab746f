"""Training: next batch, forward, backward, optimizer step, log, evaluate, checkpoint. See Trainer.train_steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from dmjd.builders import build_schedule, check_data_timeout
from dmjd.builders.auto import resolve_engine
from dmjd.builders.recipe import apply_recipe
from dmjd.config import DetectConfig, DownstreamConfig, FinetuneConfig, PretrainConfig, SegmentConfig, TrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import resolve_auto
from dmjd.errors import Alarm, ConfigError, StoppedBefore, UserError
from dmjd.parallel.build import select_device
from dmjd.parallel.elastic import same_micro_batch
from dmjd.parallel.engines import AUTO
from dmjd.parallel.environment import (
    collect_as_usual,
    dismiss_compile_workers,
    prepare_environment,
    prepared_meanwhile,
)
from dmjd.parallel.world import World, join_world
from dmjd.runs.checkpoint import step_of
from dmjd.runs.exit_record import ExitRecord
from dmjd.runs.folder import RunFolder
from dmjd.runs.lock import RunLock
from dmjd.runs.saver import Saver
from dmjd.train.data_pipeline import DataPipeline, Uploader
from dmjd.train.guard import Guard, PendingStep
from dmjd.train.journal import Journal
from dmjd.train.out_of_memory import explain_out_of_memory
from dmjd.train.pretraining import Callbacks, Pretraining
from dmjd.train.preview import PictureThread, write_pictures
from dmjd.train.profiler import Profiler, StepRange
from dmjd.train.state import Position, RandomState, Registry
from dmjd.train.stop import SIGNALS, Requests, deadline_of
from dmjd.train.summary import end_detail, start_lines
from dmjd.train.task import Task
from dmjd.train.throughput import Throughput
from dmjd.train.trackers import check_packages

logger = logging.getLogger("dmjd")


Config = TypeVar("Config", bound=TrainConfig)
Resolve = Callable[[Any, RunFolder, World], Any]
Build = Callable[[Any, World, Path | None], Task]


def resolve_pretraining(config: PretrainConfig, run: RunFolder, world: World) -> PretrainConfig:
    """``config`` with what its recipe sets, by the images and the device."""
    return apply_recipe(config, world.device, world.size)


def pretrain(config: PretrainConfig, callbacks: Callbacks = ()) -> RunFolder:
    """:func:`train` of pre-training.

    Args:
        callbacks: or a function that makes them from the configuration that the run uses: see :meth:`RunFolder.check`
            and :func:`~dmjd.builders.recipe.apply_recipe`.
    """
    return train(config, resolve_pretraining, partial(Pretraining, callbacks=callbacks))


def finetune(config: FinetuneConfig) -> RunFolder:
    """:func:`train` of fine-tuning."""
    return train(config, *downstream_task(config))


def segment(config: SegmentConfig) -> RunFolder:
    """:func:`train` of segmentation."""
    return train(config, *downstream_task(config))


def detect(config: DetectConfig) -> RunFolder:
    """:func:`train` of detection."""
    return train(config, *downstream_task(config))


def downstream_task(config: DownstreamConfig) -> tuple[Resolve, Build]:
    """The arguments of :func:`train` for ``config``. Raises ConfigError if a package that the task needs is not
    installed."""
    if isinstance(config, SegmentConfig):
        _check_installed("segment", "transformers")
        from dmjd.train import dense, segmentation

        return dense.resolve, segmentation.Segmenting
    if isinstance(config, DetectConfig):
        _check_installed("detect", "torchvision", "faster_coco_eval")
        from dmjd.train import dense, detection

        return dense.resolve, detection.Detecting
    from dmjd.train import finetuning

    return finetuning.resolve, finetuning.Finetuning


def _check_installed(command: str, *packages: str) -> None:
    for name in packages:
        if find_spec(name) is None:
            raise ConfigError(f"dmjd {command} needs {name.replace('_', '-')}; pip install 'dmjd[dense]'")


def train(
    config: Config,
    resolve: Callable[[Config, RunFolder, World], Config],
    build: Callable[[Config, World, Path | None], Task],
) -> RunFolder:
    """Train ``config`` from the newest checkpoint in its run folder to the end, or until the run is asked to stop.

    STOP_REASON in the run folder says which.

    Args:
        resolve: sets what follows from images, device and initial weights; called on rank 0, at the first start alone.
        build: makes the task from the resolved configuration and the initial weights.

    Raises:
        UserError: before training, if the configuration, the data or the run folder are not valid.
        Diverged: if there are more bad steps than ``config.guard`` allows.
    """
    run = RunFolder(Path(config.run))
    prepare_environment(run.path)
    world = join_world(select_device(config.engine.device), config.engine, lambda: run.batch_size(config))
    config = resolved(config, run, world, resolve)
    with ExitStack() as stack:
        stack.callback(dismiss_compile_workers)
        trainer = Trainer(config, run, world, build)
        trainer.start(stack)
        with explain_out_of_memory(config, run.path, world):
            trainer.train()
        trainer.engine.close()
    world.close()
    return run


def resolved(
    config: Config, run: RunFolder, world: World, resolve: Callable[[Config, RunFolder, World], Config]
) -> Config:
    """The configuration that the run uses: the stored one in a folder with checkpoints, else after all rules.
    Collective."""

    def act() -> Config:
        checked = run.check(config)
        checked = replace(checked, data=resolve_auto(checked.data))
        checked = checked if run.has_checkpoint else resolve(checked, run, world)
        if checked.engine.name == AUTO:
            return resolve_engine(checked, world, run.engine_before)
        engine = same_micro_batch(checked.engine, checked.batch_size, world.full_size, world.size)
        return replace(checked, engine=engine)

    return world.on_main(act)


class Trainer:
    """The objects of one run. Configuration errors are raised here, before the run folder is written."""

    def __init__(
        self, config: Config, run: RunFolder, world: World, build: Callable[[Config, World, Path | None], Task]
    ) -> None:
        self.config, self.run, self.world = config, run, world
        deadline = deadline_of(config.time_budget, config.time_margin)
        self.requests = Requests(run.path, world, deadline, config.checkpoint_minutes)
        check_packages(tensorboard=config.tensorboard, wandb_project=config.wandb)
        check_data_timeout(config, world.size)
        self.initial = world.on_main(lambda: run.initial_weights(config.init))
        with prepared_meanwhile(world.device, config.engine.compile != "none", SIGNALS):
            self.task = build(config, world, Path(self.initial["init_path"]) if self.initial else None)
        self.step, self.engine = self.task.step, self.task.step.engine
        if self.step.began_from and world.is_main:
            logger.info("beginning from %s", self.step.began_from)
        resumed = world.on_main(lambda: run.has_checkpoint)
        self.data = DataPipeline(config, run.quarantine, world, resumed, self.task.augment)
        world.all_or_none(lambda: self.task.open(self.data.source, run))
        self.upload = Uploader(self.engine.device)
        self.steps_per_epoch = self.data.steps_per_epoch
        self.total_steps = config.epochs * self.steps_per_epoch
        self.schedule = build_schedule(config, self.task.peak_lr, self.steps_per_epoch)
        warmup = config.optim.warmup_epochs
        if world.is_main and warmup is not None and warmup >= config.epochs:
            message = "optim.warmup_epochs=%g is not below epochs=%d: the learning rate does not reach its peak"
            logger.warning(message, warmup, config.epochs)

        self.lock = RunLock(run.path, world.cap_timeout(config.lock_wait))
        self.saver = Saver(
            run.checkpoints,
            world,
            keep=config.keep_checkpoints,
            keep_every=config.keep_every,
            asynchronous=config.checkpoint_async,
        )
        window = None if config.profile is None else StepRange.parse(config.profile, self.total_steps)
        self.profiler = Profiler(window if world.is_main or config.profile_ranks == "all" else None, run.path, world)
        self.position = Position()
        throughput = partial(Throughput.of, self.task.views, self.task.flops_per_image, world)
        self.journal = Journal(config, self.total_steps, self.steps_per_epoch, world, throughput)
        self.clock = self.journal.clock
        self.pictures = PictureThread(self.journal.log_pictures)
        self.exit_record = ExitRecord(run.stop_reason, lambda: self.position.step, self.total_steps, world.rank)
        self.random = RandomState(config.seed, world)
        self.guard = Guard(config.guard, run.guard, world)
        self.registry = Registry()
        self.registry.add("position", self.position)
        self.registry.add("journal", self.journal)
        self.registry.add("random", self.random)
        self.registry.add("guard", self.guard)
        if self.data.identity is not None:
            self.registry.add("data", self.data.identity)
        for name, part in self.task.parts.items():
            self.registry.add(name, part)
        self.registry.check_complete(self)
        self.pending: PendingStep | None = None  # its numbers are read one step later
        self.rehearse = self.engine.rehearses
        self.first_step_done = False

    # Start and end of a launch

    def start(self, stack: ExitStack) -> None:
        """Lock the run folder, load the newest checkpoint and open the logs; ``stack`` closes them. Collective."""
        self.world.on_main(lambda: self._lock_folder(stack))
        stack.callback(self.pictures.close)  # before the lock is released
        stack.callback(self.journal.close)
        stack.enter_context(self.requests)
        newest = self.saver.newest()
        if newest is not None:
            self.load_checkpoint(newest)
            if self.world.is_main:
                logger.info("continuing from %s (step %d of %d)", newest, self.position.step, self.total_steps)
        self.engine.prepare_save(self.step.averages)  # beside compilation
        if self.world.is_main:
            for line in start_lines(self.config, self.data, self.task, self.world):
                logger.info("%s", line)
        stack.enter_context(self.exit_record)
        self.world.on_main(lambda: self._prepare_folder(is_new=newest is None))
        self.world.on_main(self._open_logs)
        stack.push(self.saver.close)
        stack.enter_context(self.profiler)
        stack.enter_context(self.journal.heartbeat(self.run, lambda: self.position.step))

    def _lock_folder(self, stack: ExitStack) -> None:
        self.run.create()
        stack.enter_context(self.lock)

    def _prepare_folder(self, is_new: bool) -> None:
        """Remove what an earlier launch left, and record this one."""
        self.run.stop_reason.unlink(missing_ok=True)
        if is_new:  # a launch that wrote no checkpoint may have read another data set
            self.run.quarantine.unlink(missing_ok=True)
            self.run.guard.unlink(missing_ok=True)
        self.data.list_images(is_new)
        self.run.record(self.config, self.world, self.initial, self.engine.settings)
        self.task.record(self.run)

    def _open_logs(self) -> None:
        """Open the logs, without the rows of steps that are repeated, and restore the evaluations from the others."""
        self.journal.open(self.run, self.position.step)
        self.task.restore(self.run)

    def train(self) -> None:
        """Train to the end of the run or until it is asked to stop, and write the exit record."""
        self.engine.module.train()
        while True:
            try:
                self.train_steps()
                break
            except Alarm as alarm:
                self.roll_back(alarm)
        self.saver.wait()
        self.pictures.collect(wait=self.requests.reason is None)
        if self.position.step == self.total_steps and self.position.evaluated:
            if self.world.is_main:  # the data is read again, for what can be done with the run
                result, advice = self.task.finish(self.run)
                detail = ", ".join(filter(None, (end_detail(self.run, self.total_steps), result)))
                self.exit_record.write("finished", detail, advice)
        else:
            self.exit_record.write(*self.requests.stopping())

    # Training

    def train_steps(self) -> None:
        """Train from the current position on. Raises Alarm if the run has to roll back."""
        try:
            if not self.position.evaluated:  # a request to stop ended the evaluation of the last epoch
                self.evaluate()
                if self.is_checkpoint_due():  # that of this step has no scores
                    self.save_checkpoint()
            with closing(self.data.batches(self.position, self.total_steps, self.requests)) as batches:
                for batch in self.clock.waiting(batches):
                    step = self.position.step + 1
                    epoch = self.position.batch(self.position.step) // self.steps_per_epoch
                    inputs = self.upload(batch)
                    if self.rehearse:  # see Engine.rehearses
                        self.task.forward_backward(inputs, epoch)
                        self.engine.discard()
                        self.rehearse = False
                    self.profiler.before(step)
                    values = self.task.forward_backward(inputs, epoch, skip=self.requests.lacks_batch)
                    self.clock.enter("step")
                    result = self.step.update(self.schedule(step - 1))
                    self.log_finished()
                    requests = self.requests.asks(step)
                    self.pending = PendingStep(step, batch.sample_ids, values, result, requests, self.world)
                    self.position.step = step
                    self.clock.mark()
                    if step % self.steps_per_epoch == 0:
                        self.evaluate()
                    if self.is_checkpoint_due():
                        self.save_checkpoint()
                        if self.requests.reason is None:  # a run that stops does not wait for pictures
                            self.draw_pictures(inputs, epoch)
                    if self.requests.reason is not None:
                        return
        except StoppedBefore as stopped:
            self.save_before(stopped.step)

    def log_finished(self) -> None:
        """Log the save, the pictures and the numbers of the step before, if they are done."""
        seconds = self.saver.finished()
        if seconds is not None:
            self.journal.save_seconds = seconds
        self.pictures.collect()
        self.read_pending()
        failure = self.saver.failure()
        if failure is not None:
            self.requests.fail(failure)

    def read_pending(self) -> None:
        """Read the numbers of the pending step: the requests of all ranks, the guard, the log, in this order."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        reading, step = pending.read(), pending.step
        self.requests.agree(step, reading.asked)
        if not self.first_step_done:
            self.first_step_done = True
            collect_as_usual()
            self.world.expect_steps(timedelta(minutes=self.config.engine.step_timeout))
        self.guard.check(step, self.position.batch(step - 1), pending.sample_ids, reading)
        try:
            self.journal.log_step(step, reading.numbers, self.schedule(step - 1))
        except UserError as error:  # raised on rank 0 alone; the other ranks are about to wait for it
            self.requests.fail(error)

    def evaluate(self) -> None:
        """Evaluate at the end of an epoch and log the scores: all, or none if the run is asked to stop meanwhile; then
        the next launch begins with the evaluation. Collective."""
        step = self.position.step
        if self.task.evaluates(step // self.steps_per_epoch):
            self.read_pending()
            self.clock.enter("evaluate")
            self.position.evaluated = False
            rows = self.task.evaluate(step, step / self.steps_per_epoch)
            if rows is None:
                raise StoppedBefore(step + 1)
            self.world.on_main(lambda: self.journal.log_rows(step, rows))
        self.position.evaluated = True

    # Checkpoints

    def is_checkpoint_due(self) -> bool:
        step = self.position.step
        planned = step % self.config.checkpoint_every == 0 or step == self.total_steps
        planned = planned or (self.task.best is not None and self.task.best.step == step)
        return planned or self.requests.saving or self.requests.save_due or self.requests.reason is not None

    def save_checkpoint(self) -> None:
        """Save the state after the steps done. Collective."""
        self.clock.enter("checkpoint")
        self.read_pending()  # a bad step must stop the run, or roll it back, before it is saved
        self.requests.compare()
        self.world.on_main(self.lock.check)
        self.world.on_main(self.journal.sync)
        self.journal.stall_seconds += self.saver.save(
            self.position.step,
            lambda draft: self.engine.save(draft, self.step.averages),
            {**self.registry.files(self.config), **self.task.files()},
            spare=int(self.guard.in_doubt),  # one from before the bad steps has to stay
            best=() if self.task.best is None else self.task.best.history,
        )
        self.requests.restart_timer()
        if self.requests.saving or self.requests.reason is not None:
            self.saver.wait()
            self.requests.saved()

    def save_before(self, step: int) -> None:
        """Stop before ``step``: steps from it on changed nothing. Save the state unless it is on disk. Collective."""
        self.position.step = step - 1
        self.requests.stop_now()
        self.saver.wait()
        newest = self.saver.newest()
        if self.position.step > (0 if newest is None else step_of(newest)):
            self.save_checkpoint()

    def load_checkpoint(self, path: Path) -> None:
        """Load the state in ``path``, on all ranks or on none. Collective."""

        def load() -> None:
            self.engine.load(path, self.step.averages)
            self.registry.restore(path)

        self.saver.wait()
        self.world.all_or_none(load)

    def roll_back(self, alarm: Alarm) -> None:
        """Load a checkpoint from before the bad steps, and skip the batches that led to them. Collective."""
        self.pending = None
        self.pictures.collect(wait=True)  # they read the log, which is about to be truncated
        if not self.guard.may_roll_back:
            self.guard.stop(alarm, f"after {self.guard.rollbacks} rollback(s)")
        self.saver.wait()
        begin = max(0, alarm.first - 1 - self.config.guard.margin)
        newest = self.saver.newest(until=begin) or self.saver.newest(until=alarm.first - 1)
        if newest is None:
            self.guard.stop(alarm, "because there is no checkpoint from before them")
        begin = max(begin, step_of(newest))
        skipped = self.position.batch(begin), self.position.batch(alarm.last - 1) + 1
        windows, rollbacks = self.position.with_skipped(*skipped), self.guard.rollbacks + 1
        self.journal.close()
        self.load_checkpoint(newest)
        self.saver.drop_after(self.position.step)
        self.position.passed_over = windows  # not in the checkpoint, as the number of rollbacks
        self.guard.roll_back(alarm, rollbacks, self.position.step, skipped)
        self.world.on_main(self._open_logs)

    # Pictures

    def draw_pictures(self, inputs: Batch, epoch: int) -> None:
        """Predict a few samples of ``inputs`` and draw them on a thread. Collective."""
        samples = self.task.samples(inputs, epoch)
        if samples is not None:
            # A loader worker that is forked while the thread imports a module would wait for it without end.
            import_module("dmjd.train.pictures")
            step = self.position.step
            self.pictures.submit(step, partial(write_pictures, self.run, step, *samples))
