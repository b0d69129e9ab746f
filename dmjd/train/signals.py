"""Signal handling in a thread, with the signals blocked in all processes that a run starts.

A launcher's TERM or USR1, and Ctrl-C, reach every process of the group, also the compilers of a first step: inductor's
workers, ptxas, g++. If these end, the step fails or, under torch 2.11, waits for its workers without end
(pytorch/pytorch#189290). A process inherits the blocked signals of the thread that starts it, across fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_END = b"\0"


@contextmanager
def handling(numbers: Collection[signal.Signals], handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Context in which every signal in ``numbers`` only calls ``handler``, in a thread of its own.

    The thread runs also while the main thread is blocked in a call. Outside the main thread, which alone may set
    handlers, signals keep their action; so do ignored signals of the terminal, as in the background of a script or
    under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = {each for each in numbers if each not in _TERMINAL or signal.getsignal(each) != signal.SIG_IGN}
    read, write = os.pipe()
    os.set_blocking(write, False)  # as set_wakeup_fd wants it

    def listen() -> None:
        while (byte := os.read(read, 1)) != _END:  # other signals with a Python handler, such as CHLD, arrive too
            if byte[0] in numbers:
                handler(signal.Signals(byte[0]))

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()  # before the signals are blocked: this thread receives them
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, _no_action) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, before in handlers.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(wakeup)
        os.write(write, _END)  # a forked worker has this end open too, so closing it would not end the read
        thread.join()
        os.close(read)
        os.close(write)


def _no_action(number: int, frame: FrameType | None) -> None:
    """The handler in the main thread."""


def default_action(number: signal.Signals) -> None:
    """Run the default action of ``number``, which ends this process; from any thread."""
    ctypes.CDLL(None).signal(number, None)  # the default action; signal.signal() works in the main thread only
    os.kill(os.getpid(), number)
