"""The page of a fine-tuning run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmjd.errors import DataError
from dmjd.report import paper_text, write_comparison, write_report
from dmjd.report.run import read_runs
from dmjd.report.scores import metrics, points
from tests.report.conftest import VIT_B
from tests.report.html_page import Page

MakeRun = Callable[..., Path]
MAE: dict[str, Any] = {"backbone": VIT_B, "target": {"name": "pixels", "norm": "patch"}}


def test_the_page_of_a_fine_tuning_run(make_finetune: Callable[..., Path], make_run: MakeRun, tmp_path: Path) -> None:
    origin = make_run("pretrained", epochs=1600, hours=227, config=MAE)
    (origin / "report.html").write_text("")
    folder = make_finetune("ft", init=str(origin))
    page = Page(write_report(folder).read_text())
    for sentence in (
        "Fine-tuning of ViT-B with the preset mae_vit_base: 4 epochs, batch 1024, peak learning rate 0.0005 x 1024 / "
        "256 = 0.002.",
        "Head: mean of the patch tokens, then a new LayerNorm, 10 classes.",
        "Augmentation: RandAugment rand-m9-mstd0.5-inc1, mixup 0.8, cutmix 1, random erasing 0.25, "
        "label smoothing 0.1.",
        "Regularisation: layer decay 0.65, drop path 0.1, weight decay 0.05.",
        "Initial weights: pretrained, MAE.",
    ):
        assert sentence in page.text
    assert page.attributes("a")[1] == {"href": "../pretrained/report.html"}
    pairs = page.pairs()
    assert (pairs["Method"], pairs["Batch"], pairs["Layer decay"]) == ("fine-tuning", "1024", "0.65")
    assert pairs["Best epoch"] == "2 of 4: validation top-1 72.00 %"
    assert "Views K" not in pairs
    assert [row[1:] for row in page.scores()] == [
        ["72.00", "-", "-", "12.00", "10.00", "40"],
        ["94.00", "-", "-", "-", "-", "40"],
    ]
    head = next(index for index, row in enumerate(page.rows) if row[0] == "Group")
    assert page.rows[head : head + 3] == [
        ["Group", "Layers", "Learning-rate scale", "Weight decay", "Tensors", "Parameters"],
        ["embeddings", "0", "0.00369721", "0.05", "3", "590,592"],
        ["head <b>", "13", "1", "0", "2", "1,538"],
    ]
    labels = [each["aria-label"] for each in page.attributes("svg") if each.get("role") == "img"]
    assert labels == [f"{name} by step" for name in ("Loss", "Validation", "Learning rate")]
    for line in ("training  1", "validation  0.25", "top-1  71.00 %", "top-5  94.00 %"):
        assert any(item.startswith(line) for item in page.items), line
    # Beside published rows it is the row of the run that it began from, with its cost.
    ours = next(row for row in page.rows if row[:3] == ["ft", "MAE", "ViT-B"])
    assert ours[3:7] == ["RGB", "1600", "227", "72.00"]
    text = paper_text([folder])
    assert "† paper, Tables II, III, VI and VII" in text


@pytest.mark.usefixtures("undrawn")
def test_the_initial_weights_of_no_run_are_named(make_finetune: Callable[..., Path], make_run: MakeRun) -> None:
    file = Page(write_report(make_finetune("a", init="mae_pretrain_vit_base.pth")).read_text())
    assert "Initial weights: mae_pretrain_vit_base.pth." in file.text
    assert next(row for row in file.rows if row[0] == "a")[1:3] == ["-", "ViT-B"]
    run = make_run("pretrained", config=MAE)
    page = Page(write_report(make_finetune("b", init=str(run), weights="untrained")).read_text())
    assert "Initial weights: pretrained, MAE (its configuration only; random weights)." in page.text
    assert next(row for row in page.rows if row[0] == "b")[1:5] == ["none (untrained)", "ViT-B", "-", "-"]
    # A checkpoint folder is of its run.
    checkpoint = run / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    page = Page(write_report(make_finetune("c", init=str(checkpoint))).read_text())
    assert "Initial weights: pretrained, MAE." in page.text
    assert len(page.attributes("a")) == 1  # the run has no page yet
    assert "Initial weights: random." in Page(write_report(make_finetune("d", init=None)).read_text()).text


@pytest.mark.usefixtures("undrawn")
def test_the_average_chooses_the_best_epoch_and_equal_scores_the_first(make_finetune: Callable[..., Path]) -> None:
    scores = [(80.0, 60.0), (70.0, 65.0), (70.0, 65.0)]
    validated = {epoch: {"val_top1": top1, "val_ema_top1": average, "val_top5": None}
                 for epoch, (top1, average) in enumerate(scores, start=1)}  # fmt: skip
    page = Page(write_report(make_finetune("a", validated=validated)).read_text())
    assert page.pairs()["Best epoch"] == "2 of 4: validation top-1 of the moving average 65.00 %"
    assert "Best epoch" not in Page(write_report(make_finetune("b", validated={5: {}})).read_text()).pairs()


@pytest.mark.usefixtures("undrawn")
def test_seeds_of_a_fine_tuning_are_one_row(make_finetune: Callable[..., Path], make_run: MakeRun) -> None:
    origin = make_run("pretrained", config=MAE)
    folders = [make_finetune(f"ft{seed}", init=str(origin), seed=seed) for seed in range(3)]
    markdown = write_comparison(folders)[0].read_text()
    assert "| ft0, ft1, ft2 " in markdown
    assert "72.00 ± 0.00 (3)" in markdown
    assert "Ft.: 72.00 (ft0, seed 0), 72.00 (ft1, seed 1), 72.00 (ft2, seed 2)." in markdown
    # Three seeds of pre-training and fine-tuning are one row too; another pre-training is not.
    others = [make_run(f"pre{seed}", config=MAE | {"seed": seed, "epochs": 100 + seed // 2}) for seed in range(3)]
    chains = [make_finetune(f"ft_{path.name}", init=str(path), seed=seed) for seed, path in enumerate(others)]
    names = [line.split("  ")[0] for line in paper_text(chains).splitlines()[1:3]]
    assert names == ["ft_pre0, ft_pre1", "ft_pre2"]
    # Beside the run that they began from, their scores stand in its row.
    record = (folders[0] / "evaluations" / "finetune-0.json").read_text()
    (origin / "evaluations" / "finetune-0.json").write_text(record)
    assert [line.split("  ")[0] for line in paper_text([origin, *folders]).splitlines()[1:3]] == [
        "pretrained",
        "ft1, ft2",
    ]
    # Validations are the curve of a comparison: the best is a column, over the epochs of fine-tuning.
    (run,) = read_runs(folders[:1])
    online = next(metric for metric in metrics([run]) if metric.online)
    assert online.title == "Ft. online"
    assert [(point.epoch, point.score, point.seconds) for point in points(run, online)] == [
        (1, 71.0, 90.0), (2, 72.0, 180.0), (3, 70.0, 270.0), (4, 71.0, 360.0),
    ]  # fmt: skip


@pytest.mark.usefixtures("undrawn")
def test_names_and_values_cannot_become_markup(make_finetune: Callable[..., Path], make_run: MakeRun) -> None:
    evil = '<script>alert("1")<'
    origin = make_run(f"javascript:{evil}".replace("/", ""), config=MAE)
    (origin / "report.html").write_text("")
    config = {
        "head": {"pooling": evil},
        "augment": {"randaugment": evil},
        "typed": [f"preset={evil}"],
        "init": str(origin),
    }
    source = write_report(make_finetune("a", **config)).read_text()
    assert "<script" not in source
    assert 'href="../javascript%3A%3Cscript' in source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", r"groups\.json is damaged: [^\n]+$"),
        ('{"a": 1}', r"groups\.json must hold a list of parameter groups$"),
        ("[1]", r"groups\.json must hold a list of parameter groups$"),
    ],
)
def test_damaged_groups_are_one_line(make_finetune: Callable[..., Path], text: str, message: str) -> None:
    folder = make_finetune("a")
    (folder / "groups.json").write_text(text)
    with pytest.raises(DataError, match=message):
        write_report(folder)
