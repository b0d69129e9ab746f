"""The typed configuration: every key, its default, and what it may be.

Science (mask, backbone, method, target, optim) and orchestration (engine, run settings) are separate groups: changing
only the latter does not change a result, so a run may be resumed with other values there and only there.
Values that depend on each other are checked by :mod:`dmjd.train.builders`, which has the objects at hand.
"""

from dmjd.config.data import DataConfig
from dmjd.config.evaluate import ConsolidateConfig, ConvertConfig, ExportConfig, KnnConfig, LinprobeConfig
from dmjd.config.fields import check_fields, expand_paths
from dmjd.config.model import (
    BackboneConfig,
    ConvStagesConfig,
    DecoderConfig,
    MaskConfig,
    MethodConfig,
    TargetConfig,
    VisibleBranchConfig,
    WindowsConfig,
)
from dmjd.config.pretrain import SCIENCE, OnlineKnnConfig, PlanConfig, PretrainConfig
from dmjd.config.step import EngineConfig, GuardConfig, OptimConfig

__all__ = [
    "SCIENCE",
    "BackboneConfig",
    "ConsolidateConfig",
    "ConvStagesConfig",
    "ConvertConfig",
    "DataConfig",
    "DecoderConfig",
    "EngineConfig",
    "ExportConfig",
    "GuardConfig",
    "KnnConfig",
    "LinprobeConfig",
    "MaskConfig",
    "MethodConfig",
    "OnlineKnnConfig",
    "OptimConfig",
    "PlanConfig",
    "PretrainConfig",
    "TargetConfig",
    "VisibleBranchConfig",
    "WindowsConfig",
    "check_fields",
    "expand_paths",
]
