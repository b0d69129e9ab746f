from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmjd.builders import build_objective
from dmjd.compose import compose
from dmjd.config import DataConfig, FinetuneConfig, PretrainConfig
from dmjd.data import build
from dmjd.data.small import Digits
from dmjd.errors import CheckpointError, ConfigError, DataError
from dmjd.evaluate import EVALUATIONS, describe, registry
from dmjd.evaluate import evaluate as run_evaluation
from dmjd.evaluate.encoder import (
    FrozenEncoder,
    _differences,
    _evaluation_data,
    load_encoder,
    loader_workers,
    seen_images,
)
from dmjd.models.objective import Objective
from dmjd.report.run import read_run
from dmjd.runs import checkpoint
from dmjd.train import loop

Words = Callable[..., list[str]]

STEP = "step-00000011"
UNTRAINED = "weights=untrained"
FEW = "train_images=100"
PROBE = ("epochs=3", "warmup_epochs=1", "batch_size=256", "train_images=600")
SHORT = ("epochs=2", "warmup_epochs=1", "batch_size=64", "train_images=128")


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def evaluate(verb: str, path: Path | str, *words: str) -> dict[str, Any]:
    quick = ("workers=0", "device=cpu", "untrained=false")
    return run_evaluation(verb, compose(verb, [f"checkpoint={path}", *quick, *words]))


def too_late(*arguments: Any) -> None:
    pytest.fail("images were encoded, which may take hours, before the words were refused")


def evaluations(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "evaluations").iterdir())


def test_knn_keeps_its_record(run: Path) -> None:
    record = evaluate("knn", run, "train_images=500", "neighbours=7", "temperature=0.1")
    (name,) = evaluations(run)
    assert name.startswith("knn-trained-step00000011-")
    assert json.loads((run / "evaluations" / name).read_text()) == record
    assert (record["verb"], record["weights"], record["step"]) == ("knn", "trained", 11)
    assert record["settings"] == {
        "pooling": "mean",
        "k": 7,
        "temperature": 0.1,
        "train_images": 500,
        "data": "digits, 32x32",
        "crop_pct": 1.0,
        "mean": [0.219],
        "std": [0.333],
    }
    assert 30 < record["top1"] < record["top5"] < 100, "far above chance, and nothing perfect"
    assert record["top1"] * 3.6 == pytest.approx(round(record["top1"] * 3.6)), "a count of 360 images"


def test_knn_equals_an_oracle_on_the_encoders_tokens(run: Path) -> None:
    """Pooled tokens of every image, and votes in numpy."""
    record = evaluate("knn", run, "neighbours=5")
    frozen = load_encoder(compose("knn", [f"checkpoint={run}", "device=cpu"]))

    def features(data: Digits) -> Any:
        images = np.stack([data.image(index) for index in range(len(data))])
        scaled = (images.astype(np.float32) / 255 - 0.219) / 0.333
        with torch.no_grad():
            tokens = frozen.encoder(torch.from_numpy(scaled).permute(0, 3, 1, 2))
        pooled = tokens.mean(dim=1).double().numpy()
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    train, test = Digits("train"), Digits("test")
    labels = np.array([train.label(index) for index in range(len(train))])
    similarity = features(test) @ features(train).T
    hits = 0
    for index, row in enumerate(similarity):
        nearest = np.argsort(-row)[:5]
        votes = np.bincount(labels[nearest], weights=np.exp(row[nearest] / 0.07), minlength=10)
        hits += int(votes.argmax() == test.label(index))
    assert abs(hits - record["top1"] * 3.6) <= 1.5, "one image may sit on the fence between float32 and float64"


@pytest.mark.parametrize("augment", [True, False])
def test_linprobe_keeps_its_record(run: Path, augment: bool) -> None:
    record = evaluate("linprobe", run, *PROBE, f"augment={augment}", "seed=3", "base_lr=1.5")
    (name,) = evaluations(run)
    assert name.startswith("linprobe-trained-step00000011-")
    assert json.loads((run / "evaluations" / name).read_text()) == record
    assert (record["verb"], record["weights"], record["step"]) == ("linprobe", "trained", 11)
    crops = {"crop_scale": [0.08, 1.0], "crop_ratio": [0.75, 4 / 3], "interpolation": "bicubic", "flip": True}
    assert record["settings"] == {
        "pooling": "mean",
        "augment": augment,
        "train_images": 512 if augment else 600,
        "data": "digits, 32x32",
        "crop_pct": 1.0,
        "mean": [0.219],
        "std": [0.333],
        "seed": 3,
        "epochs": 3,
        "warmup_epochs": 1,
        "batch_size": 256,
        "lr": 1.5,
        **(crops if augment else {}),
    }
    assert 0 < record["final_loss"] < 3
    assert record["top1"] * 3.6 == pytest.approx(round(record["top1"] * 3.6)), "a count of 360 images"


