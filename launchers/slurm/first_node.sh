#!/usr/bin/env bash
# On all nodes of an elastic job but the first: first_node.sh JOB LOG ACTION, where ACTION is requeue or cancel.
#
# Slurm does not end a job with --no-kill when it loses the first node, and with it the batch script: the job would stay
# without a script until its time limit. So the next node requeues it once Slurm has taken the first out of the job.
set -uo pipefail
job=$1 log=$2 action=$3
trap : USR1 # for the ranks
trap 'exit 0' USR2
while true; do
    sleep 20 &
    wait $! # unlike sleep it ends with a signal
    list=$(scontrol show job "$job" 2>/dev/null | sed -n 's/^ *NodeList=//p')
    [[ -n $list && $list != '(null)' ]] || continue
    nodes=$(scontrol show hostnames "$list")
    [[ $'\n'$nodes$'\n' != *$'\n'$DMJD_HEAD$'\n'* && ${nodes%%$'\n'*} == "$SLURMD_NODENAME" ]] || continue
    echo "$(date -u +%FT%TZ) dmjd: the first node $DMJD_HEAD is lost, with the batch script and the store of the" \
        "rendezvous: $action" >>"$log"
    if [[ $action == requeue ]]; then
        scontrol requeue "$job" && exit
    else
        scancel "$job" && exit
    fi
done
