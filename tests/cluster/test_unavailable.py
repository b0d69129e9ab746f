"""Where no Slurm can be started its tests are skipped, and the reason is one that can be acted on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster import slurm


def reason(tmp_path: Path) -> str:
    with pytest.raises(slurm.Unavailable) as refused, slurm.cluster(tmp_path):
        pass
    return str(refused.value)


def test_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in reason(tmp_path)


def test_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm, "PROGRAMS", ("slurmctld-of-nobody",))
    assert reason(tmp_path) == "no slurmctld-of-nobody: apt-get install slurm-wlm munge iproute2 util-linux"


def test_without_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(slurm, "PROGRAMS", ())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert reason(tmp_path).startswith("`unshare --net --uts --mount ")
    assert reason(tmp_path).endswith("is not allowed here: unshare failed: Operation not permitted")
