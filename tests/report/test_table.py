from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmjd.errors import DataError
from dmjd.evaluate import Column
from dmjd.report.format import hours, scores, times
from dmjd.report.run import read_run
from dmjd.report.table import Table, compare, escape_markdown

MakeRun = Callable[..., Path]


def table(*folders: Path) -> Table:
    return compare([read_run(folder) for folder in folders], None)


def cells(title: str, *folders: Path) -> list[str]:
    (column,) = [column for column in table(*folders).columns if column.title == title]
    return column.cells


def titles(*folders: Path) -> list[str]:
    return [column.title for column in table(*folders).columns]


def test_columns_come_in_the_papers_order(make_run: MakeRun) -> None:
    online = make_run("a", curve=[(50, 40.0)])
    judged = make_run(
        "b",
        evaluations=[
            ("depth", "trained", 100, 48.0, {}),
            ("finetune", "trained", 100, 83.6, {}),
            ("linprobe", "trained", 100, 68.0, {}),
            ("knn", "ema", 100, 61.0, {}),
            ("knn", "trained", 100, 60.0, {}),
            ("knn", "untrained", 0, 10.0, {}),
        ],
    )
    head = ["Run", "Method", "m_patt", "K", "Epoch", "ETE", "m_corr", "m_pred"]
    measured = ["kNN online", "kNN", "kNN EMA", "Lin.", "Ft.", "depth"]
    assert titles(online, judged) == [*head, *measured, "GPU hours", "Gh."]
    assert titles(make_run("c")) == [*head, "GPU hours", "Gh."]


def test_a_run_that_was_not_judged_has_dashes(make_run: MakeRun) -> None:
    judged = make_run("a", evaluations=[("knn", "trained", 100, 60.25, {})])
    assert cells("kNN", make_run("b"), judged, make_run("c", done=20)) == ["-", "60.25", "-"]


def test_scores_under_other_settings_are_other_columns(make_run: MakeRun) -> None:
    how = {"pooling": "mean", "train_images": 1000}
    a = make_run("a", evaluations=[("knn", "trained", 100, 60.0, how | {"k": 20})])
    b = make_run(
        "b",
        evaluations=[
            ("knn", "trained", 100, 61.0, how | {"k": 20}),
            ("knn", "trained", 100, 59.5, how | {"k": 5}),
            ("knn", "trained", 50, 99.0, how | {"k": 5}),  # an earlier checkpoint
        ],
    )
    assert cells("kNN (k 20)", a, b) == ["60.0", "61.0"]
    assert cells("kNN (k 5)", a, b) == ["-", "59.5"]
    meanings = dict(table(a, b).meanings)
    assert "latest checkpoint" in meanings["kNN (k 5)"]
    assert meanings["kNN (k 5)"].endswith("(k 5, pooling mean, train_images 1000).")


def test_a_score_is_explained_by_what_it_compares_with(make_run: MakeRun) -> None:
    how = {"data": "folder, 64x64"}
    trained, untrained = ("knn", "trained", 100, 60.0, how), ("knn", "untrained", 0, 20.0, how)
    data = {"data": {"name": "folder", "image_size": [32, 32]}}
    a = make_run("a", evaluations=[trained, untrained], config=data)
    b = make_run("b", evaluations=[trained], config=data)
    for name, untrained_score in ((a, None), (b, 25.0)):
        path = name / "evaluations" / "0.json"
        values = {"chance": 10.0, "majority": 11.5, "untrained": untrained_score}
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    meaning = dict(table(a, b).meanings)["kNN"]
    assert "Chance: 10.00 %. Majority: 11.50 %. Untrained: 20.00 % of a, 25.00 % of b." in meaning
    assert "a: unlike pre-training: images of 64x64 pixels, pre-trained on 32x32." in meaning
    (a / "evaluations" / "0.json").write_text(
        json.dumps({"verb": "knn", "weights": "trained", "step": 1, "top1": 1.0, "chance": float("nan")})
    )
    with pytest.raises(DataError, match=r"has chance=nan; it must be a finite number$"):
        read_run(a)


