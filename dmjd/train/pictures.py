"""Pictures for the run folder: masked views, predictions and loss curves.

Figures use matplotlib's object interface, which does not change pyplot's global state or the backend. Every file is
replaced atomically, so a report never reads a partial picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from dmjd.charts import INK, MUTED, log_scale, png, tidy
from dmjd.files import replace_file
from dmjd.ops.views import Views

Picture = NDArray[np.uint8]  # [H, W, 3]
Colour = tuple[int, int, int]
Render = Callable[[Tensor, tuple[int, int]], Picture]

DPI = 100
MAX_BYTES = 300_000
"""Size limit of one picture; reports embed the files."""
MARGIN, GAP, HEAD, FOOT = 12, 6, 28, 34
"""Pixels around the sheet, between cells, above for the column titles, and below for the legend."""
MAX_CELL, MIN_CELL = 192, 48

MASKED = (200, 205, 212)
UNCOVERED = (250, 225, 170)  # yellow, since grey is masked and blue is covered
CURVES = {"loss": ("total", "#1f2328"), "mim": ("mim", "#0969da"), "vis": ("vis", "#bc4c00")}


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[Picture]


def view_grid(
    images: Tensor,
    views: Views,
    targets: Tensor,
    predictions: Tensor | None,
    render: Render,
    grid: tuple[int, int],
    path: str | Path,
) -> None:
    """Write one row per image: image, its K views, their coverage, the target and the prediction.

    A predicted token is the prediction of the first view that masks it. Tokens that no view masks have no prediction:
    they show the target, dimmed. Cells shrink until the file is below ``MAX_BYTES``, so pass a few images, not a batch.

    images: uint8 ``[B, H, W, C]``, C = 1 or 3, after the flip, as for the views and targets.
    targets: ``[B, N, dim]``; predictions: ``[K, B, N, dim]`` or None for no such column.
    render: turns one image's vectors ``[N, dim]`` (float32, CPU) on ``grid`` into a uint8 ``[H, W, 3]`` picture.
    """
    photos, mask = _photos(images), views.mask.cpu()
    vectors = targets.detach().float().cpu()
    target_pictures = [render(tokens, grid) for tokens in vectors]
    predicted_pictures: list[Picture] = []
    if predictions is not None:
        filled = _first_prediction(predictions.detach().float().cpu(), vectors, mask)
        predicted_pictures = [render(tokens, grid) for tokens in filled]

    def columns(token: int) -> list[_Column]:
        sheet = _view_columns(photos, mask, grid, token)
        sheet.append(_Column("target", [_resize(picture, grid, token) for picture in target_pictures]))
        if predicted_pictures:
            uncovered = [_on_grid(row, grid, token) for row in ~mask.any(0)]
            cells = [_resize(picture, grid, token) for picture in predicted_pictures]
            sheet.append(_Column("prediction", [_dim(*pair) for pair in zip(cells, uncovered, strict=True)]))
        return sheet

    _replace(path, _fitting(columns, _legend(mask.shape[0]), grid, _patch(images, grid)))


def disjoint_views(images: Tensor, views: Views, grid: tuple[int, int], path: str | Path) -> None:
    """Write one row per image: image, its K views, their coverage; the titles have the masked fractions (mean over B).

    images: uint8 ``[B, H, W, C]``, C = 1 or 3, after the flip, as for the views.
    """
    photos, mask = _photos(images), views.mask.cpu()
    count = mask.shape[0]
    masked = [f"view {k + 1} masks {_per_cent(mask[k])}" for k in range(count)]
    titles = ["image", *masked, f"coverage {_per_cent(mask.any(0))}"]

    def columns(token: int) -> list[_Column]:
        sheet = _view_columns(photos, mask, grid, token)
        return [_Column(title, column.cells) for title, column in zip(titles, sheet, strict=True)]

    _replace(path, _fitting(columns, _legend(count), grid, _patch(images, grid)))


def loss_curves(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Write the loss of each branch against the step, raw and smoothed, and the learning rate below.

    rows: log rows with ``step``, ``loss`` (the total), ``mim``, ``vis`` and ``lr``. A branch without values (None,
    missing or all zero) is not drawn, nor is the total of a single branch. Values that are not finite leave a gap.
    """
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    series = {key: np.array([_number(row, key) for row in rows], dtype=np.float64) for key in (*CURVES, "lr")}
    branches = [key for key in ("mim", "vis") if np.nan_to_num(series[key]).any()]
    shown = branches if len(branches) == 1 else ["loss", *branches]

    marker = "o" if len(rows) == 1 else None  # a line with one point is invisible
    figure = Figure(figsize=(8, 4.6), dpi=DPI, facecolor="white", layout="constrained")
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for key in shown:
        label, colour = CURVES[key]
        smooth = _moving_average(series[key])
        last = f"{label}  {smooth[-1]:.4g}" if len(smooth) else label
        loss_axes.plot(steps, series[key], color=colour, alpha=0.25, linewidth=0.8)
        loss_axes.plot(steps, smooth, color=colour, linewidth=1.8, label=last, marker=marker, markersize=4)
    drawn = np.concatenate([series[key][np.isfinite(series[key])] for key in shown])
    if drawn.size and drawn.min() > 0 and drawn.max() > 8 * drawn.min():
        # On a linear axis branches an order of magnitude apart would look flat.
        log_scale(loss_axes, minor=[1, 2, 5])
    loss_axes.set_ylabel("loss", color=INK)
    above: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1)}  # of the axes: no curve crosses it
    loss_axes.legend(frameon=False, fontsize=9, labelcolor=INK, borderpad=0.2, ncols=len(shown), **above)
    rate_axes.plot(steps, series["lr"], color=MUTED, linewidth=1.4, marker=marker, markersize=4)
    peak = max((rate for rate in series["lr"] if rate > 0), default=None)
    rate_axes.set_ylim(0, 1.15 * (peak or 1))
    rate_axes.set_yticks([0, peak] if peak else [0], ["0", f"{peak:.2e}"] if peak else ["0"])
    rate_axes.set_ylabel("lr", color=INK)
    rate_axes.set_xlim(0, 1.01 * max([1, *steps]))
    rate_axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    rate_axes.set_xlabel("step", color=INK)
    for axes in (loss_axes, rate_axes):
        tidy(axes)
    _replace(path, png(figure))


