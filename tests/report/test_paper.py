"""The table of scores beside the published rows: columns, seeds, protocols, marks."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmjd.report import paper_text, write_comparison, write_report
from dmjd.report.paper import PUBLISHED_NOTE, PaperTable, paper_table
from dmjd.report.run import read_runs
from tests.report.conftest import A100, VIT_B
from tests.report.html_page import Page

pytestmark = pytest.mark.usefixtures("undrawn")

MakeRun = Callable[..., Path]
MAE: dict[str, Any] = {"backbone": VIT_B, "target": {"name": "pixels", "norm": "patch"}}
DATA = {"data": "photos, 224x224"}
FINETUNE = {**DATA, "epochs": 100, "batch_size": 1024, "layer_decay": 0.65, "pooling": "mean"}


def table(*folders: Path) -> PaperTable:
    return paper_table(read_runs(folders))


def rows(paper: PaperTable) -> list[dict[str, str]]:
    columns = {column.title: column.cells for column in paper.table.columns}
    return [{title: cells[place] for title, cells in columns.items()} for place in range(len(columns["Run"]))]


def finetuned(top1: float, seed: int) -> tuple[str, str, float, float, dict[str, Any]]:
    """A record of ``dmjd finetune`` in the pre-training run."""
    return "finetune", "trained", 100, top1, FINETUNE | {"seed": seed, "run": f"finetune-{seed}"}


def test_a_run_stands_in_the_papers_columns_beside_the_rows_of_its_method(make_run: MakeRun) -> None:
    probed = ("linprobe", "trained", 100, 61.0, DATA | {"protocol": "mae", "lr": 6.4})
    neighbours = ("knn", "trained", 100, 40.0, DATA | {"k": 20})
    untrained = ("knn", "untrained", 0, 12.5, DATA | {"k": 20})
    folder = make_run(
        "a", epochs=1600, hours=227, evaluations=[neighbours, probed, finetuned(83.0, 0), untrained], config=MAE
    )
    paper = table(folder)
    ours, baseline, *published = rows(paper)
    assert [*ours] == ["Run", "Method", "Backbone", "Target", "ETE", "Gh.", "Ft.", "LP (protocol mae)",
                       "LP (protocol not stated)", "kNN", "mIoU", "AP box/mask", "Device hours"]  # fmt: skip
    assert [*ours.values()] == ["a", "MAE", "ViT-B", "RGB", "1600", "227", "83.00", "61.00", "-", "40.00", "-", "-",
                                f"1816 GPU hours, 8 x {A100}"]  # fmt: skip
    assert (baseline["Run"], baseline["kNN"], baseline["Ft."]) == ("untrained encoder", "12.50", "-")
    first = published[0]
    assert first["Run"].startswith("† paper, Tables")
    assert [first[key] for key in ("Gh.", "Ft.", "LP (protocol mae)", "mIoU", "AP box/mask")] == [
        "227 †", "83.6 †", "68.0 †", "48.1 †", "50.3/44.9 †",
    ]  # fmt: skip
    assert all(each["Method"].startswith("MAE") and each["Backbone"] == "ViT-B" for each in published)
    assert not any("+" in each["Method"] for each in published)
    marked = [cell for each in published for key, cell in each.items() if any(c.isdigit() for c in cell)
              and key not in ("Run", "Method", "Backbone", "ETE", "Device hours")]  # fmt: skip
    assert marked
    assert all(cell.endswith(" †") for cell in marked)
    assert paper.notes[0] == PUBLISHED_NOTE


def test_two_protocols_never_share_a_column(make_run: MakeRun) -> None:
    def probed(name: str, top1: float, **settings: Any) -> Path:
        judged = [("linprobe", "trained", 100, top1, DATA | settings)]
        return make_run(name, evaluations=judged, config=MAE | {"batch_size": int(top1)})

    folders = [
        probed("auto", 40.0),
        probed("mae", 50.0, protocol="mae", epochs=90),
        probed("short", 45.0, protocol="mae", epochs=9),
        probed("attentive", 60.0, protocol="attentive", epochs=20),
        probed("beit", 55.0, protocol="beit", selection="best of 12 layers on the test images"),
    ]
    paper = table(*folders)
    shown = {
        title: [cell for cell in column if cell != "-" and "†" not in cell]
        for column in ([each.title, *each.cells] for each in paper.table.columns)
        if (title := column.pop(0)).startswith("LP")
    }
    assert shown == {
        "LP (protocol attentive)": ["60.00"],
        "LP (protocol auto)": ["40.00"],
        "LP (protocol beit, best of 12 layers on the test images)": ["55.00"],
        "LP (protocol mae, epochs 9)": ["45.00"],
        "LP (protocol mae, epochs 90)": ["50.00"],
        "LP (protocol not stated)": [],
    }


def test_scores_with_few_labels_stand_apart(make_run: MakeRun) -> None:
    few = DATA | {"few_shot": 1.0, "few_shot_images": "1f", "train_images": 12}
    full = DATA | {"train_images": 1200}
    judged = [(verb, "trained", 100, top1, how) for verb, how, top1 in (
        ("linprobe", full | {"protocol": "mae"}, 60.0), ("linprobe", few | {"protocol": "mae"}, 30.0),
        ("knn", full, 40.0), ("knn", few, 20.0), ("linprobe", few | {"few_shot": "list"}, 33.0),
    )]  # fmt: skip
    ours, *published = rows(table(make_run("a", evaluations=judged, config=MAE)))
    shown = {title: cell for title, cell in ours.items() if title.startswith(("LP", "kNN"))}
    assert shown == {
        "LP (protocol auto, listed labels)": "33.00",
        "LP (protocol mae)": "60.00",
        "LP (protocol mae, 1 % of labels)": "30.00",
        "LP (protocol not stated)": "-",
        "kNN": "40.00",
        "kNN (1 % of labels)": "20.00",
    }
    assert {each["LP (protocol mae, 1 % of labels)"] for each in published} == {"-"}
    assert published[0]["LP (protocol mae)"] == "68.0 †"


def test_runs_that_differ_in_the_seed_are_one_row_and_others_are_not(make_run: MakeRun) -> None:
    def seeded(name: str, seed: int, top1: float, hours: float = 100, **config: Any) -> Path:
        judged = [("knn", "trained", 100, top1, DATA | {"k": 20})]
        model = MAE | {"seed": seed, "run": f"runs/{name}", "typed": ["seed"] * seed} | config
        return make_run(name, evaluations=judged, hours=hours, config=model)

    scores = [40.0, 41.5, 43.75]
    folders = [seeded(f"s{seed}", seed, score, 99 + seed) for seed, score in enumerate(scores, start=1)]
    folders += [seeded("wide", 0, 60.0, batch_size=4096), seeded("short", 0, 20.0, epochs=50)]
    paper = table(*folders)
    ours = rows(paper)[: paper.own]
    assert [row["Run"] for row in ours] == ["s1, s2, s3", "wide", "short"]
    mean, deviation = statistics.mean(scores), statistics.stdev(scores)
    assert [row["kNN"] for row in ours] == [f"{mean:.2f} ± {deviation:.2f} (3)", "60.00", "20.00"]
    assert [row["Differs in"] for row in ours] == ["-", "batch_size 4096", "epochs 50"]
    assert [row["Gh."] for row in ours] == ["101", "100", "100"]
    (line,) = paper.values
    assert line == "kNN: 40.00 (s1, seed 1), 41.50 (s2, seed 2), 43.75 (s3, seed 3)."
    markdown, page, _, numbers = write_comparison(folders)
    assert line in Page(page.read_text()).items
    assert f"- {line}" in markdown.read_text()
    assert f"{mean:.2f} ± {deviation:.2f} (3)" in numbers.read_text()


def test_a_run_that_has_not_come_as_far_is_a_row_of_its_own(make_run: MakeRun) -> None:
    folders = [make_run("a", config=MAE | {"seed": 0}), make_run("b", config=MAE | {"seed": 1}, done=40)]
    paper = table(*folders)
    assert [row["Run"] for row in rows(paper)[: paper.own]] == ["a", "b"]


def test_repeats_with_several_seeds_of_one_run_are_one_score(make_run: MakeRun) -> None:
    scores = [83.4, 83.6, 83.5]
    tuned = [finetuned(score, seed) for seed, score in enumerate(scores)][::-1]
    probes = [("linprobe", "trained", 100, 60.0 + seed, DATA | {"lr": 6.4, "seed": seed}) for seed in range(2)]
    earlier = ("linprobe", "trained", 50, 10.0, DATA | {"lr": 6.4, "seed": 0})
    folder = make_run("a", evaluations=[*tuned, *probes, earlier], config=MAE)
    paper = table(folder)
    ours = rows(paper)[0]
    assert ours["Ft."] == f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f} (3)"
    assert ours["LP (protocol auto)"] == f"60.50 ± {statistics.stdev([60, 61]):.2f} (2)"
    assert paper.values == [
        "Ft.: 83.40 (finetune-0, seed 0), 83.60 (finetune-1, seed 1), 83.50 (finetune-2, seed 2).",
        "LP (protocol auto): 60.00 (a; evaluation seed 0), 61.00 (a; evaluation seed 1).",
    ]
    # The page of the run lists each of them with its conditions.
    page = Page(write_report(folder).read_text())
    assert [row[1] for row in page.scores() if "fine-tuning" in row[0]] == ["83.50", "83.60", "83.40"]


def test_fine_tunings_of_other_settings_are_other_scores(make_run: MakeRun) -> None:
    def record(place: int, top1: float, base_lr: float, config: str) -> Any:
        *start, settings = finetuned(top1, place)
        return (*start, settings | {"base_lr": base_lr, "config": config})

    tuned = [record(0, 70.0, 1e-3, "aa"), record(1, 80.0, 1e-4, "bb"), record(2, 90.0, 1e-4, "cc")]
    ours = rows(table(make_run("a", evaluations=tuned, config=MAE)))[0]
    assert {title: cell for title, cell in ours.items() if title.startswith("Ft.")} == {
        "Ft. (base_lr 0.001)": "70.00",
        "Ft. (base_lr 0.0001, config bb)": "80.00",
        "Ft. (base_lr 0.0001, config cc)": "90.00",
    }


def test_repeats_with_equal_seeds_are_one_value(make_run: MakeRun, make_finetune: MakeRun) -> None:
    verb, settings, other = "finetune", FINETUNE | {"seed": 0}, finetuned(84.0, 1)
    copied = (*finetuned(83.0, 0)[:-1], settings | {"run": "copy"})
    early = (*finetuned(90.0, 2)[:-1], settings | {"seed": 2, "run": "finetune-2", "init_step": 50})
    one = make_run("a", evaluations=[finetuned(83.0, 0), copied], config=MAE | {"seed": 0})
    assert (rows(table(one))[0]["Ft."], table(one).values) == ("83.00", [])
    (one / "evaluations" / "1.json").unlink()
    for name, record in (("1", other), ("2", early), ("3", copied)):
        how = record[-1] | {"init_step": record[-1].get("init_step", 100)}
        content = {"verb": verb, "weights": "trained", "step": 10_000, "top1": record[3], "settings": how}
        (one / "evaluations" / f"{name}.json").write_text(json.dumps(content))
    assert rows(table(one))[0]["Ft."] == f"83.50 ± {statistics.stdev([83, 84]):.2f} (2)", "from the latest checkpoint"
    begun = [make_finetune(name, init=str(one)) for name in ("finetune-1", "finetune-2", "copy")]
    together = table(one, *begun)
    assert [row["Run"] for row in rows(together)[: together.own]] == ["a", "finetune-2"], "from an earlier checkpoint"
    twice = table(*(make_finetune(name, init="mae.pth") for name in ("x", "y")))
    assert (rows(twice)[0]["Run"], rows(twice)[0]["Ft."], twice.values) == ("x, y", "72.00", [])


def test_a_score_on_other_data_than_the_rows_names_it(make_run: MakeRun) -> None:
    own, other = "folder in photos, 10 % held out, 224x224", "folder in photos2, 224x224"
    judged = [("knn", "trained", 100, 40.0, {"data": own}), (*finetuned(83.0, 0)[:-1], FINETUNE | {"data": other})]
    config = MAE | {"data": {"name": "folder", "root": "photos"}}
    ours = rows(table(make_run("a", evaluations=judged, config=config)))[0]
    assert (ours[f"Ft. (data {other})"], ours["kNN"]) == ("83.00", "40.00")


def test_a_speedup_takes_the_mean_of_repeats(make_run: MakeRun) -> None:
    base = make_run("base", hours=100, evaluations=[finetuned(83.0, 0)], config=MAE)
    worse = make_run("worse", hours=50, evaluations=[finetuned(82.0, 0), finetuned(83.5, 1)], config=MAE)
    verb, weights, _, score, settings = finetuned(83.4, 1)
    early = (verb, weights, 3, score, settings)  # the step is one of the fine-tuning
    better = make_run("better", hours=50, evaluations=[early], config=MAE)
    text = write_comparison([base, worse, better], baseline=base)[0].read_text()
    assert "worse: Ft. 82.75 % at best, below the 83 % of base." in text
    assert "better: Ft. 83.4 % after 400 GPU hours; base took 800 to 83 %." in text


def test_a_run_without_a_published_row_stands_alone(make_run: MakeRun) -> None:
    small = {"backbone": {"name": "vit", "embed_dim": 192, "depth": 6}, "target": {"name": "hog"}}
    folder = make_run("a", method="dmjd", views=2, epochs=50, launches=[("cpu (2 threads)", 1)], config=small)
    paper = table(folder)
    (ours,) = rows(paper)
    assert (ours["Method"], ours["Backbone"], ours["ETE"], ours["Gh."]) == ("DMJD", "ViT 192 x 6", "100", "-")
    assert ours["Device hours"] == "100 CPU hours, 1 x cpu (2 threads)"
    assert paper.notes == [
        "The paper and the official repositories have no row like a, in the paper's terms MaskFeat +DMJD, ViT 192 x 6, "
        "HOG, 2 views."
    ]
    assert "†" not in paper_text([folder])


def test_hours_of_other_numbers_of_gpus_are_marked(make_run: MakeRun) -> None:
    row = rows(table(make_run("a", hours=80, launches=[("NVIDIA H200", 4)], config=MAE)))[0]
    assert (row["Gh."], row["Device hours"]) == ("40 (computed)", "320 GPU hours, 4 x NVIDIA H200")


def test_the_terminal_shows_aligned_columns_in_which_the_run_has_a_value(make_run: MakeRun) -> None:
    folder = make_run("\x1b[31mred\n", evaluations=[("knn", "trained", 100, 40.0, DATA)], config=MAE)
    text = paper_text([folder])
    head, ours, *below = text.splitlines()
    assert head.split("  ")[0] == "Run"
    assert "mIoU" not in head
    meanings = "wall hours of pre-training on 8 GPUs; kNN: top-1 in % of k-nearest-neighbour classification."
    assert f"ETE: effective training epochs (views x epochs); Gh.: {meanings}" in below, (
        "the abbreviations of the shown columns, and no others"
    )
    assert "\x1b" not in text
    for title in ("Method", "Backbone", "Target"):
        assert ours[head.index(title) :].startswith({"Method": "MAE", "Backbone": "ViT-B", "Target": "RGB"}[title])
    end = head.index("kNN") + len("kNN")
    assert ours[:end].endswith(" 40.00")
    assert any(line.startswith("† lightly") and line[:end].endswith("11.2 †") for line in below)


def test_long_titles_are_numbered_in_the_terminal(make_run: MakeRun) -> None:
    judged = [("knn", "trained", 100, 40.0 + k, DATA | {"k": k, "temperature": k / 100}) for k in (5, 20)]
    head, ours, *below = paper_text([make_run("a", evaluations=judged, config=MAE)]).splitlines()
    assert head.split()[-6:-2] == ["kNN", "[1]", "kNN", "[2]"]
    assert ours.split()[6:8] == ["60.00", "45.00"]
    lines = [line for line in below if line.startswith("[")]
    assert lines == ["[1] kNN: k 20, temperature 0.2.", "[2] kNN: k 5, temperature 0.05."]


def test_csv_has_the_table_and_no_formulas(make_run: MakeRun) -> None:
    folders = [make_run("=1+1", config=MAE), make_run("-b", views=2, config=MAE)]
    lines = [*csv.reader(io.StringIO(write_comparison(folders)[3].read_text()))]
    assert len({len(line) for line in lines}) == 1
    assert [line[0] for line in lines[:3]] == ["Run", "'=1+1", "'-b"]
    assert lines[0][-1] == "Device hours"
    assert [line[lines[0].index("Method")] for line in lines[1:3]] == ["MAE", "MAE +DM"]
    assert lines[1][lines[0].index("Ft.")] == "-"  # no value, and no formula either


@pytest.mark.parametrize("setting", [{"chosen": None}, {"few_shot": None}])
def test_a_setting_that_is_not_set_is_one_that_is_absent(make_run: MakeRun, setting: dict[str, Any]) -> None:
    old = make_run("old", evaluations=[("knn", "trained", 100, 40.0, DATA)], config=MAE)
    new = make_run("new", evaluations=[("knn", "trained", 100, 41.0, DATA | setting)], config=MAE | {"batch_size": 7})
    assert [row["kNN"] for row in rows(table(old, new))[:2]] == ["40.00", "41.00"]


def test_json_of_the_record_may_have_top5(make_run: MakeRun) -> None:
    folder = make_run("a", evaluations=[finetuned(83.0, 0)], config=MAE)
    path = folder / "evaluations" / "0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"top5": 96.5, "balanced_top1": 82.0, "chance": 0.1}))
    page = Page(write_report(folder).read_text())
    assert [row[1:] for row in page.scores()] == [
        ["83.00", "-", "-", "0.10", "10000"],
        ["96.50", "-", "-", "-", "10000"],
    ]


def test_a_row_of_many_runs_has_a_short_name(make_run: MakeRun) -> None:
    folders = [make_run(f"an_experiment_with_a_long_name_{seed}", config=MAE | {"seed": seed}) for seed in range(3)]
    paper = table(*folders)
    name = "an_experiment_with_a_long_name_0 and 2 more"
    assert rows(paper)[0]["Run"] == name
    assert paper.values == [f"{name}: {', '.join(folder.name for folder in folders)}."]
