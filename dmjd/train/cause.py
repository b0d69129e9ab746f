"""What kind of end an exception is: launchers go by it when they decide whether to try once more."""

from __future__ import annotations

import platform
import re

from dmjd.errors import NotMet, UserError
from dmjd.redact import redact_message

LOST = re.compile(
    r"Connection (reset|closed) by peer|Connection was likely closed|Broken pipe|remote process exited"
    r"|Timed out waiting \d+ms|Socket Timeout|wait timeout after|caused pair closure"
)
"""What gloo, NCCL and torch's store say when another rank has gone, or does not come."""

LONGEST = 500
"""Characters of an error that others print: some carry a page of C++ frames."""


def cause(error: BaseException, rank: int) -> tuple[str, str]:
    """Reason, a key of :data:`dmjd.train.ending.NEXT`, and detail, a line.

    A rank that only lost its connection to another is told from the one that crashed: it would hide what happened.
    """
    if isinstance(error, NotMet):
        return "lost", str(error)
    if isinstance(error, UserError):
        return "error", str(error)
    if not isinstance(error, Exception):
        return "interrupted", type(error).__name__
    said = " ".join(redact_message(f"{type(error).__name__}: {error}").split()).removesuffix(":")[:LONGEST]
    return "lost" if LOST.search(said) else "crashed", f"rank {rank} on {platform.node()}: {said}"
