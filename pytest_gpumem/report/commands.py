"""Command lines to paste: pytest as it was started, for other tests or with other options.

They are meant for the folder in which pytest was started, which need not be its rootdir.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.paths import relative
from pytest_gpumem.quoting import quoted_for_shell
from pytest_gpumem.values.serialization import Plain

if TYPE_CHECKING:
    import pytest

UPDATE = "--gpumem-update-baselines"
PRUNE = "--gpumem-prune-baselines"

_CONFIG_FILES = (
    *("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml"),
    *("tox.ini", "setup.cfg", "setup.py"),
)
"""Files by which pytest finds its configuration and its rootdir, from its documentation."""

_FLAGS = (
    *("-x", "-s", "-l", "--exitfirst", "--lf", "--last-failed", "--ff", "--failed-first"),
    *("--nf", "--new-first", "--sw", "--stepwise", "--stepwise-skip", "--stepwise-reset"),
    *("--sw-skip", "--sw-reset", "--pdb", "--trace", "--collect-only", "--co", "--cache-clear"),
    *("--showlocals", "--no-showlocals", "--full-trace", "--no-header", "--no-summary"),
    *("--quiet", "--verbose", "--setup-show", "--setup-only", "--setup-plan", "--cov-append"),
    *("--no-fold-skipped", "--force-short-summary", "--runxfail", "--show-fixtures"),
    *(PRUNE, "--gpumem-require-baselines", "--gpumem-all", "--gpumem-share"),
)
_VALUES = (
    *("-n", "-r", "--maxfail", "--tb", "--durations", "--durations-min", "--verbosity", "--color"),
    *("--numprocesses", "--maxprocesses", "--dist", "--tx", "--capture", "--show-capture"),
    *("--code-highlight", "--junitxml", "--junit-xml", "--junit-prefix", "--junitprefix"),
    *("--basetemp", "--reruns", "--reruns-delay", "--report-log", "--html", "--timeout"),
    *("--last-failed-no-failures", "--lfnf", "--cov", "--cov-report", "--cov-config"),
    *("--log-level", "--log-format", "--log-date-format", "--log-cli-level", "--log-cli-format"),
    *("--log-file", "--log-file-level", "--log-file-mode", "--gpumem-report", "--gpumem-artifacts"),
    *("--gpumem-history", "--gpumem-explain", "--gpumem-quota", "--gpumem-share-timeout"),
    *("--gpumem-rows", "--gpumem-sort", "--gpumem-tolerance"),
)
"""Options with a value that change neither the selected tests nor their numbers.

