"""``dmjd ap``: box and mask AP of a run of ``dmjd detect`` on its validation images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dmjd.config import DetectConfig, DetectDataConfig, EvaluationConfig, PretrainConfig
from dmjd.config.fields import choice, path, positive, recorded
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores
from dmjd.files import obstacle


@dataclass
class ApConfig(EvaluationConfig):
    """Average precision of boxes and masks of a detection model on its validation images, as COCO defines it.

    weights: trained: weights of the checkpoint. ema: their exponential moving average (EMA). auto: the EMA if there is
        one.
    results: File to write the detections to, in COCO's results format (JSON). null: no file.
    batch_size: Images per forward pass.
    data: By default those of the run; keys that are set replace single values. data.root=DIR reads another folder,
        data.val=NAME other images, of the same categories.
    """

    weights: str = choice("auto", "trained", "ema")
    results: str | None = path()
    batch_size: int = positive(4)
    data: DetectDataConfig | None = None
    pooling: str = recorded("mean")
    train_images: int | None = recorded()
    few_shot: float | None = recorded()
    labels: str | None = recorded()
    untrained: bool | None = recorded(False)
    model: PretrainConfig | None = recorded()

    def check(self) -> None:
        if self.results is None:
            return
        file = Path(self.results)
        if file.is_dir() or (what := obstacle(file.parent, folder=True)):
            found = "a folder" if file.is_dir() else f"below {file.parent}, which is {what}"
            raise ConfigError(f"results={self.results} is {found}; name a file, such as results=detections.json")


def run(context: Context[ApConfig]) -> Scores:
    """Detect the objects of the validation images."""
    import torch
    from torch import Tensor

    from dmjd.data.dense.coco import Coco
    from dmjd.evaluate.detection import detections, score_detections, write_results
    from dmjd.evaluate.encoder import loader_workers
    from dmjd.evaluate.validation import check_same_classes
    from dmjd.models.dense.detection import Detection
    from dmjd.ops.images import normalise
    from dmjd.parallel.world import alone

    config, frozen = context.config, context.frozen
    trained, data, model = frozen.trained, frozen.data, frozen.objective
    if not isinstance(trained, DetectConfig) or not isinstance(data, DetectDataConfig):
        raise ConfigError(f"checkpoint={config.checkpoint} is not a detection model; train one with dmjd detect")
    assert isinstance(model, Detection)
    dataset = context.dataset("test")
    assert isinstance(dataset, Coco)
    dataset.require_annotations()
    check_same_classes(dataset, list(frozen.classes), f"checkpoint={config.checkpoint}")

    def detect(images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        with torch.no_grad():
            return model.detect(normalise(images, tuple(data.mean), tuple(data.std)), sizes)

    workers = loader_workers(len(dataset), config.batch_size) if config.workers is None else config.workers
    world = alone(frozen.device)
    entries = detections(detect, dataset, frozen.size, config.batch_size, workers, data.timeout, world)
    if config.results is not None:
        Path(config.results).parent.mkdir(parents=True, exist_ok=True)
        write_results(Path(config.results), entries)
    found = score_detections(entries, dataset)
    table = {
        name: {score: values[number] for score, values in found.of_classes.items()}
        for number, name in enumerate(frozen.classes)
    }
    values = {
        **found.scores,
        "test_images": len(dataset),
        "classes": dataset.num_classes,
        "detections": len(entries),
        "table": table,
    }
    settings = {
        "data": frozen.source,
        "mean": data.mean,
        "std": data.std,
        "max_detections": trained.head.detections,
        "min_score": trained.head.min_score,
        **({"val": data.val} if data.val != trained.data.val else {}),
        **frozen.differs,
        "seed": trained.seed,
    }
    return Scores(values, settings)


_PARTS = {
    "ap": "",
    "ap50": " at IoU .5",
    "ap75": " at IoU .75",
    "aps": " of small objects (area below 32^2)",
    "apm": " of medium objects",
    "apl": " of large objects (area above 96^2)",
}
_TITLES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "aps": "APs", "apm": "APm", "apl": "APl"}

EVALUATION = Evaluation(
    "ap",
    "Box and mask AP of a detection run on its validation images, or on others of the same categories",
    ApConfig,
    run,
    {
        f"{kind}_{part}": Column(f"{kind.capitalize()} {_TITLES[part]}", f"{kind} AP{meaning}")
        for kind in ("box", "mask")
        for part, meaning in _PARTS.items()
    },
    needs="none",
    shown=("val", "max_detections", "min_score"),
)
