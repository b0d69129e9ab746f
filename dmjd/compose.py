"""Compose a typed configuration from command-line overrides with Hydra's compose API.

``hydra.main`` is not used: it makes a folder per rank, changes the working directory and fails on ``--local_rank``.
Errors of Hydra and OmegaConf become a ConfigError of one line, with the key and its allowed values.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dmjd.config import RENAMED, SCHEMAS, EvaluationConfig, PretrainConfig, check_fields, expand_paths
from dmjd.config.fields import keys
from dmjd.errors import ConfigError
from dmjd.files import printable
from dmjd.redact import Typed, know, redact, shown
from dmjd.resources import configs_dir
from dmjd.safe_load import parse_yaml

DESCRIBING = ("experiment", "backbone")
"""Groups of pre-training that describe the model of a file of weights to other commands."""


def groups() -> dict[str, list[str]]:
    """Config groups and their options, as shipped: ``{"data": ["digits", "folder", ...], ...}``."""
    folders = sorted(path for path in configs_dir().iterdir() if path.is_dir() and any(path.glob("*.yaml")))
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def compose(command: str, overrides: Sequence[str]) -> Any:
    """The configuration object of ``command`` (:data:`SCHEMAS`) with overrides such as ``"optim.base_lr=1e-3"``.

    Raises:
        ConfigError: with the key and the allowed keys or values.
    """
    described = _describing(overrides) if _takes_files(SCHEMAS[command]) else []
    composed = _composed(command, overrides)
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"{missing[0]} is required: dmjd {command} {missing[0]}=...")
        config = _configuration(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_reason(error)) from error
    if described:
        config.model = compose("pretrain", described)
    check_fields(config)
    if isinstance(config, EvaluationConfig):
        config.data_keys = _data_keys(overrides)
        config.check()
    return config


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
    described = _describing(overrides) if _takes_files(schema) else []
    checked = _checked(command, [override for override in overrides if override not in described])
    ConfigStore.instance().store(name=f"{command}_schema", node=schema)
    try:
        with initialize_config_dir(str(configs_dir().resolve()), version_base="1.3"):
            return hydra_compose(command, checked)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_reason(error)) from error


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
            setattr(config, item.name, Typed(value, text.replace("\\${", "${")))


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
    return values if known else values.replace("${", "\\${")


def _takes_files(schema: type) -> bool:
    """Whether a command takes files of weights, whose model has to be described by :data:`DESCRIBING`."""
    return any(field.name == "model" and dataclass_of(get_type_hints(schema)["model"]) for field in fields(schema))


def _describing(overrides: Sequence[str]) -> list[str]:
    """The overrides that describe the model of a file of weights."""
    return [override for override in overrides if override.partition("=")[0].partition(".")[0] in DESCRIBING]


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
    return OmegaConf.to_yaml(OmegaConf.create(stored(config)))


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
        config = _configuration(OmegaConf.merge(OmegaConf.structured(schema), known))
        check_fields(config)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{source} is not a configuration of this version: {_reason(error)}") from error
    return config


def _with_present_keys(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` of a stored configuration, with former keys (:data:`RENAMED`) under their present names."""
    for former, present in RENAMED.items():
        section, _, old = former.partition(".")
        inner = values.get(section)
        if isinstance(inner, dict) and old in inner:
            values[section] = {present.partition(".")[2] if key == old else key: value for key, value in inner.items()}
    return values


def _data_keys(overrides: Sequence[str]) -> list[str]:
    """The keys of ``data`` that are given; ``data=NAME`` gives the key name."""
    given = (text.partition("=")[0] for text in overrides)
    return ["name" if key == "data" else key.removeprefix("data.") for key in given if key.split(".")[0] == "data"]


def groups_of(command: str) -> dict[str, list[str]]:
    """The groups that ``command`` takes, with their options."""
    names = {field.name for field in fields(SCHEMAS[command])}
    if issubclass(SCHEMAS[command], PretrainConfig) or _takes_files(SCHEMAS[command]):
        names |= set(DESCRIBING)
    return {name: options for name, options in groups().items() if name in names}


def _checked(command: str, overrides: Sequence[str]) -> list[str]:
    """The overrides for Hydra. Malformed overrides, unknown keys and unknown options raise ConfigError here."""
    schema, available = SCHEMAS[command], groups_of(command)
    checked = []
    if issubclass(schema, EvaluationConfig):
        overrides = [re.sub("^data.name=", "data=", text) for text in overrides]
        if _data_keys(overrides) and "name" not in _data_keys(overrides):
            overrides = ["data=folder", *overrides]  # any option: only the keys that are given count
    for text in overrides:
        know(text)
        former, equals, rest = text.partition("=")
        text = f"{RENAMED.get(former, former)}{equals}{rest}"
        typed = redact(text)
        if text != printable(text):
            raise ConfigError(
                f"{printable(text)} is not UTF-8, and a configuration file is; rename the file or folder, or change "
                "into that folder and use a relative path (run=.)"
            )
        if re.match("([^'\"].*::)?~", text.partition("=")[2]):  # a leading ~ is a home folder, and an error to Hydra
            text = _quoted(text)
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            hint = "write key=value, with quotes around a value that has special characters: key='\"a=b (c)\"'"
            raise ConfigError(f"cannot parse {typed!r}; {hint}") from error
        key = override.key_or_group
        if not key:
            raise ConfigError(f"cannot parse {typed!r}; write key=value")
        if override.is_sweep_override():
            raise ConfigError(f"{key} takes one value, got {typed!r}; start one run per value")
        if override.is_delete() or override.is_add():
            raise ConfigError(f"{typed!r} adds or deletes a key; the keys are fixed, write {key}=value to set one")
        if key in available:
            value = override.value()
            if value not in available[key]:
                raise ConfigError(f"{key} has no option {value!r}; choose from {', '.join(available[key])}")
        else:
            leaf = _leaf_type(schema, key)
            if leaf in (str, str | None) and not isinstance(override.value(), str | None):
                text = _quoted(text)  # a string stays as typed: 3.10 is a folder's name, not the number 3.1
        checked.append(text)
    return checked


def _quoted(override: str) -> str:
    """``KEY=VALUE`` with the value in quotes."""
    key, _, value = override.partition("=")
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _leaf_type(schema: type, key: str) -> Any:
    """The annotation of ``key``. Raises ConfigError with the allowed keys if there is no such key."""
    node: type = schema
    path = key.split(".")
    for depth, name in enumerate(path):
        names = [field.name for field in keys(node)]
        if name not in names:
            where = ".".join(path[:depth]) or "the top level"
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{key} is not a key; {hint}{where} has {', '.join(names)}")
        annotation = get_type_hints(node)[name]
        inner = dataclass_of(annotation)
        if inner is None:
            if depth + 1 < len(path):
                raise ConfigError(f"{key} is not a key; {'.'.join(path[: depth + 1])} is a single value")
            return annotation
        node = inner
    return node


def dataclass_of(annotation: Any) -> type | None:
    """The dataclass inside ``X`` or ``X | None``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


def _reason(error: Exception) -> str:
    """First line of the innermost cause of an error of Hydra or OmegaConf, with the full key."""
    while isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = str(error).strip().splitlines()[0]
    key = getattr(error, "full_key", None)
    return f"{key}: {reason}" if key else reason
