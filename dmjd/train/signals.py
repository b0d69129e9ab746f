"""Signals heard by a thread of their own, and by no process that a run starts.

A launcher's TERM or USR1, and Ctrl-C, reach every process of a group, so also the compilers at work in a first step:
inductor's workers, ptxas, g++. Without them that step ends in a trace or, under torch 2.11, never: it waits for
workers that are gone (pytorch/pytorch#189290). What a thread blocks is blocked in all that it starts, across fork and
exec.
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
def listening(numbers: Collection[signal.Signals], hear: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Within it, each of ``numbers`` that this process is sent is a call of ``hear`` and nothing else.

    The thread that calls it hears while the main one waits in a call that does not come back. Outside the main thread,
    which alone may set handlers, signals do what they did before; so do a terminal's where they are ignored, as in the
    background of a script or under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = {each for each in numbers if each not in _TERMINAL or signal.getsignal(each) != signal.SIG_IGN}
    read, write = os.pipe()
    os.set_blocking(write, False)  # as set_wakeup_fd wants it

    def listen() -> None:
        while (byte := os.read(read, 1)) != _END:  # other signals with a handler in Python, CHLD for one, come by too
            if byte[0] in numbers:
                hear(signal.Signals(byte[0]))

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()  # before the signals are blocked, so that they find a thread that takes them
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, _left_to_the_thread) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.write(write, _END)  # a forked worker holds this end as well, so that closing it would end nothing
        thread.join()
        os.close(read)
        os.close(write)


def _left_to_the_thread(number: int, frame: FrameType | None) -> None:
    """What the main thread does about a signal."""


def die_of(number: signal.Signals) -> None:
    """End this process at once as if nobody listened, from any thread."""
    ctypes.CDLL(None).signal(number, None)  # the default action; Python's own signal() is for the main thread alone
    os.kill(os.getpid(), number)
