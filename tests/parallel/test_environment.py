from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dmjd.parallel.environment import collect_as_usual, prepare_imports

IMPORT = "from dmjd.parallel.environment import prepare_imports; prepare_imports(); import torch"


@pytest.mark.parametrize(("compiled", "kept"), [(False, True), (True, False)])
def test_bytecode_is_kept_privately_where_torch_has_none_and_none_may_be_written(
    tmp_path: Path, compiled: bool, kept: bool
) -> None:
    package, temporary = tmp_path / "site/torch", tmp_path / "temporary"
    package.mkdir(parents=True)
    temporary.mkdir()
    (package / "__init__.py").write_text("")
    paths = os.pathsep.join([str(package.parent), *filter(None, sys.path)])
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": paths}
    if compiled:
        subprocess.run([sys.executable, "-m", "compileall", "-q", package], check=True)
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", IMPORT], env=environment, check=True)
    found = [path for path in temporary.rglob("*.pyc") if path.parent.name == "torch"]
    assert bool(found) == kept
    assert (package / "__pycache__").exists() == compiled


def test_bytecode_of_another_version_at_the_same_path_is_not_used(tmp_path: Path) -> None:
    """As of two containers whose files all have one time, with the host's /tmp."""
    site = tmp_path / "site"
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, sys.path)])
    for version in ("1", "2"):
        shutil.rmtree(site, ignore_errors=True)
        (site / "torch").mkdir(parents=True)
        (site / f"torch-{version}.dist-info").mkdir()
        module = site / "torch/__init__.py"
        module.write_text(f"print({version})")
        os.utime(module, (0, 0))
        done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, check=True, capture_output=True)
        assert done.stdout.split() == [version.encode()]


def test_collections_are_as_before_once_the_start_is_over() -> None:
    collect_as_usual()  # after a start in an earlier test that ended before its first step
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    collect_as_usual()  # without a start nothing changes
    assert gc.get_freeze_count() == frozen
    prepare_imports()
    assert gc.get_threshold()[0] > before[0]
    collect_as_usual()
    try:
        assert gc.get_threshold() == before
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
