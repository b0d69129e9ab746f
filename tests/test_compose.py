from __future__ import annotations

import operator
from dataclasses import fields

import pytest

from dmjd.compose import compose, from_yaml, to_yaml
from dmjd.config import RENAMED, DataConfig, PretrainConfig
from dmjd.errors import ConfigError
from dmjd.evaluate.knn import KnnConfig
from dmjd.resources import configs_dir

EXPERIMENTS = sorted(path.stem for path in (configs_dir() / "experiment").glob("*.yaml"))


def every_option() -> list[str]:
    return [
        f"{group.name}={path.stem}"
        for group in sorted(configs_dir().iterdir())
        if group.is_dir()
        for path in sorted(group.glob("*.yaml"))
    ]


@pytest.mark.parametrize("override", every_option())
def test_every_option_of_every_group_composes(override: str) -> None:
    group, option = override.split("=")
    config = compose("pretrain", [override])
    if group in ("method", "target", "data", "engine"):
        assert getattr(config, group).name == option


def test_experiments_are_the_published_ones() -> None:
    mae = compose("pretrain", ["experiment=mae_vit_base"])
    assert (mae.epochs, mae.batch_size, mae.optim.base_lr, mae.optim.warmup_epochs) == (800, 4096, 1.5e-4, 40)
    assert (mae.mask.pattern, mae.mask.views, mae.mask.mask_ratio) == ("uniform", 1, 0.75)
    assert (mae.target.name, mae.target.norm, mae.backbone.class_token) == ("pixels", "patch", True)
    assert (mae.method.decoder.depth, mae.method.decoder.dim, mae.method.decoder.num_heads) == (8, 512, 16)
    assert (mae.optim.weight_decay, list(mae.optim.betas)) == (0.05, [0.9, 0.95])
    dmjd = compose("pretrain", ["experiment=dmjd_vit_base_hog"])
    assert (dmjd.mask.pattern, dmjd.mask.views, dmjd.mask.mask_ratio) == ("block", 2, 0.6)
    assert (dmjd.target.name, dmjd.target.norm, dmjd.method.visible_branch.enabled) == ("hog", "layernorm", True)


def test_an_override_wins_over_the_experiment_and_a_later_one_over_an_earlier() -> None:
    config = compose("pretrain", ["experiment=demo", "epochs=3", "mask=uniform", "mask.views=3", "epochs=4"])
    assert (config.epochs, config.mask.pattern, config.mask.views) == (4, "uniform", 3)
    assert compose("pretrain", ["epochs=4", "mask=uniform", "experiment=demo"]).mask.pattern == "uniform"


def test_composing_leaves_nothing_behind_for_the_next_time() -> None:
    before = compose("pretrain", [])
    compose("pretrain", ["experiment=demo", "seed=7"])
    with pytest.raises(ConfigError):
        compose("pretrain", ["epochs=none"])
    assert compose("pretrain", []) == before


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_yaml_holds_the_whole_configuration(experiment: str) -> None:
    overrides = [f"experiment={experiment}", "optim.eps=1e-9", "mask.pred_ratio=null", "data.root=a folder/of images"]
    config = compose("pretrain", overrides)
    again = from_yaml(PretrainConfig, to_yaml(config))
    assert again == config
    assert type(again.optim.eps) is float


def test_yaml_of_an_evaluation_holds_its_optional_data() -> None:
    for overrides in (["checkpoint=x"], ["checkpoint=x", "data=digits", "data.pad=3"]):
        config = compose("knn", overrides)
        assert from_yaml(KnnConfig, to_yaml(config)) == config
        assert (config.data is None) == (len(overrides) == 1)


@pytest.mark.parametrize(
    "text",
    ["epochs: many", "epoch: 3", "mask: {colour: red}", "epochs: [1", "- 3", "epochs: 3\nepochs: 4"],
)
def test_yaml_that_is_no_configuration_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(PretrainConfig, text)
    assert "\n" not in str(caught.value)


