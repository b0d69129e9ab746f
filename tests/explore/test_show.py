"""Pictures of a model: attention, losses, predictions, masks, principal components, and the command."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.builders import build_objective, target_dim
from dmjd.builders.model import build_classification
from dmjd.builders.step import build_step
from dmjd.cli import main
from dmjd.compose import compose, with_first_key
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset
from dmjd.errors import ConfigError, DataError
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.explore.attention import attention_of, attention_weights
from dmjd.explore.figures import Shown, _in_one_line, framed, heat, pca_colours
from dmjd.explore.show import KINDS, ShowConfig, run
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.masked_image_model import Encoder
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder
from dmjd.report import write_report
from dmjd.targets import HogTarget, PixelTarget
from dmjd.train.pictures import MAX_BYTES
from tests.conftest import TINY
from tests.interop.official_files import to_official

SIZES: dict[str, Any] = {"patch_size": 4, "in_chans": 3, "embed_dim": 16, "depth": 2, "num_heads": 2}
BEIT: dict[str, Any] = {"block": "beit", "positions": "relative", "masked_tokens": "mask_token", "layer_scale": 0.1}
CONVVIT: dict[str, Any] = {"embed_dims": (8, 8, 16), "depths": (1, 1, 2), "mlp_ratios": (1, 1, 1), "num_heads": 2}


def drawn(encoder: Encoder) -> Encoder:
    generator = torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return encoder.eval()


@pytest.mark.parametrize(
    ("encoder", "size", "prefix"),
    [
        (ViTEncoder(image_size=(16, 16), **SIZES), (24, 16), 1),
        (ViTEncoder(image_size=(16, 16), class_token=False, positions="learned", **SIZES), (16, 32), 0),
        (ViTEncoder(image_size=(16, 24), **SIZES, **BEIT), (16, 24), 1),
        (ViTEncoder(image_size=(16, 24), class_token=False, bias_tables="per_block", **SIZES, **BEIT), (16, 24), 0),
        (ConvViTEncoder(image_size=(32, 32), in_chans=3, **CONVVIT), (32, 48), 0),
    ],
    ids=["vit", "vit without class token", "beit", "beit per block", "convvit"],
)
def test_attention_is_that_of_the_last_block(encoder: Encoder, size: tuple[int, int], prefix: int) -> None:
    """softmax(q k^T / sqrt(d) + bias), head by head, with timm's bias; and it gives the block's own output."""
    attention: Any = attention_of(drawn(encoder))
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    calls: list[tuple[Tensor, Tensor]] = []
    handle = attention.register_forward_hook(lambda module, inputs, output: calls.append((inputs[0], output)))
    weights = attention_weights(encoder, images)
    handle.remove()
    (tokens, output), dim = calls[0], encoder.embed_dim
    height, width = encoder.grid_of(images)
    assert weights.shape == (2, 2, prefix + height * width, prefix + height * width)
    biases = [getattr(attention, f"{each}_bias", None) for each in "qkv"]
    if biases[0] is None:
        biases = [None if attention.qkv.bias is None else part for part in attention.qkv.bias.chunk(3)]
    q, k, v = (F.linear(tokens, part, bias) for part, bias in zip(attention.qkv.weight.chunk(3), biases, strict=True))
    shared: Any = getattr(encoder, "rel_pos_bias", None)
    relative = shared() if shared is not None else None
    if getattr(attention, "relative_position_bias_table", None) is not None:
        relative = attention._get_rel_pos_bias()[0]  # timm's, with a class token
    heads = []
    for head in range(2):
        part = slice(head * dim // 2, (head + 1) * dim // 2)
        scores = q[..., part] @ k[..., part].mT / (dim // 2) ** 0.5
        scores = scores if relative is None else scores + relative[head, 1 - prefix :, 1 - prefix :]
        torch.testing.assert_close(weights[:, head], scores.softmax(-1))
        heads.append(weights[:, head] @ v[..., part])
    torch.testing.assert_close(attention.proj(torch.cat(heads, -1)), output)


def test_swin_has_no_map_of_the_whole_image() -> None:
    sizes: dict[str, Any] = {"embed_dim": 32, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "window": 2}
    encoder = SwinEncoder(image_size=(64, 64), in_chans=3, **sizes)
    assert attention_of(encoder) is None
    with pytest.raises(ValueError, match="does not attend over the whole image"):
        attention_weights(encoder, torch.zeros(1, 3, 64, 64))


def config_of(*arguments: str | Path) -> ShowConfig:
    config = compose("show", with_first_key("show", [*map(str, arguments), "device=cpu"]))
    assert isinstance(config, ShowConfig)
    return config


def shown(*arguments: str | Path) -> tuple[Shown, FrozenEncoder]:
    config = config_of(*arguments)
    frozen = load_encoder(config)
    return Shown(config, frozen), frozen


def test_losses_masks_and_targets_are_those_of_training(finished_run: Path) -> None:
    """Of the run's training images, without their flip; the objective is that of the checkpoint."""
    figures, frozen = shown(finished_run, "split=train", "images=3", "epoch=2")
    assert isinstance(frozen.trained, PretrainConfig)
    samples, _, losses = figures._predicted
    ids = [0, 479, 958]
    dataset = build_dataset(frozen.trained.data, "train")
    assert [dataset.image(index).tolist() for index in ids] == figures.crops.tolist()
    step = build_step(frozen.trained, initial=frozen.path)
    prepare = step.prepare
    object.__setattr__(prepare, "flip", False)
    prepared = prepare(Batch(figures.crops, torch.tensor(ids), torch.tensor([-1] * 3)), epoch=2)
    assert torch.equal(samples.views.mask, prepared.masked_views.views.mask)
    assert torch.equal(samples.targets, prepared.targets)
    objective = step.engine.objective.eval()
    with torch.no_grad():
        whole = objective(*prepared.inputs)
        masked = objective.model(prepared.images, prepared.masked_views).masked.unflatten(0, (2, 3))
    for mean, parts in zip(whole, zip(*losses, strict=True), strict=True):
        torch.testing.assert_close(mean, torch.stack(parts).mean())
    at_masked = samples.predictions.gather(2, samples.views.masked[..., None].expand(masked.shape))
    torch.testing.assert_close(at_masked, masked)
    text = figures.reconstruction().captions[1]
    assert text == f"loss {losses[1].total:.4f} (L_mim {losses[1].masked:.4f}, L_vis {losses[1].visible:.4f})"


