#!/usr/bin/env bash
# Train on every GPU of this host: launchers/torchrun/one_host.sh experiment=... key=value ...
# DMJD_COMMAND: pretrain (default), finetune, segment or detect.
# Ctrl-C, or TERM or USR1 to this process, makes all ranks save and exit; the same command resumes.
# PROCESSES: number of processes (default: GPUs). DMJD_PYTHON: Python interpreter.
set -euo pipefail
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)} || {
    echo "error: nvidia-smi lists no GPUs on this host; set PROCESSES to start processes without GPUs" >&2
    exit 2
}
[[ " $*" == *" engine="* ]] || set -- engine=ddp "$@"
exec "${DMJD_PYTHON:-python}" "$(dirname "$0")/../agent.py" --standalone --nproc-per-node="$PROCESSES" \
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" -m dmjd "${DMJD_COMMAND:-pretrain}" "$@"
