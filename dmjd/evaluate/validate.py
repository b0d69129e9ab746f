"""``dmjd validate``: top-1 of a fine-tuned classifier on test images; and the record that a fine-tuning leaves."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmjd.config import EvaluationConfig, PretrainConfig, TrainConfig
from dmjd.config.fields import affecting, choice, positive, recorded
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores, check_writable, references
from dmjd.runs.best import Validated
from dmjd.runs.paths import RunPaths

if TYPE_CHECKING:
    from dmjd.config import DownstreamConfig, FinetuneConfig
    from dmjd.data.dataset import ImageDataset

logger = logging.getLogger("dmjd")


@dataclass
class ValidateConfig(EvaluationConfig):
    """Accuracy of a fine-tuned classifier, head included, on the test images.

    A file of weights has no class names: its logits stand for the class folders in sorted order.

    weights: trained: weights of the checkpoint. ema: their exponential moving average (EMA). auto: the EMA if there is
        one.
    batch_size: Images per forward pass.
    data: By default those of the fine-tuning; keys that are set replace single values. data.root=DIR reads another
        folder, with images of the same classes.
    """

    weights: str = choice("auto", "trained", "ema")
    batch_size: int = positive(64)
    pooling: str = recorded("mean")
    train_images: int | None = recorded()
    few_shot: float | None = recorded()
    labels: str | None = recorded()
    untrained: bool | None = recorded(False)


def run(context: Context[ValidateConfig]) -> Scores:
    """Classify the test images."""
    from dmjd.data.build import AUTO
    from dmjd.evaluate.encoder import loader_workers, with_head
    from dmjd.evaluate.validation import check_same_classes, class_names, evaluate_classifier

    config, frozen = context.config, context.frozen
    if frozen.path.is_file():
        frozen = with_head(frozen)
    classifier = frozen.classifier
    if classifier is None:
        raise ConfigError(
            f"checkpoint={config.checkpoint} has no classifier; make one with dmjd finetune {config.checkpoint}, or "
            "score the encoder with dmjd knn"
        )
    known, data = frozen.trained.data.name, frozen.data.name
    if {known, data} <= AUTO.keys() and known != data:  # the names of their classes are the same numbers
        raise ConfigError(
            f"data={data} has other classes than checkpoint={config.checkpoint}, of {known}; leave it out"
        )
    test = context.dataset("test")
    names = frozen.classes or frozen.class_labels
    if frozen.path.is_file() and len(names) == test.num_classes:  # its classes have no names
        names = class_names(test)
    check_same_classes(test, names, f"checkpoint={config.checkpoint}")
    workers = loader_workers(len(test), config.batch_size) if config.workers is None else config.workers
    found = evaluate_classifier(frozen.logits, test, frozen.data, config.batch_size, workers, device=frozen.device)
    values = {**found._asdict(), "chance": 100 / test.num_classes, "test_images": len(test)}
    settings = {"pooling": classifier.pooling, **context.image_settings(), "seed": frozen.trained.seed}
    return Scores(values, settings)


def record_finetune(
    config: FinetuneConfig,
    run: RunPaths,
    step: int,
    scores: Mapping[str, float | None],
    train: ImageDataset,
    test: ImageDataset,
    best: Validated | None = None,
) -> dict[str, Any]:
    """Write the result of a finished fine-tuning to ``evaluations/finetune-WEIGHTS-step########-DIGEST.json`` of its
    run, and of the pre-training run that it began from if ``config.init`` is one.

    As :func:`record_training`, of which this is that of fine-tuning.
    """
    from dmjd.data.few_shot import few_shot_settings

    settings = {
        "pooling": config.head.pooling,
        "norm": config.head.norm,
        **{key: getattr(config.augment, key) for key in ("randaugment", "mixup", "cutmix")},
        **few_shot_settings(train, config.few_shot, config.labels),
    }
    return record_training(config, run, step, scores, "top1", references(train, test), settings, best)


def record_training(
    config: DownstreamConfig,
    run: RunPaths,
    step: int,
    scores: Mapping[str, float | None],
    score: str,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    best: Validated | None = None,
) -> dict[str, Any]:
    """Write the result of a finished training to ``evaluations/COMMAND-WEIGHTS-step########-DIGEST.json`` of its run,
    and of the pre-training run that it began from if ``config.init`` is one.

    DIGEST is a hash of the settings, the seed among them, and of the run's folder: records of other runs stay.

    Args:
        step: optimizer steps of the last validation.
        scores: of that, by column of the log: ``val_NAME``, and ``val_ema_NAME`` of the average.
        score: name of the main score.
        values, settings: further values and settings of the record.
        best: the best validation, recorded beside the last: it was chosen on the test images.

    Returns:
        The record.
    """
    from dmjd.evaluate.encoder import image_source, seen_images, trainings_before
    from dmjd.evaluate.validation import AVERAGE, TRAINED, main_prefix
    from dmjd.runs import checkpoint

    before = [*trainings_before(run, config)]
    pretrained = _pretraining_run(*before[0]) if before else None
    prefix = main_prefix(scores)
    main = {name.removeprefix(prefix): value for name, value in scores.items() if name.startswith(prefix)}
    every = {
        "data": image_source(config.data),
        "image_size": list(config.data.image_size),
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "layer_decay": config.optim.layer_decay,
        **_training_settings(config),
        **settings,
        "run": run.path.resolve().name,
        **({"init_step": checkpoint.step_of(before[0][0])} if before else {}),
        **seen_images([each for _, each in before], config.data),
    }
    weights = "ema" if prefix == AVERAGE else "trained"
    record: dict[str, Any] = {"verb": config.command, "weights": weights, "step": step, **main, **values}
    if prefix == AVERAGE:
        record[f"trained_{score}"] = scores[f"{TRAINED}{score}"]
    if best is not None:
        record |= {f"best_{score}": best.score, "best_step": best.step}
    record["settings"] = every
    identity = {**every, "folder": str(run.path.resolve())}
    name = f"{config.command}-{weights}-step{step:08d}-{_digest(identity)}"
    run.write_evaluation(name, record)
    if pretrained is not None:
        try:
            check_writable(pretrained)
            pretrained.write_evaluation(name, record)
        except (ConfigError, OSError) as error:
            logger.warning("the score is not recorded in %s: %s", pretrained.path, error)
    return record


_OF_THE_ROW = ("seed", "init", "weights", "recipe", "command", "backbone")
"""Keys and sections that are no setting of a score: the repeat, the model with its initial weights, and the origin of
other keys' values."""
_OF_THE_DATA_SET = ("name", "root", "image_size", "channels", "val_percent", "val_seed")
"""Keys of ``data`` that the setting "data" states."""


