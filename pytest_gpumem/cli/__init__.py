"""The ``gpumem`` command: a module per subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

from pytest_gpumem.cli import (
    bisect,
    compare,
    env,
    gpus,
    history,
    html,
    layers,
    lines,
    markdown,
    move,
    plan,
    plot,
    predict,
    replay,
    watch,
)
from pytest_gpumem.echo import printable, quoted

COMMANDS = (
    *(bisect, compare, env, gpus, history, html, layers, lines),
    *(markdown, move, plan, plot, predict, replay, watch),
)
"""The modules of the subcommands."""

BAD_INPUT = 2

MOST_SAID = 2000
"""Characters of a sentence on stderr."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the arguments, without argparse's lines of usage."""
        raise ValueError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``gpumem`` with ``argv``, the process's own arguments by default.

    Returns the exit code: 0 fine, 1 regression or disagreement, 2 bad input, with one sentence on
    stderr.
    """
    parser = _Parser(prog="gpumem", description="GPU memory that was measured or recorded.")
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for command in COMMANDS:
        command.add_command(commands)
    _show_all_letters()
    try:
        arguments = parser.parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_INPUT
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _refused("this command runs code on torch, which is not installed: install torch")
    except OSError as error:
        named = "" if error.filename is None else f"{quoted(str(error.filename))}: "
        return _refused(f"{named}{error.strerror or error}")
    except ValueError as error:
        return _refused(str(error))
    return code


def _refused(sentence: str) -> int:
    print(f"gpumem: {printable(sentence, MOST_SAID)}", file=sys.stderr)
    return BAD_INPUT


def _show_all_letters() -> None:
    """Print letters that the terminal's encoding lacks as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
