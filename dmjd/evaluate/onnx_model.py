"""An encoder as an ONNX file, checked in onnxruntime against torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmjd.errors import ConfigError, UserError
from dmjd.evaluate.features import pool_features
from dmjd.models.classifier import Classifier
from dmjd.models.masked_image_model import Encoder

TOLERANCE = 1e-4
"""Largest difference of an output in onnxruntime from torch's, relative to the largest value; float32."""

BATCHES = (1, 3)
"""Batch sizes of the comparison; the export is traced with another."""

_MODULES = ("onnx", "onnxruntime", "onnxscript")
_MOST_BYTES = 1 << 31  # of one protobuf message


def check_onnx() -> None:
    """Raise ConfigError unless the packages of the extra ``onnx`` are installed."""
    absent = [name for name in _MODULES if find_spec(name) is None]
    if absent:
        raise ConfigError(f"format=onnx needs {', '.join(absent)}; pip install 'dmjd[onnx]'")


class Features(nn.Module):
    """Outputs of an encoder: ``pooled [B, D]``, ``patch_tokens [B, N, D]``, and ``class_token [B, D]`` if it has one.

    Images are normalised float32 ``[B, C, H, W]``.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.outputs = ["pooled", "patch_tokens", *["class_token"] * encoder.num_prefix_tokens]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        tokens = self.encoder(images)
        patches = tokens[:, self.encoder.num_prefix_tokens :]
        outputs = (pool_features(self.encoder, tokens, "mean"), patches)
        return (*outputs, tokens[:, 0]) if self.encoder.num_prefix_tokens else outputs


class Logits(nn.Module):
    """Output of a classifier: ``logits [B, classes]`` of normalised float32 images ``[B, C, H, W]``."""

    outputs = ("logits",)

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.classifier(images),)


def write_onnx(
    features: Features | Logits, shape: tuple[int, int, int], path: Path, metadata: Mapping[str, Any]
) -> None:
    """Write ``features`` with a dynamic batch to ``path``.

    Args:
        shape: (channels, height, width) of an image.
        metadata: of the file, as JSON values.

    Raises:
        UserError: if the weights exceed 2 GiB, or onnxruntime computes other outputs than torch.
    """
    import onnxruntime

    size = sum(value.numel() * value.element_size() for value in features.parameters())
    if size >= _MOST_BYTES:
        raise UserError(f"the weights have {size >> 20} MiB, and an ONNX file holds less than 2048; use format=timm")
    features.eval()
    program: Any = torch.onnx.export(
        features,
        (torch.zeros(2, *shape),),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=list(features.outputs),
        dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
    )
    program.model.metadata_props.update({key: json.dumps(value) for key, value in metadata.items()})
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in BATCHES:
        images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
        found = session.run(list(features.outputs), {"images": images.numpy()})
        with torch.no_grad():
            expected = features(images)
        for name, value, wanted in zip(features.outputs, found, expected, strict=True):
            difference = float((torch.from_numpy(value) - wanted).abs().max() / wanted.abs().max())
            if value.shape != tuple(wanted.shape) or not difference <= TOLERANCE:
                raise UserError(
                    f"onnxruntime {onnxruntime.__version__} computes another {name} than torch (relative difference "
                    f"{difference:.1e}, at most {TOLERANCE:.0e} is allowed), so no file was written"
                )
