"""All engines compute the same: losses, norms, averages and what becomes of a bad step, at 2 and 4 processes."""

from __future__ import annotations

import multiprocessing
import socket
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dmjd.parallel import native_files, store, world
from dmjd.parallel.apply import MODES
from dmjd.parallel.deepspeed import files as zero_files
from tests.parallel import walk

Seen = dict[str, dict[str, Any]]
TOLERANCE = 1e-5


def launch(folder: Path, size: int, saved: dict[str, Path], variants: bool) -> Seen:
    """What ``size`` processes saw of every engine."""
    folder.mkdir()
    assert exit_codes(walk.walk, size, folder, free_port(), saved, variants) == [0] * size
    return read_seen(folder)


def exit_codes(target: Callable[..., None], size: int, *arguments: Any) -> list[int | None]:
    """Of ``size`` processes, the first argument of which is the rank and the second ``size``."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=target, args=(rank, size, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    return [process.exitcode for process in processes]


def read_seen(folder: Path) -> Seen:
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in walk.ENGINES}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The single engine's results."""
    run, convolutional = walk.reference(), walk.reference(convolutional=True)
    rows = run.take(walk.STEPS)
    return {
        "curve": rows,
        "parameters": run.engine.full_state_dict(),
        "averages": run.averages,
        "convolutional": convolutional.take(2),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Path]:
    folder = tmp_path_factory.mktemp("two") / "walk"
    return launch(folder, 2, {}, variants=True), folder


@pytest.fixture(scope="module")
def resumed_alone(two: tuple[Seen, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Path]:
    """What one process makes of each engine's save at two; and its own save, of fsdp's, for four."""
    _, folder = two
    again = tmp_path_factory.mktemp("one") / "again"
    seen: Seen = {}
    for name in walk.ENGINES:
        run, source = walk.reference(), folder / name
        if name in walk.STAGES:  # whatever wrote it, by way of the file that all kinds of engines share
            source = again.with_name(name)
            source.mkdir()
            save_file(store.read(folder / name), source / native_files.CONSOLIDATED)
        run.load(source)
        if name == "fsdp":
            run.save(again)
        seen[name] = {"resumed": run.take(walk.STEPS - walk.SAVED_AT)}
    return seen, again


@pytest.fixture(scope="module")
def four(two: tuple[Seen, Path], resumed_alone: tuple[Seen, Path], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    _, folder = two
    saved = {f"two of {name}": folder / name for name in ("ddp", "hsdp", *walk.STAGES)} | {
        "one of two": resumed_alone[1]
    }
    return launch(tmp_path_factory.mktemp("four") / "walk", 4, saved, variants=False)


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.long)])
def size(request: pytest.FixtureRequest) -> int:
    """How many processes."""
    return int(request.param)


