"""An HTML page of 2-D maps side by side: one offline file with thumbnails on hover. Names of the data are text."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmjd.explore.scatter import COLOURS, SHAPES, Panel, in_square, mark, radius
from dmjd.report.html import details, disclosure, document, heading, pairs, paragraph

_LIGHTER = 0.3
"""Share of white in the colours of the dark scheme."""


def scatter_page(
    title: str,
    about: Sequence[str],
    panels: Sequence[Panel],
    *,
    names: Sequence[str],
    splits: Sequence[str],
    labels: NDArray[np.int64],
    classes: Sequence[str],
    thumbnails: Sequence[bytes] | None,
    order: NDArray[np.int64],
    settings: Sequence[tuple[str, str]],
    png: bytes,
) -> str:
    """The page. A point that is under the pointer or has the keyboard's focus is marked in every panel.

    Args:
        about: paragraphs below the title.
        names, splits: of each image.
        labels, classes, order: as for :func:`~dmjd.explore.scatter.scatter_png`.
        thumbnails: a JPEG or WebP of each image.
        settings: names and values of the last section.
        png: the same panels as a picture, which is shown on paper and without scripts.
    """
    points = [np.rint(65535 * in_square(panel.points)).astype("<u2") for panel in panels]
    data = {
        "points": [_base64(each.tobytes()) for each in points],
        "names": list(names),
        "splits": list(splits),
        "labels": [int(label) for label in labels],
        "classes": list(classes),
        "marks": [mark(index) for index in range(max(1, len(classes)))],
        "shapes": SHAPES,
        "order": [int(index) for index in order],
        "radius": radius(len(names)),
        "thumbnails": None if thumbnails is None else [_base64(each) for each in thumbnails],
    }
    alternative = "; ".join(f"{panel.title}: {panel.note}" if panel.note else panel.title for panel in panels)
    return document(
        title,
        *map(paragraph, about),
        _legend(labels, classes),
        '<div class="maps">' + "\n".join(_figure(index, panel) for index, panel in enumerate(panels)) + "</div>",
        f'<figure class="static"><img alt="{escape(alternative)}" src="data:image/png;base64,{_base64(png)}"></figure>',
        '<section id="pinned" hidden>' + heading("Pinned images") + '<ul class="pins"></ul></section>',
        details([disclosure("Keys and pointer", _HELP), disclosure("Settings", pairs("Settings", settings))]),
        '<div id="card" aria-hidden="true" hidden></div><p id="announced" role="status"></p>',
        f'<script type="application/json" id="data">{script_json(data)}</script>',
        style=_STYLE + _palette(),
        script=_SCRIPT,
    )


def script_json(value: Any) -> str:
    """JSON for a ``<script>`` element, which no text in it can end."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _figure(index: int, panel: Panel) -> str:
    label = escape(
        f"Map of {panel.title}. Arrow keys: next image in that direction. Enter: pin. + and -: zoom. 0: all."
    )
    buttons = "".join(
        f'<button type="button" data-zoom="{step}" aria-label="{escape(f"{action} {panel.title}")}">{sign}</button>'
        for step, action, sign in (
            ("1", "Zoom into", "+"),
            ("-1", "Zoom out of", "&minus;"),
            ("0", "Show all of", "all"),
        )
    )
    return (
        f'<figure class="map" data-panel="{index}"><figcaption>{escape(panel.title)}</figcaption>\n'
        f'<div class="plane"><canvas tabindex="0" role="application" aria-label="{label}"></canvas>'
        f'<div class="zooms">{buttons}</div></div>\n{paragraph(panel.note)}</figure>'
    )


