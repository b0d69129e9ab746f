"""Checks that an engine, its options, the device and the processes fit together, before processes meet."""

from __future__ import annotations

import torch

from dmjd.config import EngineConfig
from dmjd.errors import ConfigError
from dmjd.parallel.deepspeed import config as deepspeed_config
from dmjd.parallel.engines import AUTO, ENGINES, replicas


def check_fit(engine: EngineConfig, device: torch.device, size: int, local_size: int) -> None:
    """Raise ConfigError for a combination that cannot work.

    Args:
        size: processes of the run, ``local_size`` of them on this host.
    """
    if engine.name == AUTO:  # what it chooses is checked then
        return
    spec = ENGINES[engine.name]
    for key in dict.fromkeys(key for other in ENGINES.values() for key in other.options):
        if key not in spec.options and getattr(engine, key) != getattr(EngineConfig(), key):
            names = [name for name, other in ENGINES.items() if key in other.options]
            raise ConfigError(f"engine.{key} is for engine={', '.join(names)}, got engine={engine.name}; leave it out")
    if spec.stage:
        deepspeed_config.check(engine)
    if engine.compile not in spec.compile:
        others = [name for name, other in ENGINES.items() if engine.compile in other.compile]
        raise ConfigError(
            f"engine.compile={engine.compile} is not available with engine={engine.name}; use engine.compile="
            f"{spec.compile[-1]}, or engine={', '.join(others)}"
        )
    if size > 1 and spec.one_process:
        raise ConfigError(f"engine={engine.name} runs in one process, and the launcher started {size}; use engine=ddp")
    if "replicas" in spec.options and size % replicas(engine, size, local_size):
        raise ConfigError(f"engine.replicas={engine.replicas} does not divide {size} process(es); set a divisor")
    if engine.cuda_graphs:
        if engine.compile == "none" or device.type != "cuda":
            raise ConfigError(
                "engine.cuda_graphs=true needs engine.compile=block or model, and a CUDA device; leave it out otherwise"
            )
        if spec.buckets and engine.compile == "model":
            # torch cuts the model where buckets end; graphs of such pieces have not been tried.
            raise ConfigError(
                f"engine.cuda_graphs=true with engine={engine.name} needs engine.compile=block, got model"
            )
