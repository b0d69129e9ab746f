from __future__ import annotations

import logging
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import dmjd.evaluate.online as online
from dmjd.builders import build_objective, build_tokenizer
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError, DataError
from dmjd.evaluate import evaluate
from dmjd.evaluate.encoder import load_encoder
from dmjd.evaluate.knn import KnnResult
from dmjd.evaluate.online import OnlineKnn
from dmjd.models.masked_image_model import Encoder
from dmjd.models.objective import Objective

Words = Callable[..., list[str]]


@pytest.fixture
def configure(tmp_path: Path, tiny: Words) -> Callable[..., PretrainConfig]:
    """``configure(*words)``: the tiny run over digits, evaluated every epoch on few images."""

    def make(*words: str) -> PretrainConfig:
        few = ("online_knn.every_epochs=1", "online_knn.train_images=200")
        config: PretrainConfig = compose("pretrain", tiny(tmp_path / "run", *few, *words))
        return config

    return make


def build(config: PretrainConfig) -> Objective:
    return build_objective(config, build_tokenizer(config).dim)


def encoder_of(config: PretrainConfig) -> Encoder:
    return build(config).model.encoder


# The score


@pytest.mark.parametrize("bank", [500, 20000])
def test_the_score_is_that_of_the_verb(
    finished_run: Path,
    tmp_path: Path,
    configure: Callable[..., PretrainConfig],
    caplog: pytest.LogCaptureFixture,
    bank: int,
) -> None:
    """On the same weights and the same images; of a bank larger than the data set, on all of it."""
    run = shutil.copytree(finished_run, tmp_path / "finished")
    words = [f"checkpoint={run}", "workers=0", "device=cpu", "untrained=false", "neighbours=7", "temperature=0.1"]
    subset = ["train_images=500"] if bank == 500 else []
    record = evaluate("knn", compose("knn", [*words, *subset]))
    with caplog.at_level(logging.INFO, logger="dmjd"):
        callback = OnlineKnn(
            configure(f"online_knn.train_images={bank}", "online_knn.neighbours=7", "online_knn.temperature=0.1")
        )
    assert "train_images" not in caplog.text, "it is a maximum"
    encoder = load_encoder(compose("knn", words)).encoder
    assert callback.on_epoch_end(encoder, 11, 1.0) == {"knn_top1": record["top1"]}


@pytest.mark.parametrize(("images", "k"), [(40, 1), (200, 5), (1437, 20)])
def test_neighbours_follow_the_images_and_the_start_names_what_to_compare_with(
    configure: Callable[..., PretrainConfig], caplog: pytest.LogCaptureFixture, images: int, k: int
) -> None:
    config = configure(f"online_knn.train_images={images}")
    with caplog.at_level(logging.INFO, logger="dmjd"):
        OnlineKnn(config)
    assert config.online_knn.neighbours == k, "the run stores it"
    assert re.search(
        rf"online kNN: k {k}, {images} training images, 360 test images; majority \d+\.\d\d %, chance 10\.00 %",
        caplog.text,
    )


def test_pooling_is_as_configured(configure: Callable[..., PretrainConfig]) -> None:
    scores = []
    for pooling in ("mean", "cls"):
        config = configure("backbone.class_token=true", f"online_knn.pooling={pooling}")
        scores.append(OnlineKnn(config).on_epoch_end(encoder_of(config), 11, 1.0))
    assert scores[0] != scores[1]


