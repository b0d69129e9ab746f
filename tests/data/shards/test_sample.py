from __future__ import annotations

import sys
import zlib
from importlib import reload

import numpy as np
import pytest

from dmjd.data.shards import sample


def test_crc32_is_zlibs_for_every_length_and_alignment() -> None:
    data = np.random.default_rng(0).bytes(5000)
    for length in [*range(300), 1023, 1024, 4097, 4900]:
        for offset in range(4):
            part = data[offset : offset + length]
            assert sample.crc32(part) == zlib.crc32(part)


def test_crc32_without_isal_is_zlibs(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        assert reload(sample).crc32 is zlib.crc32
    reload(sample)
