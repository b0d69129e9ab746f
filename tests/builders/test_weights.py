"""Weights of other code bases in models of ours, against what their own models compute."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.beit import Beit
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.builders import build_objective
from dmjd.builders.model import build_classification
from dmjd.builders.weights import load_classifier, load_weights
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.errors import CheckpointError, ConfigError
from dmjd.evaluate import describe, evaluate
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.models.objective import Objective
from dmjd.positions import sincos_positions
from dmjd.runs.consolidate import consolidate
from dmjd.train import loop
from dmjd.train.initial import with_init
from tests.golden.official import cases
from tests.golden.official.cases import CASES, Case
from tests.interop.official_files import to_official
from tests.models.test_official_equality import build, inputs, recorded, terms

State = dict[str, Tensor]
Words = Callable[..., list[str]]

SIZE, GRID, DIM = 64, (4, 4), 48
SMALL = ("backbone.embed_dim=48", "backbone.depth=2", "backbone.num_heads=3")
IMAGES = ("data=folder", f"data.image_size=[{SIZE},{SIZE}]")


def drawn(module: nn.Module) -> nn.Module:
    """With parameters that leave nothing at zero or one."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.eval()


def fixed_positions(grid: tuple[int, int] = GRID, dim: int = DIM) -> Tensor:
    return torch.cat((torch.zeros(1, dim), sincos_positions(grid, dim))).unsqueeze(0)


def vit(**options: Any) -> Any:
    sizes = {"img_size": SIZE, "embed_dim": DIM, "depth": 2, "num_heads": 3, "num_classes": 0, "fc_norm": False}
    return drawn(timm.create_model("vit_tiny_patch16_224", **(sizes | options)))


def a_vit_of_mae() -> tuple[nn.Module, State]:
    """timm's ViT as MAE keeps it: fixed positions in the file, no decoder in it."""
    model = vit()
    with torch.no_grad():
        model.pos_embed.copy_(fixed_positions())
    return model, model.state_dict()


def a_vit_with_learned_positions() -> tuple[nn.Module, State]:
    model = vit()
    return model, model.state_dict()


def a_beit(**options: Any) -> tuple[nn.Module, State]:
    """timm's BEiT under the names of the official pre-training file."""
    shared: dict[str, Any] = {
        "use_abs_pos_emb": False,
        "use_shared_rel_pos_bias": True,
        "init_values": 0.1,
        "norm_layer": nn.LayerNorm,
    }
    model: Any = drawn(
        Beit(SIZE, embed_dim=DIM, depth=2, num_heads=3, num_classes=0, global_pool="token", **(shared | options))
    )
    state = model.state_dict() | {"mask_token": torch.randn(1, 1, DIM), "lm_head.weight": torch.randn(32, DIM)}
    return model, state | {"lm_head.bias": torch.randn(32)}


def a_beit_with_learned_positions() -> tuple[nn.Module, State]:
    """As the public file of ImageNet-1k: its biases of q and v are all that tells its blocks from a plain ViT's."""
    return a_beit(use_shared_rel_pos_bias=False, use_abs_pos_emb=True, init_values=None)


def a_beit_of_simmim() -> tuple[nn.Module, State]:
    model, state = a_beit()
    state = {f"encoder.{name}": value for name, value in state.items() if not name.startswith("lm_head")}
    return model, state | {"decoder.0.weight": torch.randn(768, DIM, 1, 1), "decoder.0.bias": torch.randn(768)}


def a_swin_of_simmim() -> tuple[nn.Module, State]:
    """timm's Swin under the names of the official file, whose merging ends a layer and does not begin the next."""
    depths, heads = (1, 1, 2, 1), (1, 1, 2, 2)
    model: Any = drawn(
        SwinTransformer(SIZE, embed_dim=4, depths=depths, num_heads=heads, window_size=4, num_classes=0, global_pool="")
    )
    state = {"encoder.mask_token": torch.randn(1, 1, 4), "decoder.0.weight": torch.randn(3072, 32, 1, 1)}
    for name, value in model.state_dict().items():
        for stage in (1, 2, 3):
            name = name.replace(f"layers.{stage}.downsample", f"layers.{stage - 1}.DOWNSAMPLE")
        state[f"encoder.{name.replace('DOWNSAMPLE', 'downsample')}"] = value
    return model, state | {"decoder.0.bias": torch.randn(3072)}


