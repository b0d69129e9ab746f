"""Builds the native libraries. Everything declarative is in pyproject.toml.

    dmjd/_C_cpu    CPU kernels    LibTorch stable ABI, Python limited API: one binary for every torch >= 2.11
    dmjd/_C_cuda   CUDA kernels   the same, when torch has CUDA and a toolkit of its major version is found
    dmjd/_C_hopper CUDA kernels   what H100, H200 and GH200 alone can run, when 9.0 is among the architectures
    dmjd/_core     pybind11       csrc/core for numpy; tied to one Python minor version, links nothing of torch
    dmjd/_jpeg     pybind11       csrc/jpeg, where libjpeg-turbo >= 2.1 and its headers are found (libjpeg-turbo8-dev,
                                  libjpeg62-turbo-dev, libjpeg-turbo-devel); links that, nothing of torch

Every op also has a PyTorch reference, and Pillow reads JPEG files too: a library that cannot be built costs speed and
not function. Switches:

    DMJD_EXT    auto (default: what fails is left out, and said) | force (a failure is an error) | off (pure Python)
    DMJD_CUDA   auto (default) | force | off, for the CUDA kernels alone
    DMJD_JPEG   auto (default) | force | off, for dmjd/_jpeg alone
    TORCH_CUDA_ARCH_LIST (default below), MAX_JOBS, CUDA_HOME as in every torch extension
    DMJD_REPOSITORY (for a release) address of the repository, to which the README's links lead on a package index

torch is not a build requirement, since pip would download a second one of several gigabytes into its isolated build:
install torch first and then `pip install --no-build-isolation .`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

TORCH_TARGET = "2.11"
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
CPU, CUDA, HOPPER = "dmjd._C_cpu", "dmjd._C_cuda", "dmjd._C_hopper"
CORE, JPEG = "dmjd._core", "dmjd._jpeg"
# Without it torch compiles for the builder's own card, and fails where none is visible. Cubins for A100 and H100, which
# also serve 8.x cards; newer ones compile the PTX when they load it.
DEFAULT_ARCHS = "8.0;9.0+PTX"
# Instructions of this card and no other. torch adds no architectures of its own beside one that is named.
HOPPER_ARCH = "-gencode=arch=compute_90a,code=sm_90a"
ARCH = re.compile(r"\d+\.\d[af]?(\+PTX)?")
LINK_FLAGS = ["-Wl,-s", "-Wl,--version-script=csrc/exports.map"]
SHIPPED_TREES = ("configs", "launchers")


class NativeBuildError(Exception):
    """A native library was demanded (force) and cannot be built."""


def say(message: str) -> None:
    print(f"dmjd: {message}", file=sys.stderr)


def switch(name: str) -> str:
    value = os.environ.get(name, "auto")
    if value not in ("auto", "force", "off"):
        raise NativeBuildError(f"{name} must be auto, force or off, got {value!r}")
    return value


class BuildPy(build_py):
    """Ships in the package what stands at the top of the checkout, where people look for it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for tree in SHIPPED_TREES:
            target = Path(self.build_lib, "dmjd", tree)
            shutil.rmtree(target, ignore_errors=True)  # a file deleted since the last build must not ship
            shutil.copytree(tree, target, ignore=shutil.ignore_patterns("__pycache__"))


def find_cuda_home() -> str | None:
    """The first folder that really is a toolkit. torch takes the parent of nvcc's folder, which is wrong for a wrapper
    script on PATH and shows only when linking fails."""
    nvcc = shutil.which("nvcc")
    beside_nvcc = str(Path(nvcc).resolve().parents[1]) if nvcc else None
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), beside_nvcc, "/usr/local/cuda"):
        if home and Path(home, "include", "cuda_runtime.h").is_file() and Path(home, "bin", "nvcc").is_file():
            return home
    return None


def toolkit_version(home: str) -> str:
    text = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return match.group(1) if match else "unknown"


def why_no_cuda(torch_cuda: str | None, home: str | None) -> str | None:
    """The reason for leaving the CUDA kernels out, or None to build them."""
    if torch_cuda is None:
        return "this torch was built without CUDA"
    if home is None:
        return "no CUDA toolkit found (nvcc and include/cuda_runtime.h; CUDA_HOME says where)"
    found = toolkit_version(home)
    if found.split(".")[0] != torch_cuda.split(".")[0]:
        return (
            f"the toolkit in {home} is CUDA {found} and torch was built with CUDA {torch_cuda}: install a toolkit "
            f"{torch_cuda.split('.')[0]}.x, or a torch for CUDA {found.split('.')[0]}, or keep the CPU kernels alone"
        )
    return None


