from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.models.beit import Beit
from torch import Tensor
from torch.nn import functional as F

from dmjd.errors import ConfigError
from dmjd.targets.codebook import CodebookTarget, DVaeEncoder, VqKdEncoder, load_dvae, load_vqkd

CODES = 24


def random_images(size: int, batch: int = 2) -> Tensor:
    return torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def randomise(module: torch.nn.Module, std: float = 0.15) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = std * torch.randn(parameter.shape, generator=generator)
    return module


@pytest.fixture
def dvae_file(tmp_path: Path) -> Path:
    torch.save(randomise(DVaeEncoder(CODES, width=8, blocks=2)).state_dict(), tmp_path / "dvae.pt")
    return tmp_path / "dvae.pt"


def published_dvae(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """DALL-E's encoder by the names in its state dict alone: -> logits ``[B, codes, h, w]``."""

    def convolve(name: str, x: Tensor) -> Tensor:
        weight = state[f"{name}.w"]
        return F.conv2d(x, weight, state[f"{name}.b"], padding=(weight.shape[-1] - 1) // 2)

    x = convolve("blocks.input", x)
    for group in range(1, 5):
        for block in (1, 2):
            name = f"blocks.group_{group}.block_{block}"
            y = x
            for number in range(1, 5):
                y = convolve(f"{name}.res_path.conv_{number}", y.clamp(min=0))
            x = (convolve(f"{name}.id_path", x) if f"{name}.id_path.w" in state else x) + y / 64
        x = F.max_pool2d(x, 2) if group < 4 else x
    return convolve("blocks.output.conv", x.clamp(min=0))


def test_dvae_codes_are_the_published_encoders(dvae_file: Path) -> None:
    images = random_images(48)
    encoder = load_dvae(str(dvae_file), CODES)
    codes = CodebookTarget(encoder, CODES, patch=16)(images)
    assert codes.shape == (2, 36, 1)
    assert codes.dtype == torch.int64
    state = torch.load(dvae_file, weights_only=True)
    squeezed = 0.8 * images.permute(0, 3, 1, 2).float() / 255 + 0.1
    expected = published_dvae(state, squeezed).flatten(2)  # [B, codes, h * w], rows first
    assert torch.equal(codes.squeeze(-1), expected.argmax(1))
    logits = encoder(images.permute(0, 3, 1, 2) / 255).transpose(1, 2)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_the_published_dvae_has_its_shapes() -> None:
    with torch.device("meta"):
        state = DVaeEncoder(8192).state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    assert shapes["blocks.input.w"] == (256, 3, 7, 7)
    assert shapes["blocks.group_1.block_1.res_path.conv_1.w"] == (64, 256, 3, 3)
    assert shapes["blocks.group_2.block_1.id_path.w"] == (512, 256, 1, 1)
    assert shapes["blocks.group_4.block_2.res_path.conv_4.w"] == (2048, 512, 1, 1)
    assert shapes["blocks.output.conv.w"] == (8192, 2048, 1, 1)
    assert "blocks.group_2.block_2.id_path.w" not in shapes
    assert len(shapes) == 2 * (1 + 8 * 4 + 3 + 1)


def vqkd(size: tuple[int, int] = (32, 48)) -> VqKdEncoder:
    model = VqKdEncoder(size, patch=16, embed_dim=64, depth=2, codes=CODES, code_dim=6)
    randomise(model)
    return model


def test_vqkd_codes_are_the_nearest_entries_by_direction(tmp_path: Path) -> None:
    state = vqkd().state_dict()
    extra = {"decoder.cls_token": torch.zeros(1), "quantize.embedding.cluster_size": torch.zeros(CODES)}
    torch.save({"model": state | extra}, tmp_path / "vqkd.pth")
    images = random_images(48)[:, :32]
    target = CodebookTarget(load_vqkd(str(tmp_path / "vqkd.pth"), CODES, (32, 48)), CODES, patch=16)
    assert target.codes
    codes = target(images)
    oracle = Beit(img_size=(32, 48), embed_dim=64, depth=2, num_heads=1, num_classes=0, use_abs_pos_emb=True)
    oracle.load_state_dict(
        {name.removeprefix("encoder."): value for name, value in state.items() if name.startswith("encoder.")}
    )
    with torch.no_grad():
        tokens = oracle.eval().fc_norm(oracle.forward_features(images.permute(0, 3, 1, 2) / 127.5 - 1))[:, 1:]
        hidden = torch.tanh(tokens @ state["encode_task_layer.0.weight"].T + state["encode_task_layer.0.bias"])
        low = hidden @ state["encode_task_layer.2.weight"].T + state["encode_task_layer.2.bias"]
    entries = state["quantize.embedding.weight"]
    distances = torch.cdist(low / low.norm(dim=-1, keepdim=True), entries / entries.norm(dim=-1, keepdim=True))
    assert torch.equal(codes.squeeze(-1), distances.argmin(-1))
    assert codes.unique().numel() > 2


def test_codes_are_shown_as_colours(dvae_file: Path) -> None:
    target = CodebookTarget(load_dvae(str(dvae_file), CODES), CODES, patch=4)
    picture = target.render(torch.tensor([[3.0], [5.0], [3.0], [float("nan")]]), (2, 2))
    assert picture.shape == (8, 8, 3)
    assert (picture[:4, :4] == picture[4:, :4]).all()
    assert (picture[:4, :4] != picture[:4, 4:]).any()


def whole_module(path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), path)


def other_keys(path: Path) -> None:
    torch.save({"blocks.input.w": torch.zeros(8, 3, 7, 7), "blocks.group_1.block_1.res_path.conv_1.w": None}, path)


def no_weights(path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    ("write", "part"),
    [
        (None, "is not a file"),
        (whole_module, "cannot be read as tensors alone"),
        (other_keys, "not a dictionary of tensors"),
        (no_weights, "lacks blocks.input.w"),
    ],
)
def test_missing_or_foreign_weights_are_one_sentence_that_tells_how_to_make_them(
    tmp_path: Path, write: Callable[[Path], None] | None, part: str
) -> None:
    path = tmp_path / "encoder.pkl"
    if write is not None:
        write(path)
    with pytest.raises(ConfigError) as caught:
        load_dvae(str(path), CODES)
    assert part in str(caught.value)
    assert "state_dict(), FILE)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda value: value.fill_(float("nan")), "NaN or infinity in blocks.input.b"),
        (lambda value: value.double().fill_(1e300), "NaN or infinity in blocks.input.b"),
        (lambda value: value.to(torch.int8), "blocks.input.b is not a dense tensor of 16, 32 or 64-bit floats"),
        (lambda value: value.to(torch.complex64), "blocks.input.b is not a dense tensor"),
        (lambda value: value.to("meta"), "blocks.input.b is not a dense tensor"),
        (lambda value: value.to_sparse(), "blocks.input.b is not a dense tensor"),
    ],
    ids=["nan", "beyond float32", "int8", "complex", "meta", "sparse"],
)
def test_a_tensor_that_holds_no_weights_is_named(
    dvae_file: Path, change: Callable[[Tensor], Tensor], part: str
) -> None:
    """The codes of NaN are one code for all images."""
    state = torch.load(dvae_file)
    torch.save(state | {"blocks.input.b": change(state["blocks.input.b"])}, dvae_file)
    with pytest.raises(ConfigError) as caught:
        load_dvae(str(dvae_file), CODES)
    assert str(caught.value).startswith(f"target.weights={dvae_file}: {part}")


def test_weights_must_be_named_and_of_the_size_asked_for(dvae_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"target.weights must name a file: the encoder of DALL-E"):
        load_dvae(None, CODES)
    with pytest.raises(ConfigError, match=r"has another shape of blocks.output.conv"):
        load_dvae(str(dvae_file), CODES + 1)
