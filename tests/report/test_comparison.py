from __future__ import annotations

import io
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dmjd.errors import ConfigError, DataError
from dmjd.report import write_comparison

MakeRun = Callable[..., Path]
Judged = tuple[str, str, float, float, dict[str, Any]]
Command = Callable[..., tuple[int, str, str]]

GOLDEN = Path(__file__).parent / "golden" / "pattern.md"
PAPER_COLUMNS = ["Method", "m_patt", "Epoch", "ETE", "Ft.", "Gh.", "Speed-up"]
NAMES = ["comparison.md", "comparison.html", "convergence.png"]


@pytest.fixture
def pattern_runs(make_run: MakeRun) -> list[Path]:
    """Runs with the numbers of the paper's table of masking patterns, all to a fine-tuning accuracy of 83.6 %."""

    def row(name: str, epochs: int, hours: float, views: int, pattern: str, rates: tuple[float, float]) -> Path:
        judged: list[Judged] = [("finetune", "trained", epochs, 83.6, {})]
        return make_run(name, views=views, pattern=pattern, epochs=epochs, hours=hours, rates=rates, evaluations=judged)

    return [
        row("mae_vit_base", 1600, 227, 1, "uniform", (147 / 196, 147 / 196)),
        row("mae_dm_uniform_vit_base", 800, 127, 2, "uniform", (147 / 196, 1.0)),
        row("mae_dm_vit_base", 400, 70, 2, "block", (30 / 49, 1.0)),
    ]


def test_golden_table_of_the_paper(pattern_runs: list[Path], tmp_path: Path) -> None:
    markdown = write_comparison(pattern_runs, baseline=pattern_runs[0], output=tmp_path / "out")[0].read_text()
    assert markdown == GOLDEN.read_text()


