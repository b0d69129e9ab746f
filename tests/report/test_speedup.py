from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dmjd.config import EvaluationConfig
from dmjd.evaluate import EVALUATIONS, Column, Evaluation, Scores
from dmjd.report.run import read_run
from dmjd.report.scores import metrics
from dmjd.report.speedup import Speedup, speedup

MakeRun = Callable[..., Path]

KNN = {"k": 20}


def against(run: Path, baseline: Path) -> Speedup:
    ours, theirs = read_run(run), read_run(baseline)
    return speedup(ours, theirs, metrics([ours, theirs]))


@pytest.fixture
def baseline(make_run: MakeRun) -> Path:
    """100 h on 8 GPUs for 100 epochs; its best score, 60, is there after 80 h, and falls again."""
    return make_run("baseline", curve=[(40, 50.0), (80, 60.0), (100, 58.0)])


def test_time_to_the_baselines_best_score_is_what_counts(make_run: MakeRun, baseline: Path) -> None:
    run = make_run("run", hours=50, curve=[(20, 55.0), (40, 61.0), (100, 70.0)])
    assert against(run, baseline).cell == "4x"  # 80 h against 20 h
    assert "kNN online 61 % after 160 GPU hours; baseline took 640 to 60 %" in against(run, baseline).reason


def test_an_equal_score_at_an_earlier_step_counts(make_run: MakeRun, baseline: Path) -> None:
    assert against(make_run("run", curve=[(25, 60.0), (50, 20.0)]), baseline).cell == "3.2x"


def test_a_score_just_below_does_not(make_run: MakeRun, baseline: Path) -> None:
    outcome = against(make_run("run", curve=[(25, 59.999), (100, 59.9)]), baseline)
    assert outcome.cell == "- (not reached)"
    assert "59.999 % at best, below the 60 % of baseline" in outcome.reason


def test_a_slower_run_is_below_one(make_run: MakeRun, baseline: Path) -> None:
    assert against(make_run("run", hours=200, curve=[(100, 60.0)]), baseline).cell == "0.4x"


def test_gpus_count_as_time(make_run: MakeRun, baseline: Path) -> None:
    run = make_run("run", hours=100, curve=[(80, 60.0)], launches=[("NVIDIA A100-SXM4-40GB", 4)])
    assert against(run, baseline).cell == "2x"


def test_a_resumed_run_is_counted_from_its_first_launch(make_run: MakeRun, baseline: Path) -> None:
    run = make_run("run", curve=[(50, 60.0)], launches=[("NVIDIA A100-SXM4-40GB", 8)] * 3)
    assert against(run, baseline).cell == "1.6x"


def test_the_baseline_is_its_own_measure(baseline: Path) -> None:
    run = read_run(baseline)
    outcome = speedup(run, run, metrics([run]))
    assert outcome == Speedup("1x", "baseline: kNN online 60 % after 640 GPU hours, the baseline.")


def test_without_curves_the_latest_evaluation_counts_alone(make_run: MakeRun) -> None:
    baseline = make_run("baseline", evaluations=[("knn", "trained", 100, 60.0, KNN)])
    early = ("knn", "trained", 10, 99.0, KNN)  # of an earlier checkpoint
    assert (
        against(make_run("a", hours=25, evaluations=[early, ("knn", "trained", 100, 60.0, KNN)]), baseline).cell == "4x"
    )
    below = make_run("b", hours=25, evaluations=[early, ("knn", "trained", 100, 59.0, KNN)])
    assert against(below, baseline).cell == "- (not reached)"


def test_an_evaluation_happened_at_its_checkpoint(make_run: MakeRun) -> None:
    baseline = make_run("baseline", evaluations=[("knn", "trained", 100, 60.0, KNN)])
    run = make_run("run", evaluations=[("knn", "trained", 45, 60.0, KNN)])  # between two logged steps
    assert "after 360 GPU hours" in against(run, baseline).reason


def test_a_curve_does_not_compare_with_an_evaluation(make_run: MakeRun, baseline: Path) -> None:
    run = make_run("run", evaluations=[("knn", "trained", 100, 90.0, KNN)])
    assert against(run, baseline).cell == "- (no score)"
    both = make_run("both", curve=[(50, 99.0)], evaluations=[("knn", "trained", 100, 45.0, KNN)])
    assert against(run, both).cell == "1x"
    assert "kNN 90 %" in against(run, both).reason


@pytest.mark.parametrize(
    "other",
    [("linprobe", "trained", 100, 90.0, KNN), ("knn", "ema", 100, 90.0, KNN), ("knn", "trained", 100, 90.0, {})],
)
def test_other_scores_do_not_compare(make_run: MakeRun, other: tuple[str, str, float, float, dict[str, int]]) -> None:
    baseline = make_run("baseline", evaluations=[("knn", "trained", 100, 60.0, KNN)])
    outcome = against(make_run("run", evaluations=[other]), baseline)
    assert outcome == Speedup("- (no score)", "run has no score in common with baseline.")


def test_a_score_before_the_first_step_is_no_merit(make_run: MakeRun) -> None:
    baseline = make_run("baseline", curve=[(0, 70.0), (100, 60.0)])
    assert against(make_run("run", curve=[(0, 99.0), (50, 60.0)]), baseline).cell == "2x"


def test_where_lower_is_better_the_baselines_least_score_counts(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"top1": Column("Error", "top-1 error", "points", higher_is_better=False)}
    evaluation = Evaluation("error", "", EvaluationConfig, lambda context: Scores({}, {}), columns)
    monkeypatch.setitem(EVALUATIONS, "error", evaluation)
    baseline = make_run("baseline", evaluations=[("error", "trained", 100, 40.0, {})])
    lower = against(make_run("a", hours=25, evaluations=[("error", "trained", 100, 39.0, {})]), baseline)
    assert lower.cell == "4x"
    assert "Error 39 points after 200 GPU hours" in lower.reason
    higher = against(make_run("b", hours=25, evaluations=[("error", "trained", 100, 41.0, {})]), baseline)
    assert higher.cell == "- (not reached)"
    assert "above the 40 points of baseline" in higher.reason


@pytest.mark.parametrize(
    "launches", [[("H100", 8)], [("NVIDIA A100-SXM4-40GB", 8), ("H100", 8)], [(None, 8)], [("cpu (2 threads)", 1)]]
)
def test_other_devices_do_not_compare(
    make_run: MakeRun, baseline: Path, launches: list[tuple[str | None, int]]
) -> None:
    outcome = against(make_run("run", curve=[(50, 99.0)], launches=launches), baseline)
    assert outcome.cell == "- (devices differ)"
    assert outcome.reason.startswith("run ran on ")
    assert "baseline on NVIDIA A100-SXM4-40GB" in outcome.reason


def test_a_run_that_changed_its_world_size_has_no_known_hours(make_run: MakeRun, baseline: Path) -> None:
    a100 = "NVIDIA A100-SXM4-40GB"
    outcome = against(make_run("run", curve=[(50, 99.0)], launches=[(a100, 8), (a100, 4)]), baseline)
    assert outcome.cell == "- (processes differ)"
    assert outcome.reason == "run was launched with 8 and 4 processes, and the log does not record the time with each."
