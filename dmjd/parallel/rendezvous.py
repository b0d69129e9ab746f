"""The store in which the processes of one launch find each other."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store  # public names, and missing in the list of exports

_POLL_SECONDS = 0.02


def fresh_store(store: Store, rank: int, size: int, timeout: timedelta) -> Store:
    """``store`` under a prefix that only the processes of this start use. Collective.

    torchrun's agent keeps one store over all its restarts, so a rank that starts before rank 0 would read the address
    of a rank 0 that was killed. Rank 0 draws the prefix; every other rank asks for it under a name that it has just
    drawn, and so never reads an answer to an earlier process.

    Raises:
        RuntimeError: if a rank is missing after ``timeout``.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"dmjd/rank/{rank}", own)
        answer = f"dmjd/prefix/{own}"
        store.wait([answer], timeout)
        prefix = store.get(answer).decode()
        store.set(f"{prefix}/present/{rank}", "")
        return PrefixStore(prefix, store)
    missing, answered = set(range(1, size)), dict[int, str]()
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for each in sorted(missing):
            if store.check([f"{own}/present/{each}"]):
                missing.discard(each)
            elif store.check([f"dmjd/rank/{each}"]):
                name = store.get(f"dmjd/rank/{each}").decode()
                if answered.get(each) != name:  # an earlier process's name may be overwritten later
                    store.set(f"dmjd/prefix/{name}", own)
                    answered[each] = name
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank(s) {', '.join(map(str, sorted(missing)[:8]))} did not start")
        time.sleep(_POLL_SECONDS if missing else 0)
    return PrefixStore(own, store)
