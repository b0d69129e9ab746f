from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dmjd
from dmjd.compose import compose, from_yaml, options_of, to_yaml
from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError
from dmjd.files import read_file
from dmjd.parallel.world import alone
from dmjd.runs import checkpoint
from dmjd.runs.folder import RunFolder

CPU = torch.device("cpu")


START = ("epochs=8", "batch_size=256", "backbone.depth=4", "method.decoder.depth=1", "optim.base_lr=1e-3")


def configure(*words: str) -> PretrainConfig:
    config: PretrainConfig = compose("pretrain", ["experiment=demo", "data=digits", *START, *words])
    return config


def started(path: Path, *, with_checkpoint: bool = True) -> RunFolder:
    run = RunFolder(path)
    run.create()
    run.record(configure(), alone(CPU))
    if with_checkpoint:
        checkpoint.commit(checkpoint.begin(run.checkpoints, 1), list, keep=1)
    return run


def files(path: Path) -> list[str]:
    return sorted(str(inner.relative_to(path)) for inner in path.rglob("*"))


def test_opening_records_what_was_asked_and_where_it_runs(tmp_path: Path) -> None:
    run = started(tmp_path / "deep" / "run", with_checkpoint=False)
    assert from_yaml(PretrainConfig, run.config.read_text()) == configure()
    record = json.loads(run.provenance.read_text())
    assert record["dmjd"] == dmjd.__version__
    assert record["torch"] == torch.__version__
    assert record["device"].startswith("cpu")
    assert {"git_sha", "git_dirty", "python", "host", "command", "started"} <= record.keys()
    assert not [name for name in files(run.path) if name.endswith(".tmp")]


@pytest.mark.parametrize("inside", ["", "runs/first"])
def test_a_run_among_its_images_is_rejected(tmp_path: Path, inside: str) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    config = configure("data=folder", f"data.root={tmp_path}/photos")
    with pytest.raises(ConfigError, match=r"its pictures would be among the images; name a folder outside"):
        RunFolder(tmp_path / "link" / inside).check(config)
    (tmp_path / "photos" / "train").mkdir()
    assert RunFolder(tmp_path / "link" / inside).check(config) is config


@pytest.mark.parametrize("word", ["data.crop_pct=0.5", "data.max_bad_percent=5", "data.cache_gib=7", "data.timeout=9"])
def test_what_no_step_depends_on_may_change(tmp_path: Path, word: str) -> None:
    started(tmp_path).check(configure(word))


