"""HTML of report pages: one self-contained file. Every text argument is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --muted: #59636e; --rule: #d8dee4; --well: #f6f8fa;
  --good: #1a7f37; --bad: #cf222e }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --ink: #e6edf3; --muted: #9198a1; --rule: #30363d; --well: #151b23;
    --good: #3fb950; --bad: #f85149 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p { color: var(--muted); margin: .3rem 0 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top }
th { color: var(--muted); font-weight: 500 }
.pairs th { width: 14rem }
.pairs td { overflow-wrap: anywhere }
.scores td + td, .scores th + th { text-align: right }
.number { text-align: right }
.runs td, .runs th { white-space: nowrap }
.scores small { display: block; color: var(--muted) }
.up { color: var(--good) } .down { color: var(--bad) }
figure { margin: 0; overflow-x: auto; background: #ffffff; border: 1px solid var(--rule); border-radius: 6px }
figure img { display: block; width: 100%; min-width: 34rem; height: auto }
ul { color: var(--muted); margin: .3rem 0 0; padding-left: 1.2rem }
details { margin-top: 1rem } summary { cursor: pointer; font-weight: 600 }
pre { background: var(--well); border-radius: 6px; padding: .8rem; overflow-x: auto; font-size: .85rem }
@media (max-width: 30rem) { .pairs th { width: 9rem } }
"""


def document(title: str, *parts: str) -> str:
    """A page; ``title`` is text, ``parts`` are HTML."""
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""


def heading(text: str) -> str:
    """The title of a section."""
    return f"<h2>{escape(text)}</h2>"


def figure(caption: str, png: bytes) -> str:
    """An embedded picture under its caption."""
    data = base64.b64encode(png).decode("ascii")
    return f'{heading(caption)}\n<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}"></figure>'


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    lines = (f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return '<table class="pairs">\n' + "\n".join(lines) + "\n</table>"


def notes(lines: Iterable[str]) -> str:
    """A list of texts."""
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"
