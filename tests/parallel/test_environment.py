from __future__ import annotations

import gc
import os
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


def test_collections_are_as_before_once_the_start_is_over() -> None:
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
