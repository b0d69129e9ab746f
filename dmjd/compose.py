"""From command-line words to a typed configuration, through Hydra's compose API.

``hydra.main`` makes a folder per rank, changes the working directory and dies on ``--local_rank``; composing ourselves
does none of that. Whatever Hydra or OmegaConf object to becomes one sentence that names the key and what it may be.
"""

from __future__ import annotations

import difflib
import json
import logging
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

from dmjd.config import RENAMED, SCHEMAS, PretrainConfig, check_fields, expand_paths
from dmjd.errors import ConfigError
from dmjd.files import printable
from dmjd.redact import Typed, know, redact, shown
from dmjd.resources import configs_dir
from dmjd.safe_load import parse_yaml

logger = logging.getLogger("dmjd")

DESCRIBING = ("experiment", "backbone")
"""Words of pre-training's by which other verbs are told the model of a file."""


def groups() -> dict[str, list[str]]:
    """Config groups and their options, as shipped: ``{"data": ["digits", "folder", ...], ...}``."""
    folders = sorted(path for path in configs_dir().iterdir() if path.is_dir() and any(path.glob("*.yaml")))
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def compose(verb: str, overrides: Sequence[str]) -> Any:
    """The configuration object of ``verb`` (see :data:`SCHEMAS`) under ``overrides`` such as ``"optim.base_lr=1e-3"``.

    Raises:
        ConfigError: naming the key and the allowed keys or values.
    """
    described = _describing(overrides) if _takes_files(SCHEMAS[verb]) else []
    composed = _composed(verb, overrides)
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ConfigError(f"{missing[0]} is required: dmjd {verb} {missing[0]}=...")
        config = _configuration(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(_sentence(error)) from error
    if described:
        config.model = compose("pretrain", described)
    check_fields(config)
    return config


def values(verb: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What :func:`compose` starts from, as nested dicts, in which a required value that is not given is "???".

    Raises:
        ConfigError: as :func:`compose`, of words and their types.
    """
    found = OmegaConf.to_container(_composed(verb, overrides))
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _composed(verb: str, overrides: Sequence[str]) -> DictConfig:
    schema = SCHEMAS[verb]
    described = _describing(overrides) if _takes_files(schema) else []
    words = _checked(verb, [word for word in overrides if word not in described])
    ConfigStore.instance().store(name=f"{verb}_schema", node=schema)
    try:
        with initialize_config_dir(str(configs_dir().resolve()), version_base="1.3"):
            return hydra_compose(verb, words)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_sentence(error)) from error


def _configuration(composed: Any) -> Any:
    typed = OmegaConf.to_container(composed)
    config: Any = OmegaConf.to_object(composed)
    _keep_typed(config, typed)
    expand_paths(config)
    return config


def _keep_typed(config: Any, typed: Any) -> None:
    """Put a :class:`Typed` where a text, but for a choice, has been resolved, so that its secret need not be stored."""
    for item in fields(config) if isinstance(typed, dict) else ():
        value, text = getattr(config, item.name), typed[item.name]
        if is_dataclass(value):
            _keep_typed(value, text)
        elif isinstance(value, str) and "${" in str(text) and "choices" not in item.metadata:
            setattr(config, item.name, Typed(value, text.replace("\\${", "${")))


_VARIABLE = re.compile(r"\$\{oc\.env:\w+\}")


def _resolvable(values: Any) -> Any:
    """``values`` of a stored configuration, where a text reads nothing but one variable that is set, as a whole.

    A text around the variable could send its value to any host.
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
    """Whether a verb takes files of weights, which do not say what model they are of."""
    return any(field.name == "model" and dataclass_of(get_type_hints(schema)["model"]) for field in fields(schema))


def _describing(overrides: Sequence[str]) -> list[str]:
    """The words of pre-training's that say which model a file of weights is of."""
    return [word for word in overrides if word.partition("=")[0].partition(".")[0] in DESCRIBING]


def stored(config: Any) -> dict[str, Any]:
    """The configuration as nested dicts for files and trackers: texts as they were typed, without secrets."""
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
    """The inverse of :func:`to_yaml`. Raises ConfigError, naming ``source``, on a text that does not fit ``schema``.

    Redacted secrets stay redacted, and ``${oc.env:NAME}`` stays as typed, unless it is a whole value and is set:
    :func:`dmjd.redact.is_incomplete` finds both.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        know(text)
        values = parse_yaml(text)
        if not isinstance(values, dict):
            raise ConfigError(f"it holds a {type(values).__name__}, not values by key")
        known = OmegaConf.create(_resolvable(_with_present_keys(values)))
        config = _configuration(OmegaConf.merge(OmegaConf.structured(schema), known))
        check_fields(config)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{source} is not a configuration of this version: {_sentence(error)}") from error
    return config


def _with_present_keys(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` of a stored configuration, with former keys (:data:`RENAMED`) under their present names."""
    for former, present in RENAMED.items():
        section, _, old = former.partition(".")
        inner = values.get(section)
        if isinstance(inner, dict) and old in inner:
            values[section] = {present.partition(".")[2] if key == old else key: value for key, value in inner.items()}
    return values


def groups_of(verb: str) -> dict[str, list[str]]:
    """The groups that a verb's defaults list knows, with their options."""
    names = {field.name for field in fields(SCHEMAS[verb])}
    if issubclass(SCHEMAS[verb], PretrainConfig) or _takes_files(SCHEMAS[verb]):
        names |= set(DESCRIBING)
    return {name: options for name, options in groups().items() if name in names}


def _checked(verb: str, overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra is to see them; malformed words, unknown keys and unknown options are refused here."""
    schema, available = SCHEMAS[verb], groups_of(verb)
    chosen: set[str] = set()
    words = []
    if "root" in (field.name for field in fields(schema)) and not any(word.startswith("data=") for word in overrides):
        overrides = [re.sub("^data.root=", "root=", word) for word in overrides]
    for word in overrides:
        know(word)
        former, equals, rest = word.partition("=")
        if former in RENAMED:
            logger.warning("%s is now called %s", former, RENAMED[former])
            word = f"{RENAMED[former]}{equals}{rest}"
        typed = redact(word)
        if word != printable(word):
            raise ConfigError(
                f"{printable(word)} is not UTF-8, which a configuration is written in; give what it names another "
                "name, or begin in that folder and name it by run=. or the like"
            )
        if re.match("([^'\"].*::)?~", word.partition("=")[2]):  # at the front it is a path's, and no symbol of Hydra's
            word = _as_text(word)
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            hint = "write key=value, with quotes around a value that holds symbols: key='\"a=b (c)\"'"
            raise ConfigError(f"cannot read {typed!r}; {hint}") from error
        key = override.key_or_group
        if not key:
            raise ConfigError(f"cannot read {typed!r}; write key=value")
        if override.is_sweep_override():
            raise ConfigError(f"{key}: one value at a time, got {typed!r}; submit one run per value")
        if override.is_delete() or override.is_add():
            raise ConfigError(f"{typed!r} adds or deletes a key; the keys are fixed, write {key}=value to set one")
        if key in available:
            value = override.value()
            if value not in available[key]:
                raise ConfigError(f"{key} has no option {value!r}; choose from {', '.join(available[key])}")
            chosen.add(key)
        else:
            leaf = _leaf_type(schema, key)
            group = key.split(".")[0]
            if group in available and group not in chosen and _is_optional(get_type_hints(schema)[group]):
                raise ConfigError(f"{key} needs {group}=... before it; choose from {', '.join(available[group])}")
            if leaf in (str, str | None) and not isinstance(override.value(), str | None):
                # Text stays as it was typed: 3.10 names a folder, not the number 3.1.
                word = _as_text(word)
        words.append(word)
    return words


def _as_text(word: str) -> str:
    """``KEY=VALUE`` with the value in quotes."""
    key, _, value = word.partition("=")
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _leaf_type(schema: type, key: str) -> Any:
    """The annotation of ``key``. Raises ConfigError, listing what is there, if there is no such key."""
    node: type = schema
    path = key.split(".")
    for depth, name in enumerate(path):
        names = [field.name for field in fields(node)]
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


def _is_optional(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def dataclass_of(annotation: Any) -> type | None:
    """The dataclass inside ``X`` or ``X | None``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


def _sentence(error: Exception) -> str:
    """Hydra and OmegaConf wrap the reason in several lines and exceptions: keep the reason and the full key."""
    while isinstance(error, HydraException) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = str(error).strip().splitlines()[0]
    key = getattr(error, "full_key", None)
    return f"{key}: {reason}" if key else reason
