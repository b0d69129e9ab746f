"""The processes in which inductor compiles."""

from __future__ import annotations

import sys
from contextlib import suppress


def dismiss_compile_workers() -> None:
    """Let inductor's workers, if there are any, leave once their work is done; it starts others when it needs them.

    Else they would be sent TERM when the process ends and get ten seconds to die of it, which is in vain: a run keeps
    signals from all that it starts.
    """
    compilation = sys.modules.get("torch._inductor.async_compile")
    if compilation is not None and compilation.AsyncCompile.process_pool.cache_info().currsize:
        with suppress(AttributeError, OSError, RuntimeError):  # a pool of another kind, or one that is closed
            compilation.AsyncCompile.process_pool().quiesce()
