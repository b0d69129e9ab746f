"""Predictions of a classifier and of neighbours, as CSV."""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import dmjd as package
from dmjd.compose import compose
from dmjd.data.folder import ImageFolder
from dmjd.explore.embeddings import read_embeddings, write_embeddings
from dmjd.explore.sources import origin
from dmjd.train import loop

Command = Callable[..., tuple[int, str, str]]

CPU = ("device=cpu", "workers=0")
TUNED = (
    *("init=null", "epochs=2", "batch_size=12", "workers=0", "engine.device=cpu", "optim.base_lr=0.2"),
    *("backbone.embed_dim=24", "backbone.depth=2", "backbone.num_heads=3", "backbone.patch_size=8"),
    *("data=folder", "data.image_size=[16,16]", "data.channels=1", "data.mean=[0.5]", "data.std=[0.3]"),
    *("augment.randaugment=null", "augment.mixup=0", "augment.cutmix=0", "ema_decay=0.5", "keep_checkpoints=1"),
)


@pytest.fixture(scope="module")
def tuned_once(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tuned") / "run"
    return loop.finetune(compose("finetune", [*TUNED, f"data.root={image_folder}", f"run={run}"])).path


@pytest.fixture
def tuned(tuned_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tuned_once, tmp_path / "tuned"))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_a_classifier_predicts_what_it_predicts_in_python(tuned: Path, image_folder: Path, dmjd: Command) -> None:
    """Of the test images of its run, by the average; and of all images of a folder."""
    code, out, error = dmjd("predict", str(tuned), *CPU, "batch_size=5")
    assert code == 0, error
    assert dmjd("embed", str(tuned), *CPU, "weights=ema", f"output={tuned / 'a.npz'}")[0] == 0
    assert origin(read_embeddings(tuned / "a.npz"), "tuned", ["weights", "step"], 40) == "ema, step 8, fine-tuned"
    (path,) = (tuned / "predictions").iterdir()
    assert (path.name, out.splitlines()[-1]) == ("ema-step00000008.csv", str(path))
    classifier = package.load_classifier(tuned, device="cpu")
    expected = classifier.logits(str(image_folder / "val")).softmax(1)
    rows = rows_of(path)
    names = [f"val/{label}/{number:02d}.png" for label in ("down", "up") for number in range(6)]
    assert [row["name"] for row in rows] == names
    assert [row["label"] for row in rows] == ["down"] * 6 + ["up"] * 6
    found = torch.tensor([[float(row["p_down"]), float(row["p_up"])] for row in rows])
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    best = [(row["predicted"], float(row["probability"])) for row in rows]
    for (name, value), (other, probability) in zip(best, classifier.predict(str(image_folder / "val")), strict=True):
        assert name == other
        assert value == pytest.approx(probability, abs=2e-6)
    right = sum(row["predicted"] == row["label"] for row in rows)
    assert f"test: 12 images; top-1 {100 * right / 12:.2f} % of 12 labelled ones" in out
    score = dmjd("validate", str(tuned), *CPU)[1]
    assert f"top-1 {100 * right / 12:.2f} %" in score
    assert dmjd("predict", str(tuned), *CPU, "split=all", "weights=trained")[0] == 0
    every = rows_of(tuned / "predictions" / "trained-step00000008-all.csv")
    assert [row["name"].split("/")[0] for row in every] == ["train"] * 48 + ["val"] * 12