def test_linprobe_learns_something(run: Path) -> None:
    record = evaluate("linprobe", run, "epochs=30", "warmup_epochs=3", "batch_size=256", "augment=false", "base_lr=10")
    assert record["top1"] > 50
    assert record["final_loss"] < 0.8 * np.log(10)


@pytest.mark.parametrize(
    ("verb", "words"), [("knn", (FEW,)), ("linprobe", (*SHORT, "augment=true")), ("linprobe", SHORT)]
)
def test_a_score_is_a_function_of_its_settings(run: Path, verb: str, words: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    first = evaluate(verb, run, *words)
    torch.manual_seed(2)
    assert evaluate(verb, run, *words) == first


def test_how_an_evaluation_is_computed_does_not_change_it(run: Path) -> None:
    record = evaluate("knn", run, "train_images=300")
    assert evaluate("knn", run, "train_images=300", "batch_size=100")["top1"] == pytest.approx(record["top1"], abs=0.3)


@pytest.mark.parametrize("verb", ["knn", "linprobe"])
@pytest.mark.parametrize("link", [False, True])
def test_what_is_in_the_place_of_the_scores_is_named_before_the_images_are_encoded(
    run: Path, monkeypatch: pytest.MonkeyPatch, verb: str, link: bool
) -> None:
    place = run / "evaluations"
    shutil.rmtree(place)
    place.symlink_to(run / "absent") if link else place.touch()
    monkeypatch.setattr(FrozenEncoder, "features", too_late)
    what = "a link to nowhere" if link else "a file"
    with pytest.raises(ConfigError, match=f"{place} is {what}, where scores need a folder; move it away, or name a"):
        evaluate(verb, run)


def test_a_checkpoint_is_named_by_its_run_or_by_itself(run: Path) -> None:
    records = [
        evaluate("knn", path, "train_images=100") for path in (run, run / "checkpoints", run / "checkpoints" / STEP)
    ]
    assert records[0] == records[1] == records[2]
    (name,) = evaluations(run)
    assert name.startswith("knn-trained-step00000011-")


@pytest.mark.parametrize(("inside", "name"), [(".", "."), ("checkpoints", "."), ("checkpoints", STEP)])
def test_a_relative_checkpoint_keeps_its_score_in_its_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, inside: str, name: str
) -> None:
    monkeypatch.chdir(run / inside)
    evaluate("knn", name, "train_images=100")
    (name,) = evaluations(run)
    assert name.startswith("knn-trained-step00000011-")
    assert [path.name for path in (run / "checkpoints").iterdir()] == [STEP]


