"""The tensors among the arguments or results of an operator, however deep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

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
