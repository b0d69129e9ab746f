#!/usr/bin/env bash
# Pre-train with DeepSpeed's launcher: launchers/deepspeed/pretrain.sh engine=zero2 experiment=... key=value ...
# Every GPU of this host; HOSTFILE=FILE (see hostfile.example) takes those of several, reached by ssh without a password.
# PROCESSES sets another number of processes on each, PORT (29500) the port where they meet. `touch RUN/stop` makes all
# ranks save and leave; the launcher passes no other request on. The same words work under torchrun, which needs no ssh
# and does: see ../torchrun/several_hosts.sh.
set -euo pipefail
[[ " $*" == *" engine="* ]] || set -- engine=zero2 "$@"
options=(--master_port "${PORT:-29500}")
[[ -z ${HOSTFILE:-} || -r $HOSTFILE ]] || { # without which DeepSpeed would take this host alone
    echo "error: HOSTFILE=$HOSTFILE is not a file that can be read; see launchers/deepspeed/hostfile.example" >&2
    exit 2
}
[[ -z ${HOSTFILE:-} ]] || options+=(--hostfile "$HOSTFILE")
[[ -z ${PROCESSES:-} ]] || options+=(--num_gpus "$PROCESSES")
# --no_local_rank: the launcher would add a word of its own to each process's; LOCAL_RANK says the same.
exec deepspeed --no_local_rank "${options[@]}" --module dmjd pretrain "$@"