def test_golden_table_has_the_papers_numbers() -> None:
    lines = [line for line in GOLDEN.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shown = [[row[head.index(title)] for title in PAPER_COLUMNS] for row in rows]
    assert shown == [
        ["MAE", "Uniform", "1600", "1600", "83.6", "227", "1x"],
        ["+DM", "Uniform", "800", "1600", "83.6", "127", "1.8x"],
        ["+DM", "Block-wise", "400", "800", "83.6", "70", "3.2x"],
    ]


class Tables(HTMLParser):
    """Cells of every table row, every list item, the linked sources, and the balance of the tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.items: list[str] = []
        self.sources: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "li":
            self.items.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "li":
            self.items[-1] += data


def test_page_shows_the_table_of_the_markdown_and_stands_alone(pattern_runs: list[Path], tmp_path: Path) -> None:
    markdown, page, picture = write_comparison(pattern_runs, baseline=pattern_runs[0], output=tmp_path / "out")
    text = page.read_text()
    tables = Tables(text)
    lines = [line for line in markdown.read_text().splitlines() if line.startswith("|")]
    del lines[1]
    assert tables.rows == [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(tables.items) == markdown.read_text().count("\n- ")
    (source,) = tables.sources
    assert source.startswith("data:image/png;base64,")
    assert "://" not in text
    assert "url(" not in text
    assert Image.open(io.BytesIO(picture.read_bytes())).format == "PNG"


def test_the_same_runs_give_the_same_bytes(pattern_runs: list[Path], tmp_path: Path) -> None:
    first, second = (write_comparison(pattern_runs, output=tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_without_a_baseline_there_is_no_speedup(pattern_runs: list[Path], tmp_path: Path) -> None:
    assert "Speed-up" not in write_comparison(pattern_runs)[0].read_text()


def test_output_lies_beside_the_runs(make_run: MakeRun, tmp_path: Path) -> None:
    assert write_comparison([make_run("a"), make_run("b")]) == [tmp_path / "comparison" / name for name in NAMES]
    apart = [make_run("x/runs/a"), make_run("x/other/b")]
    assert write_comparison(apart)[0] == tmp_path / "x" / "comparison" / "comparison.md"


def test_runs_of_one_name_are_told_apart_by_their_folders(make_run: MakeRun) -> None:
    markdown = write_comparison([make_run("first/run"), make_run("second/run")])[0].read_text()
    assert [line.split("|")[-2].strip() for line in markdown.splitlines()[4:6]] == ["first/run", "second/run"]


def test_everything_is_escaped(make_run: MakeRun) -> None:
    evil = "<script>alert(1)<"
    settings = {evil: evil}
    runs = [
        make_run(
            f"{evil}{index}",
            method=evil,
            pattern=evil,
            launches=[(f"{evil} device {index}", 8)],
            evaluations=[(evil, "trained", 100, 60.0, settings)],
        )
        for index in range(2)
    ]
    markdown, page, _ = write_comparison(runs, baseline=runs[0])
    assert "<script" not in page.read_text()
    assert Tables(page.read_text()).rows[1][:2] == [evil, evil]
    assert "<script" not in markdown.read_text().replace(r"\<script", "")


def test_a_name_may_hold_what_matplotlib_reads_as_mathematics(make_run: MakeRun) -> None:
    runs = [make_run("_hidden $\\frac{$", curve=[(1, 2.0)]), make_run("a" * 200, curve=[(1, 2.0)])]
    assert write_comparison(runs, baseline=runs[0])[2].stat().st_size > 0


def test_runs_that_logged_nothing_yet_are_rows_too(make_run: MakeRun) -> None:
    folders = [make_run("a"), make_run("b")]
    for folder in folders:
        for name in ("log", "timing"):
            (folder / f"{name}.jsonl").write_text("")
    rows = write_comparison(folders, baseline=folders[0])[0].read_text().splitlines()[4:6]
    head = ["MAE", "Uniform", "1", *["-"] * 6, "- (no score)"]
    assert [[cell.strip() for cell in row.strip("|").split("|")][:-1] for row in rows] == [head, head]


def test_mistakes_are_one_sentence_and_leave_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    a, b = make_run("a"), make_run("b")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"^.*/none is not a complete run folder: it has no config.yaml$"):
        write_comparison([a, tmp_path / "none"])
    with pytest.raises(DataError, match=r"^no run folder at .*/nowhere$"):
        write_comparison([a, tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=rf"^baseline=c is not one of the runs; choose from {a}, {b}$"):
        write_comparison([a, b], baseline="c")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/b/\.\./a is listed twice; list every run once$"):
        write_comparison([a, b, f"{tmp_path}/b/../a"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^cannot write to .*/file/x: Not a directory; set another folder"):
        write_comparison([a, b], output=tmp_path / "file" / "x")
    (a / "provenance.json").write_text(json.dumps({"device": "A100", "world_size": 0}))
    with pytest.raises(DataError, match=r"^a/provenance\.json has world_size=0"):
        write_comparison([a, b])
    assert not (tmp_path / "comparison").exists()


def test_command_line(dmjd: Command, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    a, b = make_run("a", curve=[(50, 60.0)]), make_run("b", curve=[(25, 60.0)])
    code, out, err = dmjd("report", str(a), str(b), "baseline=~/a", "output=~/out")
    assert (code, err) == (0, "")
    assert out.splitlines() == [str(tmp_path / "out" / name) for name in NAMES]
    assert "2x" in (tmp_path / "out" / "comparison.md").read_text()
    assert dmjd("report", str(a), str(b))[1].splitlines() == [str(tmp_path / "comparison" / name) for name in NAMES]
    code, out, err = dmjd("report", str(a), f"baseline={a}")
    assert (code, out) == (2, "")
    assert err.startswith("error: dmjd report takes one run folder, or several to compare")
    code, out, err = dmjd("report", str(a), str(b), "baseline=")
    assert (code, out) == (2, "")
    assert err.startswith("error: baseline= is not one of the runs")
