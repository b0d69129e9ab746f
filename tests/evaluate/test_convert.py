from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.compose import compose
from dmjd.config import ConsolidateConfig, EvaluationConfig
from dmjd.errors import CheckpointError, ConfigError
from dmjd.evaluate.convert import Converted, convert
from dmjd.evaluate.encoder import load_encoder
from dmjd.interop.state_file import grid_noted, read_state, write_state
from dmjd.parallel import store
from dmjd.positions import sincos_positions
from dmjd.runs.checkpoint import newest
from dmjd.runs.consolidate import consolidate
from tests.interop import layout_states as states
from tests.interop.layout_states import DIM, GRID, STATES, TABLE, TOKENS, State, draw

Command = Callable[..., tuple[int, str, str]]


def run(source: Path, output: Path, *words: str) -> Converted:
    return convert(compose("convert", [f"input={source}", f"output={output}", *words]))


def stored(path: Path, state: State) -> Path:
    write_state(path, state, "model", {})
    return path


def same_bits(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def fixed(dim: int, prefix: int = 1, side: int = GRID) -> Tensor:
    return torch.cat((torch.zeros(prefix, dim), sincos_positions((side, side), dim))).unsqueeze(0)


def with_fixed_positions(state: State) -> State:
    prefix = int("cls_token" in state)
    return state | {
        name: fixed(state[name].shape[2], prefix) for name in ("pos_embed", "decoder_pos_embed") if name in state
    }


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_to_ours_and_back_is_the_same_bits(tmp_path: Path, kind: str, suffix: str) -> None:
    layout, shapes = STATES[kind]
    state = with_fixed_positions(draw(shapes()))
    source = stored(tmp_path / f"theirs{suffix}", state)
    first = run(source, tmp_path / f"ours{suffix}", "to=ours")
    assert first.source == layout
    run(first.path, tmp_path / f"back{suffix}", f"to={layout}", f"grid=[{GRID},{GRID}]") if "swin" not in kind else run(
        first.path, tmp_path / f"back{suffix}", f"to={layout}"
    )
    same_bits(read_state(tmp_path / f"back{suffix}").tensors, state)


def test_fixed_positions_leave_for_ours_and_learned_ones_stay(tmp_path: Path) -> None:
    state = draw(states.mae())
    run(stored(tmp_path / "learned.pth", state), tmp_path / "ours.pth", "to=ours")
    assert torch.equal(read_state(tmp_path / "ours.pth").tensors["encoder.pos_embed"], state["pos_embed"])
    run(stored(tmp_path / "fixed.pth", with_fixed_positions(state)), tmp_path / "ours.pth", "to=ours")
    assert not [name for name in read_state(tmp_path / "ours.pth").tensors if "pos_embed" in name]


def test_computed_positions_need_a_grid_where_they_are_stored(tmp_path: Path) -> None:
    source = stored(tmp_path / "mae.pth", with_fixed_positions(draw(states.mae())))
    run(source, tmp_path / "ours.pth", "to=ours")
    with pytest.raises(CheckpointError, match=r"grid=\[14,14\]"):
        run(tmp_path / "ours.pth", tmp_path / "mae2.pth", "to=mae")
    run(tmp_path / "ours.pth", tmp_path / "wide.pth", "to=mae", "grid=[2,6]")
    table = read_state(tmp_path / "wide.pth").tensors["pos_embed"]
    assert torch.equal(table[0, 1:], sincos_positions((2, 6), DIM))


def test_positions_are_interpolated_patch_rows_alone(tmp_path: Path) -> None:
    state = draw(states.timm_vit())
    run(stored(tmp_path / "vit.pth", state), tmp_path / "big.pth", "grid=[6,5]")
    found = read_state(tmp_path / "big.pth").tensors["pos_embed"]
    assert found.shape == (1, 31, DIM)
    assert torch.equal(found[:, 0], state["pos_embed"][:, 0])
    maps = state["pos_embed"][:, 1:].reshape(1, GRID, GRID, DIM).permute(0, 3, 1, 2)
    expected = F.interpolate(maps, size=(6, 5), mode="bicubic", align_corners=False).permute(0, 2, 3, 1).flatten(1, 2)
    assert torch.equal(found[:, 1:], expected)


def test_a_plane_stays_a_plane_on_another_grid(tmp_path: Path) -> None:
    """What is the same everywhere, positions and biases alike, is so on every grid; rows of the class token stay."""
    state = draw(states.beit(shared=False, fine_tuned=True))
    tables = [name for name in state if name.endswith("bias_table")]
    for name in tables:
        state[name][:-3] = torch.arange(1.0, 1 + TABLE[1])
    run(stored(tmp_path / "beit.pth", state), tmp_path / "big.pth", "to=beit", "grid=[7,3]")
    found = read_state(tmp_path / "big.pth").tensors
    for name in tables:
        assert found[name].shape == (13 * 5 + 3, TABLE[1])
        torch.testing.assert_close(found[name][:-3], torch.arange(1.0, 1 + TABLE[1]).expand(65, -1))
        assert torch.equal(found[name][-3:], state[name][-3:])


@pytest.mark.parametrize("rows", [GRID * GRID, GRID * GRID + 1])
def test_196_and_197_rows_become_what_the_model_has(tmp_path: Path, rows: int) -> None:
    state = draw(states.timm_vit()) | {"pos_embed": torch.randn(1, rows, DIM)}
    run(stored(tmp_path / "vit.pth", state), tmp_path / "out.pth")
    found = read_state(tmp_path / "out.pth").tensors["pos_embed"]
    assert found.shape[1] == GRID * GRID + 1
    assert torch.equal(found[:, -GRID * GRID :], state["pos_embed"][:, -GRID * GRID :])
    assert rows == GRID * GRID + 1 or not found[:, 0].any()
    del state["cls_token"]
    run(stored(tmp_path / "vit.pth", state), tmp_path / "out.pth")
    assert torch.equal(read_state(tmp_path / "out.pth").tensors["pos_embed"], state["pos_embed"][:, -GRID * GRID :])


def test_rows_of_no_square_grid_need_a_name(tmp_path: Path) -> None:
    state = draw(states.timm_vit()) | {"pos_embed": torch.randn(1, 13, DIM)}
    source = stored(tmp_path / "vit.pth", state)
    with pytest.raises(CheckpointError, match=r"13 rows.*source_grid=\[h,w\]"):
        run(source, tmp_path / "out.pth")
    run(source, tmp_path / "out.pth", "source_grid=[3,4]")
    assert torch.equal(read_state(tmp_path / "out.pth").tensors["pos_embed"], state["pos_embed"])


@pytest.mark.parametrize("grid", [(3, 4), (3, 5)])  # with the class token's, (3, 5) has the rows of a square
def test_tables_of_the_grid_that_is_asked_for_stay(tmp_path: Path, grid: tuple[int, int]) -> None:
    rows = (2 * grid[0] - 1) * (2 * grid[1] - 1) + 3
    state = draw(states.beit(shared=False)) | {"pos_embed": torch.randn(1, 1 + grid[0] * grid[1], DIM)}
    state |= {name: torch.randn(rows, TABLE[1]) for name in state if name.endswith("bias_table")}
    words = ("to=beit", f"grid=[{grid[0]},{grid[1]}]")
    run(stored(tmp_path / "beit.pth", state), tmp_path / "out.pth", *words)
    same_bits(read_state(tmp_path / "out.pth").tensors, state)


def test_rows_of_two_grids_are_not_guessed(tmp_path: Path) -> None:
    """16 learned rows are a square's and, as far as a file tells, those of the 2 x 8 that is asked for."""
    table = torch.randn(1, 1 + TOKENS, DIM)
    source = stored(tmp_path / "vit.pth", draw(states.timm_vit()) | {"pos_embed": table})
    out = tmp_path / "out.safetensors"
    with pytest.raises(
        CheckpointError, match=r"pos_embed has 17 rows, as a grid of 4x4 has and one of 2x8; .*source_grid"
    ):
        run(source, out, "grid=[2,8]")
    run(source, out, "grid=[2,8]", "source_grid=[2,8]")
    assert torch.equal(read_state(out).tensors["pos_embed"], table)
    run(source, out, "grid=[2,8]", "source_grid=[4,4]")
    maps = table[:, 1:].mT.unflatten(2, (4, 4))
    resized = F.interpolate(maps, (2, 8), mode="bicubic").flatten(2).mT
    torch.testing.assert_close(read_state(out).tensors["pos_embed"], torch.cat((table[:, :1], resized), dim=1))
    assert grid_noted(out) == (2, 8)
    run(out, tmp_path / "again.safetensors", "grid=[2,8]")
    again = read_state(tmp_path / "again.safetensors").tensors
    assert torch.equal(again["pos_embed"], read_state(out).tensors["pos_embed"])


@pytest.mark.parametrize("grid", [(4, 4), (2, 8)])
def test_values_of_a_fixed_table_tell_its_grid(tmp_path: Path, grid: tuple[int, int]) -> None:
    table = torch.cat((torch.zeros(1, DIM), sincos_positions(grid, DIM))).unsqueeze(0)
    source = stored(tmp_path / "vit.pth", draw(states.timm_vit()) | {"pos_embed": table})
    run(source, tmp_path / "out.pth", "grid=[2,8]")
    found = read_state(tmp_path / "out.pth").tensors["pos_embed"]
    assert found.shape == table.shape
    assert torch.equal(found, table) == (grid == (2, 8))
    run(source, tmp_path / "named.pth", "grid=[2,8]", f"source_grid=[{grid[0]},{grid[1]}]")
    assert torch.equal(found, read_state(tmp_path / "named.pth").tensors["pos_embed"])


def test_a_bias_table_of_two_grids_is_not_guessed(tmp_path: Path) -> None:
    """9 x 9 differences of a grid of 5 x 5 are as many as 3 x 27 of one of 2 x 14."""
    name = "rel_pos_bias.relative_position_bias_table"
    source = stored(tmp_path / "beit.pth", draw(states.beit()) | {name: torch.randn(84, TABLE[1])})
    with pytest.raises(CheckpointError, match=r"has 84 rows, as a grid of 5x5 has and one of 2x14; .*source_grid"):
        run(source, tmp_path / "out.pth", "to=beit", "grid=[2,14]")
    run(source, tmp_path / "out.pth", "to=beit", "grid=[2,14]", "source_grid=[2,14]")
    assert torch.equal(read_state(tmp_path / "out.pth").tensors[name], read_state(source).tensors[name])


@pytest.mark.parametrize("shape", [(TOKENS, DIM), (2, TOKENS, DIM), (1, GRID, GRID, DIM)])
def test_positions_of_another_shape_are_one_sentence(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source = stored(tmp_path / "vit.pth", draw(states.timm_vit()) | {"pos_embed": torch.ones(shape)})
    with pytest.raises(CheckpointError, match=r"encoder\.pos_embed is of shape \[.*\], not \[1, rows, width\]"):
        run(source, tmp_path / "out.pth")


def test_a_bias_table_of_no_grid_is_one_sentence(tmp_path: Path) -> None:
    state = draw(states.beit()) | {"rel_pos_bias.relative_position_bias_table": torch.ones(2, TABLE[1])}
    with pytest.raises(CheckpointError, match=r"a bias table of 2 rows is not of a grid of 6x6; .*source_grid"):
        run(stored(tmp_path / "beit.pth", state), tmp_path / "out.pth", "to=beit", "grid=[6,6]")


def test_a_fine_tuned_file_without_positions_gets_them_too(tmp_path: Path) -> None:
    """Its last norm is called fc_norm; without a grid it would be a file that its own code cannot load."""
    state = with_fixed_positions(draw(states.vit() | states.layer("fc_norm", DIM) | states.layer("head", 10, DIM)))
    run(stored(tmp_path / "tuned.pth", state), tmp_path / "ours.pth", "to=ours")
    with pytest.raises(CheckpointError, match=r"grid=\[14,14\]"):
        run(tmp_path / "ours.pth", tmp_path / "mae.pth", "to=mae")
    run(tmp_path / "ours.pth", tmp_path / "mae.pth", "to=mae", f"grid=[{GRID},{GRID}]")
    same_bits(read_state(tmp_path / "mae.pth").tensors, state)


def test_tables_are_shared_or_not_as_asked(tmp_path: Path) -> None:
    state = draw(states.beit())
    shared = stored(tmp_path / "shared.pth", state)
    run(shared, tmp_path / "per_block.pth", "to=beit", "bias_tables=per_block")
    table = state["rel_pos_bias.relative_position_bias_table"]
    found = read_state(tmp_path / "per_block.pth").tensors
    assert "rel_pos_bias.relative_position_bias_table" not in found
    for index in range(states.DEPTH):
        assert torch.equal(found[f"blocks.{index}.attn.relative_position_bias_table"], table)
    run(tmp_path / "per_block.pth", tmp_path / "again.pth", "to=beit", "bias_tables=shared")
    same_bits(read_state(tmp_path / "again.pth").tensors, state)
    found["blocks.1.attn.relative_position_bias_table"] += 1
    with pytest.raises(CheckpointError, match=r"blocks\.1\.attn.* differs from block 0's.*bias_tables=per_block"):
        run(stored(tmp_path / "tuned.pth", found), tmp_path / "again.pth", "to=beit", "bias_tables=shared")


def test_a_run_of_ours_becomes_maes_file(tmp_path: Path, finished_run: Path) -> None:
    frozen = load_encoder(EvaluationConfig(checkpoint=str(finished_run), device="cpu"))
    done = run(finished_run, tmp_path / "mae.pth", "to=dmjd")
    assert done.source == "ours"
    found = read_state(done.path).tensors
    for name, value in frozen.encoder.state_dict().items():
        assert torch.equal(found[name], value)
    prefix = frozen.encoder.num_prefix_tokens
    assert torch.equal(found["pos_embed"][0, prefix:], sincos_positions(frozen.encoder.grid, frozen.encoder.embed_dim))
    assert "decoder_pos_embed" in found


def test_a_consolidated_file_is_read_as_its_checkpoint_is(tmp_path: Path, finished_run: Path) -> None:
    file = consolidate(ConsolidateConfig(checkpoint=str(finished_run), output=str(tmp_path / "whole.safetensors")))
    run(file, tmp_path / "file.pth", "to=ours")
    run(finished_run, tmp_path / "folder.pth", "to=ours")
    same_bits(read_state(tmp_path / "file.pth").tensors, read_state(tmp_path / "folder.pth").tensors)


def test_of_a_segmentation_run_the_encoder_is_converted_on_demand(tmp_path: Path, segmented_once: Path) -> None:
    """Its head is of maps and no classifier."""
    words = [f"input={segmented_once}", f"output={tmp_path / 'timm.pth'}", "to=timm"]
    with pytest.raises(CheckpointError, match=r"unknown \(.*; dmjd convert with unknown=drop leaves them out\)"):
        convert(compose("convert", words))
    convert(compose("convert", [*words, "unknown=drop"]))
    kept = read_state(tmp_path / "timm.pth").tensors
    end = newest(segmented_once / "checkpoints")
    assert end is not None
    names = {name.removeprefix("model.") for name in store.read_model(end)}
    encoder = {name.removeprefix("encoder.") for name in names if name.startswith("encoder.")}
    assert kept.keys() == encoder | {"pos_embed"}


def test_the_average_is_converted_on_demand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = draw(states.mae())
    average = {name: value + 1 for name, value in state.items()}
    path = tmp_path / "both.pth"
    torch.save({"model": state, "model_ema": average}, path)
    with caplog.at_level("INFO", "dmjd"):
        run(path, tmp_path / "trained.pth", "to=mae")
    assert "weights=ema reads its average model_ema" in caplog.text
    same_bits(read_state(tmp_path / "trained.pth").tensors, state)
    run(path, tmp_path / "ema.pth", "to=mae", "weights=ema")
    same_bits(read_state(tmp_path / "ema.pth").tensors, average)


def test_weights_that_are_not_finite_are_converted_on_demand_alone(tmp_path: Path) -> None:
    state = draw(states.mae())
    state["norm.weight"][0] = float("nan")
    path = stored(tmp_path / "mae.pth", state)
    with pytest.raises(CheckpointError, match=r"mae\.pth in the layout of .*: NaN or infinity in norm\.weight"):
        run(path, tmp_path / "out.pth", "to=timm")
    assert run(path, tmp_path / "out.pth", "to=timm", "nonfinite=keep").tensors == len(states.timm_vit())


@pytest.mark.parametrize("rows_of_class_token", [True, False])
def test_registers_stay_where_the_layout_has_them(tmp_path: Path, rows_of_class_token: bool) -> None:
    """timm's own ViT with registers, resized by timm, is the oracle."""
    options: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 0, "patch_size": 16}
    options |= {"reg_tokens": 4, "init_values": 0.1, "global_pool": "token", "no_embed_class": not rows_of_class_token}
    model: Any = timm.create_model("vit_tiny_patch16_224", img_size=64, **options).eval()
    path = stored(tmp_path / "reg.pth", model.state_dict())
    run(path, tmp_path / "out.safetensors", "to=timm", "grid=[6,6]")
    large: Any = timm.create_model("vit_tiny_patch16_224", img_size=96, **options).eval()
    large.load_state_dict(read_state(tmp_path / "out.safetensors").tensors)
    model.set_input_size((96, 96))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(large.state_dict()[name], value, atol=0.02, rtol=0)  # timm's is antialiased
    with pytest.raises(CheckpointError, match=r"no place for .*encoder\.reg_token, which .* features depend"):
        run(path, tmp_path / "out.pth", "to=mae")


def test_the_timm_call_that_keeps_the_norm_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "dmjd"):
        run(stored(tmp_path / "mae.pth", draw(states.mae())), tmp_path / "out.pth", "to=timm")
    assert "global_pool='token'" in caplog.text


