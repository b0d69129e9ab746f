"""Run the command line with ``python -m dmjd``, or as the program ``dmjd``."""

import signal
import sys


def main() -> int:
    """The command line. SIGINT during its imports ends the process by that signal, without a traceback."""
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler:  # nohup and shells' background jobs ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dmjd.cli import main

    signal.signal(signal.SIGINT, former)
    return main()


if __name__ == "__main__":
    sys.exit(main())
