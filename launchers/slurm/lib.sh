# Shared by all batch scripts, which source it. Handles Slurm only; everything else is done by dmjd.
#
# A site file (sites/*.env, named by DMJD_SITE) may set:
#   DMJD_GPUS        GPUs of a node, for `dmjd submit` (8)
#   DMJD_PYTHON      Python interpreter on the compute nodes, or in the container (python)
#   DMJD_CONTAINER   image: FILE.sif for Apptainer, anything else for pyxis
#   DMJD_MOUNTS      folders mounted in the container, comma separated, HOST[:CONTAINER]
#   DMJD_RENDEZVOUS  c10d, or static if nodes cannot resolve each other's names (c10d)
#   DMJD_PROCESSES   processes per node (one per GPU)
#   DMJD_REQUEUE     false if the site forbids requeueing; use `dmjd submit chain=N` then (true)
#   DMJD_IDLE_LIMIT  consecutive launches without a new checkpoint before the job gives up (3)
# and variables of NCCL and gloo: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA.
# DMJD_MIN_NODES, of a job that was submitted with --no-kill, is set by `dmjd submit min_nodes=N`.
# shellcheck shell=bash
set -euo pipefail

log() { echo "$(date -u +%FT%TZ) dmjd: $*"; }

die() {
    log "error: $*" >&2
    exit 2
}

