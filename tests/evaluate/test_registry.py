"""The price of an evaluation: one module with one record, and one file of defaults. A throw-away one shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dmjd.config import SCHEMAS, EvaluationConfig
from dmjd.config.fields import positive
from dmjd.data.dataset import ArrayDataset
from dmjd.errors import DataError
from dmjd.evaluate import EVALUATIONS, Column, Context, Evaluation, Scores, register
from dmjd.evaluate.registry import describe
from dmjd.report.run import read_run
from dmjd.report.scores import metrics
from dmjd.resources import configs_dir

Command = Callable[..., tuple[int, str, str]]


@dataclass
class DiceConfig(EvaluationConfig):
    """Segmentation by throwing dice.

    threshold: Least probability of a mask.
    """

    threshold: float = positive(0.5)


def throw(context: Context[DiceConfig]) -> Scores:
    step = context.frozen.step
    return Scores({"miou": 40.0 + step, "latency": 20.0 - step, "dice": 3}, {"threshold": context.config.threshold})


@pytest.fixture
def segmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    defaults = "defaults:\n  - dice_schema\n  - data: null\n  - _self_\n"
    (Path(shutil.copytree(configs_dir(), tmp_path / "configs")) / "dice.yaml").write_text(defaults)
    monkeypatch.setattr("dmjd.compose.configs_dir", lambda: tmp_path / "configs")
    columns = {
        "miou": Column("mIoU", "mean intersection over union"),
        "latency": Column("Latency", "latency of a batch", "ms", higher_is_better=False),
    }
    register(Evaluation("dice", "segmentation of a test", DiceConfig, throw, columns, needs="none"))
    yield
    del EVALUATIONS["dice"], SCHEMAS["dice"]


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.mark.usefixtures("segmentation")
def test_a_registered_evaluation_is_a_command_with_help_and_a_slurm_job(dmjd: Command, run: Path) -> None:
    assert re.search(r"^  dice +segmentation of a test$", dmjd("--help")[1], re.MULTILINE)
    _, out, _ = dmjd("dice", "--help")
    assert out.startswith("dmjd dice: segmentation of a test\n")
    assert "  threshold=0.5" in out
    code, out, err = dmjd("dice", str(run), "device=cpu", "threshold=0.25")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "dice: mean intersection over union 51.00 %  (trained, step 11)",
        "dice: latency of a batch 9 ms  (trained, step 11)",
    ]
    code, out, err = dmjd("submit", "dice", f"checkpoint={run}", "threshold=0.25", "--dry-run")
    assert (code, err) == (0, "")
    assert f"\nset -- dice checkpoint={run} threshold=0.25\n" in out
    assert "\n#SBATCH --gpus-per-node=1\n" in out
    assert "dmjd dice on 1 node(s)" in out


def test_images_without_what_an_evaluation_needs_are_an_error() -> None:
    def context(needs: str, num_classes: int, labels: list[int]) -> Context[DiceConfig]:
        images = ArrayDataset(np.zeros((len(labels), 2, 2, 1), np.uint8), np.array(labels), num_classes, "x")
        frozen: Any = SimpleNamespace(source="/x", data=None, dataset=lambda split, count: images)
        return Context(DiceConfig(checkpoint="x"), frozen, needs)

    for needs in ("labels", "none"):
        context(needs, 3, [0, 2]).dataset("test")
    context("none", 1, [0, 0]).dataset("train")
    with pytest.raises(DataError, match="/x: the training images have one class, and a score needs two or more"):
        context("labels", 1, [0, 0]).dataset("train")
    for label in (3, -1):
        with pytest.raises(DataError, match=f"/x: the test images must have labels 0 to 2, and .* has {label}"):
            context("labels", 3, [0, label]).dataset("test")


def test_a_line_names_how_maps_were_predicted() -> None:
    settings = {
        "data": "ade20k in ade, 96x96",
        "mode": "slide",
        "stride": [64, 64],
        "scales": [0.75, 1.0],
        "flip": True,
    }
    record = {"verb": "miou", "weights": "ema", "step": 18, "miou": 3.4, "aacc": 9.0, "macc": 5.0, "settings": settings}
    assert describe(record)[0] == (
        "miou: mean IoU 3.40 %  (ema, step 18, ade20k in ade, 96x96, mode slide, stride 64,64, scales 0.75,1, flip)"
    )
    whole = record | {"settings": {"data": "ade20k", "mode": "whole", "scales": [1.0], "flip": False}}
    assert describe(whole)[0].endswith("(ema, step 18, ade20k, mode whole, scales 1)")


@pytest.mark.usefixtures("segmentation")
def test_its_scores_are_reported_with_unit_and_direction(dmjd: Command, run: Path, tmp_path: Path) -> None:
    for weights in ("trained", "untrained"):
        assert dmjd("dice", str(run), "device=cpu", f"weights={weights}")[0] == 0
    assert dmjd("report", str(run))[0] == 0
    page = (run / "report.html").read_text()
    cells = r"<small>threshold 0.5</small></th><td>{}</td><td>{}</td><td class=\"up\">{}</td><td>11</td>"
    assert re.search("mean intersection over union, %" + cells.format("51.00", "40.00", r"\+11.00"), page)
    assert re.search("latency of a batch, ms" + cells.format(9, 20, -11), page), "lower is better"
    other = Path(shutil.copytree(run, tmp_path / "other"))
    shutil.rmtree(other / "evaluations")
    assert dmjd("dice", str(other), "device=cpu", "threshold=0.75")[0] == 0
    _, out, _ = dmjd("report", str(run), str(other))
    page = next(line for line in out.splitlines() if line.endswith(".md"))
    table = [line for line in Path(page).read_text().splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[:4]]
    shown = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["mIoU (threshold 0.5)"] for row in shown] == ["51.0", "-"], "equal conditions only share a column"
    assert [row["Latency, ms (threshold 0.75)"] for row in shown] == ["-", "9"]
    (_, latency, *_) = metrics([read_run(run)])
    assert latency.description == (
        "latency of a batch in ms, lower is better, of the latest checkpoint that was evaluated (threshold 0.5)."
    )


def test_commands_and_reports_read_the_registry_without_torch() -> None:
    script = "import sys, dmjd.cli, dmjd.report; sys.exit(bool({'torch', 'hydra', 'matplotlib'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
