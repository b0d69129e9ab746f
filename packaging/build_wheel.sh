#!/usr/bin/env bash
# The release wheel: built from the sdist in a clean folder, with kernels for every card we support, and checked.
#
#     packaging/build_wheel.sh [FOLDER]        default: dist/
#
# Needs an environment with torch, setuptools >= 77, ninja, pip, a compiler, `nm` and a CUDA toolkit of torch's major
# version; no GPU. PYTHON chooses the interpreter. The op libraries serve every torch >= 2.11 and every Python; dmjd._core
# ties the wheel to one Python minor version, so build once for each. TORCH_CUDA_ARCH_LIST replaces the cards below.
#
# Where auditwheel and patchelf are installed the wheel gets its manylinux tag; for an older glibc, build in an older image.
# Elsewhere the tag stays linux_x86_64: good for a cluster, an own index or an image, and refused by a public index.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
export DMJD_EXT=force DMJD_CUDA=${DMJD_CUDA:-force} MAX_JOBS=${MAX_JOBS:-2}
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-8.0;8.6;8.9;9.0;10.0;12.0+PTX}

mkdir -p "${1:-dist}"
target=$(cd "${1:-dist}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# An egg-info of its own: setuptools adds to an sdist whatever an older one lists.
DMJD_EXT=off DMJD_CUDA=off DMJD_JPEG=off "$python" setup.py -q egg_info -e "$work" sdist -d "$work"
"$python" -m pip -qq wheel --no-build-isolation --no-deps -w "$work" "$work"/dmjd-*.tar.gz
wheel=$(echo "$work"/dmjd-*.whl)

"$python" packaging/check_wheel.py "$wheel"

if "$python" -m auditwheel --version >/dev/null 2>&1; then
    # torch's libraries and CUDA's runtime come with the user's torch, and must not be copied into the wheel.
    "$python" -m auditwheel repair -w "$work/tagged" --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcudart*' \
        "$wheel"
    wheel=$(echo "$work"/tagged/dmjd-*.whl)
else
    echo "no auditwheel here: the tag stays $(basename "$wheel" .whl | cut -d- -f5)"
fi

# dmjd.ops compares the GPU with build_info.
"$python" - "$wheel" <<'PYTHON'
import sys, tempfile, zipfile

with tempfile.TemporaryDirectory() as folder:
    zipfile.ZipFile(sys.argv[1]).extractall(folder)
    sys.path.insert(0, folder)
    from dmjd._core import build_info

    info = build_info()
print(f"built by {info['compiler']}, CUDA {info['cuda']} for {';'.join(info['cuda_archs']) or 'no card'}")
PYTHON

cp "$wheel" "$work"/dmjd-*.tar.gz "$target"
ls -sh "$target"
