from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from dmjd.parallel.staging import HostCopies


def make(value: float) -> dict[str, Any]:
    return {
        "tensors": [torch.full((2, 3), value), torch.tensor(value)],
        "nested": OrderedDict(a=(torch.full((4,), value, dtype=torch.bfloat16), "word"), shape=torch.Size((5, 6))),
        "numbers": {"step": 3, "list": [1, 2]},
    }


def test_a_copy_is_equal_and_does_not_follow() -> None:
    copies, state = HostCopies(torch.device("cpu")), make(1.0)
    copied = copies.take(state)
    state["tensors"][0].zero_()
    state["numbers"]["list"].append(3)
    expected = make(1.0)
    assert torch.equal(copied["tensors"][0], expected["tensors"][0])
    assert torch.equal(copied["tensors"][1], expected["tensors"][1])
    assert type(copied["nested"]) is OrderedDict
    assert torch.equal(copied["nested"]["a"][0], expected["nested"]["a"][0])
    assert copied["nested"]["a"][1] == "word"
    assert type(copied["nested"]["shape"]) is torch.Size
    assert copied["numbers"] == expected["numbers"]


def test_memory_is_kept_from_copy_to_copy() -> None:
    copies = HostCopies(torch.device("cpu"))
    first = copies.take(make(1.0))["tensors"][0]
    second = copies.take(make(2.0))["tensors"][0]
    assert first.data_ptr() == second.data_ptr()
    assert second.eq(2).all()
    larger = copies.take({"tensors": [torch.zeros(9)]})["tensors"][0]
    assert larger.shape == (9,)
