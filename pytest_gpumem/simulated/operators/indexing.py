"""Indexing that accumulates, and numbers that become CUDA tensors.

Source: aten/src/ATen/native/cuda/Indexing.cu (index_put_with_sort_kernel, computeLinearIndex),
Nonzero.cu (nonzero_cuda_out_impl),
native/TensorAdvancedIndexing.cpp (_index_put_impl_, make_info), native/TensorCompare.cpp (where),
native/Pow.cpp (pow_Scalar_out), torch/csrc/utils/tensor_new.cpp (indexing_tensor_from_data).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.operators import cub
from pytest_gpumem.simulated.operators.rules import Rule, Scratch, passing

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import GPU
    from pytest_gpumem.simulated.machine.storages import Storages

_INDEX_BYTES = 8
_FLAGS = frozenset({torch.bool, torch.uint8})


def _converted(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    scratch = Scratch(gpu)
    _convert(gpu, scratch, _given(gpu, args[1]))
    return scratch


def _convert(gpu: GPU, scratch: Scratch, given: list[torch.Tensor]) -> None:
    """make_info: indices from the CPU, and 32-bit ones, become 64-bit ones on the device."""
    if not given or any(index.dtype in _FLAGS for index in given):
        return
    count = torch.broadcast_shapes(*(index.shape for index in given)).numel()
    for index in given:
        if _on_cpu(index):
            scratch.take(count * index.element_size())
    for index in given:
        if index.dtype == torch.int32:
            scratch.take(count * _INDEX_BYTES)


def _given(gpu: GPU, indices: list[torch.Tensor | None]) -> list[torch.Tensor]:
    given = [index for index in indices if index is not None]
    for index in given:
        # A list of numbers has become a tensor on the indexed tensor's device, out of sight.
        if not _on_cpu(index):
            gpu.simulation.storages.adopt(index, gpu)
    return given


def _on_cpu(index: torch.Tensor) -> bool:
    return not raw.is_meta(index)


def _before_index_put(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    indices, values = args[1:3]
    if is_masked_fill(gpu.simulation.storages, args, kwargs):
        return None
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = _given(gpu, indices)
    is_number = _is_number(gpu.simulation.storages, values)
    scratch = Scratch(gpu)
    scratch.take(values.element_size() if is_number else 0)
    if not _is_sorted(values, accumulate):
        _convert(gpu, scratch, given)
    return scratch


def _is_number(storages: Storages, values: torch.Tensor) -> bool:
    # A number, as in x[i] = 1.0, is a tensor that holds no CUDA memory.
    return not values.dim() and storages.of(values) is None


def is_masked_fill(storages: Storages, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an index_put fills where one mask is set, by a number: canDispatchToMaskedFill."""
    if len(args) < 3 or (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
        return False
    given = [index for index in args[1] if index is not None]
    return len(given) == 1 and given[0].dtype in _FLAGS and _is_number(storages, args[2])


def _is_sorted(values: torch.Tensor, accumulate: bool) -> bool:
    return accumulate or (torch.are_deterministic_algorithms_enabled() and values.numel() > 1)


def _index_put(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> None:
    tensor, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = _given(gpu, indices)
    # Which elements a mask selects is not known, nor then how many indices there are.
    if not given or any(index.dtype in _FLAGS for index in given):
        return
    if not _is_sorted(values, accumulate):
        return
    with _Sorted(gpu, tensor, indices, given, values):
        pass


class _Sorted:
    """index_put_with_sort_kernel, allocation by allocation."""

    def __init__(
        self,
        gpu: GPU,
        tensor: torch.Tensor,
        indices: list[torch.Tensor | None],
        given: list[torch.Tensor],
        values: torch.Tensor,
    ) -> None:
        self._gpu = gpu
        self._scratch = scratch = Scratch(gpu)
        element = tensor.element_size()
        if not tensor.is_contiguous():
            scratch.take(tensor.numel() * element)
        count = torch.broadcast_shapes(*(index.shape for index in given)).numel()
        places = [at for at, index in enumerate(indices) if index is not None]
        linear = self._linear_index(given, count)
        rows = 1
        for place in places:
            rows *= tensor.shape[place]
        slices = tensor.numel() // max(rows, 1)
        after = 1
        for size in tensor.shape[places[-1] + 1 :]:
            after *= size
        wanted = count * slices
        if values.numel() != wanted or not values.is_contiguous():
            scratch.take(wanted * element)
        if count and slices:
            self._sort(gpu, count, tensor.numel() // after)
        del linear

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._scratch.free()

    def _linear_index(self, given: list[torch.Tensor], count: int) -> int:
        scratch = self._scratch
        first = 0
        for index in given:
            # An index on the CPU is wrapped and scaled there, and comes to the device after.
            on_cpu = _on_cpu(index)
            wrapped = 0 if on_cpu else scratch.take(index.numel() * _INDEX_BYTES)
            scaled = scratch.take(count * _INDEX_BYTES)
            scratch.drop(wrapped)
            if first:
                scratch.drop(scaled)
            else:
                first = scaled
        return first

    def _sort(self, gpu: GPU, count: int, keys: int) -> None:
        scratch = self._scratch
        for _ in ("sorted", "original", "range"):
            scratch.take(count * _INDEX_BYTES)
        bits = cub.bits_of(keys - 1)
        capability = gpu.model.compute_capability
        storage = scratch.take(
            cub.radix_sort_pairs_bytes(count, _INDEX_BYTES, _INDEX_BYTES, bits, capability)
        )
        scratch.drop(storage)


def _where(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    storages = gpu.simulation.storages
    scratch = Scratch(gpu)
    tensors = args[1:]
    result = torch.result_type(*tensors)
    for tensor in tensors:
        if not tensor.dim() and raw.is_meta(tensor):
            # A number has become a tensor of no dimensions on the condition's device.
            storages.adopt(tensor, gpu)
        elif not tensor.dim() and tensor.dtype == result:
            scratch.take(tensor.element_size())
        if tensor.dtype != result:
            scratch.take(tensor.numel() * result.itemsize)
    return scratch


def _power(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
    base = args[0]
    if not isinstance(base, torch.Tensor) and base != 1:
        # The base becomes a tensor of its own type: 64-bit, or complex.
        passing(gpu, 16 if isinstance(base, complex) else 8)


def _count_set(gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    tensor, model = args[0], gpu.model
    scratch = Scratch(gpu)
    if not tensor.is_contiguous():
        scratch.take(tensor.nbytes)
    if tensor.numel():
        scratch.take(4)
        storage = cub.count_bytes(tensor.numel(), model.sm_count, model.max_threads_per_sm)
        scratch.drop(scratch.take(storage))
    return scratch


def _place_set(
    gpu: GPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor
) -> None:
    tensor = args[0]
    if tensor.dim() and tensor.numel():
        capability = gpu.model.compute_capability
        passing(gpu, cub.flagged_bytes(tensor.numel(), capability, gpu.version))


def _masked_fill(tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """With a tensor of no dimensions: CUDA reads its number, wherever it lives."""
    return torch.ops.aten.masked_fill.Scalar(tensor, mask, 0)  # type: ignore[no-any-return]  # an operator


def _masked_fill_in_place(tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> Any:
    return torch.ops.aten.masked_fill_.Scalar(tensor, mask, 0)


IN_VIEW: dict[str, Callable[..., Any]] = {
    "aten.masked_fill.Tensor": _masked_fill,
    "aten.masked_fill_.Tensor": _masked_fill_in_place,
}
"""Operators that CUDA builds from others."""

_PUT = Rule(before=_before_index_put, after=_index_put)
RULES = {
    "aten::index": Rule(before=_converted),
    "aten::index_put_": _PUT,
    "aten::index_put": _PUT,
    "aten::_index_put_impl_": _PUT,
    "aten::nonzero": Rule(before=_count_set, after=_place_set),
    "aten::where": Rule(before=_where),
    "aten::pow": Rule(after=_power),
}
