"""Pictures of a model: attention, losses, predictions, masks, principal components, and the command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.builders.model import build_classification
from dmjd.builders.step import build_step
from dmjd.cli import main
from dmjd.compose import compose, with_first_key
from dmjd.config import DataConfig, PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset
from dmjd.errors import ConfigError, DataError
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.explore.attention import attention_of, attention_weights
from dmjd.explore.figures import Shown, framed, heat, losses_of_images, pca_colours
from dmjd.explore.show import KINDS, ShowConfig, run
from dmjd.interop.layouts import LAYOUTS
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.masked_image_model import Encoder
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder
from dmjd.report import write_report
from dmjd.targets import HogTarget, PixelTarget
from dmjd.train.pictures import MAX_BYTES
from tests.conftest import TINY
from tests.interop.official_files import to_official

SIZES: dict[str, Any] = {"patch_size": 4, "in_chans": 3, "embed_dim": 16, "depth": 2, "num_heads": 2}
BEIT: dict[str, Any] = {"block": "beit", "positions": "relative", "masked_tokens": "mask_token", "layer_scale": 0.1}
CONVVIT: dict[str, Any] = {"embed_dims": (8, 8, 16), "depths": (1, 1, 2), "mlp_ratios": (1, 1, 1), "num_heads": 2}


def drawn(encoder: Encoder) -> Encoder:
    generator = torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return encoder.eval()


@pytest.mark.parametrize(
    ("encoder", "size", "prefix"),
    [
        (ViTEncoder(image_size=(16, 16), **SIZES), (24, 16), 1),
        (ViTEncoder(image_size=(16, 16), class_token=False, positions="learned", **SIZES), (16, 32), 0),
        (ViTEncoder(image_size=(16, 24), **SIZES, **BEIT), (16, 24), 1),
        (ViTEncoder(image_size=(16, 24), class_token=False, bias_tables="per_block", **SIZES, **BEIT), (16, 24), 0),
        (ConvViTEncoder(image_size=(32, 32), in_chans=3, **CONVVIT), (32, 48), 0),
    ],
    ids=["vit", "vit without class token", "beit", "beit per block", "convvit"],
)
def test_attention_is_that_of_the_last_block(encoder: Encoder, size: tuple[int, int], prefix: int) -> None:
    """softmax(q k^T / sqrt(d) + bias), head by head, with timm's bias; and it gives the block's own output."""
    attention: Any = attention_of(drawn(encoder))
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    calls: list[tuple[Tensor, Tensor]] = []
    handle = attention.register_forward_hook(lambda module, inputs, output: calls.append((inputs[0], output)))
    weights = attention_weights(encoder, images)
    handle.remove()
    (tokens, output), dim = calls[0], encoder.embed_dim
    height, width = encoder.grid_of(images)
    assert weights.shape == (2, 2, prefix + height * width, prefix + height * width)
    biases = [getattr(attention, f"{each}_bias", None) for each in "qkv"]
    if biases[0] is None:
        biases = [None if attention.qkv.bias is None else part for part in attention.qkv.bias.chunk(3)]
    q, k, v = (F.linear(tokens, part, bias) for part, bias in zip(attention.qkv.weight.chunk(3), biases, strict=True))
    shared: Any = getattr(encoder, "rel_pos_bias", None)
    relative = shared() if shared is not None else None
    if getattr(attention, "relative_position_bias_table", None) is not None:
        relative = attention._get_rel_pos_bias()[0]  # timm's, with a class token
    heads = []
    for head in range(2):
        part = slice(head * dim // 2, (head + 1) * dim // 2)
        scores = q[..., part] @ k[..., part].mT / (dim // 2) ** 0.5
        scores = scores if relative is None else scores + relative[head, 1 - prefix :, 1 - prefix :]
        torch.testing.assert_close(weights[:, head], scores.softmax(-1))
        heads.append(weights[:, head] @ v[..., part])
    torch.testing.assert_close(attention.proj(torch.cat(heads, -1)), output)


def test_swin_has_no_map_of_the_whole_image() -> None:
    sizes: dict[str, Any] = {"embed_dim": 32, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "window": 2}
    encoder = SwinEncoder(image_size=(64, 64), in_chans=3, **sizes)
    assert attention_of(encoder) is None
    with pytest.raises(ValueError, match="does not attend over the whole image"):
        attention_weights(encoder, torch.zeros(1, 3, 64, 64))


def config_of(*arguments: str | Path) -> ShowConfig:
    config = compose("show", with_first_key("show", [*map(str, arguments), "device=cpu"]))
    assert isinstance(config, ShowConfig)
    return config


def shown(*arguments: str | Path) -> tuple[Shown, FrozenEncoder]:
    config = config_of(*arguments)
    frozen = load_encoder(config)
    return Shown(config, frozen), frozen


def test_losses_masks_and_targets_are_those_of_training(finished_run: Path) -> None:
    """Of the run's training images, without their flip; the objective is that of the checkpoint."""
    figures, frozen = shown(finished_run, "split=train", "images=3", "epoch=2")
    assert isinstance(frozen.trained, PretrainConfig)
    samples, _, losses = figures._predicted
    ids = [0, 479, 958]
    dataset = build_dataset(frozen.trained.data, "train")
    assert [dataset.image(index).tolist() for index in ids] == figures.crops.tolist()
    step = build_step(frozen.trained, initial=frozen.path)
    prepare = step.prepare
    object.__setattr__(prepare, "flip", False)
    prepared = prepare(Batch(figures.crops, torch.tensor(ids), torch.tensor([-1] * 3)), epoch=2)
    assert torch.equal(samples.views.mask, prepared.masked_views.views.mask)
    assert torch.equal(samples.targets, prepared.targets)
    objective = step.engine.objective.eval()
    with torch.no_grad():
        whole = objective(*prepared.inputs)
        masked = objective.model(prepared.images, prepared.masked_views).masked.unflatten(0, (2, 3))
    for mean, parts in zip(whole, zip(*losses, strict=True), strict=True):
        torch.testing.assert_close(mean, torch.stack(parts).mean())
    at_masked = samples.predictions.gather(2, samples.views.masked[..., None].expand(masked.shape))
    torch.testing.assert_close(at_masked, masked)
    text = figures.reconstruction().captions[1]
    assert text == f"loss {losses[1].total:.4f} (L_mim {losses[1].masked:.4f}, L_vis {losses[1].visible:.4f})"


