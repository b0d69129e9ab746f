"""Commands, overrides, links and file names in README and docs/ exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dmjd.cli import COMMANDS
from dmjd.cluster.submit import OPTIONS
from dmjd.compose import compose
from dmjd.config import SCHEMAS
from dmjd.evaluate import EVALUATIONS
from dmjd.keys import command_of_preset, groups, key_of_first, keys_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "launchers/README.md", *sorted(ROOT.glob("docs/*.md"))]

_STARTS_A_RUN = ("-m dmjd pretrain", "--module dmjd pretrain", "one_host.sh", "several_hosts.sh", "pretrain.sbatch")
_SPAN = re.compile(r"`([^`\n]+)`")
_OVERRIDE = re.compile(r"([a-z_.]+)=\S+")
_PLACEHOLDER = re.compile(r"\.\.\.|=[A-Z]|\*|^key=|%a")
_FOLDERS = ("csrc", "dmjd", "configs", "docs", "launchers", "benchmarks", "packaging", "tests")
_PACKAGES = "|".join(path.parent.name for path in ROOT.glob("dmjd/*/__init__.py"))
_MADE = ("dmjd/configs", "*.so")
"""Files that pages name and that a build makes."""
PLANS = [name for name in SCHEMAS if name.partition("_")[0] == "plan"]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(command, overrides) of every command line; overrides with a placeholder are left out."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) + re.findall(
        r"(?:^    \S.*\n)+", text, re.MULTILINE
    ):
        for line in block.splitlines():
            line = line.strip()
            if not (line.startswith("dmjd ") or any(start in line for start in _STARTS_A_RUN)):
                continue
            typed = shlex.split(line, comments=True)
            command = typed[1] if typed[0] == "dmjd" else "pretrain"
            command, typed = (typed[2], typed[3:]) if command == "submit" else (command, typed)
            command = "pretrain" if command in ("preflight", "demo") else command
            planned = "_".join(typed[1:3])  # plan finetune, plan segment, plan detect
            command = planned if planned in SCHEMAS else command
            yield command, [text for text in typed if re.match(r"[a-z_.]+=", text) and not _PLACEHOLDER.search(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_compose(page: Path) -> None:
    of_jobs = {*OPTIONS, "warm"}
    for command, overrides in commands(page.read_text()):
        assert command in {*COMMANDS, *EVALUATIONS, *PLANS}, command
        if command in SCHEMAS:
            of_command = {"convert": ("input=a.pth", "output=b.pth"), "finetune": ("init=x",)}
            required = of_command.get(command, (f"{key_of_first(command)}=x",))
            needed = () if command in ("pretrain", *PLANS) else required
            compose(command, [*needed, *(text for text in overrides if text.partition("=")[0] not in of_jobs)])


def test_overrides_in_the_text_compose() -> None:
    keys = {*vars(SCHEMAS["pretrain"]()), *groups()} - {"weights"}  # of evaluations and exports with other values
    texts = {text for page in PAGES for span in _SPAN.findall(page.read_text()) for text in span.split()}
    found = [text for text in sorted(texts) if (key := _OVERRIDE.fullmatch(text)) and key[1].partition(".")[0] in keys]
    found = [text for text in found if not _PLACEHOLDER.search(text)]
    assert len(found) > 20, "the pattern finds no overrides any more"
    for text in found:
        key, _, value = text.partition("=")
        of_key = (command for command in ("pretrain", "segment", "detect") if key in keys_of(command))
        command = command_of_preset(value) if key == "preset" else next(of_key, "pretrain")
        compose(command, [text] if command == "pretrain" else ["init=x", text])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_have_at_most_120_characters(page: Path) -> None:
    """Except rows of tables, which cannot be broken."""
    lines = enumerate(page.read_text().splitlines(), 1)
    long = [number for number, line in lines if len(line) > 120 and not line.startswith("|")]
    assert not long


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
    for name in re.findall(rf"`((?:{'|'.join(_FOLDERS)})/[\w./-]+)`", text):
        made = "NAME" in name or any(fnmatch(name, pattern) for pattern in _MADE)
        assert made or (ROOT / name).exists(), name
    for name in re.findall(rf"`((?:{_PACKAGES})/[\w./-]+\.py)", text):
        assert (ROOT / "dmjd" / name).is_file(), name
    for name in re.findall(r"\b(\w+_(?:cpu|h100|h200)\.json)\b", text):
        assert (ROOT / "benchmarks/results" / name).is_file(), name
