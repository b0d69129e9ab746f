"""torchrun that reports its end in one line: its own traceback is longer than the error of a rank and hides it."""

import logging
import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec

# torch reads it at import. The last agent would log a C++ trace when the store of the first is gone.
quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
if quiet:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
try:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    for package in ("hydra", *["dmjd"] * ("-m" in sys.argv)):
        if find_spec(package) is None:
            raise ImportError(f"No module named {package!r}")
except (ImportError, OSError) as missing:  # OSError: a library that torch needs
    error = f"error: DMJD_PYTHON={sys.executable} on {os.uname().nodename}: {' '.join(str(missing).split())}"
    if path := os.environ.get("DMJD_EXIT_RECORD") or os.environ.get("DMJD_LAST_WORD"):  # the latter is the former name
        with suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(error + "\n")
    sys.exit(f"{error}; install dmjd[train] there, or set another DMJD_PYTHON")
if quiet:
    del os.environ["TORCH_CPP_LOG_LEVEL"]  # ranks keep their warnings
# Warnings for the same cause, after the ranks of an agent have succeeded.
for name, message in (
    ("agent.server.api", "Error waiting on exit barrier"),
    ("rendezvous.dynamic_rendezvous", "has failed to shutdown the rendezvous"),
):
    logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(
        lambda record, message=message: message not in record.getMessage()
    )

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
