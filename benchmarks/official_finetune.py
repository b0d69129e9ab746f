"""Fine-tuning steps beside the official MAE and ConvMAE code, as it is and compiled: same batch, card and process.

    python benchmarks/official_finetune.py --mae FOLDER --convmae FOLDER [--json FILE] [CASE:IMAGES ...]

FOLDERs are checkouts of the official repositories, which are imported unchanged. Cases: vit_base, vit_large (MAE),
convvit_base (ConvMAE); 1000 classes, 224 pixels, images on the device as uint8. A step has mixup or cutmix, forward,
backward and AdamW with layer decay. Ways:

    official            as its training script: fp16 autocast, GradScaler, AdamW, loss.item() and synchronisation
    official, compiled  model under torch.compile, bf16 autocast, fused AdamW, neither of the two
    ours, ...           `dmjd finetune`'s step, with random erasing on the device as well

The official loader makes float images on the CPU and erases there; here both peers get them normalised.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from official_step import Official, _modules, compare, measure_steps
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor

from dmjd.builders.finetune import build_finetune_step
from dmjd.compose import compose
from dmjd.data.batch import Batch

CLASSES, DIFFERENT = 1000, 4
VARIANTS = {
    "ours, eager": (),
    "ours, blocks compiled": ("engine.compile=block",),
    "ours, compiled": ("engine.compile=model",),
    "ours, compiled, MLPs recomputed": ("engine.compile=model", "engine.activation_checkpointing=mlp"),
}
CASES = {
    "vit_base": ("preset=mae_vit_base", "models_vit", "vit_base_patch16", 0.65, 0.1),
    "vit_large": ("preset=mae_vit_large", "models_vit", "vit_large_patch16", 0.75, 0.2),
    "convvit_base": ("preset=convmae_base", "models_convvit", "convvit_base_patch16", 0.65, 0.1),
}
"""Case -> our preset; the official module, function, layer decay and drop path."""


def official(folder: Path, case: str, compiled: bool) -> tuple[Official, Iterable[dict[str, Any]]]:
    """The model with the loss of ``engine_finetune.train_one_epoch``, and its groups of parameters."""
    _, module, function, decay, drop_path = CASES[case]
    models, layer_decay = _modules(folder, module, "util.lr_decay")
    model = getattr(models, function)(num_classes=CLASSES, drop_path_rate=drop_path, global_pool=True).cuda().train()
    type(model).forward = _forward  # timm's passes arguments that the official forward_features lacks
    groups = layer_decay.param_groups_lrd(model, 0.05, model.no_weight_decay(), decay)
    groups = [{**group, "lr": 1e-3 * group["lr_scale"]} for group in groups]
    mixup = Mixup(0.8, 1.0, prob=1.0, switch_prob=0.5, mode="batch", label_smoothing=0.1, num_classes=CLASSES)
    criterion = SoftTargetCrossEntropy()
    forward = torch.compile(model) if compiled else model
    precision = torch.bfloat16 if compiled else torch.float16

    def loss(labels: Tensor, images: Tensor) -> Tensor:
        images, targets = mixup(images.clone(), labels)  # which overwrites its input
        with torch.autocast("cuda", precision):
            return criterion(forward(images), targets)

    return Official(model, loss), groups


def _forward(model: Any, images: Tensor) -> Any:
    return model.head(model.forward_features(images))


def official_step(folder: Path, case: str, batch: int, compiled: bool) -> Callable[[int], None]:
    """One training step over images that are on the device."""
    peer, groups = official(folder, case, compiled)
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=compiled)
    scaler = torch.amp.GradScaler("cuda", enabled=not compiled)
    pool = _pool(batch)
    images = [each.images.permute(0, 3, 1, 2).float().div(255).sub(0.45).div(0.22).contiguous() for each in pool]

    def step(index: int) -> None:
        loss = peer.loss(pool[index % DIFFERENT].labels, images[index % DIFFERENT])
        if not compiled:
            loss.item()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not compiled:
            torch.cuda.synchronize()

    return step


def measure_official(folder: Path, case: str, batch: int, compiled: bool) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    measured = measure_steps(official_step(folder, case, batch, compiled), batch)
    torch.backends.cudnn.benchmark = False
    return measured


def measure_ours(case: str, batch: int, overrides: Iterable[str]) -> dict[str, Any]:
    return measure_steps(our_step(case, batch, overrides), batch)


def our_step(case: str, batch: int, overrides: Iterable[str]) -> Callable[[int], None]:
    arguments = [CASES[case][0], f"batch_size={batch}", "init=null", *overrides]
    step = build_finetune_step(compose("finetune", arguments), CLASSES)
    step.engine.module.train()
    pool = _pool(batch)

    def train(index: int) -> None:
        step.forward_backward(pool[index % DIFFERENT], 0)
        step.update(1e-3)

    return train


def _pool(batch: int) -> list[Batch]:
    """Batches of noise on the device."""
    ids = [torch.arange(batch * index, batch * (index + 1)) for index in range(DIFFERENT)]
    images = [torch.randint(0, 256, (batch, 224, 224, 3), dtype=torch.uint8) for _ in range(DIFFERENT)]
    return [Batch(each, rows, rows % CLASSES).to(torch.device("cuda")) for each, rows in zip(images, ids, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mae", type=Path, metavar="FOLDER")
    parser.add_argument("--convmae", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=tuple(VARIANTS), help="of our variants")
    parser.add_argument("cases", nargs="*", default=["vit_base:128", "convvit_base:128", "vit_large:64"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for case in arguments.cases:
        name, batch = case.split(":")[0], int(case.split(":")[1])
        source = arguments.convmae if name.startswith("convvit") else arguments.mae
        ways: dict[str, Callable[[], dict[str, Any]]] = {}
        if source is not None:
            ways["official"] = partial(measure_official, source, name, batch, False)
            ways["official, compiled"] = partial(measure_official, source, name, batch, True)
        for way in arguments.only or VARIANTS:
            ways[way] = partial(measure_ours, name, batch, VARIANTS[way])
        compare(case, ways, rows, arguments.json)


if __name__ == "__main__":
    main()
