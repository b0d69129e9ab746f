"""Fashion-MNIST: pre-train, fine-tune, probe and few-shot, for several seeds, and the same from an untrained encoder.

python docs/examples/fashion_mnist_finetune/run.py                       Fashion-MNIST, 3 seeds, minutes on one GPU
python docs/examples/fashion_mnist_finetune/run.py data.root=FOLDER      its four files are there
python docs/examples/fashion_mnist_finetune/run.py --quick               scikit-learn's digits, minutes on a CPU

Prints one JSON, and writes it with a table to FOLDER/results.json and FOLDER/table.md. Commands that have ended are not
repeated: the same call goes on where it was interrupted.
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

WEIGHTS = {"pre-trained": "trained", "untrained": "untrained"}
"""Column of the table -> ``weights`` of ``dmjd finetune``."""


class Sizes(NamedTuple):
    """Keys of ``dmjd pretrain`` and ``dmjd finetune``, and of the latter with some of the labels: few_shot -> keys."""

    pretrain: list[str]
    finetune: list[str]
    few_shot: dict[int, list[str]]


FULL = Sizes(
    ["experiment=fashion_mnist"],
    ["preset=fashion_mnist"],
    {
        10: ["epochs=40", "batch_size=256", "optim.base_lr=2e-3", "optim.warmup_epochs=4", "val_every=20"],
        1: ["epochs=100", "batch_size=64", "optim.base_lr=4e-3", "optim.warmup_epochs=10", "val_every=50"],
    },
)
QUICK = Sizes(
    [
        *("experiment=demo_digits", "epochs=1", "optim.warmup_epochs=0"),
        *("backbone.embed_dim=32", "backbone.depth=1", "backbone.num_heads=1"),
    ],
    ["preset=fashion_mnist", "epochs=1", "batch_size=64", "optim.warmup_epochs=0"],
    {10: []},
)
LIMIT = 1800
"""Seconds after which a command is ended."""


class Example:
    """The commands of all seeds, and the scores that they have left in ``folder``."""

    def __init__(self, folder: Path, seeds: int, sizes: Sizes, typed: Sequence[str], gpus: int) -> None:
        self.folder, self.seeds, self.sizes, self.typed = folder, range(seeds), sizes, typed
        self.gpus = gpus
        self.cores = len(os.sched_getaffinity(0))
        labels = {f"{share} % of the labels": f"few_shot={share}" for share in sizes.few_shot}
        self.tuned = {"fine-tuning": sizes.finetune}
        for (name, key), more in zip(labels.items(), sizes.few_shot.values(), strict=True):
            self.tuned[f"fine-tuning, {name}"] = [*sizes.finetune, key, *more]
        self.evaluated = {
            "kNN": ["knn"],
            "linear probe": ["linprobe"],
            "cached probe": ["linprobe", "protocol=cached"],
            **{f"linear probe, {name}": ["linprobe", key] for name, key in labels.items()},
        }

    def pretraining(self) -> Iterator[list[str]]:
        """Commands of all seeds."""
        for seed in self.seeds:
            yield [
                "pretrain",
                *self.sizes.pretrain,
                f"seed={seed}",
                f"run={self._run('pretrained', seed)}",
                *self.typed,
            ]

    def fine_tuning(self) -> Iterator[list[str]]:
        """Commands of all seeds. An untrained encoder has no layer decay, which would keep its first layers."""
        for number, words in enumerate(self.tuned.values()):
            for seed in self.seeds:
                for weights, more in (("trained", []), ("untrained", ["optim.layer_decay=1"])):
                    own = [f"weights={weights}", f"seed={seed}", f"run={self._run(f'tuned-{number}-{weights}', seed)}"]
                    yield ["finetune", str(self._run("pretrained", seed)), *words, *own, *more, *self.typed]

    def evaluations(self) -> Iterator[list[str]]:
        """Commands of all seeds; each also evaluates the encoder before training."""
        for number, (command, *words) in enumerate(self.evaluated.values()):
            for seed in self.seeds:
                output = self._run(f"scores-{number}", seed)
                if not any(output.glob("evaluations/*.json")):
                    own = ["untrained=true", f"output={output}"]
                    yield [command, str(self._run("pretrained", seed)), *words, *own, *self.typed]

    def _run(self, name: str, seed: int) -> Path:
        return self.folder / f"{name}-{seed}"

    def run(self, commands: Sequence[list[str]], at_once: int) -> float:
        """Run the commands, ``at_once`` of them side by side; returns the seconds."""
        began = time.monotonic()
        workers = max(1, self.cores // min(at_once, max(1, len(commands))))

        def one(number: int, command: list[str]) -> None:
            environment = {**os.environ, "OMP_NUM_THREADS": str(workers)}
            if self.gpus > 1:
                environment["CUDA_VISIBLE_DEVICES"] = str(number % self.gpus)
            (result,) = (word for word in command if word.startswith(("run=", "output=")))
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

    def scores(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Row -> "pre-trained" and "untrained" -> mean, standard deviation and values of the top-1 in per cent."""
        rows = {}
        for number, row in enumerate(self.tuned):
            rows[row] = {
                name: _summary([self._tuned(f"tuned-{number}-{weights}", seed) for seed in self.seeds])
                for name, weights in WEIGHTS.items()
            }
        for number, row in enumerate(self.evaluated):
            records = [_record(self._run(f"scores-{number}", seed), "evaluations/*.json") for seed in self.seeds]
            keys = {"pre-trained": "top1", "untrained": "untrained"}
            rows[row] = {name: _summary([record[key] for record in records]) for name, key in keys.items()}
        return rows

    def _tuned(self, name: str, seed: int) -> float:
        return float(_record(self._run(name, seed), "evaluations/finetune-*.json")["top1"])


def _record(folder: Path, pattern: str) -> dict[str, Any]:
    (path,) = folder.glob(pattern)
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _summary(values: Sequence[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "deviation": deviation, "values": list(values)}


def table(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The scores as a table of Markdown."""
    lines = ["| top-1, % | pre-trained | untrained |", "|---|---|---|"]
    for row, found in rows.items():
        texts = [f"{one['mean']:.2f}" + f" ± {one['deviation'] or 0:.2f}" for one in found.values()]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all commands and print the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("keys", nargs="*", help="KEY=VALUE of every dmjd command, such as data.root=FOLDER")
    parser.add_argument("--folder", type=Path, default=Path("runs/fashion_mnist_finetune"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a trial: a tiny model, digits, two epochs")
    parser.add_argument("--at-once", type=int, default=None, help="commands side by side; default: 9 a GPU, on a CPU 1")
    options = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()
    at_once = options.at_once or max(1, 9 * gpus)
    sizes = QUICK if options.quick else FULL
    example = Example(options.folder.resolve(), options.seeds, sizes, options.keys, gpus)
    seconds = {"pre-training": example.run([*example.pretraining()], at_once)}
    seconds["the rest"] = example.run([*example.fine_tuning(), *example.evaluations()], at_once)
    device = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"CPU, {example.cores} cores"
    rows = example.scores()
    found = {"device": device, "torch": torch.__version__, "seeds": options.seeds, "quick": options.quick}
    text = json.dumps({**found, "seconds": seconds, "scores": rows}, indent=1)
    (example.folder / "results.json").write_text(text + "\n")
    (example.folder / "table.md").write_text(table(rows))
    print(text)


if __name__ == "__main__":
    main()
