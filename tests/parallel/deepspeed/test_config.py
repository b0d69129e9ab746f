from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.config import EngineConfig, OptimConfig
from dmjd.errors import ConfigError
from dmjd.parallel.deepspeed import config as module
from dmjd.parallel.deepspeed.config import check, deepspeed_config
from dmjd.parallel.fit import check_fit

STAGE_3 = {
    "stage3_prefetch_bucket_size": 52_000_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 300_000_000,
    "stage3_max_reuse_distance": 10**12,
    "stage3_gather_16bit_weights_on_model_save": False,
    "memory_efficient_linear": False,
    "sub_group_size": 1_000_000_000,
}


def generate(
    name: str, clip_grad: float | None = None, bf16: bool = False, million: int = 300, **options: Any
) -> dict[str, Any]:
    """Of a model of so many parameters, in blocks of 13 million."""
    engine = EngineConfig(name=name, device="cuda", grad_accum_steps=4, **options)
    size = {"parameters": million * 10**6, "block": 13 * 10**6}
    return deepspeed_config(engine, OptimConfig(clip_grad=clip_grad), bf16=bf16, micro_batch=16, **size)


@pytest.mark.parametrize(("name", "stage"), [("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_every_key_is_said(name: str, stage: int) -> None:
    assert generate(name) == {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "prescale_gradients": False,
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": stage > 1,
            "contiguous_gradients": stage > 1,
            "reduce_scatter": True,
            "reduce_bucket_size": 50_000_000,
            "allgather_partitions": True,
            "allgather_bucket_size": 50_000_000,
            "round_robin_gradients": False,
            "ignore_unused_parameters": True,
            "elastic_checkpoint": False,
            **(STAGE_3 if stage == 3 else {}),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": []},
        "checkpoint": {"load_universal": False, "tag_validation": "Ignore"},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }


def test_offloaded_gradients_are_contiguous() -> None:
    assert generate("zero1", offload_optimizer=True)["zero_optimization"]["contiguous_gradients"]


def test_our_keys_decide() -> None:
    config = generate("zero2", clip_grad=0.5, bf16=True, offload_optimizer=True)
    assert config["gradient_clipping"] == 0.5
    assert config["torch_autocast"]["enabled"] is True
    assert config["bf16"] == {"enabled": False}
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def write(folder: Path, content: Any) -> str:
    file = folder / "mine.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_a_file_adds_to_ours_and_may_repeat_it(tmp_path: Path) -> None:
    theirs = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}, "comms_logger": {"enabled": True}}
    config = generate("zero2", deepspeed_config=write(tmp_path, theirs))
    expected = generate("zero2")
    expected["zero_optimization"]["reduce_bucket_size"] = 7
    expected["comms_logger"] = {"enabled": True}
    assert config == expected


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ({"train_batch_size": 64}, "sets train_batch_size=64; that is for batch_size"),
        ({"gradient_accumulation_steps": 2}, "sets gradient_accumulation_steps=2; that is for engine.grad_accum_steps"),
        ({"gradient_clipping": 1.0}, "sets gradient_clipping=1.0; that is for optim.clip_grad"),
        ({"bf16": {"enabled": True}}, "sets bf16.enabled=true; that is for engine.precision"),
        ({"optimizer": {"type": "Adam"}}, 'sets optimizer.type="Adam"; that is for optim'),
        ({"scheduler": {"type": "WarmupLR"}}, 'sets scheduler.type="WarmupLR"; that is for optim'),
        ({"zero_optimization": {"stage": 3}}, "sets zero_optimization.stage=3; that is for engine"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            'sets zero_optimization.offload_optimizer.device="nvme"; that is for engine.offload_optimizer',
        ),
        ({"checkpoint": {"load_universal": True}}, "sets checkpoint.load_universal=true; that is for checkpoints"),
        ("{", "is not JSON: "),
        ([1], "must hold a JSON object"),
    ],
)
def test_what_is_ours_is_refused_by_name(theirs: Any, sentence: str, tmp_path: Path) -> None:
    file = write(tmp_path, theirs)
    with pytest.raises(ConfigError) as caught:
        generate("zero2", deepspeed_config=file)
    assert str(caught.value).startswith(f"engine.deepspeed_config={file} {sentence}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file or directory$"):
        check(EngineConfig(name="zero1", deepspeed_config=str(tmp_path / "none.json")))


def test_zero3_is_compiled_by_blocks() -> None:
    check_fit(EngineConfig(name="zero3", compile="block"), torch.device("cuda"), 2, 2)
    with pytest.raises(
        ConfigError,
        match=r"engine\.compile=model is not available with engine=zero3; use .*=block, or engine=single, ddp",
    ):
        check_fit(EngineConfig(name="zero3", compile="model"), torch.device("cuda"), 2, 2)


@pytest.mark.parametrize(
    ("reshard", "distance", "live"),
    [(None, 500 * 10**6, 500 * 10**6), (True, 0, 52 * 10**6), (False, 10**12, 2000 * 10**6)],
)
def test_zero3_keeps_parameters_of_a_large_model_for_the_backward_pass(
    reshard: bool | None, distance: int, live: int
) -> None:
    zero = generate("zero3", million=2000, reshard_after_forward=reshard)["zero_optimization"]
    assert zero["stage3_max_reuse_distance"] == distance
    assert zero["stage3_max_live_parameters"] == live


def test_deepspeed_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^engine=zero3 needs deepspeed: pip install 'dmjd\[scale\]'$"):
        check_fit(EngineConfig(name="zero3"), torch.device("cuda"), 2, 2)
    check_fit(EngineConfig(name="fsdp"), torch.device("cuda"), 2, 2)
