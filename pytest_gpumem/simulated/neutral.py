"""The number that reading an unknown one yields: fit for logging, and for nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pytest_gpumem.simulated.errors import UnknownValueError

VALUE = 0.0
"""Zero lets loss scaling and logging go on: no infinity was found, the loss is finite."""

_CLAMPS = frozenset({"torch.optim._adafactor"})
"""Modules that compare numbers only to clamp them with ``max`` (2.6 to 2.15): what they allocate
does not depend on the outcome."""


class _AsFloat(type):
    """Tables by type, such as ``torch.testing`` has, find what they say of ``float``."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is float

    def __hash__(cls) -> int:
        return hash(float)


class NeutralFloat(float, metaclass=_AsFloat):
    """0.0 in place of a number that nobody computed.

    It can be printed, stored and computed with, and what is computed from it is neutral too. To
    compare it, or to ask whether it is true, raises :class:`UnknownValueError`: control flow and
    assertions would otherwise go by a number that is made up.
    """

    __slots__ = ()
    __hash__ = float.__hash__


def _refusing(name: str, shown: str) -> Callable[..., Any]:
    compare = getattr(float, name)

    def refuse(*operands: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") in _CLAMPS:
            return compare(*operands)
        # Not before: the plugin knows this type, and starts without torch.
        from pytest_gpumem.simulated.callsite import user_line

        raise UnknownValueError(
            f"{shown} at {user_line()} depends on a value of a CUDA tensor, which a simulated GPU "
            f"does not have: only shapes are computed"
        )

    refuse.__name__ = name
    return refuse


def _staying(name: str) -> Callable[..., Any]:
    operation = getattr(float, name)

    def compute(*operands: Any) -> Any:
        try:
            result = operation(*operands)
        except ZeroDivisionError:
            result = VALUE
        return NeutralFloat(result) if isinstance(result, float) else result

    compute.__name__ = name
    return compute


for _name, _shown in {
    "__bool__": "bool()",
    "__eq__": "==",
    "__ne__": "!=",
    "__lt__": "<",
    "__le__": "<=",
    "__gt__": ">",
    "__ge__": ">=",
}.items():
    setattr(NeutralFloat, _name, _refusing(_name, f"{_shown} of an item()"))
for _name in (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ "
    "__rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __round__"
).split():
    setattr(NeutralFloat, _name, _staying(_name))
