from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import dmjd.train.feed as feed
import dmjd.train.loop as loop
from dmjd.cli import main
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches
from dmjd.errors import CheckpointError, ConfigError
from dmjd.ops.masks import draw_masks
from dmjd.parallel import store
from dmjd.parallel.single import SingleEngine
from dmjd.train.build import build_mask_spec, build_objective, build_tokenizer
from dmjd.train.checkpoint import newest, read_loop_state
from dmjd.train.guard import Diverged, StepNumbers
from dmjd.train.preparation import Preparation, Prepared
from dmjd.train.progress import Progress
from tests.runs import rows, same

# On a machine with one core torch warns that two workers are many; they are what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Words = Callable[..., list[str]]
Same = Callable[..., None]

STEPS_PER_EPOCH, STEPS = 6, 12


@pytest.fixture(scope="module")
def recipe(tiny: Words, image_folder: Path) -> Words:
    """``recipe(run, *more)``: two epochs of six steps over a folder of images.

    Checkpoints at 4, 8 and 12 fall into logging windows, which end at 5, 10 and 12.
    """

    def make(run: Path, *more: str) -> list[str]:
        folder = ("data=folder", f"data.root={image_folder}", "data.image_size=[16,16]", "epochs=2", "batch_size=8")
        every = ("log_every=5", "checkpoint_every=4", "keep_checkpoints=9")
        return tiny(run, *folder, *every, *more)

    return make


@pytest.fixture
def words(tmp_path: Path, recipe: Words) -> Words:
    """``words(name, *more)``: the recipe in ``tmp_path / name``."""
    return lambda name, *more: recipe(tmp_path / name, *more)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, recipe: Words) -> Path:
    """The recipe, run to its end without a stop. Only to be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_pictures", lambda *arguments: None)
        return pretrain(recipe(tmp_path_factory.mktemp("straight") / "run"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than a tiny run."""
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: None)


def configure(words: list[str]) -> PretrainConfig:
    config: PretrainConfig = compose("pretrain", words)
    return config


def pretrain(words: list[str]) -> Path:
    return loop.pretrain(configure(words)).path