STEPS = {"digits": 1437 // 256, "fashion_mnist": 60000 // 256}


def store_auto(run: RunFolder, name: str, known_by: str) -> None:
    """A folder as versions left it that stored data=auto, of a run on ``name``, which ``known_by`` tells."""
    run.config.write_text(to_yaml(configure("data=auto")))
    if known_by == "log.jsonl":
        run.log.write_text(json.dumps({"step": 10, "epoch": 10 / STEPS[name]}) + "\n" + '{"step": 2')
    elif known_by == "STOP_REASON":
        record = {"reason": "requested", "detail": "TERM", "next": "the same command", "total_steps": 8 * STEPS[name]}
        run.stop_reason.write_text(json.dumps(record))


@pytest.mark.parametrize("known_by", ["log.jsonl", "STOP_REASON"])
@pytest.mark.parametrize("name", STEPS)
def test_a_run_that_stored_auto_goes_on_with_its_own_data_alone(tmp_path: Path, name: str, known_by: str) -> None:
    run = started(tmp_path)
    store_auto(run, name, known_by)
    (other,) = STEPS.keys() - {name}
    run.check(configure(f"data={name}"))
    with pytest.raises(ConfigError, match=f"was started with data.name={name}, and data.name={other} is set now"):
        run.check(configure(f"data={other}"))


def test_a_run_that_stored_auto_and_a_root_was_on_fashion_mnist(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.config.write_text(to_yaml(configure("data=auto", "data.root=images")))
    run.check(configure("data=fashion_mnist", "data.root=images"))
    with pytest.raises(ConfigError, match=r"data\.name=fashion_mnist, and data\.name=digits"):
        run.check(configure("data=digits", "data.root=images"))


def test_a_run_that_stored_auto_and_logged_nothing_may_go_on(tmp_path: Path) -> None:
    run = started(tmp_path)
    store_auto(run, "digits", known_by="nothing")
    run.check(configure())


@pytest.mark.parametrize(
    "lines", ['{"step": 1, "epoch": 0}', '{"step": "x", "epoch": 1}', "[" * 9999, '{"step": 1e999, "epoch": 1}']
)
def test_a_run_that_stored_auto_with_a_damaged_log_may_go_on(tmp_path: Path, lines: str) -> None:
    run = started(tmp_path)
    store_auto(run, "digits", known_by="nothing")
    run.log.write_text(lines)
    run.stop_reason.write_text(lines)
    run.check(configure())


def test_data_that_are_not_resolved_yet_are_no_difference(tmp_path: Path) -> None:
    """Where a job is submitted, the data set of its nodes is not known."""
    run = started(tmp_path)
    run.check(configure("data=auto"))
    with pytest.raises(ConfigError, match=r"seed=0, and seed=1"):
        run.check(configure("data=auto", "seed=1"))


def test_of_several_differences_that_of_the_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.name=digits, and data\.name=fashion_mnist"):
        started(tmp_path).check(configure("epochs=1", "seed=4", "data=fashion_mnist", "optim.base_lr=1"))


def test_each_launch_is_kept(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.record(configure("log_every=7"), alone(CPU))
    record = json.loads(run.provenance.read_text())
    assert len(record["launches"]) == 2
    assert {**record["launches"][-1], "launches": record["launches"]} == record
    assert from_yaml(PretrainConfig, run.config.read_text()).log_every == 7


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["seed=5"], ["seed=0", "seed=5"]),
        (["epochs=9"], ["epochs=8", "epochs=9"]),
        (["batch_size=128"], ["batch_size=256", "batch_size=128"]),
        (["backbone.depth=5"], ["backbone.depth=4", "backbone.depth=5"]),
        (["method.decoder.depth=2"], ["method.decoder.depth=1", "method.decoder.depth=2"]),
        (["mask.block=[4,4]"], ["mask.block=[2, 2]", "mask.block=[4, 4]"]),
        (["data.root=elsewhere"], ["data.root=None", "data.root=elsewhere"]),
        (["optim.base_lr=2e-3"], ["optim.base_lr=0.001", "optim.base_lr=0.002"]),
    ],
)
def test_another_experiment_may_not_move_in(tmp_path: Path, words: list[str], parts: list[str]) -> None:
    run = started(tmp_path)
    before = files(tmp_path), run.config.read_text()
    with pytest.raises(ConfigError) as caught:
        run.check(configure(*words))
    for part in (str(tmp_path), *parts):
        assert part in str(caught.value)
    assert (files(tmp_path), run.config.read_text()) == before


def stored(run: RunFolder, old: str, new: str) -> RunFolder:
    """``run`` with a stored configuration that an older version, or other rules, gave it."""
    text = run.config.read_text()
    assert text.count(old) == 1, text
    run.config.write_text(text.replace(old, new))
    return run


def test_keys_that_are_not_typed_are_the_stored_ones(tmp_path: Path) -> None:
    """A preset, a default and a resolved value have changed since; groups and keys are typed as they were."""
    run = stored(stored(started(tmp_path), "weight_decay: 0.05", "weight_decay: 0.01"), "pad: 0", "pad: 3")
    kept = run.check(configure())
    assert (kept.optim.weight_decay, kept.data.pad, kept.epochs) == (0.01, 3, 8)
    assert kept.typed == configure().typed
    fewer = run.check(compose("pretrain", [f"run={tmp_path}"]))
    assert (fewer.epochs, fewer.data.name, fewer.backbone.depth) == (8, "digits", 4)