def a_fine_tuned_beit() -> tuple[nn.Module, State]:
    """As BEiT's and MAE's fine-tuning leaves it: its norm follows the pooling."""
    options: dict[str, Any] = {"use_rel_pos_bias": True, "use_abs_pos_emb": False, "init_values": 0.1}
    model: Any = drawn(
        Beit(SIZE, embed_dim=DIM, depth=2, num_heads=3, num_classes=5, norm_layer=nn.LayerNorm, **options)
    )
    return model, model.state_dict()


def a_fine_tuned_swin() -> tuple[nn.Module, State]:
    """As Swin's authors and SimMIM's fine-tuning leave it."""
    model, pretrained = a_swin_of_simmim()
    state = {name.removeprefix("encoder."): value for name, value in pretrained.items() if "mask_token" not in name}
    state = {name: value for name, value in state.items() if not name.startswith("decoder.")}
    return model, state | {"head.weight": torch.randn(5, 32), "head.bias": torch.randn(5)}


SWIN = (
    "backbone.embed_dim=32",
    "backbone.windows={depths:[1,1,2,1],num_heads:[1,1,2,2],size:4}",
)
FILES: dict[str, tuple[Callable[[], tuple[nn.Module, State]], str, tuple[str, ...]]] = {
    "mae": (a_vit_of_mae, "mae_vit_base", SMALL),
    "learned": (a_vit_with_learned_positions, "maskfeat_token_vit_base", SMALL),
    "beit": (a_beit, "beit_vit_base", SMALL),
    "beit_absolute": (a_beit_with_learned_positions, "beit_vit_base_absolute", SMALL),
    "simmim": (a_beit_of_simmim, "simmim_vit_base", SMALL),
    "simmim_swin": (a_swin_of_simmim, "simmim_swin_base", SWIN),
    "beit_tuned": (a_fine_tuned_beit, "beit_vit_base", (*SMALL, "backbone.bias_tables=per_block")),
    "swin_tuned": (a_fine_tuned_swin, "simmim_swin_base", SWIN),
}


def stored(path: Path, state: State) -> Path:
    """As training code leaves it, with options of argparse beside the weights."""
    torch.save({"model": state, "epoch": 7, "args": argparse.Namespace(lr=1.0)}, path)
    return path


def described(kind: str) -> list[str]:
    _, experiment, words = FILES[kind]
    return [f"experiment={experiment}", *words]


def encoder_of(path: Path, *words: str) -> FrozenEncoder:
    return load_encoder(compose("knn", [f"checkpoint={path}", "device=cpu", *words]))


