from __future__ import annotations

import torch

from dmjd.builders.preparation import draw_branch_scales
from dmjd.models.vit import EncoderBlock, ViTEncoder
from dmjd.ops import make_key

KEY = make_key(3, 5)


def test_a_branch_is_dropped_or_scaled_up() -> None:
    scales = draw_branch_scales(torch.arange(4000), KEY, views=2, depth=5, rate=0.4)
    assert scales.shape == (5, 2, 8000)
    for layer, rate in enumerate((0.0, 0.1, 0.2, 0.3, 0.4)):
        kept = scales[layer] > 0
        torch.testing.assert_close(scales[layer][kept], torch.full((int(kept.sum()),), 1 / (1 - rate)))
        # Five standard errors of a binomial share over 16,000 draws.
        assert abs(kept.double().mean() - (1 - rate)) <= 5 * (rate * (1 - rate) / 16000) ** 0.5 + 1e-12


def test_draws_are_of_the_sample_and_not_of_its_batch() -> None:
    ids = torch.arange(16)
    whole = draw_branch_scales(ids, KEY, views=2, depth=3, rate=0.5).unflatten(-1, (2, 16))
    for part in (ids[4:9], ids.flip(0), ids[7:8]):
        some = draw_branch_scales(part, KEY, views=2, depth=3, rate=0.5).unflatten(-1, (2, len(part)))
        assert torch.equal(some, whole[..., part])


def test_epochs_views_and_branches_draw_apart() -> None:
    ids = torch.arange(2000)
    first = draw_branch_scales(ids, KEY, views=2, depth=3, rate=0.5)[2] > 0
    later = draw_branch_scales(ids, make_key(3, 6), views=2, depth=3, rate=0.5)[2] > 0
    pairs = [(first[0], first[1]), (first[0, :2000], first[0, 2000:]), (first[0], later[0])]
    for one, other in pairs:  # independent fair coins agree half the time
        agree = (one == other).double().mean()
        assert abs(agree - 0.5) < 5 * 0.5 / len(one) ** 0.5


def test_a_dropped_branch_leaves_the_token_as_it_was_and_a_kept_one_is_scaled() -> None:
    torch.manual_seed(0)
    encoder = ViTEncoder(image_size=(8, 8), patch_size=4, in_chans=1, embed_dim=16, depth=1, num_heads=2)
    block, x = encoder.blocks[0], torch.randn(3, 4, 16)
    assert isinstance(block, EncoderBlock)
    scale = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 1.0]])
    out = block(x, scale)
    assert torch.equal(out[0], x[0])
    torch.testing.assert_close(out[1], x[1] + 2 * block.attn(block.norm1(x))[1])
    torch.testing.assert_close(out[2], block(x)[2])
