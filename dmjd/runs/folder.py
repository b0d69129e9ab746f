"""The run folder as the run itself uses it: checks before the run, and the records of each launch."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from datetime import datetime, timezone
from functools import reduce
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

import dmjd
from dmjd.compose import from_yaml_of_run, options_of, to_yaml, typed_of
from dmjd.config import EngineConfig, TrainConfig, first_difference
from dmjd.data.build import AUTO
from dmjd.data.listed import FILE as IMAGES
from dmjd.data.listed import TEST_FILE as TEST_IMAGES
from dmjd.errors import CheckpointError, ConfigError, StorageError, UserError
from dmjd.files import obstacle, read_file, replace_file, standing_place
from dmjd.parallel.environment import FLIGHT
from dmjd.parallel.world import World
from dmjd.redact import redact
from dmjd.runs import checkpoint
from dmjd.runs.checkpoint import weights_at
from dmjd.runs.heartbeat import FOLDER as HEARTBEATS
from dmjd.runs.heartbeat import forget_ranks
from dmjd.runs.paths import CONFIG, RunPaths
from dmjd.safe_load import parse_json
from dmjd.source import source_state

GROUPS = "groups.json"
"""The groups of the optimizer of a fine-tuning, with their learning rates and weight decays."""

REPLACED = (
    *(CONFIG, GROUPS, "provenance.json", "environment.txt", "source.diff", "deepspeed.json", "STOP_REASON"),
    "best.json",
)
"""Files that each launch replaces."""
FILES = (
    *(*REPLACED, ".lock", "log.jsonl", "timing.jsonl", "quarantine.jsonl", "guard.jsonl", "trackers.json"),
    *(IMAGES, TEST_IMAGES),
)
FOLDERS = (
    *(checkpoint.FOLDER, "pictures", "evaluations", HEARTBEATS, FLIGHT),
    *("profile", "out_of_memory", "tensorboard", "wandb"),
)

OF_A_LAUNCH = ("run", "resume", "engine", "time_budget", "profile", "profile_ranks", "memory_history")
"""Keys and sections that are always those of the launch: its machine, its time, its diagnostics."""

Config = TypeVar("Config", bound=TrainConfig)

logger = logging.getLogger("dmjd")

_ROW_BYTES = 1 << 16
"""Bytes of the first row of ``log.jsonl`` that are read at most."""


class RunFolder(RunPaths):
    """The run folder of a run that writes it."""

    def check(self, config: Config) -> Config:
        """The configuration with which ``config`` starts or continues in this folder; writes nothing.

        Without a checkpoint it is ``config``. With one it is the stored configuration with what was typed now: keys,
        and groups whose option is not that of the first start. :data:`OF_A_LAUNCH` is never taken from it. A
        ``config`` that was not made from overrides has to equal the stored one in all that may not change.

        Raises:
            ConfigError: for a run of another command, for the first key that differs from the stored configuration
                and may not, for a path that is not writable, and for one that is no file or no folder.
        """
        standing = standing_place(self.path)
        if not standing.is_dir():
            raise ConfigError(f"run={self.path} is a file or is below one; name a folder")
        if not os.access(standing, os.W_OK):
            raise ConfigError(f"run={self.path}: {standing} cannot be written to; name another folder")
        self._check_places()
        committed = checkpoint.committed(self.checkpoints)
        if config.resume == "never" and committed:
            raise ConfigError(f"run={self.path} has checkpoints and resume=never; use resume=auto, or another folder")
        recorded = self._recorded(committed)
        if recorded is None:
            self._check_apart(config)
            return config
        before = self._stored(recorded, type(config))
        typed = config.typed or []
        config, groups = self._with_stored_values(config, before)
        if before.data.name == "auto":
            before.data.name, before.data.pad = config.data.name, config.data.pad
        elif config.data.name == "auto":
            config.data.name, config.data.pad = before.data.name, before.data.pad
        # A difference in the data is reported first: it causes differences in other settings.
        difference = first_difference(before.data, config.data, "data.") or first_difference(before, config)
        if difference:
            key, old, new = difference
            group = next(
                (name for name in (key.partition(".")[0], "experiment", "preset", "method") if name in groups), None
            )
            by, cure = "", "keep the value"
            if group is not None and key not in typed:
                by, cure = f" by {groups[group]}", f"leave {groups[group]} out"
            raise ConfigError(
                f"run={self.path} was started with {key}={old}, and {key}={new} is set now{by}; "
                f"{cure}, or name another folder"
            )
        return config

    def batch_size(self, config: TrainConfig) -> int:
        """The batch size with which ``config`` starts or continues here; its own if :meth:`check` raises an error."""
        try:
            return self.check(config).batch_size
        except UserError:
            return config.batch_size

    def _recorded(self, committed: Sequence[Path]) -> Path | None:
        """The stored configuration of a run with the checkpoints ``committed``; None without any."""
        # A node failure may leave an empty config.yaml; the copies in checkpoints are flushed to disk.
        records = (self.config, *(path / CONFIG for path in reversed(committed))) if committed else ()
        return next((path for path in records if path.is_file() and path.stat().st_size), None)

    def _stored(self, recorded: Path, schema: type[Config]) -> Config:
        """The configuration in ``recorded``. Raises ConfigError if another command made the run."""
        stored = from_yaml_of_run(_content(recorded), recorded)
        if not isinstance(stored, schema):
            raise ConfigError(
                f"run={self.path} is a run of dmjd {stored.command}; name another folder for this run with run=FOLDER"
            )
        return self.with_stored_data(stored)

    @property
    def has_checkpoint(self) -> bool:
        """Whether a run can be continued here."""
        return bool(checkpoint.committed(self.checkpoints))

    def _with_stored_values(self, config: Config, before: Config) -> tuple[Config, Mapping[str, str]]:
        """``before``, with the values of ``config`` that were typed (see :meth:`check`), and group -> "GROUP=OPTION" of
        the groups among them."""
        if config.typed is None:
            return deepcopy(config), {}
        first = before.typed
        if first is None:  # of an older version, which recorded the whole command of each launch
            launches = self._provenance().get("launches") or [{}]
            first = typed_of(before.command, [str(text) for text in launches[0].get("command", ())])
        groups = {name.partition("=")[0]: name for name in config.typed if "=" in name and name not in first}
        if groups:  # an experiment sets options that were not typed
            options = options_of(before.command, first)
            groups = {group: name for group, name in groups.items() if name != f"{group}={options[group]}"}
        if {"experiment", "preset", "method"} & groups.keys():  # they set keys of all sections
            merged = deepcopy(config)
        else:
            merged = deepcopy(before)
            for key in (*OF_A_LAUNCH, *groups, *(name for name in config.typed if "=" not in name)):
                _set(merged, key, config)
        merged.typed = first
        return merged, groups

    def _check_apart(self, config: Config) -> None:
        """Raise ConfigError for a folder among the images of the run, to which its pictures would be added."""
        data = config.data
        if data.name != "folder" or data.root is None:
            return
        root = Path(data.root)
        images = (root / "train" if (root / "train").is_dir() else root).resolve()
        if images in (self.path.resolve(), *self.path.resolve().parents):
            raise ConfigError(
                f"run={self.path} lies in data.root={data.root}, and its pictures would be among the images; name a "
                "folder outside"
            )

    def _check_places(self) -> None:
        """Check that every path that the run will write is free and writable."""
        for name in (*FILES, *FOLDERS):
            path = self.path / name
            if what := obstacle(path, folder=name in FOLDERS):
                # A folder may be a link to a disk that is not mounted.
                needed = "a folder (or a link to one)" if name in FOLDERS else "a file"
                raise ConfigError(
                    f"{path} is {what}, and the run needs {needed} there; move it away or restore the former"
                )
            rights = os.R_OK | (0 if name in REPLACED else os.W_OK) | (os.X_OK if name in FOLDERS else 0)
            if path.exists() and not os.access(path, rights):
                raise ConfigError(
                    f"{path} cannot be read and written by user {os.geteuid()} (it belongs to user "
                    f"{path.stat().st_uid}); change its owner or rights, or name another folder"
                )

    def initial_weights(self, init: str | None) -> dict[str, str]:
        """The weights of ``init`` for a run without a checkpoint; those of its first launch, if there was one.

        Returns:
            Entries of provenance.json: ``init_path``, and its fingerprint ``init_sha256``. Empty without ``init``, and
            if the run has a checkpoint: the same command starts and resumes.

        Raises:
            CheckpointError: if there are none, or those of the first launch are gone or have changed.
        """
        if init is None or checkpoint.committed(self.checkpoints):
            return {}
        known = _initial(self._provenance())
        path = Path(known["init_path"]) if known else weights_at(init, "init").absolute()
        try:
            found = {"init_path": str(path), "init_sha256": checkpoint.fingerprint(path)}
        except OSError:
            found = {}
        named = Path(init).absolute(), Path(init).resolve()
        if not found or (known and known != found) or not any(path.is_relative_to(place) for place in named):
            raise CheckpointError(
                f"init={init}: this run started from {path}, which was removed, changed or moved; restore it, or "
                f"remove {self.provenance} to start from the present weights of init"
            )
        if known:
            weights_at(str(path), "init")  # checks its files against its manifest
        return found

    def with_stored_data(self, stored: Config) -> Config:
        """The stored configuration, with the ``data.name=auto`` of old versions resolved from the steps per epoch.

        ``auto`` stays if nothing has been logged.
        """
        data = stored.data
        if data.name != "auto":
            return stored
        steps = self._steps_per_epoch(stored.epochs)
        matching = [name for name, images in AUTO.items() if images // stored.batch_size == steps]
        name = "fashion_mnist" if data.root is not None else matching[0] if matching else "auto"
        return replace(stored, data=replace(data, name=name, pad=0 if name == "digits" else data.pad))

    def _steps_per_epoch(self, epochs: int) -> int | None:
        unreadable = (OSError, ValueError, LookupError, TypeError, ArithmeticError)
        with suppress(*unreadable), self.log.open("rb") as log:
            row = parse_json(log.readline(_ROW_BYTES))
            return round(row["step"] / row["epoch"])
        with suppress(*unreadable):
            return int(self.read_stop_reason()["total_steps"]) // epochs
        return None

    def engine_before(self, world: World) -> EngineConfig | None:
        """The engine of the launch before; None without a checkpoint, or if it had another device or number of
        processes."""
        recorded = self._recorded(checkpoint.committed(self.checkpoints))
        launch = {} if recorded is None else self._provenance()
        if recorded is None or (launch.get("device"), launch.get("world_size")) != (_device(world.device), world.size):
            return None
        return from_yaml_of_run(_content(recorded), recorded).engine

    def create(self) -> Path:
        """Create the folder if it does not exist, and return its path. Raises StorageError if it cannot be created."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"run={self.path} cannot be written to ({error.strerror}); name another folder"
            ) from error
        return self.path

    def record(
        self,
        config: TrainConfig,
        world: World,
        initial: Mapping[str, str] | None = None,
        deepspeed: Mapping[str, Any] | None = None,
    ) -> None:
        """Write config.yaml and the records of this launch, and remove the heartbeats of ranks from ``world.size`` on.

        Args:
            initial: from :meth:`initial_weights`.
            deepspeed: DeepSpeed's configuration, if the engine uses it.

        Raises:
            StorageError: if a file cannot be written.
        """
        try:
            self._record(config, world, initial or {}, deepspeed or {})
        except OSError as error:
            raise StorageError(
                f"cannot write {error.filename2 or error.filename or self.path}: {error.strerror}; no step was done; "
                "fix the cause and run the same command to continue"
            ) from error
        forget_ranks(self.path, world.size)

    def _record(
        self, config: TrainConfig, world: World, initial: Mapping[str, str], deepspeed: Mapping[str, Any]
    ) -> None:
        earlier = self._provenance()
        self.pictures.mkdir(exist_ok=True)
        self.evaluations.mkdir(exist_ok=True)
        if world.size > 1:
            (self.path / FLIGHT).mkdir(exist_ok=True)  # the flight recorder does not create it
        replace_file(self.config, to_yaml(config))
        replace_file(self.path / "environment.txt", _packages())
        if deepspeed:
            replace_file(self.path / "deepspeed.json", json.dumps(deepspeed, indent=1))
        sha, diff = source_state()
        if diff:
            replace_file(self.path / "source.diff", diff)
        record = {
            "dmjd": dmjd.__version__,
            "git_sha": sha,
            "git_dirty": bool(diff),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": _device(world.device),
            "world_size": world.size,
            "host": platform.node(),
            "command": [redact(word) for word in sys.argv],
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **(initial or _initial(earlier)),
        }
        launches = [*earlier.get("launches", []), record]
        replace_file(self.provenance, json.dumps({**record, "launches": launches}, indent=1))

    def _provenance(self) -> dict[str, Any]:
        """The record of earlier launches; empty, with a warning, if a node failure has damaged it."""
        if not self.provenance.is_file():
            return {}
        try:
            record: dict[str, Any] = parse_json(read_file(self.provenance))
            if not isinstance(record["launches"], list):
                raise ValueError("launches is not a list")
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s) and is replaced", self.provenance, error)
            return {}
        return record


def _set(config: TrainConfig, key: str, source: TrainConfig) -> None:
    """Set ``key``, a dotted name of a value or section, to its value in ``source``."""
    *sections, name = key.split(".")
    to, origin = reduce(getattr, sections, config), reduce(getattr, sections, source)
    setattr(to, name, deepcopy(getattr(origin, name)))


def _content(config: Path) -> bytes:
    try:
        return read_file(config)
    except OSError as error:
        raise ConfigError(f"{config} cannot be read ({error.strerror}); restore it, or name another folder") from error


def _initial(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The entries of :meth:`RunFolder.initial_weights` in ``provenance``; empty if it has none."""
    found = {name: provenance.get(name) for name in ("init_path", "init_sha256")}
    return {name: value for name, value in found.items() if isinstance(value, str)} if all(found.values()) else {}


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def _packages() -> str:
    """Installed packages and their versions, one per line."""
    described = (item.metadata for item in metadata.distributions())  # each access parses a file
    found = {f"{fields['Name']}=={fields['Version']}" for fields in described}
    return "\n".join(sorted(found, key=str.lower)) + "\n"
