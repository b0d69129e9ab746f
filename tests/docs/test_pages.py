"""What README and docs/ tell people to type or to open exists: words of the command line, links, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dmjd.cli import verbs
from dmjd.cluster.submit import OPTIONS
from dmjd.compose import compose, groups
from dmjd.config import SCHEMAS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "launchers/README.md", *sorted(ROOT.glob("docs/*.md"))]

_STARTS_A_RUN = ("-m dmjd pretrain", "--module dmjd pretrain", "one_host.sh", "several_hosts.sh", "pretrain.sbatch")
_SPAN = re.compile(r"`([^`\n]+)`")
_WORD = re.compile(r"([a-z_.]+)=\S+")
_PLACEHOLDER = re.compile(r"\.\.\.|=[A-Z]|\*|^key=|%a")
_ROOMS = ("csrc", "dmjd", "configs", "docs", "launchers", "benchmarks", "packaging", "tests")
_MADE = ("dmjd/configs", "*.so")
"""Files that pages name and a checkout does not have."""


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(verb, words) of every command line that has a configuration; words with a placeholder in them are left out."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) + re.findall(
        r"(?:^    \S.*\n)+", text, re.MULTILINE
    ):
        for line in block.splitlines():
            line = line.strip()
            if not (line.startswith("dmjd ") or any(start in line for start in _STARTS_A_RUN)):
                continue
            words = shlex.split(line, comments=True)
            verb = words[1] if words[0] == "dmjd" else "pretrain"
            verb, words = (words[2], words[3:]) if verb == "submit" else (verb, words)
            verb = "pretrain" if verb == "preflight" else verb
            yield verb, [word for word in words if re.match(r"[a-z_.]+=", word) and not _PLACEHOLDER.search(word)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    of_jobs = {*OPTIONS, "warm"}
    for verb, words in commands(page.read_text()):
        assert verb in verbs(), verb
        if verb in SCHEMAS:
            required = {"convert": ("input=a.pth", "output=b.pth")}.get(verb, ("checkpoint=x",))
            needed = () if verb in ("pretrain", "plan") else required
            compose(verb, [*needed, *(word for word in words if word.partition("=")[0] not in of_jobs)])


def test_words_in_the_text_are_understood() -> None:
    keys = {*vars(SCHEMAS["pretrain"]()), *groups()}
    words = {word for page in PAGES for span in _SPAN.findall(page.read_text()) for word in span.split()}
    told = [word for word in sorted(words) if (key := _WORD.fullmatch(word)) and key[1].partition(".")[0] in keys]
    told = [word for word in told if not _PLACEHOLDER.search(word)]
    assert len(told) > 20, "the pattern finds no words any more"
    for word in told:
        compose("pretrain", [word])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", there.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, f"{target}#{anchor}"
    for name in re.findall(rf"`((?:{'|'.join(_ROOMS)})/[\w./-]+)`", text):
        made = "NAME" in name or any(fnmatch(name, pattern) for pattern in _MADE)
        assert made or (ROOT / name).exists(), name
    for name in re.findall(r"\b(\w+_(?:cpu|h100|h200)\.json)\b", text):
        assert (ROOT / "benchmarks/results" / name).is_file(), name
