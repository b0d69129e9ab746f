"""Folders of configuration presets and launch scripts: at the top of a checkout, or inside an installed package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _find(name: str) -> Path:
    # The package first: site-packages may have a folder of that name from another package.
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"dmjd was installed without its {name}/ folder: reinstall it, or run from a checkout")


def configs_dir() -> Path:
    """The folder of ``method/``, ``backbone/``, ``experiment/`` and the other configuration groups.

    Raises:
        FileNotFoundError: if the installation lacks it.
    """
    return _find("configs")


def launchers_dir() -> Path:
    """The folder of launch scripts.

    Raises:
        FileNotFoundError: if the installation lacks it.
    """
    return _find("launchers")
