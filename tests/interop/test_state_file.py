from __future__ import annotations

import argparse
import gzip
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmjd.errors import CheckpointError, ConfigError
from dmjd.interop.state_file import GRID, grid_noted, read_state, write_state

STATE = {"norm.weight": torch.arange(3.0), "blocks.0.weight": torch.zeros(2).bfloat16()}


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".pyth", ".safetensors"])
@pytest.mark.parametrize("container", [None, "model_state"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str, container: str | None) -> None:
    path = tmp_path / f"weights{suffix}"
    write_state(path, STATE, container, {"layout": "mae"})
    same_bits(read_state(path).tensors, STATE)
    assert [item.name for item in tmp_path.iterdir()] == [path.name], "no draft stays"


@pytest.mark.parametrize("container", ["model", "model_state", "state_dict", "module"])
@pytest.mark.parametrize("prefix", ["", "model.", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_containers_and_wrappers_are_taken_off(tmp_path: Path, container: str, prefix: str) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"epoch": 3, container: {prefix + name: value for name, value in STATE.items()}}, path)
    same_bits(read_state(path).tensors, STATE)


@pytest.mark.parametrize(
    "wrapper", ["module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]
)
def test_wrappers_inside_names_are_taken_off(tmp_path: Path, wrapper: str) -> None:
    path = tmp_path / "checkpoint.pth"
    inside = {f"student.{name.replace('blocks.0', f'blocks.0.{wrapper}._orig_mod')}": STATE[name] for name in STATE}
    torch.save({"state_dict": inside}, path)
    same_bits(read_state(path).tensors, STATE)


def test_weights_under_any_other_keys_are_found(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"checkpoint": {"data": {"base": STATE}}, "optimizer": {"norm.weight": torch.ones(3)}}, path)
    same_bits(read_state(path).tensors, STATE)


def test_flattened_parameters_are_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": {"_fsdp_wrapped_module._flat_param": torch.ones(9), "norm.weight": torch.ones(3)}}, path)
    with pytest.raises(CheckpointError, match=r"_flat_param hold all weights of FSDP in a row; save a FULL_STATE_DICT"):
        read_state(path)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({**STATE, "module.norm.weight": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match=r"norm\.weight and module\.norm\.weight are both norm\.weight without"):
        read_state(path)


AVERAGE = {name: value + 1 for name, value in STATE.items()}


def under(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


COUNTERS = {"n_averaged": torch.tensor(3), "steps": torch.tensor(4)}
BOTH: dict[str, dict[str, Any]] = {
    "deep": {"a": {"net": STATE, "net_ema": AVERAGE}},
    "a list": {"state_dict": STATE, "ema_weights": list(AVERAGE.values())},
    "a callback": {"state_dict": under("model.", STATE), "callbacks": {"EMA": {"ema_state_dict": AVERAGE}, "b": {}}},
    "WeightAveraging": {
        "state_dict": under("model.", AVERAGE),
        "current_model_state": under("model.", STATE),
        "averaging_state": {"n_averaged": torch.tensor(3)},
    },
    "both in one": {"model": STATE, "ema": under("online_model.", STATE) | under("ema_model.", AVERAGE)},
    **{
        key: {"model": STATE, key: AVERAGE}
        for key in ("model_ema", "ema", "state_dict_ema", "ema_state_dict", "ema_model", "teacher", "shadow")
    },
    "of DDP": {"model": under("module.", STATE), "model_ema": under("module.", AVERAGE)},
    "nested": {"model": STATE, "ema": {"module": AVERAGE, "decay": 0.99}},
    "swa_utils": {"state_dict": STATE, "ema_state_dict": under("module.", AVERAGE) | COUNTERS},
    "ema-pytorch": {"ema": under("online_model.", STATE) | under("ema_model.", AVERAGE) | {"step": torch.tensor(1)}},
    "Lightning": {"state_dict": under("model.", STATE) | under("model_ema.", AVERAGE)},
    "swa": {"model_state_dict": STATE, "swa_model": AVERAGE},
    "average inside": {**STATE, "model_ema": AVERAGE},
    "beside": STATE | under("teacher.", AVERAGE),
    "torch_ema": {"model": STATE, "ema": {"decay": 0.9, "shadow_params": list(AVERAGE.values())}},
}


@pytest.mark.parametrize("case", BOTH)
def test_trained_weights_are_read_and_the_average_on_demand(tmp_path: Path, case: str) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save(BOTH[case] | {"optimizer": {"state": {}}, "args": argparse.Namespace(a=1)}, path)
    trained, average = read_state(path), read_state(path, "ema")
    same_bits(trained.tensors, STATE)
    same_bits(average.tensors, AVERAGE)
    assert (trained.kind, average.kind) == ("trained", "ema")
    assert "weights=ema reads its average" in trained.note
    assert trained.other == average.key


DISTILLED: dict[str, dict[str, Any]] = {
    "DINO": {"student": under("module.", STATE), "teacher": AVERAGE},
    "other keys": {"student_state_dict": STATE, "teacher_state_dict": AVERAGE},
    "DINOv2": {"model": under("student.", STATE) | under("teacher.", AVERAGE)},
    "of DDP": {"state_dict": under("module.student.", STATE) | under("module.teacher._orig_mod.", AVERAGE)},
}


@pytest.mark.parametrize("case", DISTILLED)
def test_of_a_student_and_its_teacher_the_teacher_is_read_and_the_student_on_demand(tmp_path: Path, case: str) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save(DISTILLED[case] | {"epoch": 3, "args": argparse.Namespace(a=1)}, path)
    for weights, expected in (("trained", AVERAGE), ("ema", AVERAGE), ("student", STATE)):
        same_bits(read_state(path, weights).tensors, expected)
    assert "teacher" in read_state(path).note
    assert "which its authors evaluate; weights=student reads " in read_state(path).note
    torch.save(BOTH["Lightning"], path)
    with pytest.raises(ConfigError, match=r"weights=student, but .* has no student beside a teacher; use"):
        read_state(path, "student")


ENCODER = {"patch_embed.proj.weight": torch.ones(2, 1, 1, 1)}
SEVERAL: dict[str, tuple[dict[str, Any], str]] = {
    "keys": ({"model": ENCODER, "model_ema": ENCODER, "model_ema2": ENCODER}, "model_ema, model_ema2"),
    "decays": ({"model": ENCODER, "ema_0.9999": ENCODER, "ema_0.99": ENCODER}, "ema_0.9999, ema_0.99"),
    "prefixes": (
        {"state_dict": under("net.", ENCODER) | under("net_ema.", ENCODER) | under("net_ema2.", ENCODER)},
        "state_dict.net_ema, state_dict.net_ema2",
    ),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_of_several_averages_none_is_chosen(tmp_path: Path, case: str) -> None:
    path, (content, keys) = tmp_path / "checkpoint.pth", SEVERAL[case]
    torch.save(content, path)
    assert read_state(path).note == f" (the trained weights, not its averages {keys})"
    with pytest.raises(CheckpointError) as caught:
        read_state(path, "ema")
    assert str(caught.value) == f"{path} holds several averages: {keys}; save one of them to a file"


def test_what_an_average_holds_beside_its_weights_is_no_other_average(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    average = {name: value + 1 for name, value in ENCODER.items()}
    torch.save({"model": ENCODER, "ema": {"shadow": average, "backup": ENCODER}}, path)
    same_bits(read_state(path, "ema").tensors, average)


def test_a_student_and_a_teacher_may_be_prefixes_of_an_encoder(tmp_path: Path) -> None:
    """As in lightly's examples of DINO and iBOT."""
    path = tmp_path / "checkpoint.pth"
    student, teacher = ENCODER, {name: value + 1 for name, value in ENCODER.items()}
    heads = under("student_head.", STATE) | under("teacher_head.", STATE)
    torch.save({"state_dict": under("student_backbone.", student) | under("teacher_backbone.", teacher) | heads}, path)
    same_bits(read_state(path).tensors, teacher)
    same_bits(read_state(path, "student").tensors, student)


def test_the_container_is_the_one_with_the_encoder(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": {"head.weight": torch.ones(2, 2)}, "state_dict": under("module.", ENCODER)}, path)
    same_bits(read_state(path).tensors, ENCODER)
    torch.save({"best_state_dict": ENCODER, "last_state_dict": ENCODER, "head_state_dict": STATE}, path)
    with pytest.raises(CheckpointError, match=r"several models: best_state_dict, last_state_dict; save one of them"):
        read_state(path)


def test_an_average_alone_is_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"teacher": STATE}, path)
    state = read_state(path)
    same_bits(state.tensors, STATE)
    assert state.note == " (the average teacher)"
    torch.save({"model": STATE, "ema": {"shadow_params": [torch.ones(4)]}}, path)
    same_bits(read_state(path).tensors, STATE)
    with pytest.raises(CheckpointError, match=r"ema\.shadow_params is a list of 1 tensors whose shapes are not"):
        read_state(path, "ema")
    torch.save({"model": STATE}, path)
    with pytest.raises(ConfigError, match=r"weights=ema, but .* has no EMA weights"):
        read_state(path, "ema")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_other_pickles_are_refused_without_torchs_advice(tmp_path: Path, protocol: int, old: bool) -> None:
    path = tmp_path / "checkpoint.pth"
    content = {"model": STATE, "args": argparse.Namespace(lr=0.1)}
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not old)
    if protocol == 3 and not old:
        same_bits(read_state(path).tensors, STATE)
        return
    with pytest.raises(CheckpointError, match=r"pickles can run code; save the state_dict\(\) with safetensors"):
        read_state(path)
    for plain in (protocol, 2):
        path.write_bytes(pickle.dumps({"model": [1.0]}, protocol=plain))
        with pytest.raises(CheckpointError, match="pickles can run code"):
            read_state(path)


def test_a_module_in_an_old_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": torch.nn.Linear(2, 2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"it holds a module with its class; save the state_dict\(\) alone$"):
        read_state(path)


class Options(dict[str, Any]):
    """Such as yacs' configuration in SimMIM's files."""


class Trap:
    """Leaves a trace if anybody rebuilds it."""

    def __init__(self, act: Callable[[str, str], object], *paths: Path) -> None:
        self.act = act
        self.paths = tuple(map(str, paths))

    def __reduce__(self) -> tuple[Callable[[str, str], object], tuple[str, ...]]:
        return self.act, self.paths


def test_options_of_a_training_run_do_not_hinder(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    config = Options(lr=1e-3, nested=Options(depth=12))
    torch.save({"model": STATE, "args": argparse.Namespace(lr=0.1, out=Path("runs")), "config": config}, path)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    same_bits(read_state(path).tensors, STATE)


class Slotted:
    """Pickled with a pair of states in place of a dict, as objects with slots are."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 3


def test_objects_that_are_no_dicts_do_not_hinder(tmp_path: Path) -> None:
    """A numpy score as SimMIM's training keeps it, arrays as in mmengine's histories, objects with slots."""
    path = tmp_path / "checkpoint.pth"
    extras = {"max_accuracy": np.float64(81.5), "history": np.arange(3.0), "date": datetime(2020, 1, 1), "s": Slotted()}
    torch.save({"model": STATE, **extras}, path)
    same_bits(read_state(path).tensors, STATE)


def test_no_code_that_a_file_names_is_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "checkpoint.pth", tmp_path / "trace"
    torch.save({"model": STATE, "args": Trap(shutil.copyfile, path, trace)}, path)
    same_bits(read_state(path).tensors, STATE)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists(), "the trap works"


def test_what_torch_blocks_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path, trace = tmp_path / "checkpoint.pth", tmp_path / "trace"
    torch.save({"model": STATE, "args": Trap(os.rename, path, trace)}, path)
    with pytest.raises(CheckpointError, match=r"cannot be read as a checkpoint: .*posix\.rename"):
        read_state(path)
    assert not trace.exists()


def test_classes_read_once_are_not_trusted_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": STATE, "args": argparse.Namespace(lr=0.1)}, path)
    read_state(path)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_an_old_file_is_read_as_a_new_one(tmp_path: Path) -> None:
    path, trace = tmp_path / "old.pth", tmp_path / "trace"
    trap = Trap(shutil.copyfile, path, trace)
    for content in ({"model": STATE}, {"model": STATE, "args": argparse.Namespace(lr=0.1), "trap": trap}):
        torch.save(content, path, _use_new_zipfile_serialization=False)
        same_bits(read_state(path).tensors, STATE)
    assert not trace.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 0.01, 0.5, 0.99])
def test_a_cut_file_is_one_sentence(tmp_path: Path, suffix: str, kept: float) -> None:
    path = tmp_path / f"cut{suffix}"
    write_state(path, STATE, "model", {})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint") as caught:
        read_state(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; download or copy it again" if kept == 0 or suffix == ".pth" else "again")


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("a.pth", b"version https://git-lfs.github.com/spec/v1\noid sha256:4665a5\n", "git lfs pull"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:4665a5\n", "git lfs pull"),
        (
            "a.pth",
            b"<!DOCTYPE html>\n<title>404</title>",
            "it is a web page, as of a failed download; .* the file itself",
        ),
        ("a.safetensors", b"\n  <html lang=en>", "it is a web page, as of a failed download; .* the file itself"),
        ("a.pth", b'{"data":{"error": "not found"}}', "it is JSON text, .*; name the file of weights"),
        ("a.safetensors", b"", "it is empty; download or copy it again"),
        ("a.pth", gzip.compress(b"abc", mtime=0), "it is compressed with gzip; unpack it"),
        ("a.pth", bytes(257) + b"ustar" + bytes(300), "it is a tar archive; unpack it"),
        ("a.pth", b"what is this", r"torch\.save did not write it; name a \.safetensors file or one of torch\.save"),
    ],
)
def test_what_torch_did_not_write_is_one_sentence(tmp_path: Path, name: str, content: bytes, cause: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} cannot .*: .*{cause}$"):
        read_state(path)


def test_other_archives_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    np.savez(tmp_path / "weights.npz", a=np.ones(3))
    (tmp_path / "weights.npz").rename(path)
    with pytest.raises(CheckpointError, match=r"weights\.pth cannot .*: torch\.save did not write it; name"):
        read_state(path)
    with zipfile.ZipFile(path, "w") as archive:  # as torch.jit.save lays it out
        for part in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"weights/{part}", b"")
    with pytest.raises(CheckpointError, match=r"it is a TorchScript archive; torch\.save the state_dict\(\)"):
        read_state(path)


def test_a_file_is_what_its_bytes_say_whatever_it_is_called(tmp_path: Path) -> None:
    write_state(tmp_path / "a.safetensors", STATE, None, {GRID: "7x28"})
    (tmp_path / "a.safetensors").rename(tmp_path / "a.pth")
    same_bits(read_state(tmp_path / "a.pth").tensors, STATE)
    assert grid_noted(tmp_path / "a.pth") == (7, 28)
    for old in (False, True):
        torch.save(STATE, tmp_path / "b.safetensors", _use_new_zipfile_serialization=old)
        same_bits(read_state(tmp_path / "b.safetensors").tensors, STATE)
        assert grid_noted(tmp_path / "b.safetensors") is None


@pytest.mark.parametrize("noted", ["", "7", "0x28", "7x", "[7,28]"])
def test_a_header_of_others_notes_no_grid(tmp_path: Path, noted: str) -> None:
    write_state(tmp_path / "a.safetensors", STATE, None, {GRID: noted})
    assert grid_noted(tmp_path / "a.safetensors") is None


def test_a_broken_pickle_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "broken.pth"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"norm") - 5] + b"h\x07.")  # asks for an object that was never made
    with pytest.raises(CheckpointError, match=r"broken\.pth cannot be read as a checkpoint: it is damaged"):
        read_state(path)


FAULTS: dict[str, tuple[object, str]] = {
    "sparse": (torch.eye(3).to_sparse(), "is sparse; store what to_dense() gives"),
    "scalar": (torch.tensor(1.0), "is a single number, which no weight is"),
    "integers": (
        torch.ones(3, dtype=torch.int8),
        "is of torch.int8, and weights are read in torch.float64, torch",
    ),
    "eight bits": (torch.ones(3).to(torch.float8_e4m3fn), "is of torch.float8_e4m3fn, and weights are read in"),
    "meta": (torch.ones(3, device="meta"), "is without values, for the model was on torch's meta device"),
    "a shard of none": (torch.ones(0), "is empty, as where each process of a sharded model stores its own part"),
    "list": ([1.0, 2.0], "is not stored as torch's tensors"),
    "array": (np.ones(3), "is not stored as torch's tensors"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["norm.weight", "blocks.0.attn.q_bias", "decoder_pos_embed"])
def test_what_is_called_a_weight_and_can_be_none_is_named(tmp_path: Path, name: str, fault: str) -> None:
    path = tmp_path / "theirs.pth"
    value, sentence = FAULTS[fault]
    torch.save({"model": STATE | {name: value}}, path)
    with pytest.raises(CheckpointError) as caught:
        read_state(path)
    assert str(caught.value).startswith(f"{path}: {name} {sentence}")


@pytest.mark.filterwarnings("ignore")  # torch has announced the end of these types
def test_quantised_tensors_are_named_too(tmp_path: Path) -> None:
    path = tmp_path / "theirs.pth"
    quantised = torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.quint8)
    torch.save(STATE | {f"blocks.{index}.fc.weight": quantised for index in range(12)}, path)
    with pytest.raises(CheckpointError) as caught:
        read_state(path)
    assert str(caught.value) == f"{path}: blocks.*.fc.weight (12) are quantised; store what dequantize() gives"


def test_counters_options_and_buffers_beside_weights_do_not_hinder(tmp_path: Path) -> None:
    """They are called otherwise: a layout says whether it knows them."""
    path = tmp_path / "theirs.pth"
    beside = {"bn.num_batches_tracked": torch.tensor(7), "graph": torch.eye(3).to_sparse()}
    torch.save(STATE | beside | {"epoch": 3, "mean": [0.5], "attn._extra_state": None}, path)
    assert read_state(path).tensors.keys() == STATE.keys() | beside.keys()


def test_the_container_is_the_one_with_tensors(tmp_path: Path) -> None:
    """Some code bases keep the pickled module, or its options, under the name that others have for the weights."""
    path = tmp_path / "theirs.pth"
    torch.save({"model": {"name": "vit", "depth": 12}, "state_dict": STATE}, path)
    same_bits(read_state(path).tensors, STATE)
    torch.save({"model": torch.nn.Linear(2, 2), "state_dict": STATE}, path)
    same_bits(read_state(path).tensors, STATE)


def test_a_file_without_weights_says_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "epoch.pth"
    torch.save({"epoch": 3, "lr": 0.1}, path)
    with pytest.raises(CheckpointError, match=r"holds no tensors .*it has epoch, lr"):
        read_state(path)
    two = {"a": {"net": {"b": {"norm.weight": torch.ones(2)}}}, "c": {"d": {"norm.weight": torch.ones(2)}}}
    torch.save({"epoch": 3, "optimizer": {"norm.weight": torch.ones(2)}, "models": two}, path)
    with pytest.raises(CheckpointError, match=r"several models: models\.a\.net\.b, models\.c\.d; save one of them"):
        read_state(path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds a list, not weights by name"):
        read_state(path)
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(CheckpointError, match=r"it has nothing by name; of a module .* save the state_dict\(\)$"):
        read_state(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_state(tmp_path / "none.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_tied_weights_and_views_are_written_as_what_they_hold(tmp_path: Path, suffix: str) -> None:
    large = torch.randn(1000, 24)
    state = {"a.weight": large[3], "b.weight": large[3], "c.weight": large[:2].T}
    path = tmp_path / f"weights{suffix}"
    write_state(path, state, None, {})
    same_bits(read_state(path).tensors, state)
    assert path.stat().st_size < large.nbytes / 10


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_state(path, STATE, None, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"before"
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