def test_it_is_due_at_the_end_of_every_interval(
    configure: Callable[..., PretrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty epochs of 49 steps: no quotient of step and steps per epoch may round to a whole epoch."""
    monkeypatch.setattr(online, "extract_features", lambda *arguments, **options: None)
    monkeypatch.setattr(online, "knn_accuracy", lambda *arguments, **options: KnnResult(50.0, None, 50.0))
    config = configure("online_knn.every_epochs=3")
    callback, encoder = OnlineKnn(config), encoder_of(config)
    done = [step for step in range(30 * 49 + 1) if callback.on_epoch_end(encoder, step, step / 49) is not None]
    assert done == [3 * 49 * number for number in range(1, 11)]


# What it leaves alone


class Noisy(nn.Module):
    """An encoder that training moves by global randomness, so that a draw taken elsewhere shows in its weights."""

    num_prefix_tokens = 0

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, 8, 4, stride=4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.dropout(self.project(images)).flatten(2).mT


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_with_it_has_the_weights_of_a_run_without(configure: Callable[..., PretrainConfig], workers: int) -> None:
    callback = OnlineKnn(configure(f"workers={workers}"))

    def train(watched: bool) -> tuple[dict[str, Tensor], Tensor, object, bytes]:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  # the global state is what is tested
        random.seed(0)
        encoder = Noisy()
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.1)
        for step in range(1, 4):
            encoder(torch.randn(4, 1, 32, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if watched:
                assert callback.on_epoch_end(encoder, step, float(step)) is not None
        return encoder.state_dict(), torch.get_rng_state(), random.getstate(), np.random.bytes(8)  # noqa: NPY002

    weights, torch_state, *others = train(watched=True)
    expected, expected_state, *expected_others = train(watched=False)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert torch.equal(torch_state, expected_state)
    assert others == expected_others


def test_modes_and_gradients_are_as_before(configure: Callable[..., PretrainConfig]) -> None:
    config = configure()
    objective = build(config).train()
    encoder = objective.model.encoder
    encoder.blocks[0].eval()  # a frozen part has to stay frozen
    modes = [part.training for part in objective.modules()]
    assert OnlineKnn(config).on_epoch_end(encoder, 11, 1.0) is not None
    assert [part.training for part in objective.modules()] == modes
    assert all(parameter.requires_grad and parameter.grad is None for parameter in encoder.parameters())


# The early warning


@pytest.fixture
def warnings_at(
    configure: Callable[..., PretrainConfig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., list[tuple[int, str]]]:
    """``warnings_at(scores, logged)``: the warnings, with the epochs of ten steps that they came in."""
    monkeypatch.setattr(online, "extract_features", lambda *arguments, **options: None)

    def run(
        scores: list[float], logged: list[dict[str, float]] | None = None, drop: str = "2"
    ) -> list[tuple[int, str]]:
        config = configure(f"online_knn.warn_drop={drop}")
        encoder = encoder_of(config)
        callback = OnlineKnn(config)
        callback.restore(logged or [])
        found = []
        for epoch, score in enumerate(scores, start=1):
            caplog.clear()
            result = KnnResult(score, None, score)
            monkeypatch.setattr(online, "knn_accuracy", lambda *arguments, result=result, **options: result)
            with caplog.at_level(logging.WARNING, "dmjd"):
                assert callback.on_epoch_end(encoder, 10 * epoch, float(epoch)) == {"knn_top1": score}
            found += [(epoch, message) for message in caplog.messages]
        return found

    return run


def test_a_fall_is_warned_of(warnings_at: Callable[..., list[tuple[int, str]]]) -> None:
    """Measured from the best and not from the last score, and only beyond the tolerance."""
    first, second, third = warnings_at([50.0, 48.5, 47.75, 47.5, 55.0, 53.0, 52.25])
    assert first == (
        3,
        "kNN top-1 fell to 47.75 % at step 30, 2.25 points below the best so far, 50.00 % at step 10",
    )
    assert second[0] == 4, "it has not recovered"
    assert third == (
        7,
        "kNN top-1 fell to 52.25 % at step 70, 2.75 points below the best so far, 55.00 % at step 50",
    )


def test_a_fall_within_the_noise_of_few_test_images_is_not_warned_of(
    warnings_at: Callable[..., list[tuple[int, str]]],
) -> None:
    """360 test images: the standard error is 2.63 points at 54 %, and 0.52 at 99 %."""
    assert [epoch for epoch, _ in warnings_at([60.0, 54.9, 54.5], drop="null")] == [3]
    assert [epoch for epoch, _ in warnings_at([100.0, 98.1, 97.9], drop="null")] == [3]
    assert [epoch for epoch, _ in warnings_at([100.0, 98.1, 97.9])] == [3]


def test_the_best_score_survives_a_restart(warnings_at: Callable[..., list[tuple[int, str]]]) -> None:
    logged = [
        {"step": 3, "loss": 1.0},
        {"step": 4, "knn_top1": 58.5},
        {"step": 6, "knn_top1": 60.0},
        {"step": 8, "knn_top1": 59.0},
        {"step": 9, "loss": 0.5},
    ]
    assert warnings_at([57.0], logged) == [
        (1, "kNN top-1 fell to 57.00 % at step 10, 3.00 points below the best so far, 60.00 % at step 6")
    ]
    assert warnings_at([57.0]) == []


# What is refused


def images(root: Path, *folders: str) -> None:
    """Three grey images in each folder."""
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((32, 32), 60 * number, np.uint8)).save(root / folder / f"{number}.png")


@pytest.mark.parametrize(
    ("folders", "sentence"),
    [
        (("train/a", "train/b"), "every_epochs=1 needs test images: .* has no test split; set data.val_percent=10"),
        (("train/a", "val/a"), "every_epochs=1 needs at least two classes, and the images have one"),
        (("train", "val"), "every_epochs=1 needs labels, and the training images have none; put them into class"),
        (("train/a", "train/b", "val"), "every_epochs=1 needs labels, and the test images have none; put them into"),
    ],
)
def test_data_that_cannot_be_judged_is_refused(
    tmp_path: Path, configure: Callable[..., PretrainConfig], folders: tuple[str, ...], sentence: str
) -> None:
    images(tmp_path / "images", *folders)
    config = configure("data=folder", f"data.root={tmp_path / 'images'}", "data.channels=1", "data.image_size=[32,32]")
    with pytest.raises(DataError, match=sentence):
        OnlineKnn(config)


def test_a_broken_test_image_is_named_before_training(tmp_path: Path, configure: Callable[..., PretrainConfig]) -> None:
    images(tmp_path / "images", "train/a", "val/a")
    (tmp_path / "images" / "val" / "a" / "1.png").write_bytes(b"no picture")
    config = configure("data=folder", f"data.root={tmp_path / 'images'}", "data.channels=1", "data.image_size=[32,32]")
    with pytest.raises(DataError, match=r"needs test images: .*val/a/1\.png cannot be read as an image"):
        OnlineKnn(config)


def test_test_images_below_the_crop_are_an_error_of_the_image_size(
    tmp_path: Path, configure: Callable[..., PretrainConfig]
) -> None:
    images(tmp_path / "images", "train/a", "val/a")
    config = configure("data=folder", f"data.root={tmp_path / 'images'}", "data.channels=1", "data.image_size=[96,96]")
    with pytest.raises(DataError, match=r"^\S+/0\.png \(32x32\) cannot fill the 96x96 crop.*; lower data\.image_size"):
        OnlineKnn(config)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("online_knn.neighbours=201",), "neighbours must be at most the 200 images in the bank, got 201"),
        (("online_knn.pooling=cls", "backbone.class_token=false"), "pooling=cls needs backbone.class_token=true"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    configure: Callable[..., PretrainConfig], words: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        OnlineKnn(configure(*words))
