"""What distinct values there are and how often: copies, sorts and the room that results keep.

Source: aten/src/ATen/native/cuda/UniqueCub.cu (UniqueCub, compute_unique) and SummaryOps.cu
(_bincount_cuda_template, _histc_cuda_template) of torch 2.6 to 2.15. Of CUB's storage the sorts are
exact; the scans and selections, of a state for each of many hundred elements, are estimated.
``unique(dim=...)`` sorts by Thrust, whose storage is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.operators import cub, reductions
from pytest_gpumem.simulated.operators.rules import Before, Placed, Rule, Scratch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import GPU

_INDEX_BYTES = 8
_Flags = tuple[int, int]
"""Where an operator has ``return_inverse`` and ``return_counts`` among its arguments."""


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], flags: _Flags) -> tuple[bool, bool]:
    names = ("return_inverse", "return_counts")
    inverse, counts = (
        bool(args[at] if len(args) > at else kwargs.get(name, False))
        for at, name in zip(flags, names, strict=True)
    )
    return inverse, counts


def _goes_along_dim(args: tuple[Any, ...], kwargs: dict[str, Any], flags: _Flags) -> bool:
    return flags == _OF_CONSECUTIVE and (len(args) > 3 or kwargs.get("dim") is not None)


def _looking(flags: _Flags) -> Before:
    """What happens before the results are there: sorting, and numbering the distinct values."""
    consecutive = flags == _OF_CONSECUTIVE

    def before(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
        tensor = args[0]
        if _goes_along_dim(args, kwargs, flags) or not tensor.numel():
            return None
        scratch = Scratch(gpu)
        if not tensor.is_contiguous():
            scratch.take(tensor.nbytes)
        if tensor.dtype == torch.bool and not consecutive:
            scratch.take(4)
            return scratch
        inverse, _ = _given(args, kwargs, flags)
        if not consecutive:
            _sort(gpu, scratch, tensor, inverse)
        if inverse:
            _number(gpu, scratch, tensor.numel(), 4 if consecutive else _INDEX_BYTES)
        return scratch

    return before


def _sort(gpu: GPU, scratch: Scratch, tensor: torch.Tensor, inverse: bool) -> None:
    count, size = tensor.numel(), tensor.element_size()
    scratch.take(count * size)
    indices = scratch.take(count * _INDEX_BYTES) if inverse else 0
    if inverse:
        scratch.take(count * _INDEX_BYTES)
    model = gpu.model
    storage = cub.radix_sort_pairs_bytes(
        count,
        size,
        _INDEX_BYTES if inverse else 0,
        8 * size,
        model.compute_capability,
        model.sm_count,
    )
    scratch.drop(scratch.take(storage))
    scratch.drop(indices)


def _number(gpu: GPU, scratch: Scratch, count: int, number_bytes: int) -> None:
    # The inverse is there already; it comes to stay where this leaves room.
    inverse = scratch.take(count * _INDEX_BYTES)
    numbers = scratch.take(count * number_bytes)
    storage = cub.scan_bytes(min(count, cub.LARGEST_SCAN), 4, gpu.version)
    scratch.drop(scratch.estimate(storage, "CUB", "a prefix sum"))
    scratch.drop(numbers)
    scratch.drop(inverse)


def _with_room(flags: _Flags) -> Placed:
    """The results, which CUDA makes as large as the input and then shortens in place."""

    def placed(
        gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Iterator[torch.Tensor]:
        values, inverse, *counts = result
        yield inverse
        if _goes_along_dim(args, kwargs, flags):
            yield from (values, *counts)
            return
        is_truth = args[0].dtype == torch.bool and flags != _OF_CONSECUTIVE
        room = 2 if is_truth else args[0].numel()
        _make_room(values, room)
        yield values
        for tensor in counts:
            if is_truth or _given(args, kwargs, flags)[1]:
                _make_room(tensor, room)
            yield tensor

    return placed


def _make_room(tensor: torch.Tensor, elements: int) -> None:
    tensor.untyped_storage().resize_(elements * tensor.element_size())


def _selecting(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    count = args[0].numel()
    scratch = Scratch(gpu)
    scratch.take(_INDEX_BYTES)
    storage = cub.unique_bytes(count, gpu.model.compute_capability, gpu.version)
    scratch.estimate(storage, "CUB", "a selection")
    scratch.free()


def _selected(flags: _Flags) -> Rule:
    def after(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        is_truth = args[0].dtype == torch.bool and flags != _OF_CONSECUTIVE
        if args[0].numel() and not is_truth and not _goes_along_dim(args, kwargs, flags):
            _selecting(gpu, args, kwargs, result)

    return Rule(before=_looking(flags), placed=_with_room(flags), after=after)


_OF_UNIQUE = (2, 3)
_OF_CONSECUTIVE = (1, 2)


def _extreme(gpu: GPU, tensor: torch.Tensor) -> None:
    scratch = Scratch(gpu)
    scratch.take(tensor.element_size())
    reductions.reduce_tensor(gpu, tensor, None, reductions.VALUES, tensor.dtype)
    scratch.free()


def _bins(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    tensor = args[0]
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    scratch = Scratch(gpu)
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        scratch.take(weights.numel() * torch.float64.itemsize)
    if tensor.numel():
        for _ in range(1 if tensor.dtype == torch.uint8 else 2):
            _extreme(gpu, tensor)
    return scratch


def _range(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    low, high = (
        args[at] if len(args) > at else kwargs.get(name, 0) for at, name in ((2, "min"), (3, "max"))
    )
    if low == high and args[0].numel():
        for _ in range(2):
            _extreme(gpu, args[0])


RULES = {
    "aten::_unique2": _selected(_OF_UNIQUE),
    "aten::unique_consecutive": _selected(_OF_CONSECUTIVE),
    "aten::bincount": Rule(before=_bins),
    "aten::histc": Rule(after=_range),
}
