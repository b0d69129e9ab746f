"""Nearest neighbours, near duplicates, and their page."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from base64 import b64encode
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import NearestNeighbors

from dmjd.explore import neighbours
from dmjd.explore.embeddings import Embeddings, write_embeddings
from dmjd.explore.neighbours import named_queries, near_duplicates, nearest, spaced_queries
from tests.report.html_page import Page
from tests.report.test_pages import (
    BLACK,
    CHROMIUM,
    COLLECT,
    MEASURE,
    WHITE,
    assert_accessible,
    chromium,
    page_texts,
    stands_alone,
)

Command = Callable[..., tuple[int, str, str]]

CPU = torch.device("cpu")
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\"' & a/b.jpg"


def features(count: int, dim: int = 12, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


# The search -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[None, 500], ids=["one block", "blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(neighbours, "_PER_BLOCK", request.param)


@pytest.mark.usefixtures("blocks")
def test_neighbours_are_those_of_scikit_learn() -> None:
    values, queries, k = features(203), [0, 7, 202, 7, 90], 9
    found = nearest(values, queries, k)
    oracle = NearestNeighbors(n_neighbors=k + 1, metric="cosine", algorithm="brute").fit(values.astype(np.float64))
    distances, rows = oracle.kneighbors(values[queries].astype(np.float64))
    assert (rows[:, 0] == queries).all()
    assert (found.rows == rows[:, 1:]).all()
    np.testing.assert_allclose(found.similarities, 1 - distances[:, 1:], atol=1e-6)


@pytest.mark.usefixtures("blocks")
def test_equal_images_follow_each_other_by_row_and_a_row_of_zeros_is_like_none() -> None:
    values = features(60)
    values[[11, 31, 59]] = values[4]
    values[20] = 0
    found = nearest(values, [31, 20], 58)
    assert found.rows[0, :3].tolist() == [4, 11, 59]
    assert found.similarities[0, :3].tolist() == [1, 1, 1]
    assert found.similarities[0, 3] < 1
    assert found.rows[1].tolist() == [row for row in range(60) if row != 20][:58]
    assert not found.similarities[1].any()


@pytest.mark.usefixtures("blocks")
def test_near_duplicates_are_all_pairs_of_a_loop() -> None:
    values = features(150, dim=4)
    values[[60, 149]] = 2 * values[3]
    unit = [row / math.sqrt(float(row @ row)) for row in values.astype(np.float64)]
    every = [(float(unit[one] @ unit[other]), one, other) for one in range(150) for other in range(one + 1, 150)]
    expected = sorted((-round(value, 6), one, other) for value, one, other in every if value >= 0.95)
    found = near_duplicates(values, 0.95, CPU)
    assert found.rows[:3].tolist() == [[3, 60], [3, 149], [60, 149]]
    assert sorted(map(tuple, found.rows.tolist())) == sorted((one, other) for _, one, other in expected)
    assert found.total == len(expected) > 50
    np.testing.assert_allclose(found.similarities, [-value for value, _, _ in expected], atol=2e-6)
    few = near_duplicates(values, 0.95, CPU, most=20)
    assert (few.rows.tolist(), few.total) == (found.rows[:20].tolist(), found.total)
    assert len(near_duplicates(values[:3], 0.9999, CPU).rows) == 0


@pytest.mark.gpu
def test_a_gpu_finds_the_same_near_duplicates() -> None:
    values = features(3000, dim=8)
    values[[60, 149]] = 2 * values[3]
    found, expected = (near_duplicates(values, 0.98, torch.device(device)) for device in ("cuda", "cpu"))
    assert (found.rows[:3] == expected.rows[:3]).all()
    assert abs(found.total - expected.total) <= 2  # similarities at the limit
    np.testing.assert_allclose(found.similarities[:100], expected.similarities[:100], atol=2e-6)


@pytest.mark.parametrize(
    ("count", "of_each"), [(1, [0, 0, 1, 0]), (3, [1, 0, 1, 1]), (8, [2, 2, 2, 2]), (22, [7, 2, 7, 6])]
)
def test_queries_are_spaced_evenly_over_classes_and_within_each(count: int, of_each: list[int]) -> None:
    labels = np.array([5] * 30 + [-1] * 7 + [0] * 31 + [2] * 2 + [9] * 12)
    found = spaced_queries(labels, count)
    assert [sum(labels[row] == label for row in found) for label in (0, 2, 5, 9)] == of_each
    assert len(set(found)) == len(found) == sum(of_each)
    for label in (0, 5, 9):
        gaps = np.diff([row for row in found if labels[row] == label])
        assert not len(gaps) or np.ptp(gaps) <= 1
    assert spaced_queries(np.full(50, -1), 5) == [5, 15, 25, 35, 45]


def test_a_query_is_named_by_the_end_of_its_name() -> None:
    names = ["a/1.jpg", "b/1.jpg", "b/21.jpg", "c.jpg"]
    assert named_queries(names, ["b/1.jpg", "21.jpg", "photos/c.jpg", "./a/1.jpg"]) == [1, 2, 3, 0]
    for text, fault in (("1.jpg", r"is the end of 2 names \(a/1.jpg, b/1.jpg\); give more"), ("b/2.jpg", "b/21.jpg$")):
        with pytest.raises(ValueError, match=fault):
            named_queries(names, [text])


# The command ----------------------------------------------------------------------------------------------------------


def jpeg(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (12, 8), shade).save(file, "JPEG")
    return file.getvalue()


def embeddings(count: int = 36, **changed: Any) -> Embeddings:
    """Three classes; an encoder that separates most images, and one that does not. Rows 1 and 4 are equal."""
    labels = np.arange(count) % 3
    good = (6 * np.eye(3)[labels] + 2 * features(count, 3)).astype(np.float32)
    bad = features(count, 5, seed=1)
    good[4], bad[4] = good[1], bad[1]
    names = [f"{'abc'[label]}/{number}.jpg" for number, label in enumerate(labels)]
    names[0] = HOSTILE
    values: dict[str, Any] = {
        "names": names,
        "ids": np.arange(count),
        "splits": np.array(["train", "test"])[(np.arange(count) >= 24).astype(int)],
        "labels": labels,
        "classes": ["a", HOSTILE, "c"],
        "features": {"good": good, f"bad {HOSTILE}": bad},
        "thumbnails": [jpeg(5 * number) for number in range(count)],
        "settings": {"encoders": {"good": {"weights": "trained", "step": 7, "pooling": 9 * HOSTILE}, "bad": None}},
    }
    return Embeddings(**values | changed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "e.npz"
    write_embeddings(path, embeddings())
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_the_page_and_the_tables_hold_the_same_neighbours(file: Path, dmjd: Command, tmp_path: Path) -> None:
    code, out, error = dmjd("neighbours", str(file), "queries=6", "neighbours=4")
    assert code == 0, error
    names = ["neighbours.html", "neighbours.csv", "duplicates.csv"]
    assert out.splitlines()[-3:] == [str(tmp_path / name) for name in names]
    source, rows = (tmp_path / names[0]).read_text(), rows_of(tmp_path / names[1])
    assert stands_alone(source)
    page = Page(source)
    assert_accessible(page)
    assert not {"script", "iframe", "object", "form", "video"} & {tag for tag, _ in page.tags}
    assert all(link.startswith(("data:", "#")) for link in page.links)
    shown = {each["href"]: each["id"] for each in page.attributes("image")}
    assert set(shown) <= {f"data:image/jpeg;base64,{b64encode(jpeg(5 * row)).decode()}" for row in range(36)}
    assert {each["href"] for each in page.attributes("use")} == {f"#{name}" for name in shown.values()}
    assert len(page.attributes("image")) == len(shown)  # each once
    whole, agreeing = embeddings(), 0
    for name, values in whole.features.items():
        own = [row for row in rows if row["encoder"] == name]
        queries = [whole.names.index(row["query"]) for row in own[::4]]
        assert queries == spaced_queries(whole.labels, 6)
        found = nearest(values, queries, 4)
        assert [whole.names.index(row["name"]) for row in own] == found.rows.ravel().tolist()
        assert [float(row["similarity"]) for row in own] == pytest.approx(found.similarities.ravel().tolist(), abs=1e-6)
        assert [row["rank"] for row in own] == ["1", "2", "3", "4"] * 6
        agree = sum(row["label"] == row["query_label"] for row in own)
        agreeing += agree
        (line,) = (row for row in page.rows if row[0] == name)
        assert line[3] == f"{100 * agree / 24:.1f} %"
        assert line[2] in next(text for text in out.splitlines() if text.startswith(f"{name}: "))
    assert page.rows[1][1].startswith("3 dimensions, trained, step 7, pooling </s")
    assert len(page.rows[1][1]) < 80
    assert len(rows) == 2 * 6 * 4
    kinds = [each.get("class") for each in page.attributes("figure")]
    assert (kinds.count("tile agrees"), kinds.count("tile differs")) == (agreeing, len(rows) - agreeing)
    assert [kinds.count("tile query"), page.text.count("✓")] == [6, agreeing + 1]
    same = [row for row in rows_of(tmp_path / names[2]) if row["similarity"] == "1.000000"]
    assert [(row["name"], row["other"]) for row in same] == [("b/1.jpg", "b/4.jpg")] * 2
    assert dmjd("neighbours", str(file), "queries=6", "neighbours=4")[0] == 0
    assert (tmp_path / "neighbours.html").read_text() == source


def test_the_accuracy_leaves_each_image_out(file: Path, dmjd: Command) -> None:
    """The oracle: one image and one vote at a time."""
    whole, k = embeddings(), 36 // (4 * 3)
    _, out, _ = dmjd("neighbours", str(file))
    for name, values in whole.features.items():
        unit = [row / math.sqrt(float(row @ row)) for row in values.astype(np.float64)]
        hits = 0
        for one in range(36):
            near = sorted((-float(unit[one] @ unit[other]), other) for other in range(36) if other != one)[:k]
            votes = [sum(math.exp(-value / 0.07) for value, other in near if other % 3 == label) for label in range(3)]
            hits += int(np.argmax(votes)) == one % 3
        assert f"{name}: leave-one-out kNN top-1 {100 * hits / 36:.1f} % (k 3, 36 images)" in out


def test_splits_names_and_unlabelled_images_are_chosen(file: Path, dmjd: Command, tmp_path: Path) -> None:
    assert dmjd("neighbours", str(file), "split=test", "neighbours=2", "duplicates=null")[0] == 0
    found = rows_of(tmp_path / "neighbours.csv")
    assert {int(re.findall(r"\d+", row["name"])[0]) for row in found} <= set(range(24, 36))
    assert not (tmp_path / "duplicates.csv").exists()
    assert dmjd("neighbours", str(file), "query=[a/3.jpg,35.jpg]", f"output={tmp_path / 'out'}")[0] == 0
    found = rows_of(tmp_path / "out" / "neighbours.csv")
    assert list(dict.fromkeys(row["query"] for row in found)) == ["a/3.jpg", "c/35.jpg"]
    write_embeddings(file, embeddings(labels=np.full(36, -1), classes=[]))
    code, out, _ = dmjd("neighbours", str(file))
    assert code == 0
    assert "36 images without labels (24 training, 12 test); 20 queries, evenly spaced," in out
    assert "leave-one-out kNN top-1 - (no labels)" in out
    assert "✓" not in (tmp_path / "neighbours.html").read_text()


def test_few_images_have_all_others_as_neighbours(tmp_path: Path, dmjd: Command) -> None:
    write_embeddings(tmp_path / "e.npz", embeddings(splits=np.array(["train"] * 33 + ["test"] * 3)))
    code, out, error = dmjd("neighbours", str(tmp_path / "e.npz"), "split=test")
    assert code == 0, error
    assert "3 queries, evenly spaced over the classes, each with its 2 nearest neighbours" in out
    queries = {row["query"] for row in rows_of(tmp_path / "neighbours.csv") if row["encoder"] == "good"}
    assert len(rows_of(tmp_path / "neighbours.csv")) == 2 * len(queries) * 2


def test_errors_are_one_line(file: Path, dmjd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    write_embeddings(file.parent / "bare.npz", embeddings(thumbnails=None))
    write_embeddings(file.parent / "one.npz", embeddings(splits=np.array(["train"] * 35 + ["test"])))
    for words, fault in (
        (["e.npz", "neighbours=36"], "neighbours=36 must be less than the number of images, 36"),
        (["e.npz", "split=test", "neighbours=12"], "must be less than the number of images of split=test, 12"),
        (["one.npz", "split=test"], "there is 1 image of split=test, and neighbours need at least 2; embed more"),
        (["e.npz", "query=b/99.jpg"], "query=b/99.jpg is not among the images of the file; the closest name is b/"),
        (
            ["e.npz", "query=a/3.jpg", "split=test", "neighbours=2"],
            "query=a/3.jpg is not among the images of split=test of the file; the closest name is a/",
        ),
        (["e.npz", "output=e.npz"], "cannot write into e.npz: e.npz is a file; set another folder with output=FOLDER"),
        (["e.npz", "duplicates=1.5"], "duplicates must be above 0 and at most 1, got 1.5"),
        (
            ["e.npz", "queries=900", "neighbours=20"],
            "queries=900 times neighbours=20 must be at most 10,000, the limit",
        ),
        (["bare.npz"], "bare.npz has no thumbnails, which the page shows; write it again with dmjd embed thumbnail=64"),
    ):
        code, _, error = dmjd("neighbours", *words)
        assert (code, error.count("\n")) == (2, 1)
        assert fault in error
    assert sorted(path.name for path in file.parent.iterdir()) == ["bare.npz", "e.npz", "one.npz"]


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH")
def test_a_browser_shows_the_page_at_two_widths_in_two_schemes(file: Path, dmjd: Command, tmp_path: Path) -> None:
    assert dmjd("neighbours", str(file))[0] == 0
    page = (tmp_path / "neighbours.html").read_text()
    (tmp_path / "measured.html").write_text(page.replace("</body>", MEASURE))
    frames = tmp_path / "frames.html"
    sizes = (f'<iframe src="measured.html" height="800" width="{width}"></iframe>' for width in (1400, 360))
    frames.write_text(COLLECT + "".join(sizes))
    for scheme, paper in (("--blink-settings=preferredColorScheme=1", WHITE), ("--force-dark-mode", BLACK)):
        dumped = chromium(scheme, "--virtual-time-budget=3000", "--dump-dom", frames.as_uri(), folder=tmp_path)
        assert "CONSOLE" not in dumped.stderr
        found = json.loads(unescape(re.findall("<title>(.*?)</title>", dumped.stdout)[0]))
        assert len(found) == 2
        for each in found:
            assert (each["overflow"], each["cut"], each["empty"], each["paper"]) == (0, 0, 0, paper)
    printed = tmp_path / "page.pdf"
    chromium("--force-dark-mode", f"--print-to-pdf={printed}", (tmp_path / "neighbours.html").as_uri(), folder=tmp_path)
    drawn = page_texts(printed.read_bytes())
    assert len(drawn) > 1
    assert all(b"TJ" in page or b"Tj" in page for page in drawn)  # no blank page
