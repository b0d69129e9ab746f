#!/usr/bin/env bash
# Pre-train with DeepSpeed's launcher: launchers/deepspeed/pretrain.sh engine=zero2 experiment=... key=value ...
# Uses every GPU of this host, or of the hosts in HOSTFILE=FILE (see hostfile.example), by ssh without a password.
# PROCESSES: processes per host. PORT: of the rendezvous (29500). `touch RUN/stop` makes all ranks save and exit; the
# launcher does not forward signals as requests. torchrun does, needs no ssh and takes the same arguments:
# ../torchrun/several_hosts.sh.
set -euo pipefail
[[ " $*" == *" engine="* ]] || set -- engine=zero2 "$@"
options=(--master_port "${PORT:-29500}")
[[ -z ${HOSTFILE:-} || -r $HOSTFILE ]] || { # DeepSpeed would use this host alone
    echo "error: HOSTFILE=$HOSTFILE is not a readable file; see launchers/deepspeed/hostfile.example" >&2
    exit 2
}
[[ -z ${HOSTFILE:-} ]] || options+=(--hostfile "$HOSTFILE")
[[ -z ${PROCESSES:-} ]] || options+=(--num_gpus "$PROCESSES")
# --no_local_rank: do not add --local_rank to the arguments; LOCAL_RANK is set.
exec deepspeed --no_local_rank "${options[@]}" --module dmjd "${DMJD_COMMAND:-pretrain}" "$@"
