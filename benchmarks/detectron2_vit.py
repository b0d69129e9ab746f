"""detectron2's ViT with its simple feature pyramid, from a folder of its sources, which are imported unchanged.

detectron2 cannot be installed beside a current torch, and ``detectron2.modeling`` imports all of it. Of its files only
modeling/backbone/{backbone,build,fpn,utils,vit}.py are executed here; what they import from elsewhere is replaced by
the few lines below, which compute the same: ``layers.Conv2d`` and ``layers.get_norm`` (the LayerNorm is that of
layers/batch_norm.py, in plain operations), and fvcore's initial weights. Compiled, such a stand-in is no slower.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PACKAGE = "detectron2.modeling.backbone"
FILES = ("backbone", "build", "fpn", "utils", "vit")

SIZES = {
    "vit_base": {"embed_dim": 768, "depth": 12, "num_heads": 12, "drop_path_rate": 0.1},
    "vit_large": {"embed_dim": 1024, "depth": 24, "num_heads": 16, "drop_path_rate": 0.4},
}
"""Values of projects/ViTDet's configurations; the blocks with global attention are four, evenly spaced."""


class _Conv2d(nn.Conv2d):
    def __init__(self, *arguments: Any, norm: nn.Module | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.norm is None else self.norm(x)


class _ChannelNorm(nn.Module):
    """LayerNorm over the channels of ``[B, C, H, W]``, of as many operations as detectron2's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        normalised = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * normalised + self.bias[:, None, None]


class _ShapeSpec(NamedTuple):
    channels: int | None = None
    height: int | None = None
    width: int | None = None
    stride: int | None = None


class _Registry:
    def __init__(self, name: str) -> None:
        self.name = name

    def register(self) -> Callable[[Any], Any]:
        return lambda function: function


def _get_norm(name: str, channels: int) -> nn.Module:
    assert name == "LN", name
    return _ChannelNorm(channels)


def _fill(convolution: nn.Conv2d) -> None:
    nn.init.kaiming_uniform_(convolution.weight, a=1)
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def modules(folder: Path) -> ModuleType:
    """``detectron2.modeling.backbone`` with the modules of :data:`FILES`, for a checkout of detectron2."""
    source = folder / "detectron2/modeling/backbone"
    if not (source / "vit.py").is_file():
        raise SystemExit(f"{source}/vit.py is missing; --detectron2 names a checkout of facebookresearch/detectron2")
    for name in ("detectron2", "detectron2.modeling", "detectron2.utils", "fvcore", "fvcore.nn"):
        _module(name, __path__=[])
    weight_init = _module("fvcore.nn.weight_init", c2_xavier_fill=_fill, c2_msra_fill=_fill)
    vars(sys.modules["fvcore.nn"])["weight_init"] = weight_init
    vars(sys.modules["fvcore"])["nn"] = sys.modules["fvcore.nn"]
    _module("detectron2.utils.registry", Registry=_Registry)
    _module("detectron2.layers", Conv2d=_Conv2d, CNNBlockBase=nn.Module, ShapeSpec=_ShapeSpec, get_norm=_get_norm)
    package = _module(PACKAGE, __path__=[])
    _module(f"{PACKAGE}.resnet", build_resnet_backbone=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm.models.layers, which timm has renamed
        for name in FILES:
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", source / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            setattr(package, name, module)
    return package


def backbone(folder: Path, size: str, image_size: int = 1024, **changes: Any) -> nn.Module:
    """``SimpleFeaturePyramid`` over ``ViT`` as configs/common/models/mask_rcnn_vitdet.py sets them; ``changes`` are
    arguments of ``ViT``."""
    package = modules(folder)
    options = {**SIZES[size], **changes}
    depth = options["depth"]
    windows = [block for block in range(depth) if (block + 1) % (depth // 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = package.vit.ViT(
            img_size=image_size,
            window_size=14,
            window_block_indexes=windows,
            use_rel_pos=True,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            **options,
        )
    pyramid: nn.Module = package.vit.SimpleFeaturePyramid(
        net=net,
        in_feature="last_feat",
        out_channels=256,
        scale_factors=(4.0, 2.0, 1.0, 0.5),
        top_block=package.fpn.LastLevelMaxPool(),
        norm="LN",
        square_pad=image_size,
    )
    return pyramid
