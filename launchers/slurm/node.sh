#!/usr/bin/env bash
# One node's part of a job: a torchrun agent with one process a GPU. Run by srun, in the container if there is one.
set -euo pipefail
shopt -s extglob

python=${DMJD_PYTHON:-python}
# The batch script reads it: the container has started, if there is one.
[[ -z ${DMJD_EXIT_RECORD:-} ]] || touch "$DMJD_EXIT_RECORD.started" 2>/dev/null || true
if ! said=$("$python" -c '' 2>&1); then
    said=${said##*$'\n'}
    error="error: DMJD_PYTHON=$python does not run on $HOSTNAME: ${said##*: line +([0-9]): }"
    echo "$error" >&2
    # For the batch script, which does not requeue for that, and for dmjd doctor. The first node's word stands.
    [[ -z ${DMJD_EXIT_RECORD:-} ]] || (set -o noclobber && echo "$error" >"$DMJD_EXIT_RECORD") 2>/dev/null || true
    exit 2
fi
processes=${DMJD_PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_ON_NODE > processes ? SLURM_CPUS_ON_NODE / processes : 1))}
export PYTHONFAULTHANDLER=${PYTHONFAULTHANDLER:-1}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# An InfiniBand fabric that reroutes takes longer than the 20 of NCCL.
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
# How long ranks may take to save after a signal, which comes 300 s before the end (see --signal in the scripts).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-280}

agent=(
    "$python" "$DMJD_LAUNCHERS/agent.py"
    --nnodes="$SLURM_NNODES" --nproc-per-node="$processes"
    # A rank that dies ends the job, and Slurm starts it anew where nodes are sound; a restart in place would hide them.
    --max-restarts=0
    # Slurm's signal reaches this process alone, which without this would die of it and take the ranks along, unsaved.
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
)
case ${DMJD_RENDEZVOUS:-c10d} in
    c10d)
        # The restart is part of the name, so that an agent left over from another launch finds nobody to join.
        agent+=(--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
            --rdzv-endpoint="$DMJD_HEAD:$DMJD_PORT")
        ;;
    static)
        # Without names, which would be looked up again on every node.
        agent+=(--rdzv-backend=static --node-rank="$SLURM_NODEID" --master-addr="$DMJD_HEAD" --master-port="$DMJD_PORT")
        ;;
    *)
        echo "error: DMJD_RENDEZVOUS must be c10d or static, got $DMJD_RENDEZVOUS" >&2
        exit 2
        ;;
esac
# In its place: Slurm signals the processes that it started, not their children.
if [[ -n ${DMJD_START:-} ]]; then
    exec "${agent[@]}" "$DMJD_START" "$@"
fi
exec "${agent[@]}" -m dmjd "$@"
