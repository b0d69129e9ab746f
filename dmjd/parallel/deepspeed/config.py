"""DeepSpeed's configuration, made from ours without importing DeepSpeed, so that errors are raised at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dmjd.config import EngineConfig, OptimConfig
from dmjd.errors import ConfigError
from dmjd.parallel.engines import ENGINES, ZERO_BUCKET, zero3_live
from dmjd.safe_load import parse_json

_OWNED = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "batch_size and engine.grad_accum_steps",
    "gradient_accumulation_steps": "engine.grad_accum_steps",
    "managed_gradient_accumulation": "engine.grad_accum_steps",
    "gradient_clipping": "optim.clip_grad",
    "fp16": "engine.precision",
    "bf16": "engine.precision",
    "torch_autocast": "engine.precision",
    "data_types": "engine.precision",
    "optimizer": "optim",
    "scheduler": "optim",
    "zero_allow_untested_optimizer": "optim",
    "zero_force_ds_cpu_optimizer": "engine.offload_optimizer",
    "zero_optimization.stage": "engine",
    "zero_optimization.offload_optimizer": "engine.offload_optimizer",
    "zero_optimization.elastic_checkpoint": "checkpoints, which dmjd writes",
    "checkpoint": "checkpoints, which dmjd writes",
}
"""Keys that a file may not change -> the key of ours that decides them."""

_ALL = 10**12
"""Parameters that no model has."""


def check(engine: EngineConfig) -> None:
    """Raise ConfigError if DeepSpeed is not installed or ``engine.deepspeed_config`` is no JSON object."""
    if find_spec("deepspeed") is None:
        raise ConfigError(f"engine={engine.name} needs deepspeed: pip install 'dmjd[scale]'")
    if engine.deepspeed_config is not None:
        _read(Path(engine.deepspeed_config))


def deepspeed_config(
    engine: EngineConfig, optim: OptimConfig, *, bf16: bool, micro_batch: int, parameters: int, block: int
) -> dict[str, Any]:
    """The dictionary for ``deepspeed.initialize``. Defaults of DeepSpeed move between releases, so none is relied on.

    Args:
        bf16: whether to autocast to bfloat16; parameters are float32 either way.
        micro_batch: images of one process in a micro-batch. DeepSpeed only counts samples with it.
        parameters: of the model. block: of its largest block.

    Raises:
        ConfigError: if ``engine.deepspeed_config`` cannot be read, or sets what our configuration decides.
    """
    stage = ENGINES[engine.name].stage
    zero: dict[str, Any] = {
        "stage": stage,
        # Stage 1 reduces once, in the step; there is nothing beside which it could. Nor need its gradients be copied
        # into a bucket first, which takes the host milliseconds.
        "overlap_comm": stage > 1,
        "contiguous_gradients": stage > 1 or engine.offload_optimizer,
        "reduce_scatter": True,
        "reduce_bucket_size": ZERO_BUCKET,
        "allgather_partitions": True,
        "allgather_bucket_size": 50_000_000,
        "round_robin_gradients": False,
        # Partitions are flat: a parameter outside of the loss has a gradient of zero there, and need not be looked for.
        "ignore_unused_parameters": True,
        "elastic_checkpoint": False,
    }
    if stage == 3:
        live = zero3_live(engine.reshard_after_forward, parameters, block)
        zero |= {
            "stage3_prefetch_bucket_size": live.ahead,
            # A block is gathered at once; parameters below the threshold would be gathered one by one after each step.
            "stage3_param_persistence_threshold": 0,
            # Before each module DeepSpeed fetches a further prefetch bucket, up to this limit.
            "stage3_max_live_parameters": live.most,
            # Parameters used from a block to the end of the forward pass, not to its next use; it counts those of a
            # module within a module twice.
            "stage3_max_reuse_distance": live.kept if live.kept < parameters else _ALL,
            "stage3_gather_16bit_weights_on_model_save": False,
            # Its linear layer rounds to bfloat16 before and after adding the bias, unlike F.linear, which it replaces
            # in the whole process.
            "memory_efficient_linear": False,
            "sub_group_size": 1_000_000_000,
        }
    if engine.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": engine.device != "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        # The loop divides the loss and decides which micro-batch is the last.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # 0 is off; left out it has been 0 in some releases and 1 in others.
        "gradient_clipping": 0.0 if optim.clip_grad is None else float(optim.clip_grad),
        "prescale_gradients": False,
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # Torch's fused AdamW, also where it runs on the host: DeepSpeed's own would be compiled on every node at start.
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {"enabled": False},
        # With bf16.enabled parameters would be bfloat16, and so would what an average of them reads.
        "bf16": {"enabled": False},
        "torch_autocast": {
            "enabled": bf16,
            "dtype": "bfloat16",
            # Modules whose gradients would be reduced in bfloat16. The other engines reduce in float32.
            "lower_precision_safe_modules": [],
        },
        "checkpoint": {"load_universal": False, "tag_validation": "Ignore"},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        # It synchronizes with the device twice per step, for a throughput that is not printed.
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }
    if engine.deepspeed_config is not None:
        path = Path(engine.deepspeed_config)
        theirs = _read(path)
        _check_conflicts(path, theirs, config)
        config = _merged(config, theirs)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"engine.deepspeed_config={path} cannot be read: {reason}") from error
    except ValueError as error:
        raise ConfigError(f"engine.deepspeed_config={path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"engine.deepspeed_config={path} must hold a JSON object")
    return content


def _check_conflicts(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first key of :data:`_OWNED` that the file sets to another value than ours."""
    for key, value in _leaves(theirs):
        owner = next((_OWNED[name] for name in _parents(key) if name in _OWNED), None)
        if owner is not None and value != _at(ours, key):
            raise ConfigError(f"engine.deepspeed_config={path} sets {key}={json.dumps(value)}; that is for {owner}")


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _parents(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _at(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def _merged(ours: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    merged = deepcopy(ours)
    for key, value in theirs.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged
