"""Completion scripts for shells. A script holds all words itself, so that completing starts no Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from dmjd.config import PLANS, SCHEMAS
from dmjd.keys import fields_of, groups_of

SHELLS = ("bash", "zsh", "fish")

OF_TRAININGS = {"demo": ("pretrain",), "preflight": tuple(PLANS), "submit": tuple(PLANS), "plan": tuple(PLANS.values())}
"""Command -> the configurations whose keys it takes; of other commands their own."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "report": ("baseline=", "output="),
    "shards": (
        *("build", "index", "verify", "stat", "show", "workers=", "channels=", "shard_mb=", "decode=", "output="),
        *("val_percent=", "val_seed=", "skip_undecodable="),
    ),
    "plan": tuple(PLANS),
    "submit": (
        *PLANS,
        "preflight",
        *("knn", "linprobe", "miou", "ap"),
        "site=",
        "nodes=",
        "gpus=",
        "time=",
        "array=",
        "--dry-run",
    ),
    "preflight": (*list(PLANS)[1:], "warm=true"),
    "ops": ("status",),
    "completion": SHELLS,
}
"""Command -> its arguments that are no keys of a configuration."""


def words_of(command: str) -> list[str]:
    """The words that complete an argument: ``KEY=`` and, of a group or of choices, ``KEY=VALUE``."""
    words = ["--help", "--help-all", *ARGUMENTS.get(command, ())]
    schemas = OF_TRAININGS.get(command, (command,) if command in SCHEMAS else ())
    for schema in schemas:
        words += _keys(schema)
    return [*dict.fromkeys(words), "--cfg"] if schemas else words


def _keys(command: str) -> list[str]:
    words = [f"{group}={option}" for group, options in groups_of(command).items() for option in options]
    for key, (item, annotation) in fields_of(command).items():
        choices = item.metadata.get("choices") or (("true", "false") if annotation is bool else ())
        words += [f"{key}={choice}" for choice in choices] or [f"{key}="]
    return words


def script(shell: str, summaries: Mapping[str, str]) -> str:
    """The completion script for ``shell``, one of :data:`SHELLS`.

    Args:
        summaries: command -> its line in ``dmjd --help``.
    """
    words = {command: words_of(command) for command in summaries} | {"help": list(summaries)}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](summaries, words)


def _cases(words: Mapping[str, list[str]], array: str) -> str:
    """Lines of a shell's ``case`` over commands, which set the array."""
    return "\n".join(f"        {command}) {array}=({shlex.join(found)}) ;;" for command, found in words.items())


def _bash(summaries: Mapping[str, str], words: Mapping[str, list[str]]) -> str:
    # bash splits a line at "=" and ":", so the word is taken from the whole line, and what comes before is cut off.
    return f"""# dmjd completion for bash: eval "$(dmjd completion bash)" in ~/.bashrc
_dmjd() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" words=() IFS=$' \\t\\n'
    local current="${{line##* }}" command="${{COMP_WORDS[1]}}"
    local before="${{current%"${{current##*[=:]}}"}}"
    if [[ ${{line% *}} != *' '* ]]; then
        words=({shlex.join([*summaries, "help"])})
    else
        case $command in
{_cases(words, "words")}
        esac
    fi
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "${{words[*]}}" -- "$current"))
    COMPREPLY=("${{COMPREPLY[@]#"$before"}}")
    if [[ -z ${{COMPREPLY[*]}} ]]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -- "${{current#"$before"}}"))
    elif [[ ${{COMPREPLY[0]}} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
}}
complete -F _dmjd dmjd
"""


def _zsh(summaries: Mapping[str, str], words: Mapping[str, list[str]]) -> str:
    described = " ".join(shlex.quote(f"{name}:{_plain(text)}") for name, text in summaries.items())
    return f"""#compdef dmjd
# dmjd completion for zsh: eval "$(dmjd completion zsh)" in ~/.zshrc, after compinit
_dmjd() {{
    local -a commands found
    commands=({described})
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    case $words[2] in
{_cases(words, "found")}
    esac
    local -a open whole
    open=(${{(M)found:#*=}})
    whole=(${{found:#*=}})
    compadd -S '' -- $open
    compadd -- $whole
    if compset -P '*='; then _files; else _files -/; fi
}}
compdef _dmjd dmjd
"""


def _fish(summaries: Mapping[str, str], words: Mapping[str, list[str]]) -> str:
    lines = ["# dmjd completion for fish: dmjd completion fish | source, in ~/.config/fish/config.fish"]
    for name, text in summaries.items():
        lines.append(f"complete -c dmjd -n __fish_use_subcommand -f -a {name} -d {_fish_quoted(_plain(text))}")
    for name, found in words.items():
        lines.append(f"complete -c dmjd -n '__fish_seen_subcommand_from {name}' -a {_fish_quoted(' '.join(found))}")
    return "\n".join(lines) + "\n"


def _plain(summary: str) -> str:
    """The first part of a command's line, which explains it."""
    return re.split(r"[:;(]", summary)[0].strip()


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
