"""Names that reports derive from configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmjd.report.differences import differences, labels, short_names
from dmjd.report.method import held_out, loss_meanings, masks_caption, method_summary
from dmjd.report.run import Record, Run, read_run
from dmjd.report.scores import online_references, unlike_training

MakeRun = Callable[..., Path]


def test_a_dmjd_without_its_branch_is_not_called_dmjd() -> None:
    config: dict[str, Any] = {
        "method": {"name": "dmjd", "visible_branch": {"enabled": True}, "mim_loss": "mse", "mim_weight": 1.0},
        "mask": {"views": 2, "regulation": "disjoint"},
        "target": {"name": "hog", "norm": "layernorm"},
    }
    assert (
        method_summary(config) == "DMJD: 2 disjoint views of an image, HOG as the target of masked and visible tokens."
    )
    assert "L_vis: smooth L1 loss of HOG on visible tokens" in loss_meanings(config)
    config["method"]["visible_branch"]["enabled"] = False
    assert method_summary(config) == (
        "DM: 2 disjoint views of an image, HOG as the target of masked tokens; "
        "method=dmjd without joint distillation (no visible branch)."
    )
    assert "L_vis" not in loss_meanings(config)


@pytest.mark.parametrize(
    ("views", "regulation", "caption"),
    [(1, "disjoint", "Independent masks"), (2, "disjoint", "Disjoint masks"), (2, "none", "Independent masks")],
)
def test_masks_are_disjoint_only_if_they_are(views: int, regulation: str, caption: str) -> None:
    config = {"method": {"name": "mae"}, "mask": {"views": views, "regulation": regulation}}
    assert masks_caption(config) == caption
    assert ("disjoint" in method_summary(config)) == (caption == "Disjoint masks")


def test_held_out_images_are_named() -> None:
    assert held_out({"data": {"val_percent": 10.0, "val_seed": 3}}) == "10 % of the images, split seed 3"
    assert held_out({"data": {"val_percent": 0.0}}) == held_out({"data": {}}) == "-"


def runs_of(make_run: MakeRun, *configs: dict[str, Any]) -> list[Run]:
    return [read_run(make_run(f"r{index}", config=config)) for index, config in enumerate(configs)]


def test_runs_are_named_by_what_few_of_their_method_share(make_run: MakeRun) -> None:
    same = {"method": {"name": "mae"}, "mask": {"views": 1, "ratio": 0.75}, "run": "x"}
    runs = runs_of(
        make_run,
        same,
        same | {"mask": {"views": 1, "ratio": 0.5}, "run": "y"},
        same | {"seed": 7},
        same | {"method": {"name": "simmim"}, "seed": 9},
    )
    assert short_names(runs) == ["-", "mask.ratio 0.5", "seed 7", "-"]
    assert labels(runs) == ["r0: MAE", "r1: MAE, mask.ratio 0.5", "r2: MAE, seed 7", "r3: SimMIM"]
    assert list(differences(runs)) == ["method.name", "mask.ratio", "seed"]  # not the folder
    assert differences(runs)["seed"] == ["-", "-", "7", "9"]
    assert labels(runs[:1]) == ["r0"]


def test_of_many_keys_a_name_has_those_that_tell_runs_apart(make_run: MakeRun) -> None:
    def config(index: int) -> dict[str, Any]:
        return {**{f"same{key}": index // 2 for key in range(6)}, "seed": index % 2}

    assert short_names(runs_of(make_run, *map(config, range(4)))) == [
        f"same0 {half}, seed {seed}" for half in range(2) for seed in range(2)
    ]


def test_an_evaluation_unlike_training_is_named(make_run: MakeRun) -> None:
    data = {"name": "folder", "image_size": [32, 32], "mean": [0.5], "std": [0.25]}
    run = read_run(make_run("a", config={"data": data}))

    def unlike(**settings: Any) -> str:
        return unlike_training(run, Record("knn", "trained", 1, {"top1": 1.0}, settings))

    assert unlike(data="folder in /a, b, 32x32", mean=[0.5], std=[0.25]) == unlike(k=20) == ""
    assert unlike(data="folder in /a, b, 64x64") == "unlike pre-training: images of 64x64 pixels, pre-trained on 32x32"
    assert unlike(seen_in_pretraining=True) == "the test images were part of pre-training"
    assert unlike(seen_in_finetuning=True) == "fine-tuning used some of the test images with their labels"
    assert unlike(mean=[0.1], std=[0.25]) == "unlike pre-training: mean 0.1, pre-trained with 0.5"


def test_online_scores_compare_with_records_of_the_same_images_only(make_run: MakeRun) -> None:
    how = {"k": 20, "temperature": 0.07, "pooling": "mean", "train_images": 500, "data": "folder in x, 8x8"}
    data: dict[str, Any] = {"name": "folder", "root": "x", "image_size": [8, 8]}
    online = {"neighbours": 20, "temperature": 0.07, "pooling": "mean", "train_images": 500}

    folders: list[Path] = []

    def known(change: dict[str, Any]) -> dict[str, float]:
        folders.append(make_run(str(len(folders)), config={"data": data, "online_knn": online}))
        run = read_run(folders[-1])
        run.evaluations.append(
            Record("knn", "trained", 1, {"top1": 9.0}, how | change, {"chance": 1.0, "majority": 2.0, "untrained": 3.0})
        )
        return online_references(run)

    assert known({}) == {"untrained": 3.0, "majority": 2.0, "chance": 1.0}
    assert known({"k": 5}) == known({"train_images": 900}) == {"majority": 2.0, "chance": 1.0}
    assert known({"data": "folder in y, 8x8"}) == known({"data": "folder in x, 10 % held out, 8x8"}) == {}
    data["val_percent"] = 10.0
    assert known({"data": "folder in x, 10 % held out with val_seed=1, 8x8"})["chance"] == 1.0
    assert known({"data": "folder in x, 8x8", "k": 1}) == {}
