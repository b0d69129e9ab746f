"""Keys in which the configurations of several runs differ, and short names of the runs made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dmjd.report.format import ABSENT, plain
from dmjd.report.method import method_name
from dmjd.report.run import Run

MAX_KEYS = 4
"""Keys in a short name."""
_FIRST = ("method.", "target.", "backbone.", "mask.", "optim.")
_IGNORED = ("run", "typed")
"""Keys that change nothing: the folder, and which keys were typed."""
SEED = "seed"
_LONG = 8
"""Characters from which the last part of a key is clear alone."""


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Key -> its value in each run, for all keys whose values are not equal; the method's keys first."""
    flat = [dict(_leaves(run.config)) for run in runs]
    keys = dict.fromkeys(key for leaves in flat for key in leaves if key not in _IGNORED)
    differing = {key: [plain(leaves.get(key)) for leaves in flat] for key in keys}
    differing = {key: values for key, values in differing.items() if len({*values}) > 1}
    return {key: differing[key] for key in sorted(differing, key=_rank)}


def seed_groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs whose configurations differ in the seed only and that reached the same step; in their order.

    Fine-tuning runs may have begun from different runs, if these differ in the seed only.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_without_seed(run), []).append(run)
    return [*groups.values()]


def _without_seed(run: Run) -> tuple[Any, ...]:
    ignored = (*_IGNORED, SEED, *["init"] * (run.origin is not None))
    leaves = sorted((key, plain(value)) for key, value in _leaves(run.config) if key not in ignored)
    return run.last("step"), *leaves, *([_without_seed(run.origin)] if run.origin else [])


def short_names(runs: Sequence[Run]) -> list[str]:
    """Keys that set each run apart from the others of its method: "mask_ratio 0.5, seed 1"; a dash if there are none.

    Of the keys that differ within a method those that tell its runs apart, or all if they are few; of their values
    those that at most half of the method's runs share.
    """
    methods = [method_name(run.config) for run in runs]
    names = [ABSENT] * len(runs)
    for method in {*methods}:
        peers = [place for place, other in enumerate(methods) if other == method]
        differing = differences([runs[place] for place in peers])
        keys = list(differing) if len(differing) <= MAX_KEYS else _distinguishing(differing, len(peers))
        for index, place in enumerate(peers):
            rare = [key for key in keys if 2 * differing[key].count(differing[key][index]) <= len(peers)]
            parts = [f"{_title(key)} {differing[key][index]}" for key in rare]
            names[place] = ", ".join(parts[:MAX_KEYS] + ["..."] * (len(parts) > MAX_KEYS)) or ABSENT
    return names


def labels(runs: Sequence[Run]) -> list[str]:
    """Names for a legend: "run-7: MAE, seed 1"; the method only if the runs differ in it."""
    methods = [method_name(run.config) for run in runs]
    texts = []
    for run, method, name in zip(runs, methods, short_names(runs), strict=True):
        parts = [method] * (len({*methods}) > 1) + [name] * (name != ABSENT)
        texts.append(f"{run.name}: {', '.join(parts)}" if parts else run.name)
    return texts


def _distinguishing(differing: Mapping[str, Sequence[str]], count: int) -> list[str]:
    """Keys that tell ``count`` runs apart; each splits the runs that are still alike into the most groups."""
    chosen: list[str] = []
    alike: list[tuple[str, ...]] = [()] * count
    while True:
        split = {key: [(*run, value) for run, value in zip(alike, differing[key], strict=True)] for key in differing}
        best = max(split, key=lambda key: len({*split[key]}))
        if len({*split[best]}) == len({*alike}):
            return sorted(chosen, key=list(differing).index)
        chosen.append(best)
        alike = split[best]


def _title(key: str) -> str:
    """The last part of ``key``, or the last two of a short one: "mask_ratio", "target.norm"."""
    parts = key.split(".")
    return parts[-1] if len(parts[-1]) >= _LONG else ".".join(parts[-2:])


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inner in value.items():
        yield from _leaves(inner, f"{key}.{name}" if key else str(name))


def _rank(key: str) -> int:
    return next((rank for rank, section in enumerate(_FIRST) if key.startswith(section)), len(_FIRST))
