"""A model as a file of ONNX or of torch.export, checked in onnxruntime or in torch against the model itself."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from dmjd.errors import ConfigError, UserError
from dmjd.evaluate.features import pool_features
from dmjd.models.attention import ShortWindowAttention
from dmjd.models.classifier import Classifier
from dmjd.models.masked_image_model import Encoder

TOLERANCE, PROGRAM_TOLERANCE = 1e-4, 1e-5
"""Largest difference of an output in onnxruntime, and of one of a program of torch.export, from the model's, relative
to the largest value; float32."""

METADATA = "dmjd.json"
"""Name of the metadata among the extra files of a program of torch.export."""

_MODULES = ("onnx", "onnxruntime", "onnxscript")
_MOST_BYTES = 1 << 31  # of one protobuf message


def check_onnx() -> None:
    """Raise ConfigError unless the packages of the extra ``onnx`` are installed."""
    absent = [name for name in _MODULES if find_spec(name) is None]
    if absent:
        raise ConfigError(f"format=onnx needs {', '.join(absent)}; pip install 'dmjd[onnx]'")


class Outputs(nn.Module):
    """Outputs of a file, by default of a batch of images of any number.

    inputs, outputs: their names. needs: packages beside torch whose ops it has. batches: numbers of images of the
    comparison; a file is traced with ``traced`` images, and if that is another number, its batch is dynamic.
    """

    inputs: Sequence[str] = ("images",)
    outputs: Sequence[str]
    needs: Sequence[str] = ()
    batches: Sequence[int] = (1, 3)
    traced = 2

    def sample(self, batch: int, shape: tuple[int, int, int]) -> tuple[Tensor, ...]:
        """Random inputs; ``shape``: (channels, height, width)."""
        return (torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch)),)

    def differences(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
        """Output -> the largest difference, relative to the largest value; infinity for another shape."""
        pairs = zip(self.outputs, found, expected, strict=True)
        return {
            name: relative(value, wanted) if value.shape == wanted.shape else math.inf for name, value, wanted in pairs
        }


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


class Features(Outputs):
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


class Logits(Outputs):
    """Output of a classifier: ``logits [B, classes]`` of normalised float32 images ``[B, C, H, W]``."""

    outputs = ("logits",)

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.classifier(images),)


def write_onnx(outputs: Outputs, shape: tuple[int, int, int], path: Path, metadata: Mapping[str, Any]) -> None:
    """Write ``outputs`` as ONNX to ``path``.

    Args:
        shape: (channels, height, width) of an image.
        metadata: of the file, as JSON values.

    Raises:
        UserError: if the weights exceed 2 GiB, or onnxruntime computes other outputs than torch.
    """
    import onnxruntime

    size = sum(value.numel() * value.element_size() for value in outputs.parameters())
    if size >= _MOST_BYTES:
        raise UserError(
            f"the weights have {size >> 20} MiB, and an ONNX file holds less than 2048; use format=timm or torch_export"
        )
    outputs.eval()
    of_swin: list[Any] = [each for each in outputs.modules() if isinstance(each, ShortWindowAttention)]
    for attention in of_swin:
        attention.__class__ = WindowAttention  # timm's: ours reshapes what ONNX's form of attention has transposed
    with warnings.catch_warnings(action="ignore"):  # of torch and torchvision, about themselves
        program: Any = torch.onnx.export(
            outputs,
            outputs.sample(outputs.traced, shape),
            dynamo=True,
            verbose=False,
            input_names=list(outputs.inputs),
            output_names=list(outputs.outputs),
            dynamic_shapes=_dynamic(outputs),
        )
    program.model.metadata_props.update({key: json.dumps(value) for key, value in metadata.items()})
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> list[Tensor]:
        feeds = {name: value.numpy() for name, value in zip(outputs.inputs, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(list(outputs.outputs), feeds)]

    _compare(outputs, run, shape, f"onnxruntime {onnxruntime.__version__}", TOLERANCE)


def write_program(outputs: Outputs, shape: tuple[int, int, int], path: Path, metadata: Mapping[str, Any]) -> None:
    """Write ``outputs`` as a program of torch.export to ``path``; arguments as for :func:`write_onnx`.

    Raises:
        UserError: if the file computes other outputs than the model.
    """
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        program = torch.export.export(
            outputs.eval(), outputs.sample(outputs.traced, shape), dynamic_shapes=_dynamic(outputs)
        )
        torch.export.save(program, path, extra_files={METADATA: json.dumps(metadata)})
        loaded = torch.export.load(path).module()
    _compare(outputs, loaded, shape, f"torch.export of torch {torch.__version__}", PROGRAM_TOLERANCE)


def _dynamic(outputs: Outputs) -> dict[str, Any] | None:
    if outputs.traced in outputs.batches:
        return None
    return {name: {0: torch.export.Dim("batch")} for name in outputs.inputs}


def _compare(
    outputs: Outputs, run: Callable[..., Sequence[Tensor]], shape: tuple[int, int, int], what: str, tolerance: float
) -> None:
    """Raise UserError unless ``run`` computes what ``outputs`` does."""
    for batch in outputs.batches:
        inputs = outputs.sample(batch, shape)
        with torch.no_grad():
            found, expected = run(*inputs), outputs(*inputs)
        for name, difference in outputs.differences(found, expected).items():
            if not difference <= tolerance:
                raise UserError(
                    f"{what} computes another {name} than torch (relative difference {difference:.1e}, at most "
                    f"{tolerance:.0e} is allowed), so no file was written"
                )