All others are repeated: a conftest's ``--runslow`` decides whether a test runs.
"""

_REPEATED = (
    *("-c", "--config-file", "--rootdir", "--confcutdir", "-o", "--override-ini", "-p", "-W"),
    *("--import-mode", "--gpumem-device", "--gpumem-baselines", "--gpumem-sim-scope"),
    *("--gpumem-sim-values", "--gpumem-sim-values-limit", "--pythonwarnings"),
    "--gpumem-sim-stand-ins",
    "--gpumem-sim-compile",
)
"""Options that are repeated with their value, which may look like a path."""

_CHOOSING = ("-k", "-m", "--deselect", "--ignore", "--ignore-glob", "--gpumem-shard")
"""Options that choose tests: repeated where no test is named."""

_LETTERS = re.compile(r"-[vqxsl]+|-r[A-Za-z]+|-n\w+|-pno:.*")


@dataclass(frozen=True)
class Command(Plain):
    """The parts of pytest's command line that are needed to start it again."""

    program: tuple[str, ...] = ("pytest",)
    options: tuple[str, ...] = ()
    """Options that matter for any tests."""
    choosing: tuple[str, ...] = ()
    """Options that chose the tests."""
    paths: tuple[str, ...] = ()
    folder: str = ""
    """The folder in which it was started; empty if unknown."""
    rootdir: str = ""
    inipath: str = ""
    cached: bool = True
    """Whether pytest's cache keeps failed tests."""

    @classmethod
    def of(cls, config: pytest.Config) -> Command:
        """Return the command line of ``config``; in a worker of pytest-xdist, the controller's."""
        known: dict[str, Any] | None = getattr(config, "workerinput", {}).get(COMMAND)
        if known is not None:
            return cls.from_dict(known)
        given = [os.fspath(argument) for argument in config.invocation_params.args]
        # ``python -m pytest`` lets tests import from the current folder, ``pytest`` does not.
        # A call of pytest.main() with plugins has no command line.
        as_module = sys.argv[:1] and Path(sys.argv[0]).name == "__main__.py"
        as_module = as_module and not config.invocation_params.plugins
        paths = config.args if config.args_source is config.ArgsSource.ARGS else []
        return cls(
            ("python", "-m", "pytest") if as_module else ("pytest",),
            *_sorted_out(given, list(map(str, paths))),
            folder=str(config.invocation_params.dir),
            rootdir=str(config.rootpath),
            inipath=str(config.inipath or ""),
            cached=config.pluginmanager.hasplugin("lfplugin"),
        )

    def records(self, *nodeids: str) -> str:
        """Return the line that records the numbers of the tests ``nodeids`` as their baselines."""
        parts = [nodeid.partition("::") for nodeid in nodeids]
        fixed = next(filter(None, (self._fixed(module) for module, _, _ in parts)), [])
        words = [*self.program, *map(_word, (*fixed, *self.options)), UPDATE]
        for module, colons, name in parts:
            if self.folder and self.rootdir:
                module = relative(Path(self.rootdir, module), self.folder).replace(os.sep, "/")
            words.append(quoted_for_shell(f"{module}{colons}{name}"))
        return " ".join(words)

    def again(self, *options: str) -> str:
        """Return the line that runs the tests of this run with further ``options``."""
        words = (*self.program, *map(_word, (*self.options, *options, *self.choosing)))
        return " ".join([*words, *(quoted_for_shell(path) for path in self.paths)])

    def _fixed(self, module: str) -> list[str]:
        """Return the options that let pytest find the same rootdir for one test as for all."""
        given = ("--rootdir", "-c", "--config-file")
        if not self.rootdir or any(option.startswith(given) for option in self.options):
            return []
        root, folder = Path(self.rootdir), Path(self.folder)
        test = (root / module).parent
        nearer = [above for above in (test, *test.parents) if above.is_relative_to(root)]
        nested = any(
            (above / name).exists() for above in nearer if above != root for name in _CONFIG_FILES
        )
        # Without a configuration file the rootdir is the common ancestor of folder and arguments.
        above = (one for one in (folder, *folder.parents) if test.is_relative_to(one))
        found = self.inipath or next(above, None) == root
        if not nested and (found or (root / "setup.py").exists()):
            return []
        fixed = [f"--rootdir={relative(root, self.folder)}"]
        if self.inipath:
            fixed += ["-c", relative(self.inipath, self.folder)]
        return fixed


COMMAND = "gpumem_command"
"""Key of a pytest-xdist worker's input: the controller's command line."""

PLAIN = Command()


def _word(text: str) -> str:
    """Return ``text`` as one word for a shell, quoted if necessary."""
    return subprocess.list2cmdline([text]) if os.name == "nt" else shlex.quote(text)


def _sorted_out(
    given: Sequence[str], paths: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the options to repeat, those that chose the tests, and the paths."""
    options: list[str] = []
    choosing: list[str] = []
    found: list[str] = []
    words = iter(given)
    for word in words:
        name, equals, _ = word.partition("=")
        takes_value = name in _CHOOSING or name in _VALUES or name in _REPEATED
        own = [word, *([] if equals or not takes_value else islice(words, 1))]
        if word in paths:
            found.append(word)
        elif name in _CHOOSING:
            choosing += own
        elif not (name in _VALUES or name in _FLAGS or name == UPDATE or _LETTERS.fullmatch(word)):
            # Disabling a plugin does not change numbers.
            options += [] if word == "-p" and "no:" in own[-1] else own
    return tuple(options), tuple(choosing), tuple(found)
