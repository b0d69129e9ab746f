#!/usr/bin/env bash
# Pre-train with DeepSpeed's launcher: launchers/deepspeed/pretrain.sh engine=zero2 experiment=... key=value ...
# Every GPU of this host; HOSTFILE=FILE (see hostfile.example) takes those of several, reached by ssh without a password.
# The same words work under torchrun, which needs no ssh: see ../torchrun/pretrain.sh.
set -euo pipefail
HOSTS=()
[[ -z ${HOSTFILE:-} ]] || HOSTS=(--hostfile "$HOSTFILE")
# --no_local_rank: the launcher would add a word of its own to each process's; LOCAL_RANK says the same.
exec deepspeed --no_local_rank "${HOSTS[@]}" --module dmjd pretrain "$@"
