"""torchrun, which takes being told to stop for what it is and not for a failure with a trace of its own."""

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

try:
    main()
except SignalException as told:
    # Its ranks have been told as well, and have left or been killed by now. What they did, the run's marker says.
    sys.exit(f"torchrun: ended by {signal.Signals(told.sigval).name}")
