"""The classifier of fine-tuning: an encoder of whole images, pooling and a linear head; and its objective."""

from __future__ import annotations

from typing import NamedTuple

from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.initialisation import beit, mae, simmim
from dmjd.models.masked_image_model import Encoder, Model
from dmjd.models.norm import layer_norm
from dmjd.models.objective import Trainable


class Classifier(Model):
    """Encoder, pooling, LayerNorm, linear head. It takes the encoder over and initialises it as in pre-training.

    Parameters that do not take part leave the encoder: its mask token, ConvMAE's multi-scale convolutions, which whole
    images go without, and its final norm if ``norm`` is "pooled".

    Args:
        pooling: "mean" of the tokens of patches, or "cls", the class token.
        norm: "pooled" is a new LayerNorm ``fc_norm`` after the pooling (MAE, ConvMAE, DMJD, BEiT, SimMIM's ViT,
            MaskFeat); "encoder" is the encoder's own before it (Swin, timm's ViT with a class token).
        init_std, init_scale: the head's weights are drawn from a truncated normal distribution and then scaled: 2e-5
            and 1 in MAE, .02 and .001 in BEiT, SimMIM and MaskFeat.

    Raises:
        ValueError: for pooling="cls" and an encoder without a class token.
    """

    decoder = None

    def __init__(
        self,
        encoder: Encoder,
        num_classes: int,
        *,
        pooling: str = "mean",
        norm: str = "pooled",
        init_std: float = 2e-5,
        init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if pooling == "cls" and not encoder.num_prefix_tokens:
            raise ValueError("pooling=cls needs a class token, and this encoder has none; use pooling=mean")
        self.pooling = pooling
        self.encoder = encoder
        self.fc_norm = layer_norm(encoder.embed_dim) if norm == "pooled" else nn.Identity()
        self.head = nn.Linear(encoder.embed_dim, num_classes)
        _initialise(self)
        trunc_normal_(self.head.weight, std=init_std)
        self.head.weight.data.mul_(init_scale)
        nn.init.zeros_(self.head.bias)
        for name in ("mask_token", "stage1_output_decode", "stage2_output_decode"):
            if getattr(encoder, name, None) is not None:
                setattr(encoder, name, None)
        if norm == "pooled":
            encoder.norm = nn.Identity()

    def forward(self, images: Tensor, branch_scales: Tensor | None = None, dropout: Tensor | None = None) -> Tensor:
        """
        Args:
            images: float ``[B, C, H, W]``, normalised.
            branch_scales: the encoder's stochastic depth, ``[depth, 2, B]``, or None.
            dropout: factors of the features, ``[B, D]``, or None.

        Returns:
            Logits ``[B, num_classes]``.
        """
        tokens = self.encoder(images, None, branch_scales)
        prefix = self.encoder.num_prefix_tokens
        features = self.fc_norm(tokens[:, 0] if self.pooling == "cls" else tokens[:, prefix:].mean(dim=1))
        return self.head(features if dropout is None else features * dropout.to(features.dtype))


def _initialise(classifier: Classifier) -> None:
    """The initialisation that the encoder's kind has in pre-training."""
    encoder = classifier.encoder
    if hasattr(encoder, "layers"):
        simmim(classifier)
    elif any(hasattr(getattr(block, "attn", None), "q_bias") for block in encoder.blocks):
        beit(classifier)
    else:
        mae(classifier)


class Classified(NamedTuple):
    """total: the cross-entropy, 0-d float32. logits: ``[B, num_classes]``, detached."""

    total: Tensor
    logits: Tensor


class Classification(Trainable):
    """Cross-entropy with soft targets, in float32 at any precision of the model."""

    model: Classifier

    def forward(
        self,
        images: Tensor,
        targets: Tensor | None = None,
        branch_scales: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Classified | Tensor:
        """
        Args:
            targets: a distribution over the classes for each image, float ``[B, num_classes]``.
            images, branch_scales, dropout: as for :class:`Classifier`.

        Returns:
            The loss with the logits; logits ``[B, num_classes]`` alone without targets.
        """
        logits: Tensor = self.model(images, branch_scales, dropout)
        if targets is None:
            return logits
        return Classified(F.cross_entropy(logits.float(), targets), logits.detach())