def test_online_scores_compare_only_under_equal_settings(make_run: MakeRun) -> None:
    def online(name: str, neighbours: int, score: float) -> Path:
        section = {"every_epochs": 9, "neighbours": neighbours, "warn_drop": neighbours}
        return make_run(name, curve=[(10, score), (60, 9.0)], config={"online_knn": section})

    folders = online("a", 20, 40.0), online("b", 5, 41.0), online("c", 20, 42.0)
    assert cells("kNN online (neighbours 20)", *folders) == ["40.0", "-", "42.0"]  # the best, not the last
    assert cells("kNN online (neighbours 5)", *folders) == ["-", "41.0", "-"]


def test_online_scores_of_other_data_do_not_compare(make_run: MakeRun) -> None:
    """They are taken on the run's own images, so a speed-up between two data sets would mean nothing."""

    def trained_on(name: str, data: str, score: float) -> Path:
        return make_run(name, curve=[(10, score)], config={"data": {"name": data, "image_size": [32, 32]}})

    folders = trained_on("a", "digits", 90.0), trained_on("b", "folder", 91.0), trained_on("c", "digits", 92.0)
    assert cells("kNN online (data digits)", *folders) == ["90.0", "-", "92.0"]
    assert cells("kNN online (data folder)", *folders) == ["-", "91.0", "-"]
    runs = [read_run(folder) for folder in folders]
    assert compare(runs, runs[0]).columns[-1].cells == ["1x", "- (no score)", "1x"]


def test_online_scores_of_other_views_do_not_compare(make_run: MakeRun) -> None:
    def seen(name: str, crop_pct: float) -> Path:
        return make_run(name, curve=[(10, 50.0)], config={"data": {"name": "folder", "crop_pct": crop_pct}})

    folders = seen("a", 0.875), seen("b", 1.0)
    assert cells("kNN online (crop_pct 0.875)", *folders) == ["50.0", "-"]


@pytest.mark.parametrize(
    ("method", "views", "regulation", "branch", "text"),
    [
        ("mae", 1, "disjoint", False, "MAE"),
        ("mae", 2, "disjoint", False, "MAE +DM"),
        ("mae", 2, "none", False, "MAE"),
        ("maskfeat", 1, "disjoint", True, "MaskFeat +JD"),
        ("convmae", 2, "disjoint", True, "ConvMAE +DMJD"),
        ("dmjd", 2, "disjoint", True, "DMJD"),
        ("dmjd", 2, "disjoint", False, "DM"),
        ("dmjd", 1, "disjoint", True, "JD"),
        ("dmjd", 2, "none", False, "MIM"),
        ("own", 2, "disjoint", False, "own +DM"),
    ],
)
def test_methods_are_named_as_in_the_paper(
    make_run: MakeRun, method: str, views: int, regulation: str, branch: bool, text: str
) -> None:
    section = {"name": method, "visible_branch": {"enabled": branch}}
    mask = {"views": views, "pattern": "block", "regulation": regulation}
    assert cells("Method", make_run("a", config={"method": section, "mask": mask})) == [text]


def test_only_a_repeated_base_is_left_out(make_run: MakeRun) -> None:
    methods = [("mae", 2), ("mae", 1), ("mae", 2), ("simmim", 2), ("mae", 2)]
    folders = [make_run(str(index), method=name, views=views) for index, (name, views) in enumerate(methods)]
    assert cells("Method", *folders) == ["MAE +DM", "MAE", "+DM", "SimMIM +DM", "MAE +DM"]


def test_epochs_are_those_done(make_run: MakeRun) -> None:
    folders = make_run("a", epochs=400, views=2), make_run("b", epochs=400, views=3, done=62.5)
    assert cells("Epoch", *folders) == ["400", "62.5 of 400"]
    assert cells("ETE", *folders) == ["800", "187.5"]


def test_rates_are_the_measured_ones(make_run: MakeRun) -> None:
    folder = make_run("a", rates=(30 / 49, 49 / 49), config={"mask": {"mask_ratio": 0.6, "views": 2}})
    assert (cells("m_corr", folder), cells("m_pred", folder)) == (["61.2 %"], ["100.0 %"])


def test_gpu_hours_count_gpus_and_the_papers_are_of_eight(make_run: MakeRun) -> None:
    folders = [make_run(f"on-{size}", hours=50, launches=[("A100", size)]) for size in (1, 8, 64)]
    assert cells("GPU hours", *folders) == ["50", "400", "3200"]
    assert cells("Gh.", *folders) == ["6.25 (computed)", "50", "400 (computed)"]


