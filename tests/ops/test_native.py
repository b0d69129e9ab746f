"""Loading the CUDA kernels: not before they are asked for, not for a card they do not serve, and never in silence."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dmjd.ops import status
from dmjd.ops._native import covers

# Two ops, a library that is not there and a tensor that says it is on a card: what a process with a card goes through.
PRETENCE = """
import sys, warnings
import torch
from dmjd.ops import _lib, _native

@_lib.define("double_it(Tensor x) -> Tensor", fake=torch.empty_like)
def double_it(x):
    return x * 2

@_lib.define("halve_it(Tensor x) -> Tensor", fake=torch.empty_like)
def halve_it(x):
    return x / 2

class OnCard(torch.Tensor):
    is_cuda = True

def card(capability):
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda index: capability
    torch.cuda.get_device_name = lambda index: "Card"
    _native.build_info = lambda: {"cuda_archs": ["8.0", "9.0+PTX"]}
    torch.version.cuda = "13.0"

def load(module):
    # The pretended tensor's true key is CPU; the kernel registered for CUDA is what the registry asks about.
    loaded.append(module)
    _lib._library.impl("double_it", lambda x: x.as_subclass(torch.Tensor) * 2 + 0.5, "CPU")
    _lib._library.impl("double_it", lambda x: x, "CUDA")
    return None

loaded = []
import_for_real, _native._import = _native._import, load
x = torch.ones(1).as_subclass(OnCard)

def call(op, x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = op(x)
    print(float(result), *(f"{w.category.__name__}: {w.message}" for w in caught))
"""


def run(code: str, **environment: str) -> list[str]:
    # DeepSpeed, imported by an earlier test, sets PYTORCH_NVML_..., under which a pretended card counts as available.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DMJD_", "PYTORCH_NVML_"))}
    done = subprocess.run([sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("archs", "capability", "served"),
    [
        (["8.0"], (8, 0), True),
        (["8.0"], (8, 9), True),
        (["8.6"], (8, 0), False),
        (["8.0"], (9, 0), False),
        (["8.0+PTX"], (9, 0), True),
        (["9.0+PTX"], (8, 9), False),
        (["8.0", "9.0+PTX"], (12, 1), True),
        (["8.0", "9.0+PTX"], (7, 5), False),
        (["9.0a"], (9, 0), True),
        (["10.0a+PTX"], (10, 3), False),
        (["10.0f"], (10, 3), True),
        (["10.0f+PTX"], (12, 0), False),
        ([], (9, 0), False),
    ],
)
def test_which_cards_a_build_serves(archs: list[str], capability: tuple[int, int], served: bool) -> None:
    assert covers(archs, capability) is served


def test_an_import_leaves_cuda_alone_so_that_workers_can_fork() -> None:
    code = """
import sys, torch, dmjd.ops
print("dmjd._C_cuda" in sys.modules, torch.cuda.is_initialized())
"""
    assert run(code) == ["False False"]


def test_the_first_cuda_call_loads_the_kernels_and_takes_them() -> None:
    code = """
card((9, 0))
call(torch.ops.dmjd.double_it, torch.ones(1))
print(loaded)
call(torch.ops.dmjd.double_it, x)
call(torch.ops.dmjd.double_it, x)
call(torch.ops.dmjd.halve_it, x)
print(loaded, _lib.status()["double_it"]["CUDA"], "/", _lib.status()["halve_it"]["CUDA"])
"""
    assert run(PRETENCE + code) == [
        "2.0",  # a CPU tensor asks for nothing
        "[]",
        "2.5",
        "2.5",
        "0.5",  # the library has no kernel for this one
        "['_C_cuda', '_C_hopper'] native / reference: no native kernel for this op",  # status asks all libraries
    ]


def test_compiled_code_loads_the_kernels_when_it_runs() -> None:
    code = """
card((9, 0))
compiled = torch.compile(lambda y: torch.ops.dmjd.double_it(y) + 1, fullgraph=True, backend="aot_eager")
_lib._on_card = lambda arguments: True  # a subclass would not get through the compiler
call(compiled, torch.ones(1))
print(loaded)
"""
    assert run(PRETENCE + code) == ["3.5", "['_C_cuda']"]


def test_kernels_for_other_cards_are_not_loaded_and_one_warning_says_so() -> None:
    code = """
card((7, 0))
call(torch.ops.dmjd.double_it, x)
call(torch.ops.dmjd.halve_it, x)
print(loaded, _lib.status()["double_it"]["CUDA"])
"""
    first, second, last = run(PRETENCE + code)
    why = "built for 8.0;9.0+PTX, which does not cover cuda:0 (Card, 7.0): rebuild with TORCH_CUDA_ARCH_LIST=7.0"
    assert first.startswith("2.0 UserWarning: dmjd.ops: CUDA tensors are served by the PyTorch references")
    assert why in first
    assert "dmjd ops status" in first
    assert second == "0.5"
    assert last == f"[] reference: {why}"


def test_a_library_that_was_not_built_is_one_warning_with_the_install_line() -> None:
    code = """
card((9, 0))
_native._import = import_for_real
_native._MODULES["CUDA"] = "_C_nowhere_cuda"
call(torch.ops.dmjd.double_it, x)
call(torch.ops.dmjd.halve_it, x)
"""
    first, second = run(PRETENCE + code)
    assert "not built: `pip install --no-build-isolation .` in an environment with a compiler and nvcc" in first
    assert second == "0.5"


def test_nobody_is_warned_of_what_they_asked_for() -> None:
    code = """
card((9, 0))
call(torch.ops.dmjd.double_it, x)
print(loaded, _lib.status()["double_it"])
"""
    assert run(PRETENCE + code, DMJD_DISABLE_EXT="1") == [
        "2.0",
        "[] {'CPU': 'reference: DMJD_DISABLE_EXT is set', 'CUDA': 'reference: DMJD_DISABLE_EXT is set'}",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is that of a machine without a GPU")
def test_status_names_the_reason_on_a_machine_without_a_card() -> None:
    reasons = {kernels["CUDA"] for kernels in status().values()}
    assert reasons <= {
        "reference: no CUDA device",
        "reference: this torch was built without CUDA",
        "reference: DMJD_DISABLE_EXT is set",
    }


@pytest.mark.gpu
def test_the_kernels_come_with_the_first_call_on_a_card() -> None:
    code = """
import sys, warnings
import torch
from dmjd.ops import make_key, philox4x32
warnings.filterwarnings("error", message="dmjd.ops")
print("dmjd._C_cuda" in sys.modules)
counter = torch.zeros(4, dtype=torch.int64)
assert torch.equal(philox4x32(counter.cuda(), make_key(0, 0)).cpu(), philox4x32(counter, make_key(0, 0)))
print("dmjd._C_cuda" in sys.modules)
"""
    assert run(code) == ["False", "True"]


@pytest.mark.gpu
def test_the_first_call_may_be_a_compiled_one() -> None:
    code = """
import sys, warnings
import torch
from dmjd.ops import make_key, philox4x32
warnings.filterwarnings("error", message="dmjd.ops")
compiled = torch.compile(lambda counter, key: philox4x32(counter ^ 1, key), fullgraph=True, mode="reduce-overhead")
counter, key = torch.zeros(8, 4, dtype=torch.int64), make_key(0, 0)
for _ in range(4):
    assert torch.equal(compiled(counter.cuda(), key.cuda()).cpu(), philox4x32(counter ^ 1, key))
print("dmjd._C_cuda" in sys.modules)
"""
    assert run(code) == ["True"]
