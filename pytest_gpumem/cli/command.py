"""A subcommand: its arguments, and its result as a table, as text and as data."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pytest_gpumem.quoting import printable
from pytest_gpumem.text import shorten, wrap

T = TypeVar("T")

BAD_INPUT = 2
"""Exit code."""


class Argument:
    """An argument: the parameters of :meth:`argparse.ArgumentParser.add_argument`.

    It is ``written`` as in a line of usage: ``-o --output FILE``, ``--test PART...`` for an option
    that may be repeated, ``--all`` for a flag, or ``tests TEST``, the attribute and the placeholder
    of a positional argument. A single ``%`` of ``help`` is literal.
    """

    def __init__(self, written: str, help: str, **options: Any) -> None:
        words = written.split()
        self.names = [word for word in words if word.startswith("-")] or words[:1]
        if words[len(self.names) :]:
            (shown,) = words[len(self.names) :]
            options["metavar"] = shown.removesuffix("...")
            if shown.endswith("..."):
                options |= {"action": "append", "default": []}
        elif written.startswith("-") and "choices" not in options:
            options["action"] = "store_true"
        self.options = {"help": help.replace("%", "%%"), **options}


LONGEST = 10_000_000
"""The largest time, in any unit, that timers accept."""


def above_zero(unit: str) -> Callable[[str], float]:
    """Return the argparse type of a positive number of ``unit``."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number < LONGEST:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of {unit} above 0 and below {LONGEST:,}"
            )
        return number

    return parse


def parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    """Return the value of ``option``; a ``ValueError`` of ``parse`` is raised with its name."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def refuse_others(
    arguments: argparse.Namespace, chosen: str, groups: Mapping[str, Sequence[Argument]]
) -> None:
    """Raise ``ValueError`` for a given option that only another choice than ``chosen`` accepts.

    ``groups`` are the arguments of each choice, by the choice as it is written.
    """
    own = [one.names for one in groups.get(chosen, ())]
    for choice, others in groups.items():
        for one in others:
            attribute = one.options.get("dest", one.names[-1].lstrip("-")).replace("-", "_")
            by_default = one.options.get("default"), None, False
            if one.names not in own and getattr(arguments, attribute) not in by_default:
                raise ValueError(f"{one.names[-1]} goes with {choice}, not with {chosen}")


@dataclass(frozen=True)
class Answer:
    """The result of a subcommand."""

    lines: Iterable[str]
    """The lines of text."""
    data: Callable[[], Any]
    """Function that returns the data for ``--json``: builtin types, sizes in bytes."""
    failed: bool = False
    """Whether the exit code is 1: a regression, or something that does not fit."""
    problem: str = ""
    """A sentence on a part that could not be run; otherwise the exit code is then 2."""

    def texts(self, *, as_json: bool) -> list[str]:
        """Return the lines to print, JSON as a single line for repeated output."""
        return [json.dumps(self.data())] if as_json else list(self.lines)


@dataclass(frozen=True)
class Command:
    """A subcommand; its name and its line of help are in :data:`pytest_gpumem.cli.COMMANDS`."""

    description: str
    run: Callable[[argparse.Namespace], Answer | int]
    """Function that runs it; raises ``ValueError`` with a sentence for bad input. If it prints its
    output itself, according to ``arguments.json``, it returns an exit code. It reports its progress
    to ``arguments.progress``."""
    arguments: Sequence[Argument] = ()
    groups: Mapping[str, Sequence[Argument]] = field(default_factory=dict)
    """Further arguments, by the heading under which the help lists them."""
    examples: Sequence[str] = ()
    """Example command lines."""
    json: str = "print everything as JSON, sizes in bytes"
    """Help of ``--json``, which every subcommand has."""
    shows_state: bool = False
    """Whether it shows the current state, once or repeatedly, and needs no progress bar."""

    purpose: str = ""
    """Line of help of a subcommand of another command."""
    prints_output: bool = False
    """Whether it runs code that writes to the terminal, so that there is no progress bar."""

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Set ``parser`` up for this command, named ``name``."""
        _describe(parser, self)
        for each in self.arguments:
            parser.add_argument(*each.names, **each.options)
        for heading, arguments in self.groups.items():
            group = parser.add_argument_group(heading)
            for each in arguments:
                group.add_argument(*each.names, **each.options)
        parser.add_argument("--json", action="store_true", help=self.json)
        parser.set_defaults(command=self, command_name=name)


@dataclass(frozen=True)
class Commands:
    """A subcommand with further subcommands, by name."""

    description: str
    parts: Mapping[str, Command]
    examples: Sequence[str] = ()

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Set ``parser`` up for this command, named ``name``."""
        _describe(parser, self)
        own = parser.add_subparsers(
            title="commands", metavar="COMMAND", required=True, parser_class=type(parser)
        )
        for part, command in self.parts.items():
            command.add_to(own.add_parser(part, help=command.purpose), f"{name} {part}")


def _describe(parser: argparse.ArgumentParser, command: Command | Commands) -> None:
    parser.description = command.description
    if command.examples:
        parser.epilog = "\n  ".join(["examples:", *command.examples])
    parser.formatter_class = ExamplesBelow


class ExamplesBelow(argparse.HelpFormatter):
    """A formatter of help that wraps paragraphs but keeps lines of several-line texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)


GAP = "  "
LEAST_TEXT = 20
UNLIMITED = 1 << 20
"""The width of output to a file or a pipe."""


def terminal_width() -> int:
    """Return the width of the terminal; for a file it is so large that nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED


def sentences(lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines`` of words, without repetitions, wrapped at the width of the terminal."""
    width = terminal_width()
    for line in dict.fromkeys(lines):
        yield from wrap(line, width, rest="  ") or [""]


def table(
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int],
    given_up: Sequence[int] = (),
    long: int | None = None,
    width: int = UNLIMITED,
) -> Iterator[str]:
    """Yield ``rows`` in columns, those in ``left`` aligned to the left.

    In a narrow terminal as many of the columns ``given_up`` as necessary are left out, in order;
    then the texts of the column ``long`` are shortened, to :data:`LEAST_TEXT` at least.
    """
    texts = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    kept = set(range(len(widths)))
    for index in given_up:
        if sum(widths[one] + len(GAP) for one in kept) - len(GAP) > width:
            kept.discard(index)
    over = sum(widths[one] + len(GAP) for one in kept) - len(GAP) - width
    if long is not None and over > 0:
        widths[long] = max(widths[long] - over, min(widths[long], LEAST_TEXT))
        for row in texts:
            row[long] = shorten(row[long], widths[long])
    for row in texts:
        cells = (
            cell.ljust(widths[index]) if index in left else cell.rjust(widths[index])
            for index, cell in enumerate(row)
            if index in kept
        )
        yield GAP.join(cells).rstrip()
