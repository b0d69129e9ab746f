"""``dmjd tsne``: the maps, their images, and the page in a browser."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from dmjd.cli import main
from dmjd.compose import compose, with_first_key
from dmjd.errors import ConfigError, DataError
from dmjd.explore.embeddings import Embeddings, write_embeddings
from dmjd.explore.scatter import MAX_CLASSES, Panel, mark
from dmjd.explore.scatter_page import scatter_page
from dmjd.explore.sources import read_together
from dmjd.explore.tsne import TsneConfig, fitting, perplexity_for, select, shares, tsne
from tests.report.html_page import Page

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028&amp;"


def jpeg(shade: int, side: int = 16) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (shade, 100, 50)).save(file, "JPEG")
    return file.getvalue()


def made(images: int = 40, classes: int = 4, **changes: Any) -> Embeddings:
    """Images in the order of their class, whose features are around one centre per class."""
    labels = np.arange(images) * classes // images
    generator = np.random.default_rng(0)
    features = generator.normal(size=(classes, 8))[labels] + generator.normal(size=(images, 8))
    content: dict[str, Any] = {
        "names": [f"{label}/{index}.jpg" for index, label in enumerate(labels)],
        "ids": np.arange(images),
        "splits": np.array(["train", "test"])[np.arange(images) % 2],
        "labels": labels,
        "classes": [f"class {label}" for label in range(classes)],
        "features": {"encoder": features.astype(np.float32)},
        "thumbnails": [jpeg(index) for index in range(images)],
        "settings": {"encoders": {"encoder": {"weights": "ema", "step": 7}}, "data": "photos"},
    }
    return Embeddings(**{**content, **changes})


def settings(*arguments: str) -> TsneConfig:
    config: TsneConfig = compose("tsne", with_first_key("tsne", ["x.npz", *arguments]))
    return config


# The maps -------------------------------------------------------------------------------------------------------------


def test_a_map_is_that_of_opentsne_with_the_documented_settings(caplog: pytest.LogCaptureFixture) -> None:
    from openTSNE import TSNE

    features = made().features["encoder"]
    perplexity = perplexity_for(len(features), 30)
    steps: list[int] = []
    with caplog.at_level(logging.WARNING):
        points = tsne(features, perplexity, seed=3, advance=steps.append)
        plain = TSNE(perplexity=perplexity, metric="cosine", random_state=3).fit(features)
    assert (points == np.asarray(plain)).all()
    assert sum(steps) == 750
    assert perplexity == 13
    assert not caplog.records  # openTSNE's warning of a perplexity that is too high


# The images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "total", "expected"),
    [
        ([5, 5, 5], 100, [5, 5, 5]),
        ([50, 50, 50], 30, [10, 10, 10]),
        ([100, 2, 100], 22, [10, 2, 10]),
        ([1, 100, 7], 20, [1, 12, 7]),
        ([4, 4, 4], 10, [3, 3, 4]),
    ],
)
def test_classes_share_the_images_equally_as_far_as_they_have_them(
    counts: list[int], total: int, expected: list[int]
) -> None:
    assert shares(counts, total) == expected


def test_the_images_are_those_of_a_plain_loop() -> None:
    generator = np.random.default_rng(5)
    labels = generator.integers(-1, 30, 1000)
    embeddings = made(1000, 30, labels=labels)
    config = settings("images=100", "split=test", "seed=4")
    chosen = select(embeddings, config)
    assert len(chosen.classes) == 20
    assert chosen.classes != select(embeddings, replace(config, seed=5)).classes
    expected: list[tuple[int, int]] = []
    for index, name in enumerate(chosen.classes):
        label = embeddings.classes.index(name)
        own = [row for row in range(1000) if labels[row] == label and embeddings.splits[row] == "test"]
        expected += [(own[int(place * len(own) / 5)], index) for place in range(5)]
    assert list(zip(chosen.rows, chosen.labels, strict=True)) == sorted(expected)
    test = embeddings.splits == "test"
    kept = [embeddings.classes.index(name) for name in chosen.classes]
    assert chosen.available == (test & np.isin(labels, kept)).sum()
    assert (chosen.present, chosen.unlabelled) == (30, (test & (labels < 0)).sum())


@pytest.mark.parametrize(
    ("argument", "classes"),
    [
        ("classes=[class 3,class 1]", ["class 1", "class 3"]),
        ("classes=4", ["class 0", "class 1", "class 2", "class 3"]),
        ("classes=null", ["class 0", "class 1", "class 2", "class 3"]),
    ],
)
def test_classes_are_chosen_by_name_or_number(argument: str, classes: list[str]) -> None:
    chosen = select(made(), settings(argument))
    assert chosen.classes == classes
    assert len(chosen.rows) == 10 * len(classes)


@pytest.mark.parametrize(
    ("changes", "argument", "message"),
    [
        ({}, "classes=[class 1,clas 3]", "no image is of the class 'clas 3'; did you mean class 3"),
        ({}, "classes=[class 1]", "must name between 2 and 80 classes, got 1"),
        ({}, "classes=1", "classes=1 must be at least 2 and at most 4"),
        ({}, "classes=5", "classes=5 must be at least 2 and at most 4"),
        ({"labels": np.full(40, -1)}, "classes=2", "these images have no labels"),
        ({"splits": np.array(["test"] * 9 + ["train"] * 31)}, "split=test", "there are 9 images with split=test"),
    ],
)
def test_images_that_there_are_not_are_an_error(changes: dict[str, Any], argument: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=re.escape(message)):
        select(made(**changes), settings(argument))


def test_every_class_has_a_mark_of_its_own() -> None:
    assert len({mark(index) for index in range(MAX_CLASSES)}) == MAX_CLASSES
    assert len({mark(index)[0] for index in range(10)}) == 10  # of up to ten, the colour suffices


# Files ----------------------------------------------------------------------------------------------------------------


def shuffled(embeddings: Embeddings, rows: NDArray[np.int64], name: str) -> Embeddings:
    """Some of the images in another order, with an encoder whose first feature is the image's id."""
    taken = embeddings.take(rows.tolist())
    features = taken.features["encoder"].copy()
    features[:, 0] = taken.ids
    return replace(taken, features={name: features})


