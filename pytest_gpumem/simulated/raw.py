"""What tensors really are, below what the simulation makes them report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_getters: dict[str, Any] = dict(vars(torch._C.TensorBase))
_modes_enabled = torch._C._is_torch_function_mode_enabled


def base(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of tensors as torch itself has it."""
    method = _getters[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _modes_enabled() and not is_lazy(args[0]):
            return method(*args, **kwargs)
        # Under a mode torch would look the method up again and find the replaced one; parameters
        # of lazy modules know only torch's own.
        with torch._C.DisableTorchFunction():
            return method(*args, **kwargs)

    return call


def _getter(name: str) -> Callable[[torch.Tensor], Any]:
    get = _getters[name].__get__

    def read(tensor: torch.Tensor) -> Any:
        if not _modes_enabled():
            return get(tensor)
        # Under a mode (torch.device("cuda") as a context) torch reads the replaced attribute.
        with torch._C.DisableTorchFunction():
            return get(tensor)

    return read


device: Callable[[torch.Tensor], torch.device] = _getter("device")
is_meta: Callable[[torch.Tensor], bool] = _getter("is_meta")
data: Any = _getters["data"]
"""The getset descriptor of ``Tensor.data``."""
