from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.parallel.world import World, alone
from dmjd.runs.folder import RunFolder
from dmjd.train.loop import Trainer
from dmjd.train.pretraining import Pretraining
from dmjd.train.state import Position, RandomState, Registry

CPU = torch.device("cpu")


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


@pytest.fixture(autouse=True)
def generators_as_before() -> Any:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])


def test_every_global_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    state = RandomState(3, alone(CPU))
    draws()
    torch.save(state.state_dict(), tmp_path / "state")
    expected = draws()
    RandomState(4, alone(CPU)).load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert draws() == expected


def test_generators_are_seeded_by_the_seed_and_apart_by_rank() -> None:
    seen: set[float] = set()
    for seed, rank in ((0, 0), (0, 1), (5, 0)):
        RandomState(seed, World(rank, 1, 0, CPU))
        first = draws()
        RandomState(seed, World(rank, 1, 0, CPU))
        assert draws() == first
        seen.update(first)
    assert len(seen) == 9


def test_ranks_of_another_world_share_the_saved_states() -> None:
    states = []
    for rank in range(2):
        state = RandomState(0, World(rank, 1, 0, CPU))
        states += state.state_dict()["ranks"]
    RandomState(9, World(2, 1, 0, CPU)).load_state_dict({"ranks": states})
    third = draws()
    RandomState(0, World(0, 1, 0, CPU))
    assert draws() == third


def test_a_registry_names_what_was_forgotten() -> None:
    class Owner:
        def __init__(self) -> None:
            self.registry = Registry()
            self.known = Position()
            self.average = Position()
            self.registry.add("known", self.known)

    owner = Owner()
    with pytest.raises(AssertionError, match=r"Owner\.average has state and is not registered"):
        owner.registry.check_complete(owner)
    owner.registry.add("average", owner.average)
    owner.registry.check_complete(owner)


def test_a_registry_refuses_state_of_other_parts() -> None:
    registry = Registry()
    registry.add("position", Position())
    with pytest.raises(AssertionError, match="state of"):
        registry.load_state_dict({})
    with pytest.raises(AssertionError, match="registered already"):
        registry.add("position", Position())


def test_what_a_run_holds_is_all_registered(tmp_path: Path, tiny: Callable[..., list[str]]) -> None:
    config: PretrainConfig = compose("pretrain", tiny(tmp_path / "run", "ema_decay=0.9"))
    run = Trainer(config, RunFolder(tmp_path / "run"), alone(CPU), Pretraining)
    assert run.registry.state_dict().keys() == {"position", "journal", "random", "guard", "data"}
    with ExitStack() as stack:
        run.start(stack)
        run.registry.check_complete(run)