def _legend(labels: NDArray[np.int64], classes: Sequence[str]) -> str:
    if not classes:
        return ""
    counts = np.bincount(labels, minlength=len(classes))
    items = [
        f'<li><button type="button" aria-pressed="true" data-class="{index}">{_swatch(index)}'
        f"<span>{escape(name)} <small>{counts[index]}</small></span></button></li>"
        for index, name in enumerate(classes)
    ]
    both = '<button type="button" data-all="1">all</button> <button type="button" data-all="0">none</button>'
    return (
        '<div class="live" role="group" aria-label="Classes that are shown"><p>Classes and their number of images; '
        f"click one to hide or show it: {both}</p>\n"
        '<ul class="key classes">' + "\n".join(items) + "</ul></div>"
    )


def _swatch(index: int) -> str:
    colour, shape = mark(index)
    corners = " ".join(f"{x:g},{-y:g}" for x, y in SHAPES[shape])
    polygon = f'<polygon points="{corners}" fill="var(--c{colour})"/>'
    return f'<svg viewBox="-1.4 -1.4 2.8 2.8" aria-hidden="true">{polygon}</svg>'


def _palette() -> str:
    """CSS variables of the colours: as they are, and lighter in the dark scheme."""
    dark = []
    for colour in COLOURS:
        channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
        dark.append("#" + "".join(f"{round(value + _LIGHTER * (255 - value)):02x}" for value in channels))
    light, dark_rules = (
        "; ".join(f"--c{index}: {colour}" for index, colour in enumerate(colours)) for colours in (COLOURS, dark)
    )
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark_rules} }} }}\n"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


_HELP = """<ul>
<li>Hover: the image, its name and its class; the same image is marked in every panel.</li>
<li>Click or tap: pin the image below the maps, or unpin it.</li>
<li>Wheel or pinch: zoom. Drag: move. Double click: show all.</li>
<li>Keyboard, on a map: arrow keys go to the next image in that direction, Enter pins, + and - zoom, 0 shows all,
Escape ends.</li>
</ul>"""

_STYLE = """
body { max-width: 100rem }
.live, .maps { display: none }
.scripted .live { display: block } .scripted .maps { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 1rem }
.map { flex: 1 1 20rem; max-width: max(20rem, min(46rem, 66vh)) }
.map figcaption { overflow-wrap: anywhere }
.plane { position: relative; aspect-ratio: 1; border: 1px solid var(--rule); border-radius: 6px; margin-top: .3rem }
.plane canvas { position: absolute; inset: 0; width: 100%; height: 100%; touch-action: pan-y; border-radius: 6px;
  cursor: crosshair }
.zooms { position: absolute; right: .3rem; top: .3rem; display: flex; gap: .2rem; opacity: .75 }
.zooms:hover, .zooms:focus-within { opacity: 1 }
button { font: inherit; font-size: .85rem; color: var(--ink); background: var(--well); border: 1px solid var(--rule);
  border-radius: 4px; padding: .1rem .5rem; min-width: 1.7rem; cursor: pointer }
.static { margin-top: 1rem } .static img { display: block; width: 100%; height: auto; background: #fff }
.scripted .static { display: none }
.classes { gap: .3rem .4rem; margin-top: .4rem; max-height: 8.6rem; overflow-y: auto; padding: 3px }
.classes button { display: flex; gap: .35rem; align-items: center; text-align: left; overflow-wrap: anywhere }
.classes svg { width: 1rem; height: 1rem }
.classes small { color: var(--muted) }
.classes button[aria-pressed=false] { opacity: .45; text-decoration: line-through }
#card { position: fixed; z-index: 2; left: 0; top: 0; max-width: 16rem; pointer-events: none; background: var(--paper);
  border: 1px solid var(--rule); border-radius: 6px; padding: .4rem; box-shadow: 0 2px 8px #0004; font-size: .85rem }
#card[hidden] { display: none }
#card img, .pins img { display: block; width: 7rem; height: 7rem; object-fit: contain; margin-bottom: .3rem }
#card span, .pins span { display: block; overflow-wrap: anywhere }
.kind { color: var(--muted) }
.pins { display: flex; flex-wrap: wrap; gap: .6rem; list-style: none; padding: 0 }
.pins li { width: 9rem; border: 1px solid var(--rule); border-radius: 6px; padding: .4rem; font-size: .85rem;
  color: var(--ink) }
.pins li:hover, .pins li:focus-within { border-color: var(--focus) }
#announced { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); margin: 0 }
@media print {
  .scripted .maps, .scripted .live, #card { display: none }
  .scripted .static { display: block }
  .pins button { display: none }
}
"""

