"""Cached results that depend on whether there is a GPU, cleared when a device appears or ends.

Programs query the GPU once and keep the result by ``functools.cache``: ``has_triton`` of
torch/utils/_triton.py, ``is_torch_bf16_gpu_available`` of transformers. Many do so while their
module is imported, before the first marked test, when there is no GPU.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from gc import get_objects, get_referents  # by name: code under test may replace the module's
from itertools import pairwise
from operator import attrgetter
from types import FrameType, ModuleType
from typing import Any

from pytest_gpumem.late_modules import Context, changing

Function = Callable[..., Any]

WITHOUT_GPU: dict[str, dict[str, object]] = {
    "torch": {},
    "torch.cuda": {"is_available": False, "device_count": 0},
    "torch.accelerator": {"is_available": False, "device_count": 0, "current_accelerator": None},
}
"""Functions that report GPUs, and their results without a GPU, by module."""

_UNKNOWN = object()
_FACTS = frozenset({"bool", "int"})
"""Declared result types of functions whose caches are cleared. Others are cached to run only once,
as ``lazy_init`` of torch/_inductor/fx_passes/joint_graph.py, or because they are slow."""

_kept: dict[bool, set[Any]] = {False: set(), True: set()}
"""Cached functions that have queried the GPU, by whether there was one."""


def watch(
    answering: Callable[[Function, object], Function] = lambda function, _: function,
    executed: Context = nullcontext,
) -> None:
    """Record from now on which cached functions query the GPU; torch may be imported later.

    Each function of :data:`WITHOUT_GPU` is replaced by the one that ``answering`` returns for it
    and its result without a GPU. Modules imported later are executed in a context of ``executed``.
    """

    def replace(module: ModuleType) -> None:
        for name, without in WITHOUT_GPU[module.__name__].items():
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "__wrapped__"):
                setattr(module, name, _watched(answering(function, without)))

    sys.meta_path.insert(0, changing(dict.fromkeys(WITHOUT_GPU, replace), executed))


def _watched(function: Function) -> Function:
    @functools.wraps(function)
    def recording_callers(*args: Any, **kwargs: Any) -> Any:
        answer = function(*args, **kwargs)
        _kept[bool(answer)].update(_cached_callers(sys._getframe(1)))
        return answer

    return recording_callers


@contextmanager
def clear_cached_answers() -> Iterator[None]:
    """Clear results that were cached without a GPU, and at the end those cached with one."""
    _clear(_kept[False])
    try:
        yield
    finally:
        _clear(_kept[True])


def clear_cached_tensors() -> None:
    """Clear caches with tensors of a GPU before a test runs again.

    That run has another device, or one that knows the values of these tensors: D-FINE of
    transformers keeps tables of positions by ``functools.lru_cache``.
    """
    for each in get_objects():
        if type(each) is functools._lru_cache_wrapper and _has_gpu_tensor(each, depth=3):
            each.cache_clear()


def _has_gpu_tensor(holder: Any, depth: int) -> bool:
    tensor = sys.modules["torch"].Tensor
    return any(
        value.device.type == "cuda"
        if isinstance(value, tensor)
        else depth > 0 and type(value) in (dict, list, tuple) and _has_gpu_tensor(value, depth - 1)
        for value in get_referents(holder)
    )


def _cached_callers(frame: FrameType | None) -> set[Any]:
    """Return the cached functions on the stack, up to the import of a module.

    No generator: Dynamo of torch 2.6 refuses one that runs while it traces, with Python 3.10.
    """
    found = set()
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        code = frame.f_code
        first, _, rest = getattr(code, "co_qualname", code.co_name).partition(".")
        try:
            function = frame.f_globals[first]
            function = attrgetter(rest)(function) if rest else function
        except (KeyError, AttributeError):  # a nested function
            function = None
        if type(function) is functools._lru_cache_wrapper:
            found.add(function)
        frame = frame.f_back
    return found


def _clear(functions: set[Any]) -> None:
    """Clear ``functions``, and cached functions that may have used their results."""
    unknown = list(functions)
    while unknown:
        name = unknown.pop().__name__
        callers = {each for each, names in _cached_functions(tuple(sys.modules)) if name in names}
        unknown += callers - functions
        functions |= callers
    while functions:
        function = functions.pop()
        if _is_answer(function.__wrapped__):
            function.cache_clear()


def _is_answer(function: Any) -> bool:
    """Return whether ``function`` is cached for its result, and not to run only once."""
    function = inspect.unwrap(function)
    declared = getattr(function, "__annotations__", {}).get("return", _UNKNOWN)
    if declared is not _UNKNOWN:
        return getattr(declared, "__name__", declared) in _FACTS
    for before, last in pairwise(dis.get_instructions(function)):
        loads_none = before.opname == "LOAD_CONST" and before.argval is None
        if last.opname == "RETURN_CONST" and last.argval is not None:
            return True
        if last.opname == "RETURN_VALUE" and not loads_none:
            return True
    return False


@functools.lru_cache(maxsize=1)
def _cached_functions(modules: Sequence[str]) -> list[tuple[Any, frozenset[str]]]:
    """Return all cached functions and the names that each uses; ``modules`` are the cache's key."""
    spaces = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    found = {
        value
        for space in spaces
        for value in list(space.values())
        if type(value) is functools._lru_cache_wrapper
    }
    codes = [(each, getattr(each.__wrapped__, "__code__", None)) for each in found]
    return [(each, frozenset(code.co_names)) for each, code in codes if code is not None]
