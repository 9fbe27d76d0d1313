"""The true properties of tensors, below those that the simulation makes them report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

META = torch.device("meta")
CPU = torch.device("cpu")

empty = torch.empty
empty_like = torch.empty_like
empty_permuted = torch.empty_permuted
empty_strided = torch.empty_strided
as_strided = torch.as_strided
"""Torch's own functions: during a simulation its names watch for tensors that the user makes on
``meta``."""


def unbacked(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a contiguous tensor of ``shape`` and the type of ``like``, without memory."""
    return empty(shape, dtype=like.dtype, device=META)


_getters: dict[str, Any] = dict(vars(torch._C.TensorBase))
_modes_enabled = torch._C._is_torch_function_mode_enabled

PLAIN: frozenset[Any] = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that do not override operations."""


def base(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of tensors as torch itself has it."""
    method = _getters[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if args[0].__class__ in PLAIN and not _modes_enabled():
            return method(*args, **kwargs)
        # Under a mode, or for a subclass, torch would look the method up again and find the
        # replaced one; parameters of lazy modules accept only torch's own.
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return call


def _getter(name: str) -> Callable[[torch.Tensor], Any]:
    get = _getters[name].__get__

    def read(tensor: torch.Tensor) -> Any:
        if tensor.__class__ in PLAIN and not _modes_enabled():
            return get(tensor)
        # Under a mode (torch.device("cuda") as a context) torch reads the replaced attribute.
        with torch._C.DisableTorchFunction():
            return get(tensor)

    return read


device: Callable[[torch.Tensor], torch.device] = _getter("device")
is_meta: Callable[[torch.Tensor], bool] = _getter("is_meta")
_is_cpu: Callable[[torch.Tensor], bool] = _getter("is_cpu")


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is on a GPU, which is ``meta`` if it is simulated."""
    return not _is_cpu(tensor)


_PLAIN = frozenset({bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``: a tensor itself, or in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif value.__class__ is tuple or value.__class__ is list:  # nearly always
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
            elif item.__class__ not in _PLAIN:
                yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif value.__class__ not in _PLAIN and isinstance(value, Sequence):
        for item in value:
            yield from tensors_in(item)


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether numbers of ``dtype`` are integers, and not booleans."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
