"""HTML of ``dmjd neighbours``: queries beside their neighbours, and near duplicates. One file without scripts."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from dmjd.errors import printable_message
from dmjd.explore.neighbours import SAME
from dmjd.explore.tsne import MOST_THUMBNAILS, fitting
from dmjd.report.html import document, heading, paragraph, table

if TYPE_CHECKING:
    from dmjd.explore.neighbours import Found, Pairs

SHOWN_PAIRS = 60
"""Near duplicates of each encoder on the page; duplicates.csv has more."""
_SIDE = 96  # units of an image's square

_STYLE = """
.images { position: absolute; width: 0; height: 0 }
.encoders td:nth-child(n + 3) { white-space: nowrap }
.neighbours { display: grid; grid-template-columns: 8.5rem minmax(0, 1fr); gap: .4rem 1.2rem; margin: 0;
  padding: .9rem 0; border-bottom: 1px solid var(--rule) }
.neighbours h3 { font-size: .85rem; font-weight: 600; margin: 0 0 .3rem }
.neighbours h3 small { color: var(--muted); font-weight: 400 }
.neighbours ol, .pairs-of-images { display: flex; flex-wrap: wrap; gap: .5rem; list-style: none; margin: 0; padding: 0 }
.neighbours ol + h3 { margin-top: .8rem }
.tile { width: 6rem; font-size: .75rem; line-height: 1.3; min-width: 0; color: var(--ink) }
.tile svg { display: block; width: 6rem; height: 6rem; background: var(--well);
  border: 3px solid var(--rule); border-radius: 4px }
