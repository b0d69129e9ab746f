"""Errors of native libraries whose C++ runtime is their own, as toolchains link it that have no shared one to offer.

The objects of the last build are linked again, with libstdc++ and libgcc inside; nothing is compiled.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import sys
import torch, dmjd
dmjd.__path__.insert(0, sys.argv[1])
from dmjd import {module} as library
assert library.__file__.startswith(sys.argv[1])
import dmjd.ops

def error(expected, part, call, *arguments):
    try:
        call(*arguments)
    except expected as raised:
        assert part in str(raised), raised
    else:
        raise AssertionError(f"no error: {{part}}")

ops, long = torch.ops.dmjd, torch.int64
restore = torch.zeros(1, 2, 4, dtype=long)
counts = torch.zeros(2, 2, 3, dtype=torch.int32)
"""

# Numbers in the messages are written by std::ostream, which is where two copies of libstdc++ went wrong.
CPU = """
dtype = "dtypes.h:38, scatter_tokens: dtype must be float32, float64, bfloat16 or float16, got Int"
for _ in range(3):
    error(RuntimeError, dtype, ops.scatter_tokens, counts, counts[0, 0], restore, None, 0)
ids, key = torch.arange(3), torch.zeros(2, dtype=long)
error(RuntimeError, "hide one", ops.disjoint_masks, ids, key, [4, 4], [1, 1], 40, [40], "disjoint")
images = torch.zeros(2, 16, 1 << 21, 1, dtype=torch.uint8)
torch.set_num_threads(2)
ops.hog(images[:, :, :16], 16, 9, 16, "dmjd", "none", "nhwc", torch.float32)  # starts the threads
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20), -1))
error(RuntimeError, "bad_alloc", ops.hog, images, 16, 9, 16, "dmjd", "none", "nhwc", torch.float32)
"""

CORE = """
import numpy as np
from dmjd import _jpeg  # what another module has registered must not come between
for _ in range(3):
    error(ValueError, "multiples of patch 16, got 4 x 4", library.hog, np.zeros((1, 4, 4, 3), np.uint8))
error(TypeError, "got int64", library.hog, np.zeros((1, 4, 4, 3), np.int64))
ids = np.arange(3)
error(ValueError, "got 1099511627776", library.disjoint_masks, ids, 0, 1 << 40, [4, 4], [1, 1], 4, [4], "none")
error(ValueError, "hide one", library.disjoint_masks, ids, 0, 0, [4, 4], [1, 1], 40, [4], "none")
error(TypeError, "incompatible function arguments", library.philox4x32, "text", 3)
"""

JPEG = """
from dmjd import _core
for _ in range(3):
    error(ValueError, "starts with 0x61 0x62", library.header, b"abc")
error(ValueError, "Empty input file", library.header, b"")
error(EOFError, "Premature end", library.decode_region, b"\\xff\\xd8\\xff", 0, 0, 1, 1, 3)
error(ValueError, "channels must be 1 or 3", library.decode_region, b"", 0, 0, 1, 1, 7)
error(TypeError, "incompatible function arguments", library.header, 3)
"""

CUDA = """
counts, restore = counts.cuda(), restore.cuda()
for _ in range(3):
    error(RuntimeError, "got Int", ops.scatter_tokens, counts, counts[0, 0], restore, counts.new_zeros(4, 3), 0)
ids, key = torch.arange(3, device="cuda"), torch.zeros(2, dtype=long)
error(RuntimeError, "hide one", ops.disjoint_masks, ids, key, [4, 4], [1, 1], 40, [40], "disjoint")
"""

HOPPER = """
x, weight, bias = (torch.zeros(size, dtype=torch.bfloat16, device="cuda") for size in ((300, 96), (256, 96), 256))
for _ in range(3):
    error(RuntimeError, "last size of x must be a multiple of 64, got 96", ops.gelu_hidden, x, weight, bias)
x, weight = x.new_zeros(300, 128), x.new_zeros(128, 128)
error(RuntimeError, "must be a multiple of 256, got 128", ops.gelu_hidden, x, weight, bias[:128])
error(RuntimeError, "x must be bfloat16 or float16", ops.gelu_hidden, x.float(), weight.float(), bias.float())
"""

TORCH = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu"]
CUDA_LIBRARIES = [*TORCH, "-lc10_cuda", "-ltorch_cuda"]
OBJECTS = f"build/temp.*{sys.implementation.cache_tag}/csrc"


def relink(module: str, objects: str, libraries: list[str], folder: Path) -> None:
    """``module`` in ``folder``, linked as setup.py does but for its own copies of libstdc++ and libgcc."""
    (built,) = ROOT.glob(f"dmjd/{module}.*.so")
    found = [str(path) for path in ROOT.glob(f"{OBJECTS}/{objects}/*.o")]
    flags = re.search(r"^LINK_FLAGS = (\[.+\])$", (ROOT / "setup.py").read_text(), re.M)
    assert flags
    static = ["-static-libstdc++", "-static-libgcc"]
    command = ["c++", "-shared", *found, *static, *libraries, *ast.literal_eval(flags[1]), "-o", folder / built.name]
    subprocess.run(command, cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("module", "objects", "libraries", "code"),
    [
        ("_C_cpu", "ops/cpu", TORCH, CPU),
        ("_core", "pybind", [], CORE),
        ("_jpeg", "jpeg", ["-ljpeg"], JPEG),
        pytest.param("_C_cuda", "ops/cuda", CUDA_LIBRARIES, CUDA, marks=pytest.mark.gpu),
        pytest.param("_C_hopper", "ops/hopper", CUDA_LIBRARIES, HOPPER, marks=pytest.mark.gpu),
    ],
)
def test_an_error_is_an_exception_with_its_whole_message(
    module: str, objects: str, libraries: list[str], code: str, tmp_path: Path
) -> None:
    if not list(ROOT.glob(f"dmjd/{module}.*.so")) or not list(ROOT.glob(f"{OBJECTS}/{objects}/*.o")):
        pytest.skip(f"{module} was not built in this checkout")
    if module == "_C_hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100, H200 or GH200")
    relink(module, objects, libraries, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE.format(module=module) + code, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "DMJD_DISABLE_EXT": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["_C_cpu", "_core", "_jpeg", "_C_cuda", "_C_hopper"])
def test_a_library_exports_its_init_function_alone(module: str) -> None:
    built = list(ROOT.glob(f"dmjd/{module}.*.so"))
    if not built:
        pytest.skip(f"{module} was not built in this checkout")
    listed = subprocess.run(["nm", "-D", "--defined-only", *built], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in listed.splitlines()] == [f"PyInit_{module}"]
