"""A parser of report pages."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """A parsed page: rows of cell texts, list items, links, tags with attributes, visible text; tags must balance."""

    VOID = frozenset({"meta", "img", "link"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.items: list[str] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action", "data")]
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "li":
            self.items.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data
        if "li" in self._open:
            self.items[-1] += data
        if "style" not in self._open:
            self.text += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every ``tag``."""
        return [attributes for name, attributes in self.tags if name == tag]

    def pairs(self) -> dict[str, str]:
        """The rows of two cells."""
        return {row[0]: row[1] for row in self.rows if len(row) == 2}

    def scores(self) -> list[list[str]]:
        """The rows below the head of the scores."""
        head = next((index for index, row in enumerate(self.rows) if row[0] == "Score"), len(self.rows))
        return [row for row in self.rows[head + 1 :] if len(row) == len(self.rows[head])]
