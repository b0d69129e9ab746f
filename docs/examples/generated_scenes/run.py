"""Generated scenes: pre-train, segment and detect, for several seeds, and the same from an untrained encoder.

python docs/examples/generated_scenes/run.py             5,000 scenes, 3 seeds, 6 minutes on two H200
python docs/examples/generated_scenes/run.py --tiny      a trial of the commands, 2 minutes on a CPU

Writes results.json, table.md and curves.png into FOLDER, and prints the first. Commands that have ended are not
repeated and interrupted ones resume: the same call goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from scenes import write_scenes

WEIGHTS = {"pre-trained": "trained", "untrained": "untrained"}
"""Column of the table -> ``weights`` of the commands."""
SCORES = {
    "segment": {"mIoU, %": "val_miou"},
    "detect": {"box AP, %": "val_box_ap", "mask AP, %": "val_mask_ap"},
}
"""Command -> row of the table -> column of the log."""
COLOURS = {"pre-trained": "#0969da", "untrained": "#bc4c00"}
LIMIT = 1800
"""Seconds after which a command is ended."""


class Sizes(NamedTuple):
    """Keys of ``dmjd pretrain``, ``dmjd segment`` and ``dmjd detect``; ``side`` of the largest scenes in pixels."""

    images: int
    val_images: int
    side: int
    pretrain: list[str]
    segment: list[str]
    detect: list[str]


_ENCODER = ["method=dmjd", "backbone=convvit_small", "method.visible_branch.width=256"]
_SCHEDULE = ["optim.base_lr=3.2e-3", "optim.warmup_epochs=0.5", "backbone.drop_path=0.05"]
FULL = Sizes(
    *(5000, 500, 192),
    pretrain=[
        *_ENCODER,
        *("method.decoder.dim=192", "method.decoder.depth=2", "method.decoder.num_heads=6"),
        *("data.image_size=[128,128]", "data.crop_scale=[0.5,1.0]", "epochs=60", "batch_size=256"),
        *("optim.base_lr=1e-3", "optim.warmup_epochs=3"),
    ],
    segment=[
        *_SCHEDULE,
        *("data.image_size=[192,192]", "data.resize=[192,768]", "test.mode=whole"),
        *("epochs=6", "batch_size=32", "head.channels=128", "head.auxiliary_channels=64"),
    ],
    detect=[
        *_SCHEDULE,
        *("data.image_size=[192,192]", "data.scale=[0.5,1.5]"),
        *("epochs=6", "batch_size=32", "head.channels=128", "head.box_width=256"),
        *("head.proposals_before=500", "head.proposals=250", "head.samples=128"),
    ],
)
_NARROW = [
    *("method=dmjd", "backbone=convvit_small", "backbone.embed_dim=32", "backbone.depth=5", "backbone.num_heads=1"),
    *("backbone.conv_stages.embed_dims=[16,24]", "method.visible_branch.width=32"),
]
TINY = Sizes(
    *(24, 6, 88),
    pretrain=[
        *_NARROW,
        *("method.decoder.dim=32", "method.decoder.depth=1", "method.decoder.num_heads=1"),
        *("data.image_size=[64,64]", "epochs=2", "batch_size=8", "optim.warmup_epochs=0"),
    ],
    segment=[
        *("data.image_size=[64,64]", "data.resize=[88,352]", "test.mode=whole", "epochs=2", "batch_size=8"),
        *("optim.warmup_epochs=0", "head.channels=16", "head.auxiliary_channels=16"),
    ],
    detect=[
        *("data.image_size=[96,96]", "data.scale=[0.5,1.5]", "epochs=2", "batch_size=8", "optim.warmup_epochs=0"),
        *("head.channels=16", "head.box_width=32", "head.box_convs=1", "head.mask_convs=1"),
        *("head.proposals_before=50", "head.proposals=20", "head.samples=16"),
    ],
)


class Study:
    """The commands of all seeds, and the scores that they have left in ``folder``."""

    def __init__(self, folder: Path, seeds: int, sizes: Sizes, typed: Sequence[str], gpus: int) -> None:
        self.folder, self.seeds, self.sizes, self.typed, self.gpus = folder, range(seeds), sizes, typed, gpus
        self.scenes = folder / f"scenes-{sizes.images}-{sizes.val_images}-{sizes.side}"
        self.cores = len(os.sched_getaffinity(0))

    def write_scenes(self) -> float:
        """Write the scenes if they are not there; returns the seconds."""
        began = time.monotonic()
        if not self.scenes.is_dir():
            part = Path(f"{self.scenes}.part")
            write_scenes(part, self.sizes.images, self.sizes.val_images, (self.sizes.side, self.sizes.side))
            part.rename(self.scenes)
        return round(time.monotonic() - began, 1)

    def pretraining(self) -> Iterator[list[str]]:
        """Commands of all seeds: the training images without their annotations."""
        for seed in self.seeds:
            own = [f"data.root={self.scenes / 'images/training'}", f"seed={seed}", f"run={self._run('pretrain', seed)}"]
            yield ["pretrain", *self.sizes.pretrain, *own, *self.typed]

    def dense(self) -> Iterator[list[str]]:
        """Commands of all seeds. An untrained encoder has no layer decay, which would keep its first layers."""
        for command, keys in (("detect", self.sizes.detect), ("segment", self.sizes.segment)):
            for seed in self.seeds:
                for weights in WEIGHTS.values():
                    decay = [f"optim.layer_decay={0.75 if weights == 'trained' else 1}"]
                    own = [f"data.root={self.scenes}", f"weights={weights}", f"seed={seed}"]
                    run = f"run={self._run(f'{command}-{weights}', seed)}"
                    initial = str(self._run("pretrain", seed))
                    yield [command, initial, *keys, *decay, *own, run, *self.typed]

    def _run(self, name: str, seed: int) -> Path:
        return self.folder / f"{name}-{seed}"

    def run(self, commands: Sequence[list[str]], at_once: int) -> float:
        """Run the commands, ``at_once`` of them side by side; returns the seconds."""
        began = time.monotonic()
        workers = max(1, self.cores // min(at_once, max(1, len(commands))))

        def one(number: int, command: list[str]) -> None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if self.gpus > 1:
                environment["CUDA_VISIBLE_DEVICES"] = str(number % self.gpus)
            (result,) = (word for word in command if word.startswith("run="))
            log = Path(f"{result.partition('=')[2]}.txt")
            log.parent.mkdir(parents=True, exist_ok=True)
            words = [sys.executable, "-m", "dmjd", *command, f"workers={workers}"]
            with log.open("w") as file:
                ended = subprocess.run(words, stdout=file, stderr=file, env=environment, timeout=LIMIT, check=False)
            if ended.returncode:
                raise SystemExit(f"dmjd {' '.join(command)} ended with {ended.returncode}:\n{log.read_text()[-2000:]}")

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(one, range(len(commands)), commands))
        return round(time.monotonic() - began, 1)

    def curves(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Row of the table -> "pre-trained" and "untrained" -> ``epochs``, and ``values`` of each seed in per cent."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for command, rows in SCORES.items():
            for row, score in rows.items():
                found[row] = {}
                for name, weights in WEIGHTS.items():
                    runs = [self._curve(f"{command}-{weights}", seed, score) for seed in self.seeds]
                    found[row][name] = {"epochs": [epoch for epoch, _ in runs[0]]}
                    found[row][name]["values"] = [[value for _, value in run] for run in runs]
        return found

    def _curve(self, name: str, seed: int, score: str) -> list[tuple[float, float]]:
        lines = (self._run(name, seed) / "log.jsonl").read_text().splitlines()
        return [(row["epoch"], row[score]) for row in map(json.loads, lines) if score in row]


def summary(curves: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Mean, standard deviation and values of the last epoch."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row, columns in curves.items():
        rows[row] = {}
        for name, curve in columns.items():
            values = [values[-1] for values in curve["values"]]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            rows[row][name] = {"mean": statistics.mean(values), "deviation": deviation, "values": values}
    return rows


def table(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The scores as a table of Markdown."""
    lines = ["| | pre-trained | untrained |", "|---|---|---|"]
    for row, found in rows.items():
        texts = [f"{one['mean']:.2f} ± {one['deviation'] or 0:.2f}" for one in found.values()]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def draw(curves: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    """Each score against the epoch: thin lines for seeds, a thick one for their mean."""
    from matplotlib.figure import Figure

    from dmjd.charts import tidy

    figure = Figure(figsize=(4 * len(curves), 3), layout="constrained")
    for axes, (row, columns) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for name, curve in columns.items():
            for values in curve["values"]:
                axes.plot(curve["epochs"], values, color=COLOURS[name], linewidth=0.7, alpha=0.5)
            means = [statistics.mean(column) for column in zip(*curve["values"], strict=True)]
            axes.plot(curve["epochs"], means, color=COLOURS[name], linewidth=2, label=name)
        axes.set(xlabel="epoch", ylabel=row, ylim=(0, None))
        tidy(axes)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all commands and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", help="KEY=VALUE of every dmjd command")
    parser.add_argument("--folder", type=Path, default=Path("runs/generated_scenes"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, help="training scenes; default 5000")
    parser.add_argument("--val-images", type=int, help="validation scenes; default 500")
    parser.add_argument("--side", type=int, help="of the largest scenes in pixels; default 192")
    parser.add_argument("--tiny", action="store_true", help="a trial: 24 scenes, a narrow encoder, 2 epochs, one seed")
    for command in ("pretrain", "segment", "detect"):
        parser.add_argument(f"--{command}", nargs="+", default=[], metavar="KEY=VALUE", help=f"of dmjd {command}")
    parser.add_argument("--at-once", type=int, help="commands side by side; default: 12 a GPU, on a CPU 1")
    parser.add_argument("--until", choices=("scenes", "pre-training", "end"), default="end", help="end after this part")
    options = parser.parse_args()
    sizes = TINY if options.tiny else FULL
    given = {name: getattr(options, name) for name in ("images", "val_images", "side") if getattr(options, name)}
    more = {name: [*getattr(sizes, name), *getattr(options, name)] for name in ("pretrain", "segment", "detect")}
    sizes = sizes._replace(**given, **more)
    import torch

    gpus = torch.cuda.device_count()
    at_once = options.at_once or max(1, 12 * gpus)
    study = Study(options.folder.resolve(), 1 if options.tiny else options.seeds, sizes, options.keys, gpus)
    seconds = {"scenes": study.write_scenes()}
    if options.until == "scenes":
        return
    seconds["pre-training"] = study.run([*study.pretraining()], at_once)
    if options.until == "pre-training":
        return
    seconds["segmentation and detection"] = study.run([*study.dense()], at_once)
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"CPU, {study.cores} cores"
    curves = study.curves()
    rows = summary(curves)
    found = {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), **sizes._asdict()}
    found |= {"seeds": len(study.seeds), "seconds": seconds, "scores": rows, "curves": curves}
    text = json.dumps(found, indent=1)
    (study.folder / "results.json").write_text(text + "\n")
    (study.folder / "table.md").write_text(table(rows))
    draw(curves, study.folder / "curves.png")
    print(text)


if __name__ == "__main__":
    main()
