"""The one model of all methods: an encoder over masked views, a masked branch (MPB) and a visible branch (VDB)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from dmjd.masking import MaskedViews
from dmjd.models.decoder import MAEDecoder, VisibleBranch, select_tokens
from dmjd.models.initialisation import INITIALISATIONS
from dmjd.ops.views import Views


class Encoder(nn.Module):
    """The contract of a backbone: from images, or masked views of them, to normalised tokens.

    ``encoder(images, views=None, branch_scales=None)`` takes images float ``[B, C, H, W]``, K views or None for whole
    images, and stochastic depth ``[len(blocks), 2, K*B]`` (:mod:`dmjd.builders.preparation`) or None. It returns
    ``[B, prefix + N, D]`` without views; with views ``[K*B, prefix + V, D]`` if masked tokens are dropped, or
    ``[K*B, prefix + N, D]`` if a mask token is put in their places. It raises ValueError for images of a size that it
    cannot encode, and for views of another batch or grid.

    Attributes:
        embed_dim: D, width of a token.
        patch_size: side of a token in pixels.
        grid: (h, w) tokens of an image of pre-training's size.
        num_prefix_tokens: tokens before those of the patches, which no view masks: 1 with a class token, else 0.
        mask_token: the learned token in the places of masked ones; None if they are dropped, which needs a decoder.
        positions: ``[N, D]``, fixed and outside of the state dict, which an export adds; None for learned ones or none.
        map_widths: channels of the outputs of :meth:`feature_maps`: one for each stage; of a ViT, whose maps are all
            alike, one.
        on_grid: whether the blocks take maps of tokens ``[B, h, w, D]`` (:mod:`dmjd.models.dense.grid_attention`);
            there is no class token then.
        blocks: residual blocks in the order of computation, each with its ``mlp``: units of activation checkpointing,
            ``torch.compile``, sharding and stochastic depth.
    """

    embed_dim: int
    patch_size: int
    grid: tuple[int, int]
    num_prefix_tokens: int
    mask_token: Tensor | None
    positions: Tensor | None
    map_widths: tuple[int, ...]
    on_grid = False

    if TYPE_CHECKING:  # at run time a property would stand before the modules of the same name

        @property
        def blocks(self) -> nn.ModuleList | list[nn.Module]: ...

    def feature_maps(
        self, images: Tensor, branch_scales: Tensor | None = None, blocks: Sequence[int] = ()
    ) -> list[Tensor]:
        """Maps of whole images, float ``[B, width, h, w]`` in channels-last memory, without the final norm.

        Args:
            images, branch_scales: as for a call.
            blocks: of a ViT, those whose outputs are returned, in this order, without the class token; the last one
                alone if empty. The other backbones return the outputs of their stages: ConvViT at strides 4, 8 and 16,
                Swin at 4, 8, 16 and 32.
        """
        # A call of the module: ZeRO-3 gathers the parameters of an encoder around it.
        maps: list[Tensor] = self(images, None, branch_scales, tuple(blocks) or (len(self.blocks) - 1,))
        return maps

    @property
    def layers_of_blocks(self) -> int:
        """Number of layers between the embeddings and the head, for :meth:`layer_of`."""
        return len(self.blocks)

    def layer_of(self, name: str) -> int | None:
        """Layer of the parameter ``name``, for layer-wise decay and freezing, as in BEiT's and MAE's fine-tuning.

        Embeddings, positions and tokens are 0, block i is i + 1, and what follows the blocks or belongs to all of them
        is ``layers_of_blocks + 1``. None for a name that this class does not know.
        """
        if name in ("cls_token", "mask_token", "pos_embed") or name.startswith("patch_embed."):
            return 0
        if block := re.match(r"blocks\.(\d+)\.", name):
            return int(block[1]) + 1
        return self.layers_of_blocks + 1 if re.match(r"(norm|rel_pos_bias)\.", name) else None

    def grid_of(self, images: Tensor, views: Views | None = None) -> tuple[int, int]:
        """(h, w) tokens of ``images``. Raises ValueError for a size that it cannot encode, or views of other images."""
        grid = token_grid(images.shape[-2], images.shape[-1], self.patch_size)
        if views is not None and views.restore.shape[1:] != (images.shape[0], grid[0] * grid[1]):
            raise ValueError(
                f"views of {views.restore.shape[1]} images with {views.restore.shape[2]} tokens do not fit "
                f"{images.shape[0]} images with {grid[0]}x{grid[1]} tokens"
            )
        return grid


def token_grid(height: int, width: int, patch: int) -> tuple[int, int]:
    """(h, w) tokens. Raises ValueError if a side in pixels is not a multiple of ``patch``."""
    if height % patch or width % patch:
        raise ValueError(f"image size {height}x{width} is not divisible by the patch size {patch}")
    return height // patch, width // patch


class Model(nn.Module):
    """An encoder, and what a task adds to it.

    Attributes:
        decoder: the second stack of blocks; None without one.
    """

    encoder: Encoder
    decoder: MAEDecoder | None


class Prediction(NamedTuple):
    """masked: ``[K*B, P, target_dim]`` at predicted tokens. visible: ``[K*B, V, target_dim]``, None without VDB."""

    masked: Tensor
    visible: Tensor | None


class MaskedImageModel(Model):
    """Encoder, optional decoder, linear head on predicted tokens, optional visible branch.

    Without a decoder the head reads the encoder's own tokens at the predicted places, so the encoder must keep them
    (``masked_tokens="mask_token"``).
    ``initialisation`` is a key of :data:`~dmjd.models.initialisation.INITIALISATIONS`.
    """

    def __init__(
        self,
        encoder: Encoder,
        decoder: MAEDecoder | None,
        visible_branch: VisibleBranch | None,
        target_dim: int,
        initialisation: str = "mae",
    ) -> None:
        super().__init__()
        if decoder is None and encoder.mask_token is None:
            raise ValueError(
                "a linear head on the encoder needs masked_tokens='mask_token'; an encoder that drops tokens needs a "
                "decoder"
            )
        if decoder is not None and encoder.mask_token is not None:
            raise ValueError("a decoder fills masked places itself and needs masked_tokens='drop'")
        self.encoder = encoder
        self.decoder = decoder
        self.head = nn.Linear(encoder.embed_dim if decoder is None else decoder.dim, target_dim)
        self.visible_branch = visible_branch
        INITIALISATIONS[initialisation](self)

    def forward(self, images: Tensor, masked_views: MaskedViews, branch_scales: Tensor | None = None) -> Prediction:
        """
        Args:
            images: float ``[B, C, H, W]``.
            masked_views: K views and the tokens to predict in each.
            branch_scales: the encoder's stochastic depth, ``[depth, 2, K*B]``, or None.

        Raises:
            ValueError: with a decoder, if the images are not of the size that it was built for.
        """
        views, predicted = masked_views
        if self.decoder is not None and self.encoder.grid_of(images) != self.encoder.grid:
            raise ValueError(
                f"the decoder was built for {self.encoder.grid} tokens, got {self.encoder.grid_of(images)}"
            )
        encoded = self.encoder(images, views, branch_scales)
        prefix = self.encoder.num_prefix_tokens
        patches = encoded[:, prefix:]
        read = select_tokens(patches, predicted) if self.decoder is None else self.decoder(encoded, views, predicted)
        masked = self.head(read)
        if self.visible_branch is None:
            return Prediction(masked, None)
        visible = patches if self.decoder is not None else select_tokens(patches, views.visible)
        return Prediction(masked, self.visible_branch(visible))
