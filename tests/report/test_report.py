from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmjd.errors import ConfigError, DataError
from dmjd.report.page import write_report
from dmjd.report.run import read_run
from tests.report.html_page import Page

pytestmark = pytest.mark.usefixtures("undrawn")

CONFIG = """
epochs: 150
batch_size: 1024
method: {name: dmjd, mim_weight: 1.0}
backbone: {name: vit, patch_size: 16, embed_dim: 768, depth: 12}
mask: {views: 2, pattern: block, mask_ratio: 0.6, pred_ratio: null}
target: {name: hog}
data: {name: imagenet, image_size: [224, 192]}
"""
PROVENANCE = {
    "git_sha": "4f2a9be",
    "git_dirty": True,
    "torch": "2.11.0",
    "python": "3.11.9",
    "device": "H100 <SXM> & friends",
    "command": ["dmjd", "pretrain", "experiment=demo"],
    "started": "2025-01-01T10:00:00Z",
}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


TIMING = ("images_per_second", "data_wait_percent", "seconds")


def log_row(step: int, seconds: float) -> dict[str, Any]:
    row = {"step": step, "epoch": step / 8, "loss": 0.7, "mim": 0.6, "vis": 0.1, "lr": 1e-4, "grad_norm": 1.0}
    row |= {"m_corr": 30 / 49, "m_pred": 1.0, "images_per_second": 800.0 + step, "data_wait_percent": 0.5}
    return row | {"seconds": seconds}


