"""Calls of operators, for functions that name the arguments they use, as CUDA's kernels do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

_R = TypeVar("_R")

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Args, Kwargs], Any]
"""A function that runs one operator with its arguments."""

_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

UNREAD = ...
"""A result of a kernel that no formula reads."""


def is_data_dependent(func: OpOverload) -> bool:
    """Return whether values decide which results ``func`` has, or how large they are.

    Up to torch 2.11 ``_unique`` has no tag (native_functions.yaml; on 2.13 it has one).
    """
    return bool(_DATA_DEPENDENT & set(func.tags)) or func is torch.ops.aten._unique.default


class Signature:
    """The arguments of one overload by name, with ``gpu``, where it runs, and its ``result``."""

    def __init__(self, schema: torch.FunctionSchema) -> None:
        self._schema = schema
        arguments = schema.arguments
        self.result_at = len(arguments) + 1
        self._places = {"gpu": 0, "result": self.result_at}
        self._places |= {argument.name: at for at, argument in enumerate(arguments, 1)}
        self._defaults: list[Any] = [*(argument.default_value for argument in arguments), None]

    def given(self, gpu: object, args: Args, kwargs: Kwargs) -> list[Any]:
        """Return the arguments of a call with their defaults; the result is added later."""
        given = [gpu, *args, *self._defaults[len(args) :]]
        if kwargs:
            for name, value in kwargs.items():
                given[self._places[name]] = value
        return given

    def taking(self, function: Callable[..., _R]) -> Callable[[list[Any]], _R]:
        """Return ``function`` as one of the list that :meth:`given` returns.

        It gets the arguments that it names, or all as ``*args``; its default for one that this
        overload lacks. Raises ``TypeError`` if there is no default.
        """
        places: list[int] = []
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                places += range(1, self.result_at)
            elif name in self._places:
                places.append(self._places[name])
            elif parameter.default is not parameter.empty:
                self._defaults.append(parameter.default)
                places.append(len(self._defaults))
            else:
                raise TypeError(f"{function} names {name}, which is not in {self._schema}")
        if len(places) < 2:
            return lambda given: function(*[given[at] for at in places])
        pick = itemgetter(*places)
        return lambda given: function(*pick(given))

    def bound(self, function: Callable[..., _R]) -> Callable[..., _R]:
        """Return ``function`` as one that is called like the operator."""
        taken = self.taking(function)
        return lambda *args, **kwargs: taken(self.given(None, args, kwargs))


def named(func: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """Return the arguments of a call by the names in the schema of ``func``, in its order."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def is_out(schema: torch.FunctionSchema) -> bool:
    """Return whether an overload writes its results to tensors it is given, as ``topk.values``."""
    return any(argument.is_out for argument in schema.arguments)


def is_view(schema: torch.FunctionSchema) -> bool:
    """Return whether the result of an operator is a view of an argument."""
    aliases = [each.alias_info for each in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def overload_of(name: str) -> OpOverload | None:
    """Return ATen's operator ``name``, ``add`` or ``add.out``; ``None`` if torch has none."""
    packet, _, overload = name.partition(".")
    operator = getattr(torch.ops.aten, packet, None)
    found: OpOverload | None = getattr(operator, overload or "default", None)
    return found
