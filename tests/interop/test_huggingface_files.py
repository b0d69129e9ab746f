"""Folders of Hugging Face: tiny models that transformers saved, read by name, against what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from dmjd.compose import compose
from dmjd.errors import CheckpointError
from dmjd.evaluate.convert import convert
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.ops.images import normalise

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-6,
}
DECODER: dict[str, Any] = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ViT": ("ViTForImageClassification", "ViTConfig", {}),
    "bare ViT": ("ViTModel", "ViTConfig", {}),
    "ViTMAE": ("ViTMAEForPreTraining", "ViTMAEConfig", {**DECODER, "mask_ratio": 0.0}),
    "BEiT": ("BeitForMaskedImageModeling", "BeitConfig", {"use_shared_relative_position_bias": True}),
    "fine-tuned BEiT": ("BeitForImageClassification", "BeitConfig", {"use_relative_position_bias": True}),
    "data2vec": (
        "Data2VecVisionForImageClassification",
        "Data2VecVisionConfig",
        {"use_relative_position_bias": True, "use_absolute_position_embeddings": True},
    ),
}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def saved(kind: str, folder: Path, **options: Any) -> nn.Module:
    model, config, more = MODELS[kind]
    torch.manual_seed(0)
    made: Any = getattr(transformers, model)(getattr(transformers, config)(**SIZES, **more)).eval()
    for name, parameter in made.named_parameters():
        if not name.endswith("position_embeddings") or kind != "ViTMAE":  # whose positions are fixed
            nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder, **options)
    statistics = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(statistics))
    return made


def read(folder: Path, *words: str) -> FrozenEncoder:
    return load_encoder(compose("knn", [f"checkpoint={folder}", "device=cpu", *words]))


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_is_read_with_its_heads_size_and_statistics(kind: str, tmp_path: Path) -> None:
    model: Any = saved(kind, tmp_path / "model")
    base = model.base_model
    options: dict[str, Any] = {"noise": torch.arange(16.0).expand(2, -1)} if kind == "ViTMAE" else {}
    expected = base(IMAGES, **options).last_hidden_state
    if kind == "BEiT":
        expected = model.layernorm(expected)
    frozen = read(tmp_path / "model")
    torch.testing.assert_close(frozen.encoder(IMAGES), expected, rtol=1e-5, atol=1e-5)
    assert (frozen.trained.backbone.num_heads, frozen.data.image_size) == (2, [32, 32])
    assert frozen.run.path == tmp_path / "model"
    assert (frozen.data.mean, frozen.data.std) == ([0.5, 0.5, 0.5], [0.25, 0.5, 0.5])
    if "classifier.weight" in model.state_dict() and kind != "ViT":
        pooled = frozen.encoder.get_submodule("fc_norm")(frozen.encoder(IMAGES)[:, 1:].mean(1))
        torch.testing.assert_close(model.classifier(pooled), model(IMAGES).logits, rtol=1e-5, atol=1e-5)


def test_a_sharded_folder_is_the_same_and_a_missing_part_is_named(tmp_path: Path) -> None:
    saved("bare ViT", tmp_path / "whole")
    saved("bare ViT", tmp_path / "parts", max_shard_size="20KB")
    parts = sorted((tmp_path / "parts").glob("model-*.safetensors"))
    assert len(parts) > 1
    expected = read(tmp_path / "whole").encoder.state_dict()
    for source in (tmp_path / "parts", tmp_path / "parts" / "model.safetensors.index.json"):
        found = read(source).encoder.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    convert(compose("convert", [f"input={tmp_path / 'parts'}", f"output={tmp_path / 'timm.pth'}", "to=timm"]))
    found = read(tmp_path / "timm.pth", "backbone.num_heads=2").encoder.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    index = tmp_path / "parts" / "model.safetensors.index.json"
    parts[0].rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(
        CheckpointError, match=r"its part 'model-00001.* is not a file beside it; download the whole folder"
    ):
        read(tmp_path / "parts")
    for content, fault in (
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "is not a file beside it"),
        ('{"weight_map": 3}', "not an index of a sharded model"),
        ("[" * 100_000, "nested too deeply"),
    ):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=fault):
            read(tmp_path / "parts")
    torch.save([torch.ones(2)], tmp_path / "parts" / "list.bin")
    index.write_text('{"weight_map": {"a": "list.bin"}}')
    with pytest.raises(CheckpointError, match=r"its part 'list\.bin' holds a list, not weights by name$"):
        read(tmp_path / "parts")


def test_another_activation_is_rejected_and_values_of_other_types_are_not_used(tmp_path: Path) -> None:
    saved("bare ViT", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": "2"}))
    with pytest.raises(CheckpointError, match=r"backbone\.num_heads=N"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(CheckpointError, match="hidden_act='relu', and dmjd's encoders have gelu"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 0.01}))
    with pytest.raises(CheckpointError, match=r"layer_norm_eps=0\.01, and dmjd's encoders have 1e-06"):
        read(tmp_path)


PROCESSORS: dict[str, dict[str, Any]] = {
    "usual": {"rescale_factor": 1 / 255},
    "not rescaled": {"do_rescale": False, "image_mean": [127.5, 51.0, 0.0], "image_std": [63.75, 127.5, 255.0]},
    "to -1..1": {"rescale_factor": 1 / 127.5},
    "not normalised": {"do_normalize": False},
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_are_normalised_as_by_the_processor_of_the_folder(case: str, tmp_path: Path) -> None:
    saved("bare ViT", tmp_path)
    options = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.25, 0.5, 0.5]} | PROCESSORS[case]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    images = torch.randint(0, 256, (1, 32, 32, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    processor = transformers.ViTImageProcessor(**options, do_resize=False)
    expected = processor(images=images[0].numpy(), return_tensors="pt", input_data_format="channels_last")
    data = read(tmp_path).data
    torch.testing.assert_close(normalise(images, data.mean, data.std), expected["pixel_values"])


@pytest.mark.parametrize("std", [[1e-300, 0.5, 0.5], [True, True, True], ["0.5"] * 3, [0.0] * 3])
def test_statistics_that_no_processor_has_are_not_used(std: list[Any], tmp_path: Path) -> None:
    saved("bare ViT", tmp_path)
    statistics = {"image_mean": [0.5, 0.5, 0.5], "image_std": std}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(statistics))
    data = read(tmp_path).data
    assert (data.mean, data.std) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
