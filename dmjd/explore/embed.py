"""``dmjd embed``: the features of every image of a data set, by one or several encoders, in one file.

Parts of the file are written while the images are encoded; an interrupted command continues behind them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from dmjd import __version__
from dmjd.config import DataConfig, DownstreamConfig, EvaluationConfig, PretrainConfig
from dmjd.config.fields import choice, choices, number, path, positive, recorded
from dmjd.errors import BadFeatures, BadImage, ConfigError, DataError, Interrupted, NoSplit
from dmjd.explore.embeddings import EMBEDDINGS, FORMATS, plain_name, write_parts
from dmjd.explore.parts import Decoded, Parts, Pending, View
from dmjd.explore.registry import Tool
from dmjd.progress import Progress
from dmjd.redact import shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor
    from torch.nn import Module

    from dmjd.data.dataset import ImageDataset, Split
    from dmjd.evaluate.encoder import FrozenEncoder

Array: TypeAlias = "npt.NDArray[Any]"

LEFT_OUT = 10
"""Images that may be left out of any data set, however small."""

logger = logging.getLogger("dmjd")


@dataclass
class EmbedConfig:
    """Features of images, in a file.

    checkpoints: Run folders (their newest checkpoints), checkpoint folders, or files of weights of any known code base.
        Several are embedded side by side.
    output: .npz or .parquet file; an existing one is replaced. Default: RUN/embeddings/WEIGHTS-step########.npz. Folder
        or data set, split, image size, pooling and number of images are added to the name if they are not the defaults.
        Required for several checkpoints.
    which: Checkpoint of a run folder. newest: with the most steps. best: with the highest validation score (of
        fine-tuning runs).
    model: Model of a file of weights; not for runs. By default it is inferred from the file's tensors. experiment=NAME
        or backbone=NAME sets the whole model, backbone.KEY=VALUE a single value.
    weights: trained: the trained weights; the teacher's, if a file holds a student and a teacher (DINO, iBOT).
        untrained: initial weights. ema: exponential moving average, if the run (ema_decay) or the file has one.
        student: the student's weights of such a file.
    pooling: Image feature. mean: mean of the patch tokens. cls: class token. One value for all checkpoints, or a list
        with one for each.
    split: Images: all, or those of the split train or test.
    images: Maximum number of images, evenly spaced. null: all.
    dtype: Data type of the stored features.
    thumbnail: Longest side in pixels of the stored thumbnails; 0: none.
    batch_size: Images per forward pass.
    workers: DataLoader workers. null: one per batch, at most 8 and at most one per CPU core.
    device: auto: CUDA if available, else CPU.
    data: By default those of pre-training; keys that are set replace single values. data.root=DIR reads the images of
        another folder, with or without labels. Several checkpoints embed the images of the first one's data.
    data_keys: The keys of data that are given; set by the command line. null: all of them.
    """

    checkpoints: list[str] = path("???")
    output: str | None = path()
    which: str = choice("newest", "best")
    model: PretrainConfig | None = None
    weights: str = choice("trained", "untrained", "ema", "student")
    pooling: list[str] = choices("mean", "cls")
    split: str = choice("all", "train", "test")
    images: int | None = number(None, least=1)
    dtype: str = choice("float32", "float16")
    thumbnail: int = number(64, least=0, most=512)
    batch_size: int = positive(256)
    workers: int | None = number(None, least=0)
    device: str = choice("auto", "cpu", "cuda")
    data: DataConfig | None = None
    data_keys: list[str] | None = recorded()

    def check(self) -> None:
        """Raise ConfigError for values that cannot be combined; before a checkpoint is loaded."""
        if not self.checkpoints:
            raise ConfigError("checkpoints must name at least one run folder or file of weights, got []")
        if len(self.pooling) not in (1, len(self.checkpoints)):
            raise ConfigError(
                f"pooling has {len(self.pooling)} values for {len(self.checkpoints)} checkpoint(s); give one, or "
                "one for each"
            )
        if self.output is not None and Path(self.output).suffix == ".parquet":
            import pyarrow.parquet  # noqa: F401 -- fail before anything is computed


def run(config: EmbedConfig) -> Iterator[str]:
    """Write the file, or continue from the parts that an interrupted command left."""
    from dmjd.explore.sources import check_output
    from dmjd.runs.checkpoint import weights_at

    if config.output is not None:
        check_output(Path(config.output), FORMATS)
    if config.output is None and len(config.checkpoints) > 1:
        for each in config.checkpoints:
            weights_at(each, "checkpoint", config.which)  # a folder of images has an error of its own
        raise ConfigError("several checkpoints need the name of their file: output=FILE.npz")
    encoders = _load(config)
    first = next(iter(encoders.values()))
    images = _images(config, {frozen.data.channels for frozen in encoders.values()}, first)
    output = _output(config, first, images)
    parts = Parts(output, images.classes, config.dtype, _identity(config, encoders, images))
    batches = _Batches(images, [_view_of(frozen) for frozen in encoders.values()], config.batch_size, config.thumbnail)
    with parts:
        left_out = _encode(config, encoders, images, batches, parts)
        embedded = sum(part.images for part in parts.done)
        if not embedded:
            first_bad = next(iter(left_out.items()))
            raise DataError(f"none of the {len(left_out)} images can be decoded; the first: {': '.join(first_bad)}")
        settings = {**_settings(config, encoders, images), "left_out": left_out}
        replaced = output.exists()
        write_parts(output, [part.path for part in parts.done], parts.folder, settings)
    if left_out:
        names = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        logger.warning("left out %d image(s) that cannot be decoded: %s", len(left_out), names)
    sizes = ", ".join(f"{name} {frozen.encoder.embed_dim}" for name, frozen in encoders.items())
    yield f"{output}: {embedded} image{'s' * (embedded > 1)} of {images.source}; {config.dtype} features: {sizes}"
    if replaced:
        yield f"replaced the earlier {output.name}"


def _load(config: EmbedConfig) -> dict[str, FrozenEncoder]:
    """Name -> encoder, on its device."""
    from dmjd.evaluate.encoder import load_encoder

    pooling = config.pooling * (len(config.checkpoints) // len(config.pooling))
    files = [Path(each).is_file() for each in config.checkpoints]
    found: list[FrozenEncoder] = []
    for checkpoint, is_file, how in zip(config.checkpoints, files, pooling, strict=True):
        one = EvaluationConfig(
            checkpoint=checkpoint,
            which=config.which,
            model=config.model if is_file or not any(files) else None,
            weights=config.weights,
            pooling=how,
            device=config.device,
            data=config.data,
            data_keys=config.data_keys,
        )
        found.append(load_encoder(one))
        found[-1].report_norm()
    return dict(zip(_names(found, pooling), found, strict=True))


def _names(encoders: Sequence[FrozenEncoder], pooling: Sequence[str]) -> list[str]:
    """The names of run folders and files; of equal ones with what differs: the folder above, the step, the pooling, or
    else their numbers."""
    paths = [frozen.run.path.resolve() for frozen in encoders]
    numbers = [str(number) for number, _ in enumerate(encoders, 1)]
    names = [plain_name(each.name) for each in paths]
    for form, values in (
        ("{1}/{0}", [plain_name(each.parent.name) for each in paths]),
        ("{0}-{1}", [f"step{frozen.step:08d}" for frozen in encoders]),
        ("{0}-{1}", pooling),
        *[("{0}-{1}", numbers)] * len(encoders),  # a number may make a name that another one has
    ):
        pairs = list(zip(names, values, strict=True))
        groups = {name: {value for other, value in pairs if other == name} for name in names}
        names = [form.format(name, value) if len(groups[name]) > 1 else name for name, value in pairs]
    return names


# Images ---------------------------------------------------------------------------------------------------------------


class _Split(NamedTuple):
    """The chosen images of one split. datasets: number of channels -> the split, in that many; indices: int64 [n]."""

    split: Split
    datasets: dict[int, ImageDataset]
    indices: npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Images:
    """source: their description, without the folders above ``root``. fingerprint: of the names of all images. moved:
    they are others than those of the checkpoint."""

    splits: list[_Split]
    classes: list[str]
    root: str | None
    source: str
    fingerprint: str
    moved: bool

    def __len__(self) -> int:
        return sum(len(each.indices) for each in self.splits)


def _images(config: EmbedConfig, channels: set[int], first: FrozenEncoder) -> _Images:
    from dmjd.data.build import build_dataset
    from dmjd.data.dataset import evenly
    from dmjd.data.regular import log_skipped
    from dmjd.evaluate.encoder import image_source

    # Every image is decoded later; small ones are enlarged, as by Encoder.embed.
    data = replace(first.data, check="none", max_bad_percent=100.0)
    wanted: list[Split] = ["train", "test"] if config.split == "all" else [cast("Split", config.split)]
    moved = (data.name, _folder(data)) != (first.trained.data.name, _folder(first.trained.data))
    if moved and "val_percent" not in (("val_percent",) if config.data_keys is None else config.data_keys):
        data = replace(data, val_percent=0.0)  # the run's rule is for its own images
    found: list[tuple[Split, dict[int, ImageDataset]]] = []
    for split in wanted:
        try:
            datasets = {each: build_dataset(replace(data, channels=each), split) for each in sorted(channels)}
        except NoSplit:
            if not found:
                raise
            break
        if split == "train" or not data.val_percent:  # else both list the same folder
            log_skipped(data.root or data.name, datasets[min(channels)].skipped)
        found.append((split, datasets))
    total = sum(len(datasets[min(channels)]) for _, datasets in found)
    chosen = evenly(total, total if config.images is None else config.images)
    start, splits, digest = 0, [], hashlib.sha256()
    for split, datasets in found:
        dataset = datasets[min(channels)]
        own = chosen[(chosen >= start) & (chosen < start + len(dataset))] - start
        splits.append(_Split(split, datasets, own))
        start += len(dataset)
        digest.update(f"{split} {len(dataset)} {getattr(dataset, 'fingerprint', '')}\n".encode())
    classes = getattr(dataset, "classes", ()) or map(str, range(dataset.num_classes))
    names = [plain_name(each) for each in classes]
    source = image_source(data if data.root is None else replace(data, root=_last(data.root)))
    return _Images(splits, names, data.root, source, digest.hexdigest(), moved)


def _folder(data: DataConfig) -> str | None:
    return data.root and os.path.realpath(data.root)


def _last(location: str) -> str:
    """The last part of a path or URL."""
    return plain_name(Path(shown(location)).resolve().name)


def _view_of(frozen: FrozenEncoder) -> View:
    return View(frozen.data.channels, frozen.size, frozen.data.crop_pct)


class _Batches:
    """``load(i)``: the batches of ``dmjd knn``, without the images that cannot be decoded, in every view.

    Each image is read and decoded once for each number of channels.
    """

    def __init__(self, images: _Images, views: Sequence[View], batch_size: int, thumbnail: int) -> None:
        self._images, self._views, self._thumbnail = images, list(dict.fromkeys(views)), thumbnail
        self._places = [
            (split, start, min(start + batch_size, len(split.indices)))
            for split in images.splits
            for start in range(0, len(split.indices), batch_size)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def images_before(self, number: int) -> int:
        """Number of images in the batches before ``number``, those left out included."""
        return sum(stop - start for _, start, stop in self._places[:number])

    def load(self, number: int) -> tuple[Decoded, tuple[()]]:
        """A batch, and no substitutions."""
        import torch

        from dmjd.data.waiting import progress_mark

        split, start, stop = self._places[number]
        batch = Decoded(split.split, [], [], [], {}, [], {})
        views: dict[View, list[Tensor]] = {view: [] for view in self._views}
        arrived = progress_mark()
        for index in split.indices[start:stop].tolist():
            name = name_below(next(iter(split.datasets.values())).name(index), self._images.root)
            try:
                found, thumbnail = self._read(split, index)
            except BadImage as error:
                batch.left_out[name] = plain_name(f"{error.kind}: {error.fault}")
            else:
                for view, pixels in found.items():
                    views[view].append(pixels)
                batch.ids.append(index)
                batch.names.append(name)
                batch.labels.append(next(iter(split.datasets.values())).label(index))
                batch.thumbnails.append(thumbnail)
            arrived()
        if batch.ids:
            batch.images.update((view, torch.stack(pixels)) for view, pixels in views.items())
        return batch, ()

    def _read(self, split: _Split, index: int) -> tuple[dict[View, Tensor], bytes]:
        from dmjd.data.crops import evaluation_view
        from dmjd.data.dataset import InMemory

        decoded = {}
        for channels, dataset in split.datasets.items():
            opened = dataset.open(index)
            decoded[channels] = opened.region((0, 0, *opened.size))
        views = {
            view: evaluation_view(InMemory(decoded[view.channels]), view.size, view.crop_pct) for view in self._views
        }
        return views, _jpeg(decoded[max(decoded)], self._thumbnail) if self._thumbnail else b""


def name_below(name: str, root: str | None) -> str:
    """The name of an image without the folders above its data set."""
    if root is not None and os.path.isabs(root) == os.path.isabs(name):
        below = os.path.relpath(name, root)
        name = below if not below.startswith("..") else name
    return plain_name(os.path.basename(name) if os.path.isabs(name) else name)


def _jpeg(pixels: npt.NDArray[np.uint8], side: int) -> bytes:
    """A JPEG of at most ``side`` pixels; smaller images keep their size."""
    from PIL import Image

    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((side, side), Image.Resampling.BICUBIC, reducing_gap=2.0)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return file.getvalue()


# Encoding -------------------------------------------------------------------------------------------------------------


def _encode(
    config: EmbedConfig, encoders: Mapping[str, FrozenEncoder], images: _Images, batches: _Batches, parts: Parts
) -> dict[str, str]:
    """Encode the images whose part is missing; returns name -> reason of all that are left out."""
    from dmjd.data.batch import Batch
    from dmjd.data.loader import Batches, BatchLoader
    from dmjd.data.waiting import Limit
    from dmjd.data.workers import check_shared_memory
    from dmjd.evaluate.encoder import loader_workers

    data = next(iter(encoders.values())).data
    begin = parts.resume()
    left_out = {name: why for part in parts.done for name, why in part.left_out.items()}
    done = batches.images_before(begin)
    if done:
        logger.info("%s: %d of %d images are done; continuing", parts.folder, done, len(images))
    workers = config.workers
    if workers is None:
        workers = loader_workers(len(images) - done, config.batch_size) if begin < len(batches) else 0
    views = [_view_of(frozen) for frozen in encoders.values()]
    for channels in {view.channels for view in views}:
        sizes = [view.size for view in dict.fromkeys(views) if view.channels == channels]
        check_shared_memory(Batch.nbytes(config.batch_size, sizes, channels), workers)
    limit = Limit(data.timeout, finishes=False)
    # The loader passes batches on without looking into them.
    loader = BatchLoader(cast(Batches, batches), begin, len(batches), workers, pin_memory=False, limit=limit)
    most = max(LEFT_OUT, len(images) * data.max_bad_percent / 100)
    pending = Pending(begin)
    with _interruptible(), Progress("images", len(images), done, images=1) as bar:
        try:
            for batch in cast("Iterator[Decoded]", iter(loader)):
                features = _features(encoders, batch, config) if batch.ids else {}
                left_out |= batch.left_out
                if len(left_out) > most:
                    raise DataError(_too_many(left_out, len(images), data.max_bad_percent))
                pending.add(batch, features)
                bar.advance(len(batch.ids) + len(batch.left_out))
                if pending.due:
                    parts.write(pending)
                    pending = Pending(pending.stop)
            parts.write(pending)
        except KeyboardInterrupt as error:
            parts.write(pending)
            count = batches.images_before(pending.stop)
            logger.warning("%s: %d of %d images are done; the same command continues", parts.folder, count, len(images))
            raise error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT) from None
    return left_out


def _features(encoders: Mapping[str, FrozenEncoder], batch: Decoded, config: EmbedConfig) -> dict[str, Array]:
    import numpy as np

    from dmjd.evaluate.features import encode

    found: dict[str, Array] = {}
    pooling = config.pooling * (len(encoders) // len(config.pooling))
    for (name, frozen), how in zip(encoders.items(), pooling, strict=True):
        pixels = batch.images[_view_of(frozen)].to(frozen.device, non_blocking=True)
        values = encode(frozen.encoder, pixels, mean=frozen.data.mean, std=frozen.data.std, pooling=how)
        if not bool(values.isfinite().all()):
            raise BadFeatures(f"the features of {frozen.path} hold NaN or infinity: embed an earlier checkpoint")
        with np.errstate(over="ignore"):
            stored = values.cpu().numpy().astype(config.dtype)
        if not np.isfinite(stored).all():
            raise BadFeatures(f"the features of {frozen.path} exceed the range of float16; use dtype=float32")
        found[name] = stored
    return found


@contextmanager
def _interruptible() -> Iterator[None]:
    """Context in which SIGTERM is an Interrupted, too; outside the main thread, it keeps its action."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _settings(config: EmbedConfig, encoders: Mapping[str, FrozenEncoder], images: _Images) -> dict[str, Any]:
    """Settings of the file. They have no date, so that the same command writes the same bytes."""
    pooling = config.pooling * (len(encoders) // len(config.pooling))
    described: dict[str, dict[str, Any]] = {}
    for (name, frozen), how in zip(encoders.items(), pooling, strict=True):
        described[name] = {
            "checkpoint": _last(str(frozen.path if frozen.path.is_file() else frozen.run.path)),
            "step": frozen.step,
            "weights": frozen.weights,
            "sha256": digest_of(frozen.encoder),
            "dim": frozen.encoder.embed_dim,
            **preparation(frozen, how),
        }
        if isinstance(frozen.trained, DownstreamConfig) and frozen.weights != "untrained":
            described[name]["finetuned"] = True
    return {"encoders": described, "data": images.source, "split": config.split, "dmjd": __version__}


def preparation(frozen: FrozenEncoder, pooling: str) -> dict[str, Any]:
    """Settings of an encoder that its features depend on, beside the weights."""
    data = frozen.data
    return {
        "pooling": pooling,
        "image_size": list(frozen.size),
        "crop_pct": data.crop_pct,
        "mean": list(data.mean),
        "std": list(data.std),
    }


def digest_of(encoder: Module) -> str:
    """Hex SHA-256 of the names and values of the weights."""
    digest = hashlib.sha256()
    for name, value in encoder.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).numpy().data)
    return digest.hexdigest()