def test_several_files_are_one_of_the_images_that_all_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = made()
    rows = np.random.default_rng(0).permutation(40)[:30]
    for name, content in (("a", first), ("b", shuffled(first, rows, "encoder")), ("c", shuffled(first, rows, "c"))):
        write_embeddings(tmp_path / f"{name}.npz", content)
    together = read_together([str(tmp_path / f"{name}.npz") for name in "abc"])
    kept = sorted(rows)
    assert list(together.ids) == kept
    assert together.names == [first.names[row] for row in kept]
    assert list(together.features) == ["a: encoder", "b: encoder", "c"]
    assert (together.features["a: encoder"] == first.features["encoder"][kept]).all()
    assert (together.features["b: encoder"][:, 0] == kept).all()
    assert (together.features["c"][:, 0] == kept).all()
    assert together.settings["encoders"].keys() == together.features.keys()
    write_embeddings(tmp_path / "other.npz", replace(first, names=[f"other {name}" for name in first.names]))
    with pytest.raises(DataError, match="have no image of the same name and split in common"):
        read_together([str(tmp_path / "a.npz"), str(tmp_path / "other.npz")])
    (tmp_path / "run/embeddings").mkdir(parents=True)
    shutil.copy(tmp_path / "a.npz", tmp_path / "run/embeddings/new.npz")
    with caplog.at_level(logging.INFO, "dmjd"):
        assert read_together([str(tmp_path / "run")]).names == first.names
    assert caplog.messages == [f"reading {tmp_path}/run/embeddings/new.npz, the newest file of {tmp_path}/run"]


