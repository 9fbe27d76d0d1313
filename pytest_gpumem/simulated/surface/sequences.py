"""Tensors in nested lists: ``torch.tensor([loss, other])``.

For Python's C interface a tensor is no sequence, by which torch sees that a tensor without
dimensions is a number there. A class whose ``__getitem__`` is replaced would be one, and stay one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw

_is_sequence = ctypes.pythonapi.PySequence_Check
_is_sequence.argtypes = [ctypes.py_object]
_is_sequence.restype = ctypes.c_int

_POINTER = ctypes.sizeof(ctypes.c_void_p)
_AS_SEQUENCE = object.__basicsize__ + 11 * _POINTER
"""Offset of ``tp_as_sequence`` in a type: ten fields after its size (Include/cpython)."""
_ITEM = 3 * _POINTER
"""Offset of ``sq_item`` among the functions there."""


def is_sequence(tensor: torch.Tensor) -> bool:
    """Return whether C code takes ``tensor`` for a sequence."""
    return bool(_is_sequence(tensor))


def be_no_sequences() -> None:
    """Make tensors no sequences again, after ``Tensor.__getitem__`` was replaced."""
    if is_sequence(_NUMBER):
        for kind in _without_own_items(torch.Tensor):
            functions = ctypes.c_void_p.from_address(id(kind) + _AS_SEQUENCE).value
            assert functions is not None
            ctypes.c_void_p.from_address(functions + _ITEM).value = None


def _without_own_items(kind: type) -> Iterator[type]:
    yield kind
    found: list[type] = type.__subclasses__(kind)
    for derived in found:
        if "__getitem__" not in vars(derived):
            yield from _without_own_items(derived)


_NUMBER = torch.empty((), device="cpu")


def numbers_in(data: Any, dtype: torch.dtype | None) -> tuple[Any, torch.dtype | None] | None:
    """``data``, a nested list, with numbers for the CUDA tensors in it, and the type of all.

    ``None`` where there are none. Each is read as by ``item()``, which in C++ is out of sight.
    Source: torch/csrc/utils/tensor_new.cpp (infer_scalar_type, recursive_store).
    """
    if not isinstance(data, (list, tuple)) or not _has_gpu_tensors(data):
        return None
    if dtype is None:
        types = [_type_of(leaf) for leaf in _leaves(data)]
        dtype = types[0]
        for other in types[1:]:
            dtype = torch.promote_types(dtype, other)
    return _read(data), dtype


def _has_gpu_tensors(data: list[Any] | tuple[Any, ...]) -> bool:
    # Most lists hold numbers alone, perhaps millions of them.
    kinds = set(map(type, data))
    if any(issubclass(kind, torch.Tensor) for kind in kinds) and any(map(_is_on_gpu, data)):
        return True
    nested = any(issubclass(kind, (list, tuple)) for kind in kinds)
    return nested and any(
        _has_gpu_tensors(part) for part in data if isinstance(part, (list, tuple))
    )


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _leaves(item)
    else:
        yield data


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and raw.is_meta(value) and value.is_cuda


def _type_of(leaf: Any) -> torch.dtype:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    return torch.tensor(leaf).dtype


def _read(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return [_read(item) for item in data]
    if not _is_on_gpu(data):
        return data
    return data.tolist() if data.dim() else data.item()
