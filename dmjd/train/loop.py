"""Pre-training: fetch, forward and backward, update, observe, persist, judge."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from dmjd.builders import build_schedule, check_data_timeout
from dmjd.builders.step import build_step
from dmjd.compose import to_yaml
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import resolve_auto
from dmjd.data.detour import passing_over
from dmjd.errors import Alarm, StoppedBefore, UserError
from dmjd.masking import measured_rates
from dmjd.models.objective import Losses, Objective, mean_losses
from dmjd.parallel.build import select_device
from dmjd.parallel.engine import StepResult
from dmjd.parallel.environment import dismiss_compile_workers, prepare_environment
from dmjd.parallel.world import World, join_world
from dmjd.runs import checkpoint
from dmjd.runs.exit_record import ExitRecord
from dmjd.runs.folder import RunFolder
from dmjd.runs.heartbeat import Heartbeat, forget_ranks
from dmjd.runs.lock import only_run_in
from dmjd.runs.paths import CONFIG
from dmjd.runs.saver import Saver
from dmjd.train.feed import Feed
from dmjd.train.guard import Guard, PendingStep, trapped
from dmjd.train.journal import Journal
from dmjd.train.judge import Judge, Jury, on_view
from dmjd.train.out_of_memory import explained
from dmjd.train.preview import SHOWN_IMAGES, predict, write_pictures
from dmjd.train.profiler import Profiler, Window
from dmjd.train.state import Position, RandomState, Registry
from dmjd.train.stop import Requests, deadline_of
from dmjd.train.trackers import check_packages
from dmjd.train.upload import Uploader

logger = logging.getLogger("dmjd")


def pretrain(config: PretrainConfig, judges: Sequence[Judge] = ()) -> RunFolder:
    """Run ``config`` to its end, or until it is asked to stop, from the newest checkpoint in its run folder.

    The run folder's STOP_REASON tells which it was.

    Raises:
        UserError: before any work, where the configuration, the data or the run folder do not allow it.
        Diverged: where more steps went wrong than ``config.guard`` allows.
    """
    run = RunFolder(Path(config.run))
    prepare_environment(run.path)
    world = join_world(select_device(config.engine.device), config.engine)
    config = replace(config, data=world.on_main(lambda: resolve_auto(config.data)))
    world.on_main(lambda: run.check(config))
    with ExitStack() as stack:
        stack.callback(dismiss_compile_workers)
        training = Pretraining(config, run, world, judges)
        training.enter(stack)
        with explained(config, run.path, world):
            training.play()
        training.engine.close()
    world.close()
    return run


class Pretraining:
    """One run's cast. What can be refused is refused while it is built, before the run folder is touched."""

    def __init__(self, config: PretrainConfig, run: RunFolder, world: World, judges: Sequence[Judge]) -> None:
        self.config, self.run, self.world = config, run, world
        self.requests = Requests(run.path, world, deadline_of(config.time_budget, config.time_margin))
        check_packages(tensorboard=config.tensorboard, wandb_project=config.wandb)
        check_data_timeout(config, world.size)
        self.initial = world.on_main(self._initial_weights)
        step = build_step(config, world, Path(self.initial["init_path"]) if self.initial else None)
        self.engine, self.prepare, self.ema = step.engine, step.prepare, step.ema
        if step.began_from and world.is_main:
            logger.info("beginning from %s", step.began_from)
        self.feed = Feed(config, run.quarantine, world)
        self.steps_per_epoch = self.feed.steps_per_epoch
        self.total_steps = config.epochs * self.steps_per_epoch
        self.schedule = build_schedule(config, self.prepare.mask_spec, self.prepare.grid, self.steps_per_epoch)
        if world.is_main and config.optim.warmup_epochs >= config.epochs:  # a preset's, of a run that was cut short
            message = "optim.warmup_epochs=%g is not below epochs=%d: the learning rate never comes to its highest"
            logger.warning(message, config.optim.warmup_epochs, config.epochs)

        self.saver = Saver(
            run.checkpoints,
            world,
            keep=config.keep_checkpoints,
            keep_every=config.keep_every,
            asynchronous=config.checkpoint_async,
        )
        window = None if config.profile is None else Window.parse(config.profile, self.total_steps)
        self.profiler = Profiler(window if world.is_main or config.profile_ranks == "all" else None, run.path, world)
        self.position = Position()
        self.journal = Journal(config, self.total_steps, self.steps_per_epoch, world)
        self.jury = Jury(judges, self.engine, self.journal, world)
        self.random = RandomState(config.seed, world)
        self.guard = Guard(config.guard, run.guard, world)
        self.registry = Registry()
        self.registry.add("position", self.position)
        self.registry.add("journal", self.journal)
        self.registry.add("random", self.random)
        self.registry.add("guard", self.guard)
        if self.feed.identity is not None:
            self.registry.add("data", self.feed.identity)
        self.registry.check_complete(self)
        self.pending: PendingStep | None = None
        self.picture_thread = ThreadPoolExecutor(1, "pictures")
        self.drawing: tuple[int, Future[dict[str, Path]]] | None = None

    def enter(self, stack: ExitStack) -> None:
        """Take the run folder: lock it, continue from its newest checkpoint, begin to write."""
        self.world.on_main(lambda: self._lock(stack))
        stack.callback(self.picture_thread.shutdown)  # waits: nothing is written after the lock is released
        self.writing = stack.enter_context(ExitStack())
        stack.enter_context(self.requests)
        own = self.world.on_main(lambda: checkpoint.newest(self.run.checkpoints))
        if own is not None:
            self._restore(own)
            if self.world.is_main:
                logger.info("continuing from %s (step %d of %d)", own, self.position.step, self.total_steps)
        exit_record = ExitRecord(self.run.stop_reason, lambda: self.position.step, self.total_steps, self.world.rank)
        self.exit_record = stack.enter_context(exit_record)
        self.world.on_main(lambda: self._settle_in(anew=own is None))
        self.world.on_main(self._begin_to_write)
        stack.push(self.saver.close)
        stack.enter_context(self.profiler)
        self._say_where(stack.enter_context(Heartbeat(self.run.path, self.world.rank)), stack)

    def _say_where(self, heartbeat: Heartbeat, stack: ExitStack) -> None:
        """From now on every phase that begins is a beat."""
        clock = self.journal.clock

        def beat(phase: str) -> None:
            heartbeat.beat(self.position.step, phase, clock.elapsed, clock.spent["lost"])

        clock.listener = beat
        beat("start")
        stack.callback(lambda: clock.enter("stop"))

    def _restore(self, path: Path) -> None:
        """Become what was saved in ``path``, on all ranks or on none."""

        def load() -> None:
            self.engine.load(path, self._averages())
            self.registry.restore(checkpoint.read_loop_state(path), path / checkpoint.LOOP_STATE)

        self.saver.wait()
        self.world.all_or_none(load)

    def _averages(self) -> Mapping[str, torch.Tensor]:
        return {} if self.ema is None else self.ema.averages

    def _settle_in(self, anew: bool) -> None:
        """Clear away what an earlier launch left, and record this one."""
        self.run.stop_reason.unlink(missing_ok=True)
        if anew:  # as the log does; another data set may have filled the list before the first checkpoint
            self.run.quarantine.unlink(missing_ok=True)
            self.run.guard.unlink(missing_ok=True)
        self.feed.admit_bad()
        self.run.record(self.config, self.world, self.initial)
        forget_ranks(self.run.path, self.world.size)

    def _begin_to_write(self) -> None:
        """Drop the rows of steps that will be done again, and let judges know of the others."""
        self.journal.open(self.run, self.position.step, self.writing)
        if self.jury:
            self.jury.restore(self.run.read_log())

    def _initial_weights(self) -> dict[str, str]:
        """What ``init`` names, unless the run has a checkpoint of its own: one command line starts and restarts."""
        if self.config.init is None or checkpoint.committed(self.run.checkpoints):
            return {}
        return self.run.initial_weights(self.config.init)

    def _lock(self, stack: ExitStack) -> None:
        held = only_run_in(self.run.create(), self.world.cap_timeout(self.config.lock_wait))
        self._check_folder = stack.enter_context(held)

    def play(self) -> None:
        """The whole run, from where it stands to its end or to where it is asked to stop."""
        self.engine.module.train()
        self.first_step = self.position.step + 1
        rehearsed = not self.engine.rehearses
        while True:
            try:
                self._play_on(rehearsed)
                break
            except Alarm as alarm:
                self._roll_back(alarm)
                rehearsed = True
        self.saver.wait()
        self._note_saved()
        self._note_pictures(wait=self.requests.reason is None)
        if self.position.step == self.total_steps and self.position.evaluated:
            self.exit_record.write("finished", "all steps are done")
        else:
            self.exit_record.write(*self.requests.stopping())

    def _play_on(self, rehearsed: bool) -> None:
        """Steps until the run ends or stops. Raises Alarm where it must go back."""
        try:
            if not self.position.evaluated:
                self._judge()
            self._take_steps(rehearsed)
        except StoppedBefore as stopped:
            self._stop_before(stopped.step)

    def _stop_before(self, step: int) -> None:
        """Save what all ranks have, unless it is on the disk: steps from ``step`` on have moved nothing."""
        self.position.step = step - 1
        self.requests.stop_now()
        self.saver.wait()
        saved = self.world.on_main(lambda: checkpoint.newest(self.run.checkpoints))
        if self.position.step > (0 if saved is None else checkpoint.step_of(saved)):
            self._persist(None)

    def _take_steps(self, rehearsed: bool) -> None:
        upload = Uploader(self.engine.device)
        with closing(self.feed.batches(self.position, self.total_steps, self.requests)) as batches:
            for batch in self.journal.clock.waiting(batches):
                if not rehearsed:
                    self._forward_backward(upload(batch))
                    self.engine.discard()
                    rehearsed = True
                self.profiler.before(self.position.step + 1)
                losses, rates = self._forward_backward(upload(batch))
                result = self._update()
                self._observe(batch, losses, rates, result)
                self.position.step += 1
                if self.position.step % self.steps_per_epoch == 0:
                    self._judge()
                if self._is_time_to_persist():
                    self._persist(batch)
                if self.requests.reason is not None:
                    return

    def _forward_backward(self, batch: Batch) -> tuple[Losses, torch.Tensor]:
        """Accumulate gradients of one step; losses and rates are means over its micro-batches."""
        epoch, parts = self._epoch(self.position.step), self.config.engine.grad_accum_steps
        seen: list[Losses] = []
        rates = []
        for index, micro in enumerate(batch.split(parts)):
            prepared = self.prepare(micro, epoch)
            with self.engine.micro_batch(last=index + 1 == parts):
                losses = self.engine.module(*prepared.inputs)
                # Without a batch the step is to move nothing, on any rank.
                total = losses.total * math.nan if self.requests.lacks_batch else losses.total
                self.engine.backward(trapped(total) / parts)
            seen.append(losses)
            rates.append(measured_rates(prepared.masked_views))
        return mean_losses(seen), torch.stack(rates).mean(dim=0)

    def _update(self) -> StepResult:
        """One optimizer step, and one of the average behind it."""
        self.journal.clock.enter("step")
        result = self.engine.step(self._lr(self.position.step), self.config.optim.weight_decay)
        if self.ema is not None:
            self.ema.update(result.applied)
        return result

    def _observe(self, batch: Batch, losses: Losses, rates: torch.Tensor, result: StepResult) -> None:
        """Queue this step's numbers and take in those of the step before."""
        self._note_saved()
        self._note_pictures()
        self._settle()
        failure = self.saver.failure()
        if failure is not None:
            self.requests.fail(failure)
        step = self.position.step + 1
        asks = self.requests.asks(step)
        self.pending = PendingStep(step, batch.sample_ids, losses, rates, result, asks, self.world)

    def _settle(self) -> None:
        """Take in the pending step: what ranks were asked for, then its numbers; the guard first, then the journal."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        reading, step = pending.read(), pending.step
        self.requests.agree(step, reading.asked)
        if step == self.first_step:
            self.world.expect_steps(timedelta(minutes=self.config.engine.step_timeout))
        self.guard.judge(step, self.position.batch(step - 1), pending.sample_ids, reading)
        try:
            self.journal.take_in(step, reading.numbers, self._lr(step - 1))
        except UserError as error:  # rank 0 alone writes, and the others are about to wait for it
            self.requests.fail(error)

    def _roll_back(self, alarm: Alarm) -> None:
        """Go back to a checkpoint from before the alarm, and pass over the batches that led to it."""
        self.pending = None
        self._note_pictures(wait=True)  # they read the log, which is about to be cut
        if not self.guard.may_roll_back:
            self.guard.give_up(alarm, f"after {self.guard.rollbacks} rollback(s)")
        self.saver.wait()
        begin = max(0, alarm.first - 1 - self.config.guard.margin)
        target = self.world.on_main(lambda: self._checkpoint_before(begin, alarm.first - 1))
        if target is None:
            self.guard.give_up(alarm, "for there is no checkpoint from before them to go back to")
        begin = max(begin, checkpoint.step_of(target))
        passed = self.position.batch(begin), self.position.batch(alarm.last - 1) + 1
        windows, rollbacks = passing_over(self.position.passed_over, *passed), self.guard.rollbacks + 1
        self.writing.close()
        self._restore(target)
        self.world.on_main(lambda: checkpoint.drop_after(self.run.checkpoints, self.position.step))
        # The checkpoint knows of neither, and of no rollback since.
        self.position.passed_over = windows
        self.guard.roll_back(alarm, rollbacks, self.position.step, passed)
        self.world.on_main(self._begin_to_write)

    def _checkpoint_before(self, begin: int, first: int) -> Path | None:
        """The newest checkpoint of at most ``begin`` steps or, failing that, of less than ``first``."""
        return checkpoint.newest(self.run.checkpoints, begin) or checkpoint.newest(self.run.checkpoints, first)

    def _note_saved(self) -> None:
        saved = self.saver.finished()
        if saved is not None:
            self.journal.saved(saved.seconds)

    def _judge(self) -> None:
        """Evaluate the epoch that has ended. A request to stop ends that too; the next launch begins with it."""
        if self.jury:
            self.journal.clock.enter("evaluate")
            self._settle()
            self.position.evaluated = False
            if not self.jury.judge(self.position.step, self.position.step / self.steps_per_epoch):
                raise StoppedBefore(self.position.step + 1)
        self.position.evaluated = True

    def _is_time_to_persist(self) -> bool:
        step = self.position.step
        planned = step % self.config.checkpoint_every == 0 or step == self.total_steps
        return planned or self.requests.saving or self.requests.reason is not None

    def _persist(self, batch: Batch | None) -> None:
        """Commit a checkpoint and refresh the pictures, which show ``batch``."""
        self.journal.clock.enter("checkpoint")
        self._settle()  # a step that went wrong must stop the run, or turn it back, before it reaches the disk
        self.requests.compare()
        self.world.on_main(lambda: self._check_folder())  # which no other rank has
        self.world.on_main(self.journal.sync)
        files = {
            checkpoint.LOOP_STATE: checkpoint.pack_loop_state(self.registry.state_dict()),
            CONFIG: to_yaml(self.config).encode(),
        }
        stalled = self.saver.save(
            self.position.step,
            lambda draft: self.engine.save(draft, self._averages()),
            files,
            spare=int(self.guard.in_doubt),  # so that there is one from before the steps that are in doubt
        )
        self.journal.stalled(stalled)
        if self.requests.saving or self.requests.reason is not None:
            self.saver.wait()
            self.requests.saved()
        if batch is not None and self.requests.reason is None:  # whoever asked it to stop will not wait for pictures
            with on_view(self.engine) as objective, self.engine.micro_batch(last=False):
                self.world.on_main(lambda: None if objective is None else self._show(batch, objective))

    def _show(self, batch: Batch, objective: Objective) -> None:
        """Predict the samples to be shown, and begin to draw them on a thread."""
        self._note_pictures(wait=True)
        step, shown = self.position.step, batch.map(lambda field: field[:SHOWN_IMAGES])
        prepared, tokenizer = self.prepare(shown.to(self.engine.device), self._epoch(step - 1)), self.prepare.tokenizer
        samples = predict(objective, prepared, tokenizer)
        self.drawing = step, self.picture_thread.submit(write_pictures, self.run, step, samples, tokenizer)

    def _note_pictures(self, wait: bool = False) -> None:
        """Pass the pictures to the trackers if they are drawn. A run does not end for want of them."""
        if self.drawing is None or not (wait or self.drawing[1].done()):
            return
        (step, drawing), self.drawing = self.drawing, None
        try:
            self.journal.show(step, drawing.result())
        except OSError as error:
            logger.warning("no pictures at step %d: %s", step, error)

    def _epoch(self, step: int) -> int:
        """The epoch of the batch that ``step`` reads, which keys its random draws."""
        return self.position.batch(step) // self.steps_per_epoch

    def _lr(self, step: int) -> float:
        return self.schedule(step)
