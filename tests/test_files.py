from __future__ import annotations

from pathlib import Path

import pytest

from dmjd.files import replace_file


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    replace_file(path, "before")

    def full_disk(self: Path, target: Path) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path], "no draft stays behind"
