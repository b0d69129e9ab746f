#!/usr/bin/env bash
# Pre-train on every GPU of this host: launchers/torchrun/one_host.sh experiment=... key=value ...
# Ctrl-C, or a TERM or USR1 to this process, makes all ranks save and leave; the same line goes on.
# PROCESSES sets another number of processes, DMJD_PYTHON another Python.
set -euo pipefail
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)} || {
    echo "error: nvidia-smi lists no GPUs here; PROCESSES=2, for one, starts as many without" >&2
    exit 2
}
[[ " $*" == *" engine="* ]] || set -- engine=ddp "$@"
exec "${DMJD_PYTHON:-python}" "$(dirname "$0")/../agent.py" --standalone --nproc-per-node="$PROCESSES" \
    "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" -m dmjd pretrain "$@"
