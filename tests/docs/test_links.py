"""Links between pages lead to files that exist, and to headings of these."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("markdown_it")

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.blocks import REPOSITORY

PAGES = sorted(
    str(page.relative_to(REPOSITORY))
    for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md", "benchmarks/**/*.md")
    for page in REPOSITORY.glob(pattern)
)


def tokens(path: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(path.read_text(encoding="utf-8"))


def links(path: Path) -> Iterator[str]:
    """Return every link and picture of a page that leads to a local file."""
    for token in tokens(path):
        for child in token.children or ():
            target = str(child.attrs.get("href") or child.attrs.get("src") or "")
            if target and not re.match(r"[a-z]+:", target):
                yield target


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    found: Counter[str] = Counter()
    names = set()
    page = tokens(path)
    for opening, token in pairwise(page):
        if opening.type == "heading_open":
            words = "".join(child.content for child in token.children or ())
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
            found[slug] += 1
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_existing_files_and_headings(page: str) -> None:
    here = REPOSITORY / page
    for link in links(here):
        target, _, anchor = link.partition("#")
        path = (here.parent / target).resolve() if target else here
        assert path.exists(), link
        assert path.is_relative_to(REPOSITORY), link
        if anchor:
            assert anchor in anchors(path), link


def test_a_heading_has_the_anchor_that_github_gives_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `B`, c: d\n\ntext\n\n# Twice\n\n## Twice\n", encoding="utf-8")
    assert anchors(page) == {"a-b-c-d", "twice", "twice-1"}


def test_links_of_tables_and_pictures_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| a |\n|---|\n| [b](c.md#d) |\n\n![e](f.png) <https://g>\n", encoding="utf-8")
    assert list(links(page)) == ["c.md#d", "f.png"]


def test_every_page_of_the_guide_is_in_its_index() -> None:
    index = (REPOSITORY / "docs/index.md").read_text(encoding="utf-8").splitlines()
    pages = [page[len("docs/") : -len(".md")] for page in PAGES if page.startswith("docs/")]
    assert [page for page in pages if index.count(page) != 1] == ["index"]


def test_every_page_is_tested() -> None:
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/index.md"} <= set(PAGES)
    assert "docs/reference/report.md" in PAGES


def test_the_guide_is_below_its_maximum_length() -> None:
    index = (REPOSITORY / "docs/index.md").read_text(encoding="utf-8")
    guide = index.partition(":caption: The guide")[2].partition("```")[0].split()[2:]
    assert guide[0] == "device"
    assert len(guide) <= 12
    words = {
        page: len((REPOSITORY / f"docs/{page}.md").read_text(encoding="utf-8").split())
        for page in guide
    }
    assert {page: count for page, count in words.items() if count >= 900} == {}