BAD_OVERRIDES = {
    # unknown keys
    "backbone.depht=3": ["backbone.depht", "did you mean depth?", "embed_dim"],
    "backbne.depth=3": ["backbne", "did you mean backbone?", "optim"],
    "depth=3": ["depth", "top level", "batch_size"],
    "method.decoder.width=3": ["method.decoder.width", "method.decoder has", "num_heads"],
    "backbone.depth.x=3": ["backbone.depth.x", "backbone.depth is a single value"],
    "hydra.run.dir=x": ["hydra.run.dir", "top level"],
    # wrong types
    "backbone.depth=two": ["backbone.depth", "'two'", "Integer"],
    "backbone.depth=2.5": ["backbone.depth", "2.5", "Integer"],
    "seed=1.5": ["seed", "1.5"],
    "epochs=": ["epochs"],
    "epochs=[1]": ["epochs", "[1]"],
    "optim.base_lr=1e-3x": ["optim.base_lr", "1e-3x", "Float"],
    "mask.block=2": ["mask.block", "list"],
    "mask.block=[2,a]": ["mask.block", "'a'", "Integer"],
    "data.flip=maybe": ["data.flip", "maybe", "bool"],
    "method.visible_branch=false": ["method.visible_branch"],
    # null where a value is needed
    "backbone.depth=null": ["backbone.depth", "not Optional"],
    "run=null": ["run", "not Optional"],
    "mask=null": ["mask", "block, uniform"],
    # outside the choices, or of the wrong sign
    "mask.pattern=blok": ["mask.pattern", "block, uniform", "'blok'"],
    "engine.precision=fp16": ["engine.precision", "auto, bf16, fp32", "'fp16', which needs loss scaling"],
    "engine.precision=fp8": ["engine.precision", "auto, bf16, fp32", "'fp8'"],
    "resume=yes": ["resume", "auto, never", "'yes'"],
    "method.mim_loss=huber": ["method.mim_loss", "l1, mse, smooth_l1", "'huber'"],
    "epochs=0": ["epochs", "above 0", "0"],
    "batch_size=-4": ["batch_size", "above 0", "-4"],
    "optim.base_lr=nan": ["optim.base_lr", "above 0", "nan"],
    "keep_checkpoints=0": ["keep_checkpoints", "above 0"],
    # unknown options of groups
    "experiment=foo": ["experiment", "'foo'", *EXPERIMENTS],
    "backbone=vit_huge": ["backbone", "'vit_huge'", "vit_base, vit_large, vit_mini, vit_small, vit_tiny"],
    "backbone=3": ["backbone", "vit_base"],
    "mask={views: 3}": ["mask", "block, uniform"],
    "experiment=[demo,mae_vit_base]": ["experiment", "demo"],
    # syntax that has another meaning in Hydra
    "backbone.depth=1,2": ["backbone.depth", "takes one value"],
    "backbone.depth=range(1,3)": ["backbone.depth", "takes one value"],
    "backbone=glob(*)": ["backbone", "takes one value"],
    "+backbone.colour=1": ["+backbone.colour=1", "keys are fixed"],
    "~backbone.depth": ["~backbone.depth", "keys are fixed"],
    "~mask": ["~mask", "keys are fixed"],
    "data@foo=digits": ["data@foo"],
    "run=${nowhere}": ["run", "nowhere"],
    "run=???": ["run is required"],
    # not an override
    "epochs": ["'epochs'", "key=value"],
    "--epochs=3": ["--epochs=3", "key=value"],
    "run=a(b": ["'run=a(b'"],
    "run=~nobody-here/a": ["run=~nobody-here/a", "no user nobody-here", "./~nobody-here/a"],
    "seed=~3": ["seed", "~3"],
    "": ["key=value"],
    "=3": ["=3", "key=value"],
}


@pytest.mark.parametrize(("override", "parts"), BAD_OVERRIDES.items(), ids=list(BAD_OVERRIDES))
def test_a_bad_override_is_an_error_of_one_line(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("pretrain", ["experiment=demo", override])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, f"{message!r} lacks {part!r}"


@pytest.mark.parametrize("override", ["run=a(b", "run=/data/a=b"])
def test_the_error_of_a_value_that_needs_quotes_mentions_them(override: str) -> None:
    with pytest.raises(ConfigError, match="quote"):
        compose("pretrain", [override])
    key, value = override.split("=", 1)
    assert getattr(compose("pretrain", [f"{key}='{value}'"]), key) == value


@pytest.mark.parametrize("value", ["true", "1e3", "3.10", "1_000", "007", "a b", "$HOME"])
def test_a_string_stays_as_it_was_typed(value: str) -> None:
    assert compose("pretrain", [f"run={value}"]).run == value
    assert compose("pretrain", [f"data.root={value}"]).data.root == value


def test_a_tilde_is_a_home_wherever_a_path_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for override in ("run=~/a b", "run='~/a b'", 'run="~/a b"'):
        assert compose("pretrain", [override]).run == "/home/me/a b"
    keys = ("init", "data.cache", "data.root", "target.weights", "engine.deepspeed_config")
    config = compose("pretrain", [f"{key}=~/{key}" for key in keys])
    assert [operator.attrgetter(key)(config) for key in keys] == [f"/home/me/{key}" for key in keys]
    knn = compose("knn", ["checkpoint=~/run", "output=~", "data=shards", "data.root=~/shards", "experiment=demo"])
    assert (knn.checkpoint, knn.output, knn.data.root) == ("/home/me/run", "/home/me", "/home/me/shards")
    convert = compose("convert", ["input=~/é.pth", "output=~/b"])
    assert (convert.input, convert.output) == ("/home/me/é.pth", "/home/me/b")
    assert from_yaml(PretrainConfig, "data: {root: ~/images}").data.root == "/home/me/images"


@pytest.mark.parametrize(
    ("root", "meant"),
    [
        ("~/{0..3}.tar::~/4.tar", "/home/me/{0..3}.tar::/home/me/4.tar"),
        ("/images/{0..3}.tar::~/4.tar", "/images/{0..3}.tar::/home/me/4.tar"),
        ("pipe:cat ~/{0..3}.tar", "pipe:cat ~/{0..3}.tar"),
        ("https://host/~me/{0..3}.tar", "https://host/~me/{0..3}.tar"),
        ("images/~", "images/~"),
        ("./~/x", "./~/x"),
    ],
)
def test_a_tilde_elsewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch, root: str, meant: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert compose("pretrain", [f"data.root='{root}'"]).data.root == meant


def test_a_tilde_behind_another_root_needs_no_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert compose("pretrain", ["data.root=/images::~/b"]).data.root == "/images::/home/me/b"


def test_an_evaluation_needs_its_checkpoint() -> None:
    for command in ("knn", "linprobe"):
        with pytest.raises(ConfigError, match=f"checkpoint is required: dmjd {command} checkpoint="):
            compose(command, [])


def test_an_evaluation_takes_keys_of_data_only_with_a_data_set() -> None:
    with pytest.raises(ConfigError, match=r"data\.pad needs data=.* auto, digits, fashion_mnist, folder"):
        compose("knn", ["checkpoint=x", "data.pad=1"])
    assert compose("knn", ["checkpoint=x", "data=folder", "data.root=y"]).data.root == "y"
    moved = compose("knn", ["checkpoint=x", "data.root=y"])
    assert (moved.data, moved.root) == (None, "y")


@pytest.mark.parametrize("override", ["mask=block", "method=mae"])
def test_an_evaluation_has_no_groups_of_pretraining(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("knn", ["checkpoint=x", override])
    assert override.split("=")[0] in str(caught.value)
    assert "neighbours" in str(caught.value), "the keys that knn does have"


@pytest.mark.parametrize("command", ["knn", "linprobe", "export"])
def test_overrides_of_pretraining_describe_the_model_of_a_file(command: str) -> None:
    overrides = ["experiment=beit_vit_base", "backbone.depth=3"]
    config = compose(command, ["checkpoint=x.pth", *overrides])
    assert config.model == compose("pretrain", overrides)
    assert compose(command, ["checkpoint=x"]).model is None
    with pytest.raises(ConfigError, match="backbone has no option 'vit_tall'; choose from convvit_base"):
        compose(command, ["checkpoint=x.pth", "backbone=vit_tall"])


def test_fields_that_do_not_affect_results_are_marked() -> None:
    free = {"run", "engine", "workers", "resume", "log_every", "checkpoint_every", "keep_checkpoints", "lock_wait"}
    free |= {"keep_every", "online_knn", "tensorboard", "wandb", "guard", "time_budget", "time_margin"}
    free |= {"checkpoint_async", "checkpoint_minutes", "profile", "profile_ranks", "memory_history", "typed"}
    assert {field.name for field in fields(PretrainConfig) if "may_change" in field.metadata} == free
    free = {"root", "max_bad_percent", "timeout", "cache", "cache_gib", "crop_pct"}
    assert {field.name for field in fields(DataConfig) if "may_change" in field.metadata} == free


@pytest.mark.parametrize(
    "text",
    [
        "https://${oc.env:MINE}@h",
        "${oc.env:MINE}x",
        "${oc.env:UNSET}",
        "${oc.env:${wandb}}",
        "${wandb}",
        "${oc.decode:1}",
    ],
)
def test_a_stored_text_reads_no_variable_but_as_a_whole(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "value-of-mine")
    monkeypatch.delenv("UNSET", raising=False)
    stored = "wandb: ${oc.env:MINE}\ndata: {root: '" + text + "'}"
    config = from_yaml(PretrainConfig, stored)
    assert (config.wandb, config.data.root) == ("value-of-mine", text)
    assert to_yaml(from_yaml(PretrainConfig, to_yaml(config))) == to_yaml(config)


@pytest.mark.parametrize(
    ("former", "present", "value"),
    [
        ("engine.accumulation", "engine.grad_accum_steps", 4),
        ("backbone.hidden", "backbone.masked_tokens", "mask_token"),
        ("mask.predict_ratio", "mask.loss_ratio", 0.5),
    ],
)
def test_a_former_key_is_read_from_the_command_line_and_from_a_stored_configuration(
    former: str, present: str, value: object
) -> None:
    section, _, name = present.partition(".")
    config = compose("pretrain", [f"{former}={value}"])
    assert getattr(getattr(config, section), name) == value
    text = to_yaml(config)
    assert f"  {name}: {value}\n" in text
    before = text.replace(f"  {name}: {value}\n", f"  {former.partition('.')[2]}: {value}\n")
    assert before != text
    assert from_yaml(PretrainConfig, before) == config


def test_every_former_key_is_gone_and_every_present_one_is_there() -> None:
    config = compose("pretrain", [])
    for former, present in RENAMED.items():
        section, _, name = present.partition(".")
        assert hasattr(getattr(config, section), name)
        assert not hasattr(getattr(config, former.partition(".")[0]), former.partition(".")[2])
