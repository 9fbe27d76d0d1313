"""The target of a command: a function of a module or file, or a test."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_gpumem.quoting import quoted

FORMS = "write module:function, path.py:function or path.py::test"


class TargetError(ValueError):
    """A target that cannot be run; the message is one sentence for the user."""


@contextmanager
def refusing(text: str, *known: type[BaseException]) -> Iterator[None]:
    """Raise :class:`TargetError` for an error of the target ``text``, which runs inside.

    The errors that are ``known`` are sentences for the user; of others, the class is shown too.
    """
    try:
        yield
    except known as error:
        raise TargetError(f"{text}: {error}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"{text} raised {type(error).__name__}: {error}") from error


Function = Callable[[], Any]
"""A target that is a function; a test is its node id."""


def find_target(text: str, *, takes_arguments: bool = False) -> Function | str:
    """Return the target that ``text`` names; a file or module is imported for it.

    Raises :class:`TargetError` where it does not exist, or where the function needs arguments and
    may not take any.
    """
    if "::" in text:
        return checked_nodeid(text)
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise TargetError(f"{quoted(text)} is not a target; {FORMS}")
    function = _function(text, _module(text, place), name)
    if takes_arguments:
        return function
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TargetError(
            f"{text}: {name}() cannot be called without arguments ({error}); name a function that "
            "makes what it needs itself"
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    return function


def checked_nodeid(text: str) -> str:
    """Return the node id ``text``; raises :class:`TargetError` where its file does not exist."""
    path = text.partition("::")[0]
    if not path:
        raise TargetError(f"{quoted(text)} is not a target; {FORMS}")
    if not Path(path).is_file():
        raise TargetError(f"{text}: there is no file {path}")
    return text


def _module(text: str, place: str) -> ModuleType:
    path = Path(place)
    is_path = path.suffix == ".py"
    if is_path:
        loaded = sys.modules.get(path.stem)
        file = getattr(loaded, "__file__", None)
        if loaded and file is not None and Path(file).resolve() == path.resolve():
            return loaded
        if not path.is_file():
            raise TargetError(f"{text}: there is no file {place}")
    # Like python itself for a script, and for -m.
    folder = str(path.resolve().parent if is_path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if not is_path:
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() or pytest.skip() in a module is no Exception
        raise TargetError(
            f"{text}: importing {place} raised {type(error).__name__}: {error}"
        ) from error


def _function(text: str, module: ModuleType, name: str) -> Callable[[], Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{text}: {module.__name__} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{text}: {name} is {type(found).__name__}, not a function")
    function: Callable[[], Any] = found
    return function