def test_typed_keys_and_groups_apply_or_are_an_error(tmp_path: Path) -> None:
    run = stored(stored(started(tmp_path), "weight_decay: 0.05", "weight_decay: 0.01"), "workers: 1", "workers: 5")
    again = run.check(configure("log_every=3", "resume=auto"))
    assert (again.log_every, again.workers) == (3, 5)
    assert run.check(configure("workers=0")).workers == 0
    for words, difference in (
        (["optim.weight_decay=0.05"], "optim.weight_decay=0.01, and optim.weight_decay=0.05"),
        (["method=mae"], "is set now by method=mae; leave method=mae out, or name another folder"),
        (["experiment=mae_vit_base"], "is set now by experiment=mae_vit_base; leave"),
        (["mask=uniform"], "mask.views=2, and mask.views=1 is set now by mask=uniform"),
        (["mask=uniform", "mask.views=1"], "mask.views=2, and mask.views=1 is set now; keep"),
        (["data=fashion_mnist"], "data.name=digits, and data.name=fashion_mnist"),
    ):
        with pytest.raises(ConfigError, match=difference):
            run.check(configure(*words))


def test_a_group_with_the_option_that_the_first_start_composed_changes_nothing(tmp_path: Path) -> None:
    """Options of the defaults and of the experiment were not typed; here their values have changed since."""
    run = stored(started(tmp_path), "weight_decay: 0.05", "weight_decay: 0.01")
    options = options_of("pretrain", configure().typed or [])
    assert (options["experiment"], options["data"], options["method"]) == ("demo", "digits", "dmjd")
    expected = run.check(configure())
    assert run.check(configure(*(f"{group}={option}" for group, option in options.items()))) == expected


def test_the_engine_is_that_of_each_launch(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.create()
    run.record(configure("engine.device=cpu", "engine.grad_accum_steps=2", "time_budget=1:00:00"), alone(CPU))
    checkpoint.commit(checkpoint.begin(run.checkpoints, 1), list, keep=1)
    now = run.check(configure("engine.device=cuda"))
    assert (now.engine.device, now.engine.grad_accum_steps, now.time_budget) == ("cuda", 1, "auto")


def test_a_run_of_a_version_that_stored_no_overrides_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["dmjd", "pretrain", "experiment=demo", "data=digits", *START]
    monkeypatch.setattr("sys.argv", command)
    run = stored(started(tmp_path), "weight_decay: 0.05", "weight_decay: 0.01")
    text, count = re.subn(r"typed:\n(- .*\n)+|command: .*\n", "", run.config.read_text())
    assert count == 2
    run.config.write_text(text)
    assert run.check(configure()).optim.weight_decay == 0.01
    with pytest.raises(ConfigError, match=r"data\.name=digits, and data\.name=fashion_mnist"):
        run.check(configure("data=fashion_mnist"))


@pytest.mark.parametrize(
    "word",
    ["log_every=3", "checkpoint_every=9", "keep_checkpoints=1", "workers=0", "engine.grad_accum_steps=2", "run=x"],
)
def test_the_same_experiment_may_go_on_under_other_orchestration(tmp_path: Path, word: str) -> None:
    started(tmp_path).check(configure(word))


def test_a_folder_without_a_checkpoint_is_free_for_another_experiment(tmp_path: Path) -> None:
    started(tmp_path, with_checkpoint=False).check(configure("seed=5", "resume=never"))
    RunFolder(tmp_path / "absent").check(configure("resume=never"))
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: os.truncate(path, 0)], ids=["removed", "emptied"])
def test_checkpoints_know_the_experiment_where_the_folder_has_lost_it(
    tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    run = started(tmp_path)
    shutil.copy(run.config, run.checkpoints / "step-00000001")
    lose(run.config)
    run.check(configure("log_every=3"))
    with pytest.raises(ConfigError, match="was started with seed=0, and seed=5"):
        run.check(configure("seed=5"))


def test_checkpoints_behind_a_link_that_leads_nowhere_are_not_begun_anew(tmp_path: Path) -> None:
    run = started(tmp_path)
    scratch = run.checkpoints.rename(tmp_path / "scratch")
    run.checkpoints.symlink_to(scratch)
    run.check(configure())
    scratch.rename(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=r"checkpoints is a link to nowhere, and the run needs a folder"):
        run.check(configure())


def test_a_record_of_launches_that_a_dying_node_left_empty_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = started(tmp_path)
    os.truncate(run.provenance, 0)
    run.record(configure(), alone(CPU))
    assert len(json.loads(run.provenance.read_text())["launches"]) == 1
    assert f"{run.provenance} cannot be read" in caplog.text


def test_never_resuming_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has checkpoints and resume=never; use resume=auto, or another folder"):
        started(tmp_path).check(configure("resume=never"))


@pytest.mark.parametrize("inside", ["", "inside/run"])
def test_a_file_in_the_way_is_named(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run=.*file.*; name a folder"):
        RunFolder(tmp_path / "file" / inside).check(configure())


@pytest.mark.parametrize("text", ["epochs: [1", "colour: red", "epochs: many"])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    run = started(tmp_path)
    run.config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        run.check(configure())
    assert str(run.config) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_revision_is_that_of_this_package_and_not_of_a_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's own repository, with dmjd in a virtual environment that it ignores.
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    package = tmp_path / ".venv" / "dmjd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / ".gitignore").write_text(".venv\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "theirs")):
        subprocess.run(["git", *words], cwd=tmp_path, env=environment, check=True)
    monkeypatch.setattr(dmjd, "__file__", str(package / "__init__.py"))
    record = json.loads(started(tmp_path / "run").provenance.read_text())
    assert record["git_sha"] is None


