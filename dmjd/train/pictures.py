"""Pictures for the run folder: masked views, predictions and loss curves.

Figures use matplotlib's object interface, which does not change pyplot's global state or the backend. Every file is
replaced atomically, so a report never reads a partial picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg  # noqa: F401 -- savefig imports it
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dmjd.charts import INK, MUTED, draw_losses, png, tidy, values_of
from dmjd.files import replace_file
from dmjd.ops.views import Views

Image.preinit()  # saving a picture does it

Picture = NDArray[np.uint8]  # [H, W, 3]
Colour = tuple[int, int, int]
Render = Callable[[Tensor, tuple[int, int]], Picture]

DPI = 100
MAX_BYTES = 300_000
"""Size limit of one picture; reports embed the files."""
MARGIN, GAP, HEAD, FOOT = 12, 6, 28, 34
"""Pixels around the sheet, between cells, above for the column titles, and below for the legend."""
CAPTION = 16
"""Pixels below a row for its caption."""
MAX_CELL, MIN_CELL = 192, 48

MASKED = (200, 205, 212)
UNCOVERED = (250, 225, 170)  # yellow, since grey is masked and blue is covered
TEXT = "#73797f"  # contrast of 4.3 on a white page and on a dark one, as the background is transparent


@dataclass(frozen=True)
class Column:
    """A title, and a picture for each row, all of one size."""

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
    description: str = "",
) -> None:
    """Write one row per image: image, its K views, their coverage (if K > 1), the target and the prediction.

    A predicted token is the prediction of the first view that masks it. Tokens that no view masks have no prediction:
    they show the target. Cells shrink until the file is below ``MAX_BYTES``, so pass a few images, not a batch.

    images: uint8 ``[B, H, W, C]``, C = 1 or 3, after the flip, as for the views and targets.
    targets: ``[B, N, dim]``; predictions: ``[K, B, N, dim]`` or None for no such column.
    render: turns one image's vectors ``[N, dim]`` (float32, CPU) on ``grid`` into a uint8 ``[H, W, 3]`` picture.
    description: of the target's scale; stored in the file for reports.
    """
    photos, mask = photos_of(images), views.mask.cpu()
    vectors = targets.detach().float().cpu()
    pictures = {"target": [render(tokens, grid) for tokens in vectors]}
    if predictions is not None:
        filled = first_prediction(predictions.detach().float().cpu(), vectors, mask)
        pictures["prediction"] = [render(tokens, grid) for tokens in filled]

    def columns(token: int) -> list[Column]:
        rendered = [
            Column(title, [resize(picture, grid, token) for picture in cells]) for title, cells in pictures.items()
        ]
        return [*view_columns(photos, mask, grid, token), *rendered]

    write_picture(
        path, fitting(columns, legend_of_views(mask.shape[0]), grid, pixels_per_token(images, grid), description)
    )


def disjoint_views(images: Tensor, views: Views, grid: tuple[int, int], path: str | Path) -> None:
    """Write one row per image: image, its K views, and for K > 1 their coverage, with masked fractions (mean over B).

    images: uint8 ``[B, H, W, C]``, C = 1 or 3, after the flip, as for the views.
    """
    photos, mask = photos_of(images), views.mask.cpu()
    columns = partial(mask_columns, photos, mask, grid)
    write_picture(path, fitting(columns, legend_of_views(len(mask)), grid, pixels_per_token(images, grid)))


def loss_curves(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Write the losses of :func:`dmjd.charts.draw_losses`, and the learning rate ``lr`` below."""
    steps, rates = values_of(rows, "step"), values_of(rows, "lr")
    figure = Figure(figsize=(8, 4.6), dpi=DPI, facecolor="white", layout="constrained")
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    draw_losses(loss_axes, rows)
    above: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1)}  # of the axes: no curve crosses it
    loss_axes.legend(frameon=False, fontsize=9, labelcolor=INK, borderpad=0.2, handlelength=2.4, ncols=3, **above)
    marker = "o" if len(rows) == 1 else None  # a line with one point is invisible
    rate_axes.plot(steps, rates, color=MUTED, linewidth=1.4, marker=marker, markersize=4)
    peak = max((rate for rate in rates if rate > 0), default=None)
    rate_axes.set_ylim(0, 1.15 * (peak or 1))
    rate_axes.set_yticks([0, peak] if peak else [0], ["0", f"{peak:.2e}"] if peak else ["0"])
    rate_axes.set_ylabel("lr", color=INK)
    rate_axes.set_xlim(0, 1.01 * max([1, *steps]))
    rate_axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    rate_axes.set_xlabel("step", color=INK)
    for axes in (loss_axes, rate_axes):
        tidy(axes)
    write_picture(path, png(figure))


