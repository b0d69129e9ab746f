"""``dmjd demo`` with and without Fashion-MNIST, of which a few random images stand for the whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dmjd import demo
from dmjd.compose import from_yaml
from dmjd.config import PretrainConfig
from dmjd.data import build
from dmjd.errors import DataError
from tests.compare import checkpoints, rows

Command = Callable[..., tuple[int, str, str]]
Words = Callable[..., list[str]]

SCORES = re.compile(r"(kNN|linear probe) top-1: untrained [\d.]+ %, pre-trained [\d.]+ % \([+-][\d.]+ points\)")


def small(tiny: Words, run: Path, *more: str) -> list[str]:
    """The words of a tiny run that leave the choice of data and experiment open."""
    return [word for word in tiny(run, *more) if word not in ("experiment=demo", "data=digits")]


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, generator = tmp_path_factory.mktemp("fashion"), np.random.default_rng(0)
    for prefix, count in (("train", 300), ("t10k", 50)):
        for stem, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
            content = generator.integers(0, 10, shape, dtype=np.uint8).tobytes()
            (folder / f"{prefix}-{stem}-ubyte").write_bytes(header + content)
    return folder


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise DataError("Fashion-MNIST is nowhere")

    monkeypatch.setattr(build, "fashion_mnist_folder", nowhere)


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch, fashion: Path) -> None:
    monkeypatch.setattr(build, "fashion_mnist_folder", lambda: fashion)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROBE", {name: {**words, "epochs": 6} for name, words in demo.PROBE.items()})


def stored(run: Path) -> PretrainConfig:
    config: PretrainConfig = from_yaml(PretrainConfig, (run / "config.yaml").read_text())
    return config


def assert_complete(outcome: tuple[int, str, str], run: Path, data: str) -> None:
    code, out, error = outcome
    assert code == 0, error
    first, second, report = out.splitlines()
    assert SCORES.fullmatch(first)
    assert SCORES.fullmatch(second)
    assert report == str(run / "report.html")
    assert (run / "report.html").is_file()
    assert len(list((run / "evaluations").glob("*.json"))) == 4
    assert stored(run).data.name == data
    assert len([line for line in error.splitlines() if line.startswith("data=auto: using")]) == 1


@pytest.mark.usefixtures("absent")
def test_without_fashion_mnist_it_runs_on_digits_to_the_report(dmjd: Command, tiny: Words, tmp_path: Path) -> None:
    """make demo ended at kNN with train_images=10000 where there are 1437."""
    run = tmp_path / "run"
    assert_complete(dmjd("demo", *small(tiny, run)), run, "digits")
    assert not stored(run).data.flip, "the settings for digits"
    assert rows(run)[-1]["step"] == 11


@pytest.mark.usefixtures("present")
def test_with_fashion_mnist_it_runs_on_that(dmjd: Command, tiny: Words, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert_complete(dmjd("demo", *small(tiny, run)), run, "fashion_mnist")
    assert stored(run).data.flip
    assert rows(run)[-1]["step"] == 300 // 128


def test_a_run_on_digits_keeps_them_where_fashion_mnist_is_found(
    dmjd: Command, tiny: Words, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fashion: Path
) -> None:
    """A finished run of 11 steps went on at "step 11 of 468" once the package was installed."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    words = [word for word in tiny(run) if word != "data=digits"]
    before = (run / "log.jsonl").read_bytes()
    monkeypatch.setattr(build, "fashion_mnist_folder", lambda: fashion)
    assert dmjd("pretrain", *words)[0] == 0
    assert (run / "log.jsonl").read_bytes() == before
    assert "name: digits" in (run / "config.yaml").read_text()
    code, _, error = dmjd("pretrain", *words, "data=fashion_mnist")
    assert code == 2
    assert error.splitlines()[-1] == (
        f"error: run={run} was started with data.name=digits, and data.name=fashion_mnist is set now by "
        "data=fashion_mnist; leave data=fashion_mnist out, or name another folder"
    )


@pytest.mark.usefixtures("absent")
def test_a_run_that_auto_began_on_digits_goes_on_with_them(
    dmjd: Command, tiny: Words, finished_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    words = [word for word in tiny(run) if word != "data=digits"]
    assert dmjd("pretrain", *words, "data=auto")[0] == 0
    assert checkpoints(run) == [11]


def test_other_files_of_the_same_name_are_other_data(dmjd: Command, tiny: Words, tmp_path: Path, fashion: Path) -> None:
    """MNIST and Fashion-MNIST have the same names and counts."""
    root = Path(shutil.copytree(fashion, tmp_path / "root"))
    words = tiny(tmp_path / "run", "data=fashion_mnist", f"data.root={root}", "epochs=2")
    assert dmjd("pretrain", *words)[0] == 0
    images = root / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1] + b"\xff")
    code, _, error = dmjd("pretrain", *words)
    assert code == 2
    assert "the run was started with 300 images of fingerprint" in error.splitlines()[-1]


@pytest.mark.parametrize("data", ["auto", "fashion_mnist"])
def test_what_only_the_scores_need_is_missed_before_the_training(
    dmjd: Command, tiny: Words, tmp_path: Path, fashion: Path, data: str
) -> None:
    root, run = tmp_path / "root", tmp_path / "run"
    root.mkdir()
    for path in fashion.glob("train-*"):
        shutil.copy(path, root)
    code, _, error = dmjd("demo", *small(tiny, run, f"data={data}", f"data.root={root}"))
    assert code == 2
    assert f"neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte.gz is in {root}" in error.splitlines()[-1]
    assert not run.exists()
