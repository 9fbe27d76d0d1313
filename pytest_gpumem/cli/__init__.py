"""The ``gpumem`` command: a module per subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pytest_gpumem.cli import compare, gpus, layers, lines, predict, replay

BAD_INPUT = 2


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
    for command in (compare, gpus, layers, lines, predict, replay):
        command.add_command(commands)
    try:
        arguments = parser.parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_INPUT
    except (ValueError, OSError) as error:
        print(f"gpumem: {error}", file=sys.stderr)
        return BAD_INPUT
    return code
