"""Whole pages: charts, structure, self-containment, and how a browser shows them."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from dmjd.report import write_comparison, write_report
from tests.report.conftest import VIT_B
from tests.report.html_page import Page

MakeRun = Callable[..., Path]

GOLDEN = Path(__file__).parent / "golden" / "pattern.md"
SETTINGS = {"k": 20, "temperature": 0.07, "pooling": "mean", "train_images": 1437, "data": "digits, 32x32"}
CONFIG = {
    "data": {"name": "digits", "image_size": [32, 32]},
    "online_knn": {"neighbours": 20, "temperature": 0.07, "pooling": "mean", "train_images": 20000},
}

VIT_B_RUN = {"backbone": VIT_B, "target": {"name": "pixels", "norm": "patch"}}
"""A run with published rows, which make the widest tables."""


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    """A run with everything that a page shows."""
    judged = [("knn", "trained", 100, 70.0, SETTINGS), ("knn", "untrained", 0, 55.5, SETTINGS)]
    folder = make_run("run-1", curve=[(50, 60.0), (100, 70.0)], evaluations=judged, config=CONFIG)
    for path in (folder / "evaluations").iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chance": 10.0, "majority": 11.5}))
    (folder / "pictures").mkdir()
    description = PngImagePlugin.PngInfo()
    description.add_text("Description", "Shown in the scale of <the image>.")
    sheet = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 1000, 3), np.uint8))
    sheet.save(folder / "pictures" / "views.png", pnginfo=description)
    for repeated in ("loss", "masks"):  # the charts show the losses, and the picture above the mask of a single view
        Image.new("RGB", (10, 10)).save(folder / "pictures" / f"{repeated}.png")
    return folder


def stands_alone(source: str) -> bool:
    """Whether a page loads nothing and runs nothing."""
    page = Page(source)
    embedded = [link for link in page.links if not link.startswith("#")]
    return (
        all(link.startswith("data:") for link in embedded)
        and not re.search(r"://|@import|url\((?!#)|<script", source)
        and not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    )


def assert_accessible(page: Page) -> None:
    """Language, a skip link, names of tables and pictures, scopes of heads, and focus for all that scrolls."""
    assert page.attributes("html") == [{"lang": "en"}]
    (skip,) = page.attributes("a")
    assert skip["href"] in [f"#{each['id']}" for _, each in page.tags if "id" in each]
    assert all(each["scope"] in ("col", "row") for each in page.attributes("th"))
    assert len(page.attributes("caption")) == len(page.attributes("table")) > 0
    assert all(each["alt"] for each in page.attributes("img"))
    assert all("aria-hidden" in each or each["aria-label"] for each in page.attributes("svg"))
    wide = [each for each in page.attributes("div") if each.get("class") == "wide"]
    assert wide
    assert all((each["tabindex"], each["role"]) == ("0", "region") and each["aria-label"] for each in wide)


def test_the_golden_comparison_of_the_paper_is_the_same_bytes_each_time(
    pattern_runs: list[Path], tmp_path: Path
) -> None:
    first, second = (
        write_comparison(pattern_runs, baseline=pattern_runs[0], output=tmp_path / name) for name in ("one", "two")
    )
    assert first[0].read_text() == GOLDEN.read_text()
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert stands_alone(first[1].read_text())
    page = Page(first[1].read_text())
    assert_accessible(page)
    legend = [item for item in page.items if item.startswith("mae_dm_vit_base: ")]
    assert legend[1] == "mae_dm_vit_base: MAE +DM, mask.pattern block, epochs 400"


def test_a_run_page_has_its_scores_and_curves(run: Path) -> None:
    source = write_report(run).read_text()
    assert write_report(run).read_text() == source
    assert stands_alone(source)
    page = Page(source)
    assert_accessible(page)
    (head,) = (row for row in page.rows if row[0] == "Score")
    assert head == ["Score", "Trained", "Untrained", "Gain", "Majority", "Chance", "Step"]
    assert [row[1:] for row in page.scores()] == [["70.00", "55.50", "+14.50", "11.50", "10.00", "10000"]] * 2
    labels = [each["aria-label"] for each in page.attributes("svg") if each.get("role") == "img"]
    charts = ["Loss", "Online score", "Learning rate", "Gradient norm", "Throughput"]
    assert labels == [f"{chart} by step" for chart in charts]
    assert page.text.count("epoch") >= len(charts)  # an axis beside the steps
    for line in ("online kNN  70.00 %", "untrained  55.50 %", "majority  11.50 %", "chance  10.00 %"):
        assert line in page.items
    assert "Shown in the scale of <the image>." in page.text
    (shown,) = (link for link in page.links if link.startswith("data:image"))
    assert base64.b64decode(shown.partition(",")[2]) == (run / "pictures" / "views.png").read_bytes()


def test_a_long_log_is_a_small_chart_that_keeps_its_spike(make_run: MakeRun) -> None:
    folder = make_run("long")
    rows = [{"step": step, "epoch": step / 100, "loss": 1.0, "mim": 1.0} for step in range(1, 20001)]
    rows[12345] |= {"loss": 500.0, "mim": 500.0}
    rows[777] |= {"loss": 1e308, "mim": 1e308}  # of a run that diverged; no axis can show it
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_report(folder)
    assert path.stat().st_size < 150_000
    assert ">200<" in path.read_text()  # a tick of the axis that reaches the spike


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MEASURE = """<script>onload = () => parent.postMessage({overflow: document.documentElement.scrollWidth -
document.documentElement.clientWidth,
cut: [...document.querySelectorAll('figcaption, .key, .key li, p')].filter(e => e.scrollWidth > e.clientWidth + 1)
.length,
paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
empty: [...document.querySelectorAll('figure svg, img')].filter(e => e.getBoundingClientRect().height < 5).length}, '*')
</script></body>"""
COLLECT = """<body><script>let found = []; onmessage = event => { found.push(event.data);
document.title = JSON.stringify(found) }</script>"""
WHITE, BLACK = "rgb(255, 255, 255)", "rgb(13, 17, 23)"


def chromium(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    command = [CHROMIUM, *quiet, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def page_texts(pdf: bytes) -> list[bytes]:
    """The drawing operators of every page that Chromium printed."""
    objects = re.findall(rb"\n(\d+) 0 obj\n<<[^>]*?/FlateDecode[^>]*>> stream\n(.*?)\nendstream", pdf, re.DOTALL)
    streams = {number: zlib.decompress(content) for number, content in objects}
    return [streams[number] for number in re.findall(rb"/Type /Page\n.*?/Contents (\d+) 0 R", pdf, re.DOTALL)]


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH")
def test_a_browser_shows_pages_at_two_widths_in_two_schemes_and_on_paper(
    run: Path, make_run: MakeRun, make_finetune: MakeRun, tmp_path: Path
) -> None:
    def other(index: int) -> Path:
        name = f"an_experiment_with_a_long_name_{index}"
        return make_run(name, curve=[(50, 60.0 + index), (100, 65.0)], config=CONFIG | VIT_B_RUN | {"seed": index})

    runs = [run, *map(other, range(7))]
    tuned = write_report(make_finetune("tuned", init=str(runs[1])))
    for path in (write_report(run), tuned, write_comparison(runs, baseline=run)[1]):
        (path.parent / "measured.html").write_text(path.read_text().replace("</body>", MEASURE))
        frames = path.with_name("frames.html")  # a window is at least 500 pixels wide
        sizes = (f'<iframe src="measured.html" height="800" width="{width}"></iframe>' for width in (1400, 360))
        frames.write_text(COLLECT + "".join(sizes))
        for scheme, paper in (("--blink-settings=preferredColorScheme=1", WHITE), ("--force-dark-mode", BLACK)):
            arguments = (scheme, "--virtual-time-budget=3000", "--dump-dom", frames.as_uri())
            dumped = chromium(*arguments, folder=tmp_path)
            assert "CONSOLE" not in dumped.stderr
            found = json.loads(unescape(re.findall("<title>(.*?)</title>", dumped.stdout)[0]))
            assert len(found) == 2
            for each in found:
                assert (each["overflow"], each["cut"], each["empty"], each["paper"]) == (0, 0, 0, paper)
                assert each["ink"] != paper
        printed = tmp_path / "page.pdf"
        chromium("--force-dark-mode", f"--print-to-pdf={printed}", path.as_uri(), folder=tmp_path)
        drawn = page_texts(printed.read_bytes())
        assert drawn
        assert all(b"TJ" in page or b"Tj" in page for page in drawn)  # no blank page