def photos_of(images: Tensor) -> list[Picture]:
    """uint8 ``[B, H, W, C]`` as RGB arrays."""
    assert images.dtype == torch.uint8, images.dtype
    assert images.ndim == 4, images.shape
    assert images.shape[-1] in (1, 3), images.shape
    return list(images.cpu().expand(*images.shape[:-1], 3).numpy())


def pixels_per_token(images: Tensor, grid: tuple[int, int]) -> int:
    """Side of a token of ``images [B, H, W, C]`` in pixels."""
    return max(1, images.shape[1] // grid[0])


def first_prediction(predictions: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """``[B, N, dim]``: per token the prediction of the first view that masks it, or the target if no view does."""
    first = mask.to(torch.uint8).argmax(0)  # argmax of 0/1 is the first 1
    index = first[None, :, :, None].expand(1, *predictions.shape[1:])
    return torch.where(mask.any(0)[:, :, None], predictions.gather(0, index)[0], targets)


def _per_cent(mask: Tensor) -> str:
    """``"61 %"``; only a full mask is 100 % and only an empty one 0 %."""
    share = 100 * mask.float().mean().item()
    rounded = round(share) if share in (0, 100) else min(99, max(1, round(share)))
    return f"{rounded} %"


def view_columns(photos: list[Picture], mask: Tensor, grid: tuple[int, int], token: int) -> list[Column]:
    """Image, K views and for K > 1 their coverage, with ``token`` x ``token`` pixels per token."""
    cells = [resize(photo, grid, token) for photo in photos]
    palette = np.array(_palette(mask.shape[0]), dtype=np.uint8)
    columns = [Column("image", cells)]
    for k, rows in enumerate(mask):
        masks = [_on_grid(row, grid, token) for row in rows]
        title = f"view {k + 1}" if len(mask) > 1 else "masked"
        columns.append(Column(title, [_masked(*pair) for pair in zip(cells, masks, strict=True)]))
    if len(mask) == 1:
        return columns
    coverage = [palette[_on_grid(row, grid, token)] for row in mask.sum(0)]
    columns.append(Column("coverage", [_ruled(cell, token) for cell in coverage]))
    return columns


def mask_columns(photos: list[Picture], mask: Tensor, grid: tuple[int, int], token: int) -> list[Column]:
    """As :func:`view_columns`, with masked fractions (mean over B) in the titles."""
    masked = [f"view {k + 1} masks {_per_cent(rows)}" for k, rows in enumerate(mask)]
    titles = ["image", *masked, f"coverage {_per_cent(mask.any(0))}"]
    if len(mask) == 1:
        titles = ["image", f"masked {_per_cent(mask)}"]
    sheet = view_columns(photos, mask, grid, token)
    return [Column(title, column.cells) for title, column in zip(titles, sheet, strict=True)]


def _on_grid(tokens: Tensor, grid: tuple[int, int], token: int) -> NDArray[Any]:
    """One value per token ``[N]`` as one value per pixel."""
    return tokens.view(grid).numpy().repeat(token, 0).repeat(token, 1)


def _masked(cell: Picture, mask: NDArray[np.bool_]) -> Picture:
    out = cell.copy()
    out[mask] = MASKED
    return out


def _ruled(cell: Picture, token: int) -> Picture:
    """Draw a white line between tokens, so that equal neighbours can be counted."""
    out = cell.copy()
    out[token::token] = 255
    out[:, token::token] = 255
    return out


def resize(picture: Picture, grid: tuple[int, int], token: int) -> Picture:
    """``picture`` with ``token`` x ``token`` pixels per token of ``grid``."""
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


def legend_of_views(views: int) -> list[tuple[Colour, str]]:
    """Colours of masked tokens and of the coverage by ``views``, with their labels."""
    if views == 1:
        return [(MASKED, "masked")]
    labels = ["coverage: masked in 0 views", "1 view", *(f"{k} views" for k in range(2, views + 1))]
    return [(MASKED, "masked in a view"), *zip(_palette(views), labels, strict=True)]


def fitting(
    columns: Callable[[int], list[Column]],
    legend: list[tuple[Colour, str]],
    grid: tuple[int, int],
    patch: int,
    description: str = "",
    captions: Sequence[str] = (),
    largest: int = MAX_CELL,
    max_bytes: int = MAX_BYTES,
) -> bytes:
    """The sheet with the largest cells, of at most ``largest`` pixels, whose file stays below ``max_bytes``.

    columns: makes them for a number of pixels per token. captions: one below each row, or none.
    """
    cell, drawn, png = largest, 0, b""
    while True:
        token = max(1, cell // max(grid))
        if token > patch:
            token -= token % patch  # whole pixels per image pixel
        if token != drawn:
            drawn, png = token, _sheet(columns(token), legend, description, captions)
        if len(png) < max_bytes or cell <= MIN_CELL:
            return png
        cell = max(MIN_CELL, int(cell * min(0.95, math.sqrt(max_bytes / len(png)))))


def _sheet(
    columns: list[Column], legend: list[tuple[Colour, str]], description: str, captions: Sequence[str] = ()
) -> bytes:
    """Columns side by side on a transparent background; the pixels of the cells are not resampled."""
    rows = len(columns[0].cells)
    cell_height, cell_width = columns[0].cells[0].shape[:2]
    row_height = cell_height + GAP + (CAPTION if captions else 0)
    width = 2 * MARGIN + len(columns) * (cell_width + GAP) - GAP
    height = HEAD + (FOOT if legend else MARGIN) + rows * row_height - GAP
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="none")
    canvas = np.zeros((height, width, 4), dtype=np.uint8)  # RGBA
    # DejaVu Sans is about 0.6 em wide per character; the longest title has to fit its column.
    title_pixels = min(13.0, cell_width / (0.6 * max(len(column.title) for column in columns)))
    for i, column in enumerate(columns):
        left = MARGIN + i * (cell_width + GAP)
        for j, cell in enumerate(column.cells):
            top = HEAD + j * row_height
            canvas[top : top + cell_height, left : left + cell_width] = np.dstack(
                [cell, np.full(cell.shape[:2], 255, np.uint8)]
            )
        x, y = (left + cell_width / 2) / width, 1 - (HEAD - 8) / height
        figure.text(x, y, column.title, ha="center", va="baseline", color=TEXT, fontsize=title_pixels * 72 / DPI)
    figure.figimage(canvas, origin="upper")
    caption_pixels = min(11.0, (width - 2 * MARGIN) / (0.6 * max((*map(len, captions), 1))))
    for j, caption in enumerate(captions):
        y = 1 - (HEAD + j * row_height + cell_height + 12) / height
        size = caption_pixels * 72 / DPI
        figure.text(MARGIN / width, y, caption, va="baseline", color=TEXT, fontsize=size, parse_math=False)
    if not legend:
        return png(figure, description)
    legend_pixels = min(11.0, (width - 2 * MARGIN) / (0.6 * sum(len(label) + 5 for _, label in legend)))
    figure.legend(
        handles=[Patch(facecolor="#{:02x}{:02x}{:02x}".format(*colour), label=label) for colour, label in legend],
        loc="lower left", bbox_to_anchor=(MARGIN / width, MARGIN / height), borderaxespad=0, borderpad=0,
        ncols=len(legend), frameon=False, fontsize=legend_pixels * 72 / DPI, labelcolor=TEXT,
        handlelength=1, handleheight=1, handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip
    return png(figure, description)


def write_picture(path: str | Path, content: bytes) -> None:
    """Replace the file ``path``, whose folder may be missing, atomically."""
    Path(path).parent.mkdir(exist_ok=True)  # without parents: a run folder that was removed is not created again
    replace_file(Path(path), content)
