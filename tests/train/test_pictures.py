from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dmjd.charts import draw_losses, png, svg
from dmjd.ops.views import Views
from dmjd.runs.folder import RunFolder
from dmjd.targets.pixels import PixelTarget
from dmjd.train.pictures import (
    FOOT,
    GAP,
    HEAD,
    MARGIN,
    MASKED,
    MAX_BYTES,
    UNCOVERED,
    disjoint_views,
    loss_curves,
    view_grid,
)
from dmjd.train.preview import Samples, write_pictures

GRID = (2, 3)
TOKENS = 6
PATCH = 4
# Token 0 is masked by both views, 1 and 2 by the first, 3 and 4 by the second, 5 by none; the second image is mirrored.
MASK = torch.tensor([[[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]], [[1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1]]]).bool()
COUNTS = [[2, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 2]]


def views_of(mask: Tensor) -> Views:
    order = mask.to(torch.uint8).sort(dim=-1, stable=True).indices
    visible = int((~mask[0, 0]).sum())
    return Views(order[..., :visible], order[..., visible:], order.argsort(-1), mask)


def flat_tokens(channels: int) -> tuple[Tensor, Tensor]:
    """Images whose tokens have one colour each, and those colours ``[B, N, C]``: survives any resizing untouched."""
    colours = torch.randint(0, 256, (2, TOKENS, channels), generator=torch.Generator().manual_seed(3)).byte()
    images = colours.view(2, *GRID, channels).repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    return images, colours


