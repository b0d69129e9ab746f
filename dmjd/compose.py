"""Compose a typed configuration from command-line overrides with Hydra's compose API.

``hydra.main`` is not used: it makes a folder per rank, changes the working directory and fails on ``--local_rank``.
Errors of Hydra and OmegaConf become a ConfigError of one line, with the key and its allowed values.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dmjd.config import (
    FORMER_VALUES,
    PLANS,
    RENAMED,
    SCHEMAS,
    OptimConfig,
    PretrainConfig,
    TrainConfig,
    check_fields,
    expand_paths,
)
from dmjd.config.fields import dataclass_of, suggestion
from dmjd.config.parse import parse, quoted, unquoted
from dmjd.errors import ConfigError
from dmjd.files import at_home, printable
from dmjd.keys import (
    DESCRIBING,
    PATHS,
    SEVERAL,
    command_of_preset,
    fields_of,
    groups,
    groups_of,
    key_of_first,
    keys_of,
    near,
    takes_data,
    takes_files,
)
from dmjd.redact import Typed, know, redact, shown
from dmjd.resources import configs_dir
from dmjd.safe_load import parse_yaml

FEW = 24
"""Up to this many options are listed behind a suggestion."""


def compose(command: str, overrides: Sequence[str]) -> Any:
    """The configuration object of ``command`` (:data:`SCHEMAS`) with overrides such as ``"optim.base_lr=1e-3"``.

    Raises:
        ConfigError: with the key and the allowed keys or values.
    """
    described = _describing(overrides) if takes_files(SCHEMAS[command]) else []
    composed = _composed(command, overrides)
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"{missing[0]} is required: dmjd {command} {missing[0]}=...")
        config = _configuration(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_reason(error)) from error
    if described:
        config.model = compose("pretrain", [*_keys_of_backbones(described), *described])
    if isinstance(config, TrainConfig):
        config.typed = typed_of(config.command, overrides)
    check_fields(config)
    if takes_data(type(config)):
        config.data_keys = _data_keys(overrides)
        config.check()
    return config


def with_first_key(command: str, arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the key of the first one, or of the first ones for a key that takes several, which may be left
    out (:func:`~dmjd.keys.key_of_first`); also :data:`~dmjd.keys.PATHS`. They may hold an equals sign, unless a key is
    before it."""
    first = key_of_first(command)
    if first is None:
        return list(arguments)
    more = first if first in SEVERAL else PATHS if PATHS in keys_of(command) else None
    most = len(arguments) if more else 1
    paths = list(takewhile(lambda text: _is_path(command, text), arguments[:most]))
    if not paths:
        return list(arguments)
    single = [] if first in SEVERAL else [f"{first}={paths.pop(0)}"]
    several = [f"{more}=[{','.join(map(quoted, paths))}]"] if paths else []
    return [*single, *several, *arguments[len(single) + len(paths) :]]


def _is_path(command: str, text: str) -> bool:
    key, equals, _ = text.partition("=")
    is_key = RENAMED.get(key, key) in keys_of(command)
    return not equals or "/" in key or (not is_key and Path(at_home(text)).exists())


def typed_of(command: str, overrides: Sequence[str]) -> list[str]:
    """The names of ``overrides`` of a training, for ``TrainConfig.typed``: groups with their option, keys without
    their value, which may be a secret. Other arguments of a command line are left out."""
    names, options = dict[str, str](), groups_of(command)
    known = {*fields_of(command), *options}
    for text in (part for override in overrides for part in _unpacked(override, known)):
        former, equals, option = text.partition("=")
        key = RENAMED.get(former, former)
        if equals:
            names[key] = f"{key}={unquoted(option)}" if key in options else key
    return list(names.values())


def options_of(command: str, names: Sequence[str]) -> dict[str, str | None]:
    """The option of each group of a training after the groups in ``names``, which :func:`typed_of` made. Groups and
    options that this version does not have are left out."""
    available = groups_of(command)
    pairs = [name.partition("=") for name in names]
    kept = [f"{group}={option}" for group, _, option in pairs if option in available.get(group, ())]
    with _configs(configs_dir(), command, SCHEMAS[command]):
        choices = hydra_compose(command, kept, return_hydra_config=True).hydra.runtime.choices
    return {group: choices.get(group) for group in available}


