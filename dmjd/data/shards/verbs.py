"""The words behind ``dmjd shards``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dmjd.errors import ConfigError, DataError, StorageError
from dmjd.files import at_home, replace_file

_SHOWN_FAULTS = 10
_PNG = "shards.png"


class _Words(NamedTuple):
    """Paths and numbers by place, and what is said by key."""

    places: list[str]
    keys: dict[str, str]

    @property
    def workers(self) -> int | None:
        return self.number("workers", 1) if "workers" in self.keys else None

    @property
    def channels(self) -> int:
        value = self.number("channels", 3)
        if value not in (1, 3):
            raise ConfigError(f"channels must be 1 or 3, got {value}")
        return value

    def number(self, key: str, default: int) -> int:
        text = self.keys.get(key, str(default))
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{key} must be an integer above 0, got {text}")
        return int(text)

    def flag(self, key: str) -> bool:
        text = self.keys.get(key, "false")
        if text not in ("true", "false"):
            raise ConfigError(f"{key} must be true or false, got {text}")
        return text == "true"


def _build(words: _Words) -> Iterator[str]:
    from dmjd.data.shards.build import build

    src, dst = words.places
    for saved in build(src, dst, words.workers, words.number("shard_mb", 256), words.channels):
        yield saved.sentence


def _index(words: _Words) -> Iterator[str]:
    from dmjd.data.shards.in_place import index_tars

    *tars, dst = words.places
    for saved in index_tars(tars, dst, words.workers, words.channels):
        yield saved.sentence


def _verify(words: _Words) -> Iterator[str]:
    from dmjd.data.shards.index import load_splits
    from dmjd.data.shards.verify import verify

    workers, decode, faults = words.workers, words.flag("decode"), list[str]()
    for shards in load_splits(words.places[0]).values():
        found = verify(shards, workers, decode)
        faults += found
        total, tars = shards.manifest.samples, len(shards.manifest.shards)
        state = f"{len(found)} fault(s)" if found else "all intact"
        yield f"{shards.folder}: {total} samples in {tars} shard(s), {state}"
    yield from faults[:_SHOWN_FAULTS]
    if faults:
        raise DataError(
            f"{words.places[0]} has {len(faults)} fault(s), the first: {faults[0]}; restore what is damaged"
        )


def _stat(words: _Words) -> Iterator[str]:
    from dmjd.data.shards.index import load_splits
    from dmjd.data.shards.stat import describe

    for number, shards in enumerate(load_splits(words.places[0]).values()):
        yield from [""] * bool(number)
        yield shards.folder
        yield from describe(shards)


def _show(words: _Words) -> Iterator[str]:
    from dmjd.data.shards.contact import contact_sheet
    from dmjd.data.shards.index import load_splits

    root, count = words.places
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"dmjd shards show takes a folder and how many samples to show, got {count}")
    splits, wanted = load_splits(root), words.keys.get("split", "train")
    if wanted not in splits:
        raise ConfigError(f"{root} has no split {wanted}, only {' and '.join(splits)}; choose with split=")
    path = Path(words.keys.get("output", _PNG))
    sheet = contact_sheet(splits[wanted], int(count))
    try:
        replace_file(path, sheet)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give another file with output=") from error
    yield str(path)


class _Verb(NamedTuple):
    run: Callable[[_Words], Iterator[str]]
    usage: str
    places: tuple[int, int]  # least and most
    keys: tuple[str, ...]


VERBS = {
    "build": _Verb(
        _build, "build SRC DST [workers=N] [shard_mb=256] [channels=3]", (2, 2), ("workers", "shard_mb", "channels")
    ),
    "index": _Verb(_index, "index TAR [TAR ...] DST [workers=N] [channels=3]", (2, 1 << 30), ("workers", "channels")),
    "verify": _Verb(_verify, "verify ROOT [workers=N] [decode=false]", (1, 1), ("workers", "decode")),
    "stat": _Verb(_stat, "stat ROOT", (1, 1), ()),
    "show": _Verb(_show, "show ROOT N [split=train] [output=shards.png]", (2, 2), ("split", "output")),
}


def run(words: Sequence[str]) -> Iterator[str]:
    """Do what the words say; yields lines to print.

    Raises:
        ConfigError: for a verb, a key or a number of words that there is not.
        DataError: for what the sources or the set lack.
    """
    if not words or words[0] not in VERBS:
        raise ConfigError(f"dmjd shards takes one of {', '.join(VERBS)}; dmjd shards --help shows how")
    verb = VERBS[words[0]]
    places, keys = [], {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():  # a path may hold an equals sign
            places.append(at_home(word))
        elif key in verb.keys:
            keys[key] = at_home(value)
        else:
            near = difflib.get_close_matches(key, verb.keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"{key} is not a key of dmjd shards {words[0]}{hint}; the form is: dmjd shards {verb.usage}"
            )
    if not verb.places[0] <= len(places) <= verb.places[1]:
        raise ConfigError(f"the form is: dmjd shards {verb.usage}")
    return verb.run(_Words(places, keys))
