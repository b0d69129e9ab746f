from __future__ import annotations

import operator
from dataclasses import fields
from pathlib import Path

import pytest

from dmjd.builders.schedules import warmup_steps
from dmjd.compose import compose, from_yaml, to_yaml, with_first_key
from dmjd.config import RENAMED, DataConfig, PretrainConfig
from dmjd.errors import ConfigError
from dmjd.evaluate.knn import KnnConfig
from dmjd.explore import TOOLS
from dmjd.keys import command_of_preset
from dmjd.resources import configs_dir

EXPERIMENTS = sorted(path.stem for path in (configs_dir() / "experiment").glob("*.yaml"))


def every_option() -> list[str]:
    return [
        f"{group.name}={path.stem}"
        for group in sorted(configs_dir().iterdir())
        if group.is_dir() and group.name != "decoder"  # which follows backbone
        for path in sorted(group.glob("*.yaml"))
    ]


@pytest.mark.parametrize("override", every_option())
def test_every_option_of_every_group_composes(override: str) -> None:
    group, option = override.split("=")
    tuned = (command_of_preset(option), [override, "init=x"])
    config = compose(*tuned if group == "preset" else ("pretrain", [override]))
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


@pytest.mark.parametrize(
    ("preset", "typed", "steps"),
    [
        ("own_photos", ["optim.warmup_epochs=2"], 20),
        ("own_photos", ["optim.warmup_epochs=null"], 50),
        ("mae_vit_base", ["optim.warmup_percent=20"], 200),
        ("mae_vit_base", ["optim={warmup_percent:20}"], 200),
    ],
)
def test_a_typed_warm_up_replaces_the_presets_in_other_units(preset: str, typed: list[str], steps: int) -> None:
    assert warmup_steps(compose("finetune", [f"preset={preset}", "init=x", *typed]), steps_per_epoch=10) == steps
    both = compose("finetune", ["init=x", "optim.warmup_epochs=2", "optim.warmup_percent=20"])
    with pytest.raises(ConfigError, match="are both set"):
        warmup_steps(both, 10)


