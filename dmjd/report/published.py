"""Published rows: scores and costs from the tables of the DMJD paper and from the authors' repositories.

The one source of these figures: reports show the rows of a run's method beside it, and docs/comparison.md lists all
(``python docs/make_comparison.py``). All are of ImageNet-1k, fine-tuned and probed at 224 x 224; mIoU is of ADE20K, AP
of COCO. Hours (Gh.) are wall hours of 8 A100 40 GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dmjd.report.format import look_up, name_of, plain
from dmjd.report.method import base_and_additions

MARK = "†"


class Identity(NamedTuple):
    """Method, backbone and target of a row of the paper.

    method: "MAE", "MAE +DM". backbone: "ViT-B"; of sizes without a name "ViT 192 x 12" (width x blocks). target: "RGB".
    """

    method: str
    backbone: str
    target: str
    views: int | None

    def __str__(self) -> str:
        views = "1 view" if self.views == 1 else f"{plain(self.views)} views"
        return f"{self.method}, {self.backbone}, {self.target}, {views}"


@dataclass(frozen=True)
class Published:
    """One published row.

    ete: effective training epochs; "800+1199" includes those of the tokenizer, in epochs of ImageNet-1k.
    source: "paper, Table VI", or the repository.
    views: masked views per image (K).
    hours: Gh. finetune, linear, knn: top-1 in per cent. miou: of ADE20K. box, mask: AP of COCO.
    protocol: value of ``dmjd linprobe protocol=`` with the settings of ``linear``; empty if they are not stated.
    setting: distinguishes rows of equal methods.
    only: a run matches the row only if its configuration has these values; "a.b" is key b of section a.
    note: a contradiction between the sources.
    """

    method: str
    backbone: str
    target: str
    ete: str
    source: str
    views: int = 1
    hours: float | None = None
    finetune: float | None = None
    linear: float | None = None
    knn: float | None = None
    miou: float | None = None
    box: float | None = None
    mask: float | None = None
    protocol: str = ""
    setting: str = ""
    only: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.method, self.backbone, self.target, self.views)

    @property
    def name(self) -> str:
        """The method with its setting."""
        return ", ".join(filter(None, (self.method, self.setting)))

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether a run of ``config`` is of this row's method, backbone, target and views."""
        values = {key: look_up(config, key.split(".")) for key in self.only}
        return identity(config) == self.identity and values == dict(self.only)


_BACKBONES = {
    ("vit", 768, 12): "ViT-B",
    ("vit", 1024, 24): "ViT-L",
    ("vit", 1280, 32): "ViT-H",
    ("convvit", 768, 11): "ConvViT-B",
    ("convvit", 1024, 23): "ConvViT-L",
    ("swin", 1024, 24): "Swin-B",
    ("swin", 1536, 24): "Swin-L",
}
"""(backbone.name, embed_dim, blocks) -> the paper's name."""
_KINDS = {"vit": "ViT", "convvit": "ConvViT", "swin": "Swin"}
_TARGETS = {"pixels": "RGB", "hog": "HOG", "clip": "CLIP", "dvae": "DALL-E", "vqkd": "VQ-KD", "teacher": "Momentum"}


def identity(config: Mapping[str, Any]) -> Identity:
    """Method, backbone and target of a run of ``config`` in the terms of the paper.

    ``method=dmjd`` is named after the method that the paper adds its parts to: ConvMAE on ConvViT; MAE (pixels) or
    MaskFeat on others.
    """
    name, backbone, target = (name_of(config.get(key)) for key in ("method", "backbone", "target"))
    base, added = base_and_additions(config)
    if name == "dmjd":
        added = f"+{base}" if base != "MIM" else ""
        base = "ConvMAE" if backbone == "convvit" else "MAE" if target == "pixels" else "MaskFeat"
    base = "MaskFeat" if base == "maskfeat_token" else base
    width, blocks = (look_up(config, ("backbone", key)) for key in ("embed_dim", "depth"))
    stages = look_up(config, ("backbone", "windows", "depths"))
    if backbone == "swin" and isinstance(stages, list):
        blocks = sum(size for size in stages if isinstance(size, int))
    size = f"{_KINDS.get(backbone, backbone)} {plain(width)} x {plain(blocks)}"
    named = _BACKBONES.get((backbone, width, blocks), size) if isinstance(width, int) else backbone
    views = look_up(config, ("mask", "views"))
    method = " ".join(filter(None, (base, added)))
    return Identity(method, named, _TARGETS.get(target, target), views if isinstance(views, int) else None)


_JD: dict[str, Any] = {"epochs": 50}
_HOG_JD: dict[str, Any] = {**_JD, "target.norm": "layernorm"}


def _jd_target(target: str, setting: str, norm: str, finetune: float) -> Published:
    only = {**_JD, "target.norm": norm, "method.decoder.depth": 8}
    row = ("ConvMAE +DMJD", "ConvViT-B", target, "100", "paper, Table IV")
    return Published(*row, views=2, finetune=finetune, setting=f"50 epochs, {setting}", only=only)


