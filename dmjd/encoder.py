"""The Python interface of trained weights: :func:`load_encoder`, :func:`load_classifier` and their classes."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.random import fork_rng

from dmjd.compose import compose
from dmjd.data.crops import evaluation_view
from dmjd.data.dataset import InMemory, OpenImage, Pixels
from dmjd.data.decode import decode_errors, open_image, read_bytes, to_mode
from dmjd.data.folder import ImageFolder
from dmjd.errors import ConfigError, DataError, UserError, config_section
from dmjd.evaluate.encoder import FrozenEncoder, with_head
from dmjd.evaluate.encoder import load_encoder as load_frozen
from dmjd.evaluate.features import FEATURE_BATCH, pool_features
from dmjd.files import at_home
from dmjd.keywords import of_checkpoint
from dmjd.models.masked_image_model import Encoder as Module
from dmjd.ops.images import normalise

OneImage: TypeAlias = str | os.PathLike[str] | Image.Image | npt.NDArray[Any] | Tensor
Images: TypeAlias = OneImage | Iterable[OneImage]
Opener: TypeAlias = Callable[[], OpenImage]

_THREADS = min(8, os.cpu_count() or 1)  # decoding releases the GIL


def load_encoder(
    checkpoint: str | os.PathLike[str],
    *,
    weights: Literal["trained", "ema", "untrained", "student"] = "trained",
    device: Literal["auto", "cpu", "cuda"] | torch.device = "auto",
    **keys: Any,
) -> Encoder:
    """The frozen encoder of a run or of a file of weights.

    Args:
        checkpoint: a ``dmjd.Run`` or a run folder (its newest checkpoint), a checkpoint folder, or a file of weights of
            dmjd or of another code base.
        weights: "trained": weights of the last step, or the teacher of a file with a student and a teacher. "ema":
            their exponential moving average. "untrained": weights at initialisation. "student": that of such a file.
        device: "auto": CUDA if available, else CPU.
        keys: for a file of weights, keys that describe its model in place of what its tensors show:
            ``experiment="mae_vit_base"``, ``backbone="vit_large"``, ``backbone={"num_heads": 8}``; also other keys of
            ``dmjd knn``.

    Raises:
        UserError: if there is no complete checkpoint, or it holds another model than described.
    """
    name = str(device) if isinstance(device, torch.device) else device
    config = compose("knn", of_checkpoint(checkpoint, {"weights": weights, "device": name, **keys}))
    with own_defaults():
        return Encoder(load_frozen(config))


def load_classifier(
    checkpoint: str | os.PathLike[str],
    *,
    weights: Literal["auto", "trained", "ema"] = "auto",
    which: Literal["newest", "best"] = "newest",
    device: Literal["auto", "cpu", "cuda"] | torch.device = "auto",
    **keys: Any,
) -> Classifier:
    """The classifier of a fine-tuned run or file of weights.

    Args:
        checkpoint: a ``dmjd.Run``, a run folder, a checkpoint folder, or a file of dmjd or of another code base, whose
            classes have no names.
        weights: "trained": weights of the checkpoint. "ema": their exponential moving average. "auto": the average if
            there is one.
        which: of a run folder the newest checkpoint, or the one with the best validation.
        device: as for :func:`load_encoder`.
        keys: as for :func:`load_encoder`, of ``dmjd validate``.

    Raises:
        UserError: if there is no complete checkpoint, or it is none of a fine-tuning.
    """
    name = str(device) if isinstance(device, torch.device) else device
    config = compose(
        "validate", of_checkpoint(checkpoint, {"weights": weights, "which": which, "device": name, **keys})
    )
    with own_defaults():
        frozen = load_frozen(config)
        frozen = with_head(frozen) if frozen.path.is_file() else frozen
    if frozen.classifier is None:
        raise ConfigError(f"checkpoint={frozen.path} has no classifier; make one with dmjd finetune")
    return Classifier(frozen)


@contextmanager
def own_defaults() -> Iterator[None]:
    """Context with torch's own default dtype and device; the caller's, and its random generators, are restored.

    A model is initialised from the seed of its run.
    """
    dtype = torch.get_default_dtype()
    with fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()), torch.device("cpu"):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


class Encoder:
    """A frozen encoder with the image size, crop and normalisation of its pre-training; made by :func:`load_encoder`.

    Attributes:
        module: the network, an ``nn.Module`` in evaluation mode whose parameters need no gradient:
            ``images float [B, C, H, W], normalised -> tokens [B, prefix + N, D]``.
        path: the checkpoint folder, or the file.
        step: optimizer steps of the weights; 0 for files, which do not record it.
        device: device of the network.
        size: (height, width) in pixels of the images that it reads.
        crop_pct: part of the shorter side of an image that the central crop of ``size`` spans.
        channels: 1 (grey) or 3 (RGB), to which images are converted. With another number only ``module`` is of use.
        mean, std: normalisation, per channel, of images scaled to [0, 1].
        dim: D, the length of a feature vector.
    """

    def __init__(self, frozen: FrozenEncoder) -> None:
        self.module: Module = frozen.encoder
        self.path, self.step, self.device, self.size = frozen.path, frozen.step, frozen.device, frozen.size
        self.channels, self.mean, self.std = frozen.data.channels, tuple(frozen.data.mean), tuple(frozen.data.std)
        self.dim: int = frozen.encoder.embed_dim
        self.crop_pct = frozen.data.crop_pct

    def __repr__(self) -> str:
        height, width = self.size
        return f"Encoder({str(self.path)!r}, step={self.step}, dim={self.dim}, size={height}x{width}, {self.device})"

    def embed(
        self,
        images: Images,
        *,
        pooling: Literal["mean", "cls"] = "mean",
        batch_size: int = FEATURE_BATCH,
        size: int | Sequence[int] | None = None,
    ) -> Tensor:
        """One feature vector per image, equal to those of ``dmjd knn``. Results do not depend on the batch.

        Args:
            images: one image or an iterable of images, of any sizes. An image is a path; a PIL image; an array
                ``[H, W]`` or ``[H, W, C]``; or a tensor ``[H, W]`` or ``[C, H, W]``. Arrays and tensors are uint8, or
                floating within 0..1, and may have a leading dimension of n images. C is 1, 3 or 4 (alpha is dropped).
                A folder is read as ``data.root`` is, in the order of its sorted paths; of one with ``train/`` and
                ``val/``, the training images.
            pooling: "mean" of the patch tokens, or "cls", the class token.
            batch_size: images per forward pass.
            size: (height, width), or the side of a square, to resize images to. Default: that of pre-training.

        Returns:
            float32 ``[n, D]`` on the CPU; n is 1 for a single image.

        Raises:
            UserError: naming the image that cannot be read or has a wrong type, shape or range.
        """
        if pooling not in ("mean", "cls"):
            raise ConfigError(f"pooling={pooling!r} must be 'mean' or 'cls'")
        prefix = self.module.num_prefix_tokens
        if pooling == "cls" and not prefix:
            raise ConfigError("pooling='cls' needs a class token, and this encoder has none; use pooling='mean'")
        runs = self._run(images, batch_size, size)
        with torch.no_grad():
            features = torch.cat([pool_features(self.module, tokens, pooling).cpu() for tokens, _ in runs])
        if not bool(features.isfinite().all()):
            raise UserError(f"the features of {self.path} hold NaN or infinity; load an earlier checkpoint")
        return features

    def patch_tokens(
        self, images: Images, *, batch_size: int = FEATURE_BATCH, size: int | Sequence[int] | None = None
    ) -> Tensor:
        """The patch tokens of each image, float32 ``[n, h, w, D]`` on the CPU; arguments as for :meth:`embed`."""
        prefix = self.module.num_prefix_tokens
        return torch.cat(
            [tokens[:, prefix:].unflatten(1, grid).cpu() for tokens, grid in self._run(images, batch_size, size)]
        )

    def _run(
        self, images: Images, batch_size: int, size: int | Sequence[int] | None
    ) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """The tokens ``[B, prefix + N, D]`` of each batch with their grid."""
        if self.channels not in (1, 3):
            raise ConfigError(
                f"{self.path} reads images of {self.channels} channels, and images here have 1 or 3; call .module with "
                f"normalised images [B, {self.channels}, H, W]"
            )
        if not _is_count(batch_size):
            raise ConfigError(f"batch_size={batch_size!r} must be an int of at least 1")
        sides: Any = self.size if size is None else (size, size) if isinstance(size, numbers.Integral) else size
        if not isinstance(sides, Sequence) or len(sides) != 2 or not all(map(_is_count, sides)):
            raise ConfigError(f"size={size!r} must be an int or (height, width), in pixels of at least 1")
        height, width = sides
        with config_section("size"):
            grid = self.module.grid_of(torch.empty(1, self.channels, height, width, device="meta"))
        was_training = self.module.training
        found = _each(images, "images", self.channels)
        with ThreadPoolExecutor(_THREADS) as threads:
            view = partial(self._view, size=(height, width))
            batch = list(islice(found, batch_size))
            if not batch:
                raise DataError("images is empty; give at least one image")
            while batch:
                pixels = torch.stack(list(threads.map(view, batch))).to(self.device)
                self.module.eval()
                with torch.no_grad():
                    tokens = self.module(normalise(pixels, self.mean, self.std)).float()
                self.module.train(was_training)
                yield tokens, grid
                batch = list(islice(found, batch_size))

    def _view(self, opener: Opener, size: tuple[int, int]) -> Tensor:
        """uint8 ``[H, W, C]``, as an evaluation reads the image."""
        return evaluation_view(opener(), size, self.crop_pct)


class Classifier(Encoder):
    """A fine-tuned classifier with the image size, crop and normalisation of its training; made by
    :func:`load_classifier`. It is an :class:`Encoder`, too: its features are those that its head reads.

    Attributes:
        classes: names of the classes in the order of the logits; numbers if the training images had no names.
    """

    def __init__(self, frozen: FrozenEncoder) -> None:
        super().__init__(frozen)
        assert frozen.classifier is not None
        self._classifier = frozen.classifier
        self.classes = frozen.class_labels

    def __repr__(self) -> str:
        return f"Classifier({str(self.path)!r}, step={self.step}, {len(self.classes)} classes, {self.device})"

    def logits(
        self, images: Images, *, batch_size: int = FEATURE_BATCH, size: int | Sequence[int] | None = None
    ) -> Tensor:
        """Logits of each image, float32 ``[n, classes]`` on the CPU; arguments as for :meth:`embed`."""
        features = self.embed(images, pooling=self._pooling, batch_size=batch_size, size=size)
        with torch.no_grad():
            return self._classifier.head(features.to(self.device)).float().cpu()

    def predict(
        self, images: Images, *, batch_size: int = FEATURE_BATCH, size: int | Sequence[int] | None = None
    ) -> list[tuple[str, float]]:
        """The most probable class of each image and its probability; arguments as for :meth:`embed`."""
        found = self.logits(images, batch_size=batch_size, size=size).softmax(dim=1).max(dim=1)
        return [
            (self.classes[index], value)
            for index, value in zip(found.indices.tolist(), found.values.tolist(), strict=True)
        ]

    @property
    def _pooling(self) -> Literal["mean", "cls"]:
        return cast(Literal["mean", "cls"], self._classifier.pooling)


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= 1


def _each(images: Any, name: str, channels: int) -> Iterator[Opener]:
    """A function that opens it, for each image in ``images``; ``name`` is for errors."""
    if isinstance(images, (str, os.PathLike)):
        path = at_home(os.fspath(images))
        if os.path.isdir(path):
            folder = ImageFolder(path, "train", cast(Literal[1, 3], channels), "none")
            yield from (partial(folder.open, index) for index in range(len(folder)))
        else:
            yield partial(_open_file, path, channels)
    elif isinstance(images, Image.Image):
        yield partial(_open_picture, images, name, channels)
    elif isinstance(images, Tensor) and (images.layout is not torch.strided or images.is_meta or images.is_quantized):
        kind = "on the meta device" if images.is_meta else "quantised" if images.is_quantized else str(images.layout)
        raise DataError(f"{name} is a tensor that is {kind}; give a dense tensor with values, uint8 or within 0..1")
    elif isinstance(images, Tensor) or (isinstance(images, np.ndarray) and images.dtype.kind not in "OU"):
        batch = [(name, images)] if images.ndim != 4 else [(f"{name}[{i}]", each) for i, each in enumerate(images)]
        yield from (partial(_open_array, each, number, channels) for number, each in batch)
    elif isinstance(images, Iterable) and not isinstance(images, (bytes, dict)):
        for number, each in enumerate(images):
            yield from _each(each, f"{name}[{number}]", channels)
    else:
        raise DataError(
            f"{name} is of type {type(images).__name__}; an image is a path, a PIL image, an array [H, W, C] or a "
            "tensor [C, H, W]"
        )


def _open_file(path: str, channels: int) -> OpenImage:
    return open_image(read_bytes(path), path, channels)


def _open_picture(image: Image.Image, name: str, channels: int) -> OpenImage:
    with decode_errors(name):
        if image.mode in ("I", "F"):
            raise ValueError("its pixels have 32 bits; convert it to 8 bits")
        if 0 in image.size:
            raise ValueError(f"it has {image.width}x{image.height} pixels")
        pixels = np.array(to_mode(image, "L" if channels == 1 else "RGB"))
    return InMemory(pixels.reshape(image.height, image.width, channels))


def _open_array(image: npt.NDArray[Any] | Tensor, name: str, channels: int) -> OpenImage:
    first = isinstance(image, Tensor)
    layout = "[C, H, W]" if first else "[H, W, C]"
    shape = tuple(image.shape)
    if len(shape) not in (2, 3) or 0 in shape or (len(shape) == 3 and shape[0 if first else 2] not in (1, 3, 4)):
        raise DataError(
            f"{name} has shape {list(shape)}; {'a tensor' if first else 'an array'} is [H, W], {layout} or "
            f"[n, {layout[1:-1]}], with C 1, 3 or 4"
        )
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
        image = image if image.ndim == 2 else image.transpose(1, 2, 0)
    if np.issubdtype(image.dtype, np.floating):
        low, high = float(image.min()), float(image.max())
        if not 0 <= low <= high <= 1:  # true for NaN
            raise DataError(
                f"{name} holds floating-point values from {low:g} to {high:g}; they must be within 0..1 and not "
                "normalised: divide by 255, or give uint8"
            )
        image = np.rint(image * 255).astype(np.uint8)
    if image.dtype != np.uint8:
        raise DataError(f"{name} has dtype {image.dtype}; give uint8, or floating-point values within 0..1")
    if image.ndim == 3 and image.shape[2] == channels:
        return InMemory(cast(Pixels, np.array(image)))  # a copy, since torch takes only writable arrays
    return _open_picture(Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image), name, channels)
