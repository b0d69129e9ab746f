from __future__ import annotations

from pathlib import Path

import pytest

from dmjd import resources

ROOT = Path(__file__).resolve().parents[1]


def test_a_checkout_uses_its_top_level_folders() -> None:
    assert resources.configs_dir() == ROOT / "configs"
    assert resources.launchers_dir() == ROOT / "launchers"


def test_an_installation_without_them_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "dmjd")
    with pytest.raises(FileNotFoundError, match="without its configs/ folder"):
        resources.configs_dir()
