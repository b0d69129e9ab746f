"""Studies, their arms and the trainings that they need: one YAML file per study, and base.yaml for all of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TUNE, FULL = "tune", "full"
"""Stages: the search for the rate at half length, and the trainings of all seeds."""
SOURCES = {"fashion_mnist": 60_000, "digits": 1_437}
"""Data set -> training images."""
HELD_OUT = 10
"""Per cent of the training images, the last ones, that score the rates."""


@dataclass(frozen=True)
class Arm:
    """One training, without its seed and its learning rate.

    keys: overrides of ``dmjd pretrain`` by key, those of base.yaml included.
    objective: "" or "misaligned" (arm.py).
    percent: of the training images, the first of each class.
    rate_of: the arm that is tuned in place of this one.
    """

    label: str
    keys: Mapping[str, str]
    objective: str = ""
    percent: int = 100
    rate_of: Arm | None = None

    @property
    def id(self) -> str:
        """A digest of all that affects the result but seed and rate: equal arms of two studies share it."""
        parts = [dict(sorted(self.keys.items())), self.objective, self.percent]
        if self.rate_of is not None:
            parts.append(self.rate_of.id)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    @property
    def tuned(self) -> Arm:
        """The arm whose trainings choose the rate."""
        return self.rate_of or self


@dataclass(frozen=True)
class Comparison:
    """A claim about two arms. "higher": the first has the higher score; "equal": the difference is within points."""

    claim: str
    paper: str
    first: str
    second: str
    expect: str
    score: str = "probe"
    within: float = 1.0


@dataclass(frozen=True)
class Study:
    """One YAML file; ``untrained``: names of the arms whose encoder is also scored before training."""

    name: str
    title: str
    text: str
    arms: Mapping[str, Arm]
    comparisons: Sequence[Comparison]
    finetune: bool
    untrained: frozenset[str]


@dataclass(frozen=True)
class Job:
    """One training with its scores."""

    arm: Arm
    stage: str
    seed: int
    rate: float
    finetune: bool = False
    untrained: bool = False

    @property
    def key(self) -> tuple[str, str, int, float]:
        return self.arm.id, self.stage, self.seed, self.rate

    @property
    def scores(self) -> set[str]:
        """Names of the scores that a finished row has."""
        return (
            {"probe", "knn"} | ({"finetune"} if self.finetune else set()) | ({"untrained"} if self.untrained else set())
        )

    @property
    def epochs(self) -> int:
        epochs = int(self.arm.keys["epochs"])
        return max(1, epochs // 2) if self.stage == TUNE else epochs


@dataclass
class Plan:
    """All studies of a folder, in the order of their names unless ``only`` gives another."""

    studies: list[Study]
    source: str
    rates: list[float]
    seeds: list[int]
    finetune: list[str]

    @classmethod
    def read(cls, folder: Path, only: Sequence[str] = ()) -> Plan:
        base = yaml.safe_load((folder / "base.yaml").read_text())
        names = list(only) or sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "base")
        studies = [_study(folder / f"{name}.yaml", base["keys"]) for name in names]
        rates = [float(rate) for rate in base["rates"]]
        return cls(studies, base["source"], rates, base["seeds"], base["finetune"])

    def jobs(self, rows: Rows) -> Iterator[Job]:
        """The trainings that ``rows`` do not hold and that can begin, in order; each arm once."""
        scored = {arm.id for study in self.studies if study.finetune for arm in study.arms.values()}
        untrained = {study.arms[name].id for study in self.studies for name in study.untrained}
        seen: set[tuple[str, str, int, float]] = set()
        for study in self.studies:
            for arm in study.arms.values():
                for job in self._of_arm(arm, rows, arm.id in scored, arm.id in untrained):
                    if job.key not in seen and not rows.has(job):
                        yield job
                    seen.add(job.key)

    def _of_arm(self, arm: Arm, rows: Rows, finetune: bool, untrained: bool) -> Iterator[Job]:
        for rate in self.rates:
            yield Job(arm.tuned, TUNE, self.seeds[0], rate)
        best = rows.best_rate(arm.tuned, self.rates)
        if best is not None:
            for seed in self.seeds:
                yield Job(arm, FULL, seed, best, finetune, untrained)

    def images(self, job: Job) -> int:
        """Unique images that the training of ``job`` reads, those of fine-tuning not counted."""
        share = job.arm.percent / 100 * (1 - HELD_OUT / 100 if job.stage == TUNE else 1)
        return math.floor(job.epochs * SOURCES[self.source] * share)


def _study(path: Path, base: Sequence[str]) -> Study:
    content = yaml.safe_load(path.read_text())
    written: dict[str, dict[str, Any]] = content["arms"]

    def arm(name: str) -> Arm:
        entry = written[name]
        other = entry.get("rate_of")
        if other is None and entry.get("percent", 100) < 100:
            raise ValueError(f"{path}: {name} has percent={entry['percent']} and no rate_of; rates are tuned on all")
        return Arm(
            entry["label"],
            dict(key.split("=", 1) for key in (*base, *entry["keys"])),
            entry.get("objective", ""),
            entry.get("percent", 100),
            None if other is None else arm(other),
        )

    return Study(
        path.stem,
        content["title"],
        content["text"],
        {name: arm(name) for name in written},
        [Comparison(**each) for each in content["comparisons"]],
        content.get("finetune", False),
        frozenset(name for name, entry in written.items() if entry.get("untrained")),
    )


@dataclass
class Rows:
    """Rows of finished trainings in a file of JSON lines; the last row of a training counts."""

    path: Path
    rows: dict[tuple[str, str, int, float], dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Rows:
        rows = cls(path)
        if path.is_file():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                rows.rows[row["arm"], row["stage"], row["seed"], row["rate"]] = row
        return rows

    def add(self, row: dict[str, Any]) -> None:
        """Append ``row`` to the file, so that an interrupted visit loses none."""
        self.rows[row["arm"], row["stage"], row["seed"], row["rate"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, job: Job) -> bool:
        """Whether all scores of ``job`` are known."""
        row = self.rows.get(job.key)
        return row is not None and job.scores <= row["scores"].keys()

    def best_rate(self, arm: Arm, rates: Sequence[float]) -> float | None:
        """The rate of the highest held-out probe, the lower of equal ones; None before all ``rates`` have a row."""
        found = {
            rate: row["scores"]["probe"]
            for (id, stage, _, rate), row in self.rows.items()
            if id == arm.id and stage == TUNE
        }
        if not set(rates) <= found.keys():
            return None
        return max(sorted(rates), key=lambda rate: found[rate])

    def full(self, arm: Arm, rates: Sequence[float]) -> dict[int, dict[str, Any]]:
        """Seed -> row of the chosen rate."""
        best = self.best_rate(arm.tuned, rates)
        return {
            seed: row
            for (id, stage, seed, rate), row in sorted(self.rows.items())
            if id == arm.id and stage == FULL and rate == best
        }