def save_mae(path: Path, *more: str) -> list[str]:
    """A file of MAE's code with encoder and decoder; returns arguments that describe it."""
    describing = [f"backbone.{key}" for key in ("patch_size=4", "embed_dim=32", "depth=1", "num_heads=4")]
    words = ["experiment=demo", *describing]
    config = compose("pretrain", [*words, "data=digits", *more])
    from dmjd.builders import build_objective, target_dim

    torch.save({"model": to_official(build_objective(config, target_dim(config)).model)}, path)
    return words


def test_a_file_with_decoder_is_shown_and_one_without_says_so(tmp_path: Path, finished_run: Path) -> None:
    words = save_mae(tmp_path / "mae.pth")
    image = tmp_path / "a, b.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(image)
    lines = run(config_of(tmp_path / "mae.pth", image, *words, "data=digits", "views=1"))
    files = [tmp_path / "mae" / "pictures" / f"show{kind}.png" for kind in ("", *(f"-{kind}" for kind in KINDS))]
    assert lines == [str(file) for file in files]
    for file in files:
        assert file.stat().st_size < MAX_BYTES
        with Image.open(file) as picture:
            assert "Trained weights, mae.pth; given images." in picture.info["Description"]
            assert str(tmp_path) not in picture.info["Description"]
    state = torch.load(tmp_path / "mae.pth")["model"]
    kept = {name: value for name, value in state.items() if not name.startswith(("decoder", "mask_token"))}
    torch.save({"model": kept}, tmp_path / "encoder.pth")
    lines = run(config_of(tmp_path / "encoder.pth", image, *words, "data=digits", f"output={tmp_path / 'out'}"))
    assert [line for line in lines if "/" not in line][0].startswith("no reconstruction: encoder.pth has no decoder")
    assert not (tmp_path / "out" / "show-reconstruction.png").exists()
