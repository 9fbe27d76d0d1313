"""The ``gpumem`` command: a module per subcommand, of which one is imported."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from pytest_gpumem.cli.columns import say
from pytest_gpumem.cli.command import Answer, Command, ExamplesBelow, example_lines
from pytest_gpumem.echo import printable, quoted
from pytest_gpumem.progress import progress
from pytest_gpumem.simulated.common.errors import how_to_paste

COMMANDS = {
    "bisect": "the commit that made a test's memory grow, by simulated runs",
    "compare": "compare two reports or baselines folders; exit code 1 on a regression",
    "completion": "what lets a shell complete these commands by the tab key",
    "env": "what a number depends on here: to be pasted where one is reported",
    "gpus": "the GPUs of this host: who holds what, and who waits",
    "history": "how peaks went over reports or commits; exit code 1 on a slow creep",
    "html": "turn a JSON report into a page to look at",
    "layers": "print a model layer by layer: shapes, parameters, memory, FLOPs",
    "lines": "print what each source line allocated and freed",
    "markdown": "a JSON report as the comment for a pull request",
    "move": "let stored baselines follow a test that was moved or renamed",
    "plan": "say which GPU each test needs, how many machines, and what they cost",
    "plot": "draw a picture of a JSON report, or of how peaks went",
    "predict": "say what a function or test would need on models of GPU",
    "replay": "replay a torch memory snapshot; with other allocator settings, or on another GPU",
    "run": "run a script for some steps: what it takes of a GPU, and whether it fits",
    "watch": "a live view of the GPUs of this host and of the tests that pytest runs",
}
"""The subcommands: each is the ``COMMAND`` of the module of its name."""

EXAMPLES = (
    "gpumem run --gpu T4 train.py --batch-size 32            what do its first steps take?",
    "gpumem predict train.py:step --gpu T4 --gpu A100-40GB   does it fit, without a GPU?",
    "gpumem compare main.json change.json                    what grew, and by how much?",
    "gpumem html report.json                                 a page to look at",
    "gpumem replay snapshot.pickle --gpu L4                  would that run fit on another GPU?",
    "gpumem history reports/                                 what crept in over time?",
    'gpumem bisect "tests/test_a.py::test_b" --good v1.0     which commit was it?',
)

BAD_INPUT = 2
INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended."""

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
    given = list(sys.argv[1:] if argv is None else argv)
    _show_all_letters()
    try:
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        name = _named(given)
        try:
            arguments = parser_of([name] if name else []).parse_args(given)
            arguments.given = given
            code = _printed(_answer(arguments), arguments)
        finally:  # --help and --version leave by SystemExit, and a lost reader shows in a flush
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_INPUT
    except KeyboardInterrupt:
        print("gpumem: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _refused("this command runs code on torch, which is not installed: install torch")
    except OSError as error:
        named = "" if error.filename is None else f"{quoted(str(error.filename))}: "
        return _refused(f"{named}{error.strerror or error}")
    except ValueError as error:
        return _refused(str(error), _snippet_of(error))
    except RuntimeError as error:
        if "Symlink loop" not in str(error):  # which is an OSError from Python 3.13 on
            raise
        return _refused(str(error))
    return code


def parser_of(names: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of ``gpumem``; the subcommands ``names`` are imported for it."""
    parser = _Parser(
        prog="gpumem",
        description="What tests and training runs take of a GPU: measured, simulated, recorded. "
        "Exit codes: 0 fine, 1 a regression, or what does not fit, 2 what cannot be read or done.",
        epilog=example_lines(
            (
                *EXAMPLES,
                "gpumem COMMAND --help                                   more of one command",
            )
        ),
        formatter_class=ExamplesBelow,
    )
    parser.add_argument("--version", action=_ShowVersion)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for name, purpose in COMMANDS.items():
        own = commands.add_parser(name, help=purpose)
        if name in names:
            command: Command = import_module(f"{__name__}.{name}").COMMAND
            command.add_to(own, name)
    return parser


class _ShowVersion(argparse.Action):
    """Prints the installed version, which takes a while to find."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: object) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version, and end")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it."""
        from importlib.metadata import version

        print(f"pytest-gpumem {version('pytest-gpumem')}")
        parser.exit()


def _named(given: Sequence[str]) -> str | None:
    """Return the subcommand that was named; raises ``ValueError`` where there is no such one."""
    name = next((word for word in given if not word.startswith("-")), None)
    if name is None or name in COMMANDS:
        return name
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    raise ValueError(f"{quoted(name)} is no command: {meant}; see gpumem --help")


def _answer(arguments: argparse.Namespace) -> Answer | int:
    command: Command = arguments.command
    if command.looks or command.talks:
        return command.run(arguments)
    with progress(arguments.command_name) as arguments.progress:
        return command.run(arguments)


def _printed(answer: Answer | int, arguments: argparse.Namespace) -> int:
    if isinstance(answer, int):
        return answer
    if not arguments.json:
        say(answer.lines)
    elif arguments.command.looks:
        print(*answer.texts(as_json=True))
    else:
        print(json.dumps(answer.data(), indent=2))
    return answer.code


def _complete() -> None:
    """Answer the shell that asks for completions, and end; see ``gpumem completion``."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        raise SystemExit(BAD_INPUT) from None
    argcomplete.autocomplete(parser_of(COMMANDS))


def _refused(sentence: str, below: str = "") -> int:
    print(f"gpumem: {printable(sentence, MOST_SAID)}", file=sys.stderr)
    if below:
        print(f"\n{below}", file=sys.stderr)
    return BAD_INPUT


def _snippet_of(error: BaseException | None) -> str:
    """What to paste so that a kernel nobody described is simulated, if that was what refused."""
    while error is not None:
        if snippet := getattr(error, "snippet", ""):
            where = getattr(error, "belongs_into", "the code that it runs")
            return f"{how_to_paste(getattr(error, 'kernel', 'it'), where)}\n\n{snippet}"
        error = error.__cause__
    return ""


def _show_all_letters() -> None:
    """Print letters that the terminal's encoding lacks as escapes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