def test_cpu_hours_are_no_gpu_hours(make_run: MakeRun) -> None:
    cpu = make_run("a", hours=3, launches=[("cpu (2 threads)", 2)])
    assert titles(cpu)[-2:] == ["CPU hours", "Gh."]
    gpu = make_run("b", hours=3, launches=[("A100", 8)])
    assert cells("CPU hours", cpu, gpu) == ["6", "-"]
    assert cells("GPU hours", cpu, gpu) == ["-", "24"]
    assert cells("Gh.", cpu, gpu) == ["-", "3"]


def test_hours_of_a_resumed_run_are_those_of_all_launches(make_run: MakeRun) -> None:
    # ``seconds`` goes on where the launch before stopped, so launches must not be counted again.
    assert cells("GPU hours", make_run("a", hours=12, launches=[("A100", 8)] * 3)) == ["96"]


def test_hours_are_not_guessed(make_run: MakeRun) -> None:
    resized = make_run("a", launches=[("A100", 8), ("A100", 4)])
    moved = make_run("b", launches=[("A100", 8), ("cpu (2 threads)", 8)])
    silent = make_run("c")
    (silent / "timing.jsonl").write_text("")
    folders = resized, moved, silent
    assert cells("GPU hours", *folders) == ["-", "-", "-"]
    assert cells("Gh.", *folders) == ["-", "-", "-"]


def test_runs_before_there_were_world_sizes_had_one_process(make_run: MakeRun) -> None:
    folder = make_run("a", hours=5)
    (folder / "provenance.json").write_text(json.dumps({"device": "A100"}))
    assert cells("GPU hours", folder) == ["5"]


@pytest.mark.parametrize("size", [0, "two", 1.5, None])
def test_a_world_size_that_is_none_is_refused(make_run: MakeRun, size: Any) -> None:
    folder = make_run("a", launches=[("A100", size)])
    message = rf"^a/provenance.json has world_size={size}; it must be a number of processes, at least 1$"
    with pytest.raises(DataError, match=message):
        table(folder)


def test_names_cannot_break_the_table(make_run: MakeRun) -> None:
    folder = make_run("a|b <i>*c*", method="x\n|y", pattern="[z](http:u)")
    lines = table(folder).markdown().splitlines()
    assert len(lines) == 3
    assert r"| x \|y  | \[z\](http:u) |" in lines[2]
    assert r"| a\|b \<i\>\*c\*" in lines[2]
    assert "<i>" not in table(folder).html()
    assert "a|b &lt;i&gt;*c*" in table(folder).html()


def test_source_of_the_markdown_lines_up(make_run: MakeRun) -> None:
    lines = table(make_run("a"), make_run("a long | name", hours=12345)).markdown().splitlines()
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("text", "escaped"), [("mae_dm_1", "mae_dm_1"), ("_a_", r"\_a\_"), ("a\\`$&", r"a\\\`\$\&"), (" a\n b ", "a b")]
)
def test_markdown_leaves_plain_names_alone(text: str, escaped: str) -> None:
    assert escape_markdown(text) == escaped


@pytest.mark.parametrize(
    ("value", "text"),
    [(1816.2, "1816"), (226.6, "227"), (99.96, "100"), (70, "70"), (6.254, "6.25"), (0.0398, "0.0398")],
)
def test_hours_read_well(value: float, text: str) -> None:
    assert hours(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(227 / 127, "1.8x"), (227 / 70, "3.2x"), (1, "1x"), (3.04, "3x"), (0.996, "1x"), (0.51, "0.51x")],
)
def test_speedups_read_as_in_the_paper(ratio: float, text: str) -> None:
    assert times(ratio) == text


def test_scores_have_as_many_decimals_as_they_need() -> None:
    column = Column("Ft.", "fine-tuning top-1")
    assert scores([83.6, None, 85.0], column) == ["83.6", "-", "85.0"]
    assert scores([83.6, None, 85.25], column) == ["83.60", "-", "85.25"]
    assert scores([3.2, None, 12345.6], replace(column, unit="ms")) == ["3.2", "-", "12346"]
