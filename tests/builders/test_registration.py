"""A target and a backbone become part of the ordinary configuration by one call each; engines by one record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmjd.builders.finetune import build_finetune_step
from dmjd.builders.model import BACKBONES, BackboneSpec, register_backbone
from dmjd.compose import compose
from dmjd.config import EngineConfig, FinetuneConfig, TrainConfig
from dmjd.config import model as names
from dmjd.models.masked_image_model import Encoder
from dmjd.models.mlp import PointwiseMlp
from dmjd.ops.images import patchify
from dmjd.ops.tokens import gather_tokens
from dmjd.ops.views import Views
from dmjd.parallel.engines import AUTO, ENGINES
from dmjd.runs.checkpoint import newest
from dmjd.targets import TARGETS, TargetSpec, register

NAME = "throwaway"


@dataclass
class MeanTarget:
    """The mean of a patch's values."""

    patch: int
    dim: int = 1
    codes: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        return patchify(images.permute(0, 3, 1, 2).float() / 255, self.patch).mean(-1, keepdim=True)

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        pixels = (values.float().nan_to_num().clamp(0, 1) * 255).to(torch.uint8).reshape(*grid, 1).expand(-1, -1, 3)
        return pixels.repeat_interleave(self.patch, 0).repeat_interleave(self.patch, 1).numpy()


class Mixer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = PointwiseMlp(dim, 2 * dim)

    def forward(self, x: Tensor, branch_scale: Tensor | None = None) -> Tensor:
        return x + self.mlp(x)


class TokenMlp(Encoder):
    """Every visible token by itself."""

    num_prefix_tokens = 0
    mask_token = None
    positions = None
    blocks: nn.ModuleList

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        backbone, (height, width) = config.backbone, config.data.image_size
        self.embed_dim, self.patch_size = backbone.embed_dim, backbone.patch_size
        self.grid = height // self.patch_size, width // self.patch_size
        self.embed = nn.Linear(self.patch_size**2 * config.data.channels, self.embed_dim)
        self.blocks = nn.ModuleList(Mixer(self.embed_dim) for _ in range(backbone.depth))

    def layer_of(self, name: str) -> int | None:
        """For fine-tuning; the base class knows blocks and usual names."""
        return 0 if name.startswith("embed.") else super().layer_of(name)

    def forward(self, images: Tensor, views: Views | None = None, branch_scales: Tensor | None = None) -> Tensor:
        x = patchify(images, self.patch_size)
        x = self.embed(x if views is None else gather_tokens(x, views.visible))
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    """What a test has registered is gone after it."""
    yield
    for listed, records in ((names.TARGETS, TARGETS), (names.BACKBONES, BACKBONES)):
        if NAME in listed:
            listed.remove(NAME)
        records.pop(NAME, None)


def test_a_registered_target_and_backbone_are_trained_and_evaluated(
    dmjd: Callable[..., tuple[int, str, str]], tiny: Callable[..., list[str]], tmp_path: Path
) -> None:
    register(NAME, TargetSpec(lambda config: MeanTarget(config.backbone.patch_size)))
    register_backbone(NAME, BackboneSpec(TokenMlp, needs={"class_token": False}))
    run = tmp_path / "run"
    words = tiny(run, f"target.name={NAME}", "target.norm=none", f"backbone.name={NAME}")
    code, _, err = dmjd("pretrain", *words, "backbone.class_token=true")
    assert (code, err) == (2, f"error: backbone.class_token must be False for backbone.name={NAME}, got True\n")
    code, _, err = dmjd("pretrain", *words, "target.norm=l2")
    assert (code, err) == (2, f"error: target.norm must be one of none for target.name={NAME}, got 'l2'\n")
    assert dmjd("pretrain", *words, "engine.activation_checkpointing=mlp")[0] == 0
    steps = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert losses[-1] < losses[0]
    assert newest(run / "checkpoints") is not None
    code, out, err = dmjd("knn", str(run), "workers=0", "device=cpu")
    assert (code, err) == (0, "")
    assert out.startswith("knn: k-nearest-neighbour top-1 ")
    own = compose("pretrain", words)
    config = FinetuneConfig(batch_size=4, backbone=own.backbone, data=own.data, engine=own.engine)
    step = build_finetune_step(config, 3, initial=newest(run / "checkpoints"))
    assert step.began_from.endswith("; fc_norm, head as initialised")
    assert [(group.layers, group.tensors) for group in step.groups][:2] == [("0", 1), ("0", 1)]


@pytest.mark.parametrize("key", ["target.name", "backbone.name"])
def test_a_name_that_nobody_registered_is_rejected_with_those_that_are(
    key: str, dmjd: Callable[..., tuple[int, str, str]], tiny: Callable[..., list[str]], tmp_path: Path
) -> None:
    code, _, err = dmjd("pretrain", *tiny(tmp_path / "run", f"{key}={NAME}"))
    allowed = ", ".join(sorted(names.TARGETS if key == "target.name" else names.BACKBONES))
    assert (code, err) == (2, f"error: {key} must be one of {allowed}, got {NAME!r}\n")


def test_every_name_of_the_configuration_has_its_record() -> None:
    assert sorted(names.TARGETS) == sorted(TARGETS)
    assert list(BACKBONES) == names.BACKBONES
    (engines,) = [item.metadata["choices"] for item in fields(EngineConfig) if item.name == "name"]
    assert list(engines) == [*ENGINES, AUTO]
    keys = {item.name for item in fields(EngineConfig)}
    assert {key for spec in ENGINES.values() for key in spec.options} <= keys