def _jd_branches(depth: int, projector: str, linear: float) -> Published:
    only = {**_HOG_JD, "method.decoder.depth": depth}
    only |= {"method.visible_branch.projector": projector} if projector else {}
    return Published(
        "ConvMAE +DMJD" if projector else "ConvMAE +DM",
        "ConvViT-B",
        "HOG",
        "100",
        "paper, Table V",
        views=2,
        linear=linear,
        protocol="dmjd",
        setting=f"50 epochs, decoder of {depth} blocks, {f'{projector} projector' if projector else 'no projector'}",
        only=only,
    )


def _mmpretrain(
    backbone: str, ete: str, finetune: float, linear: float | None = None, method: str = "MAE", target: str = "RGB"
) -> Published:
    protocol = "mae" if linear is not None else ""
    return Published(method, backbone, target, ete, "mmpretrain", finetune=finetune, linear=linear, protocol=protocol)


PUBLISHED = (
    Published("SplitMask", "ViT-B", "Random patches", "600", "paper, Tables VI and VII",
              finetune=83.6, linear=46.5, miou=45.7, box=46.8, mask=42.1),
    Published("MAE", "ViT-B", "RGB", "1600", "paper, Tables II, III, VI and VII", hours=227,
              finetune=83.6, linear=68.0, miou=48.1, box=50.3, mask=44.9, protocol="mae"),
    Published("MAE", "ViT-B", "RGB", "1600", "facebookresearch/mae", finetune=83.664, linear=67.8, protocol="mae",
              note="the mean of four seeds is 83.57 (deviation 0.08)"),
    _mmpretrain("ViT-B", "300", 83.1, 60.8),
    _mmpretrain("ViT-B", "400", 83.3, 62.5),
    _mmpretrain("ViT-B", "800", 83.3, 65.1),
    _mmpretrain("ViT-B", "1600", 83.5, 67.1),
    Published("MAE", "ViT-B", "RGB", "100", "lightly", finetune=81.3, linear=46.0, knn=11.2, setting="batch 256"),
    Published("MAE", "ViT-B", "RGB", "100", "solo-learn", finetune=81.6),
    Published("MAE +DM", "ViT-B", "RGB", "1600", "paper, Tables II and III", views=2, hours=127,
              finetune=83.6, miou=48.3, setting="uniform masks"),
    Published("MAE +DM", "ViT-B", "RGB", "800", "paper, Table II", views=2, hours=70, finetune=83.6,
              setting="block-wise masks"),
    Published("MAE +DM", "ViT-B", "RGB", "200", "paper, Table I", views=2, finetune=82.1,
              setting="100 epochs, learning rate x batch", only={"epochs": 100, "optim.lr_rule": "classic"}),
    Published("MAE +DM", "ViT-B", "RGB", "200", "paper, Table I", views=2, finetune=82.4,
              setting="100 epochs, adaptive learning rate", only={"epochs": 100, "optim.lr_rule": "adaptive"}),
    Published("MAE", "ViT-L", "RGB", "1600", "paper, Table III", hours=272, finetune=85.9, miou=53.6),
    Published("MAE", "ViT-L", "RGB", "1600", "facebookresearch/mae", finetune=85.952, linear=76.0, protocol="mae",
              note="the mean of four seeds is 85.87 (deviation 0.07)"),
    _mmpretrain("ViT-L", "400", 85.2, 70.7),
    _mmpretrain("ViT-L", "800", 85.4, 73.7),
    _mmpretrain("ViT-L", "1600", 85.7, 75.5),
    Published("MAE +DM", "ViT-L", "RGB", "800", "paper, Table III", views=2, hours=100, finetune=85.9, miou=53.5,
              setting="block-wise masks"),
    Published("MAE", "ViT-H", "RGB", "1600", "facebookresearch/mae", finetune=86.928, linear=77.2, protocol="mae"),
    _mmpretrain("ViT-H", "1600", 86.9),
    Published("SimMIM", "ViT-B", "RGB", "800", "paper, Tables III and VI", hours=120, finetune=83.8, linear=56.7,
              note="Gh. is 120 in Table III and 184 in Table VI"),
    Published("SimMIM +DM", "ViT-B", "RGB", "800", "paper, Table III", views=2, hours=86, finetune=83.8),
    Published("SimMIM", "Swin-B", "RGB", "800", "paper, Table VII", miou=52.8, box=52.3),
    Published("SimMIM", "Swin-B", "RGB", "100", "microsoft/SimMIM", finetune=83.5),
    Published("SimMIM", "Swin-B", "RGB", "800", "microsoft/SimMIM", finetune=84.0),
    Published("SimMIM", "Swin-L", "RGB", "800", "microsoft/SimMIM", finetune=85.4),
    Published("MaskFeat", "ViT-B", "HOG", "1600", "paper, Tables III and VI", hours=240, finetune=84.0, linear=68.5),
    _mmpretrain("ViT-B", "300", 83.4, method="MaskFeat", target="HOG"),
    Published("MaskFeat +DM", "ViT-B", "HOG", "800", "paper, Table III", views=2, hours=66, finetune=84.0,
              setting="block-wise masks"),
    Published("MaskFeat +DMJD", "ViT-B", "HOG", "1600", "paper, Table VI", views=2, hours=132, finetune=84.1,
              linear=71.9, protocol="dmjd"),
    Published("MaskFeat", "ViT-L", "HOG", "1600", "paper, Table III", hours=280, finetune=85.7),
    Published("MaskFeat +DM", "ViT-L", "HOG", "800", "paper, Table III", views=2, hours=76, finetune=85.9,
              setting="block-wise masks"),
    Published("ConvMAE", "ConvViT-B", "RGB", "1600", "paper, Tables VI and VII", hours=300, finetune=85.0, linear=70.9,
              miou=51.7, box=53.2, mask=47.1, protocol="convmae"),
    Published("ConvMAE", "ConvViT-B", "RGB", "1600", "Alpha-VL/ConvMAE", finetune=84.982, linear=70.9,
              protocol="convmae"),
    Published("ConvMAE", "ConvViT-L", "RGB", "800", "paper, Table VI", hours=480, finetune=86.2),
    Published("ConvMAE +DMJD", "ConvViT-B", "HOG", "800", "paper, Tables VI and VII", views=2, hours=101, finetune=85.2,
              linear=76.7, miou=53.3, box=53.4, mask=47.6, protocol="dmjd"),
    Published("ConvMAE +DMJD", "ConvViT-L", "HOG", "800", "paper, Table VI", views=2, hours=267, finetune=86.3,
              linear=79.7, protocol="dmjd"),
    _jd_target("RGB", "pixels as they are", "none", 83.1),
    _jd_target("RGB", "pixels normalised per patch", "patch", 83.9),
    _jd_target("HOG", "L2 norm", "l2", 84.2),
    _jd_target("HOG", "LayerNorm", "layernorm", 84.4),
    _jd_target("CLIP", "LayerNorm", "layernorm", 85.2),
    _jd_branches(2, "", 61.8),
    _jd_branches(2, "linear", 60.4),
    _jd_branches(2, "nonlinear", 62.5),
    _jd_branches(4, "nonlinear", 65.0),
    _jd_branches(8, "nonlinear", 67.2),
    Published("MoCo v3", "ViT-B", "Momentum", "1200", "paper, Table VI", finetune=83.2, linear=76.7),
    Published("DINO", "ViT-B", "Momentum", "1600", "paper, Tables VI and VII", finetune=83.6, linear=78.2, miou=46.8,
              box=50.1, mask=43.4),
    Published("BEiT", "ViT-B", "DALL-E", "800+1199", "paper, Tables III, VI and VII", hours=184, finetune=83.4,
              linear=37.6, miou=45.6, box=50.1, mask=43.5,
              note="mIoU is 45.6 in Table III and 47.1 in Table VII; Table III counts 800 epochs"),
    Published("BEiT +DM", "ViT-B", "DALL-E", "600", "paper, Table III", views=2, hours=89, finetune=83.5, miou=45.6,
              note="without the epochs of the tokenizer"),
    Published("BEiT", "ViT-B", "DALL-E", "", "microsoft/unilm", finetune=83.7, setting="ImageNet-22k"),
    Published("BEiT", "ViT-L", "DALL-E", "", "microsoft/unilm", finetune=86.0, setting="ImageNet-22k"),
    Published("CAE", "ViT-B", "DALL-E", "1600+1199", "paper, Tables VI and VII", finetune=83.9, linear=70.4,
              protocol="mae", miou=50.2, box=50.0, mask=44.0),
    Published("PeCo", "ViT-B", "Perceptual codebook", "800+100", "paper, Tables VI and VII", finetune=84.5, miou=48.5,
              box=44.9, mask=40.4),
    Published("mc-BEiT", "ViT-B", "Perceptual codebook", "800+1199", "paper, Tables VI and VII", finetune=84.1,
              miou=50.8, box=49.2, mask=44.0),
    Published("iBOT", "ViT-B", "Momentum", "1600", "paper, Tables VI and VII", hours=233, finetune=84.0, linear=79.5,
              miou=50.0, box=51.2, mask=44.2),
    Published("SdAE", "ViT-B", "Momentum", "1200", "paper, Tables VI and VII", finetune=84.1, linear=64.9, miou=48.6,
              box=48.9, mask=43.0),
    Published("data2vec", "ViT-B", "Momentum", "800", "paper, Table VI", finetune=84.2),
    Published("MVP", "ViT-B", "CLIP", "300+10000", "paper, Table VI", finetune=84.4, linear=75.4),
    Published("ConvMAE", "ConvViT-B", "CLIP", "400+10000", "paper, Tables VI and VII", finetune=85.2, miou=52.8,
              box=53.3, mask=47.3),
    Published("ConvMAE +DMJD", "ConvViT-B", "CLIP", "400+10000", "paper, Table VI", views=2, finetune=85.4, linear=80.1,
              protocol="dmjd"),
    Published("ConvMAE +DMJD", "ConvViT-L", "CLIP", "400+10000", "paper, Table VI", views=2, finetune=86.8, linear=81.0,
              protocol="dmjd"),
)  # fmt: skip
"""In the order of the paper's Table VI: methods with their additions, then those with a parametric tokenizer."""
