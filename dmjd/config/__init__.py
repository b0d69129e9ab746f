"""The typed configuration: every key with its default and its allowed values.

Fields marked by ``may_change`` do not affect results: a run may be resumed with other values of them alone.
Combinations of values are checked by :mod:`dmjd.builders`, which has the objects.
"""

from dmjd.config.augment import AugmentConfig
from dmjd.config.data import FORMER_VALUES, DataConfig
from dmjd.config.dense import (
    AttentionConfig,
    DenseDataConfig,
    DenseOptimConfig,
    DetectConfig,
    DetectDataConfig,
    MaskRCNNConfig,
    SegmentConfig,
    SegmentDataConfig,
    SegmentTestConfig,
    UperNetConfig,
)
from dmjd.config.evaluate import ConsolidateConfig, ConvertConfig, EvaluationConfig, ExportConfig, ImagesConfig
from dmjd.config.fields import RENAMED, check_fields, expand_paths, first_difference
from dmjd.config.finetune import DownstreamConfig, FinetuneConfig
from dmjd.config.model import (
    BackboneConfig,
    ConvStagesConfig,
    DecoderConfig,
    HeadConfig,
    MaskConfig,
    MethodConfig,
    TargetConfig,
    VisibleBranchConfig,
    WindowsConfig,
)
from dmjd.config.plan import ClusterConfig, DetectPlanConfig, FinetunePlanConfig, PlanConfig, SegmentPlanConfig
from dmjd.config.pretrain import OnlineKnnConfig, PretrainConfig
from dmjd.config.step import EngineConfig, FinetuneOptimConfig, GuardConfig, OptimConfig, PretrainOptimConfig
from dmjd.config.train import TrainConfig, check_batch

__all__ = [
    "FORMER_VALUES",
    "PLANS",
    "RENAMED",
    "SCHEMAS",
    "AttentionConfig",
    "AugmentConfig",
    "BackboneConfig",
    "ClusterConfig",
    "ConsolidateConfig",
    "ConvStagesConfig",
    "ConvertConfig",
    "DataConfig",
    "DecoderConfig",
    "DenseDataConfig",
    "DenseOptimConfig",
    "DetectConfig",
    "DetectDataConfig",
    "DetectPlanConfig",
    "DownstreamConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ExportConfig",
    "FinetuneConfig",
    "FinetuneOptimConfig",
    "FinetunePlanConfig",
    "GuardConfig",
    "HeadConfig",
    "ImagesConfig",
    "MaskConfig",
    "MaskRCNNConfig",
    "MethodConfig",
    "OnlineKnnConfig",
    "OptimConfig",
    "PlanConfig",
    "PretrainConfig",
    "PretrainOptimConfig",
    "SegmentConfig",
    "SegmentDataConfig",
    "SegmentPlanConfig",
    "SegmentTestConfig",
    "TargetConfig",
    "TrainConfig",
    "UperNetConfig",
    "VisibleBranchConfig",
    "WindowsConfig",
    "check_batch",
    "check_fields",
    "expand_paths",
    "first_difference",
]

SCHEMAS: dict[str, type] = {
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "plan": PlanConfig,
    "plan_finetune": FinetunePlanConfig,
    "segment": SegmentConfig,
    "plan_segment": SegmentPlanConfig,
    "detect": DetectConfig,
    "plan_detect": DetectPlanConfig,
    "export": ExportConfig,
    "consolidate": ConsolidateConfig,
    "convert": ConvertConfig,
}
"""Command -> its configuration class; ``configs/COMMAND.yaml`` has its defaults list. Evaluations and the commands of
dmjd.explore register theirs."""

PLANS = {"pretrain": "plan", "finetune": "plan_finetune", "segment": "plan_segment", "detect": "plan_detect"}
"""Commands that train: they write a run folder and resume from its checkpoints. Values: the configurations of ``dmjd
plan COMMAND``, as keys of :data:`SCHEMAS`."""
