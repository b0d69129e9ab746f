from __future__ import annotations

import ast
import asyncio
import io
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from matplotlib import pyplot
from PIL import Image

import dmjd
from dmjd.api import _arguments
from dmjd.builders import build_encoder
from dmjd.compose import compose
from dmjd.data.crops import evaluation_view
from dmjd.data.dataset import InMemory
from dmjd.errors import CheckpointError, ConfigError, DataError, UserError
from dmjd.evaluate.encoder import load_encoder as load_frozen
from dmjd.keywords import as_overrides
from dmjd.ops import normalise
from tests.compare import same

NOTEBOOK = Path(__file__).parents[1] / "docs/examples/own_photos.ipynb"
HOMES = vars(dmjd)["_HOMES"]
STUB = Path(dmjd.__file__).with_suffix(".pyi")


def settings() -> dict[str, Any]:
    """Settings of the process that a pre-training must not change."""
    root = logging.getLogger()
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "random": (random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state()),  # noqa: NPY002
        "logging": [(each.handlers[:], each.level, each.disabled) for each in (root, logging.getLogger("dmjd"))],
        "torch": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
        ),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "method": multiprocessing.get_start_method(allow_none=True),
        "filters": warnings.filters[:],
        "arguments": sys.argv[:],
        "streams": (sys.stdout, sys.stderr),
        "threads": threading.active_count(),
    }


@pytest.fixture(scope="module")
def run(recipe: Callable[..., list[str]], image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dmjd.Run:
    """A run of six steps, trained from a thread while the main one runs an event loop, as a notebook's kernel does."""
    folder = tmp_path_factory.mktemp("api") / "a run, (ü)"
    words = [
        text
        for text in recipe(folder, "epochs=1", "checkpoint_every=6")
        if not text.startswith(("experiment=", "run=", "data=", "data.root="))
    ]

    async def train() -> dmjd.Run:
        await asyncio.to_thread(int)  # its thread stays
        before = settings()
        run = await asyncio.to_thread(dmjd.pretrain, image_folder, folder, experiment="demo", overrides=words)
        for part, value in settings().items():
            assert same(value, before[part]), part
        return run

    return asyncio.run(train())


def test_a_run_has_its_log_pictures_and_report(run: dmjd.Run) -> None:
    assert run.finished
    assert [row["step"] for row in run.log] == [5, 6]
    assert run.pictures.keys() >= {"views", "masks", "loss"}
    assert run.report().read_text().startswith("<!")
    assert dmjd.write_report(run.path) == run.path / "report.html"
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        dmjd.Run(run.path.parent)


# Names


def test_the_import_is_light_and_lists_its_names() -> None:
    names = set(HOMES)
    stub = {
        alias.asname
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert names == stub
    code = f"import dmjd, sys; assert {names!r} <= set(dir(dmjd)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "hydra", "PIL", "yaml", "asyncio"} & set(done.stdout.split())


@pytest.mark.parametrize("name", ["pretrain", "load_encoder"])
def test_without_the_extra_a_name_is_an_import_error_that_names_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(vars(dmjd), name, raising=False)
    monkeypatch.delitem(sys.modules, HOMES[name], raising=False)
    monkeypatch.delitem(sys.modules, "dmjd.compose", raising=False)
    monkeypatch.setitem(sys.modules, "hydra", None)
    with pytest.raises(ImportError) as caught:
        getattr(dmjd, name)
    assert str(caught.value) == f"dmjd.{name} needs hydra; pip install 'dmjd[train]'"


# Keys


@pytest.mark.parametrize(
    "names",
    [
        ("a b", "Müller", 'q"uo\\te'),
        ("epoch=3-step=9", "x,y", "it's"),
        ("(c) [d] {e}", "100%", "3.10"),
    ],
)
def test_strings_arrive_as_they_are(names: tuple[str, str, str]) -> None:
    run, root, init = names
    config = compose("pretrain", list(as_overrides({"run": run, "data": {"root": Path(root)}, "init": init})))
    assert (config.run, config.data.root, config.init) == names


def test_keys_are_those_of_the_command_line() -> None:
    keys = {
        "experiment": "demo",
        "epochs": np.int64(3),
        "optim": {"base_lr": np.float32(0.25), "betas": (0.9, 0.95)},
        "data.image_size": [16, 16],
        "mask": {"views": 3},
        "tensorboard": True,
        "ema_decay": None,
    }
    typed = ["experiment=demo", "epochs=3", "optim.base_lr=.25", "optim.betas=[.9,.95]", "data.image_size=[16,16]"]
    typed += ["mask.views=3", "tensorboard=true", "ema_decay=null"]
    assert compose("pretrain", list(as_overrides(keys))) == compose("pretrain", typed)
    with pytest.raises(ConfigError, match="epochs=<object"):
        list(as_overrides({"epochs": object()}))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("digits", ["data=digits"]),
        (Path("digits"), ["data=folder", "data.root=digits"]),
        ("a", ["data=folder", "data.root=a"]),
        ({"root": "digits", "val_percent": 20}, ["data=folder", "data.root=digits", "data.val_percent=20"]),
        ({"name": "shards", "root": "a"}, ["data=shards", "data.root=a"]),
        ({"val_percent": 20}, ["data.val_percent=20"]),
    ],
)
def test_data_is_a_data_set_a_folder_or_a_section(data: Any, expected: list[str]) -> None:
    assert _arguments("pretrain", data, "r", {"experiment": "demo"}, [], {}) == ["experiment=demo", *expected, "run=r"]
    own = {"experiment": "own_photos"}
    found = _arguments("pretrain", "a", None, own, ["epochs=1"], {})
    assert found == ["experiment=own_photos", "data.root=a", "epochs=1"]
    assert _arguments("pretrain", None, None, own, ["experiment=demo"], {}) == ["experiment=demo"]


