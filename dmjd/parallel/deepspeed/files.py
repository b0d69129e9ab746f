"""DeepSpeed's own files inside a checkpoint folder: written beside the training, loaded at any number of processes.

    zero.json           stage, number of processes, and shapes by parameter
    zero/               what ``save_checkpoint`` of every process makes: partitions of parameters and moments
    averages/           averaged parameters, whole, in the native engines' format (:mod:`dmjd.parallel.native_files`)

Partitions fit the stage and the number of processes that wrote them. Anything else is loaded by way of DeepSpeed's
universal format, a folder of whole tensors for each parameter, which is made for the occasion and removed: a run that
was requeued on fewer nodes goes on by itself, where a command for the conversion would need somebody to run it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmjd.errors import CheckpointError, ConfigError, StorageError, UserError
from dmjd.files import read_file
from dmjd.parallel import native_files
from dmjd.parallel.deepspeed.partitions import Partitions
from dmjd.parallel.native_files import AVERAGE, PARAMETER, Tensors
from dmjd.parallel.world import World
from dmjd.safe_load import TENSORS, load_torch, locate_torch, one_line, parse_json, weights_only_forced

# New names since torch 2.13; DeepSpeed calls collectives by those that 2.11 has as well.
warnings.filterwarnings(
    "ignore", r"`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated", FutureWarning
)
# The current device is that of the rank.
warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning)

INDEX, TAG, AVERAGES = "zero.json", "zero", "averages"
_UNIVERSAL = ".universal"
_PARTS = "zero"
"""The folder of whole tensors inside the universal format."""

_SLICES = {PARAMETER: "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Our kinds of tensors -> the names of DeepSpeed's universal format."""

_CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}
"""Module -> class: all that DeepSpeed's files name beside tensors (measured on 0.19)."""
_NAMES = TENSORS | {f"{module}.{name}" for module, name in _CLASSES.items()}


def import_deepspeed(module: str = "deepspeed") -> Any:
    """DeepSpeed, quiet. Raises ConfigError if it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # else it logs its guess
    probe = logging.getLogger("torch.utils.cpp_extension")  # it warns on a host with a CUDA toolkit and no card
    level = probe.level
    probe.setLevel(logging.ERROR)
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ConfigError("this needs deepspeed: pip install 'dmjd[scale]'") from error
    finally:
        probe.setLevel(level)
    # On a CPU it would compile an op for shared memory when processes meet; gloo does without.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    # Its warnings are addressed to whoever writes its configuration, which we do.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return found


def is_zero(path: Path) -> bool:
    """Whether a ZeRO engine wrote the checkpoint ``path``."""
    return (path / INDEX).is_file()


def capture(engine: Any, shapes: Mapping[str, torch.Size], size: int, stage: int) -> dict[str, Any]:
    """The files that DeepSpeed would write now, by name, and the index on rank 0. The tensors are its own, not copies.

    Collective: every rank has its own partition.
    """
    files = _capturing()
    usual, engine.checkpoint_engine = engine.checkpoint_engine, files
    # It copies a script beside the checkpoint, at once and by rank 0 alone: on a full disk the others would wait.
    engine._copy_recovery_script = lambda folder: None
    try:
        # Without the version the files of stages 1 and 2 cannot be converted to another number of processes.
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
        engine.save_checkpoint("captured", tag=TAG, client_state=info, save_latest=False)
    finally:
        engine.checkpoint_engine = usual
    if engine.global_rank == 0:
        files.captured[INDEX] = {"stage": stage, "processes": size, "shapes": {n: list(s) for n, s in shapes.items()}}
    return files.captured


def _capturing() -> Any:
    module = import_deepspeed("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine")

    class Capturing(module.TorchCheckpointEngine):  # type: ignore[misc, name-defined]
        """Keeps what it is to save. Writing is left to the thread that writes checkpoints of all engines."""

        def __init__(self) -> None:
            super().__init__()
            self.captured: dict[str, Any] = {}

        def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

        def save(self, state_dict: Any, path: str) -> None:
            self.captured[Path(path).name] = state_dict

    return Capturing()


def write(path: Path, files: Mapping[str, Any], averages: Mapping[str, Tensor], world: World) -> list[Path]:
    """Write what :func:`capture` gave, and this rank's share of the averages; the files of this rank. Collective."""
    # First what ranks do together: one that cannot write its own files must not keep the others waiting there.
    world.on_main(lambda: _make_folders(path))
    named = {f"{AVERAGE}/{name}": value for name, value in averages.items()}
    written = native_files.write(path / AVERAGES, named, world.group)
    for name, content in files.items():
        file = path / INDEX if name == INDEX else path / TAG / name
        if name == INDEX:
            file.write_text(json.dumps(content))
        else:
            torch.save(content, file)
        written.append(file)
    return written


