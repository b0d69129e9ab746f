"""The studies in benchmarks/evidence: which trainings are missing, the statistics, the official pairing of targets."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dmjd.compose import compose
from dmjd.masking import MaskSpec

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
    scores = dict.fromkeys(job.scores, probe)
    return {"arm": arm, "stage": stage, "seed": seed, "rate": rate, "scores": scores, "gpu_seconds": 1.0}


def test_seeds_follow_the_best_rate_and_none_is_trained_twice(studies: ModuleType, tmp_path: Path) -> None:
    plan, rows = studies.Plan.read(STUDIES, ["a"]), studies.Rows(tmp_path / "rows.jsonl")
    arm = plan.studies[0].arms["k1"]
    first = [job for job in plan.jobs(rows) if job.arm.id == arm.id]
    assert [(job.stage, job.rate, job.epochs) for job in first] == [("tune", rate, 10) for rate in plan.rates]
    for job, probe in zip(first, (70.0, 75.0, 75.0), strict=True):
        rows.add(row_of(job, probe))
    later = [job for job in plan.jobs(rows) if job.arm.id == arm.id]
    assert [(job.stage, job.seed, job.rate, job.epochs) for job in later] == [("full", s, 5e-4, 20) for s in range(5)]
    for job in later[:3]:
        rows.add(row_of(job))
    again = studies.Rows.read(tmp_path / "rows.jsonl")
    assert [job.seed for job in plan.jobs(again) if job.arm.id == arm.id] == [3, 4]
    assert list(again.full(arm, plan.rates)) == [0, 1, 2]


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
        found = paired.Difference((low + high) / 2, low, high, 1.0, 5)
        assert tuple(paired.verdict(found, expect, 1.0) for expect in ("higher", "equal")) == expected


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
    aligned, misaligned = arm.build_paired(config, 4), arm.build_misaligned(config, 4)
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


@pytest.mark.long
def test_every_arm_is_a_valid_training(studies: ModuleType) -> None:
    from dmjd.builders.step import flops_per_image

    arms = {arm.id: arm for study in studies.Plan.read(STUDIES).studies for arm in study.arms.values()}
    for arm in arms.values():
        config = compose("pretrain", [f"{key}={value}" for key, value in arm.keys.items()])
        assert flops_per_image(config) > 0


@pytest.mark.long
def test_a_tiny_study_from_training_to_page(tmp_path: Path) -> None:
    """``make evidence-smoke``."""
    record, page = tmp_path / "rows.jsonl", tmp_path / "docs" / "evidence.md"
    page.parent.mkdir()
    python_path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])

    def call(command: str) -> str:
        arguments = ["--studies", str(TINY), "--record", str(record), "--page", str(page)]
        ended = subprocess.run(
            [sys.executable, "-m", "evidence", command, *arguments],
            env=os.environ | {"PYTHONPATH": python_path},
            capture_output=True,
            text=True,
            check=True,
        )
        return ended.stdout

    call("run")
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert (
        sorted((row["stage"], row["seed"]) for row in rows) == [("full", s) for s in (0, 0, 1, 1)] + [("tune", 0)] * 2
    )
    assert all(row["scores"]["probe"] > 30 for row in rows), "chance is 10"
    trained = record.read_text()
    call("run")
    assert record.read_text() == trained, "nothing is trained twice"
    call("page")
    text = page.read_text()
    assert "| K = 1 |" in text
    assert "| before training |" in text
    assert "Two views are better than one. | - | linear probe |" in text
    assert (page.parent / "images" / "evidence_a.png").stat().st_size > 5000
