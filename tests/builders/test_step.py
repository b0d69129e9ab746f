"""Every kind of target takes a training step, and is counted, as the one builder of a step makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dmjd.builders.step import build_step, flops_per_image, objective_and_inputs
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.parallel.apply import apply
from dmjd.parallel.memory import trace_step
from dmjd.resources import configs_dir
from dmjd.targets.codebook import VqKdEncoder
from tests.train.shrunken import CODES, configure, shrink, smooth_batch, write_clip, write_dvae

TARGETS = sorted(path.stem for path in (configs_dir() / "target").glob("*.yaml"))
COUNTED = ("beit_dm_vit_base", "mvp_vit_base", "data2vec_vit_base", "dmjd_vit_base_teacher", "simmim_swin_base")
OF_CODES = ("method.mim_loss=cross_entropy", "method.visible_branch.enabled=false")
OWN = {"dvae": (*OF_CODES, "data.second_size=[112,112]"), "vqkd": OF_CODES}
OPTIONS = ("backbone.drop_path=0.5", "data.jitter=0.4", "ema_decay=0.9", "engine.grad_accum_steps=2")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    vqkd = VqKdEncoder((224, 224), patch=16, embed_dim=64, depth=1, codes=CODES, code_dim=6)
    torch.save({"model": vqkd.state_dict()}, folder / "vqkd.pth")
    return {"clip": write_clip(folder), "dvae": write_dvae(folder / "dvae.pt"), "vqkd": str(folder / "vqkd.pth")}


def configured(target: str, weights: dict[str, str]) -> PretrainConfig:
    words = ("experiment=dmjd_vit_base_hog", f"target={target}", *OWN.get(target, ()), *OPTIONS)
    return shrink(compose("pretrain", words), weights)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_takes_a_step_with_drop_path_jitter_an_average_and_accumulation(
    target: str, weights: dict[str, str]
) -> None:
    step = build_step(configured(target, weights))
    batch = smooth_batch(step, 4)
    parameters = dict(step.engine.objective.named_parameters())
    before = {name: value.detach().clone() for name, value in parameters.items()}
    losses, rates = step.forward_backward(batch, epoch=0)
    result = step.update(1e-2)
    assert losses.total.isfinite()
    assert rates.tolist() == pytest.approx([0.6, 1.0], abs=0.02)
    assert result.applied == 1
    for name, average in step.averages.items():
        torch.testing.assert_close(average, before[name].lerp(parameters[name], 0.1))
        assert not torch.equal(average, before[name]), name
    prepared = step.prepare(batch, 0)
    assert prepared.branch_scales is not None
    assert set(prepared.branch_scales[-1].unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(prepared.crops.float().mean((1, 2, 3)), batch.images.float().mean((1, 2, 3)))


def test_a_skipped_step_changes_nothing() -> None:
    step = build_step(configured("hog", {}))
    before = {name: value.clone() for name, value in step.engine.full_state_dict().items()}
    averages = {name: value.clone() for name, value in step.averages.items()}
    losses, _ = step.forward_backward(smooth_batch(step, 4), 0, skip=True)
    assert losses.total.isfinite()
    assert step.update(1e-2).applied == 0
    assert all(torch.equal(value, before[name]) for name, value in step.engine.full_state_dict().items())
    assert all(torch.equal(value, averages[name]) for name, value in step.averages.items())


@pytest.mark.parametrize("experiment", COUNTED)
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
