# What every batch script here shares. Sourced, never run; it knows Slurm and leaves everything else to dmjd.
#
# A site file (sites/*.env, named by DMJD_SITE) may set:
#   DMJD_GPUS       GPUs of a whole node, for `dmjd submit` (8)
#   DMJD_PYTHON      the Python of the compute nodes, or of the container (python)
#   DMJD_CONTAINER   an image: FILE.sif runs under Apptainer, anything else goes to pyxis
#   DMJD_MOUNTS      folders the container sees, comma separated as HOST[:CONTAINER]
#   DMJD_RENDEZVOUS  c10d, or static where nodes cannot resolve each other's names (c10d)
#   DMJD_PROCESSES   processes on a node (its GPUs)
#   DMJD_REQUEUE     true; false where the site forbids it, and `dmjd submit chain=N` is the way (true)
#   DMJD_IDLE_LIMIT  launches in a row that may end without a new checkpoint before the job gives up (3)
# and whatever NCCL and gloo want to know: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA.
# shellcheck shell=bash
set -euo pipefail

say() { echo "$(date -u +%FT%TZ) dmjd: $*"; }

die() {
    say "error: $*" >&2
    exit 2
}

: "${SLURM_JOB_ID:?is set inside a job: submit this script with sbatch, or use dmjd submit}"
: "${DMJD_LAUNCHERS:?names the launchers folder}"
if [[ -n ${DMJD_SITE:-} ]]; then
    [[ -r $DMJD_SITE ]] || die "DMJD_SITE=$DMJD_SITE is not a file that can be read here; dmjd submit takes shipped names"
    # Plain NAME=value lines, without a shell's quotes. What was set for this job outranks them.
    while IFS= read -r line || [[ -n $line ]]; do
        [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= && $line != SBATCH_* ]] || continue
        name=${line%%=*} value=${line#*=}
        export "$name=${!name:-${value%"${value##*[![:space:]]}"}}"
    done <"$DMJD_SITE"
fi

# The words of a job as its run is to see them, in WORDS: `%a` is the index of an array's job, and elsewhere itself.
read_words() {
    local word
    WORDS=()
    for word in "$@"; do
        # bash has done this where it was typed, zsh has not, and a container may have another home than this shell.
        [[ ${word#*=} != \~/* ]] || word="${word%%=*}=$HOME/${word#*=\~/}"
        WORDS+=("${word//%a/${SLURM_ARRAY_TASK_ID:-%a}}")
    done
}

# Launch `dmjd VERB WORD...` on all nodes, one torchrun agent on each. Its exit code says little: an agent that was
# told to stop leaves with 1 even when every rank saved and left with 0.
launch() {
    local head name variable time
    # Before srun and outside any container, for neither scontrol nor this expansion would be right on another node.
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    [[ -n $head ]] || die "no host name in SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"
    export DMJD_HEAD=$head DMJD_PORT=$((20000 + SLURM_JOB_ID % 20000))
    # Slurm before 23.02 does not say when a job begins and ends, which the run's time budget goes by. Of an empty text date would
    # make this morning, after which a run stops at once.
    for name in Start End; do
        variable=SLURM_JOB_${name^^}_TIME
        if [[ -z ${!variable:-} ]]; then
            time=$(known "${name}Time")
            [[ $time != *T* ]] || printf -v "$variable" %s "$(date -d "$time" +%s)"
        fi
    done
    export SLURM_JOB_START_TIME SLURM_JOB_END_TIME

    local agent=(bash "$DMJD_LAUNCHERS/slurm/node.sh" "$@")
    # From 22.05 to 23.02 srun does not inherit the number of processors.
    local srun=(srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"
        --kill-on-bad-exit=1 --wait=60)
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
    # In the background, so that this shell hears signals while it waits.
    "${srun[@]}" "${agent[@]}" &
    local step=$! code
    while true; do
        code=0
        wait "$step" || code=$?
        kill -0 "$step" 2>/dev/null || return "$code"
    done
}

# Run a verb that ends by itself and is simply done again if it did not.
run_once() {
    [[ $# -gt 1 ]] || die "arguments are missing: ${1:-COMMAND} key=value ..."
    local error
    error=$(container_error)
    [[ -z $error ]] || die "$error"
    read_words "$@"
    launch "${WORDS[@]}"
}

# Print why the container of the site cannot start on this node; nothing if it may.
container_error() {
    case ${DMJD_CONTAINER:-} in
        *.sif)
            command -v apptainer >/dev/null ||
                echo "DMJD_CONTAINER=$DMJD_CONTAINER needs apptainer, which $HOSTNAME does not have"
            ;;
        /* | ./* | ../*) ;;
        *) return 0 ;; # an image of a registry
    esac
    [[ -r $DMJD_CONTAINER ]] || echo "DMJD_CONTAINER=$DMJD_CONTAINER is not an image that $HOSTNAME can read"
}

# Train, and see to it that training goes on: the last word of a launch tells why it ended, the checkpoints whether it
# got anywhere.
train() {
    [[ ${DMJD_REQUEUE:-true} == @(true|false) ]] || die "DMJD_REQUEUE must be true or false, got $DMJD_REQUEUE"
    [[ ${DMJD_IDLE_LIMIT:-3} =~ ^[1-9][0-9]*$ ]] ||
        die "DMJD_IDLE_LIMIT must be a whole number above 0, got $DMJD_IDLE_LIMIT"
    read_words "$@"
    # Words alone do not say where the run is: an experiment may, and what they say may be in quotes or refer to others.
    RUN=${DMJD_RUN:-$(value_of run "${WORDS[@]}")}
    [[ -n ${DMJD_RUN:-} || (-n $RUN && $RUN != *[\"\'\$]*) ]] ||
        die "by hand a job's words must hold run=FOLDER, without quotes; dmjd submit takes them as dmjd $1 does"
    RUN=${RUN//%a/${SLURM_ARRAY_TASK_ID:-%a}}
    [[ $RUN != -* ]] || RUN=./$RUN # which programs would take for an option
    # dmjd submit made the folder, but for jobs of an array. A new one would begin anew.
    if [[ -n ${DMJD_RUN:-} && -z ${SLURM_ARRAY_TASK_ID:-} && ! -d $RUN ]] &&
        [[ ${SLURM_RESTART_COUNT:-0} -gt 0 || -n ${DMJD_CHAIN:-} ]]; then
        die "run=$RUN was there when this job was submitted and is gone; submit again to begin anew"
    fi
    if ! mkdir -p "$RUN/slurm" || [[ ! -w $RUN/slurm ]]; then
        die "run=$RUN is not a folder that can be written to; name another"
    fi
    # A job that is cancelled, or preempted by Slurm's own requeueing, must not put itself into the queue again.
    CANCELLED=
    trap 'CANCELLED=yes' TERM
    trap : USR1 # is for the ranks, and would end this shell

    local before idle log error
    before=$(committed_step)
    idle=$(idle_launches "$before")
    if ((idle >= ${DMJD_IDLE_LIMIT:-3})); then
        give_up "$idle launches in a row ended at step $before"
    fi
    if [[ -n ${DMJD_CHAIN:-} && -e $RUN/slurm/$DMJD_CHAIN.ended ]]; then
        say "nothing to do: $(cat "$RUN/slurm/$DMJD_CHAIN.ended")"
        exit 0
    fi
    log=$(about_job | sed -n 's/^ *StdOut=//p') # has a line of its own, and may hold what looks like the next field
    log=${log//\\/\\\\}
    printf '{"of": "%s", "job": "%s", "restart": %d, "step": %d, "nodes": "%s", "when": "%s", "log": "%s"}\n' \
        "${DMJD_CHAIN:-$(job_name)}" "$(job_name)" "${SLURM_RESTART_COUNT:-0}" "$before" "$SLURM_JOB_NODELIST" \
        "$(date -u +%FT%TZ)" "${log//\"/\\\"}" >>"$RUN/slurm/launches.jsonl"
    say "job $(job_name) on $SLURM_JOB_NODELIST, launch $((${SLURM_RESTART_COUNT:-0} + 1)) of it, from step $before of $RUN"
    # A file of this launch alone: RUN/STOP_REASON belongs to whoever holds the folder, which may be another job by the
    # time this one looks. Named as the run is, for a container need not see where a link leads.
    rm -f "$RUN/slurm/last_word-$(job_name)-"*
    DMJD_EXIT_RECORD=$RUN/slurm/last_word-$(job_name)-${SLURM_RESTART_COUNT:-0}
    export DMJD_EXIT_RECORD
    local code=0
    error=$(container_error)
    if [[ -n $error ]]; then
        echo "error: ${error%%$'\n'*}" >"$DMJD_EXIT_RECORD"
    else
        launch "${WORDS[@]}" || code=$?
    fi
    settle "$before" "$code"
}

# What becomes of the job after a launch that began at step $1 and left with exit code $2.
settle() {
    local before=$1 code=$2 now after reason='' detail='' advice='' idle limit=${DMJD_IDLE_LIMIT:-3}
    # On a node that only seemed dead this shell lives on, while Slurm has started the job anew on others.
    now=$(known Restarts)
    if ((${now:-0} > ${SLURM_RESTART_COUNT:-0})); then
        say "this launch was given up by Slurm; what becomes of the job is the next one's to say"
        exit 1
    fi
    if [[ -z $CANCELLED && ! (-d $RUN/slurm && -r $RUN && -w $RUN && -x $RUN) ]]; then
        say "not requeued: run=$RUN is gone, is no folder any more or cannot be read; submit again to begin anew"
        exit 1
    fi
    if [[ -n ${DMJD_CONTAINER:-} && $code -ne 0 && -z $CANCELLED ]] &&
        [[ ! -e $DMJD_EXIT_RECORD && ! -e $DMJD_EXIT_RECORD.started ]]; then
        echo "error: DMJD_CONTAINER=$DMJD_CONTAINER started on no node (srun: $code); the job's log says why" >"$DMJD_EXIT_RECORD"
    fi
    rm -f "$DMJD_EXIT_RECORD.started"
    after=$(committed_step)
    if [[ -s $DMJD_EXIT_RECORD ]]; then
        { IFS= read -r detail || true; IFS= read -r advice || true; } <"$DMJD_EXIT_RECORD"
        reason=${detail%%: *} detail=${detail#*: }
    fi
    say "stopped at step $after (began at $before): ${reason:-killed}${detail:+, $detail}"
    if [[ -n $CANCELLED ]]; then
        say "this job was cancelled or preempted; what is committed stands"
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
        error) # asks for something that waiting in the queue does not bring
            limit=1
            ;;
        crashed) # once more, for a sick GPU looks like a mistake in the code until sound nodes have had a try
            limit=$((limit < 2 ? limit : 2))
            ;;
    esac
    idle=$(idle_launches "$after")
    if ((after == before && idle >= limit)); then
        ((idle > 1)) || give_up "${detail:-a launch ended at step $after}"
        give_up "$idle launches in a row ended at step $after${detail:+: $detail}"
    fi
    if [[ -n ${DMJD_CHAIN:-} ]]; then
        say "the next job of the chain goes on"
        exit 0
    fi
    if [[ ${DMJD_REQUEUE:-true} != true ]]; then
        say "submit it again to go on: this site does not requeue"
        exit $((code ? code : 1))
    fi
    say "back into the queue"
    trap - TERM # by which Slurm ends this shell
    local try
    for try in 1 2 3 4 5; do
        ! scontrol requeue "$(job_name)" || exit 0
        say "Slurm does not answer, or refuses (try $try)"
        sleep 20 # a controller may be busy for a while, and a night must not depend on it
    done
    die "Slurm does not requeue this job; submit it again, or with chain=N"
}

give_up() {
    say "not requeued: $1"
    say "see: dmjd doctor $RUN"
    ended "gave up: $1"
    exit 1
}

# Tell the jobs of a chain that follow.
ended() {
    [[ -z ${DMJD_CHAIN:-} ]] || echo "$1" >"$RUN/slurm/$DMJD_CHAIN.ended"
}

# The job as scontrol wants it named: an array's job has an id of its own, which names another job to requeue.
job_name() {
    echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
}

# What Slurm knows of the job; nothing if it does not answer.
about_job() {
    scontrol show job "$(job_name)" 2>/dev/null || true
}

# A field of that, which holds no spaces.
known() {
    about_job | sed -n "s/^\(.* \)\{0,1\}$1=//p" | sed 's/ .*//'
}

# value_of KEY WORD...: the value that the words give to a key, of which the last counts; nothing if they give none.
value_of() {
    local key=$1 value='' word
    shift
    for word in "$@"; do [[ $word != "$key="* ]] || value=${word#*=}; done
    printf '%s\n' "$value"
}

# Optimizer steps behind the newest committed checkpoint; 0 without one. What is called otherwise is somebody's copy.
committed_step() {
    local manifest name step=0
    for manifest in "$RUN"/checkpoints/step-*/manifest.json; do
        name=${manifest%/manifest.json} name=${name##*/}
        [[ ! -e $manifest || ! $name =~ ^step-[0-9]{8,}$ ]] || step=$name
    done
    echo $((10#${step#step-}))
}

# How many launches of this job, or of its chain, counted from the last backwards, began at step $1. The list goes to awk
# by its input: the name of a file such as lr=1/slurm/launches.jsonl would be an assignment.
idle_launches() {
    [[ -f $RUN/slurm/launches.jsonl ]] || { echo 0 && return; }
    awk -v of="\"of\": \"${DMJD_CHAIN:-$(job_name)}\"" -v step="\"step\": $1," '
        index($0, of) { count = index($0, step) ? count + 1 : 0 } END { print count + 0 }' <"$RUN/slurm/launches.jsonl"
}