@torch.no_grad()
def check_tokens(frozen: FrozenEncoder, oracle: Any) -> None:
    images = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    expected = oracle.forward_features(images)
    expected = expected.flatten(1, 2) if expected.ndim == 4 else expected
    torch.testing.assert_close(frozen.encoder(images), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_evaluated_as_its_own_model_computes(kind: str, tmp_path: Path) -> None:
    """Described by hand and by itself: all but the heads of plain attention, for which 48 channels are unknown."""
    oracle, state = FILES[kind][0]()
    path = stored(tmp_path / "theirs.pth", state)
    by_hand = encoder_of(path, *described(kind), *IMAGES)
    check_tokens(by_hand, oracle)
    assert by_hand.run.path == tmp_path / "theirs"
    heads = ["backbone.num_heads=3"] if kind in ("mae", "learned", "beit_absolute") else []
    by_itself = encoder_of(path, *heads, *(IMAGES if "swin" in kind else []))  # whose windows are for 128 pixels
    check_tokens(by_itself, oracle)
    # Rates of a training; heads and depth of a Swin, which windows set; mask tokens, which features do not have.
    of_kind = ("depth", "num_heads") if "swin" in kind else ("masked_tokens",) if kind == "learned" else ()
    found, expected = (
        {key: value for key, value in vars(each.trained.backbone).items() if key not in ("drop_path", *of_kind)}
        for each in (by_itself, by_hand)
    )
    assert found == expected


@pytest.mark.parametrize("kind", ["learned", "beit", "simmim_swin"])
def test_fine_tuning_takes_the_model_from_a_file(kind: str, tmp_path: Path) -> None:
    """With and without a preset; its sizes are a warning away from those of the file, and its layout is compared."""
    _, state = FILES[kind][0]()
    path = stored(tmp_path / "theirs.pth", state)
    words = [f"init={path}", *(["backbone.num_heads=3"] if kind == "learned" else []), "data=folder"]
    expected = vars(encoder_of(path, *words[1:]).trained.backbone)
    preset = {"learned": "mae_vit_base", "beit": "beit_vit_base", "simmim_swin": "simmim_swin_base"}[kind]
    for more in ([], [f"preset={preset}", "data.image_size=64"]):
        config = with_init(compose("finetune", [*words, *more]), path)
        found = vars(config.backbone)
        own = {"drop_path", *({"bias_tables", "windows"} if more else {})}
        assert {key for key in found if found[key] != expected[key]} <= own
        classifier = build_classification(replace(config, data=replace(config.data, image_size=[SIZE, SIZE])), 5)
        assert load_classifier(classifier, path).endswith(
            "fc_norm, head as initialised" if kind != "simmim_swin" or not more else "; head as initialised"
        )
    if kind == "beit":
        with pytest.raises(
            ConfigError, match=r"preset=simmim_swin_base is for backbone.name=swin, and the encoder of init"
        ):
            with_init(compose("finetune", [*words, "preset=simmim_swin_base"]), path)


@pytest.mark.parametrize("kind", FILES)
def test_a_converted_file_is_the_same(kind: str, tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]) -> None:
    oracle, state = FILES[kind][0]()
    source, converted = stored(tmp_path / "theirs.pth", state), tmp_path / "ours.safetensors"
    code, _, errors = dmjd("convert", f"input={source}", f"output={converted}", "to=ours")
    assert code == 0, errors
    check_tokens(encoder_of(converted, *described(kind), *IMAGES), oracle)


def rerandomised(objective: Objective) -> Objective:
    for parameter in objective.parameters():
        nn.init.normal_(parameter)
    return objective


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_whole_official_file_gives_the_official_losses(case: Case, tmp_path: Path) -> None:
    """Every branch is read: the losses are those that the official code recorded, and no parameter is left."""
    objective = rerandomised(build(case))
    shapes = to_official(objective.model)
    official = {name: torch.from_numpy(cases.parameter(name, tuple(value.shape))) for name, value in shapes.items()}
    official |= {name: shapes[name] for name in ("pos_embed", "decoder_pos_embed")}
    said = load_weights(objective, stored(tmp_path / "official.pth", official))
    assert "initialised" not in said
    assert terms(objective(*inputs(case, 0))) == pytest.approx(recorded(case)["losses"], rel=1e-9)


def objective_of(kind: str, *words: str) -> Objective:
    small = ["method.decoder.dim=16", "method.decoder.depth=1", "method.decoder.num_heads=2"]
    config: PretrainConfig = compose("pretrain", [*described(kind), *small, f"data.image_size=[{SIZE},{SIZE}]", *words])
    return build_objective(config, 108)


def test_what_a_file_does_not_have_begins_as_ever_and_is_said(tmp_path: Path) -> None:
    _, state = a_vit_of_mae()
    objective, plain = objective_of("mae"), objective_of("mae")
    said = load_weights(objective, stored(tmp_path / "encoder.pth", state))
    assert re.search(r"encoder\.pth in the layout of mae / dmjd / beit [^;]*; decoder, head as initialised$", said)
    for name, value in plain.model.state_dict().items():
        found = objective.model.state_dict()[name]
        expected = state[name.removeprefix("encoder.")] if name.startswith("encoder.") else value
        assert torch.equal(found, expected), name


