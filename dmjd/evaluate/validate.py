"""``dmjd validate``: top-1 of a fine-tuned classifier on test images; and the record that a fine-tuning leaves."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmjd.config import EvaluationConfig, PretrainConfig
from dmjd.config.fields import choice, positive, recorded
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores, check_writable, references
from dmjd.runs.best import Validated
from dmjd.runs.paths import RunPaths

if TYPE_CHECKING:
    from dmjd.config import FinetuneConfig
    from dmjd.data.dataset import ImageDataset

logger = logging.getLogger("dmjd")


@dataclass
class ValidateConfig(EvaluationConfig):
    """Accuracy of a fine-tuned classifier, head included, on the test images.

    weights: trained: weights of the checkpoint. ema: their exponential moving average. auto: the average if there is
        one.
    batch_size: Images per forward pass.
    data: Data of the fine-tuning, of which only the keys that are given differ: data.root=DIR moves the images or names
        others of the same classes.
    """

    weights: str = choice("auto", "trained", "ema")
    batch_size: int = positive(64)
    model: PretrainConfig | None = recorded()
    pooling: str = recorded("mean")
    train_images: int | None = recorded()
    few_shot: float | None = recorded()
    labels: str | None = recorded()
    untrained: bool | None = recorded(False)

    def check(self) -> None:
        super().check()
        if Path(self.checkpoint).is_file():
            raise ConfigError(
                f"checkpoint={self.checkpoint} is a file, and dmjd validate reads runs: name one of dmjd finetune, or "
                "fine-tune this file with dmjd finetune"
            )


def run(context: Context[ValidateConfig]) -> Scores:
    """Classify the test images."""
    from dmjd.evaluate.encoder import loader_workers
    from dmjd.evaluate.validation import check_same_classes, evaluate_classifier

    config, frozen = context.config, context.frozen
    classifier = frozen.classifier
    if classifier is None:
        raise ConfigError(
            f"checkpoint={config.checkpoint} has no classifier; make one with dmjd finetune {config.checkpoint}, or "
            "score the encoder with dmjd knn"
        )
    test = context.dataset("test")
    names = frozen.classes or frozen.class_labels
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
    run, and of the run that it began from if ``config.init`` is one of ours.

    DIGEST is a hash of the settings, the seed among them, and of the run's folder: records of other runs stay.

    Args:
        step: optimizer steps of the last validation.
        scores: of that, as :func:`~dmjd.evaluate.validation.validate` returns them.
        best: the best validation, recorded beside the last: it was chosen on the test images.

    Returns:
        The record.
    """
    from dmjd.data.few_shot import few_shot_settings
    from dmjd.evaluate.encoder import image_source
    from dmjd.evaluate.validation import AVERAGE, TRAINED, main_prefix

    prefix = main_prefix(scores)
    main = {name.removeprefix(prefix): value for name, value in scores.items() if name.startswith(prefix)}
    settings = {
        "data": image_source(config.data),
        "image_size": list(config.data.image_size),
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "pooling": config.head.pooling,
        "layer_decay": config.optim.layer_decay,
        "run": run.path.resolve().name,
        **few_shot_settings(train, config.few_shot, config.labels),
    }
    record: dict[str, Any] = {
        "verb": "finetune",
        "weights": "ema" if prefix == AVERAGE else "trained",
        "step": step,
        **{name: main[name] for name in ("top1", "top5", "balanced_top1", "loss")},
        **references(train, test),
    }
    if prefix == AVERAGE:
        record["trained_top1"] = scores[f"{TRAINED}top1"]
    if best is not None:
        record |= {"best_top1": best.score, "best_step": best.step}
    record["settings"] = settings
    identity = {**settings, "folder": str(run.path.resolve())}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    name = f"finetune-{record['weights']}-step{step:08d}-{digest}"
    run.write_evaluation(name, record)
    pretrained = None if config.init is None or config.weights == "untrained" else _run_of(Path(config.init))
    if pretrained is not None and not pretrained.path.samefile(run.path):
        try:
            check_writable(pretrained)
            pretrained.write_evaluation(name, record)
        except (ConfigError, OSError) as error:
            logger.warning("the score is not recorded in %s: %s", pretrained.path, error)
    return record


def _run_of(init: Path) -> RunPaths | None:
    """The run folder that ``init`` is, or in which it is a checkpoint; None for other weights."""
    for folder in (init, init.parent.parent):
        run = RunPaths(folder)
        if init.is_dir() and run.config.is_file() and run.checkpoints.is_dir():
            return run
    return None


EVALUATION = Evaluation(
    "validate",
    "Top-1 accuracy of a fine-tuned classifier on the test images of a run, or on others of the same classes",
    ValidateConfig,
    run,
    {"top1": Column("Val.", "validation top-1")},
)
