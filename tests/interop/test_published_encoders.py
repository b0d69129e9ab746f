"""Files that the code of other systems wrote at a tiny width, beside the features that it computed.

Each folder of ``official`` has a ``fixture.json``: repository, commit, licence and all that was done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dmjd.builders.model import build_classification
from dmjd.builders.weights import load_classifier
from dmjd.compose import compose
from dmjd.errors import CheckpointError
from dmjd.evaluate.convert import convert
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.evaluate.features import encode
from dmjd.ops.images import normalise

OFFICIAL = Path(__file__).parent / "official"
SYSTEMS = ("cae", "cae_atten4vis", "mcbeit", "data2vec", "sdae")
NOTES: dict[str, Any] = {system: json.loads((OFFICIAL / system / "fixture.json").read_text()) for system in SYSTEMS}
CASES = [
    pytest.param(system, case, id=f"{system}-{Path(case['file']).stem}-{case.get('weights', 'default')}")
    for system in SYSTEMS
    for case in NOTES[system]["cases"]
]


def expected_of(system: str) -> dict[str, Tensor]:
    return load_file(OFFICIAL / system / "expected.safetensors")


def described(system: str, case: Any) -> list[str]:
    return [*NOTES[system]["backbone"], *case.get("backbone", ())]


def encoder_of(path: Path, case: Any, *words: str) -> FrozenEncoder:
    which = [f"weights={case['weights']}"] if "weights" in case else []
    return load_encoder(compose("knn", [f"checkpoint={path}", "data=folder", "device=cpu", *which, *words]))


def check_features(frozen: FrozenEncoder, system: str, case: Any) -> None:
    """To 1e-5: all tokens, or the pooled features of a fine-tuned model."""
    expected = expected_of(system)
    pooling, key = ("mean", "pooled") if "pooled" in case else ("tokens", "features")
    mean, std = frozen.data.mean, frozen.data.std
    found = encode(frozen.encoder, expected["images"], mean=mean, std=std, pooling=pooling)
    torch.testing.assert_close(found, expected[case[key]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("system", "case"), CASES)
def test_features_are_those_of_their_own_code(system: str, case: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dmjd")
    path = OFFICIAL / system / case["file"]
    check_features(encoder_of(path, case, "data.image_size=[32,32]", *described(system, case)), system, case)
    assert case.get("note", "") in caplog.text
    # Without a description: only the attention heads of this width are unknown.
    check_features(encoder_of(path, case, "backbone.num_heads=2"), system, case)


@pytest.mark.parametrize(("system", "case"), [each for each in CASES if "logits" in each.values[1]])
def test_a_fine_tuned_file_begins_a_fine_tuning_with_its_head(system: str, case: Any) -> None:
    words = ["data.image_size=[32,32]", "head.pooling=mean", "head.norm=pooled", *described(system, case)]
    objective = build_classification(compose("finetune", ["init=x", "run=x", "data.root=x", *words]), 5).eval()
    assert load_classifier(objective, OFFICIAL / system / case["file"]).endswith("; with its head")
    expected, data = expected_of(system), compose("finetune", ["init=x", "run=x", "data.root=x"]).data
    with torch.no_grad():
        found = objective.model(normalise(expected["images"], data.mean, data.std))
    torch.testing.assert_close(found, expected[case["logits"]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("system", ["cae", "cae_atten4vis"])
def test_caes_encoder_is_converted_without_regressor_and_decoder(system: str, tmp_path: Path) -> None:
    file = OFFICIAL / system / "full.pth"
    whole = torch.load(file, weights_only=False)["model"]
    convert(compose("convert", [f"input={file}", f"output={tmp_path / 'cae.pth'}", "to=cae"]))
    written = torch.load(tmp_path / "cae.pth", weights_only=True)["model"]
    assert written.keys() == {name for name in whole if name.startswith("encoder.")}
    assert all(torch.equal(value, whole[name]) for name, value in written.items())
    case = NOTES[system]["cases"][0]
    check_features(encoder_of(tmp_path / "cae.pth", case, "backbone.num_heads=2"), system, case)


@pytest.mark.parametrize(
    ("system", "name", "message"),
    [
        ("cae", "encoder.blocks.1.gamma_2", r"1 missing \(encoder.blocks.1.gamma_2\)"),
        ("mcbeit", "rel_pos_bias.relative_position_bias_table", "lacks encoder.rel_pos_bias"),
        ("data2vec", "blocks.0.attn.q_bias", "features depend on blocks.0.attn.v_bias"),
        ("sdae", "blocks.1.mlp.fc2.bias", r"1 missing \(blocks.1.mlp.fc2.bias\)"),
    ],
)
def test_a_weight_that_features_depend_on_is_missed(system: str, name: str, message: str, tmp_path: Path) -> None:
    file = torch.load(OFFICIAL / system / "full.pth", weights_only=False)
    del file["model"][name]
    torch.save(file, tmp_path / "full.pth")
    with pytest.raises(CheckpointError, match=message):
        encoder_of(tmp_path / "full.pth", {}, "data.image_size=[32,32]", *described(system, {}))
