"""The modules of torch's compilers, imported only when needed: they take as long as torch.

Code that is not compiled imports them as well. Anything that ``torch._disable_dynamo`` decorates
(optimizers, dispatch modes, custom operators) calls ``torch._dynamo.disable`` at its first call,
and ``step()`` calls ``graph_break``. Python's ``meta`` kernels check whether sizes are symbolic.
Neither depends on numbers, so stand-ins answer; any other use of these modules imports the
real ones.

Source: torch/_compile.py, optim/optimizer.py, _prims_common/__init__.py, and each use of
fx/experimental/symbolic_shapes.py within functions of torch 2.6 to 2.15.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._subclasses.schema_check_mode  # by code that leaves modes, so with each import
import torch.fx.experimental._config  # kernels expect it with a module that is kept out here

from pytest_gpumem.late_modules import Context
from pytest_gpumem.simulated.common.late_imports import Answers, StandIn, imported_unpatched

_OF_TESTS = ("torch.testing._internal", "torch._dynamo.test_case", "torch._inductor.test_case")
"""The base modules of torch's own tests: on import they check whether there is a GPU."""
_DYNAMO = "torch._dynamo"
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_FUNCTIONS = "torch.utils._sympy.functions"
_SYMPY = "sympy"


@contextmanager
def deferred(unpatched: Context, present: Context) -> Iterator[None]:
    """Import torch's compilers at their first use, and enter ``present`` then.

    ``unpatched`` imports them, and all of torch, without replaced names, which they would keep.
    """
    not_compiled = _NotCompiled()
    with ExitStack() as inside:

        @contextmanager
        def importing_dynamo() -> Iterator[None]:
            not_compiled.forget()
            with unpatched():
                yield
            inside.enter_context(present())

        def stand_in(
            name: str, answers: Answers, importing: Context, known: Mapping[str, Any] | None = None
        ) -> None:
            if name not in sys.modules:
                inside.enter_context(StandIn(name, answers, importing, known).in_place())

        inside.callback(not_compiled.forget)
        inside.enter_context(imported_unpatched("torch", unpatched, but=_OF_TESTS))
        if _DYNAMO in sys.modules:  # finders of single modules come before the one of all torch
            inside.enter_context(present())
        stand_in(_SYMPY, _for_kernels("Basic", _NoExpression), unpatched)
        stand_in(_FUNCTIONS, _for_kernels("Max", max), unpatched)
        no_symbols = _if_numbers("free_unbacked_symbols", lambda value: ())
        stand_in(_SHAPES, _for_kernels("free_unbacked_symbols", no_symbols), unpatched, _known())
        stand_in(_DYNAMO, not_compiled.of_dynamo, importing_dynamo)
        yield


def load() -> None:
    """Import the compilers now, if possible: a later use raises the error of a failed import."""
    # A test may have emptied sys.path, or deleted the folder that torch's settings need.
    with suppress(ImportError, OSError):
        importlib.import_module(f"{_DYNAMO}.eval_frame")


class _NotCompiled:
    """Functions that Dynamo is told not to compile, while it is not imported."""

    def __init__(self) -> None:
        self._functions: list[Callable[..., Any]] = []

    def of_dynamo(self, name: str, asking: FrameType) -> Any:
        """Return a stand-in for a function of ``torch._dynamo``: on eager code it does nothing."""
        return {
            ("torch._compile", "disable"): self._disable,
            ("torch.optim.optimizer", "graph_break"): lambda *_, **__: None,
        }.get((asking.f_globals.get("__name__", ""), name))

    def forget(self) -> None:
        """Clear the answers that torch/_compile.py has stored on the functions."""
        while self._functions:
            delattr(self._functions.pop(), "__dynamo_disable")

    def _disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        self._functions.append(function)
        return function


class _NoExpression:
    """A stand-in for ``Basic``: no kernel gets an expression before ``sympy`` is imported."""


_KERNELS = (
    "torch",
    "torch._decomp.decompositions",
    "torch._meta_registrations",
    "torch._prims",
    "torch._prims_common",
    "torch._refs",
    "torch._refs.linalg",
    "torch.functional",
)
"""Modules whose functions import these names for one call; elsewhere they might be kept."""


def _for_kernels(known: str, answer: Any) -> Answers:
    """Answer ``known`` for kernels only: other importers expect a value of torch's."""

    def answers(name: str, asking: FrameType) -> Any:
        is_function = asking.f_code.co_flags & inspect.CO_OPTIMIZED
        is_kernel = is_function and asking.f_globals.get("__name__") in _KERNELS
        return answer if name == known and is_kernel else None

    return answers


_PLAIN = frozenset({bool, int})
_INTEGERS = frozenset({int})


def _if_numbers(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*arguments: Any, **options: Any) -> Any:
        for argument in arguments:
            if argument.__class__ not in _PLAIN and not _is_number(argument):
                return getattr(importlib.import_module(_SHAPES), name)(*arguments, **options)
        return value(*arguments)

    return ask


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):  # sizes, mostly
        return set(map(type, value)) <= _INTEGERS
    return isinstance(value, torch.Tensor) and not value._has_symbolic_sizes_strides


_ITSELF = (
    "definitely_true expect_true guard_bool guard_int guard_or_false guard_or_true "
    "guard_size_oblivious guarding_hint_or_throw statically_known_true"
)
_VALUES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_ITSELF.split(), lambda value, *_: value),
    "_advise_is_bounded": lambda value, bound: None,
    "_advise_is_size": lambda value: None,
    "has_guarding_hint": lambda value: True,
    "is_nested_int": lambda value: False,
    "sym_and": lambda *values: all(values),
    "sym_eq": lambda one, other: one == other,
    "sym_or": lambda *values: any(values),
}


@cache
def _known() -> Mapping[str, Callable[..., Any]]:
    """Return this release's functions of possibly symbolic numbers, with torch's results."""
    spec = find_spec(_SHAPES)
    assert spec is not None, f"torch imports {_SHAPES}"
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    return {
        name: _if_numbers(name, value)
        for name, value in _VALUES.items()
        if f"\ndef {name}(" in source
    }
