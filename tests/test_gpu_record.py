"""The GPU tests ran on this code and passed. They need a card, so what stands here is their record."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

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
    for folder in ("csrc", "dmjd/ops"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


OPS = ("gelu_hidden", "gelu_mlp", "hog", "masked_depthwise_conv2d", "masks", "philox", "short_attention", "tokens")
HOG, MASKS = "tests/ops/test_hog_kernels.py::a", "tests/ops/test_masks_on_gpu.py::a"


def written(checkout: Path, ops: Iterable[str] = ("hog",), **changes: Any) -> Path:
    facts = {"card": "Card", "date": "2020-01-01", "tests": {HOG: "passed", "b": "skipped: needs two CUDA devices"}}
    path = checkout / "record.json"
    records = {op: {**facts, "sha256": gpu_record.fingerprint(op, checkout), **changes} for op in ops}
    path.write_text(json.dumps(records | {"others": {"tests": {"tests/data/test_upload.py::a": "failed"}}}))
    return path


def test_the_gpu_tests_passed_on_this_code(gpu_tests: list[str]) -> None:
    found = gpu_record.errors(expected=gpu_tests)
    assert not found, gpu_record.report(found)


def test_a_good_record_is_accepted(checkout: Path) -> None:
    assert gpu_record.errors(written(checkout), checkout, [HOG, "tests/data/test_upload.py::a"]) == {}


@pytest.mark.parametrize(
    ("edited", "stale"),
    [
        ("csrc/ops/cuda/hog_tile.cuh", {"hog"}),
        ("csrc/ops/cpu/tokens.cpp", {"tokens"}),
        ("csrc/core/philox.h", {"masks", "philox"}),
        ("csrc/ops/cuda/rows.h", {"tokens"}),
        ("csrc/ops/hopper/gelu_hidden.cu", {"gelu_hidden", "gelu_mlp"}),
        ("csrc/ops/cuda/launch.h", set(OPS)),
        ("csrc/ops/cuda/module.cpp", set(OPS) - {"gelu_hidden", "gelu_mlp"}),
        ("dmjd/ops/gelu_mlp_kernels.py", {"gelu_mlp"}),
        ("dmjd/ops/short_attention.py", {"short_attention"}),
        ("dmjd/ops/_lib.py", set(OPS)),
        ("csrc/jpeg/decoder.cpp", set()),
    ],
)
def test_an_edit_asks_for_the_tests_of_the_ops_that_use_the_file(checkout: Path, edited: str, stale: set[str]) -> None:
    path, source = written(checkout, OPS), checkout / edited
    source.write_text(source.read_text() + "\nmore = 1\n")
    found = gpu_record.errors(path, checkout)
    assert set(found) == stale
    assert set(found.values()) <= {"its sources changed since its GPU tests ran on Card (2020-01-01)"}
    if len(stale) == 1:
        assert f"run `python tests/gpu_record.py {next(iter(stale))}`" in gpu_record.report(found)


def test_every_kernel_and_header_is_a_source_of_an_op() -> None:
    used = set().union(*(gpu_record.sources(op) for op in OPS))
    found = {path for path in (ROOT / "csrc/ops").rglob("*") if path.is_file()}
    assert found, "the sources moved"
    assert found <= used


def test_comments_docstrings_and_blank_lines_do_not_count(checkout: Path) -> None:
    path = written(checkout, ["philox"])
    module, kernel = checkout / "dmjd/ops/philox.py", checkout / "csrc/ops/cuda/philox.cu"
    text = '"""Another\n\ndocstring."""\n# a comment\n\n' + module.read_text().partition('"""\n')[2]
    module.write_text(text.replace("import torch\n", "import torch  # its tensors\n"))
    kernel.write_text("// one\n\n/* and\nanother */\n" + kernel.read_text())
    assert gpu_record.errors(path, checkout) == {}
    kernel.write_text(kernel.read_text() + 'const char* text = "// one";\n')
    assert "philox" in gpu_record.errors(path, checkout)


@pytest.mark.parametrize(
    ("tests", "error"),
    [
        ({HOG: "passed", "f::b": "failed"}, "1 of 2 GPU tests failed on Card (2020-01-01), the first is f::b"),
        ({"f::b": "passed"}, f"1 GPU tests have no outcome on Card (2020-01-01), the first is {HOG}"),
        ({"f": "failed", "f::b": "passed"}, f"1 GPU tests have no outcome on Card (2020-01-01), the first is {HOG}"),
        ({HOG: "skipped: no card"}, "no GPU test passed on Card (2020-01-01)"),
    ],
)
def test_a_record_that_proves_nothing_is_an_error(checkout: Path, tests: dict[str, str], error: str) -> None:
    assert gpu_record.errors(written(checkout, tests=tests), checkout, [HOG]) == {"hog": error}


def test_an_op_without_a_record_is_an_error(checkout: Path) -> None:
    missing = "its GPU tests have not run"
    assert gpu_record.errors(checkout / "nothing.json", checkout, [HOG, MASKS]) == {"hog": missing, "masks": missing}
    assert gpu_record.errors(written(checkout), checkout, [HOG, MASKS]) == {"masks": missing}


def test_records_of_other_ops_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[str], plugins: list[Any]) -> int:
        assert arguments == ["-m", "gpu", *sorted(f"tests/ops/{path.name}" for path in files)]
        plugins[0].outcomes[HOG] = "passed"
        return 0

    files = list((ROOT / "tests/ops").glob("test_hog*.py"))
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"hog": {}, "masks": {"tests": {}}}))
    monkeypatch.setattr(sys, "path", [""])
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pytest, "main", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    assert gpu_record.record(["hog"], path) == 0
    records = json.loads(path.read_text())
    assert records["masks"] == {"tests": {}}
    assert records["hog"]["tests"] == {HOG: "passed"}
    assert records["hog"]["sha256"] == gpu_record.fingerprint("hog")
    assert gpu_record.record(["hogs"], path) == 1


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