def test_more_classes_than_any_head_has_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"head\.num_classes must be at least 2 and at most 1000000, got 1000000000"):
        compose("finetune", ["init=x", "head.num_classes=1000000000"])


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
    # unknown keys: the closest of all keys, whatever their section; names of other code bases; else the section's keys
    "backbone.depht=3": ["backbone.depht is not a key; did you mean backbone.depth?"],
    "backbne.depth=3": ["did you mean backbone.depth?"],
    "depth=3": ["did you mean backbone.depth or method.decoder.depth?"],
    "mask.ratio=75": ["did you mean mask.mask_ratio?"],
    "mask_ratio=.6": ["did you mean mask.mask_ratio?"],
    "lr=3e-4": ["did you mean optim.base_lr?"],
    "optim.lr=3e-4": ["did you mean optim.base_lr?"],
    "data.dir=x": ["did you mean data.root?"],
    "num_workers=3": ["did you mean workers?"],
    "optim_base_lr=3": ["did you mean optim.base_lr?"],
    "optim/base_lr=3": ["did you mean optim.base_lr?"],
    "data__root=x": ["did you mean data.root?"],
    "epohcs=3": ["did you mean epochs?"],
    "method.decoder.zzz=3": ["method.decoder.zzz is not a key; method.decoder has name, dim, depth, num_heads"],
    "zzz=3": ["zzz is not a key; the top level has backbone, data", "batch_size"],
    "backbone.depth.x=3": ["backbone.depth.x", "backbone.depth is a single value"],
    "method.visible_branch=false": ["method.visible_branch is a section with enabled, width, projector"],
    # wrong types
    "backbone.depth=two": ["backbone.depth must be an integer above 0 and at most 1024, got 'two'"],
    "backbone.depth=2.5": ["backbone.depth must be an integer above 0 and at most 1024, got '2.5'"],
    "seed=1.5": ["seed", "1.5"],
    "epochs=": ["epochs must be an integer above 0, got ''"],
    "epochs=[1]": ["epochs", "[1]"],
    "batch_size=1,024": ["batch_size must be an integer above 0, got '1,024'; write 1024"],
    "optim.base_lr=1e-3x": ["optim.base_lr must be a number above 0, got '1e-3x'"],
    "mask.mask_ratio=75%": ["mask.mask_ratio must be a number above 0 and below 1, got '75%'; write 0.75"],
    "mask.mask_ratio=0,6": ["got '0,6'; write 0.6"],
    "data.max_bad_percent=5%": ["got '5%'; write 5"],
    "mask.block=1,2,3": ["mask.block must be a list of 2 integers at least 1, got '1,2,3'; write mask.block=[A,B]"],
    "mask.block=[2,a]": ["mask.block must be a list of 2 integers", "'[2,a]'"],
    "mask.block=[2": ["mask.block must be a list of 2 integers", "'[2'"],
    "optim.betas=.9": ["optim.betas must be a list of 2 numbers at least 0 and below 1, got '.9'"],
    "data.flip=maybe": ["data.flip must be true or false, got 'maybe'"],
    "wandb=${oc.env:DMJD_IS_NOT_SET}": ["wandb: the environment variable DMJD_IS_NOT_SET is not set"],
    # null where a value is needed
    "backbone.depth=null": ["backbone.depth must be an integer above 0 and at most 1024, got 'null'"],
    "run=null": ["run cannot be null; run=\"'null'\""],
    "mask=null": ["mask", "block, uniform"],
    # outside the choices, or of the wrong sign
    "mask.pattern=blok": ["mask.pattern", "block, uniform", "'blok'; did you mean block?"],
    "engine.precision=fp16": ["engine.precision", "auto, bf16, fp32", "'fp16', which needs loss scaling"],
    "engine.precision=fp8": ["engine.precision", "auto, bf16, fp32", "'fp8'"],
    "engine.device=gpu": ["engine.device must be one of auto, cpu, cuda, got 'gpu', which is called cuda"],
    "engine.compile=On": ["none, got 'On'"],
    "resume=yes": ["resume", "auto, never", "'yes'"],
    "method.mim_loss=huber": ["method.mim_loss", "l1, mse, smooth_l1", "'huber'"],
    "epochs=0": ["epochs", "above 0", "0"],
    "epochs=1e30": ["epochs must be above 0 and at most 1e+12, got 1e+30"],
    "log_every=1e18": ["log_every must be at least 1 and at most 1e+12, got 1e+18"],
    "backbone.depth=1e9": ["backbone.depth must be above 0 and at most 1024, got 1000000000"],
    "workers=100000": ["workers must be at least 0 and at most 1024, got 100000"],
    "batch_size=-4": ["batch_size", "above 0", "-4"],
    "optim.min_lr=\u22121": ["optim.min_lr must be at least 0, got -1"],
    "optim.base_lr=nan": ["optim.base_lr", "above 0", "nan"],
    "keep_checkpoints=0": ["keep_checkpoints", "above 0"],
    "mask.mask_ratio=75": ["mask.mask_ratio must be above 0 and below 1, got 75; 75 % is 0.75"],
    "data.crop_pct=1e-9": ["data.crop_pct must be at least 0.1 and at most 1, got 1e-09"],
    "data.mean=[123.675]": [
        "data.mean must be",
        "at most 1, got 123.675; divide values for pixels in 0..255 by 255: 0.485",
    ],
    # unknown options of groups
    "experiment=zzz": ["experiment has no option 'zzz'; choose from", *EXPERIMENTS],
    "experiment=mae_vit_bse": ["experiment has no option 'mae_vit_bse'; did you mean mae_vit_base?"],
    "experiment=MAE-ViT-Base": ["'MAE-ViT-Base'; did you mean mae_vit_base?"],
    "backbone=vit_giant": ["backbone", "'vit_giant'", "vit_base, vit_huge, vit_large, vit_mini, vit_small, vit_tiny"],
    "backbone=3": ["backbone", "vit_base"],
    "mask={views: 3}": ["mask", "block, uniform"],
    "experiment=[demo,mae_vit_base]": ["experiment", "demo"],
    "backbone=glob(*)": ["backbone has no option 'glob(*)'"],
    # syntax that has another meaning in Hydra
    "backbone.depth=1,2": ["backbone.depth", "takes one value"],
    "backbone.depth=range(1,3)": ["backbone.depth", "takes one value"],
    "+backbone.colour=1": ["+backbone.colour=1", "keys are fixed"],
    "~backbone.depth": ["~backbone.depth", "keys are fixed"],
    "~mask": ["~mask", "keys are fixed"],
    "data@foo=digits": ["data@foo"],
    "run=???": ["run is required"],
    # not an override
    "epochs": ["cannot parse 'epochs'", "write epochs=VALUE"],
    "run=": ["run must name a folder, got an empty value"],
    "data.root=": ["data.root must be a path, got an empty value"],
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


@pytest.mark.parametrize("command", TOOLS)
def test_a_file_behind_a_key_belongs_before_it(command: str, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    words = with_first_key(command, ["runs/a", "output=b", str(tmp_path / "a.jpg")])
    with pytest.raises(ConfigError, match=r"a\.jpg' is behind KEY=VALUE; write files and folders before"):
        compose(command, words)


VERBATIM = [
    *("true", "1e3", "3.10", "1_000", "007", "a b", "$HOME", "a(b", "/data/a=b", "a b (c)", "runs/Müller", "/tmp/数据"),
    *(
        "x/epoch=3-step=9",
        "a,b",
        "[a]",
        "{a: 1}",
        "100%",
        "it's",
        "'a' and 'b'",
        '5" disk',
        "a\\b",
        "${nowhere}",
        "a#b",
    ),
    *("${oc.decode:1}", "%a", "*?!", "@x", " a "),
]


@pytest.mark.parametrize("value", VERBATIM)
def test_a_path_stays_as_it_was_typed_with_and_without_quotes_around_it(value: str) -> None:
    config = compose("pretrain", [f"run={value}", f"data.root={value}", f"wandb={value}"])
    assert (config.run, config.data.root, config.wandb) == (value, value, value)
    for quote in "'\"":
        escaped = value.replace(quote, f"\\{quote}")
        assert compose("pretrain", [f"run={quote}{escaped}{quote}"]).run == value
    assert from_yaml(PretrainConfig, to_yaml(config)).run == value


def test_variables_and_other_keys_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "3")
    config = compose("pretrain", ["run=${oc.env:MINE}/é ${x} ${seed}", "seed=7", "epochs='${oc.env:MINE}'"])
    assert (config.run, config.epochs) == ("3/é ${x} 7", 3)


