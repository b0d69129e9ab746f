from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

import dmjd as package
from dmjd.builders import build_encoder, build_objective, target_dim
from dmjd.builders.weights import load_weights
from dmjd.compose import compose, from_yaml, to_yaml
from dmjd.config import EvaluationConfig, PretrainConfig
from dmjd.errors import CheckpointError, ConfigError, UserError
from dmjd.evaluate import export as room
from dmjd.evaluate.convert import convert
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.evaluate.export import export, sidecar
from dmjd.masking import MaskedViews
from dmjd.ops.views import Views
from dmjd.positions import sincos_positions
from dmjd.runs.folder import RunFolder
from dmjd.train import loop

Words = Callable[..., list[str]]
Command = Callable[..., tuple[int, str, str]]

STEP = "step-00000011"
NAME = "encoder-trained-step00000011-fp32.safetensors"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def exported(checkpoint: Path, *words: str) -> Path:
    return export(compose("export", [f"checkpoint={checkpoint}", *words])).path


def card_of(path: Path) -> dict[str, Any]:
    return json.loads(sidecar(path).read_text())


def rebuild(path: Path) -> Any:
    """What a stranger does who has the two files and timm."""
    card = card_of(path)
    return timm.create_model(card["architecture"], checkpoint_path=str(path), **card["arguments"]).eval()


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def trained_encoder(run: Path, weights: str = "trained") -> dict[str, Tensor]:
    return load_encoder(EvaluationConfig(checkpoint=str(run), weights=weights, device="cpu")).encoder.state_dict()


def config_of(run: Path) -> PretrainConfig:
    return from_yaml(PretrainConfig, (run / "config.yaml").read_text())


