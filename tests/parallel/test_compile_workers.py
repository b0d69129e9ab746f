"""Inductor's own pool of processes, as a run leaves it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dmjd.parallel.environment import dismiss_compile_workers


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


@pytest.mark.slow
def test_workers_leave_when_they_are_dismissed_and_others_come_at_need(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

    monkeypatch.setattr(config, "compile_threads", 2)
    shutdown_compile_workers()
    dismiss_compile_workers()  # nobody is there
    pool: Any = AsyncCompile.process_pool()
    try:
        for _ in range(2):
            assert pool.submit(int, "5").result(120) == 5
            before = children(pool.process.pid)
            assert len(before) == 2
            dismiss_compile_workers()
            deadline = time.monotonic() + 60
            while set(before) & set(children(pool.process.pid)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        shutdown_compile_workers()
    dismiss_compile_workers()  # they are gone
