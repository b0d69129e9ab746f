"""The configuration of a command as its first start resolves it, for ``--cfg`` and ``dmjd plan``; starts nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dmjd.compose import compose, with_first_key
from dmjd.config import ClusterConfig, DownstreamConfig, TrainConfig

logger = logging.getLogger("dmjd")


def first_start(command: str, arguments: Sequence[str]) -> Any:
    """The configuration of ``command`` with the values that its first start takes from ``init`` and from its recipe."""
    config = compose(command, with_first_key(command, arguments))
    if isinstance(config, DownstreamConfig) and config.init is not None:
        from dmjd.runs.checkpoint import weights_at
        from dmjd.train.initial import with_init

        config = with_init(config, weights_at(config.init, "init"))
    return _with_recipe(config)


def _with_recipe(config: Any) -> Any:
    """``config`` as its first start resolves it: with the values of its recipe, which follow the images of
    ``data.root``. The batch of a plan is not limited by memory, which the plan itself reports."""
    if not isinstance(config, TrainConfig) or config.recipe == "none":
        return config
    if config.data.root is None:
        message = "recipe=%s sets keys at the first start, from the images; give data.root=FOLDER for these values"
        logger.info(message, config.recipe)
        return config
    import torch

    from dmjd.builders.recipe import apply_recipe

    if isinstance(config, ClusterConfig):
        return apply_recipe(config, torch.device("cuda"), config.gpus, fit_memory=False)
    here = torch.cuda.is_available()
    name = config.engine.device if config.engine.device != "auto" else "cuda" if here else "cpu"
    return apply_recipe(config, torch.device(name), fit_memory=here)