def test_initial_weights_are_the_average_or_the_student_on_demand(tmp_path: Path, finished_run: Path) -> None:
    _, state = a_vit_of_mae()
    average = {name: value + 1 if "pos_embed" not in name else value for name, value in state.items()}
    averaged, distilled = tmp_path / "averaged.pth", tmp_path / "distilled.pth"
    torch.save({"model": state, "model_ema": average}, averaged)
    torch.save({"student": state, "teacher": average}, distilled)
    objective = objective_of("mae")
    for path, weights, expected in (
        (averaged, "trained", state),
        (averaged, "ema", average),
        (distilled, "trained", average),
        (distilled, "student", state),
    ):
        load_weights(objective, path, weights)
        for name, value in objective.model.encoder.state_dict().items():
            assert torch.equal(value, expected[name]), (path, weights, name)
    checkpoint = next((finished_run / "checkpoints").glob("step-*"))
    for weights, fault in (("ema", "has no EMA weights"), ("student", "has no student beside a teacher")):
        with pytest.raises(ConfigError, match=f"weights={weights}, but .* {fault}"):
            load_weights(objective, checkpoint, weights)


def test_a_branch_of_another_shape_is_left(tmp_path: Path) -> None:
    """BEiT's classifier of codes is no head for HOG, and SimMIM's model has no other branch."""
    _, state = a_beit()
    said = load_weights(objective_of("simmim"), stored(tmp_path / "beit.pth", state))
    assert said.endswith("beit.pth in the layout of beit; head as initialised")


def test_positions_are_interpolated_to_the_grid_of_the_images(tmp_path: Path) -> None:
    """Bicubic as in the official fine-tuning code; the row of the class token stays."""
    _, state = a_vit_with_learned_positions()
    path = stored(tmp_path / "vit.pth", state)
    frozen = encoder_of(path, *described("learned"), "data=folder", "data.image_size=[96,32]")
    maps = state["pos_embed"][:, 1:].reshape(1, *GRID, DIM).permute(0, 3, 1, 2)
    expected = F.interpolate(maps, size=(6, 2), mode="bicubic").permute(0, 2, 3, 1).flatten(1, 2)
    table = frozen.encoder.pos_embed
    assert isinstance(table, Tensor)
    torch.testing.assert_close(table[:, 1:], expected)
    assert torch.equal(table[:, :1], state["pos_embed"][:, :1])


@pytest.mark.parametrize("size", [(48, 64), (48, 80)])
def test_positions_of_oblong_images_are_read_as_they_are(tmp_path: Path, size: tuple[int, int]) -> None:
    """A file does not tell a grid of 3 x 4; with the class token's row, 3 x 5 has as many rows as a square one."""
    model = vit(img_size=size)
    path = stored(tmp_path / "vit.pth", model.state_dict())
    frozen = encoder_of(path, *described("learned"), "data=folder", f"data.image_size=[{size[0]},{size[1]}]")
    table = frozen.encoder.pos_embed
    assert isinstance(table, Tensor)
    assert torch.equal(table, model.pos_embed)


def test_positions_of_as_many_tokens_are_not_guessed(tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]) -> None:
    """36 learned rows of 6 x 6 tokens, for images of 4 x 9: as many, and where they lie the file does not say."""
    model = vit(img_size=(96, 96))
    path, words = stored(tmp_path / "vit.pth", model.state_dict()), (*described("learned"), "data=folder")
    with pytest.raises(
        CheckpointError, match=r"37 rows, as a grid of 6x6 has and one of 4x9; .*dmjd convert takes this"
    ):
        encoder_of(path, *words, "data.image_size=[64,144]")
    tables: list[Tensor] = []
    for grid in ("[6,6]", "[4,9]"):
        out = tmp_path / f"of_{len(tables)}.safetensors"
        assert dmjd("convert", f"input={path}", f"output={out}", "to=timm", f"source_grid={grid}")[0] == 0
        table = encoder_of(out, *words, "data.image_size=[64,144]").encoder.pos_embed
        assert isinstance(table, Tensor)
        tables.append(table)
    assert torch.equal(tables[1], model.pos_embed)
    maps = model.pos_embed[:, 1:].mT.unflatten(2, (6, 6))
    torch.testing.assert_close(tables[0][:, 1:], F.interpolate(maps, (4, 9), mode="bicubic").flatten(2).mT)


