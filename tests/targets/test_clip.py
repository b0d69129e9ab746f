from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from dmjd.errors import ConfigError
from dmjd.targets.clip import MEAN, STD, ClipTarget, load_clip

CONFIG = {
    "embed_dim": 20,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 64, "patch_size": 8, "head_width": 32},
    "text_cfg": {"context_length": 8, "vocab_size": 16, "width": 16, "heads": 2, "layers": 1},
}
NAME = "small-clip"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A file of weights, and the image tower that open_clip made them with."""
    folder: Path = tmp_path_factory.mktemp("clip")
    (folder / f"{NAME}.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(folder / f"{NAME}.json")
    torch.manual_seed(0)
    model = open_clip.create_model(NAME)
    torch.save(model.state_dict(), folder / "clip.pt")
    return str(folder / "clip.pt"), model.visual.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def block_outputs(tower: Any, images: Tensor) -> list[Tensor]:
    """What each block gives for the patches, seen from outside while open_clip's own forward runs."""
    seen: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda module, inputs, output: seen.append(output))
        for block in tower.transformer.resblocks
    ]
    normalised = (images.permute(0, 3, 1, 2) / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        tower(normalised)
    for hook in hooks:
        hook.remove()
    return [output[:, 1:] for output in seen]


@pytest.mark.parametrize(
    ("layer", "ln_post", "projected", "norm"),
    [
        (-1, True, True, "layernorm"),
        (-1, True, True, "none"),
        (2, True, False, "none"),
        (0, False, False, "none"),
        (-2, False, False, "layernorm"),
    ],
)
def test_features_are_those_of_open_clip(
    clip: tuple[str, Any], images: Tensor, layer: int, ln_post: bool, projected: bool, norm: str
) -> None:
    file, tower = clip
    dim = 20 if projected else 64
    target = ClipTarget(load_clip(NAME, file, (32, 32)), 16, (4, 4), dim, layer, ln_post, projected, norm)
    values = target(images)
    expected = block_outputs(tower, images)[layer]
    with torch.no_grad():
        expected = tower.ln_post(expected) if ln_post else expected
        expected = expected @ tower.proj if projected else expected
    expected = F.layer_norm(expected, (dim,)) if norm == "layernorm" else expected
    assert values.shape == (2, 16, dim)
    assert not values.requires_grad
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-4)


def test_positions_are_resampled_for_another_size(clip: tuple[str, Any]) -> None:
    tower: Any = load_clip(NAME, clip[0], (48, 16))
    assert ClipTarget(tower, 16, (6, 2), 20)(torch.zeros(1, 48, 16, 3, dtype=torch.uint8)).shape == (1, 12, 20)
    assert tower.positional_embedding.shape == (13, 64)
    assert torch.equal(tower.positional_embedding[0], clip[1].positional_embedding[0])


def test_the_tower_is_frozen(clip: tuple[str, Any]) -> None:
    tower = load_clip(NAME, clip[0], (32, 32))
    assert not tower.training
    assert not any(parameter.requires_grad for parameter in tower.parameters())


def test_nothing_touches_the_network(clip: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a connection was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load_clip(NAME, clip[0], (32, 32))
    with pytest.raises(ConfigError, match="must name a file"):
        load_clip("ViT-B-16-quickgelu", None, (224, 224))
    with pytest.raises(ConfigError, match="is not a file"):
        load_clip("ViT-B-16-quickgelu", "openai", (224, 224))  # open_clip's own name for weights to download
    with pytest.raises(ConfigError, match="hf-hub:timm/ViT-B-16-SigLIP is not an open_clip model"):
        load_clip("hf-hub:timm/ViT-B-16-SigLIP", clip[0], (224, 224))
    with pytest.raises(ConfigError, match=r"roberta-ViT-B-32 has a text tower that open_clip downloads"):
        load_clip("roberta-ViT-B-32", clip[0], (224, 224))


def test_a_model_in_a_folder_is_read_from_there(clip: tuple[str, Any], images: Tensor, tmp_path: Path) -> None:
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": CONFIG, "preprocess_cfg": {}}))
    with pytest.raises(ConfigError, match=r"target.weights=null is not target.model=local-dir:"):
        load_clip(f"local-dir:{tmp_path}", None, (32, 32))
    save_file(torch.load(clip[0]), tmp_path / "open_clip_model.safetensors")
    tower = load_clip(f"local-dir:{tmp_path}", None, (32, 32))
    assert torch.equal(
        ClipTarget(tower, 16, (4, 4), 20)(images),
        ClipTarget(load_clip(NAME, clip[0], (32, 32)), 16, (4, 4), 20)(images),
    )
    with pytest.raises(ConfigError, match=r"target.weights must be null for target.model=local-dir:FOLDER"):
        load_clip(f"local-dir:{tmp_path}", clip[0], (32, 32))
    with pytest.raises(ConfigError, match=r"local-dir:.*nowhere: open_clip_config.json of open_clip"):
        load_clip(f"local-dir:{tmp_path / 'nowhere'}", None, (32, 32))
    os.mkfifo(tmp_path / "open_clip_pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"open_clip_pytorch_model.bin is a pipe, .*; remove it"):
        load_clip(f"local-dir:{tmp_path}", None, (32, 32))


def test_a_wrong_name_or_file_is_one_sentence(clip: tuple[str, Any], tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    for arguments, part in (
        (("ViT-Q-16", clip[0]), "target.model=ViT-Q-16 is not an open_clip model"),
        ((NAME, str(tmp_path / "other.pt")), f"is not target.model={NAME}"),
        (("RN50", clip[0]), "target.model=RN50"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_clip(*arguments, (32, 32))
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_tower_with_nan_is_an_error(clip: tuple[str, Any], tmp_path: Path) -> None:
    state = torch.load(clip[0])
    state["visual.proj"][0] = torch.nan
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(ConfigError, match=r"nan\.pt: NaN or infinity in proj; download"):
        load_clip(NAME, str(tmp_path / "nan.pt"), (32, 32))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"dim": 64}, "dim must be 20"),
        ({"dim": 20, "projected": False}, "dim must be 64"),
        ({"dim": 20, "layer": 3}, "between -3 and 2"),
        ({"dim": 20, "ln_post": False}, "ln_post=true"),
    ],
)
def test_options_that_cannot_be_are_refused(clip: tuple[str, Any], options: dict[str, Any], part: str) -> None:
    tower = load_clip(NAME, clip[0], (32, 32))
    with pytest.raises(ValueError, match=part):
        ClipTarget(tower, 16, (4, 4), **options)


def test_pictures_compare(clip: tuple[str, Any], images: Tensor) -> None:
    target = ClipTarget(load_clip(NAME, clip[0], (32, 32)), 16, (4, 4), 20)
    first, second = target(images)
    picture = target.render(first, (4, 4))
    assert picture.shape == (64, 64, 3)
    assert (picture == target.render(first.clone(), (4, 4))).all()
    assert (picture != target.render(second, (4, 4))).any()
