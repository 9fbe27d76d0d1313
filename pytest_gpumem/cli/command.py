"""What a subcommand is: its arguments, and what it found for a person and for a program."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """One argument, as :meth:`argparse.ArgumentParser.add_argument` takes it."""

    names: tuple[str, ...]
    options: Mapping[str, Any]
    group: str = ""
    """The heading that it stands under in the help."""

    @property
    def attribute(self) -> str:
        """Where its value stands among the parsed ones."""
        long = next((name for name in self.names if name.startswith("--")), self.names[0])
        written: str = self.options.get("dest", long.lstrip("-"))
        return written.replace("-", "_")

    def was_given(self, arguments: argparse.Namespace) -> bool:
        """Return whether the command line says anything else than its default."""
        return getattr(arguments, self.attribute) not in (self.options.get("default"), None, False)


def argument(*names: str, group: str = "", **options: Any) -> Argument:
    """Return the argument of these names; a single ``%`` in its help stands for itself."""
    if "help" in options:
        options["help"] = options["help"].replace("%", "%%")
    return Argument(names, options, group)


def refuse_others(
    arguments: argparse.Namespace, chosen: str, groups: Mapping[str, Sequence[Argument]]
) -> None:
    """Raise ``ValueError`` where an option was given that only another choice takes.

    ``groups`` are the arguments of each choice, by how the choice is written.
    """
    own = {one.names for one in groups.get(chosen, ())}
    for choice, others in groups.items():
        for one in others:
            if one.names not in own and one.was_given(arguments):
                raise ValueError(f"{one.names[-1]} goes with {choice}, not with {chosen}")


@dataclass(frozen=True)
class Answer:
    """What a subcommand found."""

    lines: Iterable[str]
    """What a person reads."""
    data: Callable[[], Any]
    """What ``--json`` prints instead: builtin types, sizes in bytes."""
    code: int = 0

    def texts(self, *, as_json: bool) -> list[str]:
        """Return the lines to print, JSON as a single one: for what is shown again and again."""
        return [json.dumps(self.data())] if as_json else list(self.lines)


@dataclass(frozen=True)
class Command:
    """One subcommand; its name and the line that says what it is for stand in the table."""

    description: str
    run: Callable[[argparse.Namespace], Answer | int]
    """Raises ``ValueError`` with a sentence for bad input. An exit code alone says that everything
    has been printed already, as ``arguments.json`` asks for. ``arguments.progress`` is told how far
    it is."""
    arguments: Sequence[Argument] = ()
    examples: Sequence[str] = ()
    """Command lines."""
    json: str = "print everything as JSON, sizes in bytes"
    """Help of ``--json``, which every subcommand has."""
    looks: bool = False
    """Whether it looks at what is now: it takes no time, or as long as it is watched."""

    talks: bool = False
    """Whether what it runs writes to the terminal: there is no bar beside that."""

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Let ``parser`` be that of this command, of that ``name``."""
        parser.description = self.description
        parser.epilog = example_lines(self.examples)
        parser.formatter_class = ExamplesBelow
        groups: dict[str, argparse._ArgumentGroup] = {}
        for each in self.arguments:
            place: argparse._ActionsContainer = parser
            if each.group:
                if each.group not in groups:
                    groups[each.group] = parser.add_argument_group(each.group)
                place = groups[each.group]
            place.add_argument(*each.names, **each.options)
        parser.add_argument("--json", action="store_true", help=self.json)
        parser.set_defaults(command=self, command_name=name)


@dataclass(frozen=True)
class Commands:
    """A subcommand that has subcommands of its own, by name with the line that says their use."""

    description: str
    parts: Mapping[str, tuple[str, Command]]
    examples: Sequence[str] = ()

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Let ``parser`` be that of this command, of that ``name``."""
        parser.description = self.description
        parser.epilog = example_lines(self.examples)
        parser.formatter_class = ExamplesBelow
        own = parser.add_subparsers(
            title="commands", metavar="COMMAND", required=True, parser_class=type(parser)
        )
        for part, (purpose, command) in self.parts.items():
            command.add_to(own.add_parser(part, help=purpose), f"{name} {part}")


def example_lines(examples: Sequence[str]) -> str:
    """Return what stands below a help's options."""
    lines = "\n".join(f"  {example}" for example in examples)
    return f"examples:\n{lines}" if examples else ""


class ExamplesBelow(argparse.HelpFormatter):
    """Formats help: wraps paragraphs; text in lines stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return text
        return super()._fill_text(text, width, indent)
