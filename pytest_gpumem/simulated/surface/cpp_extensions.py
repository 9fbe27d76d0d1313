"""Extensions that are compiled while a test runs: refused where CUDA's compiler is missing.

``load()`` and ``load_inline()`` both end in ``_jit_compile()``, which writes ninja's file and
starts it; ``CUDAExtension()`` needs the libraries below CUDA_HOME (torch/utils/cpp_extension.py,
2.6 to 2.15).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from pytest_gpumem.simulated.common.callsite import callers_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.surface.kernels import EXTENSIONS
from pytest_gpumem.values.errors import (
    UndescribedKernelError,
    UnsupportedOperatorError,
)

_MODULE = "torch.utils.cpp_extension"
_LOADERS = ("load", "load_inline")
_HAS_CUDA = torch.version.cuda is not None
"""Whether this torch, and not the simulated one, is built with CUDA."""


class Compiling:
    """Replacements in ``torch.utils.cpp_extension``, once that is imported."""

    def __init__(self) -> None:
        self._patches: Patches | None = None

    def look(self) -> None:
        """Replace it once it is imported: few tests compile, and its import takes long."""
        module: Any = sys.modules.get(_MODULE)
        if self._patches is not None or not hasattr(module, "_join_cuda_home"):
            return
        self._patches = Patches()
        compiling, joining = module._jit_compile, module._join_cuda_home
        self._patches.add(module, "_jit_compile", _compile(module, compiling))
        self._patches.add(module, "_join_cuda_home", _join(module, joining))
        self._patches.apply()

    def undo(self) -> None:
        """Restore the original functions."""
        if self._patches is not None:
            self._patches.undo()
            self._patches = None


def _can_compile(module: Any) -> bool:
    return _HAS_CUDA and module.CUDA_HOME is not None


def _compile(module: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        name, sources = given["name"], given["sources"]
        caller = sys._getframe(1).f_code.co_name
        loader = caller if caller in _LOADERS else _LOADERS[0]
        with_cuda = given["with_cuda"]
        if with_cuda is None:
            with_cuda = any(map(module._is_cuda_file, sources))
        if with_cuda and not _can_compile(module):
            _refuse(f'{loader}(name="{name}", ...)', f"{_MODULE}.{loader}")
        made = real(*args, **options)
        if inspect.ismodule(made):
            EXTENSIONS.compiled(made, f"{_MODULE}.{loader}")
        return made

    return call


def _join(module: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*paths: Any) -> Any:
        if not _can_compile(module):
            raise UnsupportedOperatorError(
                f"{_MODULE} at {callers_line()} asks for CUDA's compiler, which is not here: build "
                f"the extension elsewhere, or say what its functions allocate with "
                f'pytest_gpumem.simulate_operator("module.function")'
            )
        return real(*paths)

    return call


def _refuse(call: str, path: str) -> NoReturn:
    raise UndescribedKernelError(
        f"{call} at {callers_line()} compiles for CUDA, whose compiler is not here: say what the "
        f'functions of the module allocate with pytest_gpumem.simulate_operator("{path}")',
        call,
    )