def write_log(folder: Path, *rows: dict[str, Any]) -> None:
    """What mathematics decides into log.jsonl, what the machine decides into timing.jsonl."""
    log = [{key: value for key, value in row.items() if key not in TIMING} for row in rows]
    timing = [{key: value for key, value in row.items() if key in ("step", *TIMING)} for row in rows]
    for name, lines in (("log", log), ("timing", timing)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run-7"
    (path / "pictures").mkdir(parents=True)
    (path / "evaluations").mkdir()
    (path / "config.yaml").write_text(CONFIG)
    (path / "provenance.json").write_text(json.dumps(PROVENANCE))
    write_log(path, log_row(10, 100.0), log_row(20, 4000.0), log_row(37, 7380.0))
    return path


@pytest.fixture
def evaluate(folder: Path) -> Callable[..., None]:
    def write(verb: str, weights: str, step: int, top1: float, **settings: Any) -> None:
        values = {"verb": verb, "weights": weights, "step": step, "top1": top1, "settings": settings}
        count = len(list(folder.glob("evaluations/*.json")))
        (folder / "evaluations" / f"{count}.json").write_text(json.dumps(values))

    return write


def report(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_summary_states_every_number_of_the_run(folder: Path) -> None:
    pairs = report(folder).pairs()
    expected = {
        "Method": "DMJD",
        "Backbone": "vit, patch 16, width 768, depth 12",
        "Target": "hog",
        "Data": "imagenet",
        "Image size": "224 x 192",
        "Views K": "2",
        "Mask pattern": "block",
        "Corruption rate m_corr": "61.2 %",  # the true rate, 30 of 49 blocks, not the requested 60 %
        "Prediction rate m_pred": "100.0 %",
        "Unique batch": "1024 images, 2048 views",
        "Epochs": "150",
        "Effective training epochs": "2 x 150 = 300",
        "Steps": "37 (epoch 4.62)",
        "Images/s, median": "820.0",
        "Wall time": "2 h 03 min",
        "Device": "H100 <SXM> & friends",
    }
    assert {key: pairs[key] for key in expected} == expected


def test_details_state_provenance_and_the_configuration_as_written(folder: Path) -> None:
    page = report(folder)
    assert page.pairs()["git sha"] == "4f2a9be"
    assert page.pairs()["git dirty"] == "yes"
    assert page.pairs()["command"] == "dmjd pretrain experiment=demo"
    assert CONFIG in page.text


def test_a_log_that_still_holds_the_timings_reads_the_same(folder: Path) -> None:
    before = report(folder).pairs()
    (folder / "timing.jsonl").unlink()
    rows = [log_row(10, 100.0), log_row(20, 4000.0), log_row(37, 7380.0)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert report(folder).pairs() == before


def test_seconds_lie_on_a_line_between_logged_steps(folder: Path) -> None:
    run = read_run(folder)
    assert [run.seconds_at(step) for step in (0, 5, 10, 15, 20, 37, 90)] == [0, 50, 100, 2050, 4000, 7380, 7380]
    # A row without seconds tells nothing; from a step that was logged twice on, the later row counts.
    write_log(folder, log_row(10, 100.0), {"step": 15}, log_row(20, 3000.0), log_row(20, 4000.0))
    assert [read_run(folder).seconds_at(step) for step in (15, 20)] == [1550, 4000]
    write_log(folder)
    assert read_run(folder).seconds_at(10) is None


def test_the_clock_of_a_long_run_is_looked_up_and_not_walked(folder: Path) -> None:
    """Every row asks for its time: a walk through 100 000 rows for each of them took the better part of an hour."""
    write_log(folder, *({"step": step, "seconds": step / 2} for step in range(1, 1001)))
    run = read_run(folder)
    reads = 0

    class Counted(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal reads
            reads += 1
            return super().get(key, default)

    run.timing[:] = map(Counted, run.timing)
    assert [run.seconds_at(step) for step in range(1, 1001)] == [step / 2 for step in range(1, 1001)]
    assert reads <= 2000


def test_older_configuration_still_renders(folder: Path) -> None:
    (folder / "config.yaml").write_text("backbone: vit_tiny\nmask: 0.75\ndata: {image_size: 32}\n")
    write_log(folder, {"step": 5})
    pairs = report(folder).pairs()
    assert (pairs["Backbone"], pairs["Image size"], pairs["Steps"]) == ("vit_tiny", "32", "5")
    absent = ("Method", "Views K", "Effective training epochs", "Unique batch", "Images/s, median", "Wall time")
    assert {pairs[key] for key in absent} == {"-"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2 s"), (59.99, "1 min 00 s"), (90.5, "1 min 30 s"), (3599.6, "1 h 00 min")]
)
def test_wall_time_reads_well(folder: Path, seconds: float, text: str) -> None:
    write_log(folder, log_row(10, seconds / 2), log_row(20, seconds))
    assert report(folder).pairs()["Wall time"] == text


def test_resumed_run_started_when_it_was_first_launched(folder: Path) -> None:
    latest = PROVENANCE | {"started": "2025-01-03", "device": "cpu"}
    (folder / "provenance.json").write_text(json.dumps(latest | {"launches": [PROVENANCE, latest]}))
    page = report(folder)
    assert "Started 2025-01-01T10:00:00Z on H100 <SXM> & friends, launched 2 times" in page.text
    assert (page.pairs()["started"], page.pairs()["Device"]) == ("2025-01-03", "cpu")
    assert "launches" not in page.pairs()


def test_evaluations_are_compared_under_equal_verb_and_settings(folder: Path, evaluate: Callable[..., None]) -> None:
    evaluate("knn", "trained", 37, 61.25, k=20)
    evaluate("knn", "untrained", 0, 48.5, k=20)
    evaluate("linprobe", "untrained", 0, 70.0, epochs=50)
    evaluate("linprobe", "trained", 37, 69.5, epochs=50)
    evaluate("linprobe", "trained", 20, 70.75, epochs=50)
    evaluate("knn", "trained", 37, 60.0, k=5)
    evaluate("knn", "untrained", 0, 11.0, k=1)
    evaluate("knn", "ema", 37, 62.0, k=20)
    evaluate("linprobe", "trained", 37, 69.0, crop_ratio=[0.75, 4 / 3])
    assert report(folder).scores() == [
        ["k-nearest-neighbour top-1, %k 20", "61.25", "48.50", "+12.75", "37"],
        ["k-nearest-neighbour top-1, %moving average, k 20", "62.00", "48.50", "+13.50", "37"],
        ["linear-probing top-1, %epochs 50", "70.75", "70.00", "+0.75", "20"],
        ["linear-probing top-1, %epochs 50", "69.50", "70.00", "-0.50", "37"],
        ["k-nearest-neighbour top-1, %k 5", "60.00", "-", "-", "37"],
        ["k-nearest-neighbour top-1, %k 1", "-", "11.00", "-", "-"],
        ["linear-probing top-1, %crop_ratio 0.75 1.33333", "69.00", "-", "-", "37"],
    ]


def test_everything_is_escaped(folder: Path, evaluate: Callable[..., None]) -> None:
    evil = "<script>alert(1)<"
    renamed = folder.rename(folder.with_name(evil))
    (renamed / "config.yaml").write_text(f'method: "{evil}"\n')
    (renamed / "provenance.json").write_text(json.dumps({evil: evil, "device": evil, "started": evil}))
    (renamed / "pictures" / f"{evil}.png").write_bytes(PIXEL)
    values = {"verb": evil, "weights": "trained", "step": 3, "top1": 1.0, "settings": {evil: evil}}
    (renamed / "evaluations" / "a.json").write_text(json.dumps(values))
    source = write_report(renamed).read_text()
    assert "<script" not in source
    # Name (title, h1), method (line, summary), configuration, device (line, summary, provenance), started (line,
    # provenance), provenance key and value, picture, evaluation (verb, settings twice); in the table beside published
    # rows name, method and device, and in its note name and method.
    assert Page(source).text.count(evil) == 21


def test_report_is_replaced_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write_report(folder).read_text()

    def full_disk(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    write_log(folder, log_row(99, 1.0))
    with pytest.raises(ConfigError, match=r"^cannot write .*report\.html: No space left on device; "):
        write_report(folder)
    assert (folder / "report.html").read_text() == before
    assert not list(folder.glob(".*"))


def test_truncated_last_line_of_the_log_is_ignored(folder: Path) -> None:
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 38, "lo')
    assert [row["step"] for row in read_run(folder).rows] == [10, 20, 37]


def test_log_cut_inside_a_character_is_ignored_too(folder: Path) -> None:
    with (folder / "log.jsonl").open("ab") as log:
        log.write('{"step": 38, "note": "é'.encode()[:-1])
    assert [row["step"] for row in read_run(folder).rows] == [10, 20, 37]


def test_log_without_a_step_is_a_run_that_just_started(folder: Path) -> None:
    write_log(folder)
    assert read_run(folder).rows == []
    pairs = report(folder).pairs()
    assert (pairs["Views K"], pairs["Steps"], pairs["Wall time"]) == ("2", "-", "-")


@pytest.mark.parametrize("name", ["config.yaml", "provenance.json", "log.jsonl"])
def test_half_written_folder_names_the_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"not a complete run folder: it has no {name}$"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^no run folder at .*nowhere$"):
        write_report(tmp_path / "nowhere")


SCORE = '{"verb": "knn", "step": 3, "top1": 61.2, "weights": "trained"}'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "mask: {views: 2", r"config\.yaml is damaged: [^\n]+$"),
        ("config.yaml", "", r"config\.yaml must hold a mapping of names to values, found NoneType$"),
        ("provenance.json", '{"git_sha": ', r"provenance\.json is damaged: [^\n]+$"),
        ("log.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', r"log\.jsonl is damaged in line 2: [^\n]+$"),
        ("timing.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', r"timing\.jsonl is damaged in line 2: [^\n]+$"),
        ("log.jsonl", '{"loss": 1}\n', r"log\.jsonl must hold rows with a step, line 1 has none$"),
        ("log.jsonl", "[1]\n", r"log\.jsonl must hold one JSON object a line, line 1 is list$"),
        ("evaluations/a.json", '{"verb": "knn", "step": 3}', r"a\.json is not an evaluation: it lacks weights, top1$"),
        (
            "evaluations/a.json",
            '{"verb": "knn", "step": 3, "top1": 1.0, "weights": "best"}',
            r"a\.json has weights=best; it must be trained, untrained or ema$",
        ),
        (
            "evaluations/a.json",
            SCORE.replace("61.2", '"61.2"'),
            r"a\.json has top1=61\.2; it must be a finite number$",
        ),
        (
            "evaluations/a.json",
            SCORE.replace("61.2", "NaN"),
            r"a\.json has top1=nan; it must be a finite number$",
        ),
        ("evaluations/a.json", SCORE.replace("3,", "null,"), r"a\.json has step=None; it must be a whole number$"),
        ("evaluations/a.json", SCORE.replace('"knn"', "[1]"), r"a\.json has verb=\[1\]; it must be a name$"),
        (
            "evaluations/a.json",
            SCORE.replace("}", ', "settings": "k=20"}'),
            r"a\.json has settings=k=20; it must be a mapping of names to values$",
        ),
    ],
)
def test_damaged_file_is_one_sentence(folder: Path, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_run(folder)


@pytest.mark.parametrize("key", ["seconds", "training_seconds", "images_per_second"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_time_that_is_no_number_is_a_dash(folder: Path, key: str, value: str) -> None:
    timing = folder / "timing.jsonl"
    rows = [json.loads(line) for line in timing.read_text().splitlines()]
    for row in rows:
        row[key] = float(value.lower())
    timing.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Wall time" in write_report(folder).read_text()


def test_a_whole_number_of_400_digits_is_damage(folder: Path) -> None:
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 100000, "loss": 1%s}\n{"step": 100001}\n' % ("0" * 400))
    with pytest.raises(DataError, match="it must be a number"):
        write_report(folder)


def test_the_page_sums_up_where_the_time_went(folder: Path) -> None:
    accounts = {"training": 90.0, "start": 5.0, "data": 3.0, "checkpoint": 2.0, "evaluate": 0.0, "lost": 0.0}
    row = {"step": 11, "seconds": 100.0, **{f"{name}_seconds": spent for name, spent in accounts.items()}}
    (folder / "timing.jsonl").write_text(json.dumps(row) + "\n")
    text = write_report(folder).read_text()
    assert "90.0 %: 1 min 30 s training, 5.0 s start-up and compilation, 3.0 s waiting for data, 2.0 s waiting" in text
    assert "lost to crashes" not in text
