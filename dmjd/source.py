"""The running source code: its commit, and a copy of it for queued jobs."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import dmjd
from dmjd.errors import StorageError
from dmjd.resources import configs_dir, launchers_dir

_STATE, _DIFF = "SOURCE.json", "source.diff"
START = "start.py"
"""Entry point of a copy: `python -m dmjd` would import a dmjd of the current folder first."""


def source_state() -> tuple[str | None, str]:
    """Commit and uncommitted changes of the checkout, or of the copied checkout; (None, "") if there is none."""
    root = Path(dmjd.__file__).parent.parent
    if (root / _STATE).is_file() and (root / START).is_file():
        return json.loads((root / _STATE).read_text())["git_sha"], (root / _DIFF).read_text()

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout

    try:
        # An environment may be inside another repository.
        git("ls-files", "--error-unmatch", "dmjd/__init__.py")
        return git("rev-parse", "HEAD").strip(), git("diff", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None, ""


def snapshot(folder: Path) -> Path:
    """Copy the package with its native libraries, configurations and launchers to ``folder/DIGEST``.

    The digest is that of the content, so a copy in use is never modified.

    Returns:
        The absolute path of the copy.

    Raises:
        StorageError: if it cannot be written.
    """
    sha, diff = source_state()
    trees = {"dmjd": Path(dmjd.__file__).parent, "configs": configs_dir(), "launchers": launchers_dir()}
    target = (folder / _digest(trees, f"{sha}\n{diff}")).absolute()
    if target.is_dir():
        return target
    draft = target.with_suffix(".tmp")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        for name, tree in trees.items():
            shutil.copytree(tree, draft / name, ignore=shutil.ignore_patterns("__pycache__"))
        (draft / START).write_text("import sys\n\nfrom dmjd.cli import main\n\nsys.exit(main())\n")
        (draft / _STATE).write_text(json.dumps({"git_sha": sha}))
        (draft / _DIFF).write_text(diff)
        draft.rename(target)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise StorageError(f"cannot copy the source to {target}: {error}") from error
    return target


def _digest(trees: dict[str, Path], more: str) -> str:
    digest = hashlib.sha256(more.encode())
    for name, tree in trees.items():
        for path in sorted(tree.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{name}/{path.relative_to(tree)} {path.stat().st_size}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
