"""The tensors among the arguments or results of an operator, however deep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in ``value``: a tensor itself, or in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from tensors_in(item)
