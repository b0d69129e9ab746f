from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dmjd.builders.step import flops_per_image, objective_and_inputs
from dmjd.parallel.apply import apply
from dmjd.parallel.memory import trace_step
from tests.train.shrunken import configure, shrink

EVERY_KIND = ("beit_dm_vit_base", "mvp_vit_base", "data2vec_vit_base", "dmjd_vit_base_teacher", "simmim_swin_base")


@pytest.mark.parametrize("experiment", EVERY_KIND)
def test_a_step_is_counted_without_the_weights_or_the_teacher_of_its_target(experiment: str) -> None:
    """As a run on CUDA does when it starts, and dmjd plan before there are weights."""
    config = shrink(configure(experiment), {})
    assert flops_per_image(config) > 0
    with FakeTensorMode():
        objective, prepared = objective_and_inputs(config, 2)
        apply(objective.model, config.engine)
        assert trace_step(objective, prepared.inputs).saved > 0
    counted = sum(parameter.numel() for parameter in objective.parameters())
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in objective_and_inputs(config, 1)[0].parameters()) == counted
