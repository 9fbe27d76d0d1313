"""A dispatch key of its own, at which operators pass on their way to the device.

``Fake`` of c10/core/DispatchKey.h lies below autograd and autocast and above the backends, and
torch itself has no kernel there (2.6 to 2.15). Unlike a dispatch mode it changes nothing of what
torch does: gradients are accumulated in place, and formulas write in place, only where no mode is
on (``isTensorSubclassLike`` of aten/src/ATen/TensorSubclassLikeUtils.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

_parse: Any = torch._C._dispatch_key_parse
KEY: Any = _parse("Fake")
_SET = torch._C.DispatchKeySet(KEY)

Follow = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""(operator, arguments, named arguments) -> its result."""

_UNDECLARED = frozenset({"aten::_unsafe_view"})
"""Views whose schemas do not say so."""


class _Followed:
    by: Follow | None = None


_kept: list[torch.library.Library] = []


@contextmanager
def followed(follow: Follow) -> Iterator[None]:
    """Let ``follow`` run every operator that this thread, and its backward passes, call inside."""
    _register()
    before, _Followed.by = _Followed.by, follow
    try:
        with torch._C._IncludeDispatchKeyGuard(KEY):
            yield
    finally:
        _Followed.by = before


def unseen() -> AbstractContextManager[None]:
    """Return a context in which operators go by."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_SET)
    return guard


@cache
def _register() -> None:
    """Let operators pass, but for views: they have the memory of what they are views of."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_pass, "Fake")
    views = torch.library.Library("aten", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and _is_view(schema):
            overload = f".{schema.overload_name}" if schema.overload_name else ""
            views.impl(f"{schema.name}{overload}", torch.library.fallthrough_kernel, "Fake")
    _kept.extend([everything, views])


def _is_view(schema: Any) -> bool:
    aliases = [each.alias_info for each in schema.returns]
    return schema.name in _UNDECLARED or any(one and not one.is_write for one in aliases)


def _pass(operator: Any, *args: Any, **kwargs: Any) -> Any:
    if _Followed.by is None:
        with unseen():
            return operator(*args, **kwargs)
    return _Followed.by(operator, args, kwargs)