def test_a_checkpoint_out_of_its_run_keeps_its_score_itself(run: Path, tmp_path: Path) -> None:
    best = (run / "checkpoints" / STEP).rename(tmp_path / "best")
    record = evaluate("knn", best, "train_images=100")
    assert record["step"] == 11
    assert evaluations(best)[0].startswith("knn-trained-step00000011-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "run"]
    assert evaluate("knn", best, "train_images=100") == record


def test_a_checkpoint_named_from_inside_itself_stays_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted((run / "checkpoints" / STEP).rglob("*"))
    monkeypatch.chdir(run / "checkpoints" / STEP)
    evaluate("knn", ".", "train_images=100")
    assert sorted((run / "checkpoints" / STEP).rglob("*")) == before
    (name,) = evaluations(run)
    assert name.startswith("knn-trained-step00000011-")


def test_untrained_weights_are_those_the_run_began_with(run: Path, tiny: Words, tmp_path: Path) -> None:
    trained, untrained = (evaluate("knn", run, FEW, f"weights={weights}") for weights in ("trained", "untrained"))
    assert (untrained["weights"], untrained["step"]) == ("untrained", 0)
    assert untrained["settings"] == trained["settings"]
    trained_file, untrained_file = evaluations(run)
    assert trained_file.startswith("knn-trained-step00000011-")
    assert untrained_file.startswith("knn-untrained-step00000000-")
    began = build_objective(compose("pretrain", tiny(tmp_path)), 36).model.encoder.state_dict()
    encoder = load_encoder(compose("knn", [f"checkpoint={run}", "weights=untrained", "device=cpu"])).encoder
    assert all(torch.equal(value, began[name]) for name, value in encoder.state_dict().items())
    encoder = load_encoder(compose("knn", [f"checkpoint={run}", "device=cpu"])).encoder
    assert not torch.equal(encoder.state_dict()["norm.bias"], began["norm.bias"])
    assert not encoder.training
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_scores_of_other_settings_do_not_replace_each_other(run: Path) -> None:
    # A sweep over k, or a quick look on few images, must not silently take the place of the reported number.
    for words in (("neighbours=5",), ("neighbours=10",), ("train_images=50",)):
        evaluate("knn", run, "train_images=100", *words)
    kept = [evaluation.settings for evaluation in read_run(run).evaluations]
    assert sorted((settings["k"], settings["train_images"]) for settings in kept) == [(1, 50), (5, 100), (10, 100)]


def test_all_that_a_probe_depends_on_is_among_its_settings(run: Path) -> None:
    words = [
        *("", "warmup_epochs=0", "crop_scale=[0.5,1]", "data.mean=[0.5]", "data.std=[0.5]", "data.crop_ratio=[1,1]"),
        *("data.flip=false", "data.interpolation=bilinear"),
    ]
    losses = {evaluate("linprobe", run, *SHORT, "augment=true", *more.split())["final_loss"] for more in words}
    assert len(losses) == len(evaluations(run)) == len(words), "every one matters, and has a record of its own"


def test_a_probe_without_augmentation_does_not_depend_on_crops(run: Path) -> None:
    for words in ((), ("crop_scale=[0.5,1]", "data.flip=false")):
        evaluate("linprobe", run, *SHORT, "augment=false", "data=digits", *words)
    assert len(evaluations(run)) == 1


def test_more_training_images_than_there_are_is_all_of_them(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = evaluate("knn", run)
    with caplog.at_level(logging.INFO, logger="dmjd"):
        assert evaluate("knn", run, "train_images=10000") == whole
    (line,) = [record.getMessage() for record in caplog.records if "train_images" in record.getMessage()]
    assert line == "train_images=10000, but there are 1437 training images: all are used"
    assert whole["settings"]["train_images"] == 1437


def test_few_labels_are_the_same_images_in_every_evaluation(run: Path) -> None:
    nearest, linear = evaluate("knn", run, "few_shot=10"), evaluate("linprobe", run, *SHORT[:3], "few_shot=10")
    train = Digits("train")
    labels = [train.label(index) for index in range(1437)]
    assert nearest["settings"]["train_images"] == sum(round(labels.count(label) / 10) for label in range(10))
    assert nearest["settings"]["few_shot"] == 10.0
    assert nearest["settings"]["few_shot_images"] == linear["settings"]["few_shot_images"]
    assert nearest["test_images"] == linear["test_images"] == 360
    (line,) = describe(nearest)
    assert line.endswith(", digits, 32x32, 10 % of the labels)")


# The data of a run


def store_auto(run: Path) -> None:
    """Configurations as versions wrote them that did not resolve data=auto."""
    for config in (run / "config.yaml", *run.glob("checkpoints/*/config.yaml")):
        text = config.read_text()
        config.write_text(text.replace("name: digits", "name: auto").replace("pad: 0", "pad: 2"))
        assert config.read_text() != text
    checkpoint.add(run / "checkpoints" / STEP, run / "checkpoints" / STEP / "config.yaml")


def elsewhere() -> Path:
    raise DataError("there is no Fashion-MNIST")


def test_a_run_that_stored_auto_is_evaluated_on_the_data_of_its_training(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = evaluate("knn", run, FEW)
    store_auto(run)
    monkeypatch.setattr(build, "fashion_mnist_folder", lambda: pytest.fail("it was trained on digits"))
    assert evaluate("knn", run, FEW) == record
    copy = (run / "checkpoints" / STEP).rename(run.parent / "copy")
    with pytest.raises(ConfigError, match=r"copy stores data=auto .* add data=fashion_mnist or data=digits"):
        evaluate("knn", copy, FEW, f"output={run}")
    assert evaluate("knn", copy, FEW, f"output={run}", "data=digits") == record


def test_a_run_that_stored_auto_for_fashion_mnist_is_not_evaluated_on_digits(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_auto(run)
    (run / "log.jsonl").write_text(json.dumps({"step": 10, "epoch": 10 / 468}) + "\n")
    monkeypatch.setattr(build, "fashion_mnist_folder", elsewhere)
    with pytest.raises(DataError, match="there is no Fashion-MNIST"):
        evaluate("knn", run, FEW)


def test_auto_does_not_evaluate_on_another_data_set(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "fashion_mnist_folder", elsewhere)
    record = evaluate("knn", run, FEW)
    assert evaluate("knn", run, FEW, "data=auto") == record
    monkeypatch.setattr(build, "fashion_mnist_folder", lambda: tmp_path)
    with pytest.raises(ConfigError, match=r"data=auto is fashion_mnist here, and .* was trained on digits"):
        evaluate("knn", run, FEW, "data=auto")


def test_cls_pooling_needs_a_cls_token(run: Path) -> None:
    for verb in ("knn", "linprobe"):
        with pytest.raises(ConfigError, match=r"pooling=cls needs a class token.*pooling=mean"):
            evaluate(verb, run, "pooling=cls")
    assert evaluations(run) == []


def test_cls_pooling_takes_the_cls_token(tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: None)
    run = loop.pretrain(compose("pretrain", tiny(tmp_path / "mae", "method=mae", "batch_size=1024"))).path
    frozen = load_encoder(compose("knn", [f"checkpoint={run}", "device=cpu", "pooling=cls"]))
    data = frozen.dataset("test", 10)
    images = torch.stack([torch.from_numpy(data.image(index)) for index in range(10)]).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        tokens = frozen.encoder((images - 0.219) / 0.333)
    for pooling, expected in (("cls", tokens[:, 0]), ("mean", tokens[:, 1:].mean(dim=1))):
        values = frozen.features(data, pooling, 4, workers=0).values
        assert torch.allclose(values, expected, atol=1e-5)


def test_other_data_of_the_same_kind_may_be_judged(run: Path, image_folder: Path) -> None:
    grey = ("data=folder", f"data.root={image_folder}", "data.channels=1", "data.mean=[0.5]", "data.std=[0.25]")
    record = evaluate("knn", run, *grey, "data.image_size=[16,16]", "neighbours=3")
    assert record["top1"] == 100.0, "a ramp up and a ramp down are easily told apart"
    assert record["top5"] is None
    assert record["settings"]["train_images"] == 48


# The data settings of the run


def data_of(run: Path, *words: str) -> FrozenEncoder:
    return load_encoder(compose("knn", [f"checkpoint={run}", "device=cpu", *words]))


def test_only_keys_that_are_given_differ_from_the_data_of_the_run(run: Path, image_folder: Path) -> None:
    own = data_of(run).data
    folder: dict[str, Any] = {"name": "folder", "root": str(image_folder), "pad": 0}
    for words in (
        ("data=folder", f"data.root={image_folder}"),
        (f"data.root={image_folder}", "data=folder"),
        (f"data.root={image_folder}", "data.name=folder"),
    ):
        found = data_of(run, *words)
        folder |= {"endings": found.data.endings, "skipped_folders": found.data.skipped_folders}  # of any folder
        assert found.data == replace(own, **folder), "size, channels, crop, mean and std are the run's"
        assert found.differs == {}
    assert data_of(run, f"data.root={image_folder}").data == replace(own, root=str(image_folder))
    other = data_of(run, "data.image_size=[16,16]", "data.std=[0.5]")
    assert other.data == replace(own, image_size=[16, 16], std=[0.5])
    assert other.differs == {"trained_size": "32x32", "trained_std": [0.333]}


def test_a_run_that_moved_into_another_data_set_leaves_its_folder_behind(
    run: Path, image_folder: Path, tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: None)
    grey = ("data=folder", f"data.root={image_folder}", "data.channels=1", "data.mean=[0.4]", "data.std=[0.25]")
    words = tiny(tmp_path / "folder", *grey, "data.image_size=[16,16]", "batch_size=16", "data.crop_pct=0.8")
    trained = loop.pretrain(compose("pretrain", words)).path
    digits = data_of(trained, "data=digits").data
    assert (digits.name, digits.root, digits.image_size, digits.mean) == ("digits", None, [16, 16], [0.4])
    assert digits.crop_pct == 0.8
    assert 10 < evaluate("knn", trained, "data=digits", "train_images=400")["top1"] < 100
    moved = Path(shutil.copytree(image_folder, tmp_path / "moved"))
    record = evaluate("knn", trained, f"data.root={moved}", "data.image_size=[12,12]", "untrained=true")
    assert record["settings"]["trained_size"] == "16x16"
    assert "trained_mean" not in record["settings"]
    assert (record["chance"], record["majority"], record["test_images"]) == (50.0, 50.0, 12)
    assert (
        record["untrained"]
        == evaluate("knn", trained, f"data.root={moved}", "data.image_size=[12,12]", UNTRAINED)["top1"]
    )
    shutil.rmtree(moved / "val")
    with pytest.raises(
        DataError, match=r"no test split; .*trained on all images of this folder; .*data\.val_percent=10"
    ):
        evaluate("knn", trained, f"data.root={moved}")


@pytest.mark.parametrize(
    ("trained", "evaluated", "seen"),
    [
        *[((0, 0), (10, 0), True), ((10, 0), (10, 0), False), ((20, 0), (10, 0), False), ((10, 0), (20, 0), True)],
        *[((10, 0), (10, 1), True), ((0, 0), (0, 0), False)],
    ],
)
def test_a_split_that_pre_training_did_not_make_has_images_that_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: tuple[int, int], evaluated: tuple[int, int], seen: bool
) -> None:
    """(val_percent, val_seed) of both; the same folder under two names, and another folder."""
    monkeypatch.chdir(tmp_path)

    def data(root: str, split: tuple[int, int]) -> DataConfig:
        config = DataConfig(name="folder", root=root)
        vars(config).update(val_percent=float(split[0]), val_seed=split[1])
        return config

    expected = {"seen_in_pretraining": True} if seen else {}
    before, here = PretrainConfig(data=data("photos", trained)), data(str(tmp_path / "photos"), evaluated)
    assert _differences(before.data, here) | seen_images([before], here) == expected
    assert seen_images([before], data("others", evaluated)) == {}
    tuned = FinetuneConfig(init="photos", data=before.data)
    assert seen_images([tuned, before], here) == expected | ({"seen_in_finetuning": True} if seen else {})


def test_an_experiment_gives_a_file_its_data_settings(image_folder: Path) -> None:
    words = ["checkpoint=x.pth", "experiment=demo", "data=folder", f"data.root={image_folder}", "device=cpu"]
    config = compose("knn", words)
    data = _evaluation_data(Path("x.pth"), config.model, config)
    assert (data.name, data.root, data.image_size, data.mean, data.channels) == (
        *("folder", str(image_folder), [32, 32], [0.219], 1),
    )


# Baselines


@pytest.mark.parametrize(("verb", "words"), [("knn", ()), ("linprobe", (*PROBE, "base_lr=20"))])
def test_the_untrained_score_stands_beside_the_trained_one(run: Path, verb: str, words: tuple[str, ...]) -> None:
    untrained = evaluate(verb, run, "train_images=600", *words, UNTRAINED)
    trained = evaluate(verb, run, "train_images=600", *words, "untrained=null")
    assert trained["untrained"] == untrained["top1"] != trained["top1"]
    assert "untrained" not in untrained
    assert trained["settings"] == untrained["settings"]
    splits = Digits("train"), Digits("test")
    labels, test = (np.array([split.label(index) for index in range(len(split))]) for split in splits)
    labels = labels[np.arange(600) * 1437 // 600]
    assert trained["chance"] == 10.0
    assert trained["majority"] == pytest.approx(100 * (test == np.bincount(labels).argmax()).mean())
    assert trained["test_images"] == 360
    (line,) = describe(trained)
    assert line.startswith(f"{verb}: {EVALUATIONS[verb].columns['top1'].meaning} {trained['top1']:.2f} %  (balanced ")
    assert line.endswith(
        f", untrained {untrained['top1']:.2f}, majority {trained['majority']:.2f}, chance 10.00; "
        "trained, step 11, digits, 32x32)"
    )


def test_the_untrained_score_is_left_out_where_it_is_dear(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = data_of(run)
    assert frozen.cost(100) == 100 * 64 * sum(each.numel() for each in frozen.encoder.parameters())
    monkeypatch.setattr(registry, "CHEAP", frozen.cost(100 + 360) - 1)
    assert "untrained" not in evaluate("knn", run, "train_images=100", "untrained=null")
    assert "untrained" not in evaluate("linprobe", run, *SHORT, "augment=true", "untrained=null")
    monkeypatch.setattr(registry, "CHEAP", frozen.cost(100 + 360))
    assert "untrained" in evaluate("knn", run, "train_images=100", "untrained=null")


# Few images


def few(root: Path, train: dict[str, int], test: dict[str, int]) -> tuple[str, str, str]:
    """Grey images of noise around a level per class, and the words for them."""
    rng = np.random.default_rng(0)
    for split, counts in (("train", train), ("val", test)):
        for level, (name, count) in enumerate(counts.items()):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(rng.normal(25 * (level + 1), 4, (32, 32)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return "data=folder", f"data.root={root}", "untrained=null"


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ({"a": 1, "b": 1}, {"a": 1}),
        ({"a": 65, "b": 1, "c": 1}, {"a": 2, "c": 1}),
        (dict.fromkeys("abcdefghi", 1), {"b": 1, "c": 2}),
    ],
    ids=["two images", "one over a batch of 64", "classes of one image"],
)
@pytest.mark.parametrize("verb", ["knn", "linprobe"])
def test_few_images_have_a_score(
    run: Path, tmp_path: Path, verb: str, train: dict[str, int], test: dict[str, int]
) -> None:
    quick = "epochs=20" if verb == "linprobe" else f"workers={2 if len(train) == 2 else 0}"
    record = evaluate(verb, run, *few(tmp_path / "few", train, test), quick)
    assert 0 <= record["top1"] <= 100
    assert record["chance"] == 100 / len(train)
    assert record["settings"]["train_images"] == sum(train.values())


def test_one_training_image_is_too_few_for_a_probe(run: Path) -> None:
    with pytest.raises(ConfigError, match="a probe needs at least 2 training images, got 1"):
        evaluate("linprobe", run, "train_images=1")


def test_workers_follow_the_batches_and_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(64))
    assert [loader_workers(images, 256) for images in (1, 256, 257, 1000, 10**6)] == [0, 0, 2, 4, 8]
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(2))
    assert [loader_workers(images, 256) for images in (256, 10**6)] == [0, 2]


def test_an_evaluation_sees_the_centre(run: Path, image_folder: Path) -> None:
    grey = ("data=folder", f"data.root={image_folder}", "data.crop_pct=0.875", "data.mean=[0.5]", "data.std=[0.25]")
    size = "data.image_size=[16,16]"
    frozen = load_encoder(compose("knn", [f"checkpoint={run}", "device=cpu", *grey, size]))
    assert frozen.data.crop_pct == 0.875
    data = frozen.dataset("test")
    pixels = torch.from_numpy(data.image(0)).permute(2, 0, 1)[None].float()
    larger = torch.nn.functional.interpolate(pixels, (19, 19), mode="bicubic", antialias=True)  # 16 / 0.875, rounded up
    centre = larger.round().clamp(0, 255)[:, :, 1:17, 1:17] / 255
    with torch.no_grad():
        expected = frozen.encoder((centre - 0.5) / 0.25).mean(dim=1)
    assert torch.allclose(frozen.features(data, "mean", 1, workers=0).values[:1], expected, atol=1e-2)
    scores = [evaluate("knn", run, *grey, size, "neighbours=3", *words) for words in ((), ("data.crop_pct=1",))]
    assert [score["settings"]["crop_pct"] for score in scores] == [0.875, 1.0]
    assert len(evaluations(run)) == 2


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["data=folder"], ["data.name=folder needs data.root"]),
        (["data.channels=3"], ["data.channels=3", "1", "remove data.channels"]),
        (["data=digits", "data.image_size=[30,30]"], ["data.image_size 30x30", "patch_size=4"]),
        (["data=digits", "data.image_size=[32,32,3]"], ["data.image_size"]),
        (["data=digits", "data.mean=[.1,.2]"], ["data.mean", "1 channels"]),
        (["data=digits", "data.std=[0]"], ["data.std", "above 0"]),
        (["train_images=0"], ["train_images", "at least 1"]),
        (["train_images=10", "neighbours=11"], ["neighbours", "10", "11"]),
        (["workers=-1"], ["workers", "-1"]),
        (["device=cuda"], ["device=cuda"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_judged_is_refused_by_its_key(
    run: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], parts: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(FrozenEncoder, "features", too_late)
    with pytest.raises((ConfigError, DataError)) as caught:
        evaluate("knn", run, *words)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "engine." not in sentence, "evaluations have no engine"
    for part in parts:
        assert part in sentence, f"{sentence!r} lacks {part!r}"
    assert evaluations(run) == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["batch_size=601"], ["batch_size", "601"]),
        (["batch_size=1"], ["batch_size", "between 2"]),
        (["warmup_epochs=3"], ["warmup_epochs", "epochs=3"]),
        (["warmup_epochs=-1"], ["warmup_epochs", "-1"]),
        (["seed=-1"], ["seed", "-1"]),
        (["crop_scale=[1,0.5]"], ["crop_scale", "[1.0, 0.5]"]),
    ],
    ids=lambda value: " ".join(value),
)
@pytest.mark.parametrize("augment", [True, False])
def test_a_probe_that_cannot_be_is_refused_by_its_key(
    run: Path, monkeypatch: pytest.MonkeyPatch, augment: bool, words: list[str], parts: list[str]
) -> None:
    monkeypatch.setattr(FrozenEncoder, "features", too_late)
    with pytest.raises(ConfigError) as caught:
        evaluate("linprobe", run, *PROBE, f"augment={augment}", *words)
    for part in parts:
        assert part in str(caught.value), f"{caught.value!s} lacks {part!r}"
    assert evaluations(run) == []


@pytest.mark.parametrize("words", ["warmup_epochs=90 epochs=90", "crop_scale=[1,0.5]"])
def test_values_that_cannot_be_combined_are_rejected_before_the_checkpoint_is_loaded(words: str) -> None:
    with pytest.raises(ConfigError, match=words.partition("=")[0]):
        compose("linprobe", ["checkpoint=nowhere", *words.split()])


def test_images_without_labels_cannot_be_judged(run: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        folder = tmp_path / "flat" / split
        folder.mkdir(parents=True)
        for number in range(4):
            Image.new("L", (32, 32), 60 * number).save(folder / f"{number}.png")
    words = ("data=folder", f"data.root={tmp_path / 'flat'}", "data.channels=1", "data.mean=[0.5]", "data.std=[0.25]")
    with pytest.raises(DataError, match="no labels"):
        evaluate("knn", run, *words, "data.image_size=[32,32]", "neighbours=3")


def test_a_damaged_or_foreign_checkpoint_is_refused(run: Path) -> None:
    step = run / "checkpoints" / STEP
    with pytest.raises(CheckpointError, match="does not exist"):
        evaluate("knn", run / "absent")
    with pytest.raises(CheckpointError, match="is a folder of images"):
        evaluate("knn", run / "pictures")
    (step / "__0_0.distcp").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"damaged: __0_0\.distcp is not the file that was saved"):
        evaluate("knn", step)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        evaluate("knn", run)


def test_a_checkpoint_that_its_run_drops_meanwhile_is_one_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_and_drop(*arguments: Any) -> Objective:
        (run / "checkpoints" / STEP / "__0_0.distcp").unlink()
        return build_objective(*arguments)

    monkeypatch.setattr("dmjd.evaluate.encoder.build_objective", build_and_drop)
    with pytest.raises(CheckpointError, match=rf"{STEP} .*; a run that goes on drops all but its newest") as caught:
        evaluate("knn", run)
    assert "\n" not in str(caught.value)


def test_scores_on_other_data_are_other_scores(run: Path) -> None:
    evaluate("knn", run, "train_images=100")
    evaluate("knn", run, "train_images=100", "data=digits", "data.image_size=[16,16]")
    kept = [json.loads((run / "evaluations" / name).read_text()) for name in evaluations(run)]
    assert sorted(record["settings"]["data"] for record in kept) == ["digits, 16x16", "digits, 32x32"]
