"""Check the requirements of a wheel, or of a library built in place, on the machine that runs it.

    python packaging/check_wheel.py [--glibc 2.34] [--glibcxx 3.4.29] WHEEL_OR_LIBRARY ...

Fails on a C++ symbol of torch in a kernel library (those names change with every torch release; the stable ABI is plain
C), on an exported symbol besides the init function (it would be mixed with torch's symbol of the same name), and on
symbols of a newer C or C++ runtime than the ceiling. The default ceiling is that of RHEL 9 and Ubuntu 22.04.
Needs `nm`; imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

# Mangled names of namespaces at, c10 and torch, whatever is said about them (const, vtable, typeinfo).
TORCH_CPP = re.compile(r"\b_Z(?:N[KV]*|T[ISV]N?)?(?:2at|3c10|5torch)\w*")


def version(text: str) -> tuple[int, ...]:
    """``"2.34"`` -> ``(2, 34)``, which compares as versions do."""
    return tuple(map(int, text.split(".")))


def symbols_of(library: Path, kind: str) -> str:
    """The dynamic symbols of ``library``, one a line; ``kind`` is "undefined" or "defined"."""
    return subprocess.run(["nm", "-D", f"--{kind}-only", library], capture_output=True, text=True, check=True).stdout


def faults(library: Path, ceilings: dict[str, str]) -> Iterator[str]:
    """Everything that is wrong with ``library``; ``ceilings`` maps GLIBC and GLIBCXX to the newest allowed version."""
    exported = {line.split()[-1] for line in symbols_of(library, "defined").splitlines()}
    surplus = sorted(exported - {f"PyInit_{library.name.split('.')[0]}"})
    if surplus:
        yield f"exports {len(surplus)} symbols besides its init function, such as {surplus[0]}: use csrc/exports.map"
    symbols = symbols_of(library, "undefined")
    if library.name.startswith("_C_"):
        if "torch_library_impl" not in symbols:
            yield "registers no kernel"
        found = sorted(set(TORCH_CPP.findall(symbols)))
        if found:
            yield f"needs {len(found)} C++ symbols of torch, such as {found[0]}: it will load on this very torch only"
    for runtime, ceiling in ceilings.items():
        needed = max(map(version, re.findall(rf"@{runtime}_([\d.]+)", symbols)), default=(0,))
        if needed > version(ceiling):
            yield f"needs {runtime} {'.'.join(map(str, needed))}, above the ceiling {ceiling}: build on an older system"


def libraries(path: Path, scratch: Path) -> list[Path]:
    """The native libraries of a wheel, unpacked into ``scratch``, or the library itself."""
    if path.suffix != ".whl":
        return [path]
    zipfile.ZipFile(path).extractall(scratch / path.stem)
    found = sorted((scratch / path.stem).glob("dmjd/*.so"))
    if not found:
        sys.exit(f"{path.name}: holds no native library")
    return found


def main() -> int:
    """The command line; 1 if any library has a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="WHEEL_OR_LIBRARY")
    parser.add_argument("--glibc", default="2.34")
    parser.add_argument("--glibcxx", default="3.4.29")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for library in [found for path in options.paths for found in libraries(path, Path(scratch))]:
            complaints = list(faults(library, {"GLIBC": options.glibc, "GLIBCXX": options.glibcxx}))
            failed |= bool(complaints)
            for complaint in complaints or ["good"]:
                print(f"{library.name}: {complaint}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