_SCRIPT = r"""
"use strict";
(() => {
const find = (selector, place = document) => place.querySelector(selector);
const every = (selector, place = document) => [...place.querySelectorAll(selector)];
const data = JSON.parse(find("#data").textContent), root = document.documentElement;
const { names, splits, labels, classes, marks, shapes, order, thumbnails } = data;
const card = find("#card"), announced = find("#announced");
const hidden = new Set(), pinned = new Set();
let current = -1;
root.classList.add("scripted");

const seen = index => !hidden.has(labels[index]);
const kind = index => [classes[labels[index]], splits[index]].filter(Boolean).join(", ");

function describe(element, index) {
  element.replaceChildren();
  if (thumbnails) {
    const image = document.createElement("img");
    image.src = "data:image/jpeg;base64," + thumbnails[index];
    image.alt = "";
    element.append(image);
  }
  for (const [text, style] of [[names[index], "name"], [kind(index), "kind"]]) {
    const line = document.createElement("span");
    line.textContent = text;
    line.className = style;
    element.append(line);
  }
}

class Panel {
  constructor(figure, points) {
    this.canvas = find("canvas", figure);
    this.context = this.canvas.getContext("2d");
    this.base = document.createElement("canvas");
    const bytes = Uint8Array.from(atob(points), character => character.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const value = place => view.getUint16(place, true) / 65535;
    this.x = names.map((_, index) => value(4 * index));
    this.y = names.map((_, index) => 1 - value(4 * index + 2));
    this.all();
    this.pointers = new Map();
    this.listen(figure);
    this.draw();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  all() { this.zoom = 1; this.left = this.top = 0; }

  get side() { return this.canvas.clientWidth; }

  // A margin of 4 % around the unit square, then zoom and offset, in CSS pixels.
  place(index) {
    const at = value => (0.04 + 0.92 * value) * this.side * this.zoom;
    return [at(this.x[index]) + this.left, at(this.y[index]) + this.top];
  }

  radius() { return data.radius * Math.min(2.5, Math.sqrt(this.zoom)); }

  outline(context, index, radius) {
    const [x, y] = this.place(index), corners = shapes[marks[labels[index]][1]];
    context.beginPath();
    corners.forEach(([dx, dy], corner) =>
      corner ? context.lineTo(x + radius * dx, y - radius * dy) : context.moveTo(x + radius * dx, y - radius * dy));
    context.closePath();
  }

  draw() {
    const ratio = devicePixelRatio || 1, side = Math.round(this.side * ratio);
    if (!side) return;
    for (const canvas of [this.base, this.canvas]) canvas.width = canvas.height = side;
    const context = this.base.getContext("2d"), radius = this.radius(), style = getComputedStyle(root);
    const colours = marks.map(([colour]) => style.getPropertyValue("--c" + colour).trim());
    context.scale(ratio, ratio);
    context.globalAlpha = 0.85;
    for (const index of order) {
      if (!seen(index)) continue;
      context.fillStyle = colours[labels[index]];
      this.outline(context, index, radius);
      context.fill();
    }
    this.colours = colours;
    this.ink = style.getPropertyValue("--ink").trim();
    this.paper = style.getPropertyValue("--paper").trim();
    this.mark();
  }

  // The points, with rings around pinned images and the current one.
  mark() {
    if (!this.colours) return;
    const context = this.context, ratio = devicePixelRatio || 1;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.base, 0, 0);
    context.scale(ratio, ratio);
    for (const index of [...pinned, current]) {
      if (index < 0 || !seen(index)) continue;
      const [x, y] = this.place(index), radius = this.radius() + (index === current ? 5 : 3);
      for (const [width, colour] of [[5, this.paper], [2, this.ink]]) {
        context.beginPath();
        context.arc(x, y, radius, 0, 2 * Math.PI);
        context.lineWidth = width;
        context.strokeStyle = colour;
        context.stroke();
      }
      context.fillStyle = this.colours[labels[index]];
      this.outline(context, index, this.radius() + 1);
      context.fill();
    }
  }

  // The image whose point is nearest to (x, y) among those with a finite cost.
  nearest(x, y, cost) {
    let best = -1, least = Infinity;
    for (let index = 0; index < names.length; index++) {
      if (!seen(index)) continue;
      const [px, py] = this.place(index), value = cost(px - x, py - y);
      if (value < least) { least = value; best = index; }
    }
    return best;
  }

  under(x, y) {
    const reach = Math.max(10, this.radius() + 4) ** 2;
    return this.nearest(x, y, (dx, dy) => dx * dx + dy * dy <= reach ? dx * dx + dy * dy : Infinity);
  }

  scaleAt(x, y, factor) {
    const zoom = Math.min(60, Math.max(1, this.zoom * factor)), by = zoom / this.zoom;
    this.left = x - (x - this.left) * by;
    this.top = y - (y - this.top) * by;
    this.zoom = zoom;
    this.keep();
  }

  // The map covers at least half of the panel.
  keep() {
    const side = this.side, least = side * (0.5 - this.zoom);
    this.left = Math.min(side / 2, Math.max(least, this.left));
    this.top = Math.min(side / 2, Math.max(least, this.top));
    if (this.zoom === 1) this.left = this.top = 0;
    this.draw();
  }

  step(dx, dy) {
    if (current < 0 || !seen(current)) {
      choose(this.nearest(this.side / 2, this.side / 2, (x, y) => x * x + y * y), this, true);
      return;
    }
    const [x, y] = this.place(current), from = current;
    const next = this.nearest(x, y, (px, py) => {
      const along = px * dx + py * dy, across = Math.abs(px * dy) + Math.abs(py * dx);
      return along > 0 && across <= 2 * along ? along + 2 * across : Infinity;
    });
    if (next < 0 || next === from) return;
    const [nx, ny] = this.place(next);
    if (Math.min(nx, ny) < 0 || Math.max(nx, ny) > this.side) {
      this.left += this.side / 2 - nx;
      this.top += this.side / 2 - ny;
      this.keep();
    }
    choose(next, this, true);
  }

  listen(figure) {
    const canvas = this.canvas;
    const at = event => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.x, event.clientY - box.y];
    };
    canvas.addEventListener("pointerdown", event => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, at(event));
      this.moved = this.pointers.size > 1;
    });
    canvas.addEventListener("pointermove", event => {
      const [x, y] = at(event), before = this.pointers.get(event.pointerId);
      if (!before) { choose(this.under(x, y), this); return; }
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      if (others.length) {
        const [ox, oy] = others[0], length = (px, py) => Math.hypot(px - ox, py - oy) || 1;
        this.scaleAt(ox, oy, length(x, y) / length(...before));
      } else if (this.moved || Math.hypot(x - before[0], y - before[1]) > 4) {
        this.moved = true;
        if (this.zoom > 1) { this.left += x - before[0]; this.top += y - before[1]; this.keep(); }
      } else return;
      this.pointers.set(event.pointerId, [x, y]);
      choose(-1);
    });
    canvas.addEventListener("pointerup", event => {
      const known = this.pointers.delete(event.pointerId), index = this.under(...at(event));
      if (known && !this.moved) { choose(index, this); if (index >= 0) pin(index); }
    });
    canvas.addEventListener("pointercancel", event => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") choose(-1); });
    canvas.addEventListener("dblclick", () => { this.all(); this.draw(); });
    canvas.addEventListener("wheel", event => {
      if (this.zoom === 1 && event.deltaY > 0) return;  // the page scrolls
      event.preventDefault();
      const lines = event.deltaMode ? 33 : 1;
      this.scaleAt(...at(event), Math.exp(-0.002 * lines * event.deltaY));
    }, { passive: false });
    canvas.addEventListener("blur", () => choose(-1));
    canvas.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const middle = current >= 0 ? this.place(current) : [this.side / 2, this.side / 2];
      const actions = {
        ArrowLeft: () => this.step(-1, 0), ArrowRight: () => this.step(1, 0),
        ArrowUp: () => this.step(0, -1), ArrowDown: () => this.step(0, 1),
        "+": () => this.scaleAt(...middle, 1.5), "=": () => this.scaleAt(...middle, 1.5),
        "-": () => this.scaleAt(...middle, 1 / 1.5), "0": () => { this.all(); this.draw(); },
        Enter: () => current >= 0 && pin(current), " ": () => current >= 0 && pin(current),
        Escape: () => choose(-1),
      };
      if (!actions[event.key]) return;
      event.preventDefault();
      actions[event.key]();
      if (current >= 0) show(this);
    });
    for (const button of every("[data-zoom]", figure))
      button.addEventListener("click", () => {
        const step = Number(button.dataset.zoom);
        if (step) this.scaleAt(this.side / 2, this.side / 2, 1.5 ** step); else { this.all(); this.draw(); }
      });
  }
}

const panels = every(".map").map((figure, index) => new Panel(figure, data.points[index]));
const drawAll = () => panels.forEach(panel => panel.draw());
const markAll = () => panels.forEach(panel => panel.mark());

// Make an image the current one, in every panel; the card stands beside its point in `panel`.
function choose(index, panel, byKey) {
  if (index !== current) {
    current = index;
    markAll();
    if (index >= 0) describe(card, index);
  }
  if (index >= 0 && panel) show(panel); else card.hidden = true;
  if (byKey && index >= 0) announced.textContent = names[index] + ", " + kind(index);
}

function show(panel) {
  card.hidden = false;
  const box = panel.canvas.getBoundingClientRect(), [x, y] = panel.place(current), size = card.getBoundingClientRect();
  const fit = (at, gap, length, available) =>
    at + gap + length <= available ? at + gap : Math.max(4, at - gap - length);
  card.style.left = fit(box.x + x, 14, size.width, root.clientWidth) + "px";
  card.style.top = fit(box.y + y, 14, size.height, root.clientHeight) + "px";
}

function pin(index) {
  if (!pinned.delete(index)) pinned.add(index);
  const list = find(".pins");
  list.replaceChildren(...[...pinned].map(each => {
    const item = document.createElement("li"), button = document.createElement("button");
    describe(item, each);
    button.type = "button";
    button.textContent = "unpin";
    button.setAttribute("aria-label", "unpin " + names[each]);
    button.addEventListener("click", () => { choose(-1); pin(each); });
    item.append(button);
    for (const event of ["pointerenter", "focusin"]) item.addEventListener(event, () => choose(each));
    for (const event of ["pointerleave", "focusout"]) item.addEventListener(event, () => choose(-1));
    return item;
  }));
  find("#pinned").hidden = !pinned.size;
  markAll();
}

const buttons = every("[data-class]");
function toggle(button, shown) {
  button.setAttribute("aria-pressed", String(shown));
  hidden[shown ? "delete" : "add"](Number(button.dataset.class));
}
for (const button of buttons)
  button.addEventListener("click", () => {
    toggle(button, button.getAttribute("aria-pressed") !== "true");
    choose(-1);
    drawAll();
  });
for (const both of every("[data-all]"))
  both.addEventListener("click", () => {
    buttons.forEach(button => toggle(button, both.dataset.all === "1"));
    choose(-1);
    drawAll();
  });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
"""