def _number(row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    return math.nan if value is None or not math.isfinite(value) else float(value)


def _moving_average(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exponential moving average over about 1 % of the curve, with bias correction; NaN values are skipped."""
    decay = 1 - 1 / max(4, len(values) / 100)
    mean = weight = 0.0
    out = np.full_like(values, np.nan)
    for i, value in enumerate(values):
        if not math.isnan(value):
            mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        if weight:
            out[i] = mean / weight
    return out


def _photos(images: Tensor) -> list[Picture]:
    """uint8 ``[B, H, W, C]`` as RGB arrays."""
    assert images.dtype == torch.uint8, images.dtype
    assert images.ndim == 4, images.shape
    assert images.shape[-1] in (1, 3), images.shape
    return list(images.cpu().expand(*images.shape[:-1], 3).numpy())


def _patch(images: Tensor, grid: tuple[int, int]) -> int:
    return max(1, images.shape[1] // grid[0])


def _first_prediction(predictions: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """``[B, N, dim]``: per token the prediction of the first view that masks it, or the target if no view does."""
    first = mask.to(torch.uint8).argmax(0)  # argmax of 0/1 is the first 1
    index = first[None, :, :, None].expand(1, *predictions.shape[1:])
    return torch.where(mask.any(0)[:, :, None], predictions.gather(0, index)[0], targets)


def _per_cent(mask: Tensor) -> str:
    """``"61 %"``; only a full mask is 100 % and only an empty one 0 %."""
    share = 100 * mask.float().mean().item()
    rounded = round(share) if share in (0, 100) else min(99, max(1, round(share)))
    return f"{rounded} %"


def _view_columns(photos: list[Picture], mask: Tensor, grid: tuple[int, int], token: int) -> list[_Column]:
    """Image, K views, coverage, with ``token`` x ``token`` pixels per token."""
    cells = [_resize(photo, grid, token) for photo in photos]
    palette = np.array(_palette(mask.shape[0]), dtype=np.uint8)
    columns = [_Column("image", cells)]
    for k, rows in enumerate(mask):
        masks = [_on_grid(row, grid, token) for row in rows]
        columns.append(_Column(f"view {k + 1}", [_masked(*pair) for pair in zip(cells, masks, strict=True)]))
    coverage = [palette[_on_grid(row, grid, token)] for row in mask.sum(0)]
    columns.append(_Column("coverage", [_ruled(cell, token) for cell in coverage]))
    return columns


def _on_grid(tokens: Tensor, grid: tuple[int, int], token: int) -> NDArray[Any]:
    """One value per token ``[N]`` as one value per pixel."""
    return tokens.view(grid).numpy().repeat(token, 0).repeat(token, 1)


def _masked(cell: Picture, mask: NDArray[np.bool_]) -> Picture:
    out = cell.copy()
    out[mask] = MASKED
    return out


def _dim(cell: Picture, where: NDArray[np.bool_]) -> Picture:
    """Fade towards the colour of tokens that no view masks, as in the column of the coverage."""
    out = cell.copy()
    out[where] = (0.3 * out[where] + 0.7 * np.array(UNCOVERED)).astype(np.uint8)
    return out


def _ruled(cell: Picture, token: int) -> Picture:
    """Draw a white line between tokens, so that equal neighbours can be counted."""
    out = cell.copy()
    out[token::token] = 255
    out[:, token::token] = 255
    return out


def _resize(picture: Picture, grid: tuple[int, int], token: int) -> Picture:
    height, width = grid[0] * token, grid[1] * token
    pixels = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None].float()
    if height > picture.shape[0]:  # small images keep their pixels
        pixels = F.interpolate(pixels, (height, width), mode="nearest-exact")
    else:
        pixels = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    resized: Picture = pixels[0].round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
    return resized


def _palette(views: int) -> list[Colour]:
    """A colour for each number of views, 0 to ``views``, that mask a token."""
    blues = colormaps["Blues"](np.linspace(0.45, 0.95, max(2, views)), bytes=True)[:views, :3]
    return [UNCOVERED, *((int(red), int(green), int(blue)) for red, green, blue in blues)]


def _legend(views: int) -> list[tuple[Colour, str]]:
    labels = ["coverage: masked in 0 views", "1 view", *(f"{k} views" for k in range(2, views + 1))]
    return [(MASKED, "masked in a view"), *zip(_palette(views), labels, strict=True)]


def _fitting(
    columns: Callable[[int], list[_Column]], legend: list[tuple[Colour, str]], grid: tuple[int, int], patch: int
) -> bytes:
    """The sheet with the largest cells whose file stays below ``MAX_BYTES``."""
    cell, drawn, png = MAX_CELL, 0, b""
    while True:
        token = max(1, cell // max(grid))
        if token > patch:
            token -= token % patch  # whole pixels per image pixel
        if token != drawn:
            drawn, png = token, _sheet(columns(token), legend)
        if len(png) < MAX_BYTES or cell <= MIN_CELL:
            return png
        cell = max(MIN_CELL, int(cell * min(0.95, math.sqrt(MAX_BYTES / len(png)))))


def _sheet(columns: list[_Column], legend: list[tuple[Colour, str]]) -> bytes:
    """Columns side by side; the pixels of the cells are not resampled."""
    rows = len(columns[0].cells)
    cell_height, cell_width = columns[0].cells[0].shape[:2]
    width = 2 * MARGIN + len(columns) * (cell_width + GAP) - GAP
    height = HEAD + FOOT + rows * (cell_height + GAP) - GAP
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    canvas = np.full((height, width, 3), 255, dtype=np.uint8)
    # DejaVu Sans is about 0.6 em wide per character; the longest title has to fit its column.
    title_pixels = min(13.0, cell_width / (0.6 * max(len(column.title) for column in columns)))
    for i, column in enumerate(columns):
        left = MARGIN + i * (cell_width + GAP)
        for j, cell in enumerate(column.cells):
            top = HEAD + j * (cell_height + GAP)
            canvas[top : top + cell_height, left : left + cell_width] = cell
        x, y = (left + cell_width / 2) / width, 1 - (HEAD - 8) / height
        figure.text(x, y, column.title, ha="center", va="baseline", color=INK, fontsize=title_pixels * 72 / DPI)
    figure.figimage(canvas, origin="upper")
    legend_pixels = min(11.0, (width - 2 * MARGIN) / (0.6 * sum(len(label) + 5 for _, label in legend)))
    figure.legend(
        handles=[Patch(facecolor="#{:02x}{:02x}{:02x}".format(*colour), label=label) for colour, label in legend],
        loc="lower left", bbox_to_anchor=(MARGIN / width, MARGIN / height), borderaxespad=0, borderpad=0,
        ncols=len(legend), frameon=False, fontsize=legend_pixels * 72 / DPI, labelcolor=MUTED,
        handlelength=1, handleheight=1, handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip
    return png(figure)


def _replace(path: str | Path, content: bytes) -> None:
    Path(path).parent.mkdir(exist_ok=True)  # without parents: a run folder that was removed is not created again
    replace_file(Path(path), content)
