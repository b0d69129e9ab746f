from __future__ import annotations

import pytest
import torch

from dmjd.errors import ConfigError
from dmjd.evaluate.pooling import pool


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


def test_cls_without_a_cls_token_is_refused_and_names_the_allowed_value() -> None:
    with pytest.raises(ConfigError, match=r"needs a cls token and this encoder has none.*pooling=mean"):
        pool(tokens(0), 0, "cls")


def test_another_pooling_is_refused_and_names_the_allowed_values() -> None:
    with pytest.raises(ConfigError, match="one of mean, cls, got 'max'"):
        pool(tokens(1), 1, "max")
