"""The vendoring recipe of docs/building.md, followed to the letter, beside an installed dmjd."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_copy_under_another_name_lives_beside_dmjd(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "building.md").read_text().split("## Copying the ops into another project")[1]
    recipe = re.search(r"```bash\n(.+?)```", section, re.S)
    assert recipe is not None
    (tmp_path / "other").mkdir()
    subprocess.run(
        ["bash", "-euc", recipe[1]],
        cwd=tmp_path,
        env={**os.environ, "DMJD": str(ROOT)},
        check=True,
        capture_output=True,
    )
    kernels = [*tmp_path.glob("csrc/ops/*/*.cpp"), *tmp_path.glob("csrc/ops/*/*.cu")]
    assert set(re.findall(r"_LIBRARY_IMPL\((\w+)", "".join(path.read_text() for path in kernels))) == {"other"}
    code = """
import torch, dmjd.ops, other.ops
images = torch.randint(0, 256, (1, 32, 32, 3), dtype=torch.uint8)
assert torch.equal(other.ops.hog(images, flavour="dmjd"), dmjd.ops.hog(images, flavour="dmjd"))
ids = torch.arange(3)
plan = dict(grid=(4, 4), views=2, mask_ratio=.5, seed=0, epoch=0)
assert torch.equal(other.ops.disjoint_masks(ids, **plan).mask, dmjd.ops.disjoint_masks(ids, **plan).mask)
print(torch.ops.other.hog, other.ops.status().keys() == dmjd.ops.status().keys())
"""
    # The copy is not compiled, and a kernel may round otherwise than its reference.
    environment = {**os.environ, "DMJD_DISABLE_EXT": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "other.hog True"