def save_mae(path: Path) -> list[str]:
    """A file of MAE's code with encoder and decoder; returns arguments that describe it."""
    describing = [f"backbone.{key}" for key in ("patch_size=4", "embed_dim=32", "depth=1", "num_heads=4")]
    words = ["experiment=demo", *describing]
    config = compose("pretrain", [*words, "data=digits"])
    torch.save({"model": to_official(build_objective(config, target_dim(config)).model)}, path)
    return words


def test_a_file_with_decoder_is_shown_and_one_without_says_so(tmp_path: Path, finished_run: Path) -> None:
    words = save_mae(tmp_path / "mae.pth")
    image = tmp_path / "a, b.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)).save(image)
    lines = run(config_of(tmp_path / "mae.pth", image, *words, "data=digits", "views=1"))
    files = [tmp_path / "mae" / "pictures" / f"show{kind}.png" for kind in ("", *(f"-{kind}" for kind in KINDS))]
    assert lines == [str(file) for file in files]
    for file in files:
        assert file.stat().st_size < MAX_BYTES
        with Image.open(file) as picture:
            assert "Trained weights, mae.pth; given images." in picture.info["Description"]
            assert str(tmp_path) not in picture.info["Description"]
    state = torch.load(tmp_path / "mae.pth")["model"]
    kept = {name: value for name, value in state.items() if not name.startswith(("decoder", "mask_token"))}
    torch.save({"model": kept}, tmp_path / "encoder.pth")
    lines = run(config_of(tmp_path / "encoder.pth", image, *words, "data=digits", f"output={tmp_path / 'out'}"))
    assert lines[-1].startswith("no reconstruction: encoder.pth has no decoder")
    assert not (tmp_path / "out" / "show-reconstruction.png").exists()


