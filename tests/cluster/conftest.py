"""One Slurm for all tests here that want it: starting it takes a moment, but it is one at a time on a machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """Four nodes of 8 GPUs that are none, 64 processors and 500 GB, so that scripts run as they are shipped."""
    reason = slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), nodes=4, cpus=64, memory=500_000, gpus=8) as made:
        yield made