MEANT = {
    "batch_size=1e2": 100,
    "batch_size=64.0": 64,
    "batch_size=+8": 8,
    "batch_size='8'": 8,
    "optim.base_lr=.5": 0.5,
    "optim.eps=1": 1.0,
    "backbone.drop_path=0": 0.0,
    "target.layer=\u22122": -2,
    "data.image_size=32": [32, 32],
    "data.image_size=32x48": [32, 48],
    "data.image_size=32,48": [32, 48],
    "data.image_size=( 32, 48 )": [32, 48],
    "mask.block=2": [2, 2],
    "data.second_size=112": [112, 112],
    "data.second_size=None": None,
    "data.mean=.5": [0.5],
    "data.std=[.1, .2, 1]": [0.1, 0.2, 1.0],
    "optim.milestones=[]": [],
    "optim.no_decay=[cls_token, 'pos_embed']": ["cls_token", "pos_embed"],
    "ema_decay=none": None,
    "wandb=null": None,
    "wandb='null'": "null",
    "data.root=None": None,
    "engine.compile=null": "none",
    **{f"data.flip={text}": True for text in ("true", "True", "yes", "on", "1")},
    **{f"data.flip={text}": False for text in ("false", "FALSE", "no", "off", "0")},
}


@pytest.mark.parametrize(("override", "meant"), MEANT.items(), ids=list(MEANT))
def test_a_value_is_read_by_the_type_of_its_key(override: str, meant: object) -> None:
    value = operator.attrgetter(override.partition("=")[0])(compose("pretrain", [override]))
    assert (value, type(value)) == (meant, type(meant))


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


def test_an_evaluation_knows_which_keys_of_data_are_given() -> None:
    for words, keys in (
        (["data.pad=1"], ["pad"]),
        (["data=folder", "data.root=y"], ["name", "root"]),
        (["data.root=y", "data=digits"], ["root", "name"]),
    ):
        config = compose("knn", ["checkpoint=x", *words])
        assert config.data_keys == keys
        if "root" in keys:
            assert config.data.root == "y"
    assert compose("knn", ["checkpoint=x"]).data is None
    with pytest.raises(ConfigError, match=r"data\.rot is not a key; did you mean data.root"):
        compose("knn", ["checkpoint=x", "data.rot=y"])


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
    with pytest.raises(ConfigError, match=r"backbone has no option 'vit_tall'; .* choose from cae_vit_base"):
        compose(command, ["checkpoint=x.pth", "backbone=vit_tall"])


def test_fields_that_do_not_affect_results_are_marked() -> None:
    free = {"run", "engine", "workers", "resume", "log_every", "checkpoint_every", "keep_checkpoints", "lock_wait"}
    free |= {"keep_every", "online_knn", "tensorboard", "wandb", "guard", "time_budget", "time_margin"}
    free |= {"checkpoint_async", "checkpoint_minutes", "profile", "profile_ranks", "memory_history", "typed"}
    assert {field.name for field in fields(PretrainConfig) if "may_change" in field.metadata} == free
    free = {"root", "max_bad_percent", "timeout", "cache", "cache_gib", "crop_pct", "skip_undecodable"}
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
        r"https://h/\${oc.env:MINE}",
        r"\\${oc.env:MINE}",
        "${",
    ],
)
def test_a_stored_text_reads_no_variable_but_as_a_whole(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "value-of-mine")
    monkeypatch.delenv("UNSET", raising=False)
    stored = "wandb: ${oc.env:MINE}\ndata: {root: '" + text + "'}"
    config = from_yaml(PretrainConfig, stored)
    assert (config.wandb, config.data.root) == ("value-of-mine", text)
    assert to_yaml(from_yaml(PretrainConfig, to_yaml(config))) == to_yaml(config)


@pytest.mark.parametrize("text", ["${", "runs/a${b", "a${b c}", "${nope.x}", r"a\\${b}", "é ${:x}"])
def test_text_that_is_no_interpolation_is_a_path_like_others(text: str) -> None:
    config = compose("pretrain", [f"run={text}"])
    assert (config.run, from_yaml(PretrainConfig, to_yaml(config)).run) == (text, text)


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
