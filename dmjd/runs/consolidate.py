"""``dmjd consolidate``: the tensors of a checkpoint, whole and in float32, in files that every engine reads."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dmjd.config import ConsolidateConfig
from dmjd.errors import CheckpointError, ConfigError, StorageError
from dmjd.interop.shards import shard_bytes, write_shards
from dmjd.parallel import native_files, store
from dmjd.runs import checkpoint

SUFFIX = ".safetensors"


def consolidate(config: ConsolidateConfig) -> Path:
    """Write parameters, moments and averages of ``config.checkpoint`` under the names of
    :mod:`dmjd.parallel.native_files`. Tensors are read and written one at a time.

    Without ``output`` the file becomes part of the checkpoint, and the run can continue with another engine. A file
    elsewhere can be used as ``init=FILE``, which reads the parameters. The file is created atomically.

    Returns:
        The file, or the index of several.

    Raises:
        CheckpointError: if there is no complete checkpoint, or it has a tensor that is not float32.
        ConfigError: if ``config.output`` is not writable. StorageError: if the disk is full.
    """
    size = shard_bytes(config.shard_size)
    folder = checkpoint.resolve(Path(config.checkpoint))
    path = folder / native_files.CONSOLIDATED if config.output is None else Path(config.output)
    if path.suffix != SUFFIX or path.is_dir():
        raise ConfigError(f"output={path} must name a file that ends in {SUFFIX}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path.parent} is not a writable folder; name another with output=FILE{SUFFIX}")
    like, read = store.open_tensors(folder)
    for name, tensor in like.items():
        if tensor.dtype != torch.float32:
            raise CheckpointError(
                f"{folder} has {name} in {tensor.dtype}, and dmjd saves float32; no run of dmjd wrote it"
            )
    try:
        files = write_shards(path, like, read, size)
        if config.output is None:
            checkpoint.add(folder, *files)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}; the checkpoint is intact") from error
    return files[-1]
