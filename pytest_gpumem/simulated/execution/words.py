"""ATen's error texts, where a meta kernel raises another text.

Some kernels for ``meta`` are written in Python and check again, in other words, what CUDA's kernels
check in C++. Those checks are common to the CPU and CUDA ("structured" kernels, TensorIterator), so
the CPU raises CUDA's text: the operator is called once more, with CPU tensors of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

MOST_ELEMENTS = 1 << 20
"""Largest number of elements in all arguments, up to which the operator is called again."""

_IN_PYTHON = ("_meta_registrations", "_refs", "_prims", "_prims_common", "_decomp")
_empty_strided = torch.empty_strided


def said_by_aten(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception | None:
    """Return the CPU's error for the call; ``None`` if ``error`` is C++'s own, or there is none."""
    if not _is_from_python(error.__traceback__):
        return None
    room = [MOST_ELEMENTS]
    try:
        on_cpu, named = _on_cpu(args, room), _on_cpu(kwargs, room)
    except _TooLargeError:
        return None
    if named.get("device") is not None:
        named["device"] = torch.device("cpu")
    try:
        func(*on_cpu, **named)
    except (RuntimeError, IndexError, TypeError, ValueError) as words:
        return None if "not implemented for" in str(words) else words.with_traceback(None)
    return None


class _TooLargeError(Exception):
    pass


def _is_from_python(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if module.startswith("torch.") and module.split(".")[1] in _IN_PYTHON:
            return True
        traceback = traceback.tb_next
    return False


def _on_cpu(value: Any, room: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        room[0] -= value.untyped_storage().nbytes() // value.element_size()
        if room[0] < 0:
            raise _TooLargeError
        return _empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()
    if isinstance(value, dict):
        return {name: _on_cpu(item, room) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(item, room) for item in value)
    return value