def paint(tokens: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
    """A tokenizer's picture of colours ``[N, 3]``: one pixel per token."""
    picture: NDArray[np.uint8] = tokens.view(*grid, 3).byte().numpy()
    return picture


class Sheet:
    """A decoded picture, cut along its layout."""

    def __init__(self, path: Path, columns: int) -> None:
        self.pixels = np.asarray(Image.open(path).convert("RGB"))
        self.width = (self.pixels.shape[1] - 2 * MARGIN + GAP) // columns - GAP
        self.token = self.width // GRID[1]
        assert 2 * MARGIN + columns * (self.width + GAP) - GAP == self.pixels.shape[1]

    def tokens(self, row: int, column: int) -> list[set[tuple[int, ...]]]:
        """The colours of each token of a cell, in raster order."""
        top = HEAD + row * (GRID[0] * self.token + GAP)
        left = MARGIN + column * (self.width + GAP)
        out = []
        for token in range(TOKENS):
            y, x = top + token // GRID[1] * self.token, left + token % GRID[1] * self.token
            block = self.pixels[y : y + self.token, x : x + self.token]
            out.append({tuple(int(value) for value in colour) for colour in block.reshape(-1, 3)})
        return out

    def centre(self, row: int, column: int, token: int) -> tuple[int, ...]:
        top = HEAD + row * (GRID[0] * self.token + GAP) + token // GRID[1] * self.token
        left = MARGIN + column * (self.width + GAP) + token % GRID[1] * self.token
        return tuple(int(value) for value in self.pixels[top + self.token // 2, left + self.token // 2])


@pytest.mark.parametrize("channels", [1, 3])
def test_views_show_visible_tokens_and_grey_out_masked_ones(tmp_path: Path, channels: int) -> None:
    images, colours = flat_tokens(channels)
    view_grid(images, views_of(MASK), torch.zeros(2, TOKENS, 3), None, paint, GRID, tmp_path / "views.png")
    sheet = Sheet(tmp_path / "views.png", columns=5)
    for row in range(2):
        rgb = [tuple(colour) * (3 // channels) for colour in colours[row].tolist()]
        assert sheet.tokens(row, 0) == [{colour} for colour in rgb]
        for k in range(2):
            assert sheet.tokens(row, 1 + k) == [{MASKED if MASK[k, row, i] else rgb[i]} for i in range(TOKENS)]


def test_coverage_has_one_colour_per_number_of_hiding_views_and_a_legend(tmp_path: Path) -> None:
    images, _ = flat_tokens(3)
    disjoint_views(images, views_of(MASK), GRID, tmp_path / "disjoint.png")
    sheet = Sheet(tmp_path / "disjoint.png", columns=4)
    colours: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set(), 2: set()}
    for row in range(2):
        for token in range(TOKENS):
            colours[COUNTS[row][token]].add(sheet.centre(row, 3, token))
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 3
    legend = {tuple(int(value) for value in colour) for colour in sheet.pixels[-FOOT:].reshape(-1, 3)}
    assert {MASKED, UNCOVERED} | set.union(*colours.values()) <= legend


def test_prediction_is_that_of_the_first_view_that_masks_a_token(tmp_path: Path) -> None:
    images, _ = flat_tokens(3)
    values = torch.randint(0, 256, (3, 2, TOKENS, 3), generator=torch.Generator().manual_seed(5)).float()
    targets, predictions = values[0], values[1:]
    view_grid(images, views_of(MASK), targets, predictions, paint, GRID, tmp_path / "views.png")
    sheet = Sheet(tmp_path / "views.png", columns=6)
    for row, first in enumerate([[0, 0, 0, 1, 1, None], [None, 1, 1, 0, 0, 0]]):
        for token, view in enumerate(first):
            target = tuple(int(value) for value in targets[row, token])
            assert sheet.tokens(row, 4)[token] == {target}
            shown = target if view is None else tuple(int(value) for value in predictions[view, row, token])
            assert sheet.tokens(row, 5)[token] == {shown}


def test_normalised_pixels_are_drawn_in_the_scale_of_the_image(tmp_path: Path) -> None:
    """Targets are then the image, and a prediction of zeros is the mean of each patch."""
    images = torch.randint(0, 256, (2, 8, 12, 3), generator=torch.Generator().manual_seed(1)).byte()
    tokenizer = PixelTarget(PATCH, 3, (0.5,) * 3, (0.2,) * 3, norm="patch")
    predictions = torch.zeros(2, 2, TOKENS, tokenizer.dim)
    samples = Samples(images, views_of(MASK), tokenizer(images), predictions, GRID)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/show.png").touch()  # of dmjd show, perhaps at another step
    drawn = write_pictures(RunFolder(tmp_path), 1, samples, tokenizer)
    assert list(drawn) == ["masks", "views"]
    sheet = Sheet(drawn["views"], columns=6)
    for row in range(2):
        for token in range(TOKENS):
            assert sheet.tokens(row, 4)[token] == sheet.tokens(row, 0)[token]
            if MASK[:, row, token].any():
                (shown,) = sheet.tokens(row, 5)[token]
                y, x = token // GRID[1] * PATCH, token % GRID[1] * PATCH
                assert shown[0] == pytest.approx(images[row, y : y + PATCH, x : x + PATCH].float().mean(), abs=1)
    with Image.open(drawn["views"]) as picture:
        assert "mean and the standard deviation of the true patch" in picture.info["Description"]


def test_the_sheet_fits_light_and_dark_pages(tmp_path: Path) -> None:
    """Its background is transparent, and its text is grey on both."""
    images, _ = flat_tokens(3)
    disjoint_views(images, views_of(MASK), GRID, tmp_path / "masks.png")
    pixels = np.asarray(Image.open(tmp_path / "masks.png").convert("RGBA"))
    assert pixels[0, 0, 3] == 0
    title = pixels[:HEAD][pixels[:HEAD, :, 3] == 255][:, :3] / 255

    def luminance(colour: NDArray[np.float64]) -> float:
        linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    text, dark = luminance(title[0]), luminance(np.array([0x0D, 0x11, 0x17]) / 255)
    assert min(1.05 / (text + 0.05), (text + 0.05) / (dark + 0.05)) > 4


def test_render_meets_one_image_of_plain_float_vectors(tmp_path: Path) -> None:
    images, colours = flat_tokens(3)
    met: list[Tensor] = []

    def record(tokens: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        met.append(tokens)
        return paint(tokens, grid)

    targets = colours.to(torch.bfloat16).requires_grad_()
    predictions = torch.full((2, 2, TOKENS, 3), 9, dtype=torch.bfloat16, requires_grad=True)
    view_grid(images, views_of(MASK), targets, predictions, record, GRID, tmp_path / "views.png")
    assert [(tuple(tokens.shape), tokens.dtype, tokens.requires_grad) for tokens in met] == [
        ((TOKENS, 3), torch.float32, False)
    ] * 4
    nines = torch.full((TOKENS, 3), 9.0)
    assert torch.equal(met[2], torch.where(MASK[:, 0].any(0)[:, None], nines, targets[0].float()))


def test_incompressible_photographs_stay_below_the_size_limit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 224, 224, 3), generator=generator).byte()
    mask = torch.zeros(2, 2, 196, dtype=torch.bool)
    mask[0, :, :120] = mask[1, :, 76:] = True

    def photo(tokens: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = images[0].numpy()
        return picture

    vectors = torch.zeros(2, 2, 196, 1)
    view_grid(images, views_of(mask), vectors[0], vectors, photo, (14, 14), tmp_path / "views.png")
    disjoint_views(images, views_of(mask), (14, 14), tmp_path / "disjoint.png")
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    # Near the limit, not far below it: the largest cells that fit were chosen.
    assert all(MAX_BYTES / 2 < size < MAX_BYTES for size in sizes)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is drawn, in order."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def spy(figure: Figure, *args: Any, **settings: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", spy)
    return drawn


@pytest.mark.parametrize(
    ("masked", "titles"),
    [
        ([range(240), range(152, 392)], ["view 1 masks 61 %", "view 2 masks 61 %", "coverage 100 %"]),
        ([range(196)], ["masked 50 %"]),
        # Rounding must not claim that everything, or nothing, is masked.
        (
            [range(391), range(1), range(0)],
            ["view 1 masks 99 %", "view 2 masks 1 %", "view 3 masks 0 %", "coverage 99 %"],
        ),
    ],
)
def test_titles_say_how_much_is_masked(
    tmp_path: Path, figures: list[Figure], masked: list[range], titles: list[str]
) -> None:
    mask = torch.zeros(len(masked), 2 * 196, dtype=torch.bool)
    for k, tokens in enumerate(masked):
        mask[k, list(tokens)] = True
    mask = mask.view(-1, 2, 196)
    empty = torch.zeros(len(masked), 2, 0, dtype=torch.int64)
    images = torch.zeros(2, 28, 28, 1, dtype=torch.uint8)
    disjoint_views(images, Views(empty, empty, empty, mask), (14, 14), tmp_path / "disjoint.png")
    assert [text.get_text() for text in figures[-1].texts] == ["image", *titles]


def test_picture_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pictures" / "loss.png"
    loss_curves([{"step": 1, "loss": 1.0, "mim": 1.0, "vis": None, "lr": 0.1}], path)
    before = path.read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["loss.png"]

    def full_disk(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="disk full"):
        loss_curves([{"step": 2, "loss": 2.0, "mim": 2.0, "vis": None, "lr": 0.1}], path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["loss.png"]


def curves(figure: Figure) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Branch -> (steps, raw values, smoothed values); every branch draws its raw line first."""
    lines = figure.axes[0].get_lines()
    out = {}
    for raw, smooth in zip(lines[::2], lines[1::2], strict=True):
        data = np.asarray(raw.get_xdata()), np.asarray(raw.get_ydata()), np.asarray(smooth.get_ydata())
        out[str(smooth.get_label()).split()[0]] = (data[0].tolist(), data[1].tolist(), data[2].tolist())
    return out


def test_loss_curves_draw_every_branch_and_the_learning_rate(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [{"step": 10 * i, "loss": 3.0 / i, "mim": 2.0 / i, "vis": 1.0 / i, "lr": 1e-3 * i} for i in range(1, 30)]
    loss_curves(rows, tmp_path / "loss.png")
    drawn = curves(figures[0])
    assert set(drawn) == {"total", "L_mim", "L_vis"}
    for name, key in (("total", "loss"), ("L_mim", "mim"), ("L_vis", "vis")):
        assert drawn[name][:2] == ([row["step"] for row in rows], [row[key] for row in rows])
    assert np.asarray(figures[0].axes[1].get_lines()[0].get_ydata()).tolist() == [row["lr"] for row in rows]
    pixels = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).reshape(-1, 3)
    for colour in ([0x1F, 0x23, 0x28], [0x09, 0x69, 0xDA], [0xBC, 0x4C, 0x00]):
        assert (pixels == colour).all(1).any()
    assert (tmp_path / "loss.png").stat().st_size < MAX_BYTES


def test_smoothing_is_an_unbiased_moving_average_that_skips_nan(tmp_path: Path, figures: list[Figure]) -> None:
    values = [4.0, 2.0, math.nan, 8.0]
    loss_curves(
        [{"step": i, "loss": v, "mim": v, "vis": None, "lr": 0.1} for i, v in enumerate(values)], tmp_path / "a.png"
    )
    smooth = curves(figures[0])["L_mim"][2]
    # A short log averages with weights 1, 3/4, 9/16, ... from the newest value back.
    second = (2 + 0.75 * 4) / 1.75
    last = (8 + 0.75 * 2 + 0.75**2 * 4) / (1 + 0.75 + 0.75**2)
    assert smooth == pytest.approx([4, second, second, last], rel=1e-12)


@pytest.mark.parametrize("vis", [None, 0.0, math.nan])
def test_a_method_without_a_visible_branch_has_one_curve(
    tmp_path: Path, figures: list[Figure], vis: float | None
) -> None:
    loss_curves([{"step": i, "loss": 1.0, "mim": 1.0, "vis": vis, "lr": 0.1} for i in range(3)], tmp_path / "loss.png")
    assert set(curves(figures[0])) == {"L_mim"}


def test_short_logs_still_make_a_picture(tmp_path: Path) -> None:
    def blue_pixels(*steps: int) -> int:
        loss_curves(
            [{"step": s, "loss": 2.0, "mim": 2.0, "vis": None, "lr": 0.0} for s in steps], tmp_path / "loss.png"
        )
        return int((np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")) == [0x09, 0x69, 0xDA]).all(-1).sum())

    assert blue_pixels() == 0
    assert blue_pixels(0) > 20  # the legend's line and the one point
    assert blue_pixels(1) > 20


def test_pyplot_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import would raise
    figure = Figure()
    draw_losses(figure.subplots(), [{"step": 1, "loss": 1.0, "mim": 1.0}])
    assert png(figure)
    assert svg(figure)


def test_drawing_imports_nothing() -> None:
    """A loader worker that is forked meanwhile would wait for the lock of the module."""
    code = (
        "import sys, dmjd.train.pictures as p; before = set(sys.modules); "
        "p.png(p.Figure()); print(*sorted(set(sys.modules) - before))"
    )
    drawn = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert drawn.stdout.split() == []
