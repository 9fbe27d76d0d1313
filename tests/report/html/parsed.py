"""A page as a browser parses it."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """The elements of a page, as a browser parses them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and self.lasttag == "script" and data.strip():
            self.scripts[-1] = self.scripts[-1][0], data

    @property
    def overview(self) -> Any:
        (text,) = [text for attrs, text in self.scripts if attrs.get("id") == "overview"]
        return json.loads(text)

    @property
    def details(self) -> list[Any]:
        packed = [text for attrs, text in self.scripts if attrs.get("class") == "details"]
        return [one for text in packed for one in json.loads(zlib.decompress(b64decode(text)))]
