"""``dmjd miou``: mean IoU of a run of ``dmjd segment`` on its validation images."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from dmjd.config import EvaluationConfig, PretrainConfig, SegmentConfig, SegmentDataConfig
from dmjd.config.fields import choice, number, positive, recorded, size
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores

logger = logging.getLogger("dmjd")


@dataclass
class MapTestConfig:
    """Inference on an image. null: as in the run's validations.

    mode: slide: sliding windows of data.image_size, whose logits are averaged. whole: the resized image in one pass.
        run: as in the run's validations.
    stride: Stride of the sliding windows, as height and width in pixels.
    scales: Scale factors on data.resize (multi-scale testing). With several scales, or with flip, class probabilities
        are averaged.
    flip: Also average over the mirrored image.
    """

    mode: str = choice("run", "slide", "whole")
    stride: list[int] | None = size(least=1)
    scales: list[float] | None = number(None, above=0, most=100)
    flip: bool | None = None


@dataclass
class MiouConfig(EvaluationConfig):
    """Mean IoU of a segmentation model on its validation images.

    weights: trained: weights of the checkpoint. ema: their exponential moving average (EMA). auto: the EMA if there is
        one.
    test: Keys that are set replace the run's values.
    batch_size: Windows per forward pass; whole images are predicted one by one.
    data: By default those of the run; keys that are set replace single values. data.root=DIR reads another folder, with
        images of the same classes.
    """

    weights: str = choice("auto", "trained", "ema")
    test: MapTestConfig = field(default_factory=MapTestConfig)
    batch_size: int = positive(8)
    data: SegmentDataConfig | None = None
    pooling: str = recorded("mean")
    train_images: int | None = recorded()
    few_shot: float | None = recorded()
    labels: str | None = recorded()
    untrained: bool | None = recorded(False)
    model: PretrainConfig | None = recorded()


def run(context: Context[MiouConfig]) -> Scores:
    """Predict the maps of the validation images."""
    from dataclasses import replace

    import torch
    from torch import Tensor

    from dmjd.builders.segment import check_test
    from dmjd.data.dense.ade20k import Ade20k
    from dmjd.evaluate.encoder import loader_workers
    from dmjd.evaluate.segmentation import MapTesting, evaluate_segmentation
    from dmjd.evaluate.validation import check_same_classes
    from dmjd.ops.images import normalise
    from dmjd.parallel.world import alone

    config, frozen = context.config, context.frozen
    trained, data, model = frozen.trained, frozen.data, frozen.objective
    if not isinstance(trained, SegmentConfig) or not isinstance(data, SegmentDataConfig) or model is None:
        raise ConfigError(f"checkpoint={config.checkpoint} is not a segmentation model; train one with dmjd segment")
    given = {key: value for key, value in vars(config.test).items() if value not in (None, "run")}
    test = replace(trained.test, **given)
    check_test(replace(trained, data=data, test=test))
    if test.mode == "whole" and config.test.stride:
        logger.warning("test.stride is ignored with test.mode=whole")
    dataset = context.dataset("test")
    assert isinstance(dataset, Ade20k)
    dataset.require_annotations()
    check_same_classes(dataset, list(frozen.classes), f"checkpoint={config.checkpoint}")

    def logits(images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(normalise(images, tuple(data.mean), tuple(data.std)))
        return found

    testing = MapTesting.of(test, data, trained.backbone.patch_size)
    workers = loader_workers(len(dataset), 1) if config.workers is None else config.workers
    world = alone(frozen.device)
    found, _ = evaluate_segmentation(logits, dataset, testing, config.batch_size, workers, data.timeout, world)
    table = {
        name: {"iou": iou, "accuracy": accuracy}
        for name, iou, accuracy in zip(frozen.classes, found.iou, found.accuracy, strict=True)
    }
    values = {
        **{name: getattr(found, name) for name in ("miou", "aacc", "macc")},
        "test_images": len(dataset),
        "classes": dataset.num_classes,
        "occurring_classes": found.occurring,
        "table": table,
    }
    reduces = data.reduce_zero_label
    settings = {
        "data": frozen.source,
        "mean": data.mean,
        "std": data.std,
        "resize": data.resize,
        "mode": test.mode,
        **({"window": list(testing.window), "stride": list(testing.stride)} if testing.slide else {}),
        "scales": test.scales,
        "flip": test.flip,
        **({} if reduces == trained.data.reduce_zero_label else {"reduce_zero_label": reduces}),
        **frozen.differs,
        "seed": trained.seed,
    }
    return Scores(values, settings)


EVALUATION = Evaluation(
    "miou",
    "Mean IoU of a segmentation run on its validation images, or on others of the same classes",
    MiouConfig,
    run,
    {
        "miou": Column("mIoU", "mean IoU"),
        "aacc": Column("aAcc", "accuracy of all pixels"),
        "macc": Column("mAcc", "mean accuracy of the classes"),
    },
    needs="none",
    shown=("mode", "stride", "scales", "flip"),
)
