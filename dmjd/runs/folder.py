"""A run's folder: what was asked, from which source, on which machine, and everything that came out."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import dmjd
from dmjd.compose import from_yaml, to_yaml
from dmjd.config import PretrainConfig, first_difference
from dmjd.data.build import AUTO
from dmjd.errors import CheckpointError, ConfigError, StorageError
from dmjd.files import obstacle, read_file, replace_file, standing_place
from dmjd.parallel.build import select_precision
from dmjd.parallel.deepspeed.config import deepspeed_config
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.environment import FLIGHT
from dmjd.parallel.world import World
from dmjd.redact import redact
from dmjd.runs import checkpoint
from dmjd.runs.checkpoint import weights_at
from dmjd.runs.heartbeat import FOLDER as HEARTBEATS
from dmjd.runs.paths import CONFIG, RunPaths
from dmjd.safe_load import parse_json
from dmjd.source import source_state

REPLACED = (CONFIG, "provenance.json", "environment.txt", "source.diff", "deepspeed.json", "STOP_REASON")
"""Files that each launch writes anew, in the place of those before."""
FILES = (*REPLACED, ".lock", "log.jsonl", "timing.jsonl", "quarantine.jsonl", "guard.jsonl", "trackers.json")
FOLDERS = (
    *(checkpoint.FOLDER, "pictures", "evaluations", HEARTBEATS, FLIGHT),
    *("profile", "out_of_memory", "tensorboard", "wandb"),
)

logger = logging.getLogger("dmjd")

_ROW_BYTES = 1 << 16
"""The longest row of ``log.jsonl`` that is read to find the length of an epoch."""


class RunFolder(RunPaths):
    """A run's folder as the run itself uses it: checked, created and recorded."""

    def check(self, config: PretrainConfig) -> None:
        """Refuse a folder that holds another experiment; writes nothing.

        Raises:
            ConfigError: naming the first key that differs and may not, or what is in the way.
        """
        standing = standing_place(self.path)
        if not standing.is_dir():
            raise ConfigError(f"run={self.path} is, or lies in, a file; name a folder")
        if not os.access(standing, os.W_OK):
            raise ConfigError(f"run={self.path}: {standing} cannot be written to; name another folder")
        self._check_places()
        committed = checkpoint.committed(self.checkpoints)
        if config.resume == "never" and committed:
            raise ConfigError(f"run={self.path} has checkpoints and resume=never; use resume=auto, or another folder")
        # A node that died may have left a file of no bytes; checkpoints, which are flushed, know too what they are of.
        records = (self.config, *(path / CONFIG for path in reversed(committed)))
        recorded = next((path for path in records if path.is_file() and path.stat().st_size), None)
        if recorded is None:
            return
        before = self.with_stored_data(from_yaml(PretrainConfig, _content(recorded), recorded))
        if "auto" in (before.data.name, config.data.name):  # unknown as yet: submit resolves it on the node
            before.data.name, before.data.pad = config.data.name, config.data.pad
        # Other data come with other settings, so they are named before these.
        difference = first_difference(before.data, config.data, "data.") or first_difference(before, config)
        if difference and committed:
            key, old, new = difference
            raise ConfigError(
                f"run={self.path} was started with {key}={old} and now {key}={new} is asked for; "
                "keep the value, or name another folder"
            )

    def _check_places(self) -> None:
        """Refuse what would keep the run from writing its files, hours from now."""
        for name in (*FILES, *FOLDERS):
            path = self.path / name
            if what := obstacle(path, folder=name in FOLDERS):
                # Checkpoints may lie behind a link to a disk that is not mounted.
                needed = "a folder, or a link to one" if name in FOLDERS else "a file"
                raise ConfigError(f"{path} is {what}, where the run keeps {needed}; move it away, or bring that back")
            rights = os.R_OK | (0 if name in REPLACED else os.W_OK) | (os.X_OK if name in FOLDERS else 0)
            if path.exists() and not os.access(path, rights):
                raise ConfigError(
                    f"{path} cannot be read and written by user {os.geteuid()} (it belongs to user "
                    f"{path.stat().st_uid}); change its owner or rights, or name another folder"
                )

    def initial_weights(self, init: str) -> dict[str, str]:
        """The weights that a run without a checkpoint begins from: as its first start found them, if there was one.

        Returns:
            Entries of provenance.json: ``init_path``, and its fingerprint ``init_sha256``.

        Raises:
            CheckpointError: if there are none, or those of the first start are gone or have changed.
        """
        known = _initial(self._provenance())
        path = Path(known["init_path"]) if known else weights_at(init, "init").absolute()
        try:
            found = {"init_path": str(path), "init_sha256": checkpoint.fingerprint(path)}
        except OSError:
            found = {}
        named = Path(init).absolute(), Path(init).resolve()
        if not found or (known and known != found) or not any(path.is_relative_to(place) for place in named):
            raise CheckpointError(
                f"init={init}: this run began from {path}, which is gone, has changed or lies elsewhere; bring it "
                f"back, or remove {self.provenance} to begin from the weights that init names now"
            )
        if known:
            weights_at(str(path), "init")  # compares its files with its manifest
        return found

    def with_stored_data(self, stored: PretrainConfig) -> PretrainConfig:
        """The stored configuration, with the data set that was used in place of the ``data.name=auto`` of old versions.

        The steps per epoch show which one. ``auto`` stays where nothing has been logged.
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

    def create(self) -> Path:
        """The folder, made if it is not there. Raises StorageError if it cannot be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"run={self.path} cannot be written to ({error.strerror}); name another folder"
            ) from error
        return self.path

    def record(self, config: PretrainConfig, world: World, initial: Mapping[str, str] | None = None) -> None:
        """Keep what was asked, where this launch runs and, if it begins from others, its ``initial_weights``.

        Raises:
            StorageError: if it cannot be written.
        """
        try:
            self._record(config, world, initial or {})
        except OSError as error:
            raise StorageError(
                f"cannot write {error.filename2 or error.filename or self.path}: {error.strerror}; no step was done; "
                "mend that, and the same command goes on"
            ) from error

    def _record(self, config: PretrainConfig, world: World, initial: Mapping[str, str]) -> None:
        device, earlier = world.device, self._provenance()
        self.pictures.mkdir(exist_ok=True)
        self.evaluations.mkdir(exist_ok=True)
        if world.size > 1:
            (self.path / FLIGHT).mkdir(exist_ok=True)  # the recorder writes into it and does not make it
        replace_file(self.config, to_yaml(config))
        replace_file(self.path / "environment.txt", _packages())
        if ENGINES[config.engine.name].stage:
            replace_file(self.path / "deepspeed.json", json.dumps(_deepspeed(config, world), indent=1))
        sha, diff = source_state()
        if diff:
            replace_file(self.path / "source.diff", diff)
        record = {
            "dmjd": dmjd.__version__,
            "git_sha": sha,
            "git_dirty": bool(diff),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"cpu ({torch.get_num_threads()} threads)",
            "world_size": world.size,
            "host": platform.node(),
            "command": [redact(word) for word in sys.argv],
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **(initial or _initial(earlier)),
        }
        launches = [*earlier.get("launches", []), record]
        replace_file(self.provenance, json.dumps({**record, "launches": launches}, indent=1))

    def _provenance(self) -> dict[str, Any]:
        """The record of earlier launches; empty if a dying node has damaged it: no run ends for want of it."""
        if not self.provenance.is_file():
            return {}
        try:
            record: dict[str, Any] = parse_json(read_file(self.provenance))
            if not isinstance(record["launches"], list):
                raise ValueError("launches is no list")
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s) and begins anew", self.provenance, error)
            return {}
        return record


def _content(config: Path) -> bytes:
    try:
        return read_file(config)
    except OSError as error:
        raise ConfigError(f"{config} cannot be read ({error.strerror}); restore it, or name another folder") from error


def _initial(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The entries of :meth:`RunFolder.initial_weights` in a record of launches; empty if it has none."""
    found = {name: provenance.get(name) for name in ("init_path", "init_sha256")}
    return {name: value for name, value in found.items() if isinstance(value, str)} if all(found.values()) else {}


def _deepspeed(config: PretrainConfig, world: World) -> dict[str, Any]:
    """The configuration that this launch's engine was made with."""
    bf16 = select_precision(config.engine.precision, world.device) == torch.bfloat16
    micro_batch = config.batch_size // (config.engine.grad_accum_steps * world.size)
    return deepspeed_config(config.engine, config.optim, bf16=bf16, micro_batch=micro_batch)


def _packages() -> str:
    """Every installed distribution and its version, a line each."""
    found = {f"{item.metadata['Name']}=={item.version}" for item in metadata.distributions()}
    return "\n".join(sorted(found, key=str.lower)) + "\n"
