"""The processes in which inductor compiles."""

from __future__ import annotations

import sys
from contextlib import suppress


def dismiss_compile_workers() -> None:
    """Let inductor's workers, if there are any, leave when they have done what they are doing; it starts others at need.

    Else they are sent TERM when the process ends, which those that were started beside a :class:`Requests` have
    blocked, and get ten seconds to die of it.
    """
    compilation = sys.modules.get("torch._inductor.async_compile")
    if compilation is not None and compilation.AsyncCompile.process_pool.cache_info().currsize:
        with suppress(AttributeError, OSError, RuntimeError):  # a pool of another kind, or one that is closed
            compilation.AsyncCompile.process_pool().quiesce()
