"""The elements and the text of an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser


class Elements(HTMLParser):
    """Elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> Iterator[dict[str, str | None]]:
        """Yield the attributes of each element of this tag."""
        return (attributes for name, attributes in self.found if name == tag)
