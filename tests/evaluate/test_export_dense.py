"""Exports of segmentation and detection runs: whole models, and their encoders."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from dmjd.builders.detect import build_detection
from dmjd.builders.segment import build_segmentation
from dmjd.compose import compose
from dmjd.config import EvaluationConfig
from dmjd.errors import ConfigError, UserError
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.evaluate.export import export, sidecar
from dmjd.evaluate.export_dense import Detector, SegmentationLogits, whole_model
from dmjd.evaluate.onnx_model import write_onnx, write_program

TINY = ("backbone.embed_dim=32", "backbone.num_heads=2", "head.channels=16", "init=null", "engine.device=cpu")
GRID = ("attention.window=2", "attention.relative_positions=decomposed")
BACKBONES = {
    "vit": ("backbone.depth=4",),
    "grid": ("backbone.depth=4", *GRID),
    "convvit": ("backbone=convvit_small", "backbone.depth=4", "backbone.conv_stages.embed_dims=[8,16]", *GRID),
    "swin": (
        *("backbone=swin_base", "backbone.embed_dim=64", "backbone.windows.depths=[1,1,2,1]"),
        *("backbone.windows.num_heads=[1,1,2,2]", "backbone.windows.size=2"),
    ),
}
SHAPE = (3, 64, 96)


def exported(run: Path, folder: Path, *words: str) -> Path:
    form = next((word.partition("=")[2] for word in words if word.startswith("format=")), "timm")
    suffix = {"torch_export": ".pt2", "onnx": ".onnx", "timm": ".safetensors"}.get(form, "")
    return export(compose("export", [f"checkpoint={run}", f"output={folder / f'model{suffix}'}", *words])).path


def model_of(run: Path) -> FrozenEncoder:
    return load_encoder(EvaluationConfig(checkpoint=str(run), device="cpu"))


def images(batch: int, size: tuple[int, int] = (64, 64)) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(batch))


def test_a_program_of_a_segmentation_gives_its_logits(segmented_once: Path, tmp_path: Path) -> None:
    path = exported(segmented_once, tmp_path, "format=torch_export")
    card = json.loads(sidecar(path).read_text())
    assert card["input"] == {"images": ["batch", 3, 64, 64]}
    assert (card["outputs"], len(card["classes"])) == (["logits"], 11)
    assert card["load"] == "import torch; model = torch.export.load('model.pt2').module(); (logits,) = model(images)"
    program = torch.export.load(path)
    assert not [node for node in program.graph.nodes if "dmjd" in str(node.target)], "its ops are torch's"
    model = model_of(segmented_once).objective
    assert model is not None
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images(5))[0], model(images(5)), atol=1e-5, rtol=1e-5)


@pytest.mark.long
def test_the_line_of_a_program_loads_it_without_dmjd(segmented_once: Path, tmp_path: Path) -> None:
    card = json.loads(sidecar(exported(segmented_once, tmp_path, "format=torch_export")).read_text())
    frozen = model_of(segmented_once)
    assert frozen.objective is not None
    inputs = images(5)
    with torch.no_grad():
        expected = frozen.objective(inputs)
    torch.save(inputs, tmp_path / "images.pt")
    script = (
        f"import torch; images = torch.load('images.pt'); {card['load']}; torch.save(logits.detach(), 'logits.pt'); "
        "import sys; assert 'dmjd' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=300)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected, atol=1e-5, rtol=1e-5)


def check_detections(found: Sequence[Tensor], model: Any, inputs: Tensor, sizes: Tensor) -> None:
    with torch.no_grad():
        (expected,) = model.detect(inputs, sizes)
    count = len(expected["labels"])
    assert count > 0
    for value, name in zip(found, ("boxes", "scores", "labels", "masks"), strict=True):
        torch.testing.assert_close(value[:count], expected[name], atol=1e-4, rtol=1e-4)
    assert (found[2][count:] == -1).all()
    assert not found[1][count:].any()


@pytest.mark.long
def test_a_program_of_a_detection_gives_its_detections(detected_once: Path, tmp_path: Path) -> None:
    path = exported(detected_once, tmp_path, "format=torch_export")
    card = json.loads(sidecar(path).read_text())
    assert card["input"] == {"images": [1, 3, 64, 64], "sizes": [1, 2]}
    assert card["load"].startswith("import torch, torchvision; model = torch.export.load('model.pt2').module(); boxes,")
    model, program = model_of(detected_once).objective, torch.export.load(path).module()
    for size in ((64, 64), (64, 37), (20, 64)):
        sizes = torch.tensor([size])
        with torch.no_grad():
            found = program(images(1), sizes)
        check_detections(found, model, images(1), sizes)


def test_detections_of_fixed_shapes_are_those_of_the_model(detected_once: Path) -> None:
    model = model_of(detected_once).objective
    assert model is not None
    for form in ("onnx", "torch_export"):
        for size in ((64, 64), (64, 37), (20, 64)):
            with torch.no_grad():
                found = whole_model(model, form)(images(1), torch.tensor([size]))
            check_detections(found, model, images(1), torch.tensor([size]))


def test_fewer_detections_than_places_are_marked() -> None:
    """Also none at all: of two images that differ in their valid size only, and above any score."""
    words = [*TINY, *BACKBONES["vit"], "data.image_size=[64,96]", "data.root=x", "head.min_score=0.13"]
    model = build_detection(compose("detect", words), 5).eval()
    found = Detector(model)(images(1, (64, 96)), torch.tensor([[64, 96]]))
    with torch.no_grad():
        (expected,) = model.detect(images(1, (64, 96)), torch.tensor([[64, 96]]))
    assert torch.equal(found[2][: len(expected["labels"])], expected["labels"])
    model.limits = model.limits._replace(min_score=0.999)
    boxes, scores, labels, masks = Detector(model)(images(1, (64, 96)), torch.tensor([[64, 96]]))
    assert (labels == -1).all()
    assert not boxes.any()
    assert not scores.any()
    assert masks.shape == (100, 28, 28)


def test_another_program_is_no_export(segmented_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export, "export", lambda *arguments, **options: None)
    monkeypatch.setattr(torch.export, "save", lambda program, path, **options: path.write_bytes(b""))
    monkeypatch.setattr(torch.export, "load", lambda path: _Off())
    with pytest.raises(UserError, match=r"computes another logits than torch \(relative difference"):
        exported(segmented_once, tmp_path, "format=torch_export")
    assert not list(tmp_path.iterdir())


class _Off:
    """A program whose logits are a little off."""

    def module(self) -> Any:
        return lambda inputs: [torch.full((len(inputs), 13, 64, 64), 0.1)]


def test_the_encoder_of_a_segmentation_is_an_encoder_of_timm(segmented_once: Path, tmp_path: Path) -> None:
    path = exported(segmented_once, tmp_path)
    card = json.loads(sidecar(path).read_text())
    model: Any = timm.create_model(card["architecture"], checkpoint_path=str(path), **card["arguments"]).eval()
    segmentation: Any = model_of(segmented_once).objective
    with torch.no_grad():
        tokens = model.forward_features(images(2))
        (last,) = segmentation.model.encoder.feature_maps(images(2), None, (3,))
    found = tokens[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    expected = torch.nn.functional.layer_norm(last.permute(0, 2, 3, 1), (32,), eps=1e-6).permute(0, 3, 1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert json.loads((exported(segmented_once, tmp_path, "format=huggingface") / "config.json").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["format=timm"], "format=timm has no windows and decomposed relative positions, which the encoder of"),
        (["format=huggingface"], "format=torch_export and format=onnx write its whole model"),
        (["format=torch_export", "dtype=bf16"], "dtype=bf16: format=torch_export writes float32; remove dtype"),
    ],
)
def test_what_a_format_cannot_hold_is_one_line(
    words: list[str], message: str, detected_once: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        exported(detected_once, tmp_path, *words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("form", ["onnx", "torch_export"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone_of_a_segmentation_is_exported(backbone: str, form: str, tmp_path: Path) -> None:
    """The writers compare the file at batches 1 and 3."""
    words = [*TINY, *BACKBONES[backbone], "data.image_size=[64,96]", "test.stride=[64,96]", "data.root=x"]
    model = build_segmentation(compose("segment", words), 7).eval()
    write = write_onnx if form == "onnx" else write_program
    write(whole_model(model, form), SHAPE, tmp_path / "model", {})
    assert isinstance(whole_model(model, form), SegmentationLogits)


@pytest.mark.long
@pytest.mark.parametrize("form", ["onnx", "torch_export"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone_of_a_detection_is_exported(backbone: str, form: str, tmp_path: Path) -> None:
    words = [*TINY, *BACKBONES[backbone], "data.image_size=[64,96]", "data.root=x", "head.min_score=0.01"]
    model = build_detection(compose("detect", words), 7).eval()
    write = write_onnx if form == "onnx" else write_program
    outputs = whole_model(model, form)
    write(outputs, SHAPE, tmp_path / "model", {})
    with torch.no_grad():
        check_detections(outputs(images(1, (64, 96)), torch.tensor([[64, 90]])), model, images(1, (64, 96)),
                         torch.tensor([[64, 90]]))  # fmt: skip


@pytest.mark.long
def test_onnxruntime_gives_the_detections(detected_once: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra dmjd[onnx] is not installed")
    run = Path(shutil.copytree(detected_once, tmp_path / "run"))
    path = exported(run, tmp_path, "format=onnx")
    session, model = onnxruntime.InferenceSession(path), model_of(run).objective
    for size in ((64, 64), (20, 64)):
        found = session.run(None, {"images": images(1).numpy(), "sizes": torch.tensor([size]).numpy()})
        check_detections([torch.from_numpy(value) for value in found], model, images(1), torch.tensor([size]))
