#!/usr/bin/env bash
# The part of a job on one node: a torchrun agent with one process per GPU. Run by srun, in the container if any.
set -euo pipefail
shopt -s extglob

python=${DMJD_PYTHON:-python}
# Shows the batch script that the container has started.
[[ -z ${DMJD_EXIT_RECORD:-} ]] || touch "$DMJD_EXIT_RECORD.started" 2>/dev/null || true
if ! output=$("$python" -c '' 2>&1); then
    output=${output##*$'\n'}
    error="error: DMJD_PYTHON=$python does not run on $HOSTNAME: ${output##*: line +([0-9]): }"
    echo "$error" >&2
    # The exit record, for the batch script and dmjd doctor. The first node writes it.
    [[ -z ${DMJD_EXIT_RECORD:-} ]] || (set -o noclobber && echo "$error" >"$DMJD_EXIT_RECORD") 2>/dev/null || true
    exit 2
fi
processes=${DMJD_PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_ON_NODE > processes ? SLURM_CPUS_ON_NODE / processes : 1))}
export PYTHONFAULTHANDLER=${PYTHONFAULTHANDLER:-1}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Rerouting of an InfiniBand fabric takes longer than NCCL's default of 20.
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
# Seconds that ranks have to save after the signal, which comes 300 s before the time limit (--signal in the scripts).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-280}

# If a rank dies the launch ends, and Slurm restarts the job, on other nodes if one is down.
nodes=$SLURM_NNODES restarts=0
if [[ -n ${DMJD_MIN_NODES:-} ]]; then
    # The remaining nodes start the ranks again, once for each node that may be lost.
    nodes=$DMJD_MIN_NODES:$SLURM_NNODES restarts=$((SLURM_NNODES - DMJD_MIN_NODES))
    export DMJD_FULL_WORLD_SIZE=$((SLURM_NNODES * processes))
fi
agent=(
    "$python" "$DMJD_LAUNCHERS/agent.py"
    --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts="$restarts"
    # Slurm signals this process only. It has to forward the signal; by default it would exit and kill the ranks.
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
)
case ${DMJD_RENDEZVOUS:-c10d} in
    c10d)
        # With the restart count in the id, an agent left over from another launch cannot join.
        agent+=(--rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
            --rdzv-endpoint="$DMJD_HEAD:$DMJD_PORT")
        ;;
    static)
        # No name look-ups.
        agent+=(--rdzv-backend=static --node-rank="$SLURM_NODEID" --master-addr="$DMJD_HEAD" --master-port="$DMJD_PORT")
        ;;
    *)
        echo "error: DMJD_RENDEZVOUS must be c10d or static, got $DMJD_RENDEZVOUS" >&2
        exit 2
        ;;
esac
# exec: Slurm signals the processes that it started, not their children.
if [[ -n ${DMJD_START:-} ]]; then
    exec "${agent[@]}" "$DMJD_START" "$@"
fi
exec "${agent[@]}" -m dmjd "$@"
