from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dmjd.errors import ConfigError, DataError
from dmjd.report import write_comparison
from tests.report.html_page import Page

pytestmark = pytest.mark.usefixtures("undrawn")

MakeRun = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]

GOLDEN = Path(__file__).parent / "golden" / "pattern.md"
PAPER_COLUMNS = ["Method", "m_patt", "Epoch", "ETE", "Ft.", "Gh.", "Speed-up"]
NAMES = ["comparison.md", "comparison.html", "convergence.png", "comparison.csv"]


def test_golden_table_has_the_papers_numbers() -> None:
    lines = [line for line in GOLDEN.read_text().split("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shown = [[row[head.index(title)] for title in PAPER_COLUMNS] for row in rows]
    assert shown == [
        ["MAE", "Uniform", "1600", "1600", "83.6", "227", "1x"],
        ["+DM", "Uniform", "800", "1600", "83.6", "127", "1.8x"],
        ["+DM", "Block-wise", "400", "800", "83.6", "70", "3.2x"],
    ]


def test_page_shows_the_table_of_the_markdown(pattern_runs: list[Path], tmp_path: Path) -> None:
    markdown, page, *_ = write_comparison(pattern_runs, baseline=pattern_runs[0], output=tmp_path / "out")
    parsed = Page(page.read_text())
    lines = [line for line in markdown.read_text().splitlines() if line.startswith("|") and "--" not in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert parsed.rows[: len(rows)] == rows


def test_without_a_baseline_there_is_no_speedup(pattern_runs: list[Path], tmp_path: Path) -> None:
    assert "Speed-up" not in write_comparison(pattern_runs)[0].read_text()


def test_output_lies_beside_the_runs(make_run: MakeRun, tmp_path: Path) -> None:
    assert write_comparison([make_run("a"), make_run("b")]) == [tmp_path / "comparison" / name for name in NAMES]
    apart = [make_run("x/runs/a"), make_run("x/other/b")]
    assert write_comparison(apart)[0] == tmp_path / "x" / "comparison" / "comparison.md"


def test_runs_of_one_name_are_told_apart_by_their_folders(make_run: MakeRun) -> None:
    markdown = write_comparison([make_run("first/run"), make_run("second/run")])[0].read_text()
    assert [line.split("|")[1].strip() for line in markdown.splitlines()[4:6]] == ["first/run", "second/run"]


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
    markdown, page, *_ = write_comparison(runs, baseline=runs[0])
    assert "<script" not in page.read_text()
    assert Page(page.read_text()).rows[1][1:3] == [evil, evil]
    assert "<script" not in markdown.read_text().replace(r"\<script", "")


def test_runs_that_logged_nothing_yet_are_rows_too(make_run: MakeRun) -> None:
    folders = [make_run("a"), make_run("b")]
    for folder in folders:
        for name in ("log", "timing"):
            (folder / f"{name}.jsonl").write_text("")
    rows = write_comparison(folders, baseline=folders[0])[0].read_text().splitlines()[4:6]
    cells = ["MAE", "Uniform", "1", *["-"] * 6, "- (no score)"]
    assert [[cell.strip() for cell in row.strip("|").split("|")][1:] for row in rows] == [cells, cells]


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
    assert out.splitlines()[-4:] == [str(tmp_path / "out" / name) for name in NAMES]
    assert "2x" in (tmp_path / "out" / "comparison.md").read_text()
    assert dmjd("report", str(a), str(b))[1].splitlines()[-4:] == [
        str(tmp_path / "comparison" / name) for name in NAMES
    ]
    code, out, err = dmjd("report", str(a), f"baseline={a}")
    assert (code, out) == (2, "")
    assert err.startswith("error: dmjd report takes one run folder, or several to compare")
    code, out, err = dmjd("report", str(a), str(b), "baseline=")
    assert (code, out) == (2, "")
    assert err.startswith("error: baseline= is not one of the runs")