def keys_of_preset(preset: str) -> set[str]:
    """Dotted keys and groups that the file of a preset of fine-tuning sets, those of presets that it begins with
    included."""
    content = parse_yaml((configs_dir() / "preset" / f"{preset}.yaml").read_text())
    defaults = content.pop("defaults", ())
    before = [name for name in defaults if isinstance(name, str) and name != "_self_"]
    groups = {group.removeprefix("override /") for each in defaults if isinstance(each, dict) for group in each}
    return {key for name in before for key in keys_of_preset(name)} | groups | set(_dotted(content))


def _dotted(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def values(command: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The composed values as nested dicts, before :func:`compose` checks them; a missing required value is "???".

    Raises:
        ConfigError: as :func:`compose`, for keys, options and types.
    """
    found = OmegaConf.to_container(_composed(command, overrides))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _composed(command: str, overrides: Sequence[str]) -> DictConfig:
    schema = SCHEMAS[command]
    described = _describing(overrides) if takes_files(schema) else []
    options, given = _checked(command, [override for override in overrides if override not in described])
    try:
        composed = deepcopy(_of_groups(command, schema, configs_dir(), *options))
        for section in {key.partition(".")[0] for key in given if "." in key}:
            if composed[section] is None and (inner := dataclass_of(get_type_hints(schema)[section])):
                composed[section] = inner()
        for key, value in (_replaced_warmup(given) | given).items():
            OmegaConf.update(composed, key, value)
        return composed
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_reason(error)) from error


def _replaced_warmup(given: Mapping[str, Any]) -> dict[str, Any]:
    """Off for the key of the warm-up that ``given`` does not set, if it sets the other in place of a preset's."""
    epochs, percent = "optim.warmup_epochs", "optim.warmup_percent"
    if percent in given and epochs not in given:
        return {epochs: None}
    if given.get(epochs) is not None and percent not in given:
        return {percent: OptimConfig().warmup_percent}
    return {}


@lru_cache(maxsize=256)
def _of_groups(command: str, schema: type, folder: Path, *options: str) -> DictConfig:
    """The defaults of ``command`` under ``GROUP=OPTION`` overrides; kept, since Hydra takes 0.1 s."""
    with _configs(folder, command, schema):
        return hydra_compose(command, list(options))


def _configs(folder: Path, command: str, schema: type) -> AbstractContextManager[None]:
    """Hydra's search path for the defaults of ``command``."""
    _store_schema(command, schema)
    return initialize_config_dir(str(folder.resolve()), version_base="1.3")


@lru_cache
def _store_schema(command: str, schema: type) -> None:
    ConfigStore.instance().store(name=f"{command}_schema", node=schema)


@lru_cache
def _structured(schema: type) -> Any:
    """The defaults of ``schema``, to be merged into a copy; kept, since building them takes 20 ms."""
    return OmegaConf.structured(schema)


def _configuration(composed: Any) -> Any:
    typed = OmegaConf.to_container(composed)
    config: Any = OmegaConf.to_object(composed)
    _keep_typed(config, typed)
    expand_paths(config)
    return config


def _keep_typed(config: Any, typed: Any) -> None:
    """Replace resolved strings by :class:`Typed`, which keeps the text as typed: a secret is then never stored."""
    for item in fields(config) if isinstance(typed, dict) else ():
        value, text = getattr(config, item.name), typed[item.name]
        if is_dataclass(value):
            _keep_typed(value, text)
        elif isinstance(value, str) and "${" in str(text) and "choices" not in item.metadata:
            setattr(config, item.name, Typed(value, _unescaped(text)))


_VARIABLE = re.compile(r"\$\{oc\.env:\w+\}")


def _resolvable(values: Any) -> Any:
    """``values`` of a stored configuration with every ``${`` escaped, except in a value that is one set variable.

    Text around the variable, such as a URL, could send its value to any host.
    """
    if isinstance(values, dict):
        return {key: _resolvable(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_resolvable(value) for value in values]
    if not isinstance(values, str) or "${" not in values:
        return values
    known = _VARIABLE.fullmatch(values) and values[len("${oc.env:") : -1] in os.environ
    return values if known else _escaped(values)


def _escaped(text: str) -> str:
    """``text`` with every ``${`` as plain text for OmegaConf, which reads two backslashes before it as one."""
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + "\\${", text)


def _unescaped(text: str) -> str:
    return re.sub(r"(\\+)\$\{", lambda found: found[1][: len(found[1]) // 2] + "${", text)


def _describing(overrides: Sequence[str]) -> list[str]:
    """The overrides that describe the model of a file of weights."""
    return [override for override in overrides if override.partition("=")[0].partition(".")[0] in DESCRIBING]


def _keys_of_backbones(described: Sequence[str]) -> list[str]:
    """The keys in the files of the backbones among ``described``, which describe a file of weights; in pre-training the
    keys of a method replace them."""
    pairs = [text.partition("=") for text in described]
    names = [unquoted(option) for key, _, option in pairs if key == "backbone"]
    files = [configs_dir() / "backbone" / f"{name}.yaml" for name in names if name in groups_of("pretrain")["backbone"]]
    found = [item for file in files for item in parse_yaml(file.read_text()).items()]
    # A YAML 1.1 number without a dot, 1e-4, is text.
    return [f"backbone.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in found]


def stored(config: Any) -> dict[str, Any]:
    """The configuration as nested dicts for files and trackers: strings as typed, without secrets."""
    return {item.name: _stored(getattr(config, item.name)) for item in fields(config)}


def _stored(value: Any) -> Any:
    if is_dataclass(value):
        return stored(value)
    if isinstance(value, list):
        return [_stored(each) for each in value]
    return shown(value) if isinstance(value, str) else value


def to_yaml(config: Any) -> str:
    """:func:`stored` as YAML."""
    return str(yaml.safe_dump(stored(config), default_flow_style=False, allow_unicode=True, sort_keys=False))


def from_yaml_of_run(text: str | bytes, source: Path | str) -> TrainConfig:
    """The stored configuration of a run, of the class of the command that made it. Raises ConfigError as
    :func:`from_yaml`, and for a command of another version."""
    try:
        values = parse_yaml(text if isinstance(text, str) else text.decode())
    except ValueError as error:
        raise ConfigError(f"{source} is not a configuration of this version: {_reason(error)}") from error
    command = values.get("command", PretrainConfig.command) if isinstance(values, dict) else PretrainConfig.command
    if command not in PLANS:
        raise ConfigError(
            f"{source} is of dmjd {str(command)[:40]!r}, and this version reads runs of {', '.join(PLANS)}; update dmjd"
        )
    config: TrainConfig = from_yaml(SCHEMAS[command], text, source)
    return config


def from_yaml(schema: type, text: str | bytes, source: Path | str = "this text") -> Any:
    """The inverse of :func:`to_yaml`. Raises ConfigError with ``source`` if the text does not fit ``schema``.

    Redacted secrets stay redacted. ``${oc.env:NAME}`` is resolved only if it is the whole value and NAME is set.
    :func:`dmjd.redact.is_incomplete` finds values that stay redacted or unresolved.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        know(text)
        values = parse_yaml(text)
        if not isinstance(values, dict):
            raise ConfigError(f"it holds a {type(values).__name__}, not keys with values")
        known = OmegaConf.create(_resolvable(_with_present_keys(values)))
        config = _configuration(OmegaConf.merge(_structured(schema), known))
        check_fields(config)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{source} is not a configuration of this version: {_reason(error)}") from error
    return config


def _with_present_keys(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` of a stored configuration, with former keys (:data:`RENAMED`) under their present names, and with keys
    that did not exist yet (:data:`FORMER_VALUES`)."""
    for former, present in RENAMED.items():
        section, _, old = former.partition(".")
        inner = values.get(section)
        if isinstance(inner, dict) and old in inner:
            values[section] = {present.partition(".")[2] if key == old else key: value for key, value in inner.items()}
    for name, value in FORMER_VALUES.items():
        section, _, key = name.partition(".")
        if isinstance(values.get(section), dict):
            values[section].setdefault(key, value)
    return values


def _data_keys(overrides: Sequence[str]) -> list[str]:
    """The keys of ``data`` that are given; ``data=NAME`` gives the key name."""
    given = (text.partition("=")[0] for text in overrides)
    return ["name" if key == "data" else key.removeprefix("data.") for key in given if key.split(".")[0] == "data"]


class _Checked(NamedTuple):
    """options: ``GROUP=OPTION`` for Hydra. given: key -> value, of the right type."""

    options: list[str]
    given: dict[str, Any]


def _checked(command: str, overrides: Sequence[str]) -> _Checked:
    """The overrides, parsed. Malformed overrides, unknown keys and options, and wrong types raise ConfigError here."""
    schema, available = SCHEMAS[command], groups_of(command)
    known = fields_of(command)
    checked = _Checked([], {})
    overrides = [part for text in overrides for part in _unpacked(text, {*known, *available})]
    if takes_data(schema) and "data" in available:
        overrides = [re.sub("^data.name=", "data=", text) for text in overrides]
        if _data_keys(overrides) and "name" not in _data_keys(overrides):
            overrides = ["data=folder", *overrides]  # any option: only the keys that are given count
    for override in overrides:
        know(override)
        key, equals, text = override.partition("=")
        typed = redact(printable(override))
        key = RENAMED.get(key, key)
        if override != printable(override):
            raise ConfigError(
                f"{typed} is not UTF-8, and a configuration file is; rename the file or folder, or change "
                "into that folder and use a relative path (run=.)"
            )
        if key[:1] in ("+", "~"):
            name = key.lstrip("+~")
            raise ConfigError(f"{typed!r} adds or deletes a key; the keys are fixed, write {name}=value to set one")
        if not equals and {PATHS, *SEVERAL} & known.keys() and os.path.exists(at_home(override)):
            raise ConfigError(f"{typed!r} is behind KEY=VALUE; write files and folders before the first KEY=VALUE")
        if not equals or not key:
            hint = f"; {key} is a key: write {key}=VALUE" if key in known or key in available else near(key, command)
            folder = Path(at_home(override))
            if (folder / "checkpoints").is_dir():
                count = "only one" if key_of_first(command) else "no"
                hint = f"; it is a run folder, and dmjd {command} takes {count} run folder"
            elif "data.root" in known and folder.is_dir():
                hint = f": data.root={typed}"
            raise ConfigError(f"cannot parse {typed!r}; write key=value{hint if key else ''}")
        if key in available:
            option = unquoted(text)
            if option not in available[key]:
                if key == "preset" and option in groups()["preset"]:
                    own = f"dmjd {command.replace('_', ' ')} has {', '.join(available[key])}"
                    raise ConfigError(f"preset={option} is of dmjd {command_of_preset(option)}; {own}")
                hint = suggestion(option, available[key])
                if key == "data" and Path(at_home(option)).is_dir():
                    hint = f"; data.root={redact(option)} reads the images of a folder;"
                if not hint or len(available[key]) <= FEW:
                    hint = f"{hint or ';'} choose from {', '.join(available[key])}"
                raise ConfigError(f"{key} has no option {redact(option)!r}{hint}")
            checked.options.append(f"{key}={option}")
            continue
        if key not in known:
            raise ConfigError(f"{key} is not a key{near(key, command)}")
        item, annotation = known[key]
        value = parse(key, text if str in _kinds(annotation) else _filled(key, text), annotation, item.metadata)
        if isinstance(value, list):
            value = [_interpolated(key, each, known) if isinstance(each, str) else each for each in value]
        checked.given[key] = _interpolated(key, value, known) if isinstance(value, str) else value
    return checked


def _unpacked(override: str, known: Container[str]) -> list[str]:
    """``SECTION={KEY:VALUE,...}`` as ``SECTION.KEY=VALUE`` overrides; any other override as it is."""
    section, _, text = override.partition("=")
    values = re.fullmatch(r"\s*\{(.*)\}\s*", text, re.DOTALL)
    if section in known or values is None:
        return [override]
    parts = [part.partition(":") for part in re.split(r",(?![^\[]*\])", values[1]) if part.strip()]
    return [f"{section}.{key.strip()}={value.strip()}" for key, _, value in parts]


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return (annotation, *get_args(annotation))


_INTERPOLATION = re.compile(r"\$\{(?:oc\.env:(\w+)(,[^{}]*)?|([\w.]+))\}")


def _interpolated(key: str, text: str, known: Container[str]) -> str:
    """``text`` for OmegaConf, which replaces ``${oc.env:NAME}`` and ``${KEY}``; any other ``${`` is escaped.

    Raises:
        ConfigError: if the variable NAME is not set and has no default value.
    """
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        variable, default, other = match.groups()
        if other is not None and other not in known:
            return match[0]
        if variable is not None and default is None and variable not in os.environ:
            raise ConfigError(f"{key}: the environment variable {variable} is not set")
        kept.append(match[0])
        return "\0"

    parts = _escaped(_INTERPOLATION.sub(keep, text)).split("\0")
    return parts[0] + "".join(inner + part for inner, part in zip(kept, parts[1:], strict=True))


def _filled(key: str, text: str) -> str:
    """``text`` of a key that is no string, with the values of its variables."""
    if "${" not in text:
        return text
    resolved = OmegaConf.create({"value": _interpolated(key, unquoted(text), ())}).value
    return str(resolved)


def _reason(error: Exception) -> str:
    """First line of the innermost cause of an error of Hydra or OmegaConf, with the full key."""
    while isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = str(error).strip().splitlines()[0]
    key = getattr(error, "full_key", None)
    return f"{key}: {reason}" if key else reason
