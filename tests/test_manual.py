from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import get_type_hints

import pytest

import dmjd.cli  # noqa: F401 -- registers all commands
from dmjd.compose import compose, values
from dmjd.config import PLANS, SCHEMAS, DetectConfig, DownstreamConfig, SegmentConfig
from dmjd.config.fields import dataclass_of, keys
from dmjd.keys import DESCRIBING, groups, key_of_first, takes_data, takes_files
from dmjd.manual import meanings, page

REQUIRED = {name: [f"{key_of_first(name)}=x"] for name in SCHEMAS if key_of_first(name) and name != "plan_finetune"}
REQUIRED |= {"convert": ["input=x", "output=y"]}
ANNOTATED = ("miou", "ap")  # their data have no groups
WITH_DATA = {name for name, schema in SCHEMAS.items() if takes_data(schema)}


def leaves(value: object, prefix: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {prefix}
    return set().union(*(leaves(inner, f"{prefix}.{key}".lstrip(".")) for key, inner in value.items()))


def shown(lines: list[str]) -> dict[str, str]:
    """Key -> value, of a page's lines that can be typed."""
    typed = [line.split()[0].partition("=") for line in lines if re.match(r"  \S+=", line)]
    return {key: value for key, _, value in typed}


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_key_is_there_and_typing_what_is_shown_changes_nothing(command: str) -> None:
    data = "data.channels=3" if command in ANNOTATED else "data=digits"
    overrides = [*REQUIRED.get(command, []), *([data] if command in {*WITH_DATA, "export"} else [])]
    config = compose(command, overrides)
    found = shown(page(command, overrides))
    schema = SCHEMAS[command]
    recorded = {item.name for item in fields(schema)} - {item.name for item in keys(schema)}  # by the command line
    own = None if getattr(config, "data", None) is None else type(config.data)
    unused = {f"data.{item.name}" for item in fields(own) if "recorded" in item.metadata} if own else set()
    # The model is described by groups.
    assert found.keys() == leaves(asdict(config)) - {"model"} - recorded - unused
    again = compose(command, [*overrides, *(f"{key}={value}" for key, value in found.items())])
    for name in recorded & vars(config).keys():
        setattr(again, name, getattr(config, name))
    assert again == config


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_option_of_every_group_is_there_and_no_group_of_others(command: str) -> None:
    lines = page(command)
    names = {field.name for field in fields(SCHEMAS[command])}
    typed = {field.name for field in keys(SCHEMAS[command])}
    text = " ".join(" ".join(lines).split())
    first = {line.split()[0] for line in lines if line.strip()}
    tunes = issubclass(SCHEMAS[command], DownstreamConfig)  # its rates are those of a preset
    offered = (names - {"optim"}) | {"preset"} if tunes else names
    dense = issubclass(SCHEMAS[command], SegmentConfig | DetectConfig) or command in ANNOTATED
    offered -= {"data"} if dense else set()
    first_words = {"segment": "ade20k", "detect": "coco"}
    own = first_words.get(getattr(SCHEMAS[command], "command", ""), "")
    for group, options in groups().items():
        if group == "preset":
            others = tuple(word for word in first_words.values() if word != own)
            options = [name for name in options if name.startswith(own) and not name.startswith(others)]
        if group in offered or (group in DESCRIBING and ("model" in typed or command in ("pretrain", "plan"))):
            assert f"{group} {', '.join(options)}" in text
        else:
            assert group not in first, f"{command} has no group {group}"


def parts(schema: type) -> Iterator[type]:
    yield schema
    for annotation in get_type_hints(schema).values():
        inner = dataclass_of(annotation)
        if inner is not None:
            yield from parts(inner)


CLASSES = sorted({part for schema in SCHEMAS.values() for part in parts(schema)}, key=lambda schema: schema.__name__)


@pytest.mark.parametrize("schema", CLASSES)
def test_every_key_has_a_meaning(schema: type) -> None:
    hints, texts = get_type_hints(schema), meanings(schema)
    single = {field.name for field in keys(schema) if dataclass_of(hints[field.name]) is None}
    assert not {name for name in single if not texts.get(name)}


def test_values_are_those_under_the_overrides_or_the_defaults_where_those_are_wrong() -> None:
    demo = shown(page("pretrain", ["experiment=demo", "epochs=3"]))
    assert demo["epochs"] == "3"
    assert demo["data.mean"] == "[0.219]"
    for wrong in (["epochz=3"], ["epochs=many"], ["experiment=demo", "nonsense"]):
        assert page("pretrain", wrong) == page("pretrain")
    assert values("convert", [])["input"] == "???"
    assert shown(page("convert"))["input"] == "..."


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_lines_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = page("pretrain")
    assert max(map(len, lines)) <= min(columns, 110)
    assert " ".join(" ".join(lines).split()).count("Masked views per image and step (K).") == 1


def test_plan_shows_its_own_keys_first() -> None:
    first = list(shown(page("plan")))
    assert first[:6] == ["gpus", "gpu", "gpus_per_node", "images", "mfu", "run"]


def test_conditions_and_optional_sections_are_explained() -> None:
    texts = {command: " ".join(" ".join(page(command)).split()) for command in SCHEMAS}
    condition = "(X) before a meaning: the key applies only if SECTION.name=X"
    has_sections = {*PLANS, *PLANS.values(), "export", *WITH_DATA}
    assert {command for command, text in texts.items() if condition in text} == has_sections
    optional = (
        "data: Data set and augmentation. By default those of pre-training; keys that are set replace single values."
    )
    of_runs = {"validate", "export", "miou", "ap"}
    assert {command for command, text in texts.items() if optional in text} == WITH_DATA - of_runs
    describing = "Model of a file of weights; not for runs."
    assert {command for command, text in texts.items() if describing in text} == {
        command for command, schema in SCHEMAS.items() if takes_files(schema)
    }


def test_type_and_allowed_values_stand_beside_a_value() -> None:
    monotone = " ".join(" ".join(page("pretrain")).split())
    for line in (
        "mask.views=2 (int, above 0) Masked views per image",
        "seed=0 (int, at least 0 and below 4294967296)",
        "mask.block=[2,2] (list of 2: int, at least 1)",
        "data.second_size=null (list of 2: int, at least 1 and at most 16384; or null)",
        "optim.no_decay=[] (list: text)",
        "data.root=null (path; or null)",
        "engine.compile=none (none | block | model)",
        "data.flip=true (true | false) Random horizontal flip",
        "wandb=null (text; or null)",
        "data.std=[0.229,0.224,0.225] (list: float, above 0 and at most 1)",
    ):
        assert line in monotone