def test_pixels_get_the_statistics_of_their_patch_and_visible_ones_are_the_image(finished_run: Path) -> None:
    """As MAE's figure, patch by patch."""
    figures, _ = shown(finished_run, "images=2")
    samples, _, losses = figures._predicted
    mask, (rows, columns), patch = samples.views.mask, figures.grid, 4
    target = PixelTarget(patch, 1, (0.3,), (0.2,), norm="patch")
    predictions = torch.randn(*mask.shape, target.dim, generator=torch.Generator().manual_seed(0))
    samples = replace(samples, targets=target(samples.crops), predictions=predictions)
    figures.__dict__["_predicted"] = (samples, target, losses)
    drawn = {column.title: column.cells for column in figures.reconstruction().columns(patch)}
    assert list(drawn) == ["image", "view 1", "view 2", "target", "prediction", "pred. + visible"]
    for index, image in enumerate(samples.crops[..., 0].double()):
        for token in range(rows * columns):
            top, left = token // columns * patch, token % columns * patch
            place = slice(top, top + patch), slice(left, left + patch)
            own = image[place] / 255
            deviation = (own.var() + 1e-6 * 0.2**2).sqrt()
            by_view = [(own.mean() + deviation * each[index, token].view(patch, patch)) for each in predictions]
            expected = [(255 * each).round().clamp(0, 255) for each in by_view]
            first = expected[0] if mask[0, index, token] or not mask[1, index, token] else expected[1]
            beside = expected[0] if mask[0, index, token] else image[place]
            for name, values in (("target", image[place]), ("prediction", first), ("pred. + visible", beside)):
                assert np.abs(drawn[name][index][place][..., 0] - values.numpy()).max() <= 1, (name, token)


def test_principal_components_are_those_of_scikit_learn() -> None:
    tokens = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(8, 0, -1)
    expected = PCA(3).fit_transform(tokens.flatten(0, 1).double().numpy())
    found = pca_colours(tokens).flatten(0, 1).numpy()
    for own, theirs in zip(found.T, expected.T, strict=True):
        low, high = np.percentile(theirs, [1, 99])
        scaled = np.clip((theirs - low) / (high - low), 0, 1)
        assert min(np.abs(own - scaled).max(), np.abs(own - (1 - scaled)).max()) < 1e-4
    assert pca_colours(tokens[..., :2])[..., 2].max() == 0  # two dimensions have no third component


def test_glyphs_are_line_segments_across_the_gradient_of_their_bin() -> None:
    """The principal axis of each stroke, as skimage.feature.hog draws them: for bin i of 9 at (i + 0.5) * 20 degrees
    from the column axis to the row axis, turned by 90 degrees."""
    target = HogTarget(8, 1, 8, norm="none")
    for index in range(9):
        stroke = target.render(torch.eye(9)[index : index + 1], (1, 1))[..., 0].astype(float)
        row, column = np.indices(stroke.shape) - (len(stroke) - 1) / 2
        moment = np.arctan2(2 * (stroke * row * column).sum(), (stroke * (column**2 - row**2)).sum()) / 2
        angle = np.degrees(moment) - (20 * (index + 0.5) + 90)
        assert abs((angle + 90) % 180 - 90) < 4


def test_maps_frames_and_names_of_classes() -> None:
    assert _in_one_line("a\nb\x1b" + 50 * "c") == "a\\nb\\x1b" + 29 * "c" + "..."
    values = torch.linspace(0, 1, 100).view(10, 10)
    values[9, 9] = 1000.0  # one outlier does not darken the others
    picture = heat(values)
    assert [picture[0, 0].tolist(), picture[9, 6].tolist()] == [[0, 0, 3], [252, 254, 164]]  # both ends of "inferno"
    assert np.abs(picture[4, 7].astype(int) - (188, 55, 84)).max() <= 3  # its middle
    cell = framed(np.full((8, 12, 3), 7, np.uint8), (1, 2), (2, 3))
    assert (cell[:4] == 7).all()
    assert (cell[4:, :8] == 7).all()
    assert cell[4:, 8:, 0].tolist() == [[255] * 4, [255, 0, 0, 255], [255, 0, 0, 255], [255] * 4]


def test_maps_are_those_of_images_of_twice_the_size_unless_a_size_is_given(finished_run: Path) -> None:
    figures, frozen = shown(finished_run, "images=2")
    height, width = frozen.size
    twice, _ = shown(finished_run, "images=2", f"data.image_size=[{2 * height},{2 * width}]")
    once, _ = shown(finished_run, "images=2", f"data.image_size=[{height},{width}]")
    assert twice.grid == (2 * figures.grid[0], 2 * figures.grid[1])
    for kind in ("attention", "pca"):
        found, expected, coarse = (getattr(each, kind)().columns for each in (figures, twice, once))
        for own, fine, other in zip(found(8)[1:], expected(4)[1:], coarse(8)[1:], strict=True):
            assert np.array_equal(own.cells, fine.cells), own.title
            assert not np.array_equal(own.cells, other.cells)


