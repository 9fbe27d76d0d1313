"""Test ids with markup and commands, in Markdown and in GitHub's annotations."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("markdown_it")
from markdown_it import MarkdownIt

from pytest_gpumem.quoting import printable
from pytest_gpumem.report.github import workflow_commands
from pytest_gpumem.report.markdown import difference_section, document
from pytest_gpumem.report.record import ReportedRun, TestRecord
from tests.report.example_run import MIB, failing, measured, record

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "image": '<img src=x onerror="alert(1)">',
    "comment": "--><!--",
    "ansi": "\x1b[31mred\x1b]8;;http://evil\x07",
    "line": "a\n\n# heading\r\nb",
    "command": "a\n::error::b",
    "properties": "a,line=1::b%0A::warning::c",
    "backtick": "`code` ``more`` ```",
    "fence": "\n```\n@user\n````",
    "pipe": "a|b\\|c",
    "user": "@user #123 org/repo#1 deadbeefdeadbeef",
    "link": "[a](javascript:alert(1)) ![b](http://evil)",
    "stars": "**bold** _em_ ~~gone~~ &amp; &#60;",
    "direction": "a\u202eb\u200bc",
    "surrogate": "a\udc80b",
    "blank": "   ",
    "long": "x" * 500 + "`" * 500,
}

TAGS = {"p", "h3", "strong", "table", "thead", "tbody", "tr", "th", "td", "code", "pre"}
"""The tags that comments contain."""


class Page(HTMLParser):
    """The visible text and the tags of rendered Markdown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.code: list[str] = []
        self.outside: list[str] = []
        self.cells: list[int] = []
        self._open: list[str] = []
        self.feed(MarkdownIt().enable("table").render(text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= {"style", "class"}
        self.tags.add(tag)
        self._open.append(tag)
        if tag == "tr":
            self.cells.append(0)
        if tag in ("td", "th"):
            self.cells[-1] += 1
        if tag == "code":
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "code" in self._open:
            self.code[-1] += data
        else:
            self.outside.append(data)


@pytest.fixture(params=HOSTILE.values(), ids=list(HOSTILE))
def nodeid(request: pytest.FixtureRequest) -> str:
    return f"tests/test_a.py::test_x[{request.param}]"


def _failing(nodeid: str) -> TestRecord:
    return replace(failing(), nodeid=nodeid)


def _without_text_of(nodeid: str, page: Page) -> None:
    assert page.tags <= TAGS
    outside = "".join(page.outside)
    for word in ("script", "img", "@user", "#123", "evil", "alert", "heading", "bold", "\x1b"):
        assert word not in outside
    assert outside.replace("\n", "").isprintable()


def test_a_comment_shows_a_hostile_name_as_text(nodeid: str) -> None:
    page = Page(document([_failing(nodeid)]))
    _without_text_of(nodeid, page)
    shown = printable(nodeid)
    if len(nodeid) < 160:
        assert shown in page.code  # in the table
        assert [code for code in page.code if code == shown] == [shown] * 2
    assert page.cells == [4, 4]


def test_the_difference_shows_a_hostile_name_as_text(nodeid: str) -> None:
    before = [record(nodeid, measured(MIB)), record(f"{nodeid}gone", measured(MIB))]
    now = [record(nodeid, measured(3 * MIB)), record(f"{nodeid}new", measured(MIB))]
    text = document(now, sections=difference_section(before, now, nodeid), name=nodeid)
    _without_text_of(nodeid, Page(text))
    first = text.splitlines()[0]
    assert first.startswith("<!-- pytest-gpumem")
    assert "--" not in first.removeprefix("<!-- ").removesuffix(" -->")


def test_an_annotation_with_a_hostile_name_is_one_command(nodeid: str, tmp_path: Path) -> None:
    run = ReportedRun([_failing(nodeid)], root=tmp_path, lines={nodeid: (nodeid, 7)}, skipped={})
    (command,) = workflow_commands(run)
    assert command.isprintable()
    head, properties, message = command.split("::", 2)
    assert head == ""
    name, _, given = properties.partition(" ")
    assert name == "error"
    # GitHub splits at commas and at the first "=", and then undoes the escapes.
    found = dict(one.split("=", 1) for one in given.split(","))
    assert found.keys() == {"file", "line", "title"}
    assert found["line"] == "7"
    assert "\n" not in message
