"""Kernels at an unused dispatch key, through which operators pass before they reach the device.

The key ``Fake`` of c10/core/DispatchKey.h is below autograd and autocast and above the backends,
and torch registers no kernels at it (2.6 to 2.15). A dispatch mode would change torch's behaviour:
gradients are accumulated in place, and formulas write in place, only if no mode is active
(``isTensorSubclassLike`` of aten/src/ATen/TensorSubclassLikeUtils.h).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pytest_gpumem.simulated.common.callsite import clear_own_frames
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, is_view

_parse: Any = torch._C._dispatch_key_parse
KEY: Any = _parse("Fake")
_SET = torch._C.DispatchKeySet(KEY)

Follow = Callable[[Any, Args, Kwargs], Any]
"""Function of an operator, its arguments and keyword arguments; returns the operator's result."""

_LEFT_OUT = frozenset({"aten::_unsafe_view", "aten::result_type"})
"""A view whose schema does not declare it, and an operator without memory that Python cannot call
with the arguments that C++ passes."""


class _Followed:
    by: Follow | None = None


_libraries: dict[str, torch.library.Library] = {}
"""Libraries that keep the kernels at the key, by namespace."""
_registered: set[str] = set()

_frames: Any = torch._C._dynamo.eval_frame
_set_eval_frame: Any = _frames.set_eval_frame
"""Function that turns Dynamo off for Python code called by compiled code, such as these kernels,
as ``torch._dynamo.disable`` does."""


_EXCLUDED_NAMESPACES = frozenset({"prim", "prims", "profiler"})
"""Namespaces without device kernels, or closed to other libraries."""


@contextmanager
def follow_operators(follow: Follow, *, of_torch: bool = False) -> Iterator[None]:
    """Call ``follow`` in place of every operator inside, in this thread and those that it starts.

    With ``of_torch``, operators of libraries that were loaded since the last call may be left out.
    """
    if not (of_torch and _registered):  # reading all schemas takes 40 ms
        _register()
    patches = Patches()
    patches.add(threading.Thread, "start", _start_followed)
    patches.add(_Followed, "by", staticmethod(follow))
    # A higher-order operator (``cond``) has no kernel at this key.
    compute: Any = torch._ops._compute_keyset
    patches.add(
        torch._ops,
        "_compute_keyset",
        lambda args, kwargs, keys: compute(args, kwargs, keys.remove(KEY)),
    )
    with patches.applied(), torch._C._IncludeDispatchKeyGuard(KEY):
        yield


_start: Any = threading.Thread.start


def _start_followed(thread: threading.Thread) -> None:
    """Start ``thread`` with the key, which a thread does not inherit."""
    run = thread.run

    def run_with_key() -> None:
        with torch._C._IncludeDispatchKeyGuard(KEY):
            run()

    thread.run = run_with_key  # type: ignore[method-assign]  # of this thread only
    _start(thread)


def is_followed() -> bool:
    """Return whether the operators of this thread are followed at the moment."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(KEY))


def not_followed() -> AbstractContextManager[None]:
    """Return a context in which operators are not followed."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_SET)
    return guard


def followed_again() -> AbstractContextManager[None]:
    """Return a context, inside :func:`not_followed`, in which operators are followed again."""
    include = torch._C._dispatch_tls_local_include_set() | _SET
    exclude = torch._C._dispatch_tls_local_exclude_set() - _SET
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(include, exclude)
    return guard


def _register() -> None:
    """Register kernels at the key, also for operators loaded since the last call.

    Views are left out: they share their bases' memory. Each operator needs its own kernel, because
    under dispatch modes torch finds no fallback in Python (``python_op_registration_trampoline``
    of torch/csrc/utils/python_dispatch.cpp).
    """
    if "_" not in _libraries:
        _library("_").fallback(torch.library.fallthrough_kernel, "Fake")
    for schema in torch._C._jit_get_all_schemas():
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        name = f"{schema.name}{overload}"
        if name not in _registered:
            _registered.add(name)
            namespace = schema.name.partition("::")[0]
            has_kernel = not is_view(schema) and schema.name not in _LEFT_OUT
            if namespace not in _EXCLUDED_NAMESPACES and has_kernel:
                _library(namespace).impl(name, _kernel_of(schema), "Fake")


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]


def _kernel_of(schema: Any) -> Callable[..., Any]:
    """Return the kernel of the operator that ``schema`` describes."""
    namespace, _, name = schema.name.partition("::")
    overload = schema.overload_name or "default"
    operator: Any = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal operator
        # A custom operator may be defined again, for example by a test that runs twice.
        if operator is None or namespace != "aten":
            operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if _Followed.by is None:
            with not_followed():
                return operator(*args, **kwargs)
        compiling = _set_eval_frame(None)
        try:
            return _Followed.by(operator, args, kwargs)
        except torch.OutOfMemoryError as error:
            clear_own_frames(error.__traceback__)
            del args, kwargs
            raise
        finally:
            _set_eval_frame(compiling)

    # Dynamo is told to skip the function itself; torch 2.6 has another function for that.
    if hasattr(_frames, "skip_code"):
        _frames.skip_code(run.__code__)
    else:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(run.__code__, _frames._FrameExecStrategy(skip, skip))
    return run
