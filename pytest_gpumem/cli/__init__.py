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

from pytest_gpumem.cli.command import BAD_INPUT, Command, Commands, ExamplesBelow
from pytest_gpumem.progress import progress
from pytest_gpumem.quoting import printable, quoted
from pytest_gpumem.report.header import installed_release

GROUPS: dict[str, dict[str, str]] = {
    "what does code take, and does it fit?": {
        "run": "a script, as it is, for some steps",
        "predict": "a function or test, on models of GPU: by phase, line or layer",
        "replay": "a memory snapshot of torch: on another GPU, with other settings",
        "plan": "which GPU each test needs, how many machines, and what they cost",
    },
    "what grew, and why?": {
        "compare": "two reports or baselines folders",
        "history": "peaks over reports or commits: steps, and slow growth",
        "bisect": "the commit that made a test grow",
        "report": "a JSON report as a page, a comment or a picture",
    },
    "what is stored, and what is there?": {
        "baselines": "list, show, move or prune the stored numbers of tests",
        "devices": "the models of GPU that need no GPU",
        "gpus": "the GPUs of this host: who holds what, and who waits",
        "env": "what numbers depend on here, to be pasted into a report of one",
        "completion": "a script by which a shell completes these commands",
    },
}
"""The subcommands by purpose: each is the ``COMMAND`` of the module of its name."""

COMMANDS = {name: purpose for group in GROUPS.values() for name, purpose in group.items()}

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C has ended, as shells expect it."""

MOST_REFUSED = 2000
"""The most characters of a sentence on stderr."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise an error for wrong arguments, without argparse's usage text."""
        raise ValueError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``gpumem`` with ``argv``, the process's own arguments by default.

    Returns the exit code: 0 fine, 1 regression or disagreement, 2 bad input, with one sentence on
    stderr.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    for output in ("stdout", "stderr"):
        stream = getattr(sys, output)
        if stream is None:  # closed by the caller; print would write elsewhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.set_inheritable(nowhere, True)  # it has the number of the closed one
            setattr(sys, output, os.fdopen(nowhere, "w"))
        if isinstance(stream, TextIOWrapper):
            # Characters that the terminal's encoding lacks are escaped instead of failing.
            stream.reconfigure(errors="backslashreplace")
    try:
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        name = _command_in(given)
        try:
            if given[:1] == ["--version"]:
                print(f"pytest-gpumem {installed_release('pytest-gpumem')}")
                return 0
            arguments, unknown = parser_of([name] if name else []).parse_known_args(given)
            if unknown:
                own = f"see gpumem {arguments.command_name} --help"
                raise ValueError(f"unrecognized arguments: {' '.join(unknown)}; {own}")
            arguments.given = given
            code = _run(arguments)
        finally:  # also for the SystemExit of --help: a closed pipe raises here, in a flush
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe; Python would print another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_INPUT
    except KeyboardInterrupt:
        print("gpumem: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ImportError as error:
        if error.name == "_C":  # a library that it is linked to
            return _refused(f"torch cannot be imported: {error}; --device dry may work without it")
        if error.name != "torch":
            raise
        return _refused("this command runs code on torch, which is not installed: install torch")
    except OSError as error:
        named = "" if error.filename is None else f"{quoted(str(error.filename))}: "
        return _refused(f"{named}{error.strerror or error}")
    except (ValueError, RuntimeError) as error:
        # A loop of symbolic links is an OSError from Python 3.13 on.
        if isinstance(error, RuntimeError) and "Symlink loop" not in str(error):
            raise
        return _refused(str(error))
    return code


def parser_of(names: Collection[str]) -> argparse.ArgumentParser:
    """Return the parser of ``gpumem``; the subcommands ``names`` are imported for it.

    Its help lists all commands by purpose on a screen of 80 columns and 24 lines.
    """
    lines = ["The GPU memory of tests and training runs, measured or simulated.", ""]
    for question, group in GROUPS.items():
        lines += [question, *(f"    {name:<12}{purpose}" for name, purpose in group.items())]
    lines += ["", "exit code: 0 fine, 1 a regression or what does not fit, 2 bad input"]
    parser = _Parser(
        prog="gpumem",
        usage="gpumem COMMAND ...   (COMMAND --help: its options, with examples)",
        description="\n".join(lines),
        formatter_class=ExamplesBelow,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(
        metavar="COMMAND",
        prog="gpumem",
        required=True,
        parser_class=_Parser,
        help=argparse.SUPPRESS,
    )
    for name in COMMANDS:
        own = commands.add_parser(name)
        if name in names:
            command: Command | Commands = import_module(f"{__name__}.{name}").COMMAND
            command.add_to(own, name)
    return parser


def _command_in(given: Sequence[str]) -> str | None:
    """Return the subcommand in the arguments; raises ``ValueError`` for an unknown one."""
    name = next((word for word in given if not word.startswith("-")), None)
    if name is None or name in COMMANDS:
        return name
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    raise ValueError(f"{quoted(name)} is not a command: {meant}; see gpumem --help")


def _run(arguments: argparse.Namespace) -> int:
    """Run the command and print its result; return the exit code."""
    command: Command = arguments.command
    if command.shows_state or command.prints_output:
        answer = command.run(arguments)
    else:
        with progress(arguments.command_name) as arguments.progress:
            answer = command.run(arguments)
    if isinstance(answer, int):
        return answer
    if not arguments.json:
        for line in answer.lines:
            print(printable(line.rstrip()))  # escapes control characters in names
    elif command.shows_state:
        print(*answer.texts(as_json=True))
    else:
        print(json.dumps(answer.data(), indent=2))
    if answer.problem:
        sys.stdout.flush()
        code = _refused(answer.problem)
        return int(answer.failed) or code
    return int(answer.failed)


def _complete() -> None:
    """Answer a shell's request for completions, and exit; see ``gpumem completion``."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        raise SystemExit(BAD_INPUT) from None
    argcomplete.autocomplete(parser_of(COMMANDS))


def _refused(sentence: str) -> int:
    print(f"gpumem: {printable(sentence, MOST_REFUSED)}", file=sys.stderr)
    return BAD_INPUT