def tokens_of(state: dict[str, Tensor], config: PretrainConfig, images: Tensor) -> Tensor:
    """A ViT written down from its definition, in float64."""
    w = {name: value.double() for name, value in state.items()}
    backbone, dim = config.backbone, config.backbone.embed_dim
    grid = (images.shape[2] // backbone.patch_size, images.shape[3] // backbone.patch_size)
    x = F.conv2d(images.double(), w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=backbone.patch_size)
    x = x.flatten(2).mT + w.get("pos_embed", sincos_positions(grid, dim)).double()  # learned ones without a class token
    if "cls_token" in w:
        x = torch.cat((w["cls_token"].expand(len(x), -1, -1), x), dim=1)

    def norm(x: Tensor, name: str) -> Tensor:
        scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    for index in range(backbone.depth):
        block = f"blocks.{index}"
        q, k, v = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").chunk(3, dim=-1)
        heads = []
        for part in range(backbone.num_heads):
            width = dim // backbone.num_heads
            of = slice(part * width, (part + 1) * width)
            heads.append(torch.softmax(q[..., of] @ k[..., of].mT / width**0.5, dim=-1) @ v[..., of])
        x = x + linear(torch.cat(heads, dim=-1), f"{block}.attn.proj")
        hidden = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        x = x + linear(hidden, f"{block}.mlp.fc2")
    return norm(x, "norm")


def agrees(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


VIT = ("backbone.embed_dim=24", "backbone.depth=2", "backbone.num_heads=3", "backbone.patch_size=8")
SQUARE, WIDE = ("data=folder", "data.image_size=[32,32]"), ("data=folder", "data.image_size=[32,48]")
WINDOWS = "backbone.windows={depths:[1,2,1,1],num_heads:[1,1,2,2],size:4}"
STAGES = "backbone.conv_stages={embed_dims:[8,12],depths:[1,1]}"
KINDS = {
    "mae": ("experiment=mae_vit_base", *VIT, *SQUARE),
    "no class token": ("experiment=mae_vit_base", *VIT, *WIDE, "backbone.class_token=false"),
    "odd MLP, grey": ("experiment=mae_vit_base", *VIT, *WIDE, "backbone.mlp_ratio=2.3", "data.channels=1"),
    "maskfeat": ("experiment=maskfeat_token_vit_base", *VIT, *SQUARE),
    "beit": ("experiment=beit_vit_base", *VIT, *WIDE),
    "beit absolute": ("experiment=beit_vit_base_absolute", *VIT, *SQUARE),
    "simmim": ("experiment=simmim_vit_base", *VIT, *WIDE, "backbone.class_token=false"),
    "simmim absolute": (
        *("experiment=simmim_vit_base", *VIT, *SQUARE, "backbone.class_token=false", "backbone.positions=sincos"),
        "backbone.layer_scale=null",
    ),
    "data2vec": ("experiment=data2vec_vit_base", *VIT, *SQUARE),
    "mvp": ("experiment=mvp_vit_base", *VIT, *SQUARE),
    "swin": ("experiment=simmim_swin_base", "data=folder", "data.image_size=[64,96]", "backbone.embed_dim=64", WINDOWS),
    "convvit": (
        *("experiment=dmjd_convvit_base_hog", *WIDE, "backbone.embed_dim=24", "backbone.depth=1"),
        *("backbone.num_heads=3", STAGES),
    ),
}
# One step at a high rate, which moves every parameter away from the ones and zeros it began as.
ONE_STEP = ("batch_size=1024", "optim.warmup_epochs=0", "optim.base_lr=5e-3")


Frozen = Callable[..., FrozenEncoder]


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Frozen:
    """``frozen(*words)``: the encoder of a configuration with drawn weights, which the next export reads."""

    def make(*words: str) -> FrozenEncoder:
        config = compose("pretrain", ["run=x", *words])
        if config.data.channels == 1:
            config.data.mean, config.data.std = [0.4], [0.3]
        torch.manual_seed(0)
        encoder = build_encoder(config).eval().requires_grad_(False)
        for parameter in encoder.parameters():  # none stays at one or zero
            nn.init.normal_(parameter, std=0.2)
        run, size = RunFolder(tmp_path / "drawn"), (config.data.image_size[0], config.data.image_size[1])
        run.path.mkdir(exist_ok=True)
        made = FrozenEncoder(
            encoder, config, to_yaml(config), config.data, {}, size, torch.device("cpu"), 7, run.path / "step", run
        )
        monkeypatch.setattr(room, "load_encoder", lambda _: made)
        return made

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_every_encoder_is_a_model_of_timm(kind: str, frozen: Frozen, caplog: pytest.LogCaptureFixture) -> None:
    """The pasted line gives the encoder's tokens, and their mean from the model itself; and the file is read again
    without a description, as its header and its tensors show it."""
    made = frozen(*KINDS[kind])
    with caplog.at_level("INFO", "dmjd"):
        path, line = export(compose("export", [f"checkpoint={made.run.path}"]))
    pasted: dict[str, Any] = {}
    exec(line, pasted)
    model, data, encoder = pasted["model"], made.trained.data, made.encoder
    images = torch.randn(3, data.channels, *made.size)
    with torch.no_grad():
        expected, found = encoder(images), model.forward_features(images)
        assert agrees(found.flatten(1, 2) if found.ndim == 4 else found, expected)
        assert agrees(model(images), expected[:, encoder.num_prefix_tokens :].mean(1))
    card = card_of(path)
    preprocessing = timm.data.resolve_model_data_config(model)
    assert (preprocessing["mean"], preprocessing["std"]) == (data.mean, data.std) == (card["mean"], card["std"])
    assert card["load"] == line.replace(str(path), path.name)
    assert ("mask_token" in card["left_out"]) == (encoder.mask_token is not None)
    assert ("left out: mask_token" in caplog.text) == (encoder.mask_token is not None)
    if "relpos" not in card["architecture"]:  # whose names are timm's alone
        again = load_encoder(compose("knn", [f"checkpoint={path}", "device=cpu"]))
        assert (again.size, again.data.mean, again.data.std) == (made.size, data.mean, data.std)
        with torch.no_grad():
            assert agrees(again.encoder(images), expected)


def test_a_longer_run(run: Path) -> None:
    """Against a ViT that is written down from its definition."""
    path, config = exported(run), config_of(run)
    images = torch.randn(3, config.data.channels, *config.data.image_size)
    expected = tokens_of(trained_encoder(run), config, images)
    with torch.no_grad():
        assert agrees(rebuild(path).forward_features(images), expected)


def test_an_oblong_grid_is_noted(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 x 16 tokens are as many as 8 x 8: from the table of positions alone nobody could tell."""
    words = (*KINDS["maskfeat"], "data.image_size=[32,128]", "backbone.class_token=false")
    made = frozen(*words)
    path = exported(made.run.path)
    assert (card_of(path)["token_grid"], card_of(path)["arguments"]["img_size"]) == ("4x16", [32, 128])
    monkeypatch.undo()
    read = load_encoder(compose("knn", [f"checkpoint={path}", "device=cpu", *words])).encoder.state_dict()
    trained = made.encoder.state_dict()
    assert all(torch.equal(read[name], value) for name, value in trained.items() if name != "mask_token")


def test_the_sidecar_says_what_the_file_is(run: Path) -> None:
    path = exported(run)
    assert path == run / "export" / NAME
    card = card_of(path)
    config = run / "checkpoints" / STEP / "config.yaml"
    assert card.pop("arguments")["patch_size"] == 4
    assert "timm.create_model('vit_tiny_patch16_224', checkpoint_path='encoder-" in card.pop("load")
    assert card == {
        "architecture": "vit_tiny_patch16_224",
        "pooling": "mean",
        "token_grid": "8x8",
        "mean": [0.219],
        "std": [0.333],
        "dtype": "fp32",
        "weights": "trained",
        "step": 11,
        "left_out": [],
        "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest(),
        "dmjd": package.__version__,
        "timm": timm.__version__,
    }
    with safetensors.safe_open(path, "pt") as file:
        header = file.metadata()
    assert header.keys() == {"dmjd"}
    assert json.loads(header["dmjd"]) == card_of(path)


# Other formats


@pytest.mark.parametrize("kind", ["mae", pytest.param("simmim", marks=pytest.mark.long)])
def test_onnxruntime_computes_the_features_at_any_batch(kind: str, frozen: Frozen) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra dmjd[onnx] is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra dmjd[onnx] is not installed")
    made = frozen(*KINDS[kind])
    path = exported(made.run.path, "format=onnx")
    assert path.suffix == ".onnx"
    session = onnxruntime.InferenceSession(path)
    prefix = made.encoder.num_prefix_tokens
    names = ["pooled", "patch_tokens", *["class_token"] * prefix]
    assert [output.name for output in session.get_outputs()] == names
    for batch in (1, 5):
        images = torch.randn(batch, 3, *made.size)
        with torch.no_grad():
            tokens = made.encoder(images)
        expected = [tokens[:, prefix:].mean(1), tokens[:, prefix:], tokens[:, 0]]
        for found, wanted in zip(session.run(names, {"images": images.numpy()}), expected, strict=False):
            assert agrees(torch.from_numpy(found), wanted)
    noted = {entry.key: json.loads(entry.value) for entry in onnx.load(path).metadata_props}
    assert (noted["mean"], noted["std"]) == (made.data.mean, made.data.std)
    assert noted == card_of(path)


def test_onnx_without_its_packages_names_the_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmjd.evaluate.onnx_model.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs onnx, onnxruntime, onnxscript; pip install 'dmjd\[onnx\]'"):
        exported(run, "format=onnx")


@pytest.mark.parametrize("kind", ["mae", "maskfeat"])
def test_transformers_computes_the_features(kind: str, frozen: Frozen) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    made = frozen(*KINDS[kind])
    own = {"data": made.source, "crop_pct": made.data.crop_pct, "mean": made.data.mean, "std": made.data.std, "k": 20}
    score = {"verb": "knn", "weights": "trained", "step": 7, "top1": 81.25, "test_images": 36, "chance": 10.0}
    made.run.write_evaluation("knn", {**score, "untrained": 40.5, "settings": own})
    for key, value in (("data", "digits, 32x32"), ("crop_pct", 0.5), ("mean", [0.25])):
        made.run.write_evaluation(f"other-{key}", {**score, "top1": 11.5, "settings": own | {key: value}})
    made.run.write_evaluation("other", {**score, "step": 8, "top1": 11.5, "settings": own})
    for _ in range(2):  # an earlier export is replaced
        path, line = export(compose("export", [f"checkpoint={made.run.path}", "format=huggingface"]))
    assert not [name for name in made.run.path.iterdir() if name.name.startswith(".")]
    model, report = transformers.AutoModel.from_pretrained(path, output_loading_info=True)
    assert isinstance(model, transformers.ViTModel)
    assert not any(report.values())
    images = torch.randn(2, 3, *made.size)
    with torch.no_grad():
        expected, found = made.encoder(images), model.eval()(images)
    assert agrees(found.last_hidden_state, expected)
    assert agrees(found.pooler_output, expected[:, 0])
    text = (path / "README.md").read_text()
    assert "| knn top-1 | 81.25 % (untrained 40.50 %, chance 10.00 %, 36 test images, k 20) |" in text
    assert "11.5" not in text
    assert str(path.parent) not in text
    assert line.replace(str(path), path.name) in text
    processor = json.loads((path / "preprocessor_config.json").read_text())
    assert (processor["image_mean"], processor["size"]) == (made.data.mean, {"shortest_edge": 37})  # 32 / .875, up


def test_transformers_reads_shards_and_so_do_we(frozen: Frozen, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    made = frozen(*KINDS["mae"])
    words = [f"checkpoint={made.run.path}", "format=huggingface", "shard_size=20KB", f"output={tmp_path / 'sharded'}"]
    for _ in range(2):  # an earlier export is replaced
        path, _ = export(compose("export", words))
    assert len(list(path.glob("model-0000*.safetensors"))) > 1
    assert not (path / "model.safetensors").exists()
    model, report = transformers.AutoModel.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    images = torch.randn(2, 3, *made.size)
    with torch.no_grad():
        assert agrees(model.eval()(images).last_hidden_state, made.encoder(images))
        ours = load_encoder(compose("knn", [f"checkpoint={path}", "device=cpu"])).encoder
        assert agrees(ours(images), made.encoder(images))


@pytest.fixture(scope="module")
def mae_run(tiny: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of MAE with a class token and an average, of one step."""
    words = tiny(
        *(tmp_path_factory.mktemp("mae") / "run", "method=mae", "target=pixels", "backbone.class_token=true"),
        *("ema_decay=0.5", "data.image_size=[32,32]", "method.visible_branch.enabled=false", *ONE_STEP),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_pictures", lambda *arguments: None)
        return loop.pretrain(compose("pretrain", words)).path


def test_transformers_reconstructs_as_the_run_does(mae_run: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = exported(mae_run, "format=huggingface_mae")
    model, report = transformers.ViTMAEForPreTraining.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    config = config_of(mae_run)
    objective = build_objective(config, target_dim(config)).eval()
    load_weights(objective, mae_run / "checkpoints" / "step-00000001")
    images, noise = torch.randn(2, 1, 32, 32), torch.rand(2, 64)
    with torch.no_grad():
        theirs = model.eval()(images, noise=noise)
        mask = theirs.mask.bool()
        masked, visible = (part.nonzero()[:, 1].view(1, 2, -1) for part in (mask, ~mask))
        restore = torch.argsort(torch.cat((visible, masked), -1), -1)
        views = MaskedViews(Views(visible, masked, restore, mask[None]), masked)
        found = objective.model(images, views).masked
        expected = theirs.logits[mask].unflatten(0, (2, -1))
        assert agrees(found, expected)
        assert model.config.norm_pix_loss
        patches = images.unfold(2, 4, 4).unfold(3, 4, 4).flatten(1, 3).flatten(2)[mask].unflatten(0, (2, -1))
        patches = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close((found - patches).square().mean(), theirs.loss)


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("no class token", [], r"backbone.class_token=false, and .* needs backbone.class_token=true: .*own_photos"),
        ("beit", [], "backbone.block=beit, and .* needs backbone.block=plain"),
        ("swin", [], "backbone.name=swin, and .* needs backbone.name=vit"),
        ("maskfeat", ["format=huggingface_mae"], "method.decoder.name=linear, and ViTMAEForPreTraining needs mae"),
        ("mae", ["format=huggingface_mae", "weights=ema"], "needs weights=trained"),
        ("mae", ["format=onnx", "dtype=bf16"], "format=onnx writes float32"),
    ],
)
def test_an_encoder_that_a_format_cannot_hold_is_refused(
    kind: str, words: list[str], message: str, frozen: Frozen
) -> None:
    made = frozen(*KINDS[kind])
    with pytest.raises(ConfigError, match=message):
        exported(made.run.path, *(words or ["format=huggingface"]))
    assert not list(made.run.path.iterdir())


@pytest.mark.parametrize(
    ("word", "dtype"), [("bf16", torch.bfloat16), pytest.param("fp16", torch.float16, marks=pytest.mark.long)]
)
def test_half_types_are_the_weights_rounded(run: Path, word: str, dtype: torch.dtype) -> None:
    full, half = load_file(exported(run)), exported(run, f"dtype={word}")
    assert half.name == f"encoder-trained-step00000011-{word}.safetensors"
    rounded = load_file(half)
    assert rounded.keys() == full.keys()
    for name, value in rounded.items():
        assert value.dtype == dtype
        assert torch.equal(value, full[name].to(dtype))
    config = config_of(run)
    state = {name: value.to(dtype) for name, value in trained_encoder(run).items()}
    state["pos_embed"] = sincos_positions((8, 8), config.backbone.embed_dim).to(dtype)
    images = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert agrees(rebuild(half).forward_features(images), tokens_of(state, config, images))


def test_untrained_weights_are_those_the_run_began_with(run: Path) -> None:
    path = exported(run, "weights=untrained")
    assert path.name == "encoder-untrained-step00000000-fp32.safetensors"
    assert (card_of(path)["weights"], card_of(path)["step"]) == ("untrained", 0)
    state = load_file(path)
    for name, value in trained_encoder(run, "untrained").items():
        assert torch.equal(value, state[name])
    assert not torch.equal(state["norm.bias"], load_file(exported(run))["norm.bias"])


def test_the_averaged_encoder(run: Path, mae_run: Path) -> None:
    before = snapshot(run)
    with pytest.raises(ConfigError, match=r"weights=ema, .* no EMA weights"):
        exported(run, "weights=ema")
    assert snapshot(run) == before
    path = exported(mae_run, "weights=ema")
    assert path.name == "encoder-ema-step00000001-fp32.safetensors"
    assert (card_of(path)["weights"], card_of(path)["step"]) == ("ema", 1)
    began, ended = (trained_encoder(mae_run, weights) for weights in ("untrained", "trained"))
    average = load_file(path)["norm.bias"]
    assert torch.allclose(average, (began["norm.bias"] + ended["norm.bias"]) / 2, atol=1e-7)
    assert average.abs().max() > 1e-3


def test_output_names_the_file_and_is_replaced_whole(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    place.mkdir()
    before = snapshot(run)
    path = exported(run / "checkpoints" / STEP, f"output={place / 'mine.safetensors'}")
    assert path == place / "mine.safetensors"
    assert snapshot(run) == before
    first = snapshot(place)
    assert sorted(Path(name).name for name in first) == ["mine.safetensors", "mine.safetensors.json"]
    assert exported(run, f"output={path}") == path
    assert snapshot(place) == first, "an export is a function of its checkpoint"
    exported(run, f"output={path}", "dtype=bf16")
    assert snapshot(place).keys() == first.keys()
    assert load_file(path)["norm.bias"].dtype == torch.bfloat16
    assert card_of(path)["dtype"] == "bf16"


def test_files_have_the_rights_that_the_user_gives_new_files(run: Path) -> None:
    path = exported(run)
    (run / "new").touch()
    usual = (run / "new").stat().st_mode
    assert (path.stat().st_mode, sidecar(path).stat().st_mode) == (usual, usual)


# What goes wrong


def turned(state: dict[str, Tensor]) -> None:
    state["pos_embed"] = state["pos_embed"].unflatten(1, (8, 8)).transpose(1, 2).flatten(1, 2)


def undefined(state: dict[str, Tensor]) -> None:
    state["norm.bias"][0] = float("nan")


@pytest.mark.parametrize("corrupt", [turned, undefined])
def test_a_file_that_timm_computes_otherwise_from_is_never_put_in_place(
    run: Path, monkeypatch: pytest.MonkeyPatch, corrupt: Callable[[dict[str, Tensor]], None]
) -> None:
    def save_corrupted(state: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
        state = {name: value.clone() for name, value in state.items()}
        corrupt(state)
        return save(state, metadata)

    before = snapshot(run)
    with monkeypatch.context() as patch:
        patch.setattr(room, "save", save_corrupted)
        with pytest.raises(UserError, match=r"timm .* computes other features .* no file was written"):
            exported(run)
        assert snapshot(run) == before
        patch.undo()
        exported(run)
        before = snapshot(run)
        patch.setattr(room, "save", save_corrupted)
        with pytest.raises(UserError, match="computes other features"):
            exported(run)
    assert snapshot(run) == before, "an earlier export stays"


def test_a_file_that_timm_cannot_load_is_never_put_in_place(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_less(state: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
        return save({name: value for name, value in state.items() if name != "norm.bias"}, metadata)

    before = snapshot(run)
    monkeypatch.setattr(room, "save", save_less)
    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        exported(run)
    assert snapshot(run) == before


def test_weights_never_stand_beside_the_sidecar_of_others(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = exported(run, f"output={run / 'mine.safetensors'}")
    replace = Path.replace

    def replace_weights_only(draft: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise KeyboardInterrupt
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", replace_weights_only)
    with pytest.raises(KeyboardInterrupt):
        exported(run, f"output={path}", "weights=untrained")
    assert torch.equal(load_file(path)["norm.bias"], trained_encoder(run, "untrained")["norm.bias"])
    assert not sidecar(path).exists()


def test_weights_too_large_for_float16_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_large(config: EvaluationConfig) -> FrozenEncoder:
        frozen = load_encoder(config)
        frozen.encoder.state_dict()["norm.weight"].mul_(1e5)
        return frozen

    monkeypatch.setattr(room, "load_encoder", load_large)
    before = snapshot(run)
    with pytest.raises(UserError, match="NaN or infinity"):
        exported(run, "dtype=fp16")
    assert snapshot(run) == before
    assert load_file(exported(run, "dtype=bf16"))["norm.weight"].max() > 65504


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("output=mine.pt", ["output=mine.pt", ".safetensors"]),
        ("output=", ["output"]),
        ("output=absent/mine.safetensors", ["output=absent/mine.safetensors", "absent is not a folder"]),
        ("output=here.safetensors", ["here.safetensors is a folder"]),
        ("dtype=fp8", ["dtype", "bf16, fp16, fp32"]),
        ("shard_size=5GB", ["shard_size=5GB", "format=timm is one file"]),
        ("weights=best", ["weights", "trained, untrained"]),
        ("pooling=cls", ["pooling is not a key"]),
    ],
)
def test_what_cannot_be_exported_is_refused_by_its_key(
    run: Path, dmjd: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, parts: list[str]
) -> None:
    place = tmp_path / "here"
    (place / "here.safetensors").mkdir(parents=True)
    monkeypatch.chdir(place)
    before = snapshot(tmp_path)
    code, out, err = dmjd("export", f"checkpoint={run}", word)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    for part in parts:
        assert part in err
    assert snapshot(tmp_path) == before


def test_a_folder_that_cannot_be_written_to_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(run)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run)
    with pytest.raises(ConfigError, match=r"run is not writable; set another file with output=FILE"):
        exported(run)
    assert snapshot(run) == before


@pytest.mark.parametrize("name", ["export", "export/NAME", "export/NAME.json"])
def test_what_is_in_the_way_of_the_file_is_named(run: Path, name: str) -> None:
    written = exported(run)
    shutil.rmtree(run / "export")
    place = run / name.replace("NAME", written.name)
    place.parent.mkdir(exist_ok=True)
    place.touch() if name == "export" else place.mkdir()
    kind = "file" if name == "export" else "folder"
    with pytest.raises(ConfigError, match=f"{place} is a {kind}; move it away, or set another file with output="):
        exported(run)


def test_a_checkpoint_must_be_there_and_whole(run: Path) -> None:
    with pytest.raises(CheckpointError, match="absent does not exist"):
        exported(run / "absent")
    (run / "checkpoints" / STEP / "__0_0.distcp").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="damaged"):
        exported(run)


def test_data_describes_files_alone(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"data describes a file of weights, and .* has its own"):
        exported(run, "data=digits")


def test_only_the_given_keys_of_data_differ_from_those_of_a_file(run: Path, tmp_path: Path) -> None:
    first = exported(run)
    words = ("data=folder", "data.mean=[0.25]", f"output={tmp_path / 'again.safetensors'}")
    found, before = (card_of(path)["arguments"]["pretrained_cfg_overlay"] for path in (exported(first, *words), first))
    assert [found[key] for key in ("input_size", "std")] == [before[key] for key in ("input_size", "std")]
    assert (found["mean"], before["mean"]) == ([0.25], [0.219])


def test_the_file_that_is_exported_is_not_replaced(tmp_path: Path, tiny: Words, finished_run: Path) -> None:
    """It may hold a decoder and a head, which an export leaves out."""
    file = tmp_path / "whole.safetensors"
    convert(compose("convert", [f"input={finished_run}", f"output={file}", "to=mae"]))
    before = snapshot(tmp_path)
    describing = [word for word in tiny(tmp_path) if word.startswith(("experiment", "backbone"))]
    with pytest.raises(ConfigError, match=r"whole\.safetensors is the input"):
        export(compose("export", [f"checkpoint={file}", f"output={file}", *describing]))
    assert snapshot(tmp_path) == before


# The command line


def test_command_line(run: Path, dmjd: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    code, out, err = dmjd("export", "checkpoint=.")
    path = run / "export" / NAME
    assert code == 0, err
    first, line = out.splitlines()
    assert str(path) in first
    assert line.startswith(f"import timm; model = timm.create_model('vit_tiny_patch16_224', checkpoint_path='{path}'")
    assert path.is_file()
    assert "left out" not in err
    assert dmjd("export")[0] == 2
    assert dmjd("export", "--help")[0] == 0
