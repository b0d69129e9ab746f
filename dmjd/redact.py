"""Replace secrets in stored and printed text. Imports the standard library only.

Secrets are: userinfo, query and fragment of a URL; arguments of a command after ``pipe:``; values of variables with a
name such as WANDB_API_KEY, and of variables that ``${oc.env:NAME}`` reads.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TextIO, cast

MARK = "***"
"""Replaces a secret."""

SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|BEARER|PASS|PWD|CREDENTIAL|CREDS|AUTH|COOKIE|SIGNATURE"
    r"|(?:^|_)(?:PW|SAS|SIG|PAT|JWT|PIN)(?:_|$)",
    re.I,
)
"""Names of variables whose values are treated as secrets."""

_SCHEME = r"[a-z][a-z0-9+.-]*://"
_URL = re.compile(rf"({_SCHEME})((?:(?!{_SCHEME}|::pipe:)\S)*)", re.I)
_HOST = re.compile(r"(?:\[[\da-f:.]*|[\w.{},\ue000\ue001-]*)\]?(?::\d*)?", re.I)
_CONTAINERS = re.compile(r"(?:abfs|wasb)s?://", re.I)
"""Schemes of URLs with the name of a container before the @."""
_PIPE = re.compile(r"(?<=pipe:)(.*?)(?=::(?:pipe:|[a-z]\w*:|[/.~])|\Z)", re.S)
_PLAIN_WORD = re.compile(
    rf"(?:--?[\w-]+=)?{_SCHEME}.*|(?:\.{{0,2}}|~\w*)/.*|[\w{{}}.,-]+\.(?:tar|tgz|gz|zst|lz4|py|sh)"
    r"|-[a-z]{0,4}-?|--[a-z][a-z0-9-]*"
    rf"|[|&;<>()\[\]{{}}!]+|\$\$|\d?>&?\d?|(?:\ue000\d+\ue001)+|{re.escape(MARK)}"
    "|cat|cp|get|s3|storage|blob|download|copyto|dfs|fs|object|if|then|else|fi|for|in|do|done|exec|sudo|env|nice",
    re.I,
)
"""A word of a command that is no secret: a path, a URL (redacted separately), the name of an option."""
_OPERATOR = re.compile(r".*[|&;(]|then|else|do|exec|sudo|env|nice")
"""A word that is followed by the name of a program."""
_ASSIGNMENT = re.compile(
    r"(?<![/\w])(?!KEY=)(?:(export\s+)(\w+)|([A-Z][A-Z0-9_]*))=(?:'[^']*'|\"[^\"]*\"|\\.|[^\s'\"\\])+"
)
_PARAMETER = re.compile(r"([?&][^=\s?&]*(?:sig|token|key|secret|credential|passw|auth)[^=\s?&]*=)[^\s&'\"]+", re.I)

_INTERPOLATION = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")
_VARIABLE = re.compile(r"(\$\{\s*oc\.env\s*:\s*(\w+))\s*(?:,([^{}]*))?")
_HELD = "\ue000{}\ue001"
"""Stands for an interpolation, which is not a secret, while the text around it is redacted."""
_ONLY_HELD = re.compile(r"(?:(?:[?#&;]|[\w.-]+=)*\ue000\d+\ue001)*")
_USER_WITH_HELD = re.compile(r"(?:[\w.%-]*:)?(?:\ue000\d+\ue001)+|\ue000\d+\ue001:\ue000\d+\ue001")

_known: dict[str, str] = {}
"""Value of a variable that a configuration reads -> its interpolation as typed."""


def redact(text: str) -> str:
    """Replace every secret in a value, such as an argument of the command line, by :data:`MARK`.

    Scheme, host and path of a URL stay, and words of a command that cannot be a secret. Idempotent.
    """
    plain, held = _hold(text)
    plain = _PIPE.sub(lambda match: _command(match[1]), plain)
    shown = _release(_redact_plain(plain), held)
    if shown != text and "pipe:" in text:
        _known[text[text.index("pipe:") :]] = shown[shown.index("pipe:") :]
    return shown


def redact_message(text: str) -> str:
    """Same as :func:`redact` for messages: URLs, assignments, and the commands that :func:`redact` has seen."""
    for value, typed in _known.items():
        text = text.replace(value, typed)
    plain, held = _hold(text)
    return _release(_redact_plain(plain), held)


def _hold(text: str) -> tuple[str, list[str]]:
    """``text`` with a mark for every interpolation, and the interpolations."""
    held = [_VARIABLE.sub(_without_default, found) for found in _INTERPOLATION.findall(text)]
    numbers = iter(range(len(held)))
    return _INTERPOLATION.sub(lambda _: _HELD.format(next(numbers)), text), held


def _release(text: str, held: list[str]) -> str:
    for number, interpolation in enumerate(held):
        text = text.replace(_HELD.format(number), interpolation)
    return text


def _redact_plain(text: str) -> str:
    if "://" in text:
        text = _URL.sub(lambda match: _url(match[1], match[2]), text)
    if "=" in text:
        text = _PARAMETER.sub(lambda match: match[0] if _ONLY_HELD.fullmatch(match[0]) else match[1] + MARK, text)
        text = _ASSIGNMENT.sub(_assignment, text)
    return text


def is_secret(name: str, value: str) -> bool:
    """Whether the variable ``name`` of a site file is a secret."""
    return bool(value and SECRET_NAME.search(name)) or redact(value) != value


def know(text: str) -> None:
    """Make :func:`redact_message` replace the values of secret variables that ``text`` reads by ``${oc.env:NAME}``."""
    for _, name, _ in _VARIABLE.findall(text):
        value = os.environ.get(name, "")
        looks_random = re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])[\w+=-]{16,}", value)
        if len(value) >= 6 and (SECRET_NAME.search(name) or looks_random or redact(value) != value):
            _known[value] = f"${{oc.env:{name}}}"


class Typed(str):
    """A value of a configuration with its form as typed, if they differ: ``${oc.env:NAME}`` and its value."""

    typed: str

    def __new__(cls, value: str, typed: str = "") -> Typed:
        text = super().__new__(cls, value)
        text.typed = typed
        return text


def shown(value: str) -> str:
    """A value of a configuration as stored and printed: as typed, and redacted."""
    return redact(value.typed if isinstance(value, Typed) else value)


def same_but_secrets(one: str, other: str) -> bool:
    """Whether two values of configurations, each as typed or as stored, differ in secrets only."""
    secret = re.compile(rf"{re.escape(MARK)}@|[?#]{re.escape(MARK)}")
    return shown(one) == shown(other) or secret.sub("", redact(str(one))) == secret.sub("", redact(str(other)))


def is_incomplete(value: str) -> bool:
    """Whether a value of a stored configuration lacks a secret or refers to a variable of the environment."""
    return MARK in value or "${oc.env:" in value


class RedactedStream:
    """A text stream that redacts its output; everything else is delegated to ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """See :meth:`io.TextIOBase.write`."""
        return self._stream.write(redact_message(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """See :meth:`io.IOBase.writelines`."""
        self._stream.writelines(map(redact_message, lines))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def redact_output() -> None:
    """Redact ``sys.argv`` and the Python output of this process, including tracebacks and warnings."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, RedactedStream):
            setattr(sys, name, cast(TextIO, RedactedStream(stream)))
    sys.argv[1:] = map(redact, sys.argv[1:])  # recorded by trackers


def _without_default(match: re.Match[str]) -> str:
    if match[3] is None or SECRET_NAME.search(match[2]):
        return match[1]
    return f"{match[1]},{redact(match[3])}"


def _url(scheme: str, rest: str) -> str:
    parts = re.fullmatch(r"([^/?#]*)([^?#]*)(\?[^#]*)?(#.*)?", rest, re.S)
    assert parts is not None, "every part may be empty"
    authority, path, query, fragment = parts.groups(default="")
    user, at, host = authority.rpartition("@")
    is_host = _HOST.fullmatch(host.rstrip("\"'`.,;:)]}>"))  # punctuation of a message
    typed_as_variable = at and _USER_WITH_HELD.fullmatch(user)
    if not typed_as_variable and "@" in (path if is_host and at else "" if is_host else path + query + fragment):
        return f"{scheme}{MARK}@" + _url("", rest.rpartition("@")[2])  # a password with one of /?# in it
    if at and not typed_as_variable and (":" in user or not _CONTAINERS.match(scheme)):
        authority = f"{MARK}@{host}"
    elif not is_host:
        authority = MARK
    shown_parts = (part if _ONLY_HELD.fullmatch(part) else part[0] + MARK for part in (query, fragment) if part[1:])
    return scheme + authority + path + "".join(shown_parts)


def _command(command: str) -> str:
    before = ";"

    def word(match: re.Match[str]) -> str:
        nonlocal before
        bare, last = match[0].rstrip(";|&()"), before
        names_program = _OPERATOR.fullmatch(last) and re.fullmatch(r"[\w./+-]+", bare)
        counts = bare.isdigit() and len(bare) < 7 and not re.match("-[^-cn]", last)
        after_secret = re.fullmatch(r"-[\w-]+", last) and SECRET_NAME.search(last)
        plain = names_program or ((counts or not bare or _PLAIN_WORD.fullmatch(bare)) and not after_secret)
        before = last if _OPERATOR.fullmatch(last) and (bare == MARK or "=" in bare) else match[0]
        return match[0] if plain else MARK + match[0][len(bare) :]

    mark = re.escape(MARK)
    return re.sub(rf"{mark}(?:\s+{mark})+", MARK, re.sub(r"[^\s'\"]+", word, command))


def _assignment(match: re.Match[str]) -> str:
    name, (_, _, value) = match[2] or match[3], match[0].partition("=")
    if not SECRET_NAME.search(name) or _ONLY_HELD.fullmatch(value.strip("'\"")):
        return match[0]
    return f"{match[1] or ''}{name}={MARK}"
