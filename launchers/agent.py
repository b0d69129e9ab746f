"""torchrun that says in a line how it ended. Its own trace, longer than what a rank had to say, hides the reason."""

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

try:
    main()
except SignalException as told:
    # Its ranks have been told as well, and have left or been killed by now. What they did, the run's marker says.
    sys.exit(f"torchrun: ended by {signal.Signals(told.sigval).name}")
except ChildFailedError as failed:
    _, failure = failed.get_first_failure()
    code = failure.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    sys.exit(f"torchrun: process {failure.pid} of local rank {failure.local_rank} {how}")
