"""The GPU tests ran on this code and passed. They need a card, so what stands here is their record."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_record", ROOT / "tests" / "gpu_record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_record = load()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in gpu_record.HASHED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def written(checkout: Path, **changes: Any) -> Path:
    facts = {
        "card": "Card",
        "date": "2020-01-01",
        "sha256": gpu_record.fingerprint(checkout),
        "tests": {"a": "passed", "b": "skipped: needs two CUDA devices"},
    }
    path = checkout / "record.json"
    path.write_text(json.dumps(facts | changes))
    return path


def test_the_gpu_tests_passed_on_this_code(gpu_tests: list[str]) -> None:
    wrong = gpu_record.complaint(expected=gpu_tests)
    assert wrong is None, wrong


def test_a_good_record_is_accepted(checkout: Path) -> None:
    assert gpu_record.complaint(written(checkout), checkout, ["a", "b"], judged="") is None


@pytest.mark.parametrize("change", ["edit", "add", "rename", "remove"])
def test_any_change_of_the_sources_makes_the_record_stale(checkout: Path, change: str) -> None:
    path, kernel = written(checkout), checkout / "csrc" / "ops" / "cuda" / "philox.cu"
    if change == "edit":
        kernel.write_text(kernel.read_text() + "\n")
    elif change == "add":
        (checkout / "dmjd" / "ops" / "more.py").touch()
    elif change == "rename":
        kernel.rename(kernel.with_name("other.cu"))
    else:
        kernel.unlink()
    assert gpu_record.complaint(path, checkout) == (
        "csrc/ or dmjd/ops changed since the GPU tests ran on Card (2020-01-01): "
        "on a machine with a card run `python tests/gpu_record.py` and commit benchmarks/results/gpu_tests.json"
    )


def test_built_files_do_not_count(checkout: Path) -> None:
    path = written(checkout)
    (checkout / "dmjd" / "ops" / "__pycache__").mkdir()
    (checkout / "dmjd" / "ops" / "__pycache__" / "_lib.pyc").touch()
    assert gpu_record.complaint(path, checkout, judged="") is None


@pytest.mark.parametrize(
    ("tests", "sentence"),
    [
        ({"f::a": "passed", "f::b": "failed"}, "on Card 1 of 2 GPU tests failed, such as f::b: on a machine"),
        ({"f::b": "passed"}, "1 GPU tests have no recorded outcome, such as f::a: on a machine"),
        ({"f": "failed", "f::b": "passed"}, "1 GPU tests have no recorded outcome, such as f::a: on a machine"),
        ({"f::a": "skipped: no card"}, "no GPU test has run on Card: on a machine"),
    ],
)
def test_a_record_that_proves_nothing_is_refused(checkout: Path, tests: dict[str, str], sentence: str) -> None:
    assert gpu_record.complaint(written(checkout, tests=tests), checkout, ["f::a"], judged="").startswith(sentence)
    assert gpu_record.complaint(written(checkout, tests=tests | {"tests/ops/x.py::c": "passed"}), checkout) is None


def test_without_a_record_the_command_that_makes_one_is_named(checkout: Path) -> None:
    assert "`python tests/gpu_record.py`" in gpu_record.complaint(checkout / "nothing.json", checkout)


def test_the_recorder_keeps_the_worst_of_every_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def breaks_late():
            yield
            raise RuntimeError

        def test_good(): pass
        def test_bad(): assert False
        def test_late(breaks_late): pass
        @pytest.mark.skip(reason="one card")
        def test_skipped(): pass
        """
    )
    recorder = gpu_record.Recorder()
    pytester.inline_run("-p", "no:cacheprovider", plugins=[recorder])
    assert {name.split("::")[1]: outcome for name, outcome in recorder.outcomes.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_late": "failed",
        "test_skipped": "skipped: one card",
    }


def test_warnings_of_torch_about_itself_are_no_failures_and_ours_are() -> None:
    """The filters of pyproject.toml: torch 2.11 warns of torch.jit while its compiler is imported."""
    for kind in (DeprecationWarning, FutureWarning):
        for module in ("torch", "torch.jit._script"):
            warnings.warn_explicit("`torch.jit.script_method` is deprecated.", kind, "_script.py", 362, module=module)
        for module in ("dmjd.ops.masks", "torchvision.ops", "tests.ops.test_masks"):
            with pytest.raises(kind):
                warnings.warn_explicit("deprecated", kind, "masks.py", 1, module=module)