def test_an_evaluation_is_kept_under_its_name(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).write_evaluation("knn-trained", {"top1": 1.5})
    assert path == tmp_path / "evaluations" / "knn-trained.json"
    assert json.loads(path.read_text()) == {"top1": 1.5}


def test_paths_are_those_of_the_architecture(finished_run: Path, tiny: Callable[..., list[str]]) -> None:
    assert {path.name for path in finished_run.iterdir()} - {"source.diff", "report.html"} == {
        "config.yaml",
        "environment.txt",
        "heartbeat",
        "STOP_REASON",
        "provenance.json",
        "log.jsonl",
        "timing.jsonl",
        ".lock",
        "checkpoints",
        "pictures",
        "evaluations",
    }
    assert from_yaml(PretrainConfig, (finished_run / "config.yaml").read_text()) == compose(
        "pretrain", tiny(finished_run)
    )
    (step,) = (finished_run / "checkpoints").iterdir()
    assert step.name == "step-00000011"
    assert {path.name for path in step.iterdir()} == {
        "config.yaml",
        "loop.pt",
        "manifest.json",
        ".metadata",
        "__0_0.distcp",
    }
    assert {path.name for path in (finished_run / "pictures").iterdir()} == {"views.png", "masks.png", "loss.png"}
    assert (step / "config.yaml").read_text() == (finished_run / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["config.yaml", "provenance.json", "log.jsonl"])
def test_no_record_is_read_without_a_limit(
    tmp_path: Path, finished_run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    with (tmp_path / "run" / name).open("r+b") as file:
        file.truncate(20 << 30)  # takes no place on the disk
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("read without a limit"))
    folder = RunFolder(tmp_path / "run")
    if name == "config.yaml":
        with pytest.raises(ConfigError, match="cannot be read"):
            folder.check(from_yaml(PretrainConfig, read_file(finished_run / "config.yaml")))
    else:
        assert (folder.read_log() if name == "log.jsonl" else folder._provenance()) in ([], {})