def test_thumbnails_that_are_too_large_become_smaller_ones() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (5, 64, 48, 3), np.uint8)
    thumbnails = []
    for pixels in noise:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        thumbnails.append(file.getvalue())
    size = sum(map(len, thumbnails))
    assert fitting(thumbnails, size) == thumbnails
    smaller = fitting([*thumbnails, b"no image"], size // 4)
    assert sum(map(len, smaller)) <= size // 4
    assert smaller[-1] == b""
    shown = Image.open(io.BytesIO(smaller[0]))
    assert shown.size == (29, 39)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_picture_and_a_page_that_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = made(classes=4)
    names = [f"{name}{HOSTILE[:-6]}" for name in first.names]
    described = {"checkpoint": "last.pth", "weights": "ema", "step": 7}
    recorded = {
        "encoders": {"encoder": described},
        "data": "folder in my photos, 32x32",
        "left_out": {"bad.jpg": "cut", "worse.jpg": "empty"},
    }
    hostile = replace(first, names=[name.replace("\u2028", "") for name in names], settings=recorded)
    write_embeddings(tmp_path / "x.npz", hostile)
    assert main(["tsne", str(tmp_path / "x.npz"), "classes=3", "images=24"]) == 0
    printed = capsys.readouterr().out.splitlines()
    chosen = select(hostile, settings("classes=3", "images=24"))
    training = sum(hostile.splits[row] == "train" for row in chosen.rows)
    assert printed[0] == (
        "24 images of 3 classes drawn from 4 (seed 0); 8 of each class, evenly spaced, of 30 images; "
        f"{training} training and {24 - training} test images."
    )
    assert printed[1].startswith(
        "t-SNE by openTSNE: cosine distance, PCA initialisation, perplexity 7.67 (the most for"
    )
    top1 = 100 * _hits_of_scikit_learn(*_shown(hostile, "classes=3", "images=24"), k=2) / 24
    assert 40 < top1 < 100
    assert printed[2] == f"encoder: kNN top-1 {top1:.1f} % (k 2, leave-one-out, 24 images)"
    assert printed[3:] == [str(tmp_path / "tsne.png"), str(tmp_path / "tsne.html")]
    source = (tmp_path / "tsne.html").read_text()
    assert f"<p>ema, step 7: kNN top-1 {top1:.1f} %</p>" in source
    for row in (
        "encoder encoder</th><td>checkpoint last.pth, step 7, weights ema<",
        "data</th><td>folder in my photos, 32x32<",
        "images left out</th><td>2<",
        "files</th><td>x.npz<",
    ):
        assert f'<th scope="row">{row}' in source
    page, data = Page(source), page_data(source)
    assert not re.search(r"://|@import|url\(", source)
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    (picture,) = page.attributes("img")
    picture_bytes = base64.b64decode((picture["src"] or "").partition(",")[2])
    assert picture_bytes == (tmp_path / "tsne.png").read_bytes()
    with Image.open(tmp_path / "tsne.png") as image:
        assert image.info["Description"].startswith(printed[0])
    assert data["names"] == [hostile.names[row] for row in chosen.rows]
    assert data["labels"] == list(chosen.labels)
    assert data["thumbnails"] == [base64.b64encode(jpeg(int(row))).decode() for row in chosen.rows]
    before = [(tmp_path / name).read_bytes() for name in ("tsne.png", "tsne.html")]
    assert main(["tsne", str(tmp_path / "x.npz"), "classes=3", "images=24", f"output={tmp_path / 'new'}"]) == 0
    assert [(tmp_path / "new" / name).read_bytes() for name in ("tsne.png", "tsne.html")] == before


def _shown(embeddings: Embeddings, *arguments: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    chosen = select(embeddings, settings(*arguments))
    return embeddings.features["encoder"][chosen.rows], chosen.labels


def _hits_of_scikit_learn(features: NDArray[np.float32], labels: NDArray[np.int64], k: int) -> int:
    """Images whose class the k nearest others predict, by cosine similarity and at a temperature of 0.07."""
    hits = 0
    for index in range(len(labels)):
        others = np.arange(len(labels)) != index
        classifier = KNeighborsClassifier(
            k, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07), algorithm="brute"
        ).fit(features[others], labels[others])
        hits += int(classifier.predict(features[index : index + 1])[0] == labels[index])
    return hits


def test_without_labels_there_is_one_colour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "TOKEN=abc"
    bare = replace(unlabelled(), features={secret: made().features["encoder"]})
    long = {"encoders": {secret: {"weights": "w" * 999, "step": 10**999}}, "data": secret + "d" * 9999}
    write_embeddings(tmp_path / "x.npz", replace(bare, settings=long))
    assert main(["tsne", str(tmp_path / "x.npz"), "images=20"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "20 images without labels, evenly spaced, of 40 images; 20 training and 0 test images."
    assert "kNN" not in printed[2]
    source = (tmp_path / "tsne.html").read_text()
    assert secret not in source
    (note,) = re.findall("<p>(ww[^<]*)</p>", source)
    assert len(note) < 60
    assert not re.search("w{400}|0{400}|d{400}", source)
    data = page_data(source)
    assert set(data["labels"]) == {0}
    assert data["classes"] == []
    assert data["thumbnails"] is None


def unlabelled() -> Embeddings:
    return replace(made(), labels=np.full(40, -1), classes=[], thumbnails=None)


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = np.ones((40, 8), np.float32)
    write_embeddings(tmp_path / "same.npz", replace(made(), features={"encoder": same}))
    (tmp_path / "file").touch()
    write_embeddings(tmp_path / "x.npz", made())
    write_embeddings(tmp_path / "one.npz", replace(made(), features={"encoder": made().features["encoder"][:, :1]}))
    for arguments, message in (
        (["same.npz"], "the features of encoder are equal, zero or too large"),
        (["one.npz"], "encoder has one feature per image"),
        (["missing.npz"], "missing.npz cannot be read"),
        (["missing.npz", f"output={tmp_path / 'file'}"], f"cannot write into {tmp_path / 'file'}: "),
        (["missing.npz", f"output={tmp_path / 'file' / 'in'}"], f"{tmp_path / 'file'} is a file; set another folder"),
        (["x.npz", "embeddings=[]"], "embeddings must name at least one file or run folder"),
    ):
        assert main(["tsne", str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_without_opentsne_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dmjd.explore.tsne.find_spec", lambda name: None)
    assert main(["tsne", str(tmp_path / "missing.npz")]) == 2
    assert "dmjd tsne needs openTSNE; pip install 'dmjd[explore]'" in capsys.readouterr().err


# The page in a browser ------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PLACES = np.array([[0, 0], [0, 1], [1, 1], [1, 0], [0.5, 0.5], [0.6, 0.5]])
"""Points of six images in the first panel; the second has them in the reverse order."""


def page_data(source: str) -> Any:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', source, re.DOTALL)
    return json.loads(data)


def small_page() -> str:
    return scatter_page(
        f"maps {HOSTILE}",
        [HOSTILE],
        [Panel(f"first {HOSTILE}", "note", PLACES), Panel("second", "", PLACES[::-1])],
        names=[f"image {index} {HOSTILE}" for index in range(6)],
        splits=["train"] * 3 + ["test"] * 3,
        labels=np.array([0, 0, 1, 1, 2, 2]),
        classes=["cat", HOSTILE, "dog"],
        thumbnails=[jpeg(index) for index in range(6)],
        order=np.arange(6),
        settings=[(HOSTILE, HOSTILE)],
        png=b"",
    )


def test_names_of_the_data_are_text_in_the_page() -> None:
    source = small_page()
    page = Page(source)
    assert len(page.attributes("img")) == 1
    assert len(page.attributes("script")) == 2
    assert page_data(source)["names"][3] == f"image 3 {HOSTILE}"
    assert "\u2028" not in "".join(re.findall("<script.*?</script>", source, re.DOTALL))
    (policy,) = (each["content"] for each in page.attributes("meta") if "http-equiv" in each)
    (script,) = re.findall("<script>(.*?)</script>", source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


DRIVER = """
addEventListener("load", () => setTimeout(() => {
  const found = {}, canvases = [...document.querySelectorAll("canvas")], card = document.querySelector("#card");
  const fire = (canvas, kind, x, y, more = {}) => {
    const box = canvas.getBoundingClientRect();
    const place = { clientX: box.x + x * box.width, clientY: box.y + y * box.height, cancelable: true, ...more };
    canvas.dispatchEvent(kind === "wheel" ? new WheelEvent(kind, place) : new PointerEvent(kind, place));
  };
  const shown = () => card.hidden ? null : [...card.querySelectorAll("span")].map(line => line.textContent);
  const at = ([x, y]) => [0.04 + 0.92 * x, 0.04 + 0.92 * (1 - y)];
  const ringed = (canvas, x, y) => {
    const side = canvas.width, radius = RADIUS + 5;
    const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, -Math.floor(x * side + radius), -Math.floor(y * side));
    const [red, green, blue, alpha] = copy.getImageData(0, 0, 1, 1).data;
    return alpha > 200 && red + green + blue < 250;  // the ink of the light scheme
  };
  const key = name => canvases[0].dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
  found.hover = PLACES.map(place => { fire(canvases[0], "pointermove", ...at(place)); return shown(); });
  found.second = PLACES.map(place => { fire(canvases[1], "pointermove", ...at(place)); return shown(); });
  fire(canvases[0], "pointermove", ...at(PLACES[1]));
  found.linked = PLACES.map(place => ringed(canvases[1], ...at(place)));
  fire(canvases[0], "pointermove", 0.3, 0.3);
  found.between = shown();
  fire(canvases[0], "wheel", 0.5, 0.5, { deltaY: -1000 * Math.log(2) / 2 });
  fire(canvases[0], "pointermove", 0.5 + 2 * 0.092, 0.5);
  found.zoomed = shown();
  key("0");
  document.querySelectorAll("[data-class]")[2].click();
  fire(canvases[0], "pointermove", ...at(PLACES[4]));
  found.toggled = shown();
  document.querySelector("[data-all='1']").click();
  key("ArrowLeft");
  key("ArrowRight");
  found.keys = document.querySelector("#announced").textContent;
  key("Enter");
  found.pinned = [...document.querySelectorAll(".pins li .name")].map(line => line.textContent);
  found.thumbnail = document.querySelector(".pins img").src;
  found.injected = document.querySelectorAll("[onerror]").length;
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = JSON.stringify(found);
}, 100));
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH")
def test_a_browser_shows_the_image_under_the_pointer_in_every_panel(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    source = small_page()
    driver = DRIVER.replace("PLACES", json.dumps(PLACES.tolist())).replace("RADIUS", str(page_data(source)["radius"]))
    digest = base64.b64encode(hashlib.sha256(driver.encode()).digest()).decode()
    source = source.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    (tmp_path / "page.html").write_text(source.replace("</body>", f"<script>{driver}</script></body>"))
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=900,900")
    light = ("--blink-settings=preferredColorScheme=1", "--virtual-time-budget=2000", "--dump-dom")
    command = [CHROMIUM, *quiet, f"--user-data-dir={tmp_path / 'profile'}", *light, (tmp_path / "page.html").as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in dumped.stderr
    found = json.loads(unescape(re.findall("<title>(.*?)</title>", dumped.stdout, re.DOTALL)[0]))
    kinds = ["cat, train", "cat, train", f"{HOSTILE}, train", f"{HOSTILE}, test", "dog, test", "dog, test"]
    lines = [[f"image {index} {HOSTILE}", kind] for index, kind in enumerate(kinds)]
    assert found["hover"] == lines
    assert found["second"] == lines[::-1]
    assert found["linked"] == [index == 4 for index in range(6)]  # image 1 is the fifth place of the second panel
    assert found["between"] is None
    assert found["zoomed"] == lines[5]
    assert found["toggled"] is None
    assert found["keys"] == ", ".join(lines[5])  # from the image in the middle, the next one at its right
    assert found["pinned"] == [lines[5][0]]
    assert found["thumbnail"] == "data:image/jpeg;base64," + base64.b64encode(jpeg(5)).decode()
    assert found["injected"] == 0
    assert found["overflow"] == 0
