"""A fine-tuned run as the input of other commands: its accuracy, its features, its exports, its record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import dmjd as package
from dmjd.builders.model import build_classification
from dmjd.compose import compose, from_yaml_of_run, to_yaml
from dmjd.config import FinetuneConfig, PretrainConfig
from dmjd.data.build import build_dataset
from dmjd.errors import CheckpointError, ConfigError, DataError
from dmjd.evaluate import evaluate
from dmjd.evaluate import export as exporting
from dmjd.evaluate.convert import convert
from dmjd.evaluate.encoder import FrozenEncoder
from dmjd.evaluate.export import export, sidecar
from dmjd.evaluate.registry import Context
from dmjd.evaluate.validate import EVALUATION, record_finetune
from dmjd.runs import checkpoint
from dmjd.runs.best import Validated, read_best
from dmjd.runs.folder import RunFolder
from dmjd.runs.paths import RunPaths
from dmjd.train import loop
from tests.compare import checkpoints, rows

Words = Callable[..., list[str]]

CPU = ("device=cpu", "workers=0")
FEW = ("epochs=4", "batch_size=12", "workers=0", "engine.device=cpu", "ema_decay=0.5", "optim.base_lr=0.2")
PLAIN = ("augment.randaugment=null", "augment.erase_prob=0", "augment.mixup=0", "augment.cutmix=0")


@pytest.fixture(scope="module")
def runs(finished_run: Path, image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of a pre-training, and a fine-tuning from it on two class folders. Only to be read."""
    folder = tmp_path_factory.mktemp("fine-tuned")
    pretrained = Path(shutil.copytree(finished_run, folder / "pretrained"))
    data = ("data=folder", f"data.root={image_folder}", "data.image_size=[16,16]")
    words = [f"init={pretrained}", f"run={folder / 'tuned'}", *data, *FEW, *PLAIN, "keep_checkpoints=1"]
    return pretrained, loop.finetune(compose("finetune", words)).path


@pytest.fixture
def tuned(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs[1], tmp_path / "tuned"))


def validated(run: Path, *words: str) -> dict[str, Any]:
    return evaluate("validate", compose("validate", [f"checkpoint={run}", *CPU, *words]))


