"""Estimates of `dmjd plan` against arithmetic and against stored measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dmjd.accelerators import ACCELERATORS, accelerator_of
from dmjd.builders.plan import Activations, Growth, Plan
from dmjd.builders.recipe import MACHINES
from dmjd.cli import main
from dmjd.cluster.plan_page import page
from dmjd.compose import compose, from_yaml
from dmjd.config import EngineConfig, PlanConfig
from dmjd.errors import ConfigError, DataError
from dmjd.parallel.engines import blocks_per_unit, state_bytes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 2**30
Command = Callable[..., tuple[int, str, str]]


def make_plan(*words: str) -> Plan:
    return Plan(compose("plan", words))


def finetune_plan(*words: str) -> Plan:
    return Plan(compose("plan_finetune", words))


def with_activations(plan: Plan, per_image: float) -> Plan:
    """The plan of a model whose activations take ``per_image`` bytes."""
    sizes = plan.config.traced
    flat, growing = Growth(sizes, [0] * len(sizes)), Growth(sizes, [per_image * images for images in sizes])
    plan.traced["none"] = Activations(flat, growing, growing, growing)
    return plan


def test_parameters_of_vit_b_are_the_known_number() -> None:
    plan = make_plan("experiment=mae_vit_base")
    # timm's vit_base_patch16_224 without a head and with fixed positions instead of 197 x 768 learned ones.
    assert plan.encoder_parameters == 85_798_656 - 197 * 768


def test_parameters_of_vit_2b_are_those_of_24_blocks() -> None:
    plan = make_plan("experiment=mae_vit_base", "backbone=vit_2b")
    width, patch = 2560, 3 * 14 * 14
    block = (4 + 8) * width**2 + (4 + 4 + 1 + 4) * width  # matrices; biases and two norms
    assert (
        plan.encoder_parameters
        == 24 * block + patch * width + width + 2 * width + width * plan.model.encoder.num_prefix_tokens
    )


def test_gpu_hours_are_flops_by_rate() -> None:
    plan = make_plan("experiment=mae_vit_base", "epochs=10", "images=1000", "mfu=50", "gpu=a100-40")
    assert plan.gpu_hours * 3600 * 156e12 == pytest.approx(plan.flops_per_image * 10_000)
    time = next(line for line in page(plan) if line.startswith("time"))
    assert float(time.split()[1]) == pytest.approx(plan.gpu_hours, rel=5e-3), "not 0, however few images there are"


def test_a_fine_tuning_is_planned_with_its_own_model_and_schedule() -> None:
    plan = finetune_plan("preset=mae_vit_base", "images=1000", "mfu=50", "gpu=a100-40")
    # timm's vit_base_patch16_224 with 1000 classes and fixed positions; 17.5 G multiply-adds in DeiT's tables.
    assert plan.parameters == 86_567_656 - 197 * 768
    assert plan.flops_per_image == pytest.approx(3 * 2 * 17.5e9, rel=0.01)
    assert plan.gpu_hours * 3600 * 156e12 == pytest.approx(plan.flops_per_image * 100 * 1000)
    assert finetune_plan("preset=mae_vit_base", "head.num_classes=10").parameters == plan.parameters - 990 * 769


def test_frozen_layers_have_no_gradients_and_the_average_is_of_the_whole_model() -> None:
    words = "preset=mae_vit_base", "gpus=8"
    plain = finetune_plan(*words)
    frozen = finetune_plan(*words, "freeze=13", "ema_decay=.999")
    head = 768 * 1000 + 1000 + 2 * 768
    for engine in ("ddp", "fsdp"):
        whole, part = plain.state(engine), frozen.state(engine)
        assert part.weights == whole.weights
        assert part.gradients == pytest.approx(whole.gradients * head / plain.parameters)
        assert part.optimizer == pytest.approx(whole.optimizer * head / plain.parameters)
    assert [frozen.frozen(name) for name in ("ddp", "fsdp")] == [4 * plain.parameters, 4 * plain.parameters / 8]
    with_activations(frozen, GIB)
    assert frozen.peak("ddp", "none", 2) < with_activations(plain, GIB).peak("ddp", "none", 2)


def test_micro_batches_of_a_fine_tuning_are_whole_pairs() -> None:
    words = "preset=mae_vit_base", "batch_size=72", "gpus=8", "gpu=a100-40"
    with pytest.raises(ConfigError, match="micro-batches of 9; set a multiple of 16"):
        finetune_plan(*words)
    alone = with_activations(finetune_plan(*words, "augment.mixup=0", "augment.cutmix=0"), 5 * GIB)
    pairs = with_activations(finetune_plan(*words[:1], "batch_size=144", *words[2:]), 5 * GIB)
    for plan, images, accumulation in ((alone, 3, 3), (pairs, 6, 3)):
        fit = plan.fit("ddp", "none")
        assert fit is not None
        assert (fit.micro_batch, fit.grad_accum_steps) == (images, accumulation)


@pytest.mark.parametrize(
    ("engine", "weights", "gradients", "optimizer", "gathered"),
    [
        ("single", 400, 400, 800, 0),
        ("ddp", 400, 400, 800, 0),
        ("zero1", 400, 400, 75, 0),
        ("zero2", 400, 25, 75, 40 + 2 * 200_000_000),
        ("zero3", 25, 25, 50, 400 + 40 + 2 * 200_000_000),
        ("fsdp", 25, 25, 50, 120),
    ],
)
def test_state_of_100_parameters_on_16_gpus(
    engine: str, weights: float, gradients: float, optimizer: float, gathered: float
) -> None:
    assert state_bytes(engine, 100, 10, 16) == (weights, gradients, optimizer, gathered)


@pytest.mark.parametrize(("engine", "gradients"), [("zero1", 400), ("zero2", 0), ("zero3", 0)])
def test_an_offloaded_optimizer_is_on_the_host(engine: str, gradients: float) -> None:
    own, offloaded = (state_bytes(engine, 100, 10, 16, offload=offload) for offload in (False, True))
    assert offloaded == own._replace(gradients=gradients, optimizer=0)
    plan = make_plan("experiment=mae_vit_base", "gpus=2", f"engine={engine}", "engine.offload_optimizer=true")
    assert plan.state(engine).optimizer == 0
    assert plan.state("fsdp").optimizer > 0, "it has no such option"


def test_the_fewest_gpus_are_on_the_page_where_memory_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", *SMALL, "backbone=vit_tiny", "batch_size=4096", "gpus=2", "gpu=rtx3060")
    assert main([*words, "engine.activation_checkpointing=none"]) == 0
    assert "Fewest GPUs" not in capsys.readouterr().out
    assert main([*words, "engine.activation_checkpointing=full"]) == 0
    text = capsys.readouterr().out.partition("Fewest GPUs (rtx3060)")[2]
    rows = [line.split("  ")[1] for line in text.splitlines()[2:]]
    zero = [f"zero{stage}{option}" for stage in (1, 2, 3) for option in ("", ", offload_optimizer")]
    assert rows == ["single", "ddp", "fsdp", *zero]
    prime = ("plan", *SMALL, "backbone=vit_tiny", "batch_size=4099", "gpu=rtx3060")
    assert main([*prime, "engine.activation_checkpointing=full"]) == 0
    rows = capsys.readouterr().out.partition("Fewest GPUs (rtx3060)")[2].splitlines()
    assert rows[3].split() == ["ddp", "none"]
    assert rows[-1] == "none: no number of GPUs up to 1024 that divides batch_size=4099 suffices"


@pytest.mark.parametrize(("words", "shards"), [((), 8), (("engine=hsdp", "engine.replicas=4"), 4)])
def test_hsdp_divides_within_a_copy(words: tuple[str, ...], shards: int) -> None:
    plan = make_plan("experiment=mae_vit_base", "gpus=16", "batch_size=768", *words)
    hsdp, fsdp = plan.state("hsdp"), plan.state("fsdp")
    assert hsdp == fsdp._replace(**{kind: getattr(fsdp, kind) * 16 / shards for kind in hsdp._fields[:3]})


def test_units_of_several_blocks_are_whole_for_a_moment() -> None:
    words = "experiment=mae_vit_base", "gpus=8", "batch_size=768"
    one, three = (make_plan(*words, f"engine.blocks_per_unit={size}") for size in (1, 3))
    for engine in ("fsdp", "hsdp"):
        assert one.state(engine).gathered == 3 * 4 * 7_087_872  # timm's Block(768)
        assert three.state(engine) == one.state(engine)._replace(gathered=3 * one.state(engine).gathered)
    for engine in ("ddp", "zero2", "zero3"):
        assert three.state(engine) == one.state(engine)


@pytest.mark.parametrize(("backbone", "one_host", "several"), [("vit_base", 6, 6), ("vit_large", 8, 4)])
def test_units_have_at_most_100_million_parameters_and_half_the_encoder(
    backbone: str, one_host: int, several: int
) -> None:
    model = make_plan("experiment=mae_vit_base", f"backbone={backbone}").model
    assert [blocks_per_unit(EngineConfig("fsdp"), model, near) for near in (True, False)] == [one_host, several]
    assert blocks_per_unit(EngineConfig("fsdp", blocks_per_unit=3), model, True) == 3


@pytest.mark.parametrize(
    ("reshard", "whole"),  # of 600 million parameters, in blocks of 20
    [(None, 520), (True, 20 + 60), (False, 600)],
)
def test_zero3_keeps_what_it_may_until_the_backward_pass(reshard: bool | None, whole: int) -> None:
    million = 10**6
    gathered = state_bytes("zero3", 600 * million, 20 * million, 8, reshard).gathered
    assert gathered == 4 * million * (whole + 20 + 2 * 50), "weights, a block's gradients and buckets"


def test_the_largest_micro_batch_that_divides_the_batch_is_found() -> None:
    plan = with_activations(make_plan("experiment=mae_vit_base", "batch_size=768", "gpus=8", "gpu=a100-40"), GIB)
    fit = plan.fit("ddp", "none")
    assert fit is not None
    # 37 GiB, less 1.7 of weights, gradients and moments, hold 35; of the divisors of 96 the next below is 32.
    assert (fit.micro_batch, fit.grad_accum_steps) == (32, 3)
    assert fit.peak == plan.peak("ddp", "none", 32)
    assert with_activations(plan, 40 * GIB).fit("ddp", "none") is None


@pytest.mark.parametrize(("engine", "reshard"), [("single", "null"), ("fsdp", "null"), ("fsdp", "true")])
def test_gradients_of_an_earlier_micro_batch_are_there_throughout_the_next(engine: str, reshard: str) -> None:
    words = "experiment=mae_vit_base", "gpus=2", "batch_size=64", f"engine.reshard_after_forward={reshard}"
    plan = with_activations(make_plan(*words), GIB)
    state = plan.state(engine)
    held = state.weights + state.optimizer
    uncopied = 2 * 119_000_000 if reshard == "true" else 0  # blocks' bfloat16 copies, about
    assert plan.peak(engine, "none", 4) == pytest.approx(held + 4 * GIB - uncopied, rel=0.01)
    assert plan.peak(engine, "none", 4, 2) == pytest.approx(plan.peak(engine, "none", 4) + state.gradients, rel=1e-9)


def test_weights_that_fsdp_keeps_are_copies_only_in_bfloat16() -> None:
    """Gathered in float32 they are beside the activations, 4 bytes of 110 million parameters of blocks."""
    words = "experiment=mae_vit_base", "gpus=2", "batch_size=64", "engine.reshard_after_forward=false"
    peaks = [
        with_activations(make_plan(*words, f"engine.precision={precision}"), GIB).peak("fsdp", "none", 4)
        for precision in ("bf16", "fp32")
    ]
    assert peaks[1] - peaks[0] == pytest.approx(4 * 110_000_000, rel=0.01)


def test_cuda_graphs_are_counted_with_gradients_of_their_own_and_what_they_do_not_lend() -> None:
    words = "experiment=mae_vit_base", "batch_size=64"
    plain = with_activations(make_plan(*words), GIB)
    graphs = with_activations(make_plan(*words, "engine.compile=block", "engine.cuda_graphs=true"), GIB)
    assert graphs.peak("single", "none", 4) == pytest.approx(1.06 * plain.peak("single", "none", 4, 2))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("batch_size=100", "gpus=64"),
            "batch_size=100 is not divisible by engine.grad_accum_steps=1 times 64",
        ),
        (("batch_size=120", "gpus=12"), "gpus=12 is not divisible by gpus_per_node=8"),
        (("gpus=8", "engine.replicas=16"), "engine.replicas=16 does not divide gpus=8"),
        (("gpus=8", "engine=hsdp", "engine.replicas=3"), "engine.replicas=3 does not divide gpus=8"),
        (("gpu=a100",), "gpu must be one of .*a100-40.*, got 'a100'"),
        (("mfu=0",), "mfu must be above 0 and at most 100, got 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_plan(*words)


SMALL = ("backbone=vit_tiny", "data.image_size=64", "backbone.depth=1", "method.decoder.depth=1")


def test_the_page_names_every_engine_and_the_modes_that_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "gpus=16", "gpu=a100-40"]) == 0
    text = capsys.readouterr().out
    engines = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
    for word in (*engines, "GPU hours", "64 on each of 16 GPU(s)", "engine.grad_accum_steps"):
        assert word in text
    assert "\n  engine  none\n" in text, "every engine takes the whole batch without recomputation"
    assert main(["plan", *SMALL, "gpus=16", "engine=ddp", "engine.activation_checkpointing=full", "gpu=t4"]) == 0
    text = capsys.readouterr().out
    assert "fsdp" not in text
    assert "\n  engine  full\n" in text
    assert "t4 has no bf16 tensor cores" in text
    small = ("backbone=vit_tiny", "data=fashion_mnist", "backbone.patch_size=8", "backbone.depth=1", "batch_size=64")
    assert main(["plan", "finetune", *small, "head.num_classes=10"]) == 0
    text = capsys.readouterr().out
    for word in ("head                  10 classes", "60000 (data=fashion_mnist)", "forward and backward\n", "single"):
        assert word in text


def test_modes_are_tried_until_every_engine_takes_the_batch_at_once() -> None:
    plan = make_plan(*SMALL, "batch_size=64", "gpu=rtx3060")
    for mode, per_image in (("none", GIB), ("selective", GIB / 2), ("mlp", GIB / 8), ("full", 1)):
        plan.traced[mode] = with_activations(make_plan(*SMALL, "batch_size=64"), per_image).traced["none"]
    assert plan.modes == ("none", "selective", "mlp")


def test_images_are_those_of_the_data_set(tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def images(*words: str) -> int:
        return make_plan(*SMALL, *words).images

    assert images() == 1_281_167
    assert images(f"data.root={image_folder}") == 48
    assert images(f"data.root={image_folder}", "images=7") == 7
    assert images("data=digits", "data.channels=1", "data.mean=0", "data.std=1") == 1437
    assert images("data=stream", "data.root=x.tar", "data.samples=5") == 5
    assert main(["shards", "build", str(image_folder), str(tmp_path / "shards"), "workers=1"]) == 0
    assert images("data=shards", f"data.root={tmp_path / 'shards'}") == 48
    with pytest.raises(DataError, match="no images"):
        images(f"data.root={tmp_path / 'shards' / 'train'}")


def test_the_average_and_a_frozen_target_take_memory() -> None:
    words = "experiment=mae_vit_base", "gpus=8", "batch_size=64"
    plain, average = make_plan(*words), make_plan(*words, "ema_decay=.999")
    encoder = plain.encoder_parameters
    assert [average.frozen(name) for name in ("ddp", "zero1", "fsdp")] == [4 * encoder, 4 * encoder, 4 * encoder / 8]
    for plan in (plain, average):
        with_activations(plan, GIB)
    assert average.peak("ddp", "none", 1) - plain.peak("ddp", "none", 1) == pytest.approx(4 * encoder)
    # Published sizes: DALL-E's encoder 53.8 M, CLIP's ViT-B/16 image tower 86.2 M.
    assert make_plan("experiment=beit_vit_base").target_parameters == pytest.approx(53.8e6, rel=0.01)
    assert make_plan("experiment=jd_target_clip").target_parameters == pytest.approx(86.2e6, rel=0.01)
    assert make_plan("experiment=data2vec_vit_base").target_parameters == 0, "the average itself"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3080 Ti", None),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA GeForce RTX 5080", "rtx5080"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX A5000", "a5000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
    ],
)
def test_devices_are_known_by_their_names(device: str, name: str | None) -> None:
    assert accelerator_of(device) is (None if name is None else ACCELERATORS[name])


@cache
def planned_once(*words: str) -> Plan:
    return make_plan(*words, "gpus=1")


def stored() -> list[dict[str, Any]]:
    return json.loads((RESULTS / "plan_memory_h200.json").read_text())["rows"]


@pytest.mark.long
@pytest.mark.parametrize(
    "row", stored(), ids=lambda row: f"{row['words'][-1]}-{row['images']}-{row['mode']}{'-compiled' * row['compile']}"
)
def test_the_plan_is_within_10_percent_of_measured_peaks_and_20_compiled(row: dict[str, Any]) -> None:
    peak = planned_once(*row["words"]).peak("single", row["mode"], row["images"])
    assert peak == pytest.approx(row["peak_bytes"], rel=0.2 if row["compile"] else 0.1)


STEPS = [
    pytest.param("pretrain_step_h100.json", "experiment=mae_vit_base", 0, 256, marks=pytest.mark.long),
    pytest.param("pretrain_step_h100.json", "experiment=dmjd_vit_base_hog", 1, 256, marks=pytest.mark.long),
    ("convvit_step_h200.json", "experiment=dmjd_convvit_base_hog", 1, 128),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "words", "row", "images"), STEPS)
def test_the_plan_is_within_10_percent_of_benchmarked_steps(file: str, words: str, row: int, images: int) -> None:
    record = json.loads((RESULTS / file).read_text())
    rows = record["rows"] if isinstance(record, dict) else record
    planned = planned_once(words).peak("single", "none", images)
    assert planned / GIB == pytest.approx(rows[row]["peak_gib"], rel=0.1)


LARGE = {
    "vit_large": ("experiment=mae_vit_base", "backbone=vit_large"),
    "convvit_large": ("experiment=dmjd_convvit_large_hog",),
}


@pytest.mark.long
@pytest.mark.parametrize("model", LARGE)
def test_the_plan_is_within_10_percent_of_peaks_under_every_engine(model: str) -> None:
    rows = [row for row in json.loads((RESULTS / "engines_h200.json").read_text()) if row["model"] == model]
    traced = planned_once(*LARGE[model])
    traced.activations("none")
    for row in rows:
        engine, micro, gpus = row["engine"], row["micro_batch"], row["gpus"]
        plan = make_plan(*LARGE[model], *row["words"], f"gpus={gpus}", f"batch_size={gpus * micro}")
        plan.traced = traced.traced  # of a model, whatever the cluster
        assert plan.peak(engine, "none", micro) / GIB == pytest.approx(max(row["peak_gib"]), rel=0.1), row


def test_a_plan_has_the_values_of_the_recipe_for_cuda(dmjd: Command, tmp_path: Path) -> None:
    for number in range(4):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{number}.png")
    code, out, err = dmjd("plan", "experiment=own_photos", f"data.root={tmp_path}", "gpus=2", "images=4", "--cfg")
    assert code == 0, err
    planned = from_yaml(PlanConfig, out)
    machine = MACHINES["cuda"]
    assert (planned.data.image_size, planned.backbone.depth, planned.batch_size, planned.epochs) == (
        [32, 32],
        machine.encoders[0][1],
        4,
        10 * machine.pretrain.epochs,
    )
    code, out, err = dmjd("plan", "experiment=own_photos", "--cfg")
    assert (code, from_yaml(PlanConfig, out)) == (0, compose("plan", ["experiment=own_photos"]))
    assert err == (
        "recipe=small_data sets keys at the first start, from the images; give data.root=FOLDER for these values\n"
    )
