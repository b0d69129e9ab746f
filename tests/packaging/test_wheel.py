"""The wheel as a user gets it: built from the sdist, unpacked far from the checkout, without the training libraries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What `pip install dmjd` does not bring, and what dmjd.ops must not ask for. torch itself may import numpy.
TRAINING_LIBRARIES = (
    "timm",
    "torchvision",
    "hydra",
    "omegaconf",
    "deepspeed",
    "webdataset",
    "PIL",
    "matplotlib",
    "rich",
)

BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {TRAINING_LIBRARIES!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}")
sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str, *, package: Path, cwd: Path) -> str:
    """Runs ``code`` where ``dmjd`` comes from ``package`` and nowhere else."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DMJD_", "PYTHON"))}
    environment["PYTHONPATH"] = str(package)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def relative_files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_wheel_holds_the_package_and_its_trees(unpacked: Path) -> None:
    for tree in ("configs", "launchers"):
        assert relative_files(unpacked / "dmjd" / tree) == relative_files(ROOT / tree)
    sources = {name for name in relative_files(ROOT / "dmjd") if not name.endswith(".so")}
    shipped = {name for name in relative_files(unpacked / "dmjd") if not name.endswith(".so")}
    assert {name for name in shipped if not name.startswith(("configs/", "launchers/"))} == sources
    assert (unpacked / "dmjd" / "_C_cpu.abi3.so").is_file()
    assert {path.name for path in unpacked.iterdir()} == {"dmjd", *(path.name for path in unpacked.glob("*.dist-info"))}


@pytest.mark.slow
def test_the_description_has_no_link_that_is_dead_on_a_package_index(unpacked: Path) -> None:
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert "https://arxiv.org/abs/2301.00230" in targets
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "Project-URL: Paper, https://arxiv.org/abs/2301.00230" in text


@pytest.mark.slow
def test_unpacked_wheel_serves_ops_without_the_training_libraries(unpacked: Path, tmp_path: Path) -> None:
    code = (
        BLOCKER
        + """
import torch
import dmjd.ops
from dmjd.ops._lib import status
from dmjd.ops.philox import make_key, philox4x32
print(dmjd.ops.__file__ or list(dmjd.ops.__path__)[0])
print(status()["philox4x32"]["CPU"])
print(*(f"{word:08x}" for word in philox4x32(torch.zeros(4, dtype=torch.int64), make_key(0, 0)).tolist()))
"""
    )
    where, kernel, words = run_python(code, package=unpacked, cwd=tmp_path).splitlines()
    assert where.startswith(str(unpacked))
    assert kernel == "native"
    assert words == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"


@pytest.mark.slow
def test_resources_resolve_inside_the_unpacked_wheel(unpacked: Path, tmp_path: Path) -> None:
    code = (
        BLOCKER
        + "from dmjd.resources import configs_dir, launchers_dir; print(configs_dir(), launchers_dir(), sep='\\n')"
    )
    site = shutil.copytree(unpacked, tmp_path / "site")
    for tree in ("configs", "launchers"):
        (site / tree).mkdir()  # some other package's folder beside ours
    assert run_python(code, package=site, cwd=tmp_path).splitlines() == [
        str(site / "dmjd" / "configs"),
        str(site / "dmjd" / "launchers"),
    ]


@pytest.mark.slow
def test_numpy_module_in_the_wheel_agrees_and_reports_its_build(unpacked: Path, tmp_path: Path) -> None:
    code = (
        BLOCKER
        + """
import numpy as np
from dmjd import _core
assert "torch" not in sys.modules
print(*(f"{word:08x}" for word in _core.philox4x32(np.zeros((1, 4), np.uint32), np.zeros(2, np.uint32))[0]))
print(_core.build_info()["torch_target"], _core.build_info()["cuda"], _core.build_info()["cuda_archs"])
"""
    )
    assert run_python(code, package=unpacked, cwd=tmp_path).splitlines() == [
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "2.11 None []",
    ]


def test_importing_ops_loads_torch_and_no_training_library(tmp_path: Path) -> None:
    code = (
        f"import sys, dmjd.ops; print(sorted(set({TRAINING_LIBRARIES!r}) & set(sys.modules)), 'torch' in sys.modules)"
    )
    assert run_python(code, package=ROOT, cwd=tmp_path) == "[] True"


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, dmjd; print(sorted({'torch', 'numpy'} & set(sys.modules)), dmjd.__version__ != '')"
    assert run_python(code, package=ROOT, cwd=tmp_path) == "[] True"
