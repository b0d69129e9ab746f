"""What the doctor says, whichever part of it found that out."""

from __future__ import annotations

from typing import NamedTuple

CLOCK_SKEW_SECONDS = 10.0
"""By so much a node's clock may be behind that of the node on which a launch began."""


class Finding(NamedTuple):
    """What was found, and what to do about it."""

    what: str
    advice: str = ""