@pytest.fixture
def seen(name: str, size: int, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What ``size`` processes have seen of the engine ``name``."""
    found: Seen = request.getfixturevalue("two")[0] if size == 2 else request.getfixturevalue("four")
    return found[name]


def assert_same_curve(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


NAMES = pytest.mark.parametrize("name", walk.ENGINES)


@NAMES
def test_two_processes_follow_the_curve_of_one(name: str, two: tuple[Seen, Path], alone: dict[str, Any]) -> None:
    seen = two[0][name]
    assert_same_curve(seen["curve"], alone["curve"])
    assert_close(seen["parameters"], alone["parameters"])
    assert max(row[1] for row in alone["curve"]) > 0.5, "clipping was at work"


@NAMES
@pytest.mark.long
def test_four_processes_follow_the_curve_of_one(name: str, four: Seen, alone: dict[str, Any]) -> None:
    assert_same_curve(four[name]["curve"], alone["curve"])
    assert_close(four[name]["parameters"], alone["parameters"])


@NAMES
def test_the_first_save_allocates_nothing(name: str, two: tuple[Seen, Path]) -> None:
    assert two[0][name]["allocated in the first save"] == [0, 0]


@NAMES
def test_the_average_is_saved_whole(name: str, two: tuple[Seen, Path], alone: dict[str, Any]) -> None:
    saved = store.read_average(two[1] / f"{name}-before")
    assert_close(saved, alone["averages"])


@NAMES
def test_weights_are_read_without_the_other_processes(name: str, two: tuple[Seen, Path]) -> None:
    saved, held = store.read_model(two[1] / f"{name}-before"), two[0][name]["parameters"]
    assert saved.keys() == held.keys()
    assert all(torch.equal(value, held[parameter]) for parameter, value in saved.items())


@pytest.mark.parametrize("suffix", ["", "-fine-tuned"])
@pytest.mark.parametrize("name", walk.STAGES)
def test_partitions_are_put_together_as_by_deepspeed(
    name: str, suffix: str, two: tuple[Seen, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours are read one tensor at a time; DeepSpeed's conversions hold all of a process."""
    path = two[1] / f"{name}{suffix}"
    ours = store.read(path)
    whole = zero_files.import_deepspeed("deepspeed.utils.zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint
    parameters = whole(str(path), zero_files.TAG)
    zero_files.import_deepspeed("deepspeed.checkpoint.ds_to_universal").main(
        Namespace(
            input_folder=str(path / zero_files.TAG), output_folder=str(tmp_path), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip
    compared = 0
    for full_name, value in ours.items():
        kind, _, parameter = full_name.partition("/")
        if kind in ("exp_avg", "exp_avg_sq"):
            found = torch.load(tmp_path / "zero" / parameter / f"{kind}.pt", weights_only=True)
            theirs = found["param"] if isinstance(found, dict) else found
        elif kind == "parameter" and parameter in parameters:  # of stage 1 without frozen ones
            theirs = parameters[parameter]
        else:
            continue
        assert torch.equal(theirs.reshape(value.shape), value), full_name
        compared += 1
    assert compared >= 3 * sum(full_name.startswith("exp_avg/") for full_name in ours) > 0


@NAMES
@pytest.mark.parametrize("variant", walk.VARIANTS)
def test_recomputing_changes_nothing(name: str, variant: str, two: tuple[Seen, Path], alone: dict[str, Any]) -> None:
    assert_same_curve(two[0][name][variant], alone["curve"][:2])


@NAMES
@pytest.mark.parametrize("variant", ["convolutional", "convolutional, recomputed"])
def test_a_convvit_that_sees_visible_tokens_alone(
    name: str, variant: str, two: tuple[Seen, Path], alone: dict[str, Any]
) -> None:
    assert_same_curve(two[0][name][variant], alone["convolutional"])


@pytest.fixture(scope="module")
def fine_tuned_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = walk.FineTuned(walk.engine("single"), world.alone(walk.CPU))
    return run.look(tmp_path_factory.mktemp("alone") / "fine-tuned", {})


@NAMES
def test_fine_tuning_with_layer_decay_and_frozen_layers(
    name: str, two: tuple[Seen, Path], fine_tuned_alone: dict[str, Any]
) -> None:
    seen = two[0][name]["fine-tuned"]
    assert_same_curve(seen["curve"], fine_tuned_alone["curve"])
    assert_close(seen["parameters"], fine_tuned_alone["parameters"])
    assert seen["again"] == seen["curve"][2:], "its own save"
    assert_same_curve(seen["from ddp"], seen["curve"][2:])


@pytest.fixture(scope="module")
def segmented_alone() -> dict[str, Any]:
    return walk.Segmented(walk.engine("single"), world.alone(walk.CPU)).look()


@NAMES
def test_segmentation_has_the_statistics_of_all_images(
    name: str, two: tuple[Seen, Path], segmented_alone: dict[str, Any]
) -> None:
    seen = two[0][name]["segmented"]
    assert_same_curve(seen["curve"], segmented_alone["curve"])
    assert_close(seen["parameters"], segmented_alone["parameters"])
    assert_close(seen["buffers"], segmented_alone["buffers"])
    for which in ("logits", "gathered"):
        torch.testing.assert_close(seen[which], segmented_alone["logits"], rtol=1e-4, atol=1e-4)


@NAMES
def test_logits_of_the_average_leave_no_trace(
    name: str, two: tuple[Seen, Path], fine_tuned_alone: dict[str, Any]
) -> None:
    trained, average, after = two[0][name]["fine-tuned"]["logits"]
    assert torch.equal(trained, after)
    assert (trained - average).abs().max() > 0.1
    for ours, expected in zip((trained, average), fine_tuned_alone["logits"], strict=False):
        torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", walk.STAGES)
def test_one_process_goes_on_from_frozen_layers_of_two(
    name: str, two: tuple[Seen, Path], fine_tuned_alone: dict[str, Any], tmp_path: Path
) -> None:
    run = walk.FineTuned(walk.engine("single"), world.alone(walk.CPU))
    save_file(store.read(two[1] / f"{name}-fine-tuned"), tmp_path / native_files.CONSOLIDATED)
    run.step.engine.load(tmp_path, run.step.averages)
    assert_same_curve(run.take(2, 4), fine_tuned_alone["again"])


@NAMES
def test_a_bad_step_of_one_rank_moves_nothing_on_any(name: str, seen: dict[str, Any], two: tuple[Seen, Path]) -> None:
    ((loss, norm, applied),) = seen["poisoned"]
    assert loss != loss
    assert norm != norm or norm == float("inf")
    assert applied == 0
    assert not any(seen["moved"])
    before, after = (store.read(two[1] / f"{name}-{when}") for when in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items()), "moments and step counts neither"


@NAMES
def test_gathered_weights_are_the_whole_ones(name: str, seen: dict[str, Any]) -> None:
    assert seen["gathered parameters"].keys() == seen["parameters"].keys()
    for parameter, value in seen["gathered parameters"].items():
        assert torch.equal(value, seen["parameters"][parameter])
    twin = walk.make_objective()
    twin.load_state_dict(seen["parameters"])
    with torch.no_grad():
        expected = twin(*walk.make_batch(0, range(walk.BATCH))).total
    torch.testing.assert_close(seen["gathered"], expected, rtol=1e-6, atol=0)


@NAMES
def test_a_run_can_be_rolled_back(name: str, seen: dict[str, Any]) -> None:
    assert seen["rolled back"] == seen["curve"][walk.SAVED_AT :]


@pytest.mark.parametrize(
    ("name", "gathers", "reductions"),
    [  # of four blocks and what lies outside of them, which stays whole until backward
        ("fsdp", 3 + 2, 3),
        ("fsdp, kept gathered", 5, 5),
    ],
)
def test_a_unit_is_gathered_and_reduced_at_once(
    name: str, gathers: int, reductions: int, two: tuple[Seen, Path]
) -> None:
    assert two[0][name]["sent"] == [walk.PARTS * gathers, walk.PARTS * reductions]


@NAMES
def test_one_process_goes_on_from_two(name: str, resumed_alone: tuple[Seen, Path], alone: dict[str, Any]) -> None:
    assert_same_curve(resumed_alone[0][name]["resumed"], alone["curve"][walk.SAVED_AT :])


@NAMES
@pytest.mark.parametrize("origin", ["two of ddp", "two of hsdp", "one of two"])
@pytest.mark.long
def test_four_processes_go_on_from(name: str, origin: str, four: Seen, alone: dict[str, Any]) -> None:
    assert_same_curve(four[name][f"from {origin}"], alone["curve"][walk.SAVED_AT :])


@pytest.mark.parametrize("name", walk.STAGES)
@pytest.mark.parametrize("origin", walk.STAGES)
@pytest.mark.long
def test_four_processes_go_on_from_two_of_any_stage(name: str, origin: str, four: Seen, alone: dict[str, Any]) -> None:
    assert_same_curve(four[name][f"from two of {origin}"], alone["curve"][walk.SAVED_AT :])


@NAMES
def test_in_bfloat16_losses_agree_within_half_a_percent(
    name: str, two: tuple[Seen, Path], alone: dict[str, Any]
) -> None:
    ours, theirs = two[0][name]["bfloat16"], two[0]["ddp"]["bfloat16"]
    assert [row[0] for row in ours] == pytest.approx([row[0] for row in theirs], rel=5e-3)
    assert abs(ours[0][0] / alone["curve"][0][0] - 1) > 1e-4, "it did compute in bfloat16"


EVERY_CELL = [
    *((*compiled, mode, "fp32") for compiled in walk.COMPILED for mode in MODES),
    *((name, "block", "none", "bf16") for name in ("ddp", "zero3")),
    ("zero3", "none", "none", "fp32"),
]
SOME_CELLS = [
    ("ddp", "block", "none", "fp32"),
    ("fsdp", "block", "none", "fp32"),
    ("zero3", "block", "selective", "fp32"),
    ("zero3", "none", "none", "fp32"),
]


@pytest.mark.parametrize(
    ("backend", "cells"),
    [
        ("aot_eager_decomp_partition", SOME_CELLS),  # all that a compiler does, but for code
        pytest.param("inductor", EVERY_CELL, marks=pytest.mark.long),
    ],
)
def test_compiling_changes_nothing(backend: str, cells: list[walk.Cell], tmp_path: Path, alone: dict[str, Any]) -> None:
    assert exit_codes(walk.walk_compiled, 2, tmp_path, free_port(), backend, cells) == [0, 0]
    seen = torch.load(tmp_path / "seen.pt", weights_only=True)
    assert list(seen) == cells
    for (name, unit, mode, precision), (rows, graphs, reads) in seen.items():
        if precision == "fp32":
            assert_same_curve(rows, alone["curve"][:3])
        else:
            expected = seen["ddp", "block", mode, precision][0]
            assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], rel=5e-3)
        if (name, unit) == ("ddp", "model"):
            assert graphs > 2, "cut where buckets end, so that gradients are reduced beside the backward"
        if (name, unit) == ("zero2", "model"):
            assert graphs == 1
        if (name, precision) == ("zero3", "fp32"):
            assert reads == seen["zero3", "none", "none", "fp32"][2], "the host waits no more often for it"
        if (name, unit, precision) == ("ddp", "block", "fp32"):
            assert graphs == seen["fsdp", "block", mode, precision][1], "not cut: theirs come one by one anyway"


@pytest.mark.long
@NAMES
def test_it_starts_and_ends_thirty_times(name: str) -> None:
    # Destroying process groups is known to abort an interpreter at its exit now and then.
    codes = [exit_codes(walk.live, 2, free_port(), name) for _ in range(30)]
    assert codes == [[0, 0]] * 30
