"""Mistakes a user can mend: one sentence each, naming the thing and the allowed values.

The command line prints the sentence and leaves with exit code 2; a library caller sees a ``ValueError``.
Broken invariants of our own are ``assert``s and keep their traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dmjd.redact import redact_message

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

_LONGEST = 4_000


def printable_message(message: str) -> str:
    """Without secrets, and with control characters, which may come with the name of a file, as ``\\x1b``.

    Of a message longer than 4,000 characters, which repeats a long value, the middle is left out.
    """
    shown = redact_message(message)
    if len(shown) > _LONGEST:
        shown = f"{shown[: _LONGEST // 2]} ... {shown[-_LONGEST // 2 :]}"
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", shown)


class UserError(ValueError):
    """Base of every mistake that the user, not the program, has to mend.

    ``reported``: true where another process of the run prints the error, so this one need not.
    """

    reported: bool = False

    def __str__(self) -> str:
        return printable_message(super().__str__())  # it may end in a log, in STOP_REASON or in a report


class ConfigError(UserError):
    """A key, a type, a value or a combination of them that the configuration does not allow."""


class NotMet(UserError):
    """Processes of a launch that did not find each other. The next launch may: a node was lost, or a port taken."""


class DataError(UserError):
    """A missing folder, an image that cannot be decoded, or a data set too small for what was asked."""


class BadImage(DataError):
    """One image of a data set that cannot be used. Training may put another in its place; any other DataError stops it.

    name: what its data set calls it.
    kind: missing, unreadable (permission, disk or network), truncated, undecodable, or too small; in shards also empty,
        magic (other bytes, which are no image) and crc (other bytes).
    fault: what is wrong with it, as the rest of a sentence that begins with its name.
    images: how many are lost with it: 1, but for a tar that is read as a stream, where it stands for all of them.
    """

    def __init__(self, name: str, kind: str, fault: str, images: int = 1) -> None:
        super().__init__(name, kind, fault, images)  # the arguments from which pickle rebuilds it in another process
        self.name = redact_message(name)
        self.kind = kind
        self.fault = redact_message(fault)
        self.images = images

    def __str__(self) -> str:
        return printable_message(f"{self.name} {self.fault}; remove or replace it").replace("\n", "\\n")

    def copy(self) -> BadImage:
        """The same without its traceback, whose frames would keep images alive."""
        return BadImage(self.name, self.kind, self.fault, self.images)


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, or of another model."""


class OutOfMemory(UserError):
    """A device whose memory is too small for a step; the sentence says what to try."""


class StorageError(UserError):
    """A disk that is full, read-only or gone, while a run wants to write."""


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
