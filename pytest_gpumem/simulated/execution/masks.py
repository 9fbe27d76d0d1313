"""Indexing by masks: CUDA makes indices of them first, as many as are set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.execution.computing import may_resize
from pytest_gpumem.simulated.execution.runner import CUDA, Runner
from pytest_gpumem.simulated.machine.dispatch import Handler
from pytest_gpumem.simulated.operators.indexing import is_masked_fill

_MASKED = frozenset(
    {
        "aten::index",
        "aten::_unsafe_index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_unsafe_index_put",
        "aten::_index_put_impl_",
    }
)


def takes_masks(func: Any) -> bool:
    """Return whether masks may be among the indices that ``func`` is given."""
    return func._schema.name in _MASKED


def is_selection(func: Any) -> bool:
    """Return whether ``func`` is ``masked_select``, into a tensor of its own."""
    return func._schema.name == "aten::masked_select" and not may_resize(func)


def selected(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Return a handler of ``masked_select``, where only the mask is known.

    Source: aten/src/ATen/native/cuda/IndexKernel.cpp (masked_select_out_cuda_impl).
    """

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, mask = args
        if runner.owner(args[:1], {}) != CUDA or not _is_countable(runner, mask):
            return handler(args, kwargs)
        with runner.mode:
            pair = [one if one.dim() else one.unsqueeze(0) for one in (mask, tensor)]
            chosen, whole = torch.broadcast_tensors(*pair)
            return torch.ops.aten.index.Tensor(whole, [chosen])

    return handle


def masked(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Return a handler of indexing by masks, which CUDA first turns into indices.

    Source: aten/src/ATen/native/IndexingUtils.h (expandTensors).
    """

    writes = "put" in func._schema.name

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            any(map(_is_mask, args[1]))
            and runner.owner(args[:1], {}) == CUDA
            and all(_is_countable(runner, index) for index in args[1])
            and not (writes and is_masked_fill(runner.storages, *args[1:4]))
        ):
            with runner.mode:
                indices = _expanded(args[1], args[0])
            args = (args[0], indices, *args[2:])
        return handler(args, kwargs)

    return handle


def _is_countable(runner: Runner, index: torch.Tensor | None) -> bool:
    if index is None or not _is_mask(index) or not raw.is_meta(index):
        return True
    return runner.values.of(index) is not None


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _expanded(indices: Sequence[Any], tensor: torch.Tensor) -> list[Any]:
    expanded: list[Any] = []
    device = tensor.device
    for index in indices:
        if _is_mask(index):
            _check_mask(index, tensor, len(expanded))
            places = index.nonzero()
            columns = [places.select(1, at) for at in range(index.dim())]
            expanded += [column.to(device) for column in columns]
        else:
            expanded.append(index)
    return expanded


def _check_mask(mask: torch.Tensor, tensor: torch.Tensor, first: int) -> None:
    for at, (wanted, found) in enumerate(zip(mask.shape, tensor.shape[first:], strict=False)):
        if wanted != found:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {at} does not match the shape "
                f"of the indexed tensor {list(tensor.shape)} at index {first + at}"
            )
