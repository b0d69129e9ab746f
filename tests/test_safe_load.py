"""Readers of files from outside: no code runs, nothing outside is read, and no size is taken on trust."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

from dmjd.compose import from_yaml, to_yaml
from dmjd.config import PretrainConfig
from dmjd.errors import CheckpointError, ConfigError
from dmjd.interop.state_file import read_state
from dmjd.parallel import native_files
from dmjd.parallel.deepspeed import files as zero_files
from dmjd.parallel.world import alone
from dmjd.runs import checkpoint
from dmjd.safe_load import (
    TENSORS,
    json_items,
    load_torch,
    parse_json,
    parse_shard_index,
    parse_yaml,
    unpickle_plain,
    weights_only_forced,
)

PACKAGE = Path(__file__).parents[1] / "dmjd"
READER = PACKAGE / "safe_load.py"

LOADERS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "torch.load", "torch.jit.load"),
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "np.load", "numpy.load", "marshal.loads", "shelve.open"),
}
SAFE = {"weights_only": True, "allow_pickle": False}


def test_no_other_module_deserialises() -> None:
    """Nor imports a loader by its own name, or asks for one that runs code."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        if file == READER:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Attribute) and ast.unparse(node) in LOADERS:
                found.append(f"{where} {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom):
                found += [f"{where} {node.module}.{name.name}" for name in node.names
                          if f"{node.module}.{name.name}" in LOADERS]  # fmt: skip
            elif isinstance(node, ast.keyword) and node.arg in SAFE and ast.unparse(node.value) != str(SAFE[node.arg]):
                found.append(f"{where} {node.arg}={ast.unparse(node.value)}")
    assert found == []


# Shards of a checkpoint -----------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A checkpoint of two tensors in a folder, beside one that somebody wants to keep to himself."""
    folder = tmp_path / "shards"
    folder.mkdir()
    native_files.write(folder, {"parameter/a": torch.arange(12.0).view(3, 4), "parameter/b": torch.ones(5)}, None)
    shutil.copy(folder / "__0_0.distcp", tmp_path / "outside.distcp")
    return folder


def index_of(folder: Path) -> Metadata:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return metadata


def place(metadata: Metadata, name: str) -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, found) for index, found in metadata.storage_data.items() if index.fqn == f"parameter/{name}")


def moved(**changes: Any) -> Callable[[Metadata], None]:
    def act(metadata: Metadata) -> None:
        index, info = place(metadata, "a")
        metadata.storage_data[index] = replace(info, **changes)

    return act


def chunked(
    *chunks: tuple[tuple[int, ...], tuple[int, ...]], size: tuple[int, ...] = (3, 4)
) -> Callable[[Metadata], None]:
    def act(metadata: Metadata) -> None:
        index, info = place(metadata, "a")
        item = metadata.state_dict_metadata["parameter/a"]
        item.size = torch.Size(size)  # type: ignore[union-attr]
        item.chunks = [  # type: ignore[union-attr]
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
        ]
        del metadata.storage_data[index]
        for offsets, _ in chunks:
            metadata.storage_data[MetadataIndex("parameter/a", offsets)] = info

    return act


def renamed(name: str) -> Callable[[Metadata], None]:
    def act(metadata: Metadata) -> None:
        index, info = place(metadata, "a")
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop("parameter/a")
        metadata.storage_data[MetadataIndex(name, index.offset)] = info

    return act


def as_bytes(metadata: Metadata) -> None:
    metadata.state_dict_metadata["parameter/a"] = BytesStorageMetadata()


def linked(metadata: Metadata) -> None:
    moved(relative_path="__9_0.distcp")(metadata)


