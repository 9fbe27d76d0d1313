"""Code, commands and their output, as the documentation shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

REPOSITORY = Path(__file__).parent.parent.parent

PAGES = (
    "README.md",
    *sorted(str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob("docs/*.md")),
    *sorted(str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob("examples/*/README.md")),
)

PRINTED_BY = re.compile(r"<!-- printed by: (.*) -->")
"""The comment before a block that is part of a command's output, on 80 columns."""

COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:pip|python|pytest|gpumem|tox) .*|pytest")
"""The start of a line that a reader types."""


@dataclass(frozen=True)
class Block:
    """One block of a page; ``language`` is empty where none is given."""

    page: str
    line: int
    language: str
    text: str
    printed_by: str = ""
    """The command of which it shows a part."""

    @property
    def name(self) -> str:
        """The id of its test."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Shown:
    """A command or code, and its printed lines; ``None`` where these are not shown."""

    page: str
    line: int
    source: str
    output: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The id of its test."""
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Return the blocks of code of a page, in order."""
    tokens = MarkdownIt().parse((REPOSITORY / page).read_text(encoding="utf-8"))
    found = []
    comment: re.Match[str] | None = None
    for token in tokens:
        if token.type in ("fence", "code_block"):
            line = (token.map or [0])[0] + 1
            command = comment[1] if comment else ""
            found.append(Block(page, line, token.info.strip(), token.content, command))
        comment = PRINTED_BY.match(token.content) if token.type == "html_block" else None
    return found


def printed_blocks() -> list[Shown]:
    """Return every block that names the command that printed it."""
    return [
        Shown(page, block.line, block.printed_by, tuple(block.text.splitlines()))
        for page in PAGES
        for block in blocks(page)
        if block.printed_by
    ]


def commands() -> list[Shown]:
    """Return every command of every page."""
    return [command for page in PAGES for block in blocks(page) for command in _commands(block)]


def python_blocks() -> list[Shown]:
    """Return every block of Python; a block of text right after it is its output."""
    found = []
    for page in PAGES:
        all_blocks = blocks(page)
        for block, following in zip(all_blocks, [*all_blocks[1:], None], strict=False):
            if block.language != "python":
                continue
            near = following is not None and following.line - block.line - _height(block) <= 2
            output = None
            if following is not None and near and following.language == "text":
                output = tuple(following.text.splitlines())
            found.append(Shown(page, block.line, block.text, output))
    return found


def _height(block: Block) -> int:
    return block.text.count("\n") + 2


def _commands(block: Block) -> Iterator[Shown]:
    if block.language not in ("", "console"):
        return
    lines = block.text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(lines)
        output = "\n".join(lines[start + 1 : end]).rstrip()
        yield Shown(
            block.page,
            block.line + start,
            lines[start][2:],
            tuple(output.splitlines()) if output else None,
        )
    if not starts:
        joined = re.sub(r"\\\n\s*", "", block.text).splitlines()
        for number, line in enumerate(joined):
            command = re.sub(r"\s{2,}#.*", "", line).strip()
            if COMMAND.fullmatch(command):
                yield Shown(block.page, block.line + number, command)


def agrees(shown: tuple[str, ...], printed: list[str], *, part: bool = False) -> bool:
    """Return whether ``printed`` equals ``shown``, or contains it where ``part`` is set.

    A line of ``...`` stands for any lines.
    """
    pattern = "\n".join(
        r"(?:.*\n)*?.*" if line.strip() == "..." else re.escape(line.rstrip()) for line in shown
    )
    text = "\n".join(line.rstrip() for line in printed).strip("\n")
    match = re.search(rf"^{pattern}$", text, re.M) if part else re.fullmatch(pattern, text)
    return match is not None
