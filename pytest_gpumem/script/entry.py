"""A script or a module, run as by ``python``, and the source of a test that limits its memory."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from pytest_gpumem.quoting import quoted
from pytest_gpumem.sizes import MIB, format_size
from pytest_gpumem.values.measurement import Measurement
from pytest_gpumem.values.serialization import Plain

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_STARTERS = ("<frozen runpy>", runpy.__file__)


class ScriptError(ValueError):
    """A script that cannot be run; the message is one sentence for the user."""


@dataclass(frozen=True)
class Script(Plain):
    """The arguments of ``python``: a file, or ``-m`` and a module, and the script's arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raise :class:`ScriptError` if Python cannot run it."""
        if self.is_module:
            return
        path = Path(self.name)
        if "\0" in self.name or not path.exists():
            raise ScriptError(f"there is no script {quoted(self.name)}")
        if path.is_dir():
            if not (path / "__main__.py").is_file():
                raise ScriptError(
                    f"{quoted(self.name)} is a folder without a __main__.py; give a script"
                )
            return
        if not path.is_file():
            raise ScriptError(f"{quoted(self.name)} is not a file; give a script")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are shown when the script runs
            self._compiled()

    def _compiled(self) -> CodeType:
        try:
            return compile(Path(self.name).read_bytes(), self._file, "exec", dont_inherit=True)
        except SyntaxError as error:
            line = f", line {error.lineno}" if error.lineno else ""
            raise ScriptError(
                f"{quoted(self.name)}{line}: {type(error).__name__}: {error.msg}"
            ) from error
        except ValueError as error:  # a null byte
            raise ScriptError(f"{quoted(self.name)} is no Python script: {error}") from error

    @property
    def _file(self) -> str:
        # Absolute, as in any __main__ since Python 3.9.
        return os.path.abspath(self.name)  # noqa: PTH100 - does not follow links

    def run(self) -> None:
        """Run the script as ``__main__``; its exceptions propagate.

        Sources: pymain_run_python() of Modules/main.c for ``sys.path``, and runpy.
        """
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            self._search(os.getcwd())  # noqa: PTH109 - as Python has it
            if not is_module(self.name):
                raise ScriptError(f"there is no module {quoted(self.name)}")
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif Path(self.name).is_dir():
            runpy.run_path(self.name, run_name="__main__")
        else:
            self._search(str(Path(self.name).resolve().parent))
            code = self._compiled()
            sys.modules["__main__"] = main = ModuleType("__main__")
            vars(main).update(
                __file__=self._file,
                __cached__=None,
                __builtins__=sys.modules["builtins"],
                __loader__=SourceFileLoader("__main__", self._file),
            )
            exec(code, vars(main))

    def _search(self, folder: str) -> None:
        if not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, folder)


def is_module(name: str) -> bool:
    """Return whether there is a module ``name``, without running it."""
    with suppress(ImportError, ValueError):
        return find_spec(name) is not None
    return False


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and the exceptions in its chain of causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Restore ``sys.argv``, ``sys.path`` and ``__main__`` after the script inside."""
    argv, main, path = sys.argv, sys.modules["__main__"], list(sys.path)
    try:
        yield
    finally:
        sys.argv, sys.modules["__main__"] = argv, main
        sys.path[:] = path


def show_traceback(error: BaseException) -> None:
    """Print ``error`` without this package's frames, by the script's ``sys.excepthook``."""
    error.__traceback__ = own_frames(error.__traceback__)  # hooks may read it from the error
    sys.excepthook(type(error), error, error.__traceback__)


def own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` without the frames of this package and of the script's starter."""
    own: list[TracebackType] = []
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        starts = not own and file in _STARTERS
        if not starts and not file.startswith(_PACKAGE):
            own.append(traceback)
        traceback = traceback.tb_next
    found: TracebackType | None = None
    for each in reversed(own):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


_TEST = """\
# test_{stem}.py
import pytest

from pytest_gpumem import run_script


@pytest.mark.gpumem({marker})
def test_{stem}():
    run_script({call})
"""


def run_script(name: str, *arguments: str, steps: int = 2, module: bool = False) -> int:
    """Run a script in a test, as ``gpumem run`` does, and return the number of its steps.

    Args:
        name: the script's path, as for ``python``, or a module's name.
        arguments: its command line.
        steps: the number of optimizer steps after which it is stopped, if it does so many.
        module: whether ``name`` is a module, as with ``python -m``.

    ``sys.argv``, ``sys.path`` and ``__main__`` are the script's while it runs. Its exceptions
    propagate, also a ``SystemExit`` with a code other than 0. Raises ``ValueError`` if there is no
    such script.
    """
    from pytest_gpumem.script.stopping import Steps, StopError

    script = Script(name, arguments, module)
    script.check()
    counter = Steps(steps)
    with process_as_it_was(), counter.counted():
        try:
            script.run()
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        except BaseException as error:
            if not any(isinstance(one, StopError) for one in chain(error)):
                raise
    return counter.count


def kept_test(script: Script, gpu: str, measured: Measurement, steps: int) -> str:
    """Return the source of a test that limits the peak of ``script`` on ``gpu``."""
    peak = measured.peak_allocated
    repeats = measured.simulated or measured.dry  # to the byte; else it has the default tolerance
    limit = peak if repeats else math.ceil(peak * 1.01) + MIB
    marker = [f"max={limit:_}", *([f'gpu="{gpu}"'] if repeats else [])]
    call = [
        # A JSON string is a valid Python string.
        *(json.dumps(text, ensure_ascii=False) for text in (script.name, *script.arguments)),
        f"steps={steps}",
        *(["module=True"] if script.is_module else []),
    ]
    last = script.name.rpartition(".")[2] if script.is_module else Path(script.name).stem
    return _TEST.format(
        stem=re.sub(r"\W", "_", last) or "script", marker=", ".join(marker), call=", ".join(call)
    ).replace(")\ndef", f")  # {format_size(limit)}\ndef")