def agrees(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


# Scores and records


def test_the_result_is_recorded_in_both_runs_and_evaluation_alone_repeats_it(
    runs: tuple[Path, Path], tuned: Path
) -> None:
    pretrained, folder = runs
    (file,) = (folder / "evaluations").glob("finetune-ema-step00000016-*.json")
    record = json.loads(file.read_text())
    assert file.read_bytes() == (pretrained / "evaluations" / file.name).read_bytes()
    last = [row for row in rows(folder) if "val_ema_top1" in row][-1]
    for weights, prefix in (("ema", "val_ema_"), ("trained", "val_")):
        found = validated(tuned, f"weights={weights}", "batch_size=5")
        assert (found["weights"], found["step"], found["test_images"]) == (weights, 16, 12)
        assert {name: found[name] for name in ("top1", "balanced_top1", "top5")} == {
            **{name: last[prefix + name] for name in ("top1", "balanced_top1")},
            "top5": None,
        }
        assert found["loss"] == pytest.approx(last[f"{prefix}loss"], rel=1e-6)
    assert record["top1"] == validated(tuned)["top1"] == last["val_ema_top1"]
    assert (record["chance"], record["majority"], record["trained_top1"]) == (50, 50, last["val_top1"])
    assert len(record["settings"].pop("config")) == 8
    assert record["settings"] == {
        "data": validated(tuned)["settings"]["data"],
        "image_size": [16, 16],
        "epochs": 4,
        "batch_size": 12,
        "seed": 0,
        "pooling": "mean",
        "layer_decay": 0.65,
        **{"base_lr": 0.2, "warmup_epochs": 5, "weight_decay": 0.05, "drop_path": 0.1, "freeze": 0, "norm": "pooled"},
        **{"randaugment": None, "mixup": 0, "cutmix": 0},
        **{"run": "tuned", "init_step": 11},
    }


def test_the_best_checkpoint_is_kept_beside_the_newest_and_has_the_best_score(
    runs: tuple[Path, Path], tuned: Path
) -> None:
    scores = {row["step"]: row["val_ema_top1"] for row in rows(runs[1]) if "val_ema_top1" in row}
    assert list(scores) == [4, 8, 12, 16]
    best = max(scores, key=lambda step: (scores[step], -step))
    assert read_best(tuned) == Validated(best, scores[best])
    assert checkpoints(tuned) == sorted({best, 16})
    found = validated(tuned, "which=best")
    assert (found["step"], found["top1"]) == (best, scores[best])
    shutil.rmtree(tuned / "checkpoints" / f"step-{best:08d}")
    with pytest.raises(
        CheckpointError, match=f"step-{best:08d} is gone, the best checkpoint of .*; use the newest one"
    ):
        validated(tuned, "which=best")
    with pytest.raises(CheckpointError, match="which=best needs a run folder, and checkpoint="):
        validated(tuned / "checkpoints" / "step-00000016", "which=best")


def test_a_record_of_another_seed_or_run_is_another_file(runs: tuple[Path, Path], tmp_path: Path) -> None:
    config: Any = from_yaml_of_run((runs[1] / "config.yaml").read_bytes(), "x")
    train, test = (build_dataset(config.data, split) for split in ("train", "test"))
    scores: Any = {f"val_{name}": 50.0 for name in ("top1", "top5", "balanced_top1", "loss")}
    init = Path(shutil.copytree(runs[0], tmp_path / "pretrained"))
    kept = {path.name for path in (init / "evaluations").iterdir()}
    for seed, place in ((1, "a"), (2, "a"), (2, "a"), (2, "b")):
        run = RunPaths(tmp_path / place / f"seed{seed}")
        one = replace(config, seed=seed, init=str(init / "checkpoints" / "step-00000011"))
        record_finetune(one, run, 16, scores, train, test, Validated(8, 60.0))
    written = {path.name for path in (init / "evaluations").iterdir()} - kept
    assert len(written) == 3
    record = json.loads((init / "evaluations" / max(written)).read_text())
    assert (record["weights"], record["top1"], record["best_top1"], record["best_step"]) == ("trained", 50.0, 60.0, 8)

    def digest(**changed: Any) -> str:
        one = replace(config, init=None, **changed)
        return str(record_finetune(one, RunPaths(tmp_path / "alone"), 16, scores, train, test)["settings"]["config"])

    same: list[dict[str, Any]] = [
        {},
        {"seed": 7},
        {"run": "x"},
        {"workers": 5},
        {"backbone": replace(config.backbone, embed_dim=48)},
    ]
    same += [{"data": replace(config.data, root="elsewhere", image_size=[32, 32])}]
    other: list[dict[str, Any]] = [{"ema_decay": 0.9}, {"freeze": 1}, {"batch_size": 24}]
    other += [{"optim": replace(config.optim, clip_grad=9.0)}, {"head": replace(config.head, init_std=0.5)}]
    other += [
        {"augment": replace(config.augment, smoothing=0.5)},
        {"backbone": replace(config.backbone, drop_path=0.9)},
    ]
    other += [{"data": replace(config.data, crop_scale=[0.5, 1.0])}, {"data": replace(config.data, crop_pct=0.5)}]
    assert len({digest(**changed) for changed in same}) == 1
    assert len({digest(**changed) for changed in other} | {digest()}) == len(other) + 1
    run = RunPaths(Path(shutil.copytree(runs[1], tmp_path / "tuned")))
    again = replace(config, init=str(run.path))
    before = [path.name for path in run.evaluations.iterdir()]
    assert record_finetune(again, RunPaths(tmp_path / "again"), 16, scores, train, test)["settings"]["init_step"] == 16
    assert [path.name for path in run.evaluations.iterdir()] == before, "a fine-tuned run has its own record only"
    foreign = replace(config, seed=3, init=str(tmp_path / "mae.pth"))
    (tmp_path / "mae.pth").touch()
    record_finetune(foreign, RunPaths(tmp_path / "seed3"), 16, scores, train, test)
    assert {path.name for path in (init / "evaluations").iterdir()} == kept | written


def test_a_record_says_that_trainings_before_saw_the_test_images(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A pre-training on all images, a fine-tuning with other held-out images, and one with those of the record."""
    config: Any = from_yaml_of_run((runs[1] / "config.yaml").read_bytes(), "x")
    train, test = (build_dataset(config.data, split) for split in ("train", "test"))
    scores: Any = {f"val_{name}": 50.0 for name in ("top1", "top5", "balanced_top1", "loss")}

    def run(name: str, init: str | None, **data: Any) -> FinetuneConfig | PretrainConfig:
        start = None if init is None else str(tmp_path / init / "checkpoints" / "step-00000003")
        schema = PretrainConfig() if init is None else config
        made: Any = replace(schema, init=start, data=replace(config.data, root="photos", **data))
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(to_yaml(made))
        return made

    def seen(made: Any) -> set[str]:
        settings = record_finetune(made, RunPaths(tmp_path / "new"), 16, scores, train, test)["settings"]
        return {key for key in settings if key.startswith("seen")}

    run("pretrained", None)
    same, last = {"val_percent": 10.0}, {"val_percent": 10.0, "val_seed": 5}
    assert seen(run("tuned", "pretrained", **same)) == {"seen_in_pretraining"}
    assert seen(run("again", "tuned", **same)) == {"seen_in_pretraining"}
    assert seen(run("other", "again", **last)) == {"seen_in_pretraining", "seen_in_finetuning"}
    assert seen(replace(config, init=str(tmp_path / "gone"))) == set()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('["a", "b", "c"]', "has 3 names, and the head 2"),
        ('{"a": 1}', "cannot be read: it is not a list of names"),
        ("[1, 2]", "cannot be read: it is not a list of names"),
        ("[", "cannot be read"),
    ],
)
def test_other_class_names_than_the_heads_are_an_error(tuned: Path, content: str, fault: str) -> None:
    """In a checkpoint that was moved, with a manifest to match."""
    folder = tuned / "checkpoints" / "step-00000016"
    (folder / "classes.json").write_text(content)
    checkpoint.add(folder, folder / "classes.json")
    with pytest.raises(CheckpointError, match=fault):
        validated(folder)


def pictures(root: Path, *classes: str) -> Path:
    for split in ("train", "val"):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            Image.new("L", (16, 16), 255 * (name == "up")).save(root / split / name / "1.png")
    return root


def test_other_images_must_have_the_same_classes(runs: tuple[Path, Path], tuned: Path, tmp_path: Path) -> None:
    same = pictures(tmp_path / "same", "down", "up")
    found = validated(tuned, f"data.root={same}")
    assert (found["test_images"], found["settings"]["data"]) == (2, f"folder in {same}, 16x16")
    for folder, fault in (
        (
            pictures(tmp_path / "names", "down", "left"),
            "class 1 of the test images is 'left', and of checkpoint=.* 'up'",
        ),
        (
            pictures(tmp_path / "count", "a", "b", "c"),
            "the test images have 3 classes, and checkpoint=.* 2; use images",
        ),
        (pictures(tmp_path / "one", "down"), "the test images have one class, and a score needs two or more"),
    ):
        with pytest.raises(DataError, match=fault):
            validated(tuned, f"data.root={folder}")
    with pytest.raises(ConfigError, match=r"has no classifier; make one with dmjd finetune .*, or score the encoder"):
        validated(runs[0])
    with pytest.raises(ConfigError, match="has no classifier; make one with dmjd finetune"):
        package.load_classifier(runs[0])
    with pytest.raises(ConfigError, match="weights=untrained"):
        evaluate("knn", compose("knn", [f"checkpoint={tuned}", *CPU, "weights=untrained"]))


# Features


def test_features_are_those_that_the_head_reads(tuned: Path, image_folder: Path) -> None:
    """The oracle is timm's model of the export: pooled, normalised and without its head."""
    pixels = torch.stack([torch.from_numpy(build_dataset_of(tuned).image(index)) for index in range(5)])
    for weights in ("trained", "ema"):
        path, line = export(compose("export", [f"checkpoint={tuned}", f"weights={weights}"]))
        pasted: dict[str, Any] = {}
        exec(line, pasted)
        model, card = pasted["model"], json.loads(sidecar(path).read_text())
        mean, std = (torch.tensor(card[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
        images = (pixels.permute(0, 3, 1, 2) / 255 - mean) / std
        encoder = package.load_encoder(tuned, weights=weights, device="cpu")
        classifier = package.load_classifier(tuned, weights=weights, device="cpu")
        encoder.crop_pct = classifier.crop_pct = 1.0
        with torch.no_grad():
            assert agrees(encoder.embed(pixels.numpy()), model.forward_head(model.forward_features(images), True))
            logits = model(images)
        assert agrees(classifier.logits(pixels.numpy()), logits)
        names, probabilities = zip(*classifier.predict(pixels.numpy()), strict=True)
        assert list(names) == [("down", "up")[index] for index in logits.argmax(1).tolist()]
        torch.testing.assert_close(torch.tensor(probabilities), logits.softmax(1).amax(1))
        assert card["classes"] == ["down", "up"] == classifier.classes
        assert path.name == f"classifier-{weights}-step00000016-fp32.safetensors"
    record = evaluate("knn", compose("knn", [f"checkpoint={tuned}", *CPU]))
    assert (record["step"], record["weights"], "untrained" in record) == (16, "trained", False)


def build_dataset_of(run: Path) -> Any:
    return build_dataset(from_yaml_of_run((run / "config.yaml").read_bytes(), "x").data, "test")


# Exports

VIT = ("backbone.embed_dim=24", "backbone.depth=2", "backbone.num_heads=3", "backbone.patch_size=8")
SQUARE, WIDE = "data.image_size=[32,32]", "data.image_size=[32,48]"
BEIT = ("backbone.block=beit", "backbone.masked_tokens=mask_token", "backbone.layer_scale=0.1")
RELATIVE = (*BEIT, "backbone.positions=relative", "backbone.bias_tables=per_block")
WINDOWS = "backbone.windows={depths:[1,2,1,1],num_heads:[1,1,2,2],size:4}"
STAGES = "backbone.conv_stages={embed_dims:[8,12],depths:[1,1]}"
KINDS = {
    "mean": (*VIT, SQUARE),
    "class token": (*VIT, WIDE, "head.pooling=cls"),
    "class token, encoder's norm": (*VIT, SQUARE, "head.pooling=cls", "head.norm=encoder"),
    "mean, encoder's norm": (*VIT, WIDE, "head.norm=encoder", "backbone.class_token=false"),
    "beit": (*VIT, WIDE, *RELATIVE),
    "beit, shared table": (*VIT, WIDE, *RELATIVE, "backbone.bias_tables=shared"),
    "simmim": (*VIT, WIDE, *RELATIVE, "backbone.class_token=false"),
    "swin": ("backbone=swin_base", "data.image_size=[64,96]", "backbone.embed_dim=64", WINDOWS, "head.norm=encoder"),
    "convvit": (
        *("backbone=convvit_base", WIDE, "backbone.embed_dim=24", "backbone.depth=1"),
        *("backbone.num_heads=3", STAGES),
    ),
}

Drawn = Callable[..., FrozenEncoder]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """``drawn(*words)``: a classifier of five classes with drawn weights, which the next export reads."""

    def make(*words: str) -> FrozenEncoder:
        config: FinetuneConfig = compose("finetune", ["init=null", *words])
        classifier = build_classification(config, 5).model.eval().requires_grad_(False)
        for parameter in classifier.parameters():  # none stays at one or zero
            nn.init.normal_(parameter, std=0.2)
        run = RunFolder(tmp_path / "drawn")
        run.path.mkdir(exist_ok=True)
        size = config.data.image_size[0], config.data.image_size[1]
        if isinstance(classifier.fc_norm, nn.LayerNorm):
            classifier.encoder.fc_norm = classifier.fc_norm
        made = FrozenEncoder(
            *(classifier.encoder, config, to_yaml(config), config.data, {}, size, torch.device("cpu"), 7),
            *(run.path / "step", run, "trained", classifier, ["a", "b", "c", "d"]),
        )
        monkeypatch.setattr(exporting, "load_encoder", lambda _: made)
        return made

    return make


def exported(made: FrozenEncoder, *words: str) -> tuple[Path, str]:
    return export(compose("export", [f"checkpoint={made.run.path}", *words]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_classifier_is_a_model_of_timm(kind: str, drawn: Drawn) -> None:
    """The pasted line gives the logits."""
    made = drawn(*KINDS[kind])
    path, line = exported(made)
    pasted: dict[str, Any] = {}
    exec(line, pasted)
    images = torch.randn(3, 3, *made.size)
    assert made.classifier is not None
    with torch.no_grad():
        assert agrees(pasted["model"](images), made.classifier(images))
    card = json.loads(sidecar(path).read_text())
    assert card["arguments"]["num_classes"] == 5
    assert card["classes"] == ["a", "b", "c", "d", "4"], "a head may have more classes than the data"


def test_digits_and_fashion_mnist_have_other_classes_of_the_same_names(drawn: Drawn) -> None:
    made = drawn(*KINDS["mean"])
    trained, data = (replace(made.data, name=name) for name in ("digits", "fashion_mnist"))
    other = replace(made, trained=replace(made.trained, data=trained), data=data)
    with pytest.raises(
        ConfigError, match="data=fashion_mnist has other classes than checkpoint=tuned, of digits; leave"
    ):
        EVALUATION.run(Context(compose("validate", ["checkpoint=tuned", *CPU]), other, "labels"))


def test_a_classifier_that_a_format_cannot_hold_is_an_error(drawn: Drawn) -> None:
    for words, form, fault in (
        ((*KINDS["swin"], "head.norm=pooled"), "timm", "head.norm=pooled: timm's Swin normalises before pooling; use"),
        (KINDS["mean"], "huggingface", "head.pooling=mean, and Hugging Face's ViTForImageClassification needs cls"),
        (KINDS["mean"], "huggingface_mae", "format=huggingface_mae is for pre-training, and this run is a fine-tuning"),
    ):
        with pytest.raises(ConfigError, match=fault):
            exported(drawn(*words), f"format={form}")


@pytest.mark.parametrize("norm", ["pooled", pytest.param("encoder", marks=pytest.mark.long)])
def test_transformers_computes_the_logits(norm: str, drawn: Drawn) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    made = drawn(*VIT, SQUARE, "head.pooling=cls", f"head.norm={norm}")
    path, line = exported(made, "format=huggingface")
    model, report = transformers.AutoModelForImageClassification.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    images = torch.randn(2, 3, *made.size)
    assert made.classifier is not None
    with torch.no_grad():
        assert agrees(model.eval()(images).logits, made.classifier(images))
    assert model.config.id2label == dict(enumerate("abcd4"))
    assert "AutoModelForImageClassification" in line
    assert "# Classifier of 5 classes, fine-tuned with dmjd" in (path / "README.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mean", "swin"])
def test_onnxruntime_computes_the_logits(kind: str, drawn: Drawn) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra dmjd[onnx] is not installed")
    made = drawn(*KINDS[kind], *["head.norm=pooled"] * (kind == "swin"))
    _, line = exported(made, "format=onnx")
    images = torch.randn(3, 3, *made.size)
    pasted: dict[str, Any] = {"images": images.numpy()}
    exec(line, pasted)
    assert isinstance(pasted["session"], onnxruntime.InferenceSession)
    assert made.classifier is not None
    with torch.no_grad():
        assert agrees(torch.from_numpy(pasted["logits"]), made.classifier(images))


def test_a_fine_tuned_run_converts_to_the_layouts_of_fine_tuned_files(tuned: Path, tmp_path: Path) -> None:
    """timm's model of an official fine-tuned file reads it."""
    words = [f"input={tuned}", f"output={tmp_path / 'timm.safetensors'}", "to=timm", "weights=ema"]
    done = convert(compose("convert", words))
    reference, _ = export(compose("export", [f"checkpoint={tuned}", "weights=ema"]))
    card = json.loads(sidecar(reference).read_text())
    one, other = (
        timm.create_model(card["architecture"], checkpoint_path=str(path), **card["arguments"]).eval().state_dict()
        for path in (done.path, reference)
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())