def _make_folders(path: Path) -> None:
    for folder in (AVERAGES, TAG):
        (path / folder).mkdir()


def shapes(path: Path) -> dict[str, torch.Size]:
    """Shapes of the parameters in a checkpoint of a ZeRO engine, by their own names."""
    return {name: torch.Size(shape) for name, shape in _index(path).shapes.items()}


def check(path: Path, own: Mapping[str, torch.Size], averages: Mapping[str, torch.Size]) -> None:
    """Raises CheckpointError if ``path`` holds other parameters or averages."""
    if is_zero(path):
        saved, saved_averages = shapes(path), native_files.shapes(path / AVERAGES, AVERAGE)
    else:
        saved, saved_averages = native_files.shapes(path, PARAMETER), native_files.shapes(path, AVERAGE)
    native_files.check_same_model(own, saved, path)
    native_files.check_same_model(averages, saved_averages, path, AVERAGE)


def load(engine: Any, path: Path, world: World, stage: int) -> None:
    """Parameters, moments and step counts of any checkpoint of this model. Collective.

    Raises:
        StorageError: if another layout is needed and there is no place for it.
    """
    scales = [(group["lr_scale"], group["wd_scale"]) for group in engine.optimizer.param_groups]
    # Stages 1 and 2 divide moments alike.
    if is_zero(path) and (index := _index(path)).processes == world.size and (index.stage == 3) == (stage == 3):
        with _deepspeed_reads(path):
            engine.load_checkpoint(str(path), tag=TAG)
    else:
        folder = path.parent / f"{_UNIVERSAL}-{path.name}"
        groups = len(engine.optimizer.optimizer.param_groups)
        world.on_main(lambda: _make_universal(path, folder, groups))
        config = engine._config
        config.load_universal_checkpoint = True  # never while saving: stage 3 would leave out what other ranks hold
        try:
            with _deepspeed_reads(folder):
                engine.load_checkpoint(str(folder), tag=TAG)
        finally:
            config.load_universal_checkpoint = False
        world.gather(None)
        world.on_main(lambda: shutil.rmtree(folder, ignore_errors=True))
        _separate_steps(engine)
    # From the universal format stage 3 gives all groups what the first had.
    for group, (lr_scale, wd_scale) in zip(engine.optimizer.param_groups, scales, strict=True):
        group["lr_scale"], group["wd_scale"] = lr_scale, wd_scale


def _separate_steps(engine: Any) -> None:
    """Give each partition its own count on its device: stage 3 shares one tensor, which every group would raise."""
    for partition, state in engine.optimizer.optimizer.state.items():
        state["step"] = torch.tensor(float(state["step"]), device=partition.device)


def read_average(path: Path) -> dict[str, Tensor]:
    """The averaged parameters, whole, by their own names."""
    return native_files.of_kind(native_files.read(path / AVERAGES if is_zero(path) else path, AVERAGE), AVERAGE)


def open_tensors(path: Path) -> Tensors:
    """As :func:`dmjd.parallel.native_files.open_tensors`, of a checkpoint of a ZeRO engine."""
    index, averages = _index(path), native_files.open_tensors(path / AVERAGES)
    folder = path / TAG
    with _damage_reported(folder):
        parts = Partitions(folder, index.stage, index.processes, index.shapes, lambda at: locate_torch(at, _NAMES))

    def read(name: str) -> Tensor:
        if name in averages.like:
            return averages.read(name)
        with _damage_reported(folder):
            return parts.read(name)

    return Tensors(parts.like | averages.like, read)


def read(path: Path, *kinds: str) -> dict[str, Tensor]:
    """As :func:`dmjd.parallel.native_files.read`, of a checkpoint of a ZeRO engine. Needs no process group."""
    tensors = open_tensors(path)
    return {name: tensors.read(name) for name in tensors.like if not kinds or name.partition("/")[0] in kinds}