LIES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "a file outside": (moved(relative_path="../outside.distcp"), "not a file of shards"),
    "a file far outside": (moved(relative_path="../../../outside.distcp"), "not a file of shards"),
    "an absolute path": (moved(relative_path="/dev/zero"), "not a file of shards"),
    "a longer way back": (moved(relative_path="./__0_0.distcp"), "not a file of shards"),
    "a file of other kind": (moved(relative_path="config.yaml"), "not a file of shards"),
    "a newline": (moved(relative_path="__0_0.distcp\n"), "damaged"),
    "a link": (linked, "not a regular file"),
    "no such file": (moved(relative_path="__7_0.distcp"), "No such file"),
    "behind the end": (moved(offset=1 << 40), "behind the end"),
    "an offset below 0": (moved(offset=-8), "cannot be"),
    "a number that wraps": (moved(offset=(1 << 63) - 10), "cannot be"),
    "an offset that is true": (moved(offset=True), "cannot be"),
    "fewer bytes than values": (moved(length=8), "larger than the 8 bytes"),
    "compression": (moved(transform_descriptors=["zstd"]), "compressed"),
    "more than the disk": (chunked(((0, 0), (1 << 20, 1 << 20)), size=(1 << 20, 1 << 20)), "larger than"),
    "a product that wraps": (chunked(((0, 0), (1 << 40, 1 << 40)), size=(1 << 40, 1 << 40)), "larger than"),
    "a hole": (chunked(((0, 0), (1, 4)), ((2, 0), (1, 4))), "not slices"),
    "an overlap": (chunked(((0, 0), (2, 4)), ((1, 0), (2, 4))), "not slices"),
    "a chunk twice": (chunked(((0, 0), (3, 4)), ((0, 0), (3, 4))), "not slices"),
    "a chunk beyond": (chunked(((0, 0), (4, 4))), "not slices"),
    "no chunk": (chunked(), "not slices"),
    "other axes": (chunked(((0,), (12,))), "not slices"),
    "bytes in the place of a tensor": (as_bytes, "BytesStorageMetadata"),
    "a name that climbs": (renamed("parameter/../../x"), "not a name of a tensor"),
    "a name from the root": (renamed("/tmp/x"), "not a name of a tensor"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_rejected_before_a_tensor_is_made(lie: str, shards: Path) -> None:
    act, part = LIES[lie]
    metadata = index_of(shards)
    act(metadata)
    (shards / "__9_0.distcp").symlink_to(shards.parent / "outside.distcp")
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=part) as caught:
        native_files.read(shards)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        native_files.read_into(shards, {"parameter/a": torch.zeros(3, 4), "parameter/b": torch.zeros(5)})


def test_two_tensors_in_the_same_bytes_are_rejected(shards: Path) -> None:
    """A file of a megabyte could else be read as a terabyte."""
    metadata = index_of(shards)
    for number in range(3):
        metadata.state_dict_metadata[f"parameter/{number}"] = metadata.state_dict_metadata["parameter/a"]
        metadata.storage_data[MetadataIndex(f"parameter/{number}", (0, 0))] = place(metadata, "a")[1]
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"two tensors share bytes of __0_0\.distcp"):
        native_files.read(shards)


def test_chunks_of_several_processes_are_one_tensor(shards: Path) -> None:
    parsed = parse_shard_index((shards / ".metadata").read_bytes())
    assert {name: tensor.shape for name, tensor in parsed.items()} == {"parameter/a": (3, 4), "parameter/b": (5,)}
    metadata = index_of(shards)
    chunked(((0, 0), (2, 4)), ((2, 0), (1, 4)), ((3, 0), (0, 4)))(metadata)
    parts = parse_shard_index(pickle.dumps(metadata))["parameter/a"].chunks
    assert [chunk.shape for chunk in parts] == [(2, 4), (1, 4)], "an empty part is none"


def spring(mark: str) -> None:
    Path(mark).touch()


class Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return spring, (str(self.mark),)