def _training_settings(config: DownstreamConfig) -> dict[str, Any]:
    """The main settings of the training by name, and ``config``, a digest of all that affect the score."""
    every = affecting(config)
    chosen = {key: value for key, value in every.items() if key not in _OF_THE_ROW}
    chosen["data"] = {key: value for key, value in every["data"].items() if key not in _OF_THE_DATA_SET}
    chosen |= {"drop_path": config.backbone.drop_path, "crop_pct": config.data.crop_pct}
    return {
        "base_lr": config.optim.base_lr,
        "warmup_epochs": config.optim.warmup_epochs,
        "weight_decay": config.optim.weight_decay,
        "drop_path": config.backbone.drop_path,
        "freeze": config.freeze,
        **({} if config.weights in ("trained", "untrained") else {"init_weights": config.weights}),
        "config": _digest(chosen),
    }


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _pretraining_run(path: Path, config: TrainConfig) -> RunPaths | None:
    """The run of pre-training in which ``path`` is a checkpoint; None for a moved checkpoint, and for one of a
    fine-tuning, whose records are its own scores."""
    run = RunPaths(path.parent.parent)
    return run if config.command == PretrainConfig.command and run.config.is_file() else None


EVALUATION = Evaluation(
    "validate",
    "Top-1 accuracy of a fine-tuned classifier on the test images of a run, or on others of the same classes",
    ValidateConfig,
    run,
    {"top1": Column("Val.", "validation top-1")},
)
