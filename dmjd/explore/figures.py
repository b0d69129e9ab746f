"""Figures of a model for some images: reconstruction, masks, HOG, attention, principal components."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from matplotlib import colormaps
from torch import Tensor
from torch.nn import functional as F

from dmjd.builders import build_mask_spec, build_objective, build_tokenizer, target_dim
from dmjd.builders.average import ENCODER, Ema, EmaTeacher
from dmjd.builders.preparation import Preparation, Prepared
from dmjd.builders.weights import load_weights
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.crops import evaluation_view
from dmjd.errors import CheckpointError, ConfigError, UserError, printable_message
from dmjd.evaluate.encoder import FrozenEncoder
from dmjd.explore.attention import attention_of, attention_weights
from dmjd.explore.shown_images import images_of
from dmjd.interop.names import summary
from dmjd.masking import MaskedViews, MaskSpec
from dmjd.models.objective import Losses, Objective
from dmjd.ops.images import normalise
from dmjd.ops.views import Views
from dmjd.parallel import store
from dmjd.targets import HogTarget, PixelTarget, TeacherTarget, Tokenizer
from dmjd.train.pictures import (
    MAX_CELL,
    Colour,
    Column,
    Picture,
    first_prediction,
    fitting,
    legend_of_views,
    mask_columns,
    photos_of,
    pixels_per_token,
    resize,
    view_columns,
)
from dmjd.train.preview import Samples, in_scale_of_images, predict_prepared

if TYPE_CHECKING:
    from dmjd.explore.show import ShowConfig

logger = logging.getLogger("dmjd")

BESIDE = "pred. + visible"
"""Title of the prediction on masked patches beside the target on visible ones."""
FINEST = 1024
"""Patches of an image, up to which attention and PCA are drawn at twice the image size."""
WIDEST = 1600
"""Pixels of the columns of all heads."""


class Missing(UserError):
    """A kind of picture that the model does not have; the message is the reason."""


@dataclass(frozen=True)
class Figure:
    """The picture of one kind.

    columns: makes them for a number of pixels per token. description: text below the picture in reports.
    summary, summary_text: the columns that stand in show.png, and their description there.
    legend: colours with labels. captions: of the rows. largest: pixels of a cell, at most.
    """

    columns: Callable[[int], list[Column]]
    description: str
    summary: Callable[[int], list[Column]] | None = None
    summary_text: str = ""
    legend: list[tuple[Colour, str]] = field(default_factory=list)
    captions: Sequence[str] = ()
    largest: int = MAX_CELL


class Shown:
    """Images as a model reads them, and a figure for each kind of picture.

    Raises:
        DataError: if there are no images, or one cannot be read.
    """

    def __init__(self, config: ShowConfig, frozen: FrozenEncoder) -> None:
        self._config, self._frozen = config, frozen
        self._opened, ids, source = images_of(config, frozen)
        self._ids = torch.tensor(ids)
        self.crops = torch.stack([evaluation_view(each, frozen.size, frozen.data.crop_pct) for each in self._opened])
        self._photos = photos_of(self.crops)
        self._inputs = normalise(self.crops.to(frozen.device), frozen.data.mean, frozen.data.std)
        self.grid = frozen.encoder.grid_of(self._inputs)
        self._no_masks = torch.zeros(1, len(ids), self.grid[0] * self.grid[1], dtype=torch.bool)
        where = frozen.path.name if frozen.path.is_file() else f"step {frozen.step}"
        classes = " Below each row: the most probable class." if frozen.classifier is not None else ""
        self._origin = f"{frozen.weights.capitalize()} weights, {where}; {source}.{classes}"

    def figures(self, kinds: Sequence[str], given: bool) -> tuple[dict[str, Figure], list[str]]:
        """The figures by kind, "" for the one that has columns of all of them, and a line for each kind that the model
        does not have. Raises ConfigError for the latter if the kinds were ``given``."""
        figures, lines = dict[str, Figure](), list[str]()
        for kind in kinds:
            try:
                figures[kind] = getattr(self, kind)()
            except Missing as error:
                if given:
                    raise ConfigError(f"kinds={kind}: {error}") from error
                lines.append(f"no {kind}: {error}")
        parts = [each for each in figures.values() if each.summary]

        def all_of_them(token: int) -> list[Column]:
            return [*self._image(token), *(column for each in parts if each.summary for column in each.summary(token))]

        text = " ".join(each.summary_text for each in parts)
        return ({"": Figure(all_of_them, text)} if parts else {}) | figures, lines

    def png(self, figure: Figure, max_bytes: int) -> bytes:
        """The figure as a file of at most about ``max_bytes``."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # of a class name in a script that the font lacks
            return fitting(
                figure.columns,
                figure.legend,
                self.grid,
                pixels_per_token(self.crops, self.grid),
                f"{figure.description} {self._origin}",
                figure.captions or self._classes,
                figure.largest,
                max_bytes,
            )

    @cached_property
    def _classes(self) -> list[str]:
        """The most probable class of each image, of a fine-tuned run."""
        frozen = self._frozen
        if frozen.classifier is None:
            return []
        found = frozen.logits(self.crops.to(frozen.device)).float().softmax(-1).max(-1)
        names = [_in_one_line(frozen.class_labels[index]) for index in found.indices.tolist()]
        return [f"{name} {100 * value:.0f} %" for name, value in zip(names, found.values.tolist(), strict=True)]

    def _image(self, token: int) -> list[Column]:
        return view_columns(self._photos, self._no_masks, self.grid, token)[:1]

    def reconstruction(self) -> Figure:
        """Image, its views, the target, the prediction, and that of view 1 beside its visible patches."""
        samples, tokenizer, losses = self._predicted
        mask = samples.views.mask[: self._config.views]
        targets, predictions, render, scale = in_scale_of_images(
            tokenizer, samples.crops, samples.targets.float(), samples.predictions.float()
        )
        filled = first_prediction(predictions[: len(mask)], predictions[0], mask)
        beside = torch.where(mask[0, :, :, None], predictions[0], targets)
        title = "HOG target" if isinstance(tokenizer, HogTarget) else "target"
        shown = {title: targets, "prediction": filled, BESIDE: beside}
        rendered = {name: [render(each, self.grid) for each in sets] for name, sets in shown.items()}
        if isinstance(tokenizer, HogTarget):
            rendered = {name: [_few_greys(each) for each in pictures] for name, pictures in rendered.items()}

        def columns(token: int) -> list[Column]:
            return view_columns(self._photos, mask, self.grid, token)[: 1 + len(mask)] + self._resized(rendered, token)

        def in_short(token: int) -> list[Column]:
            masked = view_columns(self._photos, mask[:1], self.grid, token)[1:]
            target = {} if isinstance(tokenizer, PixelTarget) else {title: rendered[title]}
            return masked + self._resized(target | {"reconstruction": rendered[BESIDE]}, token)

        view = "view 1" if len(mask) > 1 else "the view"
        branches = " = L_vis + lambda L_mim" if self._objective.model.visible_branch is not None else ""
        return Figure(
            columns,
            f"Prediction: that of the first view that masks a patch, or of view 1 where none does. {BESIDE}: the "
            f"prediction on the masked patches of {view}, the target on its visible ones.{scale} Loss of each "
            f"image{branches}. {self._masks_text}",
            in_short,
            f"Reconstruction: the prediction on the masked patches of {view}, the target on its visible ones.",
            legend_of_views(1),
            [_loss_text(each) for each in losses],
        )

    def masks(self) -> Figure:
        """Image, its views and their coverage."""
        mask = self._spec.draw(self._ids, self.grid, seed=self._seed, epoch=self._config.epoch).views.mask
        mask = mask[: self._config.views]
        columns = partial(mask_columns, self._photos, mask, self.grid)
        return Figure(columns, self._masks_text, legend=legend_of_views(len(mask)))

    def hog(self) -> Figure:
        """Image and HOG; if that is the target, also the prediction."""
        text = "Strokes run along edges; their brightness is the strength of the gradient in a cell, per orientation."
        trained, patch = self._frozen.trained, self._frozen.encoder.patch_size
        target = HogTarget(patch, self.crops.shape[-1], patch // 2 if patch % 2 == 0 else patch)
        shown = {}
        if isinstance(trained, PretrainConfig) and trained.target.name == "hog" and self._is_predictable:
            samples, own, _ = self._predicted
            assert isinstance(own, HogTarget)
            target, mask = own, samples.views.mask[: self._config.views]
            shown = {"target": samples.targets}
            shown["prediction"] = first_prediction(samples.predictions[: len(mask)], samples.predictions[0], mask)
            text += f" The target has the norm {target.norm} per patch."
        shown = {"HOG": replace(target, norm="none")(self.crops)} | shown
        rendered = {name: [_few_greys(target.render(each, self.grid)) for each in sets] for name, sets in shown.items()}

        def columns(token: int) -> list[Column]:
            return self._image(token) + self._resized(rendered, token)

        return Figure(columns, text, largest=max(rendered["HOG"][0].shape))

    def attention(self) -> Figure:
        """Image, attention of the last block as the mean of its heads, and of each head."""
        encoder = self._frozen.encoder
        if attention_of(encoder) is None:
            raise Missing("its last block attends within windows or has decomposed relative positions")
        inputs, grid, size = self._finer
        prefix, (height, width), query = encoder.num_prefix_tokens, grid, self._config.query
        rows, marked = slice(0, 1), None
        if query is not None:
            marked = min(int(query[0] * height), height - 1), min(int(query[1] * width), width - 1)
            row = prefix + marked[0] * width + marked[1]
            rows, of = slice(row, row + 1), "the marked patch"
        elif prefix:
            of = "the class token"
        else:
            rows, of = slice(None), "all patches (mean)"
        each_image = [attention_weights(encoder, image)[:, :, rows].mean(2).cpu() for image in inputs.split(1)]
        maps = torch.cat(each_image)[..., prefix:].unflatten(-1, grid)
        mean = {"attention": [heat(each) for each in maps.mean(1)]}
        heads = {f"head {head + 1}": [heat(each) for each in maps[:, head]] for head in range(maps.shape[1])}

        def columns(token: int) -> list[Column]:
            (image,) = self._image(token)
            if marked is not None:
                image = Column(image.title, [framed(cell, marked, grid) for cell in image.cells])
            return [image, *self._resized({"mean of heads": mean["attention"]} | heads, token)]

        text = (
            f"Attention of {of} to the patches in the last block; brighter is higher, each map from its minimum to its "
            f"95th percentile.{size}"
        )
        largest = min(MAX_CELL, WIDEST // (2 + len(heads)))
        in_short = partial(self._resized, mean)
        return Figure(columns, text, in_short, f"Attention: of {of}, mean of heads.", largest=largest)

    def pca(self) -> Figure:
        """Image, and the first three principal components of its patch tokens as colours."""
        encoder = self._frozen.encoder
        inputs, grid, size = self._finer
        with torch.no_grad():
            tokens = torch.cat(
                [encoder(each)[:, encoder.num_prefix_tokens :].float().cpu() for each in inputs.split(1)]
            )
        colours = (255 * pca_colours(tokens)).round().to(torch.uint8).unflatten(1, grid)
        shown = {"PCA of patches": list(colours.numpy())}

        def columns(token: int) -> list[Column]:
            return self._image(token) + self._resized(shown, token)

        text = "PCA: first three principal components of the patch tokens of all these images, as red, green, blue."
        return Figure(columns, text + size, partial(self._resized, shown), text)

    def _resized(self, pictures: Mapping[str, list[Picture]], token: int) -> list[Column]:
        return [Column(name, [resize(each, self.grid, token) for each in cells]) for name, cells in pictures.items()]

    @cached_property
    def _finer(self) -> tuple[Tensor, tuple[int, int], str]:
        """Normalised images for maps, their grid, and a sentence about their size.

        They have twice the size, unless ``data.image_size`` is given, the encoder takes one size alone, or the patches
        would be more than :data:`FINEST`.
        """
        config, frozen = self._config, self._frozen
        given = config.data is not None and (config.data_keys is None or "image_size" in config.data_keys)
        if given or 4 * math.prod(self.grid) > FINEST:
            return self._inputs, self.grid, ""
        height, width = 2 * frozen.size[0], 2 * frozen.size[1]
        views = [evaluation_view(each, (height, width), frozen.data.crop_pct) for each in self._opened]
        inputs = normalise(torch.stack(views).to(frozen.device), frozen.data.mean, frozen.data.std)
        try:
            return inputs, frozen.encoder.grid_of(inputs), f" Images of {height}x{width}."
        except ValueError:
            return self._inputs, self.grid, ""

    @property
    def _trained(self) -> PretrainConfig:
        trained = self._frozen.trained
        if not isinstance(trained, PretrainConfig):
            kind = {"segment": "segmentation model", "detect": "detection model"}.get(trained.command, "classifier")
            raise Missing(f"this is a {kind}, without masks and decoder; show its pre-training run")
        model = self._config.model
        described = model is not None and any(name.startswith("experiment=") for name in model.typed or ())
        if self._frozen.path.is_file() and not described:
            raise Missing(
                "a file of weights does not describe masks and target; of masked image modelling with a decoder, add "
                "experiment=NAME, such as mae_vit_base"
            )
        return self._frozen.trained

    @property
    def _seed(self) -> int:
        return self._trained.seed if self._config.seed is None else self._config.seed

    @property
    def _spec(self) -> MaskSpec:
        return build_mask_spec(self._trained.mask, self.grid)

    @property
    def _masks_text(self) -> str:
        return f"Masks of epoch {self._config.epoch}, seed {self._seed}."

    @property
    def _is_predictable(self) -> bool:
        try:
            return self._predicted is not None
        except Missing:
            return False

    @cached_property
    def _objective(self) -> Objective:
        if self.grid != self._frozen.encoder.grid:
            height, width = self._trained.data.image_size
            raise Missing(f"the model was pre-trained on images of {height}x{width}")
        return objective_of(self._frozen, self._trained)

    @cached_property
    def _predicted(self) -> tuple[Samples, Tokenizer, list[Losses]]:
        """A forward pass of pre-training without flip, jitter and drop path, and the losses of each image."""
        objective, tokenizer, data = self._objective, tokenizer_of(self._frozen, self._trained), self._frozen.data
        second = []
        if (other := self._trained.data.second_size) is not None:
            size = other[0], other[1]
            second = [torch.stack([evaluation_view(each, size, data.crop_pct) for each in self._opened])]
        batch = Batch(self.crops, self._ids, torch.full_like(self._ids, -1), *second).to(self._frozen.device)
        statistics = tuple(data.mean), tuple(data.std)
        prepare = Preparation(self._spec, self.grid, tokenizer, *statistics, flip=False, seed=self._seed)
        prepared = prepare(batch, self._config.epoch)
        return predict_prepared(objective, prepared, tokenizer), tokenizer, losses_of_images(objective, prepared)


def objective_of(frozen: FrozenEncoder, trained: PretrainConfig) -> Objective:
    """The model of pre-training with its losses and the weights of ``frozen``; without visible branch if a file lacks
    it. Raises Missing if a file lacks other weights, such as the decoder."""
    objective = build_objective(trained, target_dim(trained))
    if frozen.weights != "untrained":
        if frozen.path.is_file():
            for parameter in objective.parameters():  # those that the file lacks stay NaN
                parameter.data.fill_(torch.nan)
        try:
            load_weights(objective, frozen.path)
        except CheckpointError as error:  # such as a fine-tuned file, whose encoder is another one
            raise Missing(str(error)) from error
    model = objective.model
    lacking = [name for name, each in model.named_parameters() if not bool(each.isfinite().all())]
    if needed := [name for name in lacking if not name.startswith("visible_branch.")]:
        raise Missing(f"{frozen.path.name} has no {summary(needed)}")
    if lacking:
        model.visible_branch = None
    model.encoder = frozen.encoder
    return objective.requires_grad_(False).to(frozen.device).eval()


def tokenizer_of(frozen: FrozenEncoder, trained: PretrainConfig) -> Tokenizer:
    """The target of pre-training. Raises Missing if its own weights are not there."""
    try:
        tokenizer = build_tokenizer(trained)
    except ConfigError as error:
        raise Missing(f"its target cannot be computed: {error}") from error
    if isinstance(tokenizer, TeacherTarget):
        average = {} if frozen.path.is_file() else store.read_average(frozen.path)
        if not average:
            raise Missing("its target is an average of the encoder, which this checkpoint does not have")
        shards = {name: value.to(frozen.device) for name, value in average.items()}
        tokenizer.teacher = EmaTeacher(frozen.encoder, Ema(shards, 1.0, ENCODER), trained.target.layers)
    return tokenizer


def losses_of_images(objective: Objective, prepared: Prepared) -> list[Losses]:
    """The objective's losses of each image alone, over all its views."""
    found = []
    with torch.inference_mode():
        for index in range(len(prepared.images)):
            one = slice(index, index + 1)
            views, predicted = prepared.masked_views
            chosen = MaskedViews(Views(*(part[:, one] for part in views)), predicted[:, one])
            found.append(objective(prepared.images[one], chosen, prepared.targets[one]))
    return found


def pca_colours(tokens: Tensor) -> Tensor:
    """The first three principal components of tokens ``[B, N, D]``, over all B * N, in 0..1, float32 ``[B, N, 3]``.

    The 1st and 99th percentile of each component become 0 and 1. A component's sign is that of its largest coefficient.
    """
    flat = tokens.flatten(0, 1).double()
    flat = flat - flat.mean(0)
    directions = torch.linalg.eigh(flat.T @ flat).eigenvectors.flip(-1)[:, :3]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    values = flat @ (directions * largest.sign())
    low, high = (torch.quantile(values, part, dim=0) for part in (0.01, 0.99))
    scaled = ((values - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny)).clamp(0, 1)
    return F.pad(scaled, (0, 3 - scaled.shape[1])).float().unflatten(0, tokens.shape[:2])


def heat(values: Tensor) -> Picture:
    """A map ``[h, w]``, from its minimum to its 95th percentile, which single high values do not move, in matplotlib's
    colours "inferno", uint8 ``[h, w, 3]``."""
    least, high = values.min(), torch.quantile(values.float(), 0.95)
    scaled = ((values - least) / (high - least).clamp_min(torch.finfo(torch.float32).tiny)).clamp(0, 1)
    coloured: Picture = colormaps["inferno"](scaled.numpy(), bytes=True)[..., :3]
    return coloured


def _few_greys(picture: Picture) -> Picture:
    """8 levels, which make a file half as large."""
    levels: Picture = picture // 32 * 36
    return levels


def framed(cell: Picture, place: tuple[int, int], grid: tuple[int, int]) -> Picture:
    """``cell`` with a frame, of at least 4 pixels, around the patch of ``grid`` at ``place`` (row, column)."""
    out = cell.copy()
    sides = [max(4, length // count) for length, count in zip(cell.shape, grid, strict=False)]
    starts = [
        min(at * n // count, n - side) for at, n, count, side in zip(place, cell.shape, grid, sides, strict=False)
    ]
    (top, left), (height, width) = starts, sides
    for inset, colour in ((0, 255), (1, 0)):
        inner = out[top + inset : top + height - inset, left + inset : left + width - inset]
        inner[[0, -1]] = inner[:, [0, -1]] = colour
    return out


def _in_one_line(name: str) -> str:
    """The name of a class, which may be that of any folder, in at most 40 characters."""
    text = printable_message(name).replace("\n", "\\n")
    return text if len(text) <= 40 else f"{text[:37]}..."


def _loss_text(losses: Losses) -> str:
    total, masked, visible = losses
    parts = "" if visible is None else f" (L_mim {float(masked):.4f}, L_vis {float(visible):.4f})"
    return f"loss {float(total):.4f}{parts}"
