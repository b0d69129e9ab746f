"""Studies, their arms and the trainings that they need: one YAML file per study, and base.yaml for all of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

TUNE, FULL, STEP = "tune", "full", "kernels"
"""Stages: the search for the rate at half length, the trainings of all seeds, and the GPU time of a step."""
HELD_OUT = 10
"""Per cent of the training images of :data:`SOURCES` without folds, the last ones, that score the rates."""


@dataclass(frozen=True)
class Source:
    """A data set. images: those of a training; tuned: the share of these in the search for the rate. scores: of frozen
    features; the first chooses the rate. folds: the seeds are folds of the same images, 0 for none. cost: time of an
    image relative to Fashion-MNIST, by which `plan` estimates minutes."""

    name: str
    images: int
    tuned: float
    scores: tuple[str, ...]
    folds: int = 0
    cost: float = 1.0

    @property
    def overlap(self) -> float:
        """Test images of a fold per training image, see :func:`evidence.paired.difference`; 0 without folds."""
        return 1 / (self.folds - 1) if self.folds else 0.0


SOURCES = {
    "fashion_mnist": Source("Fashion-MNIST", 60_000, 1 - HELD_OUT / 100, ("probe", "knn")),
    "digits": Source("scikit-learn's digits", 1_437, 1 - HELD_OUT / 100, ("probe", "knn")),
    "elpv": Source("photographs of solar cells (ELPV)", 2_099, 3 / 4, ("auroc", "balanced", "accuracy"), 5, cost=12),
}


@dataclass(frozen=True)
class Arm:
    """One training, without its seed and its learning rate.

    keys: overrides of ``dmjd pretrain`` by key, the study's and those of base.yaml included.
    source: a name of :data:`SOURCES`.
    objective: a key of arm.OBJECTIVES.
    percent: of the training images, the first of each class.
    rate_of: the arm that is tuned in place of this one.
    time_of: the arm that takes the GPU as long; the epochs follow from the time of both steps (:meth:`Rows.epochs`).
    """

    label: str
    keys: Mapping[str, str]
    source: str
    objective: str = ""
    percent: int = 100
    rate_of: Arm | None = None
    time_of: Arm | None = None

    @property
    def id(self) -> str:
        """A digest of all that affects the result but seed and rate: equal arms of two studies share it."""
        parts = [dict(sorted(self.keys.items())), self.objective, self.percent]
        if self.rate_of is not None:
            parts.append(self.rate_of.id)
        if self.time_of is not None:
            parts.append(["time", self.time_of.id])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    @property
    def step(self) -> Arm:
        """The arm of which only the step counts, whose kernels all arms that differ in epochs alone share."""
        keys = {key: value for key, value in self.keys.items() if key != "epochs"}
        return replace(self, keys=keys, percent=100, rate_of=None, time_of=None)

    @property
    def tuned(self) -> Arm:
        """The arm whose trainings choose the rate."""
        return self.rate_of or self


@dataclass(frozen=True)
class Comparison:
    """A claim about two arms. "higher": the first has the higher score; "equal": the difference is within points.

    ``second`` may be "untrained": the encoder of ``first`` before training. ``main`` claims head the page.
    """

    claim: str
    paper: str
    first: str
    second: str
    expect: str
    score: str = "probe"
    within: float = 1.0
    main: bool = False


@dataclass(frozen=True)
class Study:
    """One YAML file; ``untrained``: names of the arms whose encoder is also scored before training; ``published``:
    scores from papers by label; ``loaders``: images per second by label, for the table of time to accuracy. ``source``,
    ``rates``, ``seeds``: base.yaml's unless the file has its own."""

    name: str
    title: str
    text: str
    source: str
    rates: Sequence[float]
    seeds: Sequence[int]
    arms: Mapping[str, Arm]
    comparisons: Sequence[Comparison]
    finetune: bool
    untrained: frozenset[str]
    published: Mapping[str, Mapping[str, float]]
    loaders: Mapping[str, float]

    @property
    def scores(self) -> tuple[str, ...]:
        return SOURCES[self.source].scores

    def timed(self) -> list[Arm]:
        """The steps whose GPU time is to be measured: all of a study that compares arms of equal time."""
        if not any(arm.time_of for arm in self.arms.values()):
            return []
        return list({arm.step.id: arm.step for arm in self.arms.values()}.values())