def less(name: str) -> Callable[[State], State]:
    return lambda state: {key: value for key, value in state.items() if key != name}


WRONG: dict[str, tuple[str, Callable[[State], State], list[str], list[str]]] = {
    "deeper": (
        "mae",
        dict,
        ["backbone.depth=3"],
        ["lacks encoder.blocks.2.", "than the configuration", "; set backbone.depth=2"],
    ),
    "shallower": ("mae", dict, ["backbone.depth=1"], ["has unexpected encoder.blocks.1."]),
    "wider": ("mae", dict, ["backbone.embed_dim=96"], ["encoder.blocks.0.attn.proj.bias of shape (48,), here (96,)"]),
    "without cls": ("mae", dict, ["backbone.class_token=false"], ["has unexpected encoder.cls_token"]),
    "learned as fixed": ("learned", dict, ["backbone.positions=sincos"], ["has unexpected encoder.pos_embed"]),
    "registers": (
        "mae",
        lambda state: {**state, "reg_token": torch.ones(1, 4, 48), "pos_embed": fixed_positions()},
        [],
        ["has registers (encoder.reg_token), on which features depend", "use the model's own code"],
    ),
    "beit as plain": (
        "beit",
        dict,
        ["backbone.positions=sincos", "backbone.block=plain", "backbone.layer_scale=null"],
        ["unexpected", "gamma_1", "rel_pos_bias"],
    ),
    "torn": (
        "mae",
        less("blocks.1.norm1.weight"),
        [],
        ["theirs.pth", "the file has 1 missing (blocks.1.norm1.weight)"],
    ),
    "foreign": (
        "mae",
        lambda state: state | {"queue": torch.ones(3)},
        [],
        ["theirs.pth", "queue", "dmjd convert with source=mae unknown=drop", "layouts are ours, mae, convmae, dmjd"],
    ),
    "tuned apart": (
        "beit",
        lambda state: {
            **less("rel_pos_bias.relative_position_bias_table")(state),
            "blocks.0.attn.relative_position_bias_table": torch.zeros(52, 3),
            "blocks.1.attn.relative_position_bias_table": torch.ones(52, 3),
        },
        [],
        ["theirs.pth", "blocks.1.attn.relative_position_bias_table differs from block 0's"],
    ),
    "eleven positions": (
        "mae",
        lambda state: state | {"pos_embed": torch.zeros(1, 11, 48)},
        [],
        ["not a square grid", "source_grid=", "dmjd convert takes this argument"],
    ),
    "nothing": ("mae", lambda state: {"a": torch.ones(1)}, [], ["no layout has all of these names", "a"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_of_another_model_is_refused_in_one_sentence(wrong: str, tmp_path: Path) -> None:
    kind, spoil, words, parts = WRONG[wrong]
    path = stored(tmp_path / "theirs.pth", spoil(FILES[kind][0]()[1]))
    with pytest.raises(CheckpointError) as caught:
        encoder_of(path, *described(kind), *IMAGES, *words)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value), f"{caught.value!s} lacks {part!r}"


def test_a_refused_file_changes_nothing(tmp_path: Path) -> None:
    _, state = a_vit_of_mae()
    objective, plain = objective_of("mae", "backbone.depth=3"), objective_of("mae", "backbone.depth=3")
    with pytest.raises(CheckpointError):
        load_weights(objective, stored(tmp_path / "theirs.pth", state))
    for name, value in plain.state_dict().items():
        assert torch.equal(objective.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["theirs.pth in the layout", "none is known for backbone.embed_dim=48", "set backbone.num_heads=N"]),
        (["experiment=mae"], ["experiment has no option 'mae'", "mae_vit_base"]),
        (["experiment=mae_vit_base", "backbone.dept=2"], ["backbone.dept is not a key", "depth"]),
        ([*described("mae"), "weights=untrained"], ["weights=untrained", "theirs.pth is a file"]),
        ([*described("mae"), "weights=ema"], ["weights=ema", "theirs.pth has no EMA weights"]),
        ([*described("mae"), "backbone.class_token=false", "pooling=cls"], ["unexpected encoder.cls_token"]),
        (["experiment=mae_vit_base", "backbone.num_heads=5"], ["backbone.embed_dim=768", "num_heads=5"]),
    ],
)
def test_words_that_do_not_fit_a_file_are_refused(words: list[str], parts: list[str], tmp_path: Path) -> None:
    path = stored(tmp_path / "theirs.pth", a_vit_of_mae()[1])
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        encoder_of(path, *words, *IMAGES)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value), f"{caught.value!s} lacks {part!r}"


