"""The probe protocols by name: each end to end on tiny encoders, and against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmjd.builders import build_encoder
from dmjd.compose import compose, to_yaml
from dmjd.config import BackboneConfig
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.dataset import ArrayDataset, EvenSubset, ImageDataset
from dmjd.errors import ConfigError, DataError
from dmjd.evaluate import Context, Scores, describe, linprobe
from dmjd.evaluate.attentive import AttentiveHead
from dmjd.evaluate.encoder import FrozenEncoder
from dmjd.evaluate.features import Features
from dmjd.evaluate.linprobe import PROTOCOLS, LinprobeConfig, run
from dmjd.evaluate.probe import CachedFeatures, LayerHeads, Recipe, linear_probe
from dmjd.ops import make_key, philox
from dmjd.runs.folder import RunFolder

CLASSES, TRAIN, TEST = 3, 48, 21
CPU = torch.device("cpu")
BACKBONES = {
    "vit": ("backbone.patch_size=8", "backbone.class_token=true", "backbone.depth=3"),
    "convvit": (
        *(
            "backbone=convvit_base",
            "backbone.patch_size=16",
            "backbone.depth=2",
            "backbone.conv_stages.embed_dims=[8,16]",
        ),
        *("backbone.conv_stages.depths=[1,1]", "backbone.conv_stages.mlp_ratios=[2,2]", "data.image_size=[32,32]"),
    ),
    "swin": (
        *(
            "backbone=swin_base",
            "backbone.patch_size=32",
            "backbone.windows.depths=[1,1,1,2]",
            "backbone.windows.num_heads=[1,1,2,4]",
        ),
        *("backbone.windows.size=2", "data.image_size=[64,64]"),
    ),
}


@dataclass(frozen=True)
class Frozen(FrozenEncoder):
    """An encoder with images of its own: noise around a level per class."""

    def dataset(self, split: str, count: int | None = None) -> ImageDataset:
        total = TRAIN if split == "train" else TEST
        labels = np.arange(total) % CLASSES
        rng = np.random.default_rng(len(split))
        levels = 60 * (1 + labels[:, None, None, None]) + rng.normal(0, 25, (total, *self.size, 1))
        dataset = ArrayDataset(levels.clip(0, 255).astype(np.uint8), labels, CLASSES, split)
        return dataset if count is None else EvenSubset(dataset, count)


@pytest.fixture(scope="module")
def frozen_of() -> Callable[[str], Frozen]:
    kept: dict[str, Frozen] = {}

    def build(name: str) -> Frozen:
        if name not in kept:
            small = ("backbone.embed_dim=32", "backbone.num_heads=4", "backbone.mlp_ratio=2")
            trained = compose("pretrain", ["experiment=demo", *BACKBONES[name], *small])
            torch.manual_seed(0)
            encoder = build_encoder(trained).requires_grad_(False).eval()
            for parameter in encoder.parameters():
                parameter.normal_(0, 0.3)  # so that no norm is the identity
            size = trained.data.image_size[0], trained.data.image_size[1]
            place = Path("nowhere")
            text, folder = to_yaml(trained), RunFolder(place)
            kept[name] = Frozen(encoder, trained, text, trained.data, {}, size, CPU, 5, place, folder)
        return kept[name]

    return build


def probe(frozen: Frozen, *overrides: str) -> Scores:
    config = compose("linprobe", ["checkpoint=nowhere", "workers=0", "device=cpu", *overrides])
    return run(Context(config, frozen, "labels"))


def tokens_of(frozen: Frozen, split: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Blocks' outputs ``[N, T, D]`` of the last stage, the encoder's output, and the labels, from the modules."""
    data = frozen.dataset(split)
    pixels = torch.stack([torch.from_numpy(data.image(index)) for index in range(len(data))]).permute(0, 3, 1, 2) / 255
    images = (pixels - frozen.data.mean[0]) / frozen.data.std[0]
    encoder: Any = frozen.encoder
    labels = torch.tensor([data.label(index) for index in range(len(data))])
    outputs = []
    with torch.no_grad():
        if frozen.trained.backbone.name == "vit":
            x = torch.cat(
                (encoder.cls_token.expand(len(images), 1, -1), encoder.patch_embed(images) + encoder.positions), 1
            )
            blocks = encoder.blocks
        elif frozen.trained.backbone.name == "convvit":
            x, blocks = images.permute(0, 2, 3, 1), encoder.blocks3
            for embedding, stage in ((encoder.patch_embed1, encoder.blocks1), (encoder.patch_embed2, encoder.blocks2)):
                x = embedding(x)
                for block in stage:
                    x = block(x)
            x = encoder.patch_embed4(encoder.patch_embed3(x)).flatten(1, 2) + encoder.positions
        else:
            x = encoder.patch_embed(images)
            for stage in encoder.layers[:3]:
                x = stage(x)
            x, blocks = encoder.layers[3].downsample(x), encoder.layers[3].blocks
        for block in blocks:
            x = block(x)
            outputs.append(x if x.ndim == 3 else x.flatten(1, 2))
        return outputs, encoder.norm(outputs[-1]), labels