def zipped(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def deflated(content: bytes) -> bytes:
    """The same archive, compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name))
    return out.getvalue()


@pytest.mark.parametrize("part", ["trap", "bytearray", "compressed"])
def test_what_a_shard_holds_is_a_tensor_or_rejected(part: str, shards: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    content = {
        "trap": lambda: zipped(Trap(mark)),
        "bytearray": lambda: zipped(bytearray(3)),
        "compressed": lambda: deflated(zipped(torch.zeros(3, 4000))),
    }[part]()
    (shards / "__1_0.distcp").write_bytes(content)
    metadata = index_of(shards)
    moved(relative_path="__1_0.distcp", offset=0, length=len(content))(metadata)
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as caught:
        native_files.read(shards)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not mark.exists()


# Pickles --------------------------------------------------------------------------------------------------------------

OTHER_PICKLES = {
    "a function": b"cos\nsystem\n(S'true'\ntR.",
    "a function of protocol 4": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x0eos.path.exists\x93\x8c\x01x\x85R.",
    "an attribute of a type": b"\x80\x04\x8c\x05torch\x8c\x10float32.__class__\x93.",
    "torch itself": b"\x80\x04\x8c\x05torch\x8c\x04load\x93\x8c\x01x\x85R.",
    "an allowed class of another module": b"\x80\x04\x8c\x02os\x8c\x04Size\x93.",
    "a persistent id": b"Pstorage\n.",
    "an extension": b"\x82\x01.",
    "a table as long as the memory": b"\x80\x02]r\xff\xff\xff\x7fPx\n.",
    "a key that takes for ever to hash": b"\x80\x04}(" + b"N\x85" + b"2\x86" * 60 + b"K\x01u.",
    "one key that takes for ever to hash": b"\x80\x04}" + b"N\x85" + b"2\x86" * 60 + b"K\x01s.",
    "a set of what takes for ever to hash": b"\x80\x04\x8f(" + b"N\x85" + b"2\x86" * 60 + b"\x90.",
    "a dict that takes for ever": b"\x80\x04(" + b"N\x85" + b"2\x86" * 60 + b"K\x01d.",
    "more than there is": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    "attributes of a type": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93}\x8c\x01a\x8c\x01bsb.",
    "nothing": b"",
    "half": b"\x80\x04}(\x8c\x01a",
}


@pytest.mark.parametrize("kind", OTHER_PICKLES)
@pytest.mark.parametrize("reader", [parse_shard_index, unpickle_plain])
def test_a_pickle_of_anything_else_is_one_line(kind: str, reader: Callable[[bytes], Any]) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        reader(OTHER_PICKLES[kind])
    assert "\n" not in str(caught.value)


def test_a_record_of_plain_values_is_read() -> None:
    record = {"version": "2.3", "entries": [{"collective_seq_id": 3, "input_sizes": ((2, 3),), "x": [1.5, None, True]}]}
    for protocol in range(1, 6):
        assert unpickle_plain(pickle.dumps(record, protocol)) == record


# torch's files --------------------------------------------------------------------------------------------------------


class Call:
    """Pickled as a call of ``act``, for what weights-only loading allows and honest files do not hold."""

    def __init__(self, act: Callable[..., Any], *arguments: Any) -> None:
        self.act, self.arguments = act, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.act, self.arguments


@pytest.mark.parametrize("old", [False, True])
def test_allowed_names_that_allocate_do_not(old: bool, tmp_path: Path) -> None:
    """A terabyte is asked for; torch's own weights-only load would try."""
    path = tmp_path / "bomb.pth"
    state = {"norm.weight": torch.ones(3)}
    for bomb in (Call(bytearray, 1 << 40),):
        torch.save({"model": state, "x": bomb}, path, _use_new_zipfile_serialization=not old)
        with pytest.raises(CheckpointError, match="bytearray, which is not allowed"):
            read_state(path)
    torch.save({"model": {"norm.weight": torch.ones(1).expand(1 << 40)}}, path, _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match=r"norm\.weight is larger than what the file holds of it"):
        read_state(path)


@pytest.mark.parametrize("allowed", [None, TENSORS])
def test_an_archive_that_says_it_holds_more_than_it_is(allowed: Any, tmp_path: Path) -> None:
    path = tmp_path / "bomb.pth"
    path.write_bytes(deflated(zipped({"norm.weight": torch.zeros(1 << 20)})))
    assert path.stat().st_size < 1 << 16
    with pytest.raises(ValueError, match="and declares more content"):
        load_torch(path, allowed)


def test_advice_to_load_unsafely_is_never_repeated(tmp_path: Path) -> None:
    for name, content in {
        "numpy": {"model": {"x": Call(os.getcwd)}},
        "module": torch.nn.Linear(2, 2),
        "class": Call(spring, str(tmp_path / "mark")),
    }.items():
        for old in (False, True):
            path = tmp_path / f"{name}.pth"
            torch.save(content, path, _use_new_zipfile_serialization=not old)
            with pytest.raises((CheckpointError, ValueError)) as caught:
                read_state(path)
            with pytest.raises(ValueError, match=r"\w") as mine:
                load_torch(path, TENSORS)
            for error in (caught.value, mine.value):
                assert "weights_only" not in str(error)
                assert "safe_globals" not in str(error)
                assert "\n" not in str(error)
    assert not (tmp_path / "mark").exists()


def load_unsafely(path: str) -> str:
    try:
        torch.load(path, weights_only=False)
    except pickle.UnpicklingError:
        return "rejected"
    return "loaded"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_code_that_asks_for_unsafe_loading_does_not_get_it(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do the processes that it starts, as DeepSpeed's conversion does."""
    path, mark = tmp_path / "trap.pt", tmp_path / "mark"
    torch.save(Trap(mark), path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # as some sites have it
    with weights_only_forced():
        assert load_unsafely(str(path)) == "rejected"
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            assert pool.submit(load_unsafely, str(path)).result(60) == "rejected"
    assert not mark.exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert load_unsafely(str(path)) == "loaded"
    assert mark.exists()


# Text -----------------------------------------------------------------------------------------------------------------

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))

YAMLS = {
    "a billion laughs": LAUGHS,
    "one alias": "a: &x 1\nb: *x",
    "itself": "a: &x [*x]",
    "deep flow": "a: " + "[" * 100_000,
    "deep mappings": "".join(" " * n + "a:\n" for n in range(500)),
    "a number of many digits": "a: " + "9" * 10_000,
    "a date that is none": "a: 2001-99-99",
    "a key that cannot be one": "? [1, 2]\n: 3",
    "code": "a: !!python/object/apply:os.system [true]",
    "a path of OmegaConf's": "a: !!python/object/apply:pathlib.PosixPath [x]",
    "a key twice": "a: 1\na: 2",
    "no text": "\0",
}


@pytest.mark.parametrize("kind", YAMLS)
def test_yaml_that_is_no_configuration_is_one_line(kind: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"\w") as caught:
        parse_yaml(YAMLS[kind])
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        from_yaml(PretrainConfig, YAMLS[kind].encode(), "config.yaml")
    assert "\n" not in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kB"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[]", b"3", b"epochs: -3", b"epochs: .nan", b"seed: .inf"])
