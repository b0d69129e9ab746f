"""HTML of pages: one self-contained file that loads nothing. Text arguments are escaped; parts and SVG are HTML.

The page follows the light or dark scheme of the reader, prints in light colours, and fits a width of 400 pixels: wide
tables scroll on their own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

_LIGHT = """color-scheme: light; --paper: #ffffff; --ink: #1f2328; --muted: #59636e; --rule: #d8dee4; --well: #f6f8fa;
  --good: #1a7f37; --bad: #cf222e; --focus: #0969da"""
_DARK = """color-scheme: dark; --paper: #0d1117; --ink: #e6edf3; --muted: #9198a1; --rule: #30363d; --well: #151b23;
  --good: #3fb950; --bad: #f85149; --focus: #58a6ff"""

STYLE = (
    f"""
:root {{ {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
"""
    + """
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p { color: var(--muted); margin: .3rem 0 0; overflow-wrap: anywhere }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px }
a { color: var(--focus) }
.skip { position: absolute; left: -999rem; background: var(--paper); color: var(--focus); padding: .3rem .6rem }
.skip:focus { left: 1rem; top: .3rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top }
th { color: var(--muted); font-weight: 500 }
tbody th { color: var(--ink) }
.pairs tbody th { color: var(--muted); width: 14rem }
.pairs td { overflow-wrap: anywhere }
.scores td, .scores th + th { text-align: right }
.scores tbody th { min-width: 12rem; font-weight: 400 }
.scores small { display: block; color: var(--muted) }
.runs td, .runs th { white-space: nowrap }
.runs thead th, .runs .text { white-space: normal; overflow-wrap: break-word }
.runs td.text:last-child { min-width: 14rem }
.runs thead th:nth-child(2) { min-width: 10rem }
.groups td, .groups th + th { text-align: right; white-space: nowrap }
.number { text-align: right }
.up { color: var(--good) } .down { color: var(--bad) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1.5rem }
figure { margin: 0; min-width: 0 }
figcaption { font-weight: 600 }
figure > p, .key { font-size: .85rem }
figure svg { display: block; width: 100%; height: auto }
svg * { stroke-linejoin: round }
.key { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: .2rem 0 0; padding: 0 }
.key li { display: flex; gap: .4rem; align-items: center; min-width: 0; overflow-wrap: anywhere }
.key svg { flex: none; width: 2.4rem }
.picture { margin-top: 1.5rem }
.zoom { margin: .4rem 0 0 }
.zoom summary { list-style: none; overflow-x: auto; cursor: zoom-in }
.zoom summary::-webkit-details-marker { display: none }
.zoom[open] summary { cursor: zoom-out }
.zoom img { display: block; max-width: 100%; height: auto }
.zoom[open] img { width: max(200%, 60rem); max-width: none }
ul { color: var(--muted); margin: .3rem 0 0; padding-left: 1.2rem }
li { overflow-wrap: anywhere }
details { margin-top: 1rem } summary { cursor: pointer; font-weight: 600 }
pre { background: var(--well); border-radius: 6px; padding: .8rem; overflow-x: auto; font-size: .85rem }
@media (max-width: 30rem) { .pairs tbody th { width: 9rem } }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt }
  h2, figcaption, thead { break-after: avoid }
  h1 + p, tr, figure, li { break-inside: avoid }
  .wide, .zoom summary, pre { overflow: visible }
  .zoom img, .zoom[open] img { width: auto; max-width: 100%; max-height: 11cm }
  .picture { margin-top: .6rem }
  .charts { grid-template-columns: 1fr 1fr; gap: .6rem 1rem } figure > p, .key { font-size: 8pt; line-height: 1.3 }
  .runs { font-size: 7pt } .runs td, .runs th, .runs .text { min-width: 0; padding-right: 4pt }
  .skip, details:not([open]):not(.zoom), .details:not(:has(details[open])) { display: none }
  pre { white-space: pre-wrap; overflow-wrap: anywhere }
}
"""
)


def document(title: str, *parts: str, style: str = "", script: str = "") -> str:
    """A page; ``title`` is text, ``parts`` are HTML.

    style: rules after those of all pages.
    script: JavaScript that runs when the page is read; its policy allows no other script, and no file or address.
    """
    body, policy = "\n".join(parts), ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
        rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        policy = f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        body += f"\n<script>{script}</script>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{policy}<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<main id="content" tabindex="-1">
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""


def heading(text: str) -> str:
    """The title of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph; nothing for an empty text."""
    return f"<p>{escape(text)}</p>" if text else ""


def link(text: str, address: str) -> str:
    """A link; ``address`` is relative to the page."""
    return f'<a href="{escape(address)}">{escape(text)}</a>'


def picture(caption: str, description: str, png: bytes) -> str:
    """An embedded picture under its caption; a click, Enter or Space enlarges it.

    description: text below the picture, and with the caption its alternative text.
    """
    data, alternative = base64.b64encode(png).decode("ascii"), ". ".join(filter(None, (caption, description)))
    return (
        f'<figure class="picture"><figcaption>{escape(caption)}</figcaption>\n'
        f'<details class="zoom"><summary title="enlarge or reduce"><img alt="{escape(alternative)}" '
        f'src="data:image/png;base64,{data}"></summary></details>\n{paragraph(description)}</figure>'
    )


def chart(caption: str, svg: str, legend: Iterable[tuple[str, str]], description: str = "") -> str:
    """A chart under its caption, then its legend: a piece of each line as SVG, and its label."""
    keys = "".join(f"<li>{sample}<span>{escape(label)}</span></li>" for sample, label in legend)
    key = f'<ul class="key">{keys}</ul>' if keys else ""
    return f"<figure><figcaption>{escape(caption)}</figcaption>\n{svg}\n{key}{paragraph(description)}</figure>"


def charts(figures: Iterable[str]) -> str:
    """Charts side by side where the screen is wide enough."""
    return '<div class="charts">\n' + "\n".join(figures) + "\n</div>"


def pairs(name: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values."""
    lines = (f'<tr><th scope="row">{escape(key)}</th><td>{escape(value)}</td></tr>' for key, value in rows)
    body = "\n".join(lines)
    return f'<table class="pairs"><caption>{escape(name)}</caption><tbody>\n{body}\n</tbody></table>'


def table(name: str, kind: str, head: Sequence[str], rows: Iterable[str]) -> str:
    """A table that scrolls on its own if the screen is narrow.

    name: for screen readers. kind: a class of the style. head: HTML of the cells, or texts. rows: HTML of each row.
    """
    cells = "".join(cell if cell.startswith("<th") else f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}"><table class="{kind}">'
        f"<caption>{escape(name)}</caption>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def disclosure(title: str, content: str) -> str:
    """HTML that is shown when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>\n{content}\n</details>"


def details(disclosures: Iterable[str]) -> str:
    """The last section, of what is read on demand; on paper only what is open."""
    return f'<section class="details">{heading("Details")}\n' + "\n".join(disclosures) + "</section>"


def notes(lines: Iterable[str]) -> str:
    """A list of texts."""
    return "<ul>\n" + "\n".join(f"<li>{escape(line)}</li>" for line in lines) + "\n</ul>"
