"""The target of a command, a function of a module or file, or a test, and its ``--device``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_gpumem.cli.command import BAD_INPUT, Argument
from pytest_gpumem.dry.load import environment_of_option
from pytest_gpumem.quoting import quoted
from pytest_gpumem.simulated.gpu.catalogue import find_machine

FORMS = "write module:function, path.py:function or path.py::test"


@contextmanager
def refusing(text: str, *known: type[BaseException]) -> Iterator[None]:
    """Raise ``ValueError`` for an error of the target ``text``, which runs inside.

    Errors of the ``known`` classes are sentences for the user; others are shown with their class.
    """
    try:
        yield
    except known as error:
        raise ValueError(f"{text}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text} raised {type(error).__name__}: {error}") from error


_DEFERRED: Mapping[str, Callable[[object], bool]] = {
    "a coroutine": inspect.iscoroutinefunction,
    "a generator": inspect.isgeneratorfunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
}

Function = Callable[[], Any]
"""A target that is a function; a target that is a test is a node id."""


def find_target(text: str, *, takes_arguments: bool = False) -> Function | str:
    """Return the target that ``text`` names; a file or module is imported for it.

    Raises ``ValueError`` if it does not exist, or if the function needs arguments and
    ``takes_arguments`` is not set.
    """
    if "::" in text:
        return checked_nodeid(text)
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise ValueError(f"{quoted(text)} is not a target; {FORMS}")
    module = _module(text, place)
    try:
        function: Function = attrgetter(name)(module)
    except AttributeError:
        raise ValueError(f"{text}: {module.__name__} has no {name}") from None
    if not callable(function):
        raise ValueError(f"{text}: {name} is {type(function).__name__}, not a function")
    if takes_arguments:
        return function
    for kind, is_of in _DEFERRED.items():
        if is_of(function):
            raise ValueError(
                f"{text}: {name}() is {kind}, of which a call runs nothing; name a function that "
                "runs it to its end"
            )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"{text}: {name}() cannot be called without arguments ({error}); name a function that "
            "makes what it needs itself"
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    return function


def checked_nodeid(text: str) -> str:
    """Return the node id ``text``; raises ``ValueError`` where its file does not exist."""
    path = text.partition("::")[0]
    if not path:
        raise ValueError(f"{quoted(text)} is not a target; {FORMS}")
    if not Path(path).is_file():
        raise ValueError(f"{text}: there is no file {path}")
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
            raise ValueError(f"{text}: there is no file {place}")
    # As python does for a script, and for -m.
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
        raise ValueError(
            f"{text}: importing {place} raised {type(error).__name__}: {error}"
        ) from error


CUDA, DRY, SIM = "cuda", "dry", "sim"
_PREFIX = "gpumem: "
_BEGIN = '{\n  "target": '
"""The beginning of a result in JSON, after the output of the code."""


@dataclass(frozen=True)
class DeviceOption:
    """A kind of device and, if given with it, a model of the catalogue."""

    kind: str
    model: str | None = None

    def models(self, given: Sequence[str] | None, otherwise: Sequence[str]) -> list[str]:
        """Return the models to run on: that of the option, or those ``given`` by ``--gpu``.

        Raises ``ValueError`` if both name a model, or a model is unknown.
        """
        if self.model is not None and given:
            raise ValueError(
                f"--device {self.kind}:{self.model} names a model, and so does --gpu: leave one out"
            )
        named = [self.model] if self.model is not None else list(given or otherwise)
        for name in named:
            if name != CUDA:
                find_machine(name)
        return named


def _device(text: str) -> DeviceOption:
    kind, colon, model = text.partition(":")
    if kind not in (CUDA, DRY, SIM) or (colon and (not model or kind == CUDA)):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a device; write cuda, dry, dry:H100, sim or sim:H100"
        )
    return DeviceOption(kind, model or None)


DEVICE = Argument(
    "--device KIND[:MODEL]",
    "sim, dry (torch's own CUDA code without a GPU) or cuda, the device of this machine "
    "(default: sim)",
    type=_device,
    default=DeviceOption(SIM),
)
"""The option of all commands that run code."""


def run_on_dry(given: Sequence[str], gpu: str) -> int:
    """Run the command line ``given`` in a process with a dry ``gpu``; return its exit code.

    Raises ``ValueError`` if there is no such device.
    """
    environment = {**os.environ, **environment_of_option(gpu)}
    return subprocess.run(_command(given), env=environment, check=False).returncode


def answer_on_dry(given: Sequence[str], gpu: str, *, memory: int | None = None) -> Any:
    """Return the JSON output of the command line ``given`` in a process with a dry ``gpu``.

    ``memory`` is the GPU's in bytes, by default the model's. Raises ``ValueError`` with the
    sentence of a command that ends with an error.
    """
    done = subprocess.run(
        [*_command(given), "--json"],
        env={**os.environ, **environment_of_option(gpu, memory)},
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
    )
    refusals = [line for line in done.stderr.splitlines() if line.startswith(_PREFIX)]
    if done.returncode == BAD_INPUT and refusals:
        raise ValueError(refusals[-1].removeprefix(_PREFIX))
    sys.stderr.write(done.stderr)
    printed, begin, answer = done.stdout.rpartition(_BEGIN)
    sys.stdout.write(printed)
    try:
        return json.loads(begin + answer)
    except ValueError:
        raise ValueError(
            f"the process on the dry {gpu} ended with code {done.returncode}"
        ) from None


def _command(given: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest_gpumem.cli", *given, "--device", CUDA]