def order_of(epoch: int) -> Tensor:
    rows = CachedFeatures(Features(torch.arange(TRAIN), torch.arange(TRAIN)), seed=0)
    return torch.cat([labels for _, labels in rows.epoch_features(epoch)])


# Published values


@pytest.mark.parametrize(
    ("protocol", "size", "expected"),
    [
        ("mae", (768, 12), (16384, 0.1, 90, 10)),
        ("mae", (1024, 24), (16384, 0.1, 50, 10)),
        ("mae", (1280, 32), (16384, 0.1, 50, 10)),
        ("convmae", (768, 11), (4096, 0.1, 90, 10)),
        ("dmjd", (768, 11), (4096, 0.1, 90, 10)),
        ("dmjd", (1024, 23), (4096, 0.05, 50, 10)),
        ("dmjd", (96, 4), (4096, 0.1, 90, 10)),
        ("beit", (1024, 24), (1024, 1e-3, 100, 0)),
        ("attentive", (1280, 32), (1024, 2.5e-4, 20, 0)),
    ],
)
def test_a_protocol_has_the_published_values(
    protocol: str, size: tuple[int, int], expected: tuple[int, float, int, int]
) -> None:
    backbone, named = BackboneConfig(embed_dim=size[0], depth=size[1]), ["checkpoint=x", f"protocol={protocol}"]
    assert linprobe._recipe(compose("linprobe", named), backbone, 1_281_024) == Recipe(*expected)
    typed = compose("linprobe", [*named, "batch_size=64", "base_lr=3", "epochs=33"])
    assert linprobe._recipe(typed, backbone, 100) == Recipe(64, 3, 33, expected[3])


def test_peaks_are_those_of_the_publications() -> None:
    peaks = {"mae": 6.4, "convmae": 1.6, "dmjd": 1.6, "beit": 4e-3, "attentive": 1e-3}
    for name, peak in peaks.items():
        config = compose("linprobe", ["checkpoint=x", f"protocol={name}"])
        assert linprobe._recipe(config, BackboneConfig(), 10**6).peak == pytest.approx(peak)


