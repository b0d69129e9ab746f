"""The one model of all methods: an encoder over masked views, a masked branch (MPB) and a visible branch (VDB)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from dmjd.masking import MaskedViews
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch, select_tokens
from dmjd.models.initialisation import INITIALISATIONS
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder

Encoder = ViTEncoder | ConvViTEncoder | SwinEncoder


class Prediction(NamedTuple):
    """masked: ``[K*B, P, target_dim]`` at predicted tokens. visible: ``[K*B, V, target_dim]``, None without VDB."""

    masked: Tensor
    visible: Tensor | None


class MaskedImageModel(nn.Module):
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
        if initialisation not in INITIALISATIONS:
            raise ValueError(f"initialisation must be one of {', '.join(INITIALISATIONS)}, got {initialisation!r}")
        if decoder is None and encoder.mask_token is None:
            raise ValueError(
                "a linear head on the encoder needs masked_tokens='mask_token'; an encoder that drops tokens needs a "
                "decoder"
            )
        if decoder is not None and encoder.mask_token is not None:
            raise ValueError("a decoder fills hidden places itself and needs masked_tokens='drop'")
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
        shown = patches if self.decoder is not None else select_tokens(patches, views.visible)
        return Prediction(masked, self.visible_branch(shown))