.tile.agrees svg { border-color: var(--good) } .tile.differs svg { border: 3px dashed var(--bad) }
.query { width: 8.5rem } .query svg { width: 8.5rem; height: 8.5rem; border-color: var(--focus) }
.tile span, .tile small { display: block; overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
.tile small { color: var(--muted); font-size: inherit }
.tile b { font-weight: 600 } .tile.agrees b { color: var(--good) } .tile.differs b { color: var(--bad) }
.pairs-of-images { gap: 1.2rem } .pairs-of-images > li { width: 12.5rem }
.pairs-of-images div { display: flex; gap: .5rem } .pairs-of-images p { font-size: .75rem }
@media (max-width: 30rem) { .neighbours { grid-template-columns: minmax(0, 1fr) } }
@media print { .neighbours { break-inside: avoid } .tile { width: 4.6rem } .tile svg { width: 4.6rem; height: 4.6rem }
  * { print-color-adjust: exact } }
"""


@dataclass(frozen=True)
class Pictures:
    """The images of a page. names, thumbnails (JPEG) and classes by row; a class is empty without a label."""

    names: Sequence[str]
    thumbnails: Sequence[bytes]
    classes: Sequence[str]

    def tile(self, row: int, kind: str, *lines: str) -> str:
        """An image with its class, the last part of its name and ``lines``, which are HTML. ``kind``: a class of the
        style."""
        name, label = _text(self.names[row]), _text(self.classes[row])
        last = _text(self.names[row].rpartition("/")[2])
        label = f'<span title="{label}">{label}</span>' if label else ""
        return (
            f'<figure class="tile {kind}"><svg role="img" aria-label="{name}" viewBox="0 0 {_SIDE} {_SIDE}">'
            f'<use href="#image{row}"></use></svg>{"".join(lines)}{label}<small title="{name}">{last}</small></figure>'
        )

    def definitions(self, rows: Sequence[int]) -> str:
        """The images that tiles of ``rows`` show; each is once on the page."""
        images = "".join(
            f'<image id="image{row}" width="{_SIDE}" height="{_SIDE}" href="data:image/{_format(content)};base64,'
            f'{base64.b64encode(content).decode("ascii")}"></image>'
            for row, content in zip(rows, fitting([self.thumbnails[row] for row in rows], MOST_THUMBNAILS), strict=True)
        )
        return f'<svg class="images" aria-hidden="true"><defs>{images}</defs></svg>'


def _format(content: bytes) -> str:
    return "webp" if content.startswith(b"RIFF") else "jpeg"


@dataclass(frozen=True)
class Section:
    """The results of one encoder. score: HTML-free text of its leave-one-out accuracy, or why there is none."""

    name: str
    about: str
    score: str
    found: Found
    pairs: Pairs | None


def page(
    title: str,
    notes: Iterable[str],
    pictures: Pictures,
    queries: Sequence[int],
    sections: Sequence[Section],
    least: float | None,
) -> str:
    """The page: encoders, then each query with a row of neighbours per encoder, then near duplicates by encoder.

    least: cosine similarity of near duplicates; None if they were not searched.
    """
    head = ("Encoder", "Features", "Leave-one-out kNN top-1", "Agreeing neighbours")
    labelled = any(pictures.classes)
    rows = (
        f'<th scope="row">{_text(each.name)}</th>'
        + "".join(f"<td>{_text(cell)}</td>" for cell in (each.about, each.score, agreement(pictures, queries, each)))
        for each in sections
    )
    return document(
        title,
        *map(paragraph, notes),
        pictures.definitions(_on_page(queries, sections)),
        heading("Encoders"),
        table("Encoders", "encoders", head, rows),
        heading("Nearest neighbours"),
        paragraph(
            "A number is the cosine similarity to the query. "
            + ("✓ and a solid frame: the query's class; ✗ and a dashed frame: another class." if labelled else "")
        ),
        *(_query(pictures, number, row, sections) for number, row in enumerate(queries)),
        *_duplicates(pictures, sections, least),
        style=_STYLE,
    )


def _on_page(queries: Sequence[int], sections: Sequence[Section]) -> list[int]:
    """The rows of all images of the page."""
    rows = {*queries}
    for section in sections:
        rows.update(section.found.rows.ravel().tolist())
        if section.pairs is not None:
            rows.update(section.pairs.rows[:SHOWN_PAIRS].ravel().tolist())
    return sorted(rows)


def agreement(pictures: Pictures, queries: Sequence[int], section: Section) -> str:
    """The share of neighbours of all labelled queries that have the query's class, as text; "-" without labels."""
    agreeing, count = 0, 0
    for query, rows in zip(queries, section.found.rows.tolist(), strict=True):
        label = pictures.classes[query]
        others = [pictures.classes[row] for row in rows if label and pictures.classes[row]]
        agreeing, count = agreeing + others.count(label), count + len(others)
    return f"{100 * agreeing / count:.1f} %" if count else "-"


def _query(pictures: Pictures, number: int, row: int, sections: Sequence[Section]) -> str:
    strips = "".join(_strip(pictures, row, number, section) for section in sections)
    name = _text(pictures.names[row])
    return (
        f'<section class="neighbours" aria-label="Neighbours of {name}">{pictures.tile(row, "query")}'
        f"<div>{strips}</div></section>"
    )


def _strip(pictures: Pictures, query: int, number: int, section: Section) -> str:
    """The neighbours of one query by one encoder."""
    label, tiles, agreeing, labelled = pictures.classes[query], [], 0, 0
    found = section.found
    for row, similarity in zip(found.rows[number].tolist(), found.similarities[number].tolist(), strict=True):
        other = pictures.classes[row]
        mark, kind = "", ""
        if label and other:
            labelled, agreeing = labelled + 1, agreeing + (label == other)
            mark, kind = ("✓", "agrees") if label == other else ("✗", "differs")
            meaning = "same class" if label == other else "other class"
            mark = f'<b role="img" aria-label="{meaning}" title="{meaning}">{mark}</b> '
        same = " duplicate" if similarity >= SAME else ""
        tiles.append(f"<li>{pictures.tile(row, kind, f'<span>{mark}{similarity:.3f}{same}</span>')}</li>")
    share = f" <small>{agreeing} of {labelled} of the same class</small>" if labelled else ""
    return f"<h3><bdi>{_text(section.name)}</bdi>{share}</h3><ol>{''.join(tiles)}</ol>"


def _duplicates(pictures: Pictures, sections: Sequence[Section], least: float | None) -> list[str]:
    parts: list[str] = []
    for section in sections:
        if section.pairs is None:
            continue
        rows, similarities, total = section.pairs
        shown = f"; the {SHOWN_PAIRS} most similar are shown" if total > SHOWN_PAIRS else ""
        parts.append(f"<h3>{_text(section.name)}</h3>")
        parts.append(paragraph(f"{total} pair{'s' * (total != 1)}{shown}" if total else "none"))
        items = "".join(
            f"<li><div>{pictures.tile(one, '')}{pictures.tile(other, '')}</div>"
            f"<p>{similarity:.4f}{' duplicate' if similarity >= SAME else ''}</p></li>"
            for (one, other), similarity in zip(
                rows[:SHOWN_PAIRS].tolist(), similarities[:SHOWN_PAIRS].tolist(), strict=True
            )
        )
        parts.append(f'<ul class="pairs-of-images">{items}</ul>' if items else "")
    note = paragraph(
        f"Pairs of images whose features have a cosine similarity of at least {least}. Encoders differ in how similar "
        "they find different images of one scene: if such pairs are listed, set duplicates= to a higher similarity."
    )
    return [heading("Near duplicates"), note, *parts] if parts else []


def _text(text: str) -> str:
    """``text`` of a file for HTML: escaped, without secrets, control characters as ``\\\\x1b``."""
    return escape(printable_message(text))
