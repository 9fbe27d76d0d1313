"""Methods that take the place of torch's on tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import clear_own_frames


class Method:
    """A method of tensors that asks subclasses first, and equals torch's own, which it replaces.

    A subclass looks up in tables what it is asked about, by torch's method or by this one.
    """

    def __init__(self, function: Callable[..., Any], replaced: Any) -> None:
        self._function = function
        self._replaced = replaced
        # Dynamo traces torch's own method where the name is one (is_bound_tensor_method of
        # torch/_dynamo/utils.py, 2.6 to 2.15), and else this one.
        self.__name__ = replaced.__name__

    def __get__(self, tensor: torch.Tensor | None, kind: type) -> Any:
        return self if tensor is None else MethodType(self, tensor)

    def __call__(self, tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function, unless the class of ``tensor`` answers for itself.

        Where memory runs out, the error's frames keep no tensor: those of C++ would not.
        """
        try:
            if tensor.__class__ not in raw.PLAIN and has_torch_function_unary(tensor):
                return handle_torch_function(self, (tensor,), tensor, *args, **kwargs)
            return self._function(tensor, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            clear_own_frames(error.__traceback__)
            del tensor, args, kwargs
            raise

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self._replaced == other)

    def __repr__(self) -> str:
        return repr(self._replaced)

    def __hash__(self) -> int:
        return hash(self._replaced)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it by its name, as functions are: PyTorch's tests copy tables of them."""
        return getattr, (torch.Tensor, self.__name__)
