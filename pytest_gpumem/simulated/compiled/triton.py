"""Triton where it is not installed: the names that Inductor writes into its kernels' source.

The kernels are never compiled, so nothing of Triton's runs. Source: torch/utils/_triton.py and
torch/_inductor/runtime/triton_compat.py, torch 2.11 and 2.13.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch.utils._triton
from torch._inductor import select_algorithm
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import triton_utils

_NAME = "triton"

_ATTRIBUTES: dict[str, dict[str, Any]] = {
    _NAME: {"__version__": "3.5.0"},
    f"{_NAME}.backends": {"backends": {"nvidia": None}},
    f"{_NAME}.backends.compiler": {},
    f"{_NAME}.compiler": {},
    f"{_NAME}.compiler.compiler": {},
    f"{_NAME}.language": {"dtype": type("dtype", (), {})},
}
"""By module: the attributes that are read of it."""


@contextmanager
def standing_in() -> Iterator[None]:
    """Make ``import triton`` succeed inside, if Triton is not installed."""
    if _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None:
        yield
        return
    made = {name: ModuleType(name) for name in _ATTRIBUTES}
    for name, module in made.items():
        vars(module).update(_ATTRIBUTES[name], __path__=[], __spec__=ModuleSpec(name, None))
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    sys.modules.update(made)
    _forget_answers()
    try:
        with (
            mock.patch.object(triton_utils, "AttrsDescriptorWrapper", _attributes),
            mock.patch.object(select_algorithm, "PyCodeCache", _Sources),
        ):
            yield
    finally:
        for name in made:
            del sys.modules[name]
        _forget_answers()


def _attributes(
    divisible_by_16: Any = (), equal_to_1: Any = (), pointer_range_32: Any = ()
) -> dict[Any, Any]:
    """Return Inductor's attributes of kernel arguments for a Triton of 2025 (runtime/hints.py)."""
    return {(position,): [["tt.divisibility", 16]] for position in divisible_by_16}


class _Sources:
    """``PyCodeCache`` for kernels made of templates, which are read and not run."""

    @staticmethod
    def load(source: str, extra: str = "", **_: Any) -> ModuleType:
        key, path = PyCodeCache.write(source, extra)
        module = ModuleType(f"{__name__}.{key}")
        vars(module).update(__file__=path, key=key)
        return module


def _forget_answers() -> None:
    """Clear torch's cached answers, under many names, to whether there is a Triton."""
    for function in vars(torch.utils._triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
