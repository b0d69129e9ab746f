#!/usr/bin/env bash
# Pre-train on every GPU of several hosts: the same line on each, at about the same time,
#
#     HOSTS=4 HEAD=node1 launchers/torchrun/several_hosts.sh experiment=... run=/shared/runs/first
#
# HEAD is the name or address of one of them, as all others reach it. The run folder, and the data if they are files, are
# on a disk that all see. Where names do not resolve alike everywhere, HOST=0 (1, 2, ... on the others) and an
# address as HEAD do without. PORT (29400) and PROCESSES (the GPUs) may be set. `touch RUN/stop` makes all ranks save and
# leave. So does a TERM or USR1 to this process, but send it on every host: agents that hear nothing wait five minutes
# for those that have left.
set -euo pipefail
: "${HOSTS:?the number of hosts}" "${HEAD:?one of the hosts, as the others reach it}"
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)} || {
    echo "error: nvidia-smi lists no GPUs here; PROCESSES=2, for one, starts as many without" >&2
    exit 2
}
PORT=${PORT:-29400}
[[ " $*" == *" engine="* ]] || set -- engine=ddp "$@"
if [[ ${HOST:-} =~ ^[0-9]+$ ]]; then # tcsh and some systems keep the host's name in it
    meet=(--rdzv-backend=static --node-rank="$HOST" --master-addr="$HEAD" --master-port="$PORT")
else
    meet=(--rdzv-backend=c10d --rdzv-id=dmjd --rdzv-endpoint="$HEAD:$PORT")
fi
exec "${DMJD_PYTHON:-python}" "$(dirname "$0")/../agent.py" --nnodes="$HOSTS" --nproc-per-node="$PROCESSES" "${meet[@]}" \
    --max-restarts=0 "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" -m dmjd pretrain "$@"
