from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dmjd.data.batch import Batch
from dmjd.errors import DataError, UserError
from dmjd.evaluate.features import Features, encode, extract_features, pool

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
CPU = torch.device("cpu")


class PatchEncoder(nn.Module):
    """A class token of zeros and one token per 2x2 patch, with dropout so that the mode it runs in shows."""

    def __init__(self, num_prefix_tokens: int = 1) -> None:
        super().__init__()
        self.embed_dim = 8
        self.num_prefix_tokens = num_prefix_tokens
        self.project = nn.Conv2d(3, 8, 2, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.dropout(self.norm(self.project(images))).flatten(2).mT
        return torch.cat((patches.new_zeros(len(images), self.num_prefix_tokens, 8), patches), dim=1)


def make_encoder(num_prefix_tokens: int = 1) -> PatchEncoder:
    torch.manual_seed(0)
    return PatchEncoder(num_prefix_tokens)


def make_images() -> Tensor:
    return torch.randint(0, 256, (10, 4, 6, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def loader(images: Tensor, labels: Tensor, batch_size: int) -> Iterator[Batch]:
    for rows in torch.arange(len(images)).split(batch_size):
        yield Batch(images[rows], rows, labels[rows])


def extract(encoder: nn.Module, images: Tensor, labels: Tensor, *, batch_size: int = 4, **options: object) -> Features:
    settings = {"mean": MEAN, "std": STD, "pooling": "mean", "device": CPU} | options
    return extract_features(encoder, loader(images, labels, batch_size), **settings)  # type: ignore[arg-type]


def by_hand(encoder: PatchEncoder, images: Tensor) -> Tensor:
    """Features one image at a time, from the formulas: scale, normalise, project, mean over patches."""
    rows = []
    for image in images:
        pixels = (image.double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()
        projected = nn.functional.conv2d(
            pixels.permute(2, 0, 1)[None],
            encoder.project.weight.detach().double(),
            encoder.project.bias.detach().double(),  # type: ignore[union-attr]
            stride=2,
        )
        rows.append(projected.flatten(2).mean(dim=2)[0] / (1 + 1e-5) ** 0.5)  # batch norm at its initial statistics
    return torch.stack(rows)


@pytest.mark.parametrize("batch_size", [1, 4, 10])
def test_features_are_in_loader_order_float32_and_equal_to_the_formula(batch_size: int) -> None:
    encoder, images, labels = make_encoder(), make_images(), torch.arange(10).flip(0)
    features = extract(encoder, images, labels, batch_size=batch_size)
    assert features.values.dtype == torch.float32
    assert features.values.shape == (10, 8)
    assert len(features) == 10
    torch.testing.assert_close(features.values.double(), by_hand(encoder, images), rtol=0, atol=1e-5)
    assert features.labels.dtype == torch.int64
    assert torch.equal(features.labels, labels)


def test_every_submodule_gets_its_own_mode_back() -> None:
    encoder = make_encoder().train()
    encoder.norm.eval()  # frozen by its owner
    before = {name: part.training for name, part in encoder.named_modules()}
    statistics = {name: value.clone() for name, value in encoder.named_buffers()}
    extract(encoder, make_images(), torch.zeros(10, dtype=torch.int64))
    assert {name: part.training for name, part in encoder.named_modules()} == before
    assert before[""]
    assert not before["norm"]
    torch.testing.assert_close(dict(encoder.named_buffers()), statistics, rtol=0, atol=0)


def test_the_mode_comes_back_when_the_encoder_fails() -> None:
    encoder = make_encoder().train()
    with pytest.raises(RuntimeError):
        extract(encoder, make_images()[..., :2], torch.zeros(10, dtype=torch.int64), mean=MEAN[:2], std=STD[:2])
    assert encoder.training
    assert encoder.dropout.training


def test_encoded_features_can_enter_a_probes_autograd() -> None:
    encoder = make_encoder()
    for pooling in ("cls", "mean"):
        values = encode(encoder, make_images(), mean=MEAN, std=STD, pooling=pooling)
        assert not values.requires_grad
        weight = torch.ones(8, requires_grad=True)
        (values @ weight).sum().backward()
        torch.testing.assert_close(weight.grad, values.sum(dim=0))


def test_data_without_labels_is_refused() -> None:
    labels = torch.zeros(10, dtype=torch.int64)
    labels[9] = -1
    with pytest.raises(DataError, match="no labels"):
        extract(make_encoder(), make_images(), labels)


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(DataError, match="has no images"):
        extract_features(make_encoder(), [], mean=MEAN, std=STD, pooling="mean", device=CPU)


def test_features_that_are_not_finite_are_refused() -> None:
    encoder = make_encoder()
    with torch.no_grad():
        encoder.project.bias[3] = float("nan")  # type: ignore[index]
    with pytest.raises(UserError, match="NaN or infinity"):
        extract(encoder, make_images(), torch.zeros(10, dtype=torch.int64))


# Pooling


def tokens(prefix: int) -> torch.Tensor:
    """Two images of four patches; prefix tokens are far from every patch, so that one leaking in would show."""
    patches = torch.arange(2 * 4 * 3, dtype=torch.float32).reshape(2, 4, 3)
    return torch.cat((torch.full((2, prefix, 3), 1000.0) + torch.arange(prefix)[:, None], patches), dim=1)


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_mean_is_over_patches_and_excludes_the_prefix(prefix: int) -> None:
    # Image 0 holds 0..11 in raster order: channel means are (0+3+6+9)/4 and so on; image 1 is 12 above.
    expected = torch.tensor([[4.5, 5.5, 6.5], [16.5, 17.5, 18.5]])
    assert torch.equal(pool(tokens(prefix), prefix, "mean"), expected)


@pytest.mark.parametrize("prefix", [1, 5])
def test_cls_is_token_zero(prefix: int) -> None:
    assert torch.equal(pool(tokens(prefix), prefix, "cls"), torch.full((2, 3), 1000.0))
