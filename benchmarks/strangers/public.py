"""The programs of ``public_programs``, of libraries that are installed."""

from __future__ import annotations

import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from strangers import MIXED, Program

FOLDER = Path(__file__).parent.parent / "public_programs"
_FILES = ("test_language", "test_pictures", "test_adapters", "test_graphs")
_DECIDING = frozenset(
    {
        *("llama_generates", "wav2vec2", "faster_rcnn", "liger", "diffusers_sd3"),
        *("gpytorch", "torch_geometric"),
    }
)
"""Those that stop with a sentence, ask for labels in range, keep boxes that are likely, count
labels, look for a time among others, ask whether a matrix was factorized, or drop loops."""
_COMPILED = frozenset({"timm_compiled", "flash_linear_attention"})
"""Those that compile, or time their kernels, when they run for the first time."""


def programs() -> Iterator[Program]:
    """Yield each test of the folder as a program, a parametrized one for each value."""
    sys.path.append(str(FOLDER))
    for file in _FILES:
        module = importlib.import_module(file)
        for name, test in vars(module).items():
            if name.startswith("test_") and not _missing(module, test):
                yield from _cases(name.removeprefix("test_"), test)


def _marks(owner: Any, name: str) -> Iterator[Any]:
    found = getattr(owner, "pytestmark", ())
    for mark in found if isinstance(found, (list, tuple)) else (found,):
        if mark.name == name:
            yield mark


def _missing(module: ModuleType, test: Any) -> bool:
    needed = [*_marks(module, "needs"), *_marks(test, "needs")]
    return any(find_spec(package) is None for mark in needed for package in mark.args)


def _cases(name: str, test: Callable[..., None]) -> Iterator[Program]:
    for mark in _marks(test, "parametrize"):
        argument, values = mark.args
        for value in values:
            run = partial(_called, test, **{argument: value})
            yield Program(f"{name}_{value}", run, MIXED, has_values=name in _DECIDING)
        return
    is_compiled, has_values = name in _COMPILED, name in _DECIDING
    run = partial(_called, test)
    yield Program(name, run, MIXED, has_values=has_values, is_compiled=is_compiled)


def _called(test: Callable[..., None], **given: Any) -> None:
    if "tmp_path" not in inspect.signature(test).parameters:
        test(**given)
        return
    with tempfile.TemporaryDirectory() as folder:
        test(**given, tmp_path=Path(folder))
