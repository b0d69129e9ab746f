"""The commands of ``dmjd shards``: parse their arguments and run them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dmjd.config.data import ENDINGS
from dmjd.config.fields import suggestion
from dmjd.data.held_out import HeldOut
from dmjd.errors import ConfigError, DataError, StorageError
from dmjd.files import at_home, replace_file

_PRINTED_FAULTS = 10


class _Arguments(NamedTuple):
    """Parsed arguments of a command: positional paths and numbers, and ``key=value`` options."""

    positional: list[str]
    options: dict[str, str]

    @property
    def workers(self) -> int | None:
        return self.number("workers", 1) if "workers" in self.options else None

    @property
    def channels(self) -> int:
        value = self.number("channels", 3)
        if value not in (1, 3):
            raise ConfigError(f"channels must be 1 or 3, got {value}")
        return value

    @property
    def held_out(self) -> HeldOut | None:
        text = self.options.get("val_percent", "0")
        if not re.fullmatch(r"\d{1,2}(\.\d{1,9})?", text, re.ASCII):
            raise ConfigError(f"val_percent must be a number from 0 to below 100, got {text}")
        seed = self.number("val_seed", 0, least=0)
        return HeldOut(float(text), seed) if float(text) else None

    def number(self, key: str, default: int, least: int = 1) -> int:
        text = self.options.get(key, str(default))
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(f"{key} must be an integer of at least {least}, got {text}")
        return int(text)

    def flag(self, key: str) -> bool:
        text = self.options.get(key, "false")
        if text not in ("true", "false"):
            raise ConfigError(f"{key} must be true or false, got {text}")
        return text == "true"


def _build(arguments: _Arguments) -> Iterator[str]:
    from dmjd.data.shards.build import build_shards

    src, dst = arguments.positional
    endings = ENDINGS
    if arguments.flag("skip_undecodable"):
        from dmjd.data.decode import decodable

        endings = tuple(decodable(ENDINGS))
    shard_mb = arguments.number("shard_mb", 256)
    for saved in build_shards(src, dst, arguments.workers, shard_mb, arguments.channels, arguments.held_out, endings):
        yield saved.summary


def _index(arguments: _Arguments) -> Iterator[str]:
    from dmjd.data.shards.in_place import index_tars

    *tars, dst = arguments.positional
    for saved in index_tars(tars, dst, arguments.workers, arguments.channels):
        yield saved.summary


def _verify(arguments: _Arguments) -> Iterator[str]:
    from dmjd.data.shards.index import load_splits
    from dmjd.data.shards.verify import verify

    (root,), workers, decode, faults = arguments.positional, arguments.workers, arguments.flag("decode"), list[str]()
    for shards in load_splits(root).values():
        found = verify(shards, workers, decode)
        faults += found
        total, tars = shards.manifest.samples, len(shards.manifest.shards)
        state = f"{len(found)} fault(s)" if found else "all intact"
        yield f"{shards.folder}: {total} samples in {tars} shard(s), {state}"
    yield from faults[:_PRINTED_FAULTS]
    if faults:
        raise DataError(f"{root} has {len(faults)} fault(s), the first: {faults[0]}; restore the damaged files")


def _stat(arguments: _Arguments) -> Iterator[str]:
    from dmjd.data.shards.index import load_splits
    from dmjd.data.shards.overview import describe

    for number, shards in enumerate(load_splits(arguments.positional[0]).values()):
        yield from [""] * bool(number)
        yield shards.folder
        yield from describe(shards)


def _show(arguments: _Arguments) -> Iterator[str]:
    from dmjd.data.shards.index import load_splits
    from dmjd.data.shards.overview import contact_sheet

    root, count = arguments.positional
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"dmjd shards show takes a folder and how many samples to show, got {count}")
    splits, split = load_splits(root), arguments.options.get("split", "train")
    if split not in splits:
        raise ConfigError(f"{root} has no split {split}, only {' and '.join(splits)}; choose with split=")
    path = Path(arguments.options.get("output", "shards.png"))
    sheet = contact_sheet(splits[split], int(count))
    try:
        replace_file(path, sheet)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give another file with output=") from error
    yield str(path)


class _Command(NamedTuple):
    """``counts``: least and most number of positional arguments; ``keys``: allowed options."""

    run: Callable[[_Arguments], Iterator[str]]
    meaning: str
    usage: str
    counts: tuple[int, int]
    keys: tuple[str, ...]


COMMANDS = {
    "build": _Command(
        _build,
        "Write the images of SRC as tars of about shard_mb MB each, with manifest and index.",
        "build SRC DST [workers=N] [shard_mb=256] [channels=3] [val_percent=0] [val_seed=0] [skip_undecodable=false]",
        (2, 2),
        ("workers", "shard_mb", "channels", "val_percent", "val_seed", "skip_undecodable"),
    ),
    "index": _Command(
        _index,
        "Write manifest and index of existing tars, which stay unchanged.",
        "index TAR [TAR ...] DST [workers=N] [channels=3]",
        (2, 1 << 30),
        ("workers", "channels"),
    ),
    "verify": _Command(
        _verify,
        "Compare each tar's size and sha256 and each sample's crc32; decode=true: decode every image.",
        "verify ROOT [workers=N] [decode=false]",
        (1, 1),
        ("workers", "decode"),
    ),
    "stat": _Command(_stat, "Print sizes, classes and rejected images.", "stat ROOT", (1, 1), ()),
    "show": _Command(
        _show,
        "Write a contact sheet of N images.",
        "show ROOT N [split=train] [output=shards.png]",
        (2, 2),
        ("split", "output"),
    ),
}

_ARGUMENTS = {
    "SRC": "folder of images, tars, COCO or ADE20K, or a pattern of tars",
    "DST": "output folder",
    "TAR": "path, pattern or URL of webdataset tars",
    "ROOT": "folder or URL of a shard set",
    "N": "number of images",
    "workers": "processes; default: all cores",
    "channels": "1 (grey) or 3 (RGB)",
    "val_percent": "percentage of the images to hold out as DST/val, by a hash of their paths and val_seed",
    "skip_undecodable": "true: skip files whose decoder is not installed",
}


def manual() -> Iterator[str]:
    """Lines of help: each command's usage and meaning, then the arguments."""
    for command in COMMANDS.values():
        yield from (f"  dmjd shards {command.usage}", f"      {command.meaning}")
    yield from ("", *(f"  {name:16} {meaning}" for name, meaning in _ARGUMENTS.items()))


def run(arguments: Sequence[str]) -> Iterator[str]:
    """Run ``dmjd shards ARGUMENTS``; yields the lines to print.

    Raises:
        ConfigError: for an unknown command or option, or a wrong number of arguments.
        DataError: if the source or the shard set is missing or damaged.
    """
    if not arguments or arguments[0] not in COMMANDS:
        hint = suggestion(arguments[0], COMMANDS) if arguments else ""
        raise ConfigError(f"dmjd shards takes one of {', '.join(COMMANDS)}{hint}; dmjd shards --help shows how")
    name, command = arguments[0], COMMANDS[arguments[0]]
    positional, options = [], {}
    for argument in arguments[1:]:
        key, equals, value = argument.partition("=")
        if not equals or not key.isidentifier():  # a path may contain an equals sign
            positional.append(at_home(argument))
        elif key in command.keys:
            options[key] = at_home(value)
        else:
            hint = suggestion(key, command.keys)
            raise ConfigError(f"{key} is not a key of dmjd shards {name}{hint}; usage: dmjd shards {command.usage}")
    if not command.counts[0] <= len(positional) <= command.counts[1]:
        raise ConfigError(f"usage: dmjd shards {command.usage}")
    return command.run(_Arguments(positional, options))