def read_frozen(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    """The parameters ``names`` of a checkpoint of any engine, whole. DeepSpeed restores them from its own alone."""
    saved = (open_tensors if is_zero(path) else native_files.open_tensors)(path)
    return {name: saved.read(f"{PARAMETER}/{name}") for name in names}


def _make_universal(path: Path, folder: Path, groups: int) -> None:
    """Make ``folder/zero`` in the universal format from a checkpoint of any engine."""
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a launch that was killed here
        (folder / TAG).mkdir(parents=True)
        saved = (open_tensors if is_zero(path) else native_files.open_tensors)(path)
        _unfold(saved, folder / TAG / _PARTS)
        _complete(folder / TAG, groups)
    except (OSError, RuntimeError, CheckpointError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise StorageError(f"{path} cannot be laid out for this number of processes in {folder}: {error}") from error


def _unfold(saved: Tensors, folder: Path) -> None:
    """Write whole tensors by our names as parts of the universal format, one after the other."""
    for full_name in saved.like:
        kind, _, name = full_name.partition("/")
        if kind == AVERAGE:
            continue
        (folder / name).mkdir(parents=True, exist_ok=True)
        value = saved.read(full_name)
        content = value if kind == "step" else {"param": value}
        torch.save(content, folder / name / f"{_SLICES.get(kind, kind)}.pt")


def _complete(folder: Path, groups: int) -> None:
    """Add what DeepSpeed looks for beside the parts, which differs from stage to stage, for all stages."""
    step, nothing = _step(folder), [dict[str, Any]() for _ in range(groups)]
    state = {"state": {0: {"step": step}}, "param_groups": nothing}
    common = {"ds_version": import_deepspeed().__version__, "param_groups": nothing, "optimizer_state_dict": state}
    torch.save(common, folder / _PARTS / "optimizer_state.pt")
    counts = {"global_steps": int(step), "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1, "module": {}}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(counts, folder / name)


def _step(folder: Path) -> Tensor:
    """Adam's count, which all parameters share."""
    file = next(iter(sorted((folder / _PARTS).rglob("step.pt"))), None)
    return torch.zeros(()) if file is None else torch.as_tensor(load_torch(file, TENSORS)).float()


class _Index(NamedTuple):
    """The index that :func:`capture` makes: ZeRO stage, number of processes that wrote it, shapes by parameter."""

    stage: int
    processes: int
    shapes: dict[str, list[int]]


def _index(path: Path) -> _Index:
    try:
        found = parse_json(read_file(path / INDEX))
        index = _Index(found["stage"], found["processes"], found["shapes"])
        numbers = [index.processes, *(size for shape in index.shapes.values() for size in shape)]
        if index.stage not in (1, 2, 3) or not all(type(size) is int and 0 <= size < 1 << 40 for size in numbers):
            raise ValueError("a stage, a size or a number of processes in it cannot be")
        _check_names(index.shapes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX} cannot be read: {one_line(error)}") from error
    return index


@contextmanager
def _deepspeed_reads(path: Path) -> Iterator[None]:
    """Within it, code of DeepSpeed's may read the checkpoint ``path``: it gets tensors and its own three classes.

    Raises:
        CheckpointError: if a file holds anything else, or what DeepSpeed does not understand.
    """
    for file in sorted((path / TAG).glob("*.pt")):
        with _damage_reported(file):
            _check_names(load_torch(file, _NAMES, mapped=True))
    with _damage_reported(path / TAG):
        yield


@contextmanager
def _damage_reported(at: Path) -> Iterator[None]:
    """Within it, torch loads weights and DeepSpeed's three classes alone. Raises CheckpointError for errors of any
    type, as DeepSpeed takes from a file what it needs, and fails as it happens."""
    classes = [getattr(import_deepspeed(module), name) for module, name in _CLASSES.items()]
    try:
        with weights_only_forced(classes):
            yield
    except (UserError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{at} cannot be read: {one_line(error)}") from error


def _check_names(content: Any) -> None:
    """Raise ValueError if a key anywhere in ``content`` would lead elsewhere: DeepSpeed makes folders of them."""
    waiting, seen = [content], set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, Tensor | str):
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            for key in item:
                if isinstance(key, str) and ("/" in key or not key.strip(".")):
                    raise ValueError(f"it holds {key!r}, which is not a name of a parameter")
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
