"""Indexing that accumulates, and numbers that become CUDA tensors.

Source: aten/src/ATen/native/cuda/Indexing.cu (index_put_with_sort_kernel, computeLinearIndex),
native/TensorAdvancedIndexing.cpp (_index_put_impl_), native/cuda/Embedding.cu and
EmbeddingBackwardKernel.cu, native/TensorCompare.cpp (where with a number).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.operators import cub
from pytest_gpumem.simulated.operators.rules import Rule, Scratch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import SimulatedGPU

_INDEX_BYTES = 8
_FLAGS = frozenset({torch.bool, torch.uint8})


def _index_put(
    gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None
) -> None:
    tensor, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    # Which elements a mask selects is not known, nor then how many indices there are.
    if not given or any(index.dtype in _FLAGS for index in given):
        return
    if not accumulate and (not torch.are_deterministic_algorithms_enabled() or values.numel() <= 1):
        return
    with _Sorted(gpu, tensor, indices, given, values):
        pass


class _Sorted:
    """index_put_with_sort_kernel, allocation by allocation."""

    def __init__(
        self,
        gpu: SimulatedGPU,
        tensor: torch.Tensor,
        indices: list[torch.Tensor | None],
        given: list[torch.Tensor],
        values: torch.Tensor,
    ) -> None:
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
            wrapped = scratch.take(index.numel() * _INDEX_BYTES)
            scaled = scratch.take(count * _INDEX_BYTES)
            scratch.drop(wrapped)
            if first:
                scratch.drop(scaled)
            else:
                first = scaled
        return first

    def _sort(self, gpu: SimulatedGPU, count: int, keys: int) -> None:
        scratch = self._scratch
        for _ in ("sorted", "original", "range"):
            scratch.take(count * _INDEX_BYTES)
        bits = cub.bits_of(keys - 1)
        capability = gpu.model.compute_capability
        storage = scratch.take(
            cub.radix_sort_pairs_bytes(count, _INDEX_BYTES, _INDEX_BYTES, bits, capability)
        )
        scratch.drop(storage)


def _where(gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch | None:
    # A number given to where() has become a tensor of no dimensions on the condition's device.
    storages = gpu.simulation.storages
    for tensor in args[1:]:
        if not tensor.dim() and tensor.is_meta and not storages.is_on_host(tensor):
            storages.adopt(tensor, gpu)
    return None


_EMBEDDINGS_WITHOUT_SORT = 3072


def _embedding_backward(
    gpu: SimulatedGPU, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> None:
    gradient, indices = args[:2]
    by_frequency = args[4] if len(args) > 4 else kwargs.get("scale_grad_by_freq", False)
    count = indices.numel()
    if count <= _EMBEDDINGS_WITHOUT_SORT and not by_frequency:
        return
    scratch = Scratch(gpu)
    if not gradient.is_contiguous():
        scratch.take(gradient.numel() * gradient.element_size())
    element = indices.element_size()
    for _ in ("sorted", "original", "range"):
        scratch.take(count * element)
    bits = cub.bits_of(result.shape[0] - 1)
    storage = scratch.take(
        cub.radix_sort_pairs_bytes(count, element, element, bits, gpu.model.compute_capability)
    )
    scratch.drop(storage)
    scratch.free()


RULES = {
    "aten::index_put_": Rule(after=_index_put),
    "aten::index_put": Rule(after=_index_put),
    "aten::_index_put_impl_": Rule(after=_index_put),
    "aten::where": Rule(before=_where),
    "aten::embedding_dense_backward": Rule(after=_embedding_backward),
}
