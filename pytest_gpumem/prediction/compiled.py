"""A program run twice: as eager code, and compiled by ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.compiled.entry import AUTO
from pytest_gpumem.simulated.compiled.entry import EAGER as NOTHING
from pytest_gpumem.simulated.compiled.settings import tell_of_compiled_code
from pytest_gpumem.values.prediction import Prediction

EAGER, COMPILED = "eager", "compiled"


@dataclass(frozen=True)
class Mode:
    """A way to run a program."""

    code: str
    """:data:`EAGER` or :data:`COMPILED`."""
    modules: bool = False
    """Whether its modules are compiled because the program itself compiles nothing."""

    @property
    def compile(self) -> str:
        """The argument ``compile`` of ``simulate``, for its calls of ``torch.compile``."""
        return NOTHING if self.code == EAGER else AUTO

    def applied(self) -> AbstractContextManager[None]:
        """Apply the mode to the program run inside."""
        return modules_compiled() if self.modules else nullcontext()


Pairs = tuple[tuple[Prediction, Prediction], ...]
"""Results for each GPU and each number of ranks: of eager code, of compiled code."""


def compare(predicting: Callable[[Mode], Sequence[Prediction]]) -> tuple[Pairs, bool]:
    """Predict a program as eager code and compiled; return also whether it compiles by itself.

    Its own ``torch.compile`` are compiled where it has any, else every module that is called by
    something other than a module is, as ``Module.compile()`` does.
    """
    eager = predicting(Mode(EAGER))
    by_itself = any(tell_of_compiled_code(one.notes) for one in eager)
    compiled = predicting(Mode(COMPILED, modules=not by_itself))
    return tuple(zip(eager, compiled, strict=True)), by_itself


@contextmanager
def modules_compiled() -> Iterator[None]:
    """Compile the modules called inside: each one that no other module calls."""
    call = torch.nn.Module.__call__
    made: list[torch.nn.Module] = []
    inside = False

    @functools.wraps(call)
    def compiling(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return call(self, *args, **kwargs)
        if self._compiled_call_impl is None:
            self.compile()
            made.append(self)
        inside = True
        try:
            return call(self, *args, **kwargs)
        finally:
            inside = False

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.nn.Module, "__call__", compiling)
        try:
            yield
        finally:
            for module in made:
                module._compiled_call_impl = None
