#!/usr/bin/env bash
# Train on every GPU of several hosts; DMJD_COMMAND is pretrain (default), finetune, segment or detect. Run the same
# command on each, at about the same time:
#
#     HOSTS=4 HEAD=node1 launchers/torchrun/several_hosts.sh experiment=... run=/shared/runs/first
#
# HEAD is the name or address of one of the hosts. The run folder and data files must be on a shared disk. If host names
# do not resolve alike everywhere, set HOST=0 (1, 2, ... on the others) and HEAD to an address. PORT (29400) and
# PROCESSES (default: GPUs) may be set. `touch RUN/stop` makes all ranks save and exit. So does TERM or USR1 to this
# process; send it on every host, since an agent without the signal waits five minutes for the others.
#
# MIN_HOSTS: if hosts are lost and at least so many are left, with HEAD among them, they go on from the newest checkpoint.
set -euo pipefail
: "${HOSTS:?is not set: the number of hosts}" "${HEAD:?is not set: name or address of one of the hosts}"
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)} || {
    echo "error: nvidia-smi lists no GPUs on this host; set PROCESSES to start processes without GPUs" >&2
    exit 2
}
PORT=${PORT:-29400}
[[ " $*" == *" engine="* ]] || set -- engine=ddp "$@"
nodes=$HOSTS restarts=0
if [[ -n ${MIN_HOSTS:-} ]]; then
    if [[ ${HOST:-} =~ ^[0-9]+$ || ! $MIN_HOSTS =~ ^[1-9][0-9]*$ ]] || ((MIN_HOSTS >= HOSTS)); then
        echo "error: MIN_HOSTS=$MIN_HOSTS must be an integer from 1 to HOSTS - 1, without a number in HOST" >&2
        exit 2
    fi
    nodes=$MIN_HOSTS:$HOSTS restarts=$((HOSTS - MIN_HOSTS))
    export DMJD_FULL_WORLD_SIZE=$((HOSTS * PROCESSES))
fi
if [[ ${HOST:-} =~ ^[0-9]+$ ]]; then # some shells set HOST to the host's name
    rendezvous=(--rdzv-backend=static --node-rank="$HOST" --master-addr="$HEAD" --master-port="$PORT")
else
    rendezvous=(--rdzv-backend=c10d --rdzv-id=dmjd --rdzv-endpoint="$HEAD:$PORT")
fi
exec "${DMJD_PYTHON:-python}" "$(dirname "$0")/../agent.py" --nnodes="$nodes" --nproc-per-node="$PROCESSES" \
    "${rendezvous[@]}" --max-restarts="$restarts" "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" \
    -m dmjd "${DMJD_COMMAND:-pretrain}" "$@"
