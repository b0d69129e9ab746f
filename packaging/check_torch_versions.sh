#!/usr/bin/env bash
# The ABI promise, tried: a wheel built on one torch serves another, in both directions.
#
#     packaging/check_torch_versions.sh [OLDEST [NEWEST]]     default: 2.11.0, and what pip finds
#
# Makes one environment for each torch in build/torch-VERSION (about 5 GB and a minute each; they are kept for the next
# time), builds a wheel in each, installs it in the other one and runs the tests of the ops there. PYTHON chooses the
# interpreter; DMJD_CUDA=off leaves the CUDA library out. On a machine with a card, add GPU=1 to run those tests too.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD
python=${PYTHON:-python3}
export DMJD_EXT=force DMJD_CUDA=${DMJD_CUDA:-auto} MAX_JOBS=${MAX_JOBS:-2} OMP_NUM_THREADS=1

environment() { # VERSION -> the interpreter of an environment that has that torch
    local home=$root/build/torch-$1 want=torch
    [[ $1 == newest ]] || want=torch==$1
    [[ -x $home/bin/python ]] || "$python" -m venv "$home" >&2
    # numpy and scikit-image are what the tests compare with.
    "$home/bin/python" -m pip -qq install "$want" 'setuptools>=77' ninja pytest numpy scikit-image >&2
    echo "$home/bin/python"
}

wheel_of() { # INTERPRETER -> the wheel built with its torch
    local folder
    folder=$(mktemp -d -p "$work")
    "$1" -m pip -qq wheel --no-build-isolation --no-deps -w "$folder" "$work/source" >&2
    echo "$folder"/dmjd-*.whl
}

check() { # INTERPRETER WHEEL: the tests of the ops, far from the checkout
    "$1" -m pip -qq install --force-reinstall --no-deps "$2"
    (
        cd "$work/tests"
        "$1" -c 'import dmjd, torch; print(f"torch {torch.__version__}, dmjd from {dmjd.__path__[0]}")'
        # The libraries have to load: with a reference behind every op, the tests alone would pass without them.
        "$1" -c 'from dmjd.ops import status; assert status()["philox4x32"]["CPU"] == "native", status()'
        [[ $DMJD_CUDA == off ]] || "$1" -c 'import torch, dmjd.ops, importlib.util as u
if u.find_spec("dmjd._C_cuda") and torch.version.cuda: import dmjd._C_cuda; print("the CUDA library loads")
if u.find_spec("dmjd._C_hopper") and torch.version.cuda: import dmjd._C_hopper; print("the Hopper library loads")'
        "$1" -m pytest -q ops
        [[ -z ${GPU:-} ]] || "$1" -m pytest -q -m gpu ops
    )
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$(mkdir -p "$work/source" && echo "$work/source")"
mkdir "$work/tests"
cp -r tests/ops "$work/tests/ops"
cp pyproject.toml "$work/tests"

oldest=$(environment "${1:-2.11.0}")
newest=$(environment "${2:-newest}")
old_wheel=$(wheel_of "$oldest")
new_wheel=$(wheel_of "$newest")
echo "== built on the oldest, run on the newest"
check "$newest" "$old_wheel"
echo "== built on the newest, run on the oldest"
check "$oldest" "$new_wheel"
