from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmjd.errors import StorageError
from dmjd.parallel import native_files

STATE = {f"parameter/{index}": torch.arange(index, index + 256.0) for index in range(9)}


@pytest.fixture
def in_several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_files, "BYTES_PER_FILE", 1024)


@pytest.mark.usefixtures("in_several_files")
def test_a_large_state_is_read_back_from_several_files(tmp_path: Path) -> None:
    files = native_files.write(tmp_path, STATE, None)
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert len(files) == native_files.MAX_FILES + 1
    found = native_files.read(tmp_path)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], value) for name, value in STATE.items())


@pytest.mark.usefixtures("in_several_files")
@pytest.mark.parametrize("number", range(native_files.MAX_FILES))
def test_an_error_in_any_of_the_files_is_raised(tmp_path: Path, number: int) -> None:
    (tmp_path / f"__0_{number}.distcp").mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        native_files.write(tmp_path, STATE, None)