def test_random_crops_of_one_draw_are_byols() -> None:
    """Area and ratio of the first attempt, cut to the image (facebookresearch/mae, util/crop.py)."""
    ids, key = torch.arange(500), make_key(0, 0)
    crop = RandomResizedCrop((8, 8), scale=(0.08, 1.0), single_draw=True)
    draws, boxes = crop.draw(ids, key), set()
    words = philox.keyed_uniform(ids, 4, key=key, domain=philox.Domain.CROP).tolist()
    for row, (u_area, u_ratio, u_top, u_left) in enumerate(words):
        height, width = 40, 90
        area = height * width * (0.08 + 0.92 * u_area)
        ratio = math.exp(math.log(3 / 4) + u_ratio * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = min(round(math.sqrt(area * ratio)), width), min(round(math.sqrt(area / ratio)), height)
        expected = int(u_top * (height - h + 1)), int(u_left * (width - w + 1)), h, w
        assert draws.box(row, height, width) == expected
        boxes.add(expected)
    assert any(h == 40 for _, _, h, _ in boxes), "some attempts were larger than the image"


# End to end


@pytest.mark.parametrize(
    ("backbone", "protocol"),
    [*[("vit", name) for name in PROTOCOLS], ("convvit", "mae"), ("swin", "beit"), ("swin", "attentive")],
)
def test_a_protocol_end_to_end(frozen_of: Callable[[str], Frozen], backbone: str, protocol: str) -> None:
    frozen = frozen_of(backbone)
    overrides = (f"protocol={protocol}", "batch_size=16", "epochs=2", "warmup_epochs=1", "seed=4")
    first = probe(frozen, *overrides)
    has_cls = backbone == "vit"
    if has_cls:
        assert probe(frozen, *overrides) == first, "a function of its settings"
    pooling = {"mae": "cls" if has_cls else "mean", "beit": "cls and mean" if has_cls else "mean"}
    interpolation = "bilinear" if protocol == "beit" else "bicubic"
    layers = 3 if has_cls else 2
    assert first.settings == {
        "protocol": protocol,
        "pooling": pooling.get(protocol, "attention" if protocol == "attentive" else "mean"),
        "augment": True,
        "train_images": TRAIN,
        **Context(LinprobeConfig(), frozen, "labels").image_settings(),
        "seed": 4,
        "epochs": 2,
        "warmup_epochs": 1,
        "batch_size": 16,
        "lr": PROTOCOLS[protocol].base_lr / 16,
        **{"crop_scale": [0.08, 1.0], "crop_ratio": [0.75, 4 / 3], "interpolation": interpolation, "flip": True},
        **({"selection": f"best of {layers} layers on the test images"} if protocol == "beit" else {}),
    }
    values = {name: value for name, value in first.values.items() if value is not None}
    assert values["top1"] * TEST / 100 == pytest.approx(round(values["top1"] * TEST / 100))
    if protocol == "beit":
        by_layer = [values[f"top1_layer_{number}"] for number in range(1, layers + 1)]
        assert values["top1"] == max(by_layer) == by_layer[int(values["best_layer"]) - 1]
    if (backbone, protocol) == ("vit", "beit"):
        (line,) = describe({"verb": "linprobe", "weights": "trained", "step": 5, **values, "settings": first.settings})
        assert "; trained, step 5, protocol beit, best of 3 layers on the test images, " in line


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_protocol_on_a_gpu_equals_that_on_the_cpu(frozen_of: Callable[[str], Frozen], protocol: str) -> None:
    frozen, device = frozen_of("vit"), torch.device("cuda")
    moved = replace(frozen, encoder=deepcopy(frozen.encoder).to(device), device=device)
    scores = [
        probe(each, f"protocol={protocol}", "batch_size=16", "epochs=4", "warmup_epochs=0") for each in (frozen, moved)
    ]
    assert scores[0].settings == scores[1].settings
    assert scores[1].values["final_loss"] == pytest.approx(scores[0].values["final_loss"], rel=1e-3)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_linear_protocols_read_the_published_feature(frozen_of: Callable[[str], Frozen], backbone: str) -> None:
    """mae: the class token after the encoder's norm. The mean: before it, with a LayerNorm without trained values."""
    frozen, prefix = frozen_of(backbone), backbone == "vit"
    values: dict[str, list[Features]] = {"cls": [], "mean": []}
    for split in ("train", "test"):
        blocks, tokens, labels = tokens_of(frozen, split)
        mean = blocks[-1][:, int(prefix) :].mean(dim=1)
        centred = mean - mean.mean(dim=1, keepdim=True)
        normalised = centred / (centred.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
        values["cls"].append(Features(tokens[:, 0], labels))
        values["mean"].append(Features(normalised, labels))
    steps = ("batch_size=16", "base_lr=100", "epochs=12", "augment=false")
    cases = [("dmjd", "mean", ""), ("convmae", "mean", ""), ("mae", "cls" if prefix else "mean", "")]
    cases += [("mae", "mean", "pooling=mean")]
    for protocol, pooled, more in cases:
        (train, test), scores = values[pooled], probe(frozen, f"protocol={protocol}", *steps, *more.split())
        recipe: dict[str, Any] = {"epochs": 12, "batch_size": 16, "base_lr": 100, "warmup_epochs": 10}
        expected = linear_probe(CachedFeatures(train, seed=0), test, CLASSES, **recipe, seed=0, device=CPU)
        assert scores.values["final_loss"] == pytest.approx(expected.final_loss, rel=1e-4)
        assert scores.values["top1"] == pytest.approx(expected.top1, abs=101 / TEST)
        assert scores.settings["pooling"] == pooled


@pytest.mark.parametrize("backbone", ["vit", "convvit", "swin"])
def test_every_layer_of_beits_probe_equals_its_own_training(frozen_of: Callable[[str], Frozen], backbone: str) -> None:
    """torch's own linear layer, AdamW and schedule, one layer after the other."""
    frozen, epochs, prefix = frozen_of(backbone), 6, backbone == "vit"
    scores = probe(frozen, "protocol=beit", "batch_size=16", "base_lr=0.1", f"epochs={epochs}", "augment=false")
    (outputs, _, labels), (tested, _, expected) = tokens_of(frozen, "train"), tokens_of(frozen, "test")

    def feature(tokens: Tensor) -> Tensor:
        return torch.cat((tokens[:, 0], tokens[:, 1:].mean(1)), 1) if prefix else tokens.mean(1)

    initial = LayerHeads(len(outputs), feature(outputs[0]).shape[1], CLASSES, seed=0)
    top1, losses = [], []
    for layer, (train, test) in enumerate(zip(outputs, tested, strict=True)):
        linear = nn.Linear(feature(train).shape[1], CLASSES)
        linear.load_state_dict({"weight": initial.weight[layer].detach(), "bias": torch.zeros(CLASSES)})
        optimizer = torch.optim.AdamW(linear.parameters(), 0.1 * 16 / 256, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for epoch in range(epochs):
            loss = torch.zeros(())
            for rows in order_of(epoch).split(16):
                each = F.cross_entropy(linear(feature(train)[rows]), labels[rows])
                optimizer.zero_grad()
                each.backward()
                optimizer.step()
                loss += each.detach() / 3
            scheduler.step()
        losses.append(float(loss))
        top1.append(100 * float((linear(feature(test)).argmax(1) == expected).float().mean()))
    assert [scores.values[f"top1_layer_{number}"] for number in range(1, len(top1) + 1)] == pytest.approx(top1)
    assert scores.values["final_loss"] == pytest.approx(losses[int(scores.values["best_layer"] or 0) - 1], rel=1e-4)
    assert len(set(losses)) == len(losses)


def test_weights_of_layers_start_normal_and_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    heads = LayerHeads(4, 300, 100, seed=1)
    AttentiveHead(8, 2, 3, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for weight in heads.weight:
        assert weight.std().item() == pytest.approx(0.01, rel=5 / math.sqrt(2 * weight.numel()))
    assert not heads.bias.any()
    assert not torch.equal(heads.weight[0], heads.weight[1])


# The attentive probe


def attend(head: Any, tokens: Tensor, heads: int) -> Tensor:
    """V-JEPA's attentive classifier of one image ``[T, D]``, one attention head at a time."""

    def norm(x: Tensor, module: nn.LayerNorm) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * (
            module.weight
        ) + module.bias

    attention: Any = head.attention
    normed, query = norm(tokens, head.norm1), head.query[0]
    projected = zip(
        attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), (query, normed, normed), strict=True
    )
    q, k, v = (x @ weight.T + bias for weight, bias, x in projected)
    parts = []
    for each_q, each_k, each_v in zip(q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1), strict=True):
        parts.append((each_q @ each_k.T / math.sqrt(each_q.shape[1])).softmax(1) @ each_v)
    x = query + torch.cat(parts, 1) @ attention.out_proj.weight.T + attention.out_proj.bias
    hidden = F.gelu(norm(x, head.norm2) @ head.mlp.fc1.weight.T + head.mlp.fc1.bias)
    x = x + hidden @ head.mlp.fc2.weight.T + head.mlp.fc2.bias
    return (x @ head.linear.weight.T + head.linear.bias)[0]


def test_the_attentive_head_equals_its_formulas() -> None:
    head: Any = AttentiveHead(16, 4, 5, seed=0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 5)
        tokens = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(head(tokens), torch.stack([attend(head, each, 4) for each in tokens]))
        assert torch.equal(head(tokens[:, [3, 1, 6, 0, 2, 5, 4]]).argmax(1), head(tokens).argmax(1))


def test_the_attentive_head_starts_as_v_jepas() -> None:
    head = AttentiveHead(256, 4, 1000, seed=0)
    for weight, std in ((head.mlp.fc1.weight, 0.02), (head.mlp.fc2.weight, 0.02 / math.sqrt(2))):
        assert weight.std().item() == pytest.approx(std, rel=0.01)
    assert head.attention.out_proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(2), rel=0.02)
    assert head.linear.weight.abs().max().item() == pytest.approx(1 / 16, rel=1e-3)
    assert bool((head.norm1.weight == 1).all() and (head.norm2.weight == 1).all())
    decays = {len(group["params"]): group["weight_decay"] for group in head.optimizer().param_groups}
    assert decays == {6: 1e-3, 9: 0.0}, "no decay of biases and norms"


def test_attentive_training_equals_a_replay(frozen_of: Callable[[str], Frozen]) -> None:
    """AdamW with clipped gradients, a cosine per step, and tokens that are kept in half precision."""
    frozen, epochs = frozen_of("vit"), 8
    scores = probe(frozen, "protocol=attentive", "batch_size=16", "base_lr=0.05", f"epochs={epochs}", "augment=false")
    (_, tokens, labels), (_, tested, expected) = tokens_of(frozen, "train"), tokens_of(frozen, "test")
    head = AttentiveHead(32, 4, CLASSES, seed=0)
    optimizer, losses = head.optimizer(), list[float]()
    for epoch in range(epochs):
        for rows in order_of(epoch).split(16):
            lr = 0.05 / 16 * (1 + math.cos(math.pi * len(losses) / (3 * epochs))) / 2
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = F.cross_entropy(head(tokens[rows].half().float()), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert scores.values["final_loss"] == pytest.approx(sum(losses[-3:]) / 3, rel=1e-3)
    hits = (head(tested).argmax(1) == expected).float().mean()
    assert scores.values["top1"] == pytest.approx(100 * float(hits), abs=101 / TEST)


# Few-shot


def test_a_probe_of_few_labels(frozen_of: Callable[[str], Frozen], tmp_path: Path) -> None:
    steps = ("protocol=dmjd", "batch_size=6", "epochs=2", "warmup_epochs=1", "augment=false")
    share = probe(frozen_of("vit"), *steps, "few_shot=12.5")
    assert share.settings["train_images"] == 6
    assert share.settings["few_shot"] == 12.5
    (tmp_path / "names").write_text("".join(f"train[{number}]\n" for number in range(6)))
    listed = probe(frozen_of("vit"), *steps, f"labels={tmp_path / 'names'}")
    assert (listed.settings["train_images"], listed.settings["few_shot"]) == (6, "list")
    assert listed.settings["few_shot_images"] != share.settings["few_shot_images"]
    assert len(probe(frozen_of("vit"), *steps, "few_shot=50", "train_images=6").values) == len(share.values)


# Errors


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("protocol=mae", r"protocol=mae has batch_size=16384, and there are 48 training images; set batch_size \("),
        ("protocol=mae few_shot=10 batch_size=16", "batch_size must be between 2 and the 6 training images, got 16"),
        ("protocol=dmjd batch_size=16 epochs=5", "warmup_epochs must be below epochs=5, got 10; set warmup_epochs"),
        ("protocol=beit train_images=1", "a probe needs at least 2 training images, got 1"),
        ("protocol=attentive batch_size=8 augment=false", r"augment=false would keep 0\.0 GiB of features, at most 0"),
        ("protocol=auto labels=nowhere.txt", "labels=nowhere.txt cannot be read: No such file"),
    ],
    ids=lambda value: value.split(" ")[0] + " " + value.split(" ")[-1],
)
def test_what_a_protocol_lacks_is_one_line_before_images_are_encoded(
    frozen_of: Callable[[str], Frozen], monkeypatch: pytest.MonkeyPatch, overrides: str, message: str
) -> None:
    monkeypatch.setattr(FrozenEncoder, "features", lambda *arguments: pytest.fail("images were encoded"))
    monkeypatch.setattr(linprobe, "CACHE_BYTES", 100)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        probe(frozen_of("vit"), *overrides.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("protocol", ["convmae", "dmjd", "beit", "attentive"])
def test_a_pooling_that_a_protocol_does_not_have_is_an_error_before_the_checkpoint_is_loaded(protocol: str) -> None:
    with pytest.raises(ConfigError, match=f"protocol={protocol} sets the feature itself: leave pooling=cls out"):
        compose("linprobe", ["checkpoint=nowhere", f"protocol={protocol}", "pooling=cls"])
    with pytest.raises(ConfigError, match=r"few_shot must be above 0 and below 100, got 100"):
        compose("linprobe", ["checkpoint=nowhere", "few_shot=100"])


def test_typed_interpolation_holds(frozen_of: Callable[[str], Frozen]) -> None:
    config = compose("linprobe", ["checkpoint=x", "protocol=beit", "data.interpolation=bicubic"])
    assert linprobe._crop_data(frozen_of("vit"), config).interpolation == frozen_of("vit").data.interpolation
    del config.data_keys[:]
    assert linprobe._crop_data(frozen_of("vit"), config).interpolation == "bilinear"