def test_a_fine_tuning_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("dmjd.api._run_child", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr("dmjd.api.Run", Path)
    tuned = dmjd.finetune(Path("runs/a"), "photos", "runs/b", preset="mae_vit_base", epochs=3)
    assert str(tuned) == "runs/b"
    words = ["init=runs/a", "preset=mae_vit_base", "data=folder", "data.root=photos", "run=runs/b", "epochs=3"]
    assert ran == [(["finetune", *words], Path("runs/b"))]
    with pytest.raises(ConfigError, match="not a key"):
        dmjd.finetune(None, preset=None, epocs=3)


@pytest.mark.parametrize(("command", "preset"), [("segment", "ade20k_mae_vit_base"), ("detect", "coco_vitdet_base")])
def test_a_segmentation_or_detection_is_the_command_s(
    command: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr("dmjd.api._run_child", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr("dmjd.api.Run", Path)
    train = getattr(dmjd, command)
    train("runs/a", "scenes", "runs/b", preset=preset, epochs=3)
    words = ["init=runs/a", f"preset={preset}", "data.root=scenes", "run=runs/b", "epochs=3"]
    assert ran == [([command, *words], Path("runs/b"))]
    train(None, {"root": "scenes", "image_size": 64})
    assert ran[1][0] == [command, "init=null", "data.root=scenes", "data.image_size=64"]
    with pytest.raises(ConfigError, match=r"preset=mae_vit_base|mae_vit_base"):
        train(None, "scenes", preset="mae_vit_base")


def test_an_unknown_key_is_the_command_s_error() -> None:
    with pytest.raises(ConfigError, match="epochz is not a key; did you mean epochs"):
        dmjd.pretrain("digits", experiment="demo", epochz=3)
    with pytest.raises(ConfigError, match="epochz is not a key; did you mean epochs"):
        dmjd.pretrain("digits", experiment="demo", overrides="epochz=3")


def test_an_argument_of_a_wrong_kind_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^run_paths='.*' must be a list of two run folders or more$"):
        dmjd.write_comparison(str(tmp_path))
    for function in (dmjd.load_encoder, dmjd.knn):
        with pytest.raises(ConfigError, match=r"^checkpoint=None; give a run folder, a checkpoint folder or a file"):
            function(None)  # type: ignore[arg-type]


# The child process


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``child(code)`` runs this code as the training process."""

    def call(code: str) -> None:
        monkeypatch.setattr("dmjd.api._CHILD", f"import os, signal, sys, time\n{code}")
        dmjd.pretrain("digits", "nowhere", experiment="demo")

    return call


def test_an_error_of_the_command_is_raised_and_not_printed(
    child: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        child("sys.stderr.write('step 1\\nerror: x=1 is not b; set é'); sys.exit(2)")
    assert str(caught.value) == "x=1 is not b; set é"
    assert capsys.readouterr().out == "step 1\n"


def test_output_that_the_caller_cannot_print_does_not_end_the_training(
    child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    with pytest.raises(UserError, match=r"^é$"):
        child("os.write(1, b'M\\xc3\\xbcller \\xff\\nerror: \\xc3\\xa9'); sys.exit(2)")
    assert printed.getvalue() == b"M\\xfcller \\xff\n"


def test_a_process_that_is_killed_or_crashes_is_named(child: Callable[[str], None]) -> None:
    with pytest.raises(RuntimeError, match=r"^run=nowhere: the training process was killed by SIGKILL"):
        child("os.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match=r"^run=nowhere: the training process crashed"):
        child("1 / 0")


def test_a_process_that_survives_the_training_is_not_waited_for(child: Callable[[str], None]) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="nowhere has no config"):
        child("import subprocess; subprocess.Popen(['sleep', '30'])")
    assert time.monotonic() - begin < 15


def test_ctrl_c_is_passed_on_and_raised_once_the_training_has_ended(
    child: Callable[[str], None], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    with pytest.raises(KeyboardInterrupt):
        child(
            f"signal.signal(signal.SIGINT, lambda *_: (time.sleep(.2), open({str(saved)!r}, 'w'), sys.exit(0)))\n"
            "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)"
        )
    assert saved.exists()


def test_an_exception_while_it_is_followed_ends_the_training(
    child: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    monkeypatch.setattr("builtins.print", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        child(
            f"signal.signal(signal.SIGTERM, lambda *_: (open({str(saved)!r}, 'w'), sys.exit(0)))\n"
            "os.write(1, b'line\\n'); time.sleep(60)"
        )
    assert saved.exists()


# The encoder


@pytest.fixture(scope="module")
def encoder(run: dmjd.Run) -> dmjd.Encoder:
    return run.encoder(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def paths(image_folder: Path) -> list[Path]:
    return sorted((image_folder / "train").rglob("*.png"))


def test_features_are_those_of_knn_for_every_kind_of_image(
    run: dmjd.Run, encoder: dmjd.Encoder, image_folder: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = load_frozen(compose("knn", list(as_overrides({"checkpoint": run.path, "device": "cpu"}))))
    dataset = frozen.dataset("train")
    assert [dataset.name(index) for index in range(len(dataset))] == [str(path) for path in paths]
    expected = frozen.features(dataset, "mean", 256, 0).values
    colour = np.stack([dataset.image(index) for index in range(len(dataset))])
    grey = [np.asarray(Image.open(path)) for path in paths]
    for images in (
        image_folder,
        str(image_folder / "train"),
        paths,
        iter(map(str, paths)),
        np.array([str(path) for path in paths]),
        np.array(paths),
        [Image.open(path) for path in paths],
        colour,
        grey,
        colour[..., :1],
        colour / 255,
        torch.from_numpy(colour).permute(0, 3, 1, 2),
        (torch.from_numpy(colour).permute(0, 3, 1, 2) / 255).half(),
        [*paths[:20], *colour[20:40], *(torch.tensor(each) for each in grey[40:])],
        [Image.fromarray(np.dstack((each, each[..., :1]))) for each in colour],
    ):
        features = encoder.embed(images)
        assert features.dtype == torch.float32
        assert torch.equal(features, expected)
    monkeypatch.setenv("HOME", str(image_folder))
    for path in (paths[3], f"~/{paths[3].relative_to(image_folder)}"):
        assert torch.equal(encoder.embed(path, batch_size=1), encoder.embed(grey[3]))
    torch.testing.assert_close(encoder.embed(paths, batch_size=7), expected)


def test_images_of_other_sizes_are_resized_and_cropped_as_in_an_evaluation(encoder: dmjd.Encoder) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((16, 16), (40, 20), (9, 31))]
    views = torch.stack([evaluation_view(InMemory(image), (24, 24), encoder.crop_pct) for image in images])
    tokens = encoder.module(normalise(views, encoder.mean, encoder.std))
    patches = encoder.patch_tokens(images, size=24)
    assert patches.shape == (3, 6, 6, encoder.dim)
    assert torch.equal(patches.flatten(1, 2), tokens)
    torch.testing.assert_close(encoder.embed(images, size=[24, 24]), patches.mean(dim=(1, 2)))
    with pytest.raises(ConfigError, match="pooling='cls' needs a class token"):
        encoder.embed(images, pooling="cls")


def test_a_training_loop_around_the_module_keeps_its_mode(encoder: dmjd.Encoder, paths: list[Path]) -> None:
    encoder.module.train()
    features = encoder.embed(paths)
    assert encoder.module.training
    assert not features.requires_grad
    encoder.module.eval()
    assert torch.equal(features, encoder.embed(paths))


def damaged(folder: Path) -> Path:
    (folder / "half.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder / "half.png"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("no such.png", "no such.png cannot be read as an image (No such file or directory)"),
        (torch.zeros(3, 4, 4).to_sparse(), "images is a tensor that is torch.sparse_coo; give a dense tensor"),
        ([torch.zeros(3, 4, 4, device="meta")], "images[0] is a tensor that is on the meta device; give a dense"),
        (torch.full((3, 4, 4), 1.5), "images holds floating-point values from 1.5 to 1.5; they must be within 0..1"),
        ([torch.full((3, 4, 4), torch.nan)], "images[0] holds floating-point values from nan to nan"),
        (torch.zeros(2, 3, 4, 4).sub(1), "images[0] holds floating-point values from -1 to -1"),
        (torch.zeros(5, 4, 3), "images has shape [5, 4, 3]; a tensor is [H, W], [C, H, W] or [n, C, H, W]"),
        (np.zeros((28, 28, 28), np.uint8), "images has shape [28, 28, 28]; an array is [H, W], [H, W, C] or [n, H"),
        (np.zeros((0, 4, 3), np.uint8), "images has shape [0, 4, 3]"),
        (np.zeros((4, 4), np.int64), "images has dtype int64; give uint8"),
        ([np.zeros((4, 4), np.uint8), None], "images[1] is of type NoneType; an image is a path"),
        (b"bytes", "images is of type bytes"),
        (Image.new("F", (4, 4)), "images cannot be read as an image (its pixels have 32 bits"),
        (Image.new("RGB", (0, 5)), "images cannot be read as an image (it has 0x5 pixels)"),
        ([], "images is empty"),
    ],
)
def test_a_wrong_image_is_one_line(encoder: dmjd.Encoder, images: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        encoder.embed(images)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_wrong_arguments_are_one_line(encoder: dmjd.Encoder, paths: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"half\.png cannot be read as an image"):
        encoder.embed([*paths, damaged(tmp_path)])
    with pytest.raises(ConfigError, match="pooling='max' must be"):
        encoder.embed(paths, pooling="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^size: "):
        encoder.embed(paths, size=30)
    wrong: list[Any] = [0, (8, 8, 8), "48", 48.0, [48], (8, "8"), True]
    for size in wrong:
        with pytest.raises(ConfigError, match=r"^size=.* must be an int or \(height, width\), in pixels"):
            encoder.embed(paths, size=size)
    for count in [*wrong[2:], 0, 1.5]:
        with pytest.raises(ConfigError, match=r"^batch_size=.* must be an int of at least 1$"):
            encoder.embed(paths, batch_size=count)


@pytest.mark.parametrize("name", ["a\0b.pth", f"{'a' * 5000}.pth"])
def test_a_name_that_no_file_can_have_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match=r"^checkpoint=.* (holds a null character|does not exist)"):
        dmjd.load_encoder(name)


def test_an_encoder_of_other_channels_takes_tensors_alone(tmp_path: Path) -> None:
    model: Any = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, in_chans=4, num_classes=0)
    torch.save(model.state_dict(), tmp_path / "four.pth")
    encoder = dmjd.load_encoder(tmp_path / "four.pth", device="cpu")
    images = torch.randn(2, 4, 32, 32)
    torch.testing.assert_close(encoder.module(images), model.eval().forward_features(images).detach())
    with pytest.raises(ConfigError, match=r"four\.pth reads images of 4 channels, and images here have 1 or 3; call "):
        encoder.embed(np.zeros((32, 32, 4), np.uint8))


def test_loading_leaves_torch_as_it_was(run: dmjd.Run, paths: list[Path], encoder: dmjd.Encoder) -> None:
    expected = encoder.embed(paths)
    torch.set_default_dtype(torch.float64)
    try:
        before = settings()
        loaded = dmjd.load_encoder(next(run.path.glob("checkpoints/*06")), weights="trained", device="cpu")
        record = dmjd.knn(run, neighbours=5, device="cpu")
        assert all(same(value, settings()[part]) for part, value in before.items())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(loaded.embed(paths), expected)
    assert loaded.step == record["step"] == 6
    assert 0 <= record["top1"] <= 100


def test_a_file_of_weights_needs_a_description_of_its_model(run: dmjd.Run, tmp_path: Path) -> None:
    described: dict[str, Any] = {
        "experiment": "mae_vit_base",
        "backbone": {"embed_dim": 32, "depth": 1, "num_heads": 4},
    }
    module = build_encoder(compose("pretrain", list(as_overrides(described))))
    torch.nn.init.normal_(module.get_parameter("cls_token"))  # uninitialised memory
    file = tmp_path / "vit.pth"
    torch.save(module.state_dict(), file)
    with pytest.raises(CheckpointError, match=r"missing \(pos_embed\).* describe its model by experiment=NAME"):
        dmjd.load_encoder(file)  # its fixed positions are computed, so no tensor shows them
    with pytest.raises(ConfigError, match="has its own"):
        run.encoder(experiment="demo")
    encoder = dmjd.load_encoder(file, **described, device="cpu")
    assert (encoder.step, encoder.path, encoder.size, encoder.crop_pct) == (0, file, (224, 224), 0.875)
    images = torch.randint(256, (2, 3, 64, 80), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views = torch.stack(
        [evaluation_view(InMemory(each.permute(1, 2, 0).numpy()), (224, 224), 0.875) for each in images]
    )
    tokens = module(normalise(views, encoder.mean, encoder.std))
    assert torch.equal(encoder.embed(images, pooling="cls"), tokens[:, 0])
    assert torch.equal(encoder.embed(images), tokens[:, 1:].mean(dim=1))
    assert torch.equal(encoder.patch_tokens(images), tokens[:, 1:].unflatten(1, (14, 14)))


# The notebook


def test_the_cells_of_the_notebook_run_on_a_trained_encoder(
    run: dmjd.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with a run that is trained already; the kernel and the training are in a long test."""
    pytest.importorskip("IPython", reason="the notebook displays pictures with IPython, of the extra dev")
    calls: list[Any] = []
    shown: list[int] = []

    def train(*places: Path, **keys: Any) -> dmjd.Run:
        calls.append((places, keys))
        return run

    def show() -> None:
        shown.extend(len(pyplot.figure(number).axes) for number in pyplot.get_fignums())
        pyplot.close("all")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dmjd, "pretrain", train)
    monkeypatch.setattr(pyplot, "show", show)
    names: dict[str, Any] = {}
    for number, code in enumerate(cells()):
        exec(compile(code, f"cell {number}", "exec"), names)
        if number == 0:
            names["folder"] = run.path
    assert calls == [((Path("photos"), run.path), {})]
    assert shown == [8, 3, 1, 7, 7, 7]
    written = np.load(run.path / "features.npz")
    assert written["features"].shape == (300, 32)
    assert list(written["files"]) == sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png"))
    assert names["same"].mean() > 0.3  # of ten classes


def cells() -> list[str]:
    """The code of the notebook, which is stored without outputs."""
    found = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in found)
    return ["".join(cell["source"]) for cell in found]


@pytest.mark.long
def test_the_notebook_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPLBACKEND", raising=False)  # cli.main of an earlier test sets it for its own process
    nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel of the extra dev run the notebook")
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel of the extra dev run the notebook")
    notebook = nbformat.read(NOTEBOOK, 4)
    (settings,) = [cell for cell in notebook.cells if "settings = {}" in cell.source]
    settings.source = settings.source.replace("settings = {}", 'settings = {"epochs": 3}')
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    streams = [output for output in outputs if output["output_type"] == "stream"]
    assert {stream["name"] for stream in streams} == {"stdout"}, streams
    printed = "".join(stream["text"] for stream in streams)
    assert "finished" in printed
    assert "\x1b" not in printed
    assert float(re.findall(r"same folder for ([\d.]+)%", printed)[0]) > 50
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 7
    assert (tmp_path / "runs/photos/report.html").is_file()


@pytest.mark.long
def test_the_stop_button_and_the_end_of_a_kernel_save_a_checkpoint(tmp_path: Path) -> None:
    manager = pytest.importorskip("jupyter_client.manager", reason="ipykernel of the extra dev brings it")
    pytest.importorskip("ipykernel", reason="the kernel is of the extra dev")
    kernel, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    code = "import dmjd; dmjd.pretrain('digits', 'run', experiment='demo', epochs=500, log_every=1, workers=0)"

    def trains_beyond(step: int) -> None:
        client.execute(code)
        wait_until(lambda: (tmp_path / "run/config.yaml").exists() and last_step() > step)

    def last_step() -> int:
        return max((row["step"] for row in dmjd.Run(tmp_path / "run").log), default=0)

    try:
        trains_beyond(2)
        kernel.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=120))["msg_type"] != "execute_reply":
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        stopped = dmjd.Run(tmp_path / "run").stop_reason
        assert stopped["reason"] == "signal"
        assert (tmp_path / f"run/checkpoints/step-{stopped['step']:08d}/manifest.json").is_file()
        trains_beyond(stopped["step"] + 2)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    wait_until(lambda: dmjd.Run(tmp_path / "run").stop_reason.get("step", 0) > stopped["step"])
    assert dmjd.Run(tmp_path / "run").stop_reason["reason"] == "signal"


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 180
    while not true():
        assert time.monotonic() < end
        time.sleep(0.5)
