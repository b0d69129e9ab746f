"""``pip install dmjd`` into somebody else's environment: torch is there, and nothing of our trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

STRANGERS = ("timm", "hydra", "omegaconf", "deepspeed", "webdataset", "PIL", "matplotlib", "rich", "yaml", "numpy")


def required(requirement: Requirement, seen: dict[str, Distribution]) -> Iterator[Distribution]:
    """The installed distribution that ``requirement`` names, and what it requires in turn."""
    if str(requirement) in seen:
        return
    seen[str(requirement)] = found = distribution(requirement.name)
    yield found
    for inner in map(Requirement, found.requires or []):
        # Extras count: torch brings CUDA's libraries as cuda-toolkit[cublas,...].
        if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
            yield from required(inner, seen)


@pytest.fixture(scope="module")
def torch_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch, what torch requires, and the wheel.

    torch is linked from this environment: another copy is gigabytes and minutes, and would be the same files.
    """
    home = tmp_path_factory.mktemp("elsewhere") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    for found in required(Requirement("torch"), {}):
        for top in {path.parts[0] for path in found.files or [] if path.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    python = home / "bin" / "python"
    # With its dependencies, none of which may be fetched: the environment has to satisfy them.
    pip = ["pip", "--python", str(python), "install", "--quiet", "--no-index", str(wheel)]
    done = subprocess.run([sys.executable, "-m", *pip], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def run(python: Path, *words: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DMJD_", "PYTHON"))}
    done = subprocess.run([python, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_environment_has_torch_and_the_wheel_alone(torch_alone: Path, tmp_path: Path) -> None:
    code = f"""
import importlib.util as util
print([name for name in {STRANGERS!r} if util.find_spec(name)])
import dmjd.ops, torch
print(dmjd.__file__)
print([name for name, kernels in dmjd.ops.status().items() if kernels["CPU"] != "native"])
"""
    strangers, where, references = run(torch_alone, "-c", code, cwd=tmp_path).splitlines()
    assert strangers == "[]"
    assert where.startswith(str(torch_alone.parents[1]))
    on_cards_alone = ["gelu_hidden", "gelu_hidden_gradient", "gelu_mlp", "gelu_mlp_backward"]
    on_cards_alone += ["short_attention", "short_attention_backward", "short_attention_packed"]
    assert references == str(on_cards_alone), "which PyTorch serves on the CPU"


@pytest.mark.long
def test_another_trainer_trains_with_the_ops_under_torch_compile(torch_alone: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("another_trainer.py")
    losses = [float(line) for line in run(torch_alone, script, cwd=tmp_path).split()]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True), losses
    assert losses[-1] < 0.9 * losses[0], losses
