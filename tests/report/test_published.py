"""The published rows: figures, matches with presets, and the page of docs/ that lists them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dmjd.compose import compose, to_yaml
from dmjd.report.published import PUBLISHED, Published, identity
from dmjd.safe_load import parse_yaml

DOCS = Path(__file__).parents[2] / "docs"


def row(method: str, backbone: str, ete: str, target: str = "") -> Published:
    """The paper's row of a method; without the ablations, which have rows of their own."""
    (found,) = [
        each
        for each in PUBLISHED
        if (each.method, each.backbone, each.ete) == (method, backbone, ete)
        and target in each.target
        and each.source.startswith("paper")
        and not each.only
    ]
    return found


@pytest.mark.parametrize(
    ("base", "ours", "backbone", "speedup"),
    [  # the column "Speedup" of Tables II and III, and the factors behind Gh. in Table VI
        (("MAE", "1600"), ("MAE +DM", "1600"), "ViT-B", 1.8),
        (("MAE", "1600"), ("MAE +DM", "800"), "ViT-B", 3.2),
        (("BEiT", "800+1199"), ("BEiT +DM", "600"), "ViT-B", 2.1),
        (("SimMIM", "800"), ("SimMIM +DM", "800"), "ViT-B", 1.4),
        (("MaskFeat", "1600"), ("MaskFeat +DM", "800"), "ViT-B", 3.6),
        (("MAE", "1600"), ("MAE +DM", "800"), "ViT-L", 2.7),
        (("MaskFeat", "1600"), ("MaskFeat +DM", "800"), "ViT-L", 3.7),
        (("MaskFeat", "1600"), ("MaskFeat +DMJD", "1600"), "ViT-B", 1.8),
        (("ConvMAE", "1600"), ("ConvMAE +DMJD", "800"), "ConvViT-B", 3.0),
        (("ConvMAE", "800"), ("ConvMAE +DMJD", "800"), "ConvViT-L", 1.8),
    ],
)
def test_hours_give_the_speedups_that_the_paper_prints(
    base: tuple[str, str], ours: tuple[str, str], backbone: str, speedup: float
) -> None:
    before, after = (row(method, backbone, ete) for method, ete in (base, ours))
    assert before.hours is not None
    assert after.hours is not None
    assert before.hours / after.hours == pytest.approx(speedup, abs=0.051)  # the paper truncates 2.07 to 2.1


@pytest.mark.parametrize(
    ("base", "ours", "finetune", "linear"),
    [  # the gains in brackets in Table VI, and the sums of the text
        (row("MaskFeat", "ViT-B", "1600"), row("MaskFeat +DMJD", "ViT-B", "1600"), 0.1, 3.4),
        (row("ConvMAE", "ConvViT-B", "1600"), row("ConvMAE +DMJD", "ConvViT-B", "800"), 0.2, 5.8),
        (row("ConvMAE", "ConvViT-L", "800"), row("ConvMAE +DMJD", "ConvViT-L", "800"), 0.1, None),
        (row("ConvMAE", "ConvViT-B", "400+10000"), row("ConvMAE +DMJD", "ConvViT-B", "400+10000"), 0.2, None),
    ],
)
def test_scores_give_the_gains_that_the_paper_prints(
    base: Published, ours: Published, finetune: float, linear: float | None
) -> None:
    assert base.finetune is not None
    assert ours.finetune is not None
    assert ours.finetune - base.finetune == pytest.approx(finetune, abs=1e-6)
    if linear is not None:
        assert base.linear is not None
        assert ours.linear is not None
        assert ours.linear - base.linear == pytest.approx(linear, abs=1e-6)


def config_of(*overrides: str) -> Any:
    return parse_yaml(to_yaml(compose("pretrain", list(overrides))))


@pytest.mark.parametrize(
    ("overrides", "ete", "figures"),
    [  # ETE, then (fine-tuning, linear) of the rows of the paper that have that ETE
        ("experiment=mae_vit_base_1600", "1600", {(83.6, 68.0)}),
        ("experiment=mae_dm_vit_base", "800", {(83.6, None)}),
        ("experiment=mae_dm_vit_base_lr_classic", "200", {(82.1, None)}),
        ("experiment=simmim_swin_base", "800", {(None, None)}),
        ("experiment=beit_dm_vit_base", "600", {(83.5, None)}),
        ("experiment=maskfeat_token_vit_large", "1600", {(85.7, None)}),
        ("experiment=dmjd_vit_base_hog_800", "1600", {(84.1, 71.9)}),
        ("experiment=dmjd_convvit_large_clip", "400+10000", {(86.8, 81.0)}),
        ("experiment=jd_target_hog_l2", "100", {(84.2, None)}),
        ("experiment=jd_depth2_none", "100", {(None, 61.8)}),
        ("experiment=dmjd_convvit_base_hog", "800", {(85.2, 76.7)}),
        ("experiment=dmjd_convvit_base_hog mask.views=3", "800", set()),
        ("experiment=dmjd_convvit_base_hog method.visible_branch.enabled=false", "800", set()),
        ("experiment=dmjd_convvit_base_hog backbone.embed_dim=384", "800", set()),
        ("experiment=own_photos", "200", set()),
    ],
)
def test_presets_match_the_rows_that_they_are(overrides: str, ete: str, figures: set[tuple[float | None, ...]]) -> None:
    config = config_of(*overrides.split())
    rows = [each for each in PUBLISHED if each.matches(config) and each.source.startswith("paper")]
    assert {(each.finetune, each.linear) for each in rows if each.ete == ete} == figures
    assert all(each.identity == identity(config) for each in rows)


def test_a_backbone_without_a_published_name_has_its_size() -> None:
    config = {
        "method": {"name": "mae"},
        "backbone": {"name": "vit", "embed_dim": 192, "depth": 6},
        "mask": {"views": 1},
    }
    assert identity(config).backbone == "ViT 192 x 6"
    assert identity({"backbone": "vit_tiny"}).backbone == "vit_tiny"  # the configuration of an early version


def test_the_page_of_docs_lists_the_rows() -> None:
    spec = importlib.util.spec_from_file_location("make_comparison", DOCS / "make_comparison.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "comparison.md").read_text() == module.page(), "run python docs/make_comparison.py"