def load(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Parameters, moments and averages by name."""
    return store.read(run / "checkpoints" / f"step-{step:08d}")


def checkpoints(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted((run / "checkpoints").glob("step-????????"))]


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


@pytest.mark.parametrize("word", ["workers=2", "log_every=1", "keep_checkpoints=1", "checkpoint_every=5"])
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
@pytest.mark.parametrize("unit", ["block", "model"])
def test_only_training_steps_are_compiled(words: Words, monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    class Judge:
        def __call__(self, encoder: nn.Module, step: int, epoch: float) -> dict[str, float]:
            with torch.no_grad():
                encoder(torch.zeros(2, 3, 16, 16))
            return {}

        def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
            pass

    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compile_(module, backend=backend, **options))
    torch._dynamo.reset()
    loop.pretrain(configure(words("compiled", f"engine.compile={unit}")), [Judge()])
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
    split = pretrain(words("split", *common, f"engine.accumulation={parts}"))
    for one, other in zip(rows(whole), rows(split), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    before, after, accumulated = (
        store.read_model(run / "checkpoints" / f"step-{step:08d}")
        for run, step in ((whole, 4), (whole, STEPS), (split, STEPS))
    )
    for name, value in after.items():
        assert torch.allclose(value, accumulated[name], rtol=0, atol=1e-6), name
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3, "the runs did move"


# Stopping and going on


class Stopped(Exception):
    """Stands for any end of a process."""


def stop_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The run ends while it takes in the numbers of ``step``, which is one step behind what it computes."""
    advance = Progress.advance

    def stopping(self: Progress, numbers: StepNumbers) -> None:
        if self._done == step:
            raise Stopped
        advance(self, numbers)

    monkeypatch.setattr(Progress, "advance", stopping)


@pytest.mark.parametrize("step", [1, 4, 6, 9, 11])
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_happened(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None, step: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, step)
        with pytest.raises(Stopped):
            pretrain(words("stopped"))
    resumed = pretrain(words("stopped"))
    assert_same_run(straight, resumed)
    assert len(json.loads((resumed / "provenance.json").read_text())["launches"]) == 2
    seconds = [row["seconds"] for row in rows(resumed, "timing")]
    assert seconds == sorted(seconds), "wall time goes on as well"


def test_a_run_may_be_stopped_again_and_again_under_other_orchestration(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None
) -> None:
    for step, more in ((3, ("checkpoint_every=2",)), (6, ("workers=2",)), (9, ("checkpoint_every=1",))):
        with pytest.MonkeyPatch.context() as patch:
            stop_before(patch, step)
            with pytest.raises(Stopped):
                pretrain(words("stopped", *more))
    assert_same_run(straight, pretrain(words("stopped")))


def test_a_finished_run_stays_as_it_is(words: Words, no_pictures: None) -> None:
    run = pretrain(words("run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.suffix in (".pt", ".distcp", ".jsonl")}
    pretrain(words("run"))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.suffix in (".pt", ".distcp", ".jsonl")} == before


def run_and_kill(command: list[str], when: Callable[[], bool]) -> None:
    """SIGKILL to ``command`` as soon as ``when`` holds; it must not have ended before."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not when():
            assert process.poll() is None, f"ended too early: {process.stderr and process.stderr.read()}"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_the_same_command_after_a_sigkill_ends_in_the_same_bits(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None, tmp_path: Path
) -> None:
    command = words("killed")
    first = tmp_path / "killed" / "checkpoints" / "step-00000004" / "manifest.json"
    run_and_kill([sys.executable, "-m", "dmjd", "pretrain", *command], first.exists)
    assert 12 not in checkpoints(tmp_path / "killed")
    assert main(["pretrain", *command]) == 0
    assert_same_run(straight, tmp_path / "killed")


HANGS_IN_ITS_SECOND_CHECKPOINT = """
import pathlib, sys, time
import dmjd.train.loop
from dmjd.cli import main
from dmjd.parallel.single import SingleEngine

save = SingleEngine.save

def hang(self, path, averages):
    def half():
        (path / "half").write_bytes(b"half a file")
        time.sleep(600)

    return save(self, path, averages) if "step-00000004" in path.name else half

SingleEngine.save = hang
dmjd.train.loop.write_pictures = lambda *arguments: None
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_killed_inside_a_checkpoint_goes_on_from_the_one_before(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    half = killed / "checkpoints" / "step-00000008.tmp" / "half"
    command = [sys.executable, "-c", HANGS_IN_ITS_SECOND_CHECKPOINT, "pretrain", *words("killed")]
    run_and_kill(command, lambda: half.exists() and half.stat().st_size > 0)
    assert newest(killed / "checkpoints") == killed / "checkpoints" / "step-00000004"
    assert [row["step"] for row in rows(killed)] == [5], "a row beyond the checkpoint, which must not come twice"
    assert_same_run(straight, pretrain(words("killed")))
    assert checkpoints(killed) == [4, 8, 12]
    assert not half.parent.exists()


def test_a_damaged_checkpoint_costs_only_the_way_back_to_the_one_before(
    assert_same_run: Same, straight: Path, words: Words, no_pictures: None
) -> None:
    damaged = pretrain(words("damaged"))
    shutil.rmtree(damaged / "checkpoints" / "step-00000012")
    os.truncate(damaged / "checkpoints" / "step-00000008" / "__0_0.distcp", 100)
    assert_same_run(straight, pretrain(words("damaged")))


def test_a_lost_log_does_not_stop_a_run(words: Words) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, 9)
        patch.setattr(loop, "write_pictures", lambda *arguments: None)
        with pytest.raises(Stopped):
            pretrain(words("run"))
    (Path(configure(words("run")).run) / "log.jsonl").unlink()
    run = pretrain(words("run", "checkpoint_every=100"))  # with pictures, which read the log
    assert [row["step"] for row in rows(run)][-2:] == [10, 12]


@pytest.mark.parametrize(
    ("word", "part"), [("seed=1", "seed=0"), ("epochs=3", "epochs=2"), ("backbone.depth=2", "backbone.depth=1")]
)
def test_another_experiment_is_refused_before_anything_is_touched(
    words: Words, no_pictures: None, word: str, part: str
) -> None:
    run = pretrain(words("run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=f"{part} and now {word}"):
        pretrain(words("run", word))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_touched(straight: Path, words: Words) -> None:
    run = Path(configure(words("run")).run)
    shutil.copytree(straight / "checkpoints", run / "checkpoints")
    before = sorted(run.rglob("*"))
    for word, part in (
        ("backbone.depth=2", "missing"),
        ("backbone.embed_dim=64", r"weight is \(32, .* there and \(64, .* here"),
    ):
        with pytest.raises(CheckpointError, match=part) as caught:
            pretrain(words("run", word))
        assert "checkpoint of another model" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert sorted({*run.rglob("*")} - {run / ".lock"}) == before


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
    command = words("run", f"engine.accumulation={accumulation}", *AT_ONCE)
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
            objective.model.head.bias[0] = float("inf")
        return objective

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_objective", spoiled)
        with pytest.raises(Diverged, match="step 1 "):
            pretrain(words("run", *AT_ONCE))


# What is refused before the run folder exists


@pytest.mark.parametrize(
    "word",
    [
        "batch_size=7 engine.accumulation=2",
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

    monkeypatch.setattr(feed, "training_source", read)
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


# Beginning from another run


def test_init_begins_from_another_run_and_the_run_s_own_checkpoint_wins(
    straight: Path, words: Words, no_pictures: None
) -> None:
    more = (f"init={straight}", "optim.base_lr=1e-9")
    run = pretrain(words("second", *more))
    began = store.read_model(straight / "checkpoints" / f"step-{STEPS:08d}")
    for name, value in store.read_model(run / "checkpoints" / f"step-{STEPS:08d}").items():
        torch.testing.assert_close(value, began[name], atol=1e-6, rtol=0)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    before = (run / "log.jsonl").read_bytes()
    assert pretrain(words("second", *more)) == run
    assert (run / "log.jsonl").read_bytes() == before


def test_an_init_of_another_model_is_refused_before_the_folder_exists(straight: Path, words: Words) -> None:
    with pytest.raises(CheckpointError, match="another model"):
        pretrain(words("second", f"init={straight}", "backbone.depth=2"))
    assert not Path(configure(words("second")).run).exists()


def test_every_keep_every_th_checkpoint_stays(words: Words, no_pictures: None) -> None:
    run = pretrain(words("run", "checkpoint_every=2", "keep_checkpoints=1", "keep_every=4"))
    assert checkpoints(run) == [4, 8, 12]


def test_a_judge_speaks_in_the_log_and_changes_nothing_else(straight: Path, words: Words, no_pictures: None) -> None:
    class Judge:
        def __init__(self) -> None:
            self.calls: list[tuple[int, float]] = []
            self.restored: list[dict[str, Any]] = []

        def __call__(self, encoder: torch.nn.Module, step: int, epoch: float) -> dict[str, float]:
            self.calls.append((step, epoch))
            return {"score": 7.0}

        def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
            self.restored = [dict(row) for row in rows]

    judge, later = Judge(), Judge()
    config = configure(words("judged"))
    run = loop.pretrain(config, [judge]).path
    assert judge.calls == [(6, 1.0), (12, 2.0)]
    verdicts = [row for row in rows(run) if "score" in row]
    assert verdicts == [{"step": 6, "epoch": 1.0, "score": 7.0}, {"step": 12, "epoch": 2.0, "score": 7.0}]
    assert [row for row in rows(run) if "score" not in row] == rows(straight)
    loop.pretrain(config, [later])
    assert later.restored == rows(run)
    assert later.calls == []
