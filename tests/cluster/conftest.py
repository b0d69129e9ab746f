"""One Slurm for all tests here that want it: starting it takes a moment, but it is one at a time on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cluster import slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """Four nodes of 8 GPUs that are none, 64 processors and 500 GB, so that scripts run as they are shipped."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(
                slurm.cluster(tmp_path_factory.mktemp("slurm"), nodes=4, cpus=64, memory=500_000, gpus=8)
            )
        except slurm.Unavailable as reason:
            pytest.skip(str(reason))
        yield made