@dataclass(frozen=True)
class Job:
    """One training with its scores; ``time_epochs``: its epochs, if they follow from another arm's time."""

    arm: Arm
    stage: str
    seed: int
    rate: float
    finetune: bool = False
    untrained: bool = False
    time_epochs: int | None = None

    @property
    def key(self) -> tuple[str, str, int, float]:
        return self.arm.id, self.stage, self.seed, self.rate

    @property
    def scores(self) -> set[str]:
        """Names of the scores that a finished row has."""
        own = SOURCES[self.arm.source].scores
        untrained = {f"untrained_{score}" for score in own} if self.untrained else set()
        return {*own} | untrained | ({"finetune"} if self.finetune else set())

    @property
    def epochs(self) -> int:
        if self.time_epochs is not None:
            return self.time_epochs
        epochs = int(self.arm.keys["epochs"])
        return max(1, epochs // 2) if self.stage == TUNE else epochs

    @property
    def data(self) -> str:
        """Its folder of images below that of all data."""
        folds = SOURCES[self.arm.source].folds
        part = TUNE if self.stage == TUNE else f"fold{self.seed % folds}" if folds else f"{self.arm.percent}"
        return f"{self.arm.source}/{part}"

    @property
    def images(self) -> int:
        """Images that the training reads, those of fine-tuning not counted."""
        source = SOURCES[self.arm.source]
        share = self.arm.percent / 100 * (source.tuned if self.stage == TUNE else 1)
        return math.floor(self.epochs * source.images * share)


@dataclass
class Plan:
    """All studies of a folder, in the order of their names unless ``only`` gives another."""

    studies: list[Study]
    finetune: list[str]

    @classmethod
    def read(cls, folder: Path, only: Sequence[str] = ()) -> Plan:
        base = yaml.safe_load((folder / "base.yaml").read_text())
        names = list(only) or sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "base")
        return cls([_study(folder / f"{name}.yaml", base) for name in names], base["finetune"])

    def jobs(self, rows: Rows) -> Iterator[Job]:
        """The trainings that ``rows`` do not hold and that can begin, in order; each arm once."""
        scored = {arm.id for study in self.studies if study.finetune for arm in study.arms.values()}
        untrained = {study.arms[name].id for study in self.studies for name in study.untrained}
        seen: set[tuple[str, str, int, float]] = set()
        for study in self.studies:
            for arm in study.arms.values():
                for job in _of_arm(study, arm, rows, arm.id in scored, arm.id in untrained):
                    if job.key not in seen and not rows.has(job):
                        yield job
                    seen.add(job.key)


def _of_arm(study: Study, arm: Arm, rows: Rows, finetune: bool, untrained: bool) -> Iterator[Job]:
    for rate in study.rates:
        yield Job(arm.tuned, TUNE, study.seeds[0], rate)
    best, epochs = rows.best_rate(arm.tuned, study.rates), rows.epochs(arm)
    if best is not None and epochs is not None:
        for seed in study.seeds:
            yield Job(arm, FULL, seed, best, finetune, untrained, epochs)


def _study(path: Path, base: Mapping[str, Any]) -> Study:
    content = {**{key: base[key] for key in ("source", "keys", "rates", "seeds")}, **yaml.safe_load(path.read_text())}
    written: dict[str, dict[str, Any]] = content["arms"]

    def arm(name: str) -> Arm:
        entry = written[name]
        other, time = entry.get("rate_of"), entry.get("time_of")
        if other is None and (entry.get("percent", 100) < 100 or time is not None):
            raise ValueError(f"{path}: {name} has percent or time_of and no rate_of; rates are tuned on all images")
        return Arm(
            entry["label"],
            dict(key.split("=", 1) for key in (*content["keys"], *entry["keys"])),
            content["source"],
            entry.get("objective", ""),
            entry.get("percent", 100),
            None if other is None else arm(other),
            None if time is None else arm(time),
        )

    return Study(
        path.stem,
        content["title"],
        content["text"],
        content["source"],
        [float(rate) for rate in content["rates"]],
        content["seeds"],
        {name: arm(name) for name in written},
        [Comparison(**each) for each in content["comparisons"]],
        content.get("finetune", False),
        frozenset(name for name, entry in written.items() if entry.get("untrained")),
        content.get("published", {}),
        content.get("loaders", {}),
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
        """The rate of the highest held-out score, the lower of equal ones; None before all ``rates`` have a row. Other
        rates that have one count too."""
        found, score = self.tuning(arm), SOURCES[arm.source].scores[0]
        if not set(rates) <= found.keys():
            return None
        return max(sorted(found), key=lambda rate: found[rate]["scores"][score])

    def tuning(self, arm: Arm) -> dict[float, dict[str, Any]]:
        """Rate -> row of the search for the rate."""
        return {rate: row for (id, stage, _, rate), row in self.rows.items() if id == arm.id and stage == TUNE}

    def speed(self, arm: Arm) -> float | None:
        """Images per second of GPU time of the arm's step; None before it is measured."""
        row = self.rows.get((arm.step.id, STEP, 0, 0.0))
        return None if row is None else row["images_per_second"]

    def epochs(self, arm: Arm) -> int | None:
        """Epochs of ``arm``: of one with ``time_of`` those whose steps take as long as those of the other; None before
        both are measured."""
        if arm.time_of is None:
            return int(arm.keys["epochs"])
        own, other = self.speed(arm), self.speed(arm.time_of)
        if own is None or other is None:
            return None
        return max(1, round(int(arm.time_of.keys["epochs"]) * own / other))

    def full(self, arm: Arm, rates: Sequence[float]) -> dict[int, dict[str, Any]]:
        """Seed -> row of the chosen rate."""
        best = self.best_rate(arm.tuned, rates)
        return {
            seed: row
            for (id, stage, seed, rate), row in sorted(self.rows.items())
            if id == arm.id and stage == FULL and rate == best
        }
