"""The studies in benchmarks/evidence: which trainings are missing, the statistics, the official pairing of targets."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from dmjd.compose import compose
from dmjd.evaluate import evaluate
from dmjd.masking import MaskSpec
from dmjd.train.loop import pretrain

ROOT = Path(__file__).parents[2]
STUDIES, TINY = (ROOT / "benchmarks/evidence" / name for name in ("studies", "tiny"))
SMALL = ("backbone.embed_dim=32", "backbone.depth=1", "backbone.num_heads=1", "method.decoder.dim=32")


def module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(f"evidence.{name}")


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module(monkeypatch, "studies")


def row_of(job: Any, probe: float = 80.0) -> dict[str, Any]:
    arm, stage, seed, rate = job.key
    scores = dict.fromkeys(sorted(job.scores), probe)
    key = {"arm": arm, "stage": stage, "seed": seed, "rate": rate}
    row = {"scores": scores, "epochs": job.epochs, "images": job.images, "images_per_second": 1e4, "gpu_seconds": 60.0}
    return {**key, **row, "device": "H200", "commit": "0123456789"}


def test_seeds_follow_the_best_rate_and_none_is_trained_twice(studies: ModuleType, tmp_path: Path) -> None:
    plan, rows = studies.Plan.read(STUDIES, ["a"]), studies.Rows(tmp_path / "rows.jsonl")
    arm = plan.studies[0].arms["k1"]
    first = [job for job in plan.jobs(rows) if job.arm.id == arm.id]
    assert [(job.stage, job.rate, job.epochs) for job in first] == [
        ("tune", rate, 10) for rate in (1.25e-4, 2.5e-4, 5e-4)
    ]
    for job, probe in zip(first, (70.0, 75.0, 75.0), strict=True):
        rows.add(row_of(job, probe))
    later = [job for job in plan.jobs(rows) if job.arm.id == arm.id]
    assert [(job.stage, job.seed, job.rate, job.epochs) for job in later] == [("full", s, 2.5e-4, 20) for s in range(5)]
    for job in later[:3]:
        rows.add(row_of(job))
    again = studies.Rows.read(tmp_path / "rows.jsonl")
    assert [job.seed for job in plan.jobs(again) if job.arm.id == arm.id] == [3, 4]
    assert list(again.full(arm, plan.studies[0].rates)) == [0, 1, 2]


def test_studies_share_equal_arms(studies: ModuleType, tmp_path: Path) -> None:
    plan = studies.Plan.read(STUDIES)
    a, b, e, f = (next(study for study in plan.studies if study.name == name) for name in "abef")
    assert a.arms["k2"].id == b.arms["block60_disjoint"].id == e.arms["k2"].id
    assert f.arms["adaptive60"].id != a.arms["k2"].id, "its rate is tuned by another arm"
    rows = studies.Rows(tmp_path / "rows.jsonl")
    keys = [job.key for job in plan.jobs(rows)]
    assert len(keys) == len(set(keys))
    shared = next(job for job in plan.jobs(rows) if job.arm.id == a.arms["k2"].id)
    for job in list(plan.jobs(rows)):
        rows.add(row_of(job))
    full = [job for job in plan.jobs(rows) if job.arm.id == shared.arm.id]
    assert all(job.finetune and job.untrained for job in full), "b needs neither, but a does"


def test_equal_gpu_time_follows_from_the_speed_of_the_steps(studies: ModuleType, tmp_path: Path) -> None:
    plan, rows = studies.Plan.read(STUDIES, ["a"]), studies.Rows(tmp_path / "rows.jsonl")
    arms = plan.studies[0].arms
    names = ("k1", "k2", "k4", "k2_half", "k4_quarter")
    assert [arm.id for arm in plan.studies[0].timed()] == [arms[name].step.id for name in names]
    for name in ("k1", "k4"):
        for job in [job for job in plan.jobs(rows) if job.arm.id == arms[name].id and job.stage == "tune"]:
            rows.add(row_of(job))
    assert not [job for job in plan.jobs(rows) if job.arm.time_of], "the steps are not measured"
    for arm, speed in zip(plan.studies[0].timed(), (160e3, 100e3, 50e3), strict=False):
        rows.add({"arm": arm.id, "stage": studies.STEP, "seed": 0, "rate": 0.0, "images_per_second": speed})
    epochs = {job.arm.label: (job.epochs, job.images) for job in plan.jobs(rows) if job.arm.time_of}
    assert epochs == {"K = 1, GPU time of K = 2": (32, 1_920_000), "K = 4, GPU time of K = 2": (10, 600_000)}
    assert arms["k1_time"].id != arms["k1"].id


def test_a_rate_beyond_the_search_counts_once_it_is_trained(studies: ModuleType, tmp_path: Path) -> None:
    plan, rows = studies.Plan.read(STUDIES, ["a"]), studies.Rows(tmp_path / "rows.jsonl")
    arm, rates = plan.studies[0].arms["k1"], plan.studies[0].rates
    for rate, probe in ((1e-3, 71.0), *zip(rates, (69.0, 70.0, 68.0), strict=True)):
        assert rows.best_rate(arm, rates) is None
        rows.add(row_of(studies.Job(arm, "tune", 0, rate), probe))
    assert rows.best_rate(arm, rates) == 1e-3


def test_trainings_of_an_arm_that_is_not_compiled_give_way(
    studies: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool = module(monkeypatch, "pool")
    plan, rows = studies.Plan.read(STUDIES, ["b"]), studies.Rows(tmp_path / "rows.jsonl")
    filled = pool.Pool(plan, rows, tmp_path, 4, 1e9, (), {})
    monkeypatch.setattr(filled, "_start", lambda job, slot: pool.Running(job, None, tmp_path, slot, 0.0))
    monkeypatch.setattr(filled, "_process", lambda slot: f"for slot {slot}")
    filled._begin(plan.jobs(rows))
    first = list(plan.studies[0].arms.values())[:4]
    assert [each.job.arm.id for each in filled.running] == [arm.id for arm in first], "one training of each arm"
    assert filled.waiting == {slot: f"for slot {slot}" for slot in range(4)}
    filled.compiled.add(first[0].step.id)
    filled.running.pop(0)
    filled._begin(job for job in plan.jobs(rows) if job.rate > 1.25e-4)
    assert filled.running[-1].job.arm.id == first[0].id


def test_interval_and_smallest_effect_are_those_of_the_paired_t_test(monkeypatch: pytest.MonkeyPatch) -> None:
    paired = module(monkeypatch, "paired")
    first, second = [86.9, 89.1, 87.2, 88.0, 88.4], [84.9, 83.2, 86.9, 85.1, 86.0]
    found = paired.difference(first, second)
    interval = stats.ttest_rel(first, second).confidence_interval(0.95)
    np.testing.assert_allclose([found.low, found.high], interval, rtol=1e-12)
    pairs = np.random.default_rng(0).normal(1.0, 1.0, (40_000, 5))
    error = pairs.std(axis=1, ddof=1) / np.sqrt(5)
    scale = paired.difference([1.0, -1.0, 0.5, -0.5, 0.0], [0.0] * 5)
    effect = scale.smallest / ((scale.high - scale.mean) / stats.t.ppf(0.975, 4)) / np.sqrt(5)
    centred = pairs - 1 + effect
    power = np.mean(np.abs(centred.mean(axis=1) / error) > stats.t.ppf(0.975, 4))
    assert abs(power - 0.8) < 0.01


def test_interval_between_two_experiments_is_that_of_welch(monkeypatch: pytest.MonkeyPatch) -> None:
    paired = module(monkeypatch, "paired")
    first, second = [0.9, 2.1, 0.2, 1.0, 1.4], [-0.9, 0.2, -0.9, -1.1, 3.0, 0.4]
    found = paired.between(*(paired.difference(each, [0.0] * len(each)) for each in (first, second)))
    interval = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    np.testing.assert_allclose(found, interval, rtol=1e-12)


def test_folds_widen_the_interval_as_nadeau_and_bengio(monkeypatch: pytest.MonkeyPatch) -> None:
    paired = module(monkeypatch, "paired")
    values = np.array([1.0, 2.0, 0.5, 1.5, 3.0])
    found = paired.difference(values, np.zeros(5), overlap=1 / 4)
    half = stats.t.ppf(0.975, 4) * np.sqrt((1 / 5 + 525 / 2100) * values.var(ddof=1))
    np.testing.assert_allclose([found.low, found.high], [values.mean() - half, values.mean() + half], rtol=1e-12)


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    paired = module(monkeypatch, "paired")
    cases = {
        (0.1, 2.0): ("holds", "cannot tell"),
        (-0.1, 2.0): ("cannot tell", "cannot tell"),
        (-2.0, -0.1): ("does not hold", "cannot tell"),
        (-0.9, 0.9): ("cannot tell", "holds"),
        (1.1, 3.0): ("holds", "does not hold"),
    }
    for (low, high), expected in cases.items():
        found = paired.Difference((low + high) / 2, 1.0, low, high, 1.0, 5)
        assert tuple(paired.verdict(found, expect, 1.0) for expect in ("higher", "equal")) == expected


def test_the_page_of_complete_and_incomplete_studies(
    studies: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = module(monkeypatch, "page")
    plan, rows = studies.Plan.read(STUDIES, ["j", "a", "i"]), studies.Rows(tmp_path / "rows.jsonl")
    effects, arms = {"DMJD": 3.0, "DM:": 1.0, "K = 1, 40": -0.1}, plan.studies[1].arms

    def train(kept: Callable[[Any], bool]) -> None:
        for job in filter(kept, list(plan.jobs(rows))):
            effect = next((value for name, value in effects.items() if job.arm.label.startswith(name)), 0.0)
            preferred = job.stage == "tune" and job.rate == 5e-4 and job.arm.id == arms["k2"].id
            rows.add(row_of(job, 80 + effect + job.seed + preferred))

    others = {arm.id for arm in plan.studies[2].arms.values()} | {arms["k4_short"].id}
    for _ in range(2):
        train(lambda job: job.arm.source == "elpv" or (job.seed < 3 and job.arm.id not in others))
    for row in rows.rows.values():
        row["scores"] |= {name: 70.0 for name in row["scores"] if name.startswith("untrained")}
    again, other = studies.Rows(tmp_path / "again.jsonl"), studies.Plan([replace(plan.studies[1], seeds=[5, 6])], [])
    for _ in range(2):
        for job in [job for job in other.jobs(again) if job.arm.id in {arms["k2"].id, arms["k4"].id}]:
            again.add(row_of(job, 80 + 2 * job.seed * (job.arm.id == arms["k4"].id)))
    assert page.write_page(plan, rows, again, tmp_path / "page.md", tmp_path / "images") == [
        "evidence_j.png",
        "evidence_a.png",
    ]
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    cells = {line.split(" | ")[0].removeprefix("| "): line.strip("| ").split(" | ") for line in lines if " | " in line}
    assert cells["[j. Photographs of solar cells at 224 pixels](#j-photographs-of-solar-cells-at-224-pixels)"][1:] == [
        "5",
        "-",
        "-",
        "-",
    ]
    found = cells["The visible branch improves the features."]
    assert (found[1], found[2], found[4]) == ("linear probe 61.8 without, 62.5 % with it", "AUROC", "holds")
    assert found[3].startswith("+2.00, "), "the pairs differ by 3 - 1"
    assert cells["CNN, fine-tuned (Deitsch et al.)"][4:7] == ["-", "-", "88.4"]
    assert cells["before training"][:3] == ["before training", "0", "-"]
    equal = cells["At equal effective epochs, two views and half the images read are as good as one view."]
    assert (equal[2], equal[4]) == ("linear probe (within 1)", "holds, rates differ")
    assert equal[3].endswith(", 3 of 5")
    assert cells["K = 4, 10 epochs"][1:4] == ["-", "-", "0"]
    missing = "At equal effective epochs, four views and a quarter of the images read are as good as one view."
    assert cells[missing][3:] == ["-", "not measured"]
    main = [line for line in lines[: lines.index("## j. Photographs of solar cells at 224 pixels")] if "](#a-" in line]
    assert main[0].startswith("| [a](#a-number-of-masked-views-k) | At equal images read and equal rates, two ")
    assert "[i](#" not in "".join(lines[:60]), "no claim of study i is measured"
    text = "\n".join(lines)
    table = text.partition("Repeated on another visit")[2].splitlines()[5:]
    claims = [
        "| At equal images read, four views are better than two.",
        "| Two views improve the features of the untrained",
    ]
    assert [row.startswith(claim) for row, claim in zip(table, claims, strict=False)] == [True, True]
    assert table[2] == "", "no other claim has both arms"
    repeated = table[0].split(" | ")
    assert repeated[3].startswith("+11.00, -1.71 to +23.71 "), "5 and 6 times 2, t of one degree: 12.71"
    assert [repeated[2], repeated[4]] == ["0.000125 and 0.0005", "0.000125"]
    assert repeated[6].startswith("yes, "), "the second interval is 25 points wide"
    assert "run --only a --seeds 5,6 \\\n        --record benchmarks/results/evidence_repeated.jsonl\n" in text
    assert "    PYTHONPATH=benchmarks python -m evidence run --only j --elpv FOLDER" in lines
    assert "CC BY-NC-SA 4.0" in text
    assert "No claim of these studies is measured: i. Precision and compilation." in text


def test_arms_of_a_seed_begin_from_one_encoder(studies: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    build = module(monkeypatch, "arm").build_paired
    plan = studies.Plan.read(STUDIES, ["a", "e"])
    arms = plan.studies[0].arms["k1"], plan.studies[1].arms["jd_depth4"]
    encoders = []
    for arm in arms:
        config = compose("pretrain", [*(f"{key}={value}" for key, value in arm.keys.items()), *SMALL, "seed=3"])
        encoders.append(build(config, 18).model.encoder.state_dict())
    assert encoders[0].keys() == encoders[1].keys()
    assert all(torch.equal(value, encoders[1][name]) for name, value in encoders[0].items())


def test_misaligned_targets_are_those_of_other_visible_tokens_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = module(monkeypatch, "arm")
    config = compose("pretrain", ["experiment=fashion_mnist", *SMALL])
    aligned, misaligned = arm.build_paired(config, 4), arm.OBJECTIVES["misaligned"](config, 4)
    views = MaskSpec().draw(torch.arange(3), (8, 8), seed=0, epoch=0)
    images = torch.randn(3, 1, 32, 32)
    constant = torch.randn(3, 1, 4).expand(3, 64, 4).contiguous()
    one, two = (objective(images, views, constant) for objective in (aligned, misaligned))
    torch.testing.assert_close(one, two)  # equal targets of all tokens: the order does not matter
    targets = torch.randn(3, 64, 4)
    one, two = (objective(images, views, targets) for objective in (aligned, misaligned))
    torch.testing.assert_close(one.masked, two.masked)
    visible = aligned.model(images, views).visible
    chosen = torch.stack([targets[row % 3, ids] for row, ids in enumerate(views.views.visible.flatten(0, 1))])
    pairs = aligned.visible_loss(*torch.broadcast_tensors(visible.unsqueeze(2), chosen.unsqueeze(1)))
    draws = torch.stack([misaligned(images, views, targets).visible for _ in range(100)])
    assert not torch.isclose(one.visible, two.visible, rtol=1e-4)
    assert abs(draws.mean() - pairs) < 5 * draws.std() / 100**0.5, "the mean over all orders pairs all tokens"


def test_floored_targets_keep_content_and_shrink_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = module(monkeypatch, "arm")
    config = compose("pretrain", ["experiment=fashion_mnist", *SMALL])
    plain, floored = arm.build_paired(config, 16), arm.OBJECTIVES["floored"](config, 16)
    views = MaskSpec().draw(torch.arange(3), (8, 8), seed=0, epoch=0)
    images, values = torch.randn(3, 1, 32, 32), torch.randn(3, 64, 16)
    unit = (values - values.mean(-1, keepdim=True)) / values.std(-1, keepdim=True)
    for deviation in (0.002, 0.2, 20.0):
        one = floored(images, views, 3 + deviation * unit)
        two = plain(images, views, unit * deviation / (deviation**2 + 0.04) ** 0.5)
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def cells(folder: Path, count: int, side: int = 64) -> None:
    """An invented package elpv_dataset in ``folder``: cells with a dark line in proportion to their probability."""
    random = np.random.default_rng(0)
    package = folder / "elpv_dataset"
    (package / "data" / "images").mkdir(parents=True)
    (package / "__init__.py").touch()
    lines = []
    for number in range(count):
        probability = (0.0, 0.0, 0.3333333333333333, 0.6666666666666666, 1.0)[number % 5]
        pixels = random.normal(150, 10, (side, side))
        pixels[:, : int(side * probability / 2)] -= 90
        name = f"images/cell{number:04}.png"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(package / "data" / name)
        lines.append(f"{name}  {probability} {('mono', 'poly')[number % 2]}")
    (package / "data" / "labels.csv").write_text("\n".join(lines))


def test_folds_of_photographs_are_a_partition_with_equal_shares(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elpv = module(monkeypatch, "elpv")
    monkeypatch.setattr(elpv, "PIXELS", 16)
    cells(tmp_path, 100, side=20)
    monkeypatch.syspath_prepend(tmp_path)
    elpv.write_images(tmp_path / "jpeg")
    elpv.write_folds(tmp_path / "jpeg", tmp_path / "folds")

    def names(split: str) -> set[str]:
        return {f"{path.parent.name}/{path.name}" for path in (tmp_path / "folds" / split).rglob("*.jpg")}

    tests = [names(f"fold{fold}/test") for fold in range(5)]
    everything = set().union(*tests)
    assert [len(test) for test in tests] == [20] * 5
    assert len(everything) == 100
    for fold, test in enumerate(tests):
        assert names(f"fold{fold}/train") == everything - test
        assert sum(name.startswith("1_defective/") for name in test) == 8
    assert (names("tune/test"), names("tune/train")) == (tests[1], tests[2] | tests[3] | tests[4])
    assert {name for name in everything if name.startswith("0")} == {
        f"0_functional/cell{number:04}.jpg" for number in range(100) if number % 5 < 3
    }
    with Image.open(tmp_path / "folds/fold0/test" / min(tests[0])) as image:
        assert (image.size, image.mode) == ((16, 16), "L")


def test_the_regression_of_photographs_learns_from_training_labels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    elpv = module(monkeypatch, "elpv")
    random = np.random.default_rng(0)
    labels = (random.random(400) < 0.3).astype(np.int64)
    features = random.normal(size=(400, 8)) + labels[:, None] * np.eye(8)[0] * 2
    train, test = slice(0, 300), slice(300, 400)
    found = elpv.classified(features[train], labels[train], features[test], labels[test])
    best = 100 * stats.norm.cdf(2 / np.sqrt(2))  # AUROC of the one informative feature
    assert abs(found["auroc"] - best) < 5
    assert abs(found["balanced"] - 100 * stats.norm.cdf(1)) < 6
    other = elpv.classified(features[train], labels[train], features[test], 1 - labels[test])
    for name, value in found.items():
        assert other[name] == pytest.approx(100 - value), "opposite labels, same predictions"


@pytest.mark.long
def test_scores_are_those_of_the_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arm = module(monkeypatch, "arm")
    small = ["experiment=fashion_mnist", "data=digits", "data.pad=0", "batch_size=128", "epochs=1", *SMALL]
    run = pretrain(compose("pretrain", [*small, "optim.warmup_epochs=0", f"run={tmp_path / 'run'}", "workers=0"]))
    own = arm.classified(compose("linprobe", [f"checkpoint={run.path}"]), 0)
    commands = {"knn": ("knn", []), "probe": ("linprobe", ["protocol=cached"])}
    for score, (command, keys) in commands.items():
        record = evaluate(command, compose(command, [f"checkpoint={run.path}", "untrained=false", *keys]))
        assert own[score] == pytest.approx(record["top1"], abs=0.3), "one test image of 360: features are rounded"


@pytest.mark.long
def test_every_arm_is_a_valid_training(studies: ModuleType) -> None:
    from dmjd.builders.step import flops_per_image

    arms = {arm.id: arm for study in studies.Plan.read(STUDIES).studies for arm in study.arms.values()}
    for arm in arms.values():
        config = compose("pretrain", [f"{key}={value}" for key, value in arm.keys.items()])
        assert flops_per_image(config) > 0


@pytest.mark.long
def test_tiny_studies_from_training_to_page(studies: ModuleType, tmp_path: Path) -> None:
    """``make evidence-smoke``."""
    record, page = tmp_path / "rows.jsonl", tmp_path / "docs" / "evidence.md"
    page.parent.mkdir()
    cells(tmp_path / "package", 60)
    paths = [str(ROOT / "benchmarks"), str(ROOT), str(tmp_path / "package"), os.environ.get("PYTHONPATH", "")]
    arguments = ["--studies", str(TINY), "--record", str(record), "--page", str(page)]

    def call(command: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "evidence", command, *arguments, "--elpv", str(tmp_path / "jpeg")],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert call("photographs").startswith("60 images")
    arms = studies.Plan.read(TINY).studies[0].arms
    for name, speed in (("k1", 2000.0), ("k2", 1000.0)):  # `steps` sums kernels of a GPU
        row = {"arm": arms[name].step.id, "stage": studies.STEP, "seed": 0, "rate": 0.0, "images_per_second": speed}
        studies.Rows(record).add(row)
    call("run")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    rows = [row for row in lines if row["stage"] != studies.STEP]
    assert [row["epochs"] for row in rows if row["arm"] == arms["k1_time"].id] == [8, 8], "twice those of two views"
    digits = [row for row in rows if "probe" in row["scores"]]
    assert sorted((row["stage"], row["seed"]) for row in digits) == (
        [("full", seed) for seed in (0, 0, 0, 1, 1, 1)] + [("tune", 0)] * 2
    )
    assert all(row["scores"]["probe"] > 30 for row in digits), "chance is 10"
    photographs = [row for row in rows if "auroc" in row["scores"]]
    assert sorted((row["stage"], row["seed"]) for row in photographs) == [("full", 0), ("full", 1), ("tune", 0)]
    assert all(row["scores"]["auroc"] > 80 for row in photographs), "a dark line is a defect; chance is 50"
    trained = record.read_text()
    call("run")
    assert record.read_text() == trained, "nothing is trained twice"
    call("page")
    text = page.read_text()
    for line in ("| K = 1 |", "| before training |", "Two views are better than one. | - | linear probe |"):
        assert line in text
    assert "| a paper | - | - | - | - | - | 50.0 | - |" in text
    assert (page.parent / "images" / "evidence_a.png").stat().st_size > 5000