def test_bytes_that_are_no_configuration_are_one_line(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^config\.yaml is not a configuration") as caught:
        from_yaml(PretrainConfig, content, "config.yaml")
    assert "\n" not in str(caught.value)


def test_a_configuration_that_was_written_is_read(finished_run: Path) -> None:
    content = (finished_run / "config.yaml").read_bytes()
    assert to_yaml(from_yaml(PretrainConfig, content)).encode() == content


# Manifests ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    def write() -> list[Path]:
        (draft / "loop.pt").write_bytes(checkpoint.pack_loop_state({"step": 1}))
        return [draft / "loop.pt"]

    draft = checkpoint.begin(tmp_path / "checkpoints", 1)
    return checkpoint.commit(draft, write, keep=1)


ENTRY = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}

MANIFESTS: dict[str, Any] = {
    "a file outside": {"files": {"../secret": ENTRY}},
    "a file far outside": {"files": {"a/../../secret": ENTRY}},
    "an absolute path": {"files": {"/dev/null": ENTRY}},
    "the folder": {"files": {".": ENTRY}},
    "no name": {"files": {"": ENTRY}},
    "two spellings": {"files": {"a//b": ENTRY}},
    "folders in folders": {"files": {"a/b/c": ENTRY}},
    "a null byte": {"files": {"a\0b": ENTRY}},
    "a list of files": {"files": ["loop.pt"]},
    "an entry of text": {"files": {"loop.pt": "x"}},
    "a size of text": {"files": {"loop.pt": {**ENTRY, "bytes": "0"}}},
    "a size below 0": {"files": {"loop.pt": {**ENTRY, "bytes": -1}}},
    "a digest that is a path": {"files": {"loop.pt": {**ENTRY, "sha256": "../victim"}}},
    "a digest in capitals": {"files": {"loop.pt": {**ENTRY, "sha256": ENTRY["sha256"].upper()}}},  # type: ignore[attr-defined]
    "a step of text": {"step": "7"},
    "a step that wraps": {"step": 1 << 64},
    "a format of text": {"format": "2"},
    "no files": {"files": None},
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_cannot_be_is_a_damaged_checkpoint(kind: str, committed: Path) -> None:
    secret = committed.parent / "secret"
    secret.write_bytes(b"")
    manifest = json.loads((committed / checkpoint.MANIFEST).read_bytes())
    (committed / checkpoint.MANIFEST).write_text(json.dumps({**manifest, **MANIFESTS[kind]}))
    with pytest.raises(CheckpointError, match="is damaged: ") as caught:
        checkpoint.resolve(committed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"format": 2}', b'{"a":' * 5000])
def test_bytes_that_are_no_manifest_are_a_damaged_checkpoint(content: bytes, committed: Path) -> None:
    (committed / checkpoint.MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: ") as caught:
        checkpoint.resolve(committed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["link out", "link in", "pipe", "unlisted"])
def test_a_file_of_a_checkpoint_lies_in_it(what: str, committed: Path, tmp_path: Path) -> None:
    """A link within a checkpoint is a file of it; one that leads out, a pipe and what no manifest lists are not."""
    file = committed / "loop.pt"
    if what == "link out":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "link in":
        file.rename(committed / "elsewhere")
        file.symlink_to("elsewhere")
    elif what == "pipe":
        file.unlink()
        os.mkfifo(file)
    else:
        shutil.copy(file, committed / "zero.pt")
    if what == "link in":
        assert checkpoint.resolve(committed) == committed
        return
    with pytest.raises(CheckpointError, match="is damaged: "):
        checkpoint.resolve(committed)


@pytest.mark.parametrize("state", [{}, {"position": 3}, [1, 2], {"position": {"step": "x"}}, "text"])
def test_a_loops_state_of_something_else_is_one_line(
    state: Any, finished_run: Path, tmp_path: Path, tiny: Any, dmjd: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    folder = next((run / "checkpoints").glob("step-*"))
    content = checkpoint.pack_loop_state(state)
    (folder / "loop.pt").write_bytes(content)
    manifest = json.loads((folder / checkpoint.MANIFEST).read_bytes())
    manifest["files"]["loop.pt"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    code, _, err = dmjd("pretrain", *tiny(run))
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "loop.pt does not hold the state of this run" in lines[0]


@pytest.mark.parametrize("before", ["embed_dim: 32", "  depth: 1", "mlp_ratio: 4.0", "width: 32"])
def test_a_model_is_no_larger_than_the_tensors_beside_it(
    before: str, finished_run: Path, tmp_path: Path, dmjd: Any
) -> None:
    """A configuration that asks for terabytes, or for blocks without end."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    folder = next((run / "checkpoints").glob("step-*"))
    text = (folder / "config.yaml").read_text()
    assert before in text
    content = text.replace(before, before.split(":")[0] + ": 320000000").encode()
    (folder / "config.yaml").write_bytes(content)
    manifest = json.loads((folder / checkpoint.MANIFEST).read_bytes())
    manifest["files"]["config.yaml"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    for which in ("trained", "untrained"):
        code, _, err = dmjd("knn", str(run), f"weights={which}", "device=cpu", "workers=0")
        assert (code, err.count("error: "), err.count("\n")) == (2, 1, 1), err


# DeepSpeed's files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["../../../x", "/tmp/x", "a/b", "..", "."])
def test_names_that_become_folders_do_not_climb(key: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="the extra dmjd[scale] is not installed")
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero.json").write_text(json.dumps({"stage": 2, "processes": 1, "shapes": {"a": [3]}}))
    torch.save(
        {"param_shapes": [{"a": torch.Size([3]), key: torch.Size([3])}]}, tmp_path / "zero" / "x_optim_states.pt"
    )
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[]), load_checkpoint=lambda *_, **__: 1 / 0)
    with pytest.raises(CheckpointError, match="which is not a name of a parameter") as caught:
        zero_files.load(engine, tmp_path, alone(torch.device("cpu")), 2)
    assert "\n" not in str(caught.value)


def test_partitions_that_repeat_their_bytes_are_no_tensor(tmp_path: Path) -> None:
    """Each of 1000 groups has the next 4096 bytes of the parameter, and all are the same."""
    pytest.importorskip("deepspeed", reason="the extra dmjd[scale] is not installed")
    fragment = zero_files.import_deepspeed("deepspeed.utils.tensor_fragment").fragment_address
    native_files.write((tmp_path / "averages"), {"average/a": torch.ones(3)}, None)
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero.json").write_text(json.dumps({"stage": 2, "processes": 1, "shapes": {"a": [1000, 1024]}}))
    flat = torch.ones(1024)
    moments = {"exp_avg": flat, "exp_avg_sq": flat, "step": torch.ones(())}
    state = {
        "param_slice_mappings": [{"a": fragment(numel=1024, start=0)}] * 1000,
        "single_partition_of_fp32_groups": [flat] * 1000,
        "base_optimizer_state": {"state": dict.fromkeys(range(1000), moments)},
    }
    torch.save({"module": {}}, tmp_path / "zero" / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": state}, tmp_path / "zero" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"a is larger than the [0-9]+ bytes of the files") as caught:
        zero_files.read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": 7},
        {"stage": "2"},
        {"processes": "2"},
        {"processes": -1},
        {"shapes": {"a": [1 << 60]}},
        {"shapes": {"a": ["3"]}},
        {"shapes": {"a": 3}},
        {"shapes": {"../a": [3]}},
        {"shapes": []},
    ],
)
def test_an_index_of_deepspeeds_files_that_cannot_be_is_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    index = {"stage": 2, "processes": 1, "shapes": {"a": [3]}, **changes}
    (tmp_path / "zero.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"zero\.json cannot be read: ") as caught:
        zero_files.check(tmp_path, {"a": torch.Size([3])}, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '["\\uDFFF x"]', '{"\\udb00": 1}', b'["\xed\xa0\x80"]'])
def test_half_a_character_is_no_json(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"half a character|codec"):
        parse_json(text)


def test_a_number_of_many_digits_is_no_json() -> None:
    with pytest.raises(ValueError, match="it has a number of 5000 digits, more than the limit of 1000"):
        parse_json("9" * 5000)


def test_names_of_files_and_whole_characters_are_json() -> None:
    for text in ("caf\udce9.png", "\U0001f600"):  # the first is not UTF-8 on the disk
        assert parse_json(json.dumps([text]).encode()) == [text]


@pytest.mark.parametrize("piece", [1, 2, 5, 1 << 20])
def test_elements_of_arrays_are_read_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmjd.safe_load._JSON_PIECE", piece)
    value = {
        "x": {"a": [1]},
        "a": [1, -2.5e3, "\u00e9\U0001f600", {"b": [None, True]}, [], 12],
        "n": 17,
        "b": [],
        "c": [3],
    }
    text = json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8-sig")
    found = list(json_items(io.BytesIO(text), ("a", "b")))
    assert found == [("a", each) for each in value["a"]]  # type: ignore[attr-defined]


def test_no_element_is_longer_than_the_limit() -> None:
    def long(count: int) -> io.BytesIO:
        return io.BytesIO(json.dumps({"a": ["x" * count]}).encode())

    assert len(list(json_items(long(90), ("a",), limit=100))) == 1
    with pytest.raises(ValueError, match="more than 100 characters, or no end"):
        list(json_items(io.BytesIO(b'{"a": ["' + b"x" * 10_000_000), ("a",), limit=100))


@pytest.mark.parametrize("text", ['a: "\\ud800"', 'a: "\\U0000dc00"'])
def test_half_a_character_is_no_yaml(text: str) -> None:
    with pytest.raises(ValueError, match="half a character"):
        parse_yaml(text)
