"""``engine=auto``: the fastest settings whose estimated memory fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmjd.builders.auto import choose, fewest_gpus
from dmjd.builders.plan import Activations, Growth, Plan
from dmjd.cli import main
from dmjd.compose import compose, from_yaml
from dmjd.config import EngineConfig, PretrainConfig
from dmjd.errors import ConfigError
from dmjd.parallel.apply import MODES
from tests.compare import rows

GIB = 2**30
SMALL = ("backbone=vit_tiny", "data.image_size=64", "backbone.depth=1", "method.decoder.depth=1", "batch_size=64")


def chosen(*words: str, gib: tuple[float, ...], memory: float = 79.0, command: str = "plan", **traits: Any) -> Any:
    """The engine for a model whose activations take ``gib`` in each mode for all images of the batch on one GPU."""
    plan = Plan(compose(command, [*SMALL, "engine=auto", *words]))
    plan.gpu = replace(plan.gpu, memory_gib=memory, **traits)
    sizes, zero = (32, 64), Growth((32, 64), (0, 0))
    for mode, size in zip(MODES, gib, strict=True):
        growing = Growth(sizes, [size * GIB * images / 64 for images in sizes])
        plan.traced[mode] = Activations(zero, growing, growing, growing)
    return choose(plan)


def key(engine: EngineConfig) -> tuple[str, str, str, bool, int]:
    return (
        engine.name,
        engine.compile,
        engine.activation_checkpointing,
        engine.cuda_graphs,
        engine.grad_accum_steps,
    )


SLOW: dict[str, Any] = {"tflops": 1e-3}
"""A GPU on which no step is bound by the CPU."""


@pytest.mark.parametrize(
    ("words", "gib", "expected"),
    [
        ((), (60, 40, 20, 10), ("single", "model", "none", False, 1)),
        ((), (72, 60, 20, 10), ("single", "model", "selective", False, 1)),  # the margin: .9 * (79 - 2) is 69.3
        ((), (90, 80, 72, 60), ("single", "model", "full", False, 1)),
        ((), (400, 300, 200, 130), ("single", "model", "full", False, 2)),
        (("engine.compile=none",), (60, 40, 20, 10), ("single", "none", "none", False, 1)),
        (("engine.activation_checkpointing=mlp",), (1, 1, 1, 1), ("single", "model", "mlp", False, 1)),
        (("gpus=2",), (120, 80, 40, 20), ("ddp", "block", "none", False, 1)),
        (("gpus=2", "engine.bucket_mb=25"), (120, 80, 40, 20), ("ddp", "block", "none", False, 1)),
        (("gpus=2", "engine.blocks_per_unit=1"), (120, 80, 40, 20), ("fsdp", "block", "none", False, 1)),
    ],
)
def test_the_first_settings_that_fit_are_chosen(
    words: tuple[str, ...], gib: tuple[float, ...], expected: tuple[Any, ...]
) -> None:
    assert key(chosen(*words, gib=gib, **SLOW)[0]) == expected


@pytest.mark.parametrize(("name", "offload"), [("single", False), ("fsdp", False), ("zero2", False), ("zero2", True)])
@pytest.mark.parametrize("memory", [4.0, 12.0, 40.0])
def test_the_fewest_gpus_are_the_first_that_fit(name: str, offload: bool, memory: float) -> None:
    """Of a model with half a billion parameters, against all numbers, modes and micro-batches."""
    plan = Plan(compose("plan", [*SMALL, "backbone.embed_dim=5760", "batch_size=48", "gpus_per_node=4"]))
    plan.gpu = replace(plan.gpu, memory_gib=memory)
    sizes = (32, 64)
    flat = Growth(sizes, [GIB] * 2)
    for mode, size in zip(MODES, (0.9, 0.5, 0.7, 0.3), strict=True):
        growing = Growth(sizes, [size * GIB * images for images in sizes])
        plan.traced[mode] = Activations(flat, growing, growing, growing)
    fits = {
        gpus: [
            (mode, 48 // gpus // images, plan.under(engine, gpus).peak(name, mode, images, 48 // gpus // images))
            for images in range(48 // gpus, 0, -1)
            if not 48 // gpus % images
            for mode in MODES
            for engine in [EngineConfig(name, offload_optimizer=offload)]
        ]
        for gpus in ((1,) if name == "single" else (2, 3, 4, 8, 12, 16, 24, 48))
    }
    good = {gpus: [row for row in rows if row[2] <= 0.9 * (memory - 2) * GIB] for gpus, rows in fits.items()}
    expected = next(((gpus, *rows[0]) for gpus, rows in good.items() if rows), None)
    found = fewest_gpus(plan, name, offload=offload)
    if found is None:
        assert expected is None
    else:
        gpus, engine, peak = found
        assert (gpus, engine.activation_checkpointing, engine.grad_accum_steps, peak) == expected
        assert engine.offload_optimizer == offload


def test_small_batches_on_a_fast_gpu_are_captured_as_cuda_graphs() -> None:
    assert key(chosen(gib=(1, 1, 1, 1))[0]) == ("single", "model", "none", True, 1)
    assert key(chosen("gpus=2", gib=(1, 1, 1, 1))[0]) == ("ddp", "block", "none", True, 1)
    assert not chosen("engine.cuda_graphs=false", "engine.compile=none", gib=(1, 1, 1, 1))[0].cuda_graphs


def test_settings_that_do_not_fit_are_named() -> None:
    engine, reason = chosen(gib=(1e5, 1e5, 1e5, 9e4), **SLOW)
    assert engine.activation_checkpointing == "full"
    assert engine.grad_accum_steps == 64
    assert "does not fit" in reason


def test_options_that_no_choice_supports_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"engine\.offload_optimizer is for"):
        chosen("engine.offload_optimizer=true", gib=(1, 1, 1, 1))


def test_a_run_on_the_cpu_stores_the_choice_and_has_the_bytes_of_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = []
    for name in ("single", "auto"):
        run = tmp_path / name
        words = [*SMALL, "data=digits", "data.channels=1", "data.mean=0", "data.std=1", "data.image_size=32"]
        words += ["batch_size=718", "epochs=1", "workers=0", "engine.device=cpu", "target=pixels", "mask=uniform"]
        assert main(["pretrain", *words, f"engine={name}", f"run={run}"]) == 0
        logs.append((run / "log.jsonl").read_bytes())
    assert logs[0] == logs[1]
    assert from_yaml(PretrainConfig, (run / "config.yaml").read_text()).engine.name == "single"
    assert "".join(capsys.readouterr()).count("engine=auto: engine=single") == 1
    assert main(["pretrain", *words, "engine=auto", f"run={run}"]) == 0
    assert "(as in the launch before)" in "".join(capsys.readouterr())
    assert main(["preflight", *words, "engine=auto", f"run={run}"]) == 0


@pytest.mark.gpu
def test_a_run_on_a_gpu_has_the_losses_of_the_same_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        folder = tmp_path / "images" / "train" / name
        folder.mkdir(parents=True)
        for number in range(64):
            noise = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
            Image.fromarray(noise).save(folder / f"{number}.png")
    words = ["pretrain", *SMALL, "batch_size=32", "data=folder", f"data.root={tmp_path / 'images'}", "epochs=2"]
    words += ["workers=2", "target=pixels", "mask=uniform", "backbone.depth=4", "log_every=1"]
    assert main([*words, "engine=auto", f"run={tmp_path / 'auto'}"]) == 0
    config = from_yaml(PretrainConfig, (tmp_path / "auto/config.yaml").read_text())
    assert key(config.engine) == ("single", "model", "none", True, 1)
    assert main([*words, "engine=auto", f"run={tmp_path / 'auto'}"]) == 0
    output = "".join(capsys.readouterr())
    assert output.count("engine=auto: engine=single engine.compile=model") == 2
    assert output.count("(as in the launch before)") == 1
    assert main([*words, "engine.compile=model", "engine.cuda_graphs=true", f"run={tmp_path / 'keys'}"]) == 0
    logs = [[row.get("loss") for row in rows(tmp_path / name)] for name in ("auto", "keys")]
    assert logs[0] == logs[1]