def test_a_run_knows_its_model_itself(finished_run: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"experiment and backbone describe files, and .* its own config.yaml; leave them out"
    ):
        encoder_of(finished_run, "experiment=mae_vit_base")


def test_a_name_that_is_nothing_may_have_been_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint=.*mae\.pht does not exist; set a run folder"):
        encoder_of(tmp_path / "mae.pht", *described("mae"))


def test_a_folder_of_a_file_says_which(
    tmp_path: Path, finished_run: Path, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    """As of a download, or the export of a run. A folder of ours that is damaged says that instead."""
    (tmp_path / "model").mkdir()
    path = stored(tmp_path / "model" / "pytorch_model.pth", a_vit_of_mae()[1])
    with pytest.raises(CheckpointError, match=rf"checkpoint=.*model is a folder; name .* as checkpoint={path}$"):
        encoder_of(path.parent, *described("mae"), *IMAGES)
    code, _, err = dmjd("convert", f"input={path.parent}", f"output={tmp_path / 'out.pth'}", "to=mae")
    assert (code, err.count("\n")) == (2, 1)
    assert err.endswith(f"as input={path}\n")
    damaged = tmp_path / "damaged"
    shutil.copytree(next((finished_run / "checkpoints").glob("step-*")), damaged)
    max((file for file in damaged.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size).write_bytes(b"")
    shutil.copy(path, damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        encoder_of(damaged)
    run = tmp_path / "run"
    shutil.copytree(damaged, run / "checkpoints" / "step-00000011")
    shutil.copy(path, run)
    with pytest.raises(CheckpointError, match="is damaged"):
        encoder_of(run)


def test_cls_pooling_of_a_file_without_the_token_is_refused(tmp_path: Path) -> None:
    model = vit(class_token=False, global_pool="avg")
    words = (*described("learned"), "backbone.class_token=false", "pooling=cls")
    with pytest.raises(ConfigError, match="pooling=cls needs a class token"):
        encoder_of(stored(tmp_path / "vit.pth", model.state_dict()), *words, *IMAGES)


@pytest.mark.parametrize("words", [["data=digits"], ["data=digits", "data.channels=3"]])
def test_grey_images_are_not_for_an_encoder_of_colours(tmp_path: Path, words: list[str]) -> None:
    path = stored(tmp_path / "vit.pth", a_vit_of_mae()[1])
    with pytest.raises(ConfigError, match=r"^data=digits has grey images, and the encoder reads 3 channels; choose"):
        encoder_of(path, *described("mae"), *words)


def test_images_of_a_size_that_the_encoder_cannot_read_are_refused(tmp_path: Path, image_folder: Path) -> None:
    path = stored(tmp_path / "swin.pth", a_swin_of_simmim()[1])
    with pytest.raises(ConfigError, match=r"data.image_size 48x64 is not divisible by backbone.patch_size=32; .*=64$"):
        encoder_of(path, *described("simmim_swin"), "data=folder", "data.image_size=[48,64]")


def test_a_score_of_a_file_is_kept_beside_it(tmp_path: Path, image_folder: Path) -> None:
    path = stored(tmp_path / "theirs.pth", a_vit_of_mae()[1])
    data = (*IMAGES, f"data.root={image_folder}", "data.check=none")
    words = [f"checkpoint={path}", *described("mae"), *data, "device=cpu", "workers=0"]
    record = evaluate("knn", compose("knn", [*words, "neighbours=3", "pooling=cls"]))
    (kept,) = (tmp_path / "theirs" / "evaluations").glob("knn-trained-*.json")
    assert json.loads(kept.read_text()) == record
    assert record["settings"]["checkpoint"] == "theirs.pth"
    assert "(trained, " not in describe(record)[0]
    assert "step" not in describe(record)[0], "unknown of a file"
    probe = ["epochs=1", "warmup_epochs=0", "batch_size=16", "augment=false"]
    evaluate("linprobe", compose("linprobe", [*words, *probe, f"output={tmp_path / 'scores'}"]))
    assert len(list((tmp_path / "scores" / "evaluations").glob("linprobe-*.json"))) == 1
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"taken cannot be written to; name a folder for the score with output="):
        evaluate("knn", compose("knn", [*words, "neighbours=3", f"output={tmp_path / 'taken'}"]))


def test_a_file_is_exported_for_timm(tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]) -> None:
    _, state = a_vit_of_mae()
    path = stored(tmp_path / "theirs.pth", state)
    code, out, errors = dmjd("export", f"{path}", *described("mae"))
    assert code == 0, errors
    file = Path(out.partition(":")[0])
    assert file.parent == tmp_path / "theirs" / "export"
    call = json.loads(file.with_name(f"{file.name}.json").read_text())
    model: Any = timm.create_model(call["architecture"], checkpoint_path=str(file), **call["arguments"]).eval()
    images = torch.randn(1, 3, 224, 224)
    larger: Any = vit(img_size=224)
    larger.load_state_dict(state | {"pos_embed": fixed_positions((14, 14))})
    with torch.no_grad():
        found, expected = model.forward_features(images), larger.forward_features(images)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_run_begins_from_a_file_and_goes_on_without_it(
    tmp_path: Path, tiny: Words, dmjd: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: None)
    sizes = {"img_size": 32, "patch_size": 4, "in_chans": 1, "embed_dim": 32, "depth": 1, "num_heads": 4}
    model = vit(**sizes)
    with torch.no_grad():
        model.pos_embed.copy_(fixed_positions((8, 8), 32))
    path = stored(tmp_path / "theirs.pth", model.state_dict())
    still = ("optim.base_lr=1e-12", "optim.weight_decay=0", "checkpoint_every=5")
    words = tiny(tmp_path / "run", "method=mae", f"init={path}", *still)
    code, _, errors = dmjd("pretrain", *words)
    assert code == 0, errors
    assert "beginning from" in errors
    assert re.search(r"theirs\.pth in the layout of mae / dmjd / beit [^;]*; decoder, head as initialised", errors)
    encoder = load_encoder(compose("knn", [f"checkpoint={tmp_path / 'run'}", "device=cpu"])).encoder
    for name, value in encoder.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-6, rtol=0)
    path.unlink()  # the run has a checkpoint of its own by now
    code, _, errors = dmjd("pretrain", *words)
    assert code == 0, errors


def test_a_consolidated_file_is_read_too(tmp_path: Path, finished_run: Path, tiny: Words) -> None:
    file = consolidate(compose("consolidate", [f"checkpoint={finished_run}", f"output={tmp_path / 'w.safetensors'}"]))
    sizes = [word for word in tiny(finished_run) if word.startswith(("experiment=", "backbone."))]
    expected = load_encoder(compose("knn", [f"checkpoint={finished_run}", "device=cpu"])).encoder.state_dict()
    found = encoder_of(file, *sizes, "data=digits").encoder.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    with pytest.raises(ConfigError, match="has no EMA weights"):
        encoder_of(file, *sizes, "data=digits", "weights=ema")
    with pytest.raises(CheckpointError, match="another encoder"):
        encoder_of(file, *sizes, "data=digits", "backbone.depth=2")


@pytest.mark.parametrize("name", ["absent.pth", "absent"])
def test_an_init_that_is_not_there_is_refused_before_the_folder_exists(
    name: str, tmp_path: Path, tiny: Words, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, errors = dmjd("pretrain", *tiny(tmp_path / "run", f"init={tmp_path / name}"))
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert f"init={tmp_path / name} does not exist" in errors
    assert not (tmp_path / "run").exists()