: "${SLURM_JOB_ID:?is not set: submit this script with sbatch, or use dmjd submit}"
: "${DMJD_LAUNCHERS:?is not set: the path of the launchers folder}"
if [[ -n ${DMJD_SITE:-} ]]; then
    [[ -r $DMJD_SITE ]] || die "DMJD_SITE=$DMJD_SITE is not a readable file; only dmjd submit accepts site names"
    # Lines are NAME=value without quotes. Variables that are already set take precedence.
    while IFS= read -r line || [[ -n $line ]]; do
        [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= && $line != SBATCH_* ]] || continue
        name=${line%%=*} value=${line#*=}
        export "$name=${!name:-${value%"${value##*[![:space:]]}"}}"
    done <"$DMJD_SITE"
fi

# Set ARGUMENTS to the arguments of the run: in a job array `%a` is replaced by the index.
read_arguments() {
    local argument
    ARGUMENTS=()
    for argument in "$@"; do
        # zsh does not expand ~ behind =, and a container may have another home.
        [[ ${argument#*=} != \~/* ]] || argument="${argument%%=*}=$HOME/${argument#*=\~/}"
        ARGUMENTS+=("${argument//%a/${SLURM_ARRAY_TASK_ID:-%a}}")
    done
}

# Launch `dmjd COMMAND ARGUMENT...` on all nodes, one torchrun agent on each. The exit code is of little use: after a
# signal an agent exits with 1 even if every rank saved and exited with 0.
launch() {
    local head name variable time
    # On the first node and outside any container: containers lack scontrol.
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    [[ -n $head ]] || die "no host name in SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"
    export DMJD_HEAD=$head DMJD_PORT=$((20000 + SLURM_JOB_ID % 20000))
    # Slurm before 23.02 does not set the times of the job, from which the run computes its time budget. date reads an
    # empty text as today 0:00, a limit in the past.
    for name in Start End; do
        variable=SLURM_JOB_${name^^}_TIME
        if [[ -z ${!variable:-} ]]; then
            time=$(job_field "${name}Time")
            [[ $time != *T* ]] || printf -v "$variable" %s "$(date -d "$time" +%s)"
        fi
    done
    export SLURM_JOB_START_TIME SLURM_JOB_END_TIME

    local agent=(bash "$DMJD_LAUNCHERS/slurm/node.sh" "$@")
    # srun of 22.05 to 23.02 does not inherit --cpus-per-task.
    local srun=(srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}")
    local watcher='' action=requeue
    if [[ -n ${DMJD_MIN_NODES:-} ]]; then
        srun+=(--no-kill --kill-on-bad-exit=0 --wait=0) # the agents of other nodes go on
        [[ -z ${DMJD_CHAIN:-} && ${DMJD_REQUEUE:-true} == true ]] || action=cancel
        local others=$((SLURM_NNODES - 1))
        srun --no-kill --overlap --nodes=$others --ntasks=$others --ntasks-per-node=1 --cpus-per-task=1 \
            --exclude="$head" bash "$DMJD_LAUNCHERS/slurm/first_node.sh" "$(job_name)" "$(job_log)" "$action" &
        watcher=$!
    else
        srun+=(--kill-on-bad-exit=1 --wait=60)
    fi
    local mounts='' folder
    for folder in "$PWD" ${DMJD_MOUNTS:+${DMJD_MOUNTS//,/ }}; do
        [[ $folder == *:* ]] || folder=$folder:$folder
        mounts+=${mounts:+,}$folder
    done
    case ${DMJD_CONTAINER:-} in
        '') ;;
        *.sif) agent=(apptainer exec --nv --pwd "$PWD" --bind "$mounts" "$DMJD_CONTAINER" "${agent[@]}") ;;
        *) srun+=(--container-image="$DMJD_CONTAINER" --container-workdir="$PWD" --container-mounts="$mounts") ;;
    esac
    # In the background: bash handles signals during wait only.
    "${srun[@]}" "${agent[@]}" &
    local step=$! code
    while true; do
        code=0
        wait "$step" || code=$?
        kill -0 "$step" 2>/dev/null || break
    done
    if [[ -n $watcher ]]; then
        kill -USR2 "$watcher" 2>/dev/null || true # srun passes it on; TERM would fill the log
        for _ in 1 2 3 4 5; do
            ! kill -0 "$watcher" 2>/dev/null || sleep 1
        done
    fi
    return "$code"
}

# Run a command that has no checkpoints: a requeued job starts it again.
run_once() {
    [[ $# -gt 1 ]] || die "${1:-COMMAND} needs arguments: key=value ..."
    unset DMJD_MIN_NODES
    local error
    error=$(container_error)
    [[ -z $error ]] || die "$error"
    read_arguments "$@"
    launch "${ARGUMENTS[@]}"
}

# Print why the container of the site cannot start on this node; nothing if it can.
container_error() {
    case ${DMJD_CONTAINER:-} in
        *.sif)
            command -v apptainer >/dev/null ||
                echo "DMJD_CONTAINER=$DMJD_CONTAINER needs apptainer, which is not installed on $HOSTNAME"
            ;;
        /* | ./* | ../*) ;;
        *) return 0 ;; # an image of a registry
    esac
    [[ -r $DMJD_CONTAINER ]] || echo "DMJD_CONTAINER=$DMJD_CONTAINER is not a readable image on $HOSTNAME"
}

# Train, and requeue the job until the run has finished. The exit record of a launch has the reason of its end, the
# checkpoints show whether it made progress.
train() {
    [[ ${DMJD_REQUEUE:-true} == @(true|false) ]] || die "DMJD_REQUEUE must be true or false, got $DMJD_REQUEUE"
    [[ ${DMJD_IDLE_LIMIT:-3} =~ ^[1-9][0-9]*$ ]] ||
        die "DMJD_IDLE_LIMIT must be an integer above 0, got $DMJD_IDLE_LIMIT"
    if [[ -n ${DMJD_MIN_NODES:-} ]]; then
        if [[ ! $DMJD_MIN_NODES =~ ^[1-9][0-9]*$ ]] || ((DMJD_MIN_NODES >= SLURM_NNODES)); then
            die "DMJD_MIN_NODES=$DMJD_MIN_NODES must be an integer above 0 and below the $SLURM_NNODES node(s) of the job"
        fi
        [[ ${DMJD_RENDEZVOUS:-c10d} == c10d ]] || die "DMJD_MIN_NODES needs DMJD_RENDEZVOUS=c10d"
    fi
    read_arguments "$@"
    # dmjd submit sets DMJD_RUN. The arguments may set run= by an experiment, in quotes or by ${...}.
    RUN=${DMJD_RUN:-$(value_of run "${ARGUMENTS[@]}")}
    [[ -n ${DMJD_RUN:-} || (-n $RUN && $RUN != *[\"\'\$]*) ]] ||
        die "the arguments must contain run=FOLDER, without quotes or \${...}; dmjd submit has no such limit"
    RUN=${RUN//%a/${SLURM_ARRAY_TASK_ID:-%a}}
    [[ $RUN != -* ]] || RUN=./$RUN # not an option of programs
    # dmjd submit creates the folder, except for arrays. A new folder would start the run from scratch.
    if [[ -n ${DMJD_RUN:-} && -z ${SLURM_ARRAY_TASK_ID:-} && ! -d $RUN ]] &&
        [[ ${SLURM_RESTART_COUNT:-0} -gt 0 || -n ${DMJD_CHAIN:-} ]]; then
        die "run=$RUN existed when this job was submitted and was removed; submit again to start from scratch"
    fi
    if ! mkdir -p "$RUN/slurm" || [[ ! -w $RUN/slurm ]]; then
        die "run=$RUN is not a writable folder; choose another"
    fi
    # A job that is cancelled, or preempted with requeueing by Slurm, must not requeue itself.
    CANCELLED=
    trap 'CANCELLED=yes' TERM
    trap : USR1 # for the ranks; it would end this shell

    local before idle path error
    before=$(committed_step)
    idle=$(idle_launches "$before")
    if ((idle >= ${DMJD_IDLE_LIMIT:-3})); then
        give_up "$idle launches in a row ended at step $before"
    fi
    if [[ -n ${DMJD_CHAIN:-} && -e $RUN/slurm/$DMJD_CHAIN.ended ]]; then
        log "nothing to do: $(cat "$RUN/slurm/$DMJD_CHAIN.ended")"
        exit 0
    fi
    path=$(job_log)
    path=${path//\\/\\\\}
    printf '{"of": "%s", "job": "%s", "restart": %d, "step": %d, "nodes": "%s", "when": "%s", "log": "%s"}\n' \
        "${DMJD_CHAIN:-$(job_name)}" "$(job_name)" "${SLURM_RESTART_COUNT:-0}" "$before" "$SLURM_JOB_NODELIST" \
        "$(date -u +%FT%TZ)" "${path//\"/\\\"}" >>"$RUN/slurm/launches.jsonl"
    log "job $(job_name) on $SLURM_JOB_NODELIST, launch $((${SLURM_RESTART_COUNT:-0} + 1)), from step $before of $RUN"
    # A file of this launch alone: RUN/STOP_REASON may belong to another job by the time this one reads it. The path
    # starts with $RUN as given, since the target of a link may not be mounted in a container.
    rm -f "$RUN/slurm/last_word-$(job_name)-"*
    DMJD_EXIT_RECORD=$RUN/slurm/last_word-$(job_name)-${SLURM_RESTART_COUNT:-0}
    export DMJD_EXIT_RECORD DMJD_LAST_WORD=$DMJD_EXIT_RECORD # the former name, for an older dmjd in a container
    local code=0
    error=$(container_error)
    if [[ -n $error ]]; then
        echo "error: ${error%%$'\n'*}" >"$DMJD_EXIT_RECORD"
    else
        launch "${ARGUMENTS[@]}" || code=$?
    fi
    settle "$before" "$code"
}

# Requeue the job or end it, after a launch that began at step $1 and had exit code $2.
settle() {
    local before=$1 code=$2 now after reason='' detail='' advice='' idle limit=${DMJD_IDLE_LIMIT:-3}
    # On a node that was only unreachable this shell still runs, while Slurm has restarted the job on other nodes.
    now=$(job_field Restarts)
    if ((${now:-0} > ${SLURM_RESTART_COUNT:-0})); then
        log "Slurm has restarted this job on other nodes; this launch does nothing more"
        exit 1
    fi
    if [[ -z $CANCELLED && ! (-d $RUN/slurm && -r $RUN && -w $RUN && -x $RUN) ]]; then
        log "not requeued: run=$RUN was removed, is not a folder or is not accessible; submit again to restart"
        exit 1
    fi
    if [[ -n ${DMJD_CONTAINER:-} && $code -ne 0 && -z $CANCELLED ]] &&
        [[ ! -e $DMJD_EXIT_RECORD && ! -e $DMJD_EXIT_RECORD.started ]]; then
        echo "error: DMJD_CONTAINER=$DMJD_CONTAINER started on no node (srun: $code); see the job's log" \
            >"$DMJD_EXIT_RECORD"
    fi
    rm -f "$DMJD_EXIT_RECORD.started"
    after=$(committed_step)
    if [[ -s $DMJD_EXIT_RECORD ]]; then
        { IFS= read -r detail || true; IFS= read -r advice || true; } <"$DMJD_EXIT_RECORD"
        reason=${detail%%: *} detail=${detail#*: }
    fi
    log "stopped at step $after (began at $before): ${reason:-killed}${detail:+, $detail}"
    if [[ -n $CANCELLED ]]; then
        log "this job was cancelled or preempted; committed checkpoints are intact"
        exit $((128 + 15))
    fi
    case $reason in
        finished | file)
            ended "$reason"
            exit 0
            ;;
        diverged)
            give_up "$detail; next: $advice"
            ;;
        error) # the user has to fix something
            limit=1
            ;;
        crashed) # try once more: the GPU or the node may be at fault
            limit=$((limit < 2 ? limit : 2))
            ;;
    esac
    idle=$(idle_launches "$after")
    if ((after == before && idle >= limit)); then
        ((idle > 1)) || give_up "${detail:-a launch ended at step $after}"
        give_up "$idle launches in a row ended at step $after${detail:+: $detail}"
    fi
    if [[ -n ${DMJD_CHAIN:-} ]]; then
        log "the next job of the chain resumes"
        exit 0
    fi
    if [[ ${DMJD_REQUEUE:-true} != true ]]; then
        log "submit it again to resume: this site does not requeue"
        exit $((code ? code : 1))
    fi
    log "requeued"
    trap - TERM # Slurm ends this shell by it
    local try
    for try in 1 2 3 4 5; do
        ! scontrol requeue "$(job_name)" || exit 0
        log "scontrol requeue failed (attempt $try)"
        sleep 20 # the controller may be busy
    done
    die "Slurm did not requeue this job; submit it again, or with chain=N"
}

give_up() {
    log "not requeued: $1"
    log "see: dmjd doctor $RUN"
    ended "gave up: $1"
    exit 1
}

# End the following jobs of a chain.
ended() {
    [[ -z ${DMJD_CHAIN:-} ]] || echo "$1" >"$RUN/slurm/$DMJD_CHAIN.ended"
}

# The name of the job for scontrol: SLURM_JOB_ID of a job in an array would requeue another one.
job_name() {
    echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
}

# scontrol show job; empty if it fails.
job_info() {
    scontrol show job "$(job_name)" 2>/dev/null || true
}

# The path of the job's log, in a line of its own: it may contain KEY=.
job_log() {
    job_info | sed -n 's/^ *StdOut=//p'
}

# A field of job_info without spaces.
job_field() {
    job_info | sed -n "s/^\(.* \)\{0,1\}$1=//p" | sed 's/ .*//'
}

# value_of KEY ARGUMENT...: the value of the last KEY=VALUE; empty if there is none.
value_of() {
    local key=$1 value='' argument
    shift
    for argument in "$@"; do [[ $argument != "$key="* ]] || value=${argument#*=}; done
    printf '%s\n' "$value"
}

# Optimizer steps of the newest committed checkpoint; 0 without one. Folders with other names are copies by users.
committed_step() {
    local manifest name step=0
    for manifest in "$RUN"/checkpoints/step-*/manifest.json; do
        name=${manifest%/manifest.json} name=${name##*/}
        [[ ! -e $manifest || ! $name =~ ^step-[0-9]{8,}$ ]] || step=$name
    done
    echo $((10#${step#step-}))
}

# Number of consecutive launches of this job or chain, the last included, that began at step $1. awk reads the list from
# its standard input: a file name such as lr=1/slurm/launches.jsonl would be an assignment.
idle_launches() {
    [[ -f $RUN/slurm/launches.jsonl ]] || { echo 0 && return; }
    awk -v of="\"of\": \"${DMJD_CHAIN:-$(job_name)}\"" -v step="\"step\": $1," '
        index($0, of) { count = index($0, step) ? count + 1 : 0 } END { print count + 0 }' <"$RUN/slurm/launches.jsonl"
}