def test_a_classifier_has_its_classes_below_the_images(finished_run: Path) -> None:
    config = config_of(finished_run, "images=2")
    words = [text for text in TINY if text.startswith(("data", "backbone"))]
    tuned = compose("finetune", [*words, "init=x", "run=y"])
    model = build_classification(tuned, 10).model.eval()
    nn.init.normal_(model.head.weight)
    frozen = replace(load_encoder(config), encoder=model.encoder, trained=tuned, classifier=model, classes=["$zero"])
    classified = Shown(config, frozen)
    figures, lines = classified.figures(KINDS, given=False)
    assert list(figures) == ["", "hog", "attention", "pca"]
    assert [line.partition(":")[0] for line in lines] == ["no reconstruction", "no masks"]
    pixels = classified.crops.permute(0, 3, 1, 2) / 255
    values = model((pixels - frozen.data.mean[0]) / frozen.data.std[0]).softmax(-1)
    names = ["$zero", *map(str, range(1, 10))]
    expected = [f"{names[int(row.argmax())]} {100 * row.max():.0f} %" for row in values]
    assert classified._classes == expected
    with pytest.raises(ConfigError, match="kinds=masks: this is a classifier"):
        classified.figures(["masks"], given=True)


def test_the_command_writes_into_the_run_and_its_report(finished_run: Path, tmp_path: Path, capsys: Any) -> None:
    copied = Path(shutil.copytree(finished_run, tmp_path / "run"))
    assert main(["show", str(copied), "images=2", "kinds=attention,masks", "query=[0,1]", "device=cpu"]) == 0
    names = ["show", "show-attention", "show-masks"]
    assert capsys.readouterr().out.splitlines() == [str(copied / "pictures" / f"{name}.png") for name in names]
    source = write_report(copied).read_text()
    captions = ["The model on sample images", "Attention of the last block", "Disjoint masks"]
    assert [source.find(f"<figcaption>{caption}") > 0 for caption in captions] == [True] * 3
    assert "Attention of the marked patch" in source


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["kinds=mask"], ConfigError, "kinds must be a list of reconstruction, masks, hog, attention, pca, got 'mask'"),
        (["query=[1,2]"], ConfigError, r"query must be \[ROW,COLUMN\] in fractions of height and width from 0 to 1"),
        (["missing.png"], DataError, "missing.png cannot be read as an image"),
        (["kinds=reconstruction", "data.image_size=64"], ConfigError, "kinds=reconstruction: the model was pre-train"),
        (["data.image_size=30"], ConfigError, "not divisible by backbone.patch_size=4"),
    ],
)
def test_errors_name_the_key(finished_run: Path, words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shown(finished_run, *words)[0].figures(KINDS, given=True)


def test_the_next_image_takes_the_place_of_one_that_cannot_be_decoded(
    finished_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(6):
        Image.new("L", (16, 16), 40 * index).save(tmp_path / f"{index}.png")
    for index in (2, 3):
        (tmp_path / f"{index}.png").write_bytes((tmp_path / "2.png").read_bytes()[:50])
    figures, _ = shown(finished_run, tmp_path, "images=4")  # 0, 1, 3 and 4
    assert figures.crops.flatten(1).amax(1).tolist() == [0, 40, 160]
    assert "left out 1 image(s) that cannot be decoded; the first: " in caplog.text
    caplog.clear()
    figures, _ = shown(finished_run, tmp_path, "images=3")  # 0, 2 and 4
    assert figures.crops.flatten(1).amax(1).tolist() == [0, 160]
    for index in range(6):
        (tmp_path / f"{index}.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="none of 6 images can be decoded; the first: "):
        shown(finished_run, tmp_path)
    with pytest.raises(DataError, match=r"0\.png"):
        shown(finished_run, tmp_path / "0.png")


def test_the_output_folder_is_checked_before_images_are_read(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^cannot write into .*/file/in: .*/file is a file; set another folder with"):
        run(config_of(finished_run, "missing.png", f"output={tmp_path / 'file' / 'in'}"))
