"""``dmjd consolidate``: the tensors of a checkpoint, whole and in float32, in one file that every engine reads."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from safetensors.torch import save_file

from dmjd.config import ConsolidateConfig
from dmjd.errors import ConfigError, StorageError
from dmjd.parallel import native_files, store
from dmjd.runs import checkpoint

logger = logging.getLogger("dmjd")

SUFFIX = ".safetensors"


def consolidate(config: ConsolidateConfig) -> Path:
    """Write parameters, moments and averages of ``config.checkpoint`` under the names of
    :mod:`dmjd.parallel.native_files`.

    Without ``output`` the file becomes part of the checkpoint, and the run can continue with another engine. A file
    elsewhere can be used as ``init=FILE``, which reads the parameters. The file is created atomically.

    Returns:
        The file.

    Raises:
        CheckpointError: if there is no complete checkpoint.
        ConfigError: if ``config.output`` is not writable. StorageError: if the disk is full.
    """
    folder = checkpoint.resolve(Path(config.checkpoint))
    path = folder / native_files.CONSOLIDATED if config.output is None else Path(config.output)
    if path.suffix != SUFFIX or path.is_dir():
        raise ConfigError(f"output={path} must name a file that ends in {SUFFIX}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path.parent} is not a writable folder; name another with output=FILE{SUFFIX}")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(store.read(folder), draft)
        draft.chmod(0o666 & ~_umask())  # save_file makes it readable for its owner only
        draft.replace(path)
        if config.output is None:
            checkpoint.add(folder, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}; the checkpoint is intact") from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
