"""Exceptions. A :class:`UserError` is one line with the thing, its value, what is allowed, and the cure.

The command line prints it and exits with code 2; library callers catch a ``ValueError``. Internal invariants are
``assert``s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dmjd.redact import redact_message

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

_LONGEST = 4_000

_CURES = {"missing": "restore it", "mask": "correct it", "annotation": "correct the annotations"}
"""By kind of :class:`BadImage`."""


def printable_message(message: str) -> str:
    """``message`` without secrets, with control characters as ``\\x1b``, and at most 4,000 characters of it.

    Longer messages, which repeat a long value, lose their middle.
    """
    shown = redact_message(message)
    if len(shown) > _LONGEST:
        shown = f"{shown[: _LONGEST // 2]} ... {shown[-_LONGEST // 2 :]}"
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", shown)


def printable_line(message: str) -> str:
    """:func:`printable_message` with line breaks, which names and values may hold, as ``\\n``."""
    return printable_message(message).replace("\n", "\\n")


class UserError(ValueError):
    """Base class of errors that the user has to fix.

    ``reported``: true where another process of the run prints the error, so this one need not.
    """

    reported: bool = False

    def __str__(self) -> str:
        return printable_line(super().__str__())  # printed, logged and stored in STOP_REASON and reports


class ConfigError(UserError):
    """An unknown key, a wrong type, or a value or combination of values that is not allowed."""


class NotMet(UserError):
    """The processes of a launch did not connect. A retry may succeed: a node was lost, or a port taken."""


class Interrupted(KeyboardInterrupt):
    """An interruption that the command itself has reported. signal: its number."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class DataError(UserError):
    """A missing folder, an image that cannot be decoded, or a data set that is too small."""


class NoSplit(DataError):
    """A data set without the split that is asked for."""


class BadFeatures(UserError):
    """Features that are not finite. A run goes on without the score."""


class BadImage(DataError):
    """An image that cannot be used. Training may replace it; any other DataError stops the run.

    name: its name in the data set.
    kind: missing, unreadable (permission, disk or network), truncated, undecodable, or too small; in shards also empty,
        magic (bytes of no image) and crc (changed bytes); of annotated images also mask and annotation.
    fault: the cause; it continues a line that begins with the name.
    images: number of lost images: 1, or all that follow in a tar that is read as a stream.
    """

    def __init__(self, name: str, kind: str, fault: str, images: int = 1) -> None:
        super().__init__(name, kind, fault, images)  # pickle recreates it from these arguments
        self.name = redact_message(name)
        self.kind = kind
        self.fault = redact_message(fault)
        self.images = images

    def __str__(self) -> str:
        cure = _CURES.get(self.kind, "remove or replace it")
        return printable_line(f"{self.name} {self.fault}; {cure}")

    def copy(self) -> BadImage:
        """A copy without the traceback, whose frames would keep images alive."""
        return BadImage(self.name, self.kind, self.fault, self.images)


class TransientError(Exception):
    """A fault of the network that a retry may resolve; the message describes it."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, or of another model."""


class OutOfMemory(UserError):
    """The memory of a device is too small for a step; the message lists remedies."""


class StorageError(UserError):
    """A disk is full, read-only or not mounted."""


class FolderGone(StorageError):
    """The run folder was removed, and a folder at its path may belong to another run."""


class Diverged(RuntimeError):
    """The run stops because too many steps were non-finite. Checkpoints stay as they were.

    ``reported``: true where another process prints the error.
    """

    reported = False


class StopRequested(Exception):
    """The process was asked to stop while it waited for a batch."""


class StoppedBefore(Exception):
    """The run stops before ``step``, counted from 1, because some rank has no batch for it."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}")
        self.step = step


class Alarm(Exception):
    """Steps ``first .. last``, counted from 1, are more than skipping can repair."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(f"steps {first} to {last}")
        self.first, self.last = first, last


@contextmanager
def config_section(section: str) -> Iterator[None]:
    """Re-raise ValueError as ConfigError that names the configuration section."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from error
