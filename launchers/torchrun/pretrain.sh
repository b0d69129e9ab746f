#!/usr/bin/env bash
# Pre-train on every GPU of this host: launchers/torchrun/pretrain.sh experiment=... key=value ...
# PROCESSES sets another number of processes.
set -euo pipefail
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)}
exec torchrun --standalone --nproc-per-node="$PROCESSES" -m dmjd pretrain engine=ddp "$@"
