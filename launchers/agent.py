"""torchrun that reports its end in one line: its own traceback is longer than the error of a rank and hides it.

In an elastic launch (DMJD_FULL_WORLD_SIZE) it also decides which ends of ranks are worth another start.
"""

import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec

# torch reads it at import. The last agent would log a C++ trace when the store of the first is gone.
quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
if quiet:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"


def write_record(line: str) -> None:
    """Write the exit record of the launch, unless there is one: the first error causes the others."""
    if path := os.environ.get("DMJD_EXIT_RECORD") or os.environ.get("DMJD_LAST_WORD"):  # the latter is the former name
        with suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(line + "\n")


try:
    from torch.distributed.elastic import timer
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher import api
    from torch.distributed.run import main

    for package in ("hydra", *["dmjd"] * ("-m" in sys.argv)):
        if find_spec(package) is None:
            raise ImportError(f"No module named {package!r}")
except (ImportError, OSError) as missing:  # OSError: a library that torch needs
    error = f"error: DMJD_PYTHON={sys.executable} on {os.uname().nodename}: {' '.join(str(missing).split())}"
    write_record(error)
    sys.exit(f"{error}; install dmjd[train] there, or set another DMJD_PYTHON")
if quiet:
    del os.environ["TORCH_CPP_LOG_LEVEL"]  # ranks keep their warnings
# Warnings for the same cause, after the ranks of an agent have succeeded.
for name, message in (
    ("agent.server.api", "Error waiting on exit barrier"),
    ("rendezvous.dynamic_rendezvous", "has failed to shutdown the rendezvous"),
    ("rendezvous.dynamic_rendezvous", "has failed to send a keep-alive heartbeat"),
):
    logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(
        lambda record, message=message: message not in record.getMessage()
    )

RESTART = ("", "lost", "crashed", "interrupted", "signal")
"""Exit reasons after which the ranks start again; "": no record, since the rank was killed."""


class Agent(LocalElasticAgent):
    """Starts the ranks again as soon as a node is lost, and not after an error that the user has to fix."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torch keeps the address of the first store, also when the agent that has it is lost.
        worker_group.spec.rdzv_handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED and self._exit_reason() not in RESTART:
            self._remaining_restarts = 0
        # Ranks on other nodes may wait for those of a lost node until the time-out of their collectives.
        participants = worker_group.spec.rdzv_handler._state_holder.state.participants
        if result.state == WorkerState.HEALTHY and len(participants) < worker_group.group_world_size:
            self._restart_workers(worker_group)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        print("torchrun: a rank ended, or a node was lost or has joined; starting the ranks again", file=sys.stderr)
        with suppress(OSError):
            os.unlink(os.environ["DMJD_EXIT_RECORD"])
        super()._restart_workers(worker_group)

    def _exit_reason(self) -> str:
        try:
            with open(os.environ["DMJD_EXIT_RECORD"], encoding="utf-8") as file:
                return file.read().partition(":")[0]
        except OSError:
            return ""


class Watchdog(timer.FileTimerServer):
    """Kills a rank whose heartbeat is overdue. torch's would kill the agent too, which has to start the rank again."""

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        if worker_pid == os.getpid():
            return True
        print(f"torchrun: process {worker_pid} is killed: its heartbeat is overdue", file=sys.stderr)
        return super()._reap_worker(worker_pid, signal)


own = None
if "DMJD_FULL_WORLD_SIZE" in os.environ:
    api.LocalElasticAgent, timer.FileTimerServer = Agent, Watchdog
    os.environ["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
    if "DMJD_EXIT_RECORD" not in os.environ:
        own = tempfile.TemporaryDirectory(prefix="dmjd-")
        os.environ["DMJD_EXIT_RECORD"] = f"{own.name}/exit_record"

try:
    main()
except SignalException as error:
    # The ranks received the signal too and have ended by now; STOP_REASON has their reason.
    sys.exit(f"torchrun: ended by {signal.Signals(error.sigval).name}")
except ChildFailedError as failed:
    _, failure = failed.get_first_failure()
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    sys.exit(f"torchrun: process {failure.pid} of local rank {failure.local_rank} {how}")
except RendezvousClosedError:
    sys.exit("torchrun: the agents of other nodes have ended the launch")
except RendezvousTimeoutError:
    write_record("lost: too few nodes connected to the rendezvous")
    sys.exit("torchrun: too few nodes connected to the rendezvous; run the same command on all of them")
except RendezvousError:
    lost = f"the rendezvous store, on the agent of the first node, is lost to {os.uname().nodename}"
    write_record(f"lost: {lost}")
    sys.exit(f"torchrun: {lost}; this launch ends: a Slurm job is requeued, else run the same command again")