def _identity(config: EmbedConfig, encoders: Mapping[str, FrozenEncoder], images: _Images) -> str:
    """Hash of all that the bytes of a part depend on but the pixels of the images."""
    first, devices = next(iter(encoders.values())), [frozen.device.type for frozen in encoders.values()]
    stored = [config.batch_size, config.dtype, config.thumbnail, config.images, devices]
    settings = [_settings(config, encoders, images), stored, _folder(first.data), images.fingerprint]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _too_many(left_out: Mapping[str, str], total: int, percent: float) -> str:
    name, why = next(iter(left_out.items()))
    return (
        f"{len(left_out)} of {total} images cannot be decoded, more than {LEFT_OUT} and than data.max_bad_percent="
        f"{percent:g} allow; the first: {name} ({why}); repair them, or set data.max_bad_percent=100, and the same "
        "command continues"
    )


def _output(config: EmbedConfig, first: FrozenEncoder, images: _Images) -> Path:
    """``config.output``, or the default file, whose name has all keys of the images that are not the defaults."""
    from dmjd.explore.sources import check_output

    if config.output is not None:
        return Path(config.output)
    size = "x".join(map(str, first.size)) if first.data.image_size != first.trained.data.image_size else ""
    parts = [first.weights, f"step{first.step:08d}"]
    parts += [_last(images.root)[-30:] if images.root else first.data.name] * (images.moved or first.path.is_file())
    parts += [config.split] * (config.split != "all") + [size]
    parts += [config.pooling[0]] * (config.pooling != ["mean"])
    parts += [] if config.images is None else [str(config.images)]
    return check_output(first.run.path / EMBEDDINGS / f"{'-'.join(filter(None, parts))}.npz", FORMATS)


TOOL = Tool("embed", "Write the features of images to a .npz or .parquet file", EmbedConfig, run)
