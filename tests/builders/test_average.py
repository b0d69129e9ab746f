from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dmjd.builders.average import ENCODER, Ema
from dmjd.compose import compose
from dmjd.evaluate.encoder import load_encoder
from dmjd.parallel.store import read_average
from dmjd.runs import checkpoint
from dmjd.train.loop import pretrain

Words = Callable[..., list[str]]


def shards(encoder: nn.Module) -> dict[str, Tensor]:
    """What an engine gives of an objective with this encoder."""
    return {f"model.encoder.{name}": parameter.detach() for name, parameter in encoder.named_parameters()}


def test_the_average_is_the_weighted_sum_of_all_values() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    values = [layer.weight.detach().double().clone()]
    ema = Ema(shards(layer), decay=0.8)
    for _ in range(5):
        with torch.no_grad():
            layer.weight.add_(torch.randn(2, 3))
        ema.update(torch.ones(()))
        values.append(layer.weight.detach().double().clone())
    # .8^5 of the first value, then .2 * .8^(5 - i) of the i-th.
    expected = 0.8**5 * values[0] + sum(0.2 * 0.8 ** (5 - i) * values[i] for i in range(1, 6))
    average = ema.averages["model.encoder.weight"]
    torch.testing.assert_close(average.double(), expected, atol=1e-6, rtol=1e-6)
    assert not torch.equal(average, layer.weight)


def test_a_step_that_moved_nothing_leaves_it_as_it_is() -> None:
    layer = nn.Linear(3, 2)
    ema = Ema(shards(layer), decay=0.8)
    with torch.no_grad():
        layer.weight.add_(1)
    before = {name: value.clone() for name, value in ema.averages.items()}
    ema.update(torch.zeros(()))
    assert all(torch.equal(value, before[name]) for name, value in ema.averages.items())


def test_it_is_of_the_encoder_alone() -> None:
    layer = nn.Linear(3, 2)
    ema = Ema({**shards(layer), "model.head.weight": layer.weight.detach()}, 0.5, ENCODER)
    assert set(ema.averages) == {"model.encoder.weight", "model.encoder.bias"}


def test_a_run_keeps_it_evaluation_reads_it_and_training_stays_the_same(
    tmp_path: Path, tiny: Words, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: {})
    run = pretrain(compose("pretrain", tiny(tmp_path / "run", "ema_decay=0.9"))).path
    assert (run / "log.jsonl").read_bytes() == (finished_run / "log.jsonl").read_bytes()
    (folder,) = checkpoint.committed(run / "checkpoints")
    average = {name.removeprefix("model.encoder."): value for name, value in read_average(folder).items()}
    assert average
    weights = {
        kind: load_encoder(compose("knn", [f"checkpoint={run}", f"weights={kind}", "device=cpu"])).encoder.state_dict()
        for kind in ("trained", "ema", "untrained")
    }
    for name, value in average.items():
        assert torch.equal(weights["ema"][name], value)
        # Eleven steps at .9 leave the average strictly between beginning and end wherever training moved.
        begin, end = weights["untrained"][name], weights["trained"][name]
        if not torch.equal(begin, end):
            assert (value - end).norm() > 0
            assert (value - begin).norm() > 0