@pytest.fixture
def odd_images(tmp_path: Path) -> Path:
    """A folder of mixed depth, with a damaged file and names that tables find hard."""
    root = tmp_path / "odd images"
    (root / "up" / "deep").mkdir(parents=True)
    (root / "2023").mkdir()
    for number, name in enumerate(['=1+1,"a".png', "2023/line\nbreak.png", "up/deep/ü.png", "@.png"]):
        Image.new("RGB", (20 + number, 30), (number * 60, 10, 99)).save(root / name)
    (root / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    (root / "notes.txt").write_text("none")
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_any_folder_is_predicted_and_damaged_images_keep_a_row(
    workers: int, tuned: Path, odd_images: Path, dmjd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(odd_images.parent)
    code, out, error = dmjd("predict", str(tuned), odd_images.name, "device=cpu", f"workers={workers}", "batch_size=2")
    assert code == 0, error
    content = (tuned / "predictions" / "ema-step00000008-odd_images.csv").read_bytes()
    assert content.count(b"\r\n") == 6
    assert b"\n" not in content.replace(b"\r\n", b"")
    rows = rows_of(tuned / "predictions" / "ema-step00000008-odd_images.csv")
    assert [row["name"].removeprefix("odd images/") for row in rows] == [
        *("2023/line\\nbreak.png", '=1+1,"a".png', "@.png", "broken.jpg", "up/deep/ü.png")
    ]
    assert [row["label"] for row in rows] == ["", "", "", "", "up"]
    (broken,) = (row for row in rows if row["error"])
    assert broken["name"].endswith("broken.jpg")
    assert not any(broken[key] for key in ("predicted", "probability", "p_down", "p_up"))
    assert "5 images; 1 of them cannot be read, the first: odd images/broken.jpg cannot be read as an image" in out
    assert "of 1 labelled ones" in out
    classifier = package.load_classifier(tuned, device="cpu")
    for row in (row for row in rows if not row["error"]):
        ((name, probability),) = classifier.predict(row["name"].replace("\\n", "\n"))
        assert row["predicted"] == name
        assert float(row["probability"]) == pytest.approx(probability, abs=2e-6)
        assert f"{row['name']}: {name} {float(row['probability']):.3f}, " in out


def test_single_files_keep_their_order_and_columns_can_be_few(
    tuned: Path, image_folder: Path, dmjd: Command, tmp_path: Path
) -> None:
    files = [str(image_folder / "val" / name) for name in ("up/03.png", "down/00.png")]
    words = [str(tuned), *files, *CPU, f"output={tmp_path / 'new' / 'few.csv'}"]
    for columns, head in (("top1", []), ("top5", ["predicted_2", "probability_2"])):
        assert dmjd("predict", *words, f"probabilities={columns}")[0] == 0
        rows = rows_of(tmp_path / "new" / "few.csv")
        assert list(rows[0]) == ["name", "label", "predicted", "probability", "error", *head]
        assert [row["name"] for row in rows] == files
    assert all(float(row["probability"]) + float(row["probability_2"]) == pytest.approx(1) for row in rows)
    assert {row["predicted_2"] for row in rows} | {row["predicted"] for row in rows} == {"up", "down"}


@pytest.mark.parametrize("pooling", ["avg", "token"])
def test_a_fine_tuned_file_of_another_code_base_predicts_as_timm(
    pooling: Literal["avg", "token"], image_folder: Path, dmjd: Command, tmp_path: Path
) -> None:
    """The file of MAE's fine-tuning, with fc_norm, and that of DeiT's, without."""
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=2, global_pool=pooling
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    file = tmp_path / "tuned.pth"
    torch.save({"model": model.state_dict()}, file)
    words = [str(file), *CPU, "data=folder", f"data.root={image_folder}", "data.image_size=16", "backbone.num_heads=3"]
    code, out, error = dmjd("predict", *words, "split=test", "data.crop_pct=1", f"output={tmp_path / 'out.csv'}")
    assert code == 0, error
    paths = sorted((image_folder / "val").glob("*/*.png"))
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path).convert("RGB"))) for path in paths])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        expected = model(((pixels / 255 - mean) / std).permute(0, 3, 1, 2)).softmax(1)
    rows = rows_of(tmp_path / "out.csv")
    found = torch.tensor([[float(row["p_down"]), float(row["p_up"])] for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    classifier = package.load_classifier(file, device="cpu", backbone={"num_heads": 3}, data={"crop_pct": 1.0})
    torch.testing.assert_close(classifier.logits(paths).softmax(1), expected, atol=1e-5, rtol=0)
    assert [row["label"] for row in rows] == [path.parent.name for path in paths]
    right = sum(row["predicted"] == row["label"] for row in rows)
    assert f"test: 12 images; top-1 {100 * right / 12:.2f} % of 12 labelled ones" in out
    code, out, error = dmjd("validate", *words, "data.crop_pct=1")
    assert code == 0, error
    assert f"top-1 {100 * right / 12:.2f} %" in out
    _, out, _ = dmjd("predict", str(file), str(paths[0]), *CPU, "backbone.num_heads=3")
    written = tmp_path / "tuned" / "predictions" / "trained-step00000000-down_00.png.csv"
    assert out.splitlines()[1:] == ["1 image", f"predicted: {expected[0].argmax()} (1)", str(written)]
    _, out, _ = dmjd("predict", str(file), *map(str, paths[:4]), *CPU, "backbone.num_heads=3")
    assert out.endswith("/trained-step00000000-down_00.png-down_01.png-and-2-more.csv\n")
    _, out, _ = dmjd("predict", str(file), str(paths[0]), *CPU, "backbone.num_heads=3")
    assert out.endswith(f"replaced the earlier {written.name}\n{written}\n")


@pytest.mark.gpu
def test_a_gpu_predicts_the_same(
    tuned: Path, straight: Path, image_folder: Path, dmjd: Command, tmp_path: Path
) -> None:
    for checkpoint in (tuned, straight):
        found = []
        for device in ("cuda", "cpu"):
            words = (str(checkpoint), str(image_folder / "val"), f"device={device}", f"output={tmp_path / device}.csv")
            assert dmjd("predict", *words)[0] == 0
            found.append([[float(row["p_down"]), float(row["p_up"])] for row in rows_of(tmp_path / f"{device}.csv")])
        np.testing.assert_allclose(found[0], found[1], atol=1e-3)


# Neighbours -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def encoder(straight: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(straight, tmp_path / "encoder"))


def test_neighbours_vote_as_in_a_loop(encoder: Path, image_folder: Path, dmjd: Command, tmp_path: Path) -> None:
    """From the training images of the run, and from a file of their embeddings: one vote at a time."""
    words = [str(encoder), str(image_folder / "val"), *CPU, "neighbours=7", "temperature=0.5"]
    code, _, error = dmjd("predict", *words, f"output={tmp_path / 'run.csv'}")
    assert code == 0, error
    loaded = package.load_encoder(encoder, device="cpu")
    bank, queries = (loaded.embed(str(image_folder / split)).double() for split in ("train", "val"))
    labels = [ImageFolder(str(image_folder), "train", 1).label(index) for index in range(48)]
    rows = rows_of(tmp_path / "run.csv")
    for query, row in zip(queries, rows, strict=True):
        cosines = [float(query @ other / query.norm() / other.norm()) for other in bank]
        near = sorted(range(48), key=lambda index: -cosines[index])[:7]
        votes = [sum(math.exp(cosines[index] / 0.5) for index in near if labels[index] == label) for label in (0, 1)]
        found = [float(row["p_down"]), float(row["p_up"])]
        assert found == pytest.approx([vote / sum(votes) for vote in votes], abs=1e-5)
        assert row["predicted"] == ("down", "up")[int(np.argmax(votes))]
        assert row["label"] == row["name"].split("/")[-2]
    assert dmjd("embed", str(encoder), *CPU, "split=train")[0] == 0
    assert dmjd("predict", *words, f"labelled={encoder}", f"output={tmp_path / 'file.csv'}")[0] == 0
    assert (tmp_path / "file.csv").read_bytes() == (tmp_path / "run.csv").read_bytes()
    _, out, error = dmjd("predict", str(encoder), str(image_folder), *CPU, f"labelled={encoder}")
    assert f"kNN on 48 labelled images of {next((encoder / 'embeddings').iterdir())}" in error
    assert "60 images; top-1" in out
    assert "of 12 labelled ones; 48 of them are among the labelled kNN images and not counted in the accuracy" in out


def test_errors_are_one_line(encoder: Path, tuned: Path, image_folder: Path, dmjd: Command, tmp_path: Path) -> None:
    embedded, val = tmp_path / "other.npz", str(image_folder / "val")
    assert dmjd("embed", str(encoder), *CPU, "weights=untrained", f"output={embedded}", "images=9")[0] == 0
    file = read_embeddings(embedded)
    ((name, recorded),) = file.settings["encoders"].items()
    recorded |= {"step": int(max((encoder / "checkpoints").iterdir()).name[-8:]), "weights": "ema", "pooling": "cls"}
    write_embeddings(tmp_path / "cls.npz", replace(file, settings={"encoders": {name: recorded}}))
    (tmp_path / "empty").mkdir()
    for words, fault in (
        ([str(tuned), "gone.jpg"], "gone.jpg does not exist; name image files or folders of images"),
        ([str(tuned), str(tmp_path / "empty")], "empty holds no images"),
        ([str(tuned), val, "data.root=x"], "paths and data both name images; give one of them"),
        ([str(tuned), val, "output=x.txt"], "output=x.txt must end in .csv"),
        ([str(tuned), val, f"output={embedded}/x.csv"], f"{embedded} is a file; set another file with output=FILE.csv"),
        ([str(tuned), val, "weights=student"], "step-00000008 has no student beside a teacher; use weights=trained"),
        ([str(tuned), val, "neighbours=3"], "neighbours is for encoders, and checkpoint="),
        ([str(encoder), val, "neighbours=49"], "neighbours=49 must be at most the number of labelled images, 48"),
        (
            [str(encoder), val, f"labelled={embedded}", "data.image_size=[24,24]"],
            "was not made with this encoder: it has other weights; image_size [16, 16], not [24, 24]; embed",
        ),
        ([str(tuned), "new\nx"], "new\\nx does not exist"),
        (
            [str(encoder), val, f"labelled={tmp_path / 'cls.npz'}"],
            "weights ema, not trained; pooling cls, not mean; set weights=ema pooling=cls, or embed the labelled",
        ),
        ([str(encoder), val, f"labelled={tmp_path / 'no.npz'}"], "no.npz cannot be read (No such file or directory)"),
    ):
        code, _, error = dmjd("predict", *words, *CPU)
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert (code, len(lines)) == (2, 1), error
        assert fault in lines[0]
    assert not list(tuned.glob("predictions/*"))