def test_a_folder_that_cannot_be_written_to_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"is not writable; set another folder"):
        run(tmp_path / "gone.pth", tmp_path / "out.pth")


def test_the_command_says_what_it_read_and_what_it_left(tmp_path: Path, dmjd: Command) -> None:
    source = stored(tmp_path / "mae.pth", draw(states.mae()))
    output = tmp_path / "timm.safetensors"
    code, out, err = dmjd("convert", f"input={source}", f"output={output}", "to=timm")
    assert code == 0, err
    assert out.strip().endswith("tensors in the layout of timm, from mae")
    assert "mae.pth in the layout of mae / dmjd\n" in err
    assert "decoder (18 tensors), head (2 tensors)" in err
    assert same_names(read_state(output).tensors, states.timm_vit())


def same_names(found: State, shapes: states.Shapes) -> bool:
    return {name: tuple(value.shape) for name, value in found.items()} == shapes


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["output=x.bin"], r"must end in one of .safetensors, .pth"),
        (["output=none/x.pth"], r"none is not a folder"),
        (["output=mae.pth"], "is the input"),
        (["output=x.pth", "to=beit"], r""),
        (["output=x.pth", "source=beit"], r"read as beit, the file has 19 unknown"),
        (["output=x.pth", "input=gone.pth"], "gone.pth does not exist"),
        (["output=x.pth", "to=keras"], "to must be one of"),
        (["output=x.pth", "grid=[14,14,14]"], "grid must be a list of 2 integers"),
    ],
)
def test_mistakes_are_sentences_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    stored(tmp_path / "mae.pth", draw(states.mae()))
    before = (tmp_path / "mae.pth").read_bytes()
    if not sentence:  # an encoder that BEiT has a place for, with a decoder that it has not
        assert run(Path("mae.pth"), Path("x.pth"), *words[1:]).left_out
        return
    with pytest.raises((ConfigError, CheckpointError), match=sentence):
        convert(compose("convert", ["input=mae.pth", *words]))
    assert [path.name for path in tmp_path.iterdir()] == ["mae.pth"]
    assert (tmp_path / "mae.pth").read_bytes() == before
