from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import dmjd.train.data_pipeline as data_pipeline
import dmjd.train.loop as loop
from dmjd.builders import build_mask_spec, build_objective, build_tokenizer
from dmjd.builders.preparation import Preparation, Prepared
from dmjd.cli import main
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches
from dmjd.errors import ConfigError, Diverged
from dmjd.ops.masks import draw_masks
from dmjd.parallel import store
from dmjd.parallel.single import SingleEngine
from dmjd.runs.checkpoint import newest, read_loop_state
from dmjd.runs.folder import RunFolder
from dmjd.runs.lock import RunLock
from dmjd.train.preview import write_pictures
from tests.compare import checkpoints, configure, pretrain, reason, rows, same

# On a machine with one core torch warns that two workers are many; they are what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Words = Callable[..., list[str]]
Same = Callable[..., None]

STEPS_PER_EPOCH, STEPS = 6, 12


def load(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Parameters, moments and averages by name."""
    return store.read(run / "checkpoints" / f"step-{step:08d}")


# What a run leaves


def test_the_log_has_its_columns_and_they_are_right(words: Words, no_pictures: None) -> None:
    run = pretrain(words("run", "optim.base_lr=1e-2", "optim.warmup_epochs=1", "optim.min_lr=1e-5"))
    log = rows(run)
    assert [row["step"] for row in log] == [5, 10, 12]
    assert checkpoints(run) == [4, 8, 12]
    assert set(log[0]) == {"step", "epoch", "loss", "mim", "vis", "grad_norm", "m_corr", "m_pred", "lr"}
    # Four blocks of 2 x 2 on the 4 x 4 grid: .6 hides three of them, and both views together all.
    peak = 1e-2 * (8 / 0.6) / 256
    for row in log:
        assert row["epoch"] == row["step"] / STEPS_PER_EPOCH
        assert row["loss"] == pytest.approx(row["mim"] + row["vis"], rel=1e-6)
        assert (row["m_corr"], row["m_pred"]) == (0.75, 1.0)
        done = row["step"] - 1
        turned = np.pi * (done - 6) / 6
        expected = peak * done / 6 if done < 6 else 1e-5 + (peak - 1e-5) * (1 + np.cos(turned)) / 2
        assert row["lr"] == pytest.approx(expected, rel=1e-9)
    timing = rows(run, "timing")
    assert [row["step"] for row in timing] == [5, 10, 12]
    assert all(row["images_per_second"] > 0 and 0 <= row["data_wait_percent"] <= 100 for row in timing)
    assert timing[0]["seconds"] < timing[1]["seconds"] < timing[2]["seconds"]


def test_training_goes_on_while_pictures_are_drawn(
    straight: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, drawn = threading.Event(), []
    draw, update = write_pictures, loop.Trainer.log_finished

    def drawing_waits(*arguments: Any) -> Any:
        assert begun.wait(10), "no step began meanwhile"
        drawn.append(draw(*arguments))
        return drawn[-1]

    def updating(training: loop.Trainer) -> Any:
        if training.position.step == 6:  # two steps after the first checkpoint
            begun.set()
        return update(training)

    monkeypatch.setattr(loop, "write_pictures", drawing_waits)
    monkeypatch.setattr(loop.Trainer, "log_finished", updating)
    run = pretrain(words("run"))
    assert len(drawn) == 3, "one for each checkpoint, the last too"
    assert {path.name for path in (run / "pictures").iterdir()} == {"views.png", "masks.png", "loss.png"}
    assert (run / "log.jsonl").read_bytes() == (straight / "log.jsonl").read_bytes()
    assert same(load(run), load(straight))


def test_pictures_that_cannot_be_written_cost_a_warning_and_other_errors_end_the_run(
    tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(run: RunFolder, step: int, *arguments: Any) -> Any:
        assert "dmjd.train.pictures" in sys.modules, "a worker that is forked during its import would wait for its lock"
        raise OSError(28, "No space left on device") if step == 4 else ZeroDivisionError("a mistake in drawing")

    monkeypatch.delitem(sys.modules, "dmjd.train.pictures", raising=False)
    monkeypatch.setattr(loop, "write_pictures", failing)
    with caplog.at_level(logging.WARNING, logger="dmjd"), pytest.raises(ZeroDivisionError, match="a mistake"):
        pretrain(words("run"))
    assert "no pictures at step 4: [Errno 28] No space left on device" in caplog.text
    assert reason(tmp_path / "run")["reason"] == "crashed"


def test_the_folder_stays_locked_until_pictures_are_drawn(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    held, update = [], loop.Trainer.log_finished

    def slow(run: RunFolder, step: int, *arguments: Any) -> Any:
        time.sleep(0.5)  # the run has failed by now
        with pytest.raises(ConfigError, match="in use"), RunLock(run.path):
            pass
        held.append(step)

    def failing(training: loop.Trainer) -> Any:
        if training.position.step == 4:
            raise ZeroDivisionError("a mistake in training")
        return update(training)

    monkeypatch.setattr(loop, "write_pictures", slow)
    monkeypatch.setattr(loop.Trainer, "log_finished", failing)
    with pytest.raises(ZeroDivisionError, match="a mistake in training"):
        pretrain(words("run"))
    assert held == [4]


@pytest.mark.parametrize("epochs", ["1.9", "2"])
def test_a_warm_up_as_long_as_the_run_is_said(
    epochs: str, words: Words, no_pictures: None, caplog: pytest.LogCaptureFixture
) -> None:
    pretrain(words("run", f"optim.warmup_epochs={epochs}"))
    assert ("optim.warmup_epochs=2 is not below epochs=2" in caplog.text) == (epochs == "2")


def test_a_window_is_the_mean_of_its_steps(straight: Path, words: Words, no_pictures: None) -> None:
    coarse, fine = rows(straight), rows(pretrain(words("fine", "log_every=1")))
    assert [row["step"] for row in fine] == list(range(1, STEPS + 1))
    for row, part in zip(coarse, (fine[:5], fine[5:10], fine[10:]), strict=True):
        for name in ("loss", "mim", "vis", "grad_norm"):
            assert row[name] == pytest.approx(np.mean([line[name] for line in part]), rel=1e-12)
        assert row["lr"] == part[-1]["lr"]


def test_a_method_without_a_visible_branch_logs_none(words: Words, no_pictures: None) -> None:
    log = rows(pretrain(words("run", "method=mae", "method.mim_weight=0.5")))
    assert "vis" not in log[0]
    assert log[0]["loss"] == pytest.approx(0.5 * log[0]["mim"], rel=1e-6)
    # Uniform masks at .75 with one view: 12 of 16 tokens.
    assert (log[0]["m_corr"], log[0]["m_pred"]) == (0.75, 0.75)


def test_training_learns(words: Words, no_pictures: None) -> None:
    log = rows(pretrain(words("run", "epochs=10", "optim.base_lr=5e-2")))
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]


def test_pictures_show_something(finished_run: Path) -> None:
    for name in ("views.png", "masks.png", "loss.png"):
        with Image.open(finished_run / "pictures" / name) as picture:
            assert min(picture.size) > 100
            assert len(set(picture.convert("L").tobytes())) > 10, "not a blank page"


# What a result does not depend on


@pytest.mark.parametrize("word", ["workers=2", "log_every=1", "keep_checkpoints=1", "checkpoint_minutes=1e-9"])
def test_orchestration_does_not_change_a_bit(straight: Path, words: Words, no_pictures: None, word: str) -> None:
    other = pretrain(words("other", word))
    assert same(load(straight), load(other))
    if word != "log_every=1":
        assert (straight / "log.jsonl").read_bytes() == (other / "log.jsonl").read_bytes()


def test_pictures_do_not_change_a_bit(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    often = ("epochs=1", "checkpoint_every=3")
    with_pictures = pretrain(words("with", *often))
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: None)
    without = pretrain(words("without", *often))
    assert same(load(with_pictures, 6), load(without, 6))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, of its tracing
@pytest.mark.parametrize("unit", [pytest.param("block", marks=pytest.mark.long), "model"])
def test_only_training_steps_are_compiled(words: Words, monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    class Scores:
        def on_epoch_end(self, encoder: nn.Module, step: int, epoch: float) -> dict[str, float]:
            with torch.no_grad():
                encoder(torch.zeros(2, 3, 16, 16))
            return {}

        def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
            pass

    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compile_(module, backend=backend, **options))
    torch._dynamo.reset()
    loop.pretrain(configure(words("compiled", f"engine.compile={unit}")), [Scores()])
    assert graphs
    assert all(graphs)


def test_another_seed_is_another_run(straight: Path, words: Words, no_pictures: None) -> None:
    other = pretrain(words("other", "seed=1"))
    name = "parameter/model.head.weight"
    assert not torch.equal(load(straight)[name], load(other)[name])


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_gives_the_step_of_the_whole_batch(words: Words, no_pictures: None, parts: int) -> None:
    # A large epsilon, since Adam otherwise turns the rounding noise of a gradient of zero into a full step.
    common = ("optim.eps=1e-2", "optim.base_lr=1e-1", "log_every=1")
    whole = pretrain(words("whole", *common))
    split = pretrain(words("split", *common, f"engine.grad_accum_steps={parts}"))
    for one, other in zip(rows(whole), rows(split), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    before, after, accumulated = (
        store.read_model(run / "checkpoints" / f"step-{step:08d}")
        for run, step in ((whole, 4), (whole, STEPS), (split, STEPS))
    )
    for name, value in after.items():
        assert torch.allclose(value, accumulated[name], rtol=0, atol=1e-6), name
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3, "the runs did move"


# Losses that are not finite, where none is tolerated; what is done about them otherwise: test_rollback.py

AT_ONCE = ("guard.max_skips=0", "guard.max_rollbacks=0")


def poison(monkeypatch: pytest.MonkeyPatch, config: PretrainConfig, step: int) -> list[int]:
    """Targets of one sample become NaN in ``step`` alone; the sample ids of that step."""
    batches = training_batches(config.data, build_dataset(config.data, "train"), config.batch_size, config.seed)
    ids = batches[step].sample_ids
    prepare = Preparation.__call__

    def poisoned(self: Preparation, batch: Batch, epoch: int) -> Prepared:
        prepared = prepare(self, batch, epoch)
        if epoch == step // STEPS_PER_EPOCH:
            prepared.targets[batch.sample_ids == ids[-1]] = float("nan")
        return prepared

    monkeypatch.setattr(Preparation, "__call__", poisoned)
    return ids.tolist()


@pytest.mark.parametrize(
    ("step", "last", "accumulation"),
    [(0, None, 1), (5, 4, 4), (7, 4, 1), (8, 8, 2), (11, 8, 1)],
    ids=["the first", "mid", "the one of a checkpoint", "the one after a checkpoint", "the last"],
)
def test_a_loss_that_is_not_finite_stops_the_run(
    assert_same_run: Same,
    straight: Path,
    words: Words,
    no_pictures: None,
    capsys: pytest.CaptureFixture[str],
    step: int,
    last: int | None,
    accumulation: int,
) -> None:
    command = words("run", f"engine.grad_accum_steps={accumulation}", *AT_ONCE)
    run = Path(configure(command).run)
    with pytest.MonkeyPatch.context() as patch:
        ids = poison(patch, configure(command), step)
        capsys.readouterr()
        code = main(["pretrain", *command])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert code == 1
    assert len(lines) == 1
    assert f"step {step + 1} " in lines[0]
    assert ", ".join(map(str, ids)) in lines[0]
    found = newest(run / "checkpoints")
    assert (found and read_loop_state(found)["position"]["step"]) == last
    assert all(path.suffix != ".tmp" for path in (run / "checkpoints").glob("*"))
    if accumulation == 1:
        # The cause is mended and the run goes on: nothing of the bad step has reached the disk.
        assert_same_run(straight, pretrain(command))


def test_a_bad_step_moves_neither_parameters_nor_moments(words: Words, no_pictures: None) -> None:
    config = configure(words("run", *AT_ONCE))
    engine: list[SingleEngine] = []
    states: list[dict[str, Tensor]] = []
    step = SingleEngine.step

    def watched(self: SingleEngine, lr: float, weight_decay: float) -> Any:
        engine[:] = [self]
        result = step(self, lr, weight_decay)
        states.append({name: value.clone() for name, value in self.module.state_dict().items()})
        return result

    with pytest.MonkeyPatch.context() as patch:
        poison(patch, config, 5)
        patch.setattr(SingleEngine, "step", watched)
        with pytest.raises(Diverged):
            loop.pretrain(config)
    assert same(states[5], states[4])
    assert all(bool(value.isfinite().all()) for value in engine[0].module.state_dict().values())


def test_parameters_that_are_not_finite_stop_the_run_at_once(words: Words, no_pictures: None) -> None:
    def spoiled(config: PretrainConfig, target_dim: int) -> Any:
        objective = build_objective(config, target_dim)
        with torch.no_grad():
            objective.get_parameter("model.head.bias")[0] = float("inf")
        return objective

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmjd.builders.step.build_objective", spoiled)
        with pytest.raises(Diverged, match="step 1 "):
            pretrain(words("run", *AT_ONCE))


# What is refused before the run folder exists


@pytest.mark.parametrize(
    "word",
    [
        "batch_size=7 engine.grad_accum_steps=2",
        "seed=-1",
        "seed=4294967296",
        "workers=-1",
        "optim.betas=[0.9]",
        "optim.betas=[0.9,1.5]",
        "optim.betas=[0.9,0.95,0.99]",
        "optim.warmup_epochs=-1",
        "optim.warmup_epochs=nan",
        "optim.weight_decay=-1",
        "optim.min_lr=-1",
        "optim.clip_grad=-1",
        "optim.clip_grad=0",
        "data.crop_scale=[1,0.5]",
        "data.crop_scale=[0.5]",
        "data.crop_ratio=[0,1]",
        "data.mean=[nan,0,0]",
    ],
)
def test_what_cannot_be_is_refused_by_its_key_before_data_is_read(
    words: Words, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str
) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(data_pipeline, "training_source", read)
    with pytest.raises(ConfigError) as caught:
        pretrain(words("run", *word.split()))
    assert word.split()[-1].split("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_set_is_refused_by_its_key(words: Words, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"batch_size.*49.*48"):
        pretrain(words("run", "batch_size=49"))
    assert not (tmp_path / "run").exists()


# The pieces between data and model


def test_targets_views_and_images_belong_to_the_flipped_crop(words: Words) -> None:
    config = configure(words("run"))
    batches = training_batches(config.data, build_dataset(config.data, "train"), 48, config.seed)
    batch = batches[0]
    tokenizer = build_tokenizer(config)
    grid = (4, 4)
    spec = build_mask_spec(config.mask, grid)
    mean, std = tuple(config.data.mean), tuple(config.data.std)
    prepared = Preparation(spec, grid, tokenizer, mean, std, flip=True, seed=0)(batch, 3)
    flipped = torch.tensor([not torch.equal(a, b) for a, b in zip(prepared.crops, batch.images, strict=True)])
    assert 10 < int(flipped.sum()) < 38
    assert torch.equal(prepared.crops[flipped], batch.images[flipped].flip(2))
    assert torch.equal(prepared.targets, tokenizer(prepared.crops))
    expected = (prepared.crops.double() / 255 - torch.tensor(mean)) / torch.tensor(std)
    assert torch.allclose(prepared.images.double(), expected.permute(0, 3, 1, 2), atol=1e-6)
    views = draw_masks(batch.sample_ids, spec.plan(grid), seed=0, epoch=3)
    assert torch.equal(prepared.masked_views.views.mask, views.mask)
    still = Preparation(spec, grid, tokenizer, mean, std, flip=False, seed=0)(batch, 3)
    assert torch.equal(still.crops, batch.images)


def test_every_keep_every_th_checkpoint_stays(words: Words, no_pictures: None) -> None:
    run = pretrain(words("run", "checkpoint_every=2", "keep_checkpoints=1", "keep_every=4"))
    assert checkpoints(run) == [4, 8, 12]


def test_a_callback_adds_columns_to_the_log_and_changes_nothing_else(
    straight: Path, words: Words, no_pictures: None
) -> None:
    class Scores:
        def __init__(self) -> None:
            self.calls: list[tuple[int, float]] = []
            self.restored: list[dict[str, Any]] = []

        def on_epoch_end(self, encoder: torch.nn.Module, step: int, epoch: float) -> dict[str, float]:
            self.calls.append((step, epoch))
            return {"score": 7.0}

        def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
            self.restored = [dict(row) for row in rows]

    scores, later = Scores(), Scores()
    config = configure(words("scored"))
    run = loop.pretrain(config, [scores]).path
    assert scores.calls == [(6, 1.0), (12, 2.0)]
    logged = [row for row in rows(run) if "score" in row]
    assert logged == [{"step": 6, "epoch": 1.0, "score": 7.0}, {"step": 12, "epoch": 2.0, "score": 7.0}]
    assert [row for row in rows(run) if "score" not in row] == rows(straight)
    loop.pretrain(config, [later])
    assert later.restored == rows(run)
    assert later.calls == []
