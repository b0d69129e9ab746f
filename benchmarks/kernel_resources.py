"""Registers, spills and occupancy of the built CUDA kernels, from the binaries; needs no GPU.

    python benchmarks/kernel_resources.py [--arch sm_80] [--all]

Reads dmjd/_C_cuda.abi3.so by cuobjdump, of the CUDA toolkit or of the installed Triton, and prints a row of Markdown
for each kernel, over its instances (dtypes, sizes): their number, the greatest number of threads a block, registers,
bytes of stack (spills are part of it) and of local memory a thread, static shared memory, and the least number of warps
a multiprocessor holds by registers (64 are all). Shared memory that a launch adds can lower it, as can the threads of
kernels without launch bounds (32 in the table). --all prints the instances.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import dmjd

LIBRARY = Path(dmjd.__file__).parent / "_C_cuda.abi3.so"
REGISTERS, WARPS, UNIT = 65536, 64, 256
"""Of a multiprocessor of sm_80 and sm_90; registers are given to warps in units."""
USE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
THREADS = re.compile(
    r"^\.nv\.info\.(\S+)|EIATTR_MAX_THREADS\s+Format:\s+\S+\s+Value:\s+(\S+) (\S+) (\S+)", re.MULTILINE
)


class Kernel(NamedTuple):
    name: str
    threads: int
    registers: int
    stack: int
    shared: int
    local: int

    @property
    def warps(self) -> int:
        """That a multiprocessor holds, by registers and by threads."""
        block = -(-self.threads // 32)
        per_warp = -(-32 * self.registers // UNIT) * UNIT
        return min(REGISTERS // per_warp // block, WARPS // block) * block


def dump(*options: str) -> str:
    triton = find_spec("triton")
    bundled = (
        [Path(each, "backends/nvidia/bin/cuobjdump") for each in (triton.submodule_search_locations or ())]
        if triton
        else []
    )
    tool = shutil.which("cuobjdump") or next((str(each) for each in bundled if each.is_file()), None)
    assert tool is not None, "cuobjdump is missing; it is in the CUDA toolkit and in Triton's wheel"
    return subprocess.run([tool, *options, str(LIBRARY)], check=True, capture_output=True, text=True).stdout


def kernels(arch: str) -> Iterator[Kernel]:
    threads, current = {}, ""
    for match in THREADS.finditer(dump("--dump-elf", "--gpu-architecture", arch)):
        current = match[1] or current
        if match[2]:
            threads[current] = int(match[2], 16) * int(match[3], 16) * int(match[4], 16)
    for name, registers, stack, shared, local in USE.findall(dump("--dump-resource-usage", "--gpu-architecture", arch)):
        yield Kernel(name, threads.get(name, 32), int(registers), int(stack), int(shared), int(local))


def plain(name: str) -> str:
    """The function of a mangled name, without anonymous namespaces and template arguments."""
    parts, at = [], len("_ZN")
    while at < len(name) and name[at].isdigit():
        digits = re.match(r"\d+", name[at:])
        assert digits is not None
        start = at + digits.end()
        at = start + int(digits[0])
        parts.append(name[start:at])
    return "::".join(part for part in parts[1:] if not part.startswith("_GLOBAL"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--all", action="store_true", help="instances")
    options = parser.parse_args()
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels(options.arch):
        groups[kernel.name if options.all else plain(kernel.name)].append(kernel)
    print(f"| {options.arch} kernel | instances | threads | registers | stack | local | shared | least warps |")
    print("|---|---|---|---|---|---|---|---|")
    for name, same in sorted(groups.items()):
        most = [
            max(getattr(each, key) for each in same) for key in ("threads", "registers", "stack", "local", "shared")
        ]
        print(f"| {name} | {len(same)} | {' | '.join(map(str, most))} | {min(each.warps for each in same)} |")


if __name__ == "__main__":
    main()
