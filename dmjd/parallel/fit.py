"""Whether an engine, its options, the device and the processes go together: asked before processes meet."""

from __future__ import annotations

import torch

from dmjd.config import EngineConfig
from dmjd.errors import ConfigError
from dmjd.parallel.deepspeed import config as deepspeed_config
from dmjd.parallel.deepspeed.config import STAGES
from dmjd.parallel.sharding import SHARDED, replicas

_OPTIONS = {
    "cuda_graphs": ("single", "ddp"),  # others move parameters, which a graph would look for where they were
    "reshard_after_forward": SHARDED,
    "blocks_per_unit": SHARDED,
    "bucket_mb": ("ddp",),
    "replicas": ("hsdp",),
    "offload_optimizer": tuple(STAGES),
    "deepspeed_config": tuple(STAGES),
}
"""Keys of the configuration that some engines alone have."""


def check_fit(engine: EngineConfig, device: torch.device, size: int, local_size: int) -> None:
    """For ``size`` processes, ``local_size`` on this host.

    Raises:
        ConfigError: for what does not go with the rest.
    """
    for key, names in _OPTIONS.items():
        if engine.name not in names and getattr(engine, key) != getattr(EngineConfig(), key):
            raise ConfigError(f"engine.{key} is for engine={', '.join(names)}, not engine={engine.name}")
    deepspeed_config.check(engine)
    if size > 1 and engine.name == "single":
        raise ConfigError(f"engine=single is one process, and the launcher started {size}; use engine=ddp")
    if engine.name == "hsdp" and size % replicas(engine, size, local_size):
        raise ConfigError(f"engine.replicas={engine.replicas} does not divide {size} process(es)")
    if engine.name in SHARDED and engine.compile == "model":
        raise ConfigError(
            f"engine.compile=model leaves no room for engine={engine.name} between blocks; use engine.compile=block"
        )
    if engine.cuda_graphs:
        _check_graphs(engine, device)


def _check_graphs(engine: EngineConfig, device: torch.device) -> None:
    if engine.compile == "none" or device.type != "cuda":
        raise ConfigError(
            "engine.cuda_graphs=true is for what engine.compile=block or model compiles for a CUDA device"
        )
    if engine.name == "ddp" and engine.compile == "model":
        # torch cuts the model where buckets end; graphs of such pieces have not been tried.
        raise ConfigError("engine.cuda_graphs=true goes with engine.compile=block under engine=ddp, not with model")