def cuda_archs() -> list[str]:
    """TORCH_CUDA_ARCH_LIST, set to the default where it is not. dmjd.ops compares cards with this list before it loads
    the kernels, so names of families ("Ampere"), whose meaning is torch's and changes, have no place in it."""
    os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS
    archs = re.findall(r"[^; ]+", os.environ["TORCH_CUDA_ARCH_LIST"])
    wrong = [arch for arch in archs if not ARCH.fullmatch(arch)]
    if wrong:
        raise NativeBuildError(f"TORCH_CUDA_ARCH_LIST takes numbers, such as {DEFAULT_ARCHS}, got {' '.join(wrong)}")
    return archs


def why_no_jpeg() -> str | None:
    """The reason for leaving dmjd._jpeg out, or None to build it."""
    program = """
        #include <cstdio>
        #include <jpeglib.h>
        static_assert(LIBJPEG_TURBO_VERSION_NUMBER >= 2001000);
        int main() { jpeg_crop_scanline(nullptr, nullptr, nullptr); }
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        command = [*compiler, "-std=c++17", "-fPIC", "-x", "c++", "-", "-ljpeg", "-o", os.devnull]
        subprocess.run(command, input=program, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return "no C++ compiler found"
    except subprocess.CalledProcessError:
        return "libjpeg-turbo >= 2.1 with its headers is not found"
    return None


def kernel_library(
    extension_type: Callable[..., Extension], name: str, *patterns: str, **flags: list[str]
) -> Extension:
    """A stable-ABI library. No -std: torch chooses the one its headers need; the version macro guards the ABI."""
    return extension_type(
        name,
        sorted(path for pattern in patterns for path in glob(pattern)),
        extra_compile_args={
            # Square roots are vectorised only where errno need not be set.
            "cxx": ["-O3", "-g0", "-fno-math-errno", "-fvisibility=hidden", *STABLE_ABI, *flags.get("cxx", [])],
            # -fvisibility does not reach nvcc's host side by itself, and the cuda::std symbols that two extensions then
            # share are known to crash them.
            "nvcc": [
                "-O3",
                "-lineinfo",
                "-Xcompiler",
                "-fvisibility=hidden,-fno-gnu-unique",
                *STABLE_ABI,
                "-DUSE_CUDA",
                *flags.get("nvcc", []),
            ],
        },
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,
    )


def numpy_module(name: str, pattern: str, include_paths: list[str], **options: Any) -> Extension:
    """A pybind11 module, with the pybind11 that torch brings along."""
    return Extension(
        name,
        sorted(glob(pattern)),
        include_dirs=[path for path in include_paths if Path(path, "pybind11").is_dir()],
        extra_compile_args={"cxx": ["-O3", "-g0", "-fno-math-errno", "-fvisibility=hidden"]},
        extra_link_args=LINK_FLAGS,
        language="c++",
        **options,
    )


def build_command(base: type, required: set[str], cuda_macros: list[tuple[str, str]]) -> type:
    """``build_ext`` that builds one extension at a time, so that a failure costs that library alone."""

    class BuildNative(base):
        def build_extensions(self) -> None:
            wanted, built = self.extensions, []
            for extension in wanted:
                if extension.name == CORE and CUDA in [other.name for other in built]:
                    extension.define_macros += cuda_macros  # build_info() tells what there is, not what was hoped for
                self.extensions = [extension]
                try:
                    super().build_extensions()
                # Compilers, ninja and torch's own checks raise unrelated types; all of them mean "not this library".
                except Exception as error:
                    if extension.name in required:
                        raise
                    say(f"{extension.name} could not be built and is left out: {error}")
                else:
                    built.append(extension)
            self.extensions = built

    return BuildNative


def native_build() -> dict[str, Any]:
    """``ext_modules`` and the ``build_ext`` command, or nothing where the package stays pure Python."""
    ext, cuda, jpeg = switch("DMJD_EXT"), switch("DMJD_CUDA"), switch("DMJD_JPEG")
    if ext == "off":
        for name, value in (("DMJD_CUDA", cuda), ("DMJD_JPEG", jpeg)):
            if value == "force":
                raise NativeBuildError(f"{name}=force needs DMJD_EXT=auto or force, got DMJD_EXT=off")
        return {}
    home = find_cuda_home()
    if home is not None:
        os.environ["CUDA_HOME"] = home  # cpp_extension reads it once, on import
    try:
        import torch
        from torch.utils import cpp_extension

        found = f"found torch {torch.__version__}" if torch.__version__ < TORCH_TARGET else None
    except ImportError as error:
        found = str(error)
    if found is not None:
        reason = (
            f"native libraries need torch >= {TORCH_TARGET} in the environment that builds them ({found}): "
            "`pip install torch`, then `pip install --no-build-isolation .`"
        )
        if "force" in (ext, cuda, jpeg):
            raise NativeBuildError(reason)
        say(f"installing pure Python, with a PyTorch reference for every op; {reason}")
        return {}

    extensions = [kernel_library(cpp_extension.CppExtension, CPU, "csrc/ops/cpu/*.cpp")]
    cuda_macros: list[tuple[str, str]] = []
    no_cuda = "DMJD_CUDA=off" if cuda == "off" else why_no_cuda(torch.version.cuda, home)
    if no_cuda is None:
        assert home is not None
        cuda_macros = [
            ("DMJD_CUDA_VERSION", f'"{toolkit_version(home)}"'),
            ("DMJD_CUDA_ARCHS", f'"{",".join(cuda_archs())}"'),
        ]
        sources = ("csrc/ops/cuda/*.cpp", "csrc/ops/cuda/*.cu")
        extensions.append(kernel_library(cpp_extension.CUDAExtension, CUDA, *sources, cxx=["-DUSE_CUDA"]))
        if any(arch.startswith("9.0") for arch in cuda_archs()):
            sources = ("csrc/ops/hopper/*.cpp", "csrc/ops/hopper/*.cu")
            flags = {"cxx": ["-DUSE_CUDA"], "nvcc": [HOPPER_ARCH]}
            extensions.append(kernel_library(cpp_extension.CUDAExtension, HOPPER, *sources, **flags))
    elif cuda == "force":
        raise NativeBuildError(f"DMJD_CUDA=force, but {no_cuda}")
    else:
        say(f"no CUDA kernels: {no_cuda}")
    includes = cpp_extension.include_paths()
    target = ("DMJD_TORCH_TARGET", f'"{TORCH_TARGET}"')
    extensions.append(numpy_module(CORE, "csrc/pybind/*.cpp", includes, define_macros=[target]))
    no_jpeg = "DMJD_JPEG=off" if jpeg == "off" else why_no_jpeg()
    if no_jpeg is None:
        extensions.append(numpy_module(JPEG, "csrc/jpeg/*.cpp", includes, libraries=["jpeg"]))
    elif jpeg == "force":
        raise NativeBuildError(f"DMJD_JPEG=force, but {no_jpeg}")
    else:
        say(f"no native JPEG decoder: {no_jpeg}")

    required = {CPU, CUDA, HOPPER, CORE, JPEG} if ext == "force" else set()
    required |= {name for name, value in ((CUDA, cuda), (HOPPER, cuda), (JPEG, jpeg)) if value == "force"}
    command = build_command(cpp_extension.BuildExtension, required, cuda_macros)
    return {"ext_modules": extensions, "cmdclass": {"build_ext": command}}


def long_description() -> str:
    """README.md for a package index, where relative links lead nowhere: they become links into DMJD_REPOSITORY, the
    repository's address, or plain text without it. A picture needs the address."""
    repository = os.environ.get("DMJD_REPOSITORY", "").rstrip("/")

    def link(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if re.match(r"https?:|#", target):
            return match[0]
        if not repository:
            return "" if picture else label
        return f"{picture}[{label}]({repository}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, Path("README.md").read_text(encoding="utf-8"))


def project_urls() -> dict[str, str]:
    """Links beside the description; those into the repository need DMJD_REPOSITORY."""
    repository = os.environ.get("DMJD_REPOSITORY", "").rstrip("/")
    pages = {"Repository": "", "Documentation": "/tree/HEAD/docs", "Changelog": "/blob/HEAD/CHANGELOG.md"}
    own = {name: repository + page for name, page in pages.items()} if repository else {}
    return {"Paper": "https://arxiv.org/abs/2301.00230", **own}


try:
    native = native_build()
except NativeBuildError as error:
    sys.exit(f"dmjd: {error}")
setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    **{**native, "cmdclass": {"build_py": BuildPy, **native.get("cmdclass", {})}},
)
