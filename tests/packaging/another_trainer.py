"""Somebody else's MAE, in their style: plain modules, their own loop, and from dmjd its ops alone.

Run where torch and the dmjd wheel are installed and nothing else. Prints one loss per step.
"""

import torch
from torch import Tensor, nn

from dmjd.ops import disjoint_masks, gather_tokens, hog, normalise, patchify, scatter_tokens

GRID, PATCH, DIM = (4, 4), 16, 32


class TinyMAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tokens = GRID[0] * GRID[1]
        self.embed = nn.Linear(3 * PATCH**2, DIM)
        self.cls = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos = nn.Parameter(0.02 * torch.randn(tokens, DIM))
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)
        self.mask_token = nn.Parameter(torch.zeros(DIM))
        self.decoder_pos = nn.Parameter(0.02 * torch.randn(tokens, DIM))
        self.decoder = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.LayerNorm(DIM))
        self.head = nn.Linear(DIM, 108)

    def forward(self, images: Tensor, sample_ids: Tensor, epoch: Tensor) -> Tensor:
        views = disjoint_masks(sample_ids, grid=GRID, views=2, mask_ratio=0.625, seed=0, epoch=epoch)
        target = hog(images, norm="layernorm").repeat(2, 1, 1)
        pixels = normalise(images, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        x = self.embed(patchify(pixels, PATCH)) + self.pos
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)
        x = self.encoder(gather_tokens(x, views.visible, prefix_tokens=1))
        x = scatter_tokens(x, self.mask_token, views.restore, self.decoder_pos, prefix_tokens=1)
        prediction = self.head(self.decoder(x)[:, 1:])
        hidden = views.mask.flatten(0, 1)
        return ((prediction - target).square().mean(-1) * hidden).sum() / hidden.sum()


def main() -> None:
    torch.manual_seed(0)
    model = TinyMAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = torch.compile(model, fullgraph=True)
    images = torch.randint(0, 256, (8, 64, 64, 3), dtype=torch.uint8)
    sample_ids = torch.arange(8)
    for epoch in range(3):
        loss = step(images, sample_ids, torch.tensor(epoch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.6f}")


if __name__ == "__main__":
    main()
