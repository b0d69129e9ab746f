"""A run's folder: what was asked, from which source, on which machine, and everything that came out."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import dmjd
from dmjd.compose import from_yaml, to_yaml
from dmjd.config import SCIENCE, PretrainConfig
from dmjd.errors import ConfigError, StorageError
from dmjd.files import replace_file, standing_place
from dmjd.parallel.build import select_precision
from dmjd.parallel.deepspeed_config import STAGES, deepspeed_config
from dmjd.parallel.environment import FLIGHT
from dmjd.parallel.world import World
from dmjd.safe_load import parse_json
from dmjd.source import source_state
from dmjd.train import checkpoint

logger = logging.getLogger("dmjd")


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / checkpoint.CONFIG

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def timing(self) -> Path:
        return self.path / "timing.jsonl"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine.jsonl"

    @property
    def guard(self) -> Path:
        return self.path / "guard.jsonl"

    @property
    def stop_reason(self) -> Path:
        return self.path / "STOP_REASON"

    @property
    def checkpoints(self) -> Path:
        return self.path / checkpoint.FOLDER

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    def check(self, config: PretrainConfig) -> None:
        """Refuse a folder that holds another experiment; writes nothing.

        Raises:
            ConfigError: naming the first key of science that differs, or what is in the way.
        """
        standing = standing_place(self.path)
        if not standing.is_dir():
            raise ConfigError(f"run={self.path} is, or lies in, a file; name a folder")
        if not os.access(standing, os.W_OK):
            raise ConfigError(f"run={self.path}: {standing} cannot be written to; name another folder")
        if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():  # a disk that is not mounted
            raise ConfigError(f"{self.checkpoints} is no folder, nor a link to one that is there; bring it back")
        committed = checkpoint.committed(self.checkpoints)
        if config.resume == "never" and committed:
            raise ConfigError(f"run={self.path} has checkpoints and resume=never; use resume=auto, or another folder")
        # A node that died may have left a file of no bytes; checkpoints, which are flushed, know too what they are of.
        records = (self.config, *(path / checkpoint.CONFIG for path in reversed(committed)))
        recorded = next((path for path in records if path.is_file() and path.stat().st_size), None)
        if recorded is None:
            return
        before = from_yaml(PretrainConfig, recorded.read_bytes(), recorded)
        # How many bad images are too many decides when a run stops, not what it computes, and the refusal offers it.
        before.data.max_bad_percent = config.data.max_bad_percent
        before.data.crop_pct = config.data.crop_pct  # is what evaluations see, and no step depends on it
        # Nor does the way to the same bytes. Whether they are the same, checkpoints know (dmjd/train/state.py).
        before.data.cache, before.data.cache_gib = config.data.cache, config.data.cache_gib
        if before.data.name == config.data.name == "shards":
            before.data.root = config.data.root
        difference = _first_difference(asdict(before), asdict(config), SCIENCE)
        if difference and committed:
            key, old, new = difference
            raise ConfigError(
                f"run={self.path} was started with {key}={old} and now {key}={new} is asked for; "
                "keep the value, or name another folder"
            )

    def create(self) -> Path:
        """The folder, made if it is not there. Raises StorageError if it cannot be."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"run={self.path} cannot be written to ({error.strerror}); name another folder"
            ) from error
        return self.path

    def record(self, config: PretrainConfig, world: World) -> None:
        """Keep what was asked and where this launch runs."""
        device = world.device
        self.pictures.mkdir(exist_ok=True)
        self.evaluations.mkdir(exist_ok=True)
        if world.size > 1:
            (self.path / FLIGHT).mkdir(exist_ok=True)  # the recorder writes into it and does not make it
        replace_file(self.config, to_yaml(config))
        replace_file(self.path / "environment.txt", _packages())
        if config.engine.name in STAGES:
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
            "command": sys.argv,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        replace_file(self.provenance, json.dumps({**record, "launches": [*self._launches(), record]}, indent=1))

    def _launches(self) -> list[dict[str, Any]]:
        """Earlier launches, but for a record that a dying node has left empty: no run ends for want of it."""
        try:
            launches: list[dict[str, Any]] = parse_json(self.provenance.read_bytes())["launches"]
            if not isinstance(launches, list):
                raise ValueError("its launches are no list")
        except FileNotFoundError:
            return []
        except (ValueError, LookupError, TypeError) as error:
            logger.warning("%s cannot be read (%s) and begins anew", self.provenance, error)
            return []
        return launches

    def read_log(self) -> list[dict[str, Any]]:
        """The rows of ``log.jsonl``."""
        return [parse_json(line) for line in self.log.read_bytes().splitlines()] if self.log.is_file() else []

    def read_stop_reason(self) -> dict[str, Any]:
        """Why the last launch ended; empty if it was killed, or has not ended."""
        return parse_json(self.stop_reason.read_bytes()) if self.stop_reason.is_file() else {}

    def write_evaluation(self, name: str, result: dict[str, Any]) -> Path:
        """Keep one evaluation's numbers as ``evaluations/NAME.json``."""
        self.evaluations.mkdir(parents=True, exist_ok=True)
        path = self.evaluations / f"{name}.json"
        replace_file(path, json.dumps(result, indent=1))
        return path


def _deepspeed(config: PretrainConfig, world: World) -> dict[str, Any]:
    """The configuration that this launch's engine was made with."""
    bf16 = select_precision(config.engine.precision, world.device) == torch.bfloat16
    micro_batch = config.batch_size // (config.engine.accumulation * world.size)
    return deepspeed_config(config.engine, config.optim, bf16=bf16, micro_batch=micro_batch)


def _first_difference(old: Any, new: Any, keys: tuple[str, ...], prefix: str = "") -> tuple[str, Any, Any] | None:
    for key in keys:
        if isinstance(new[key], dict):
            inner = _first_difference(old[key], new[key], tuple(new[key]), f"{prefix}{key}.")
            if inner:
                return inner
        elif old[key] != new[key]:
            return f"{prefix}{key}", old[key], new[key]
    return None


def _packages() -> str:
    """Every installed distribution and its version, a line each."""
    found = {f"{item.metadata['Name']}=={item.version}" for item in metadata.distributions()}
    return "\n".join(sorted(found, key=str.lower)) + "\n"
