"""Values that are kept on the CPU, by the storage they belong to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.machine.signatures import UNREAD, Args, Kwargs
from pytest_gpumem.simulated.machine.storages import Storages, storage_key
from pytest_gpumem.simulated.machine.values.facts import Fact
from pytest_gpumem.simulated.machine.values.views import covers, layout_of, view_of
from pytest_gpumem.values.errors import HostMemoryError

MOST_INTEGERS = 65_536
"""Most elements of an integer or boolean tensor whose values are kept."""
MOST_FLOATS = 4_096
MOST_REPEATED = 1 << 20
"""Most elements of a view to compute with: ``expand`` makes billions of one, and so does the
backward pass of a sum."""


class KnownValues:
    """The elements of storages whose values are known, found by tensor."""

    def __init__(self, storages: Storages, *, everything: bool) -> None:
        self.storages = storages
        self.everything = everything
        """Whether values of any size are computed, and random numbers drawn."""
        self._bases: dict[int, torch.Tensor] = {}
        """By key: all elements of the storage, flat, on the CPU."""
        self._stated: dict[int, Fact] = {}
        """Other facts about a storage, by key."""
        self._loose: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages without a block, whose values must not outlive them either."""
        self._uninitialized: set[int] = set()
        """Keys of storages that were not written to yet, where everything is computed."""
        self._held = 0
        self._limit = 0

    def base(self, key: int) -> torch.Tensor | None:
        """Return all elements of a storage, flat; ``None`` if they are not known."""
        return self._bases.get(key)

    def put(self, key: int, base: torch.Tensor) -> None:
        """Set the contents of a storage that is watched already to ``base``, flat."""
        self.forget(key)
        if self.everything:
            self._hold(base.nbytes)
        self._bases[key] = base

    def forget(self, key: int) -> None:
        """Drop the values of a storage, because they are no longer known or it has died."""
        self._uninitialized.discard(key)
        if self._stated:
            self._stated.pop(key, None)
        base = self._bases.pop(key, None)
        if base is not None and self.everything:
            self._held -= base.nbytes

    def keep(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Remember the values of ``source``, a CPU tensor of the same shape, for ``tensor``."""
        if raw.is_on_device(source):
            return
        if source.shape == tensor.shape and source.layout is torch.strided:
            self._keep(tensor, source, shared=True)

    def resized(self, tensor: torch.Tensor) -> None:
        """Follow a storage that was resized in place: added elements are undefined."""
        key = storage_key(tensor)
        if (fact := self._stated.get(key)) is not None:
            self._stated[key] = replace(fact, value=None, bounds=None)
        base = self._bases.get(key)
        size = 0 if base is None else self._elements(tensor, base.dtype)
        if base is None or size <= base.numel():
            return
        if not self.everything:
            self.forget(key)
            return
        grown = raw.empty(size, dtype=base.dtype, device=raw.CPU)
        grown[: base.numel()] = base
        self._bases[key] = grown
        self._hold((size - base.numel()) * base.element_size())

    def _known(self, args: Args, kwargs: Kwargs) -> bool:
        """Return whether all tensors are known, and one at least has kept values."""
        return self._unknown_among((args, kwargs)) is False

    def _unknown_among(self, values: Any) -> bool | None:
        """Return whether a tensor among ``values`` is unknown; ``None`` if none has kept values."""
        answer = None
        for tensor in raw.tensors_in(values):
            if storage_key(tensor) in self._bases:
                if tensor.numel() > MOST_REPEATED and not self.everything:
                    return True
                answer = False
            elif raw.is_on_device(tensor) or self.storages.is_unknown_on_cpu(tensor):
                return True
        return answer

    def _keeps(self, tensor: torch.Tensor) -> bool:
        """Return whether values of a tensor of this size are kept; none of a quantized one are."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if self.everything:
            return True
        dtype = tensor.dtype
        most = MOST_FLOATS if dtype.is_floating_point or dtype.is_complex else MOST_INTEGERS
        return tensor.numel() <= most and self._elements(tensor) <= 2 * most

    def _keep_all(self, result: Any, computed: Any, used: set[int], *, parts: bool = False) -> None:
        """Keep values ``computed`` for ``result``, whose tensors may be ``parts`` of storages."""
        made: set[int] = set()
        for tensor, value in _pairs(result, computed):
            if value is UNREAD or isinstance(value, int):
                filling = 0 if value is UNREAD else value
                value = torch.full(tensor.shape, filling, dtype=tensor.dtype, device=raw.CPU)
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            if value.shape != tensor.shape:
                # In 2.6 the sums that cuDNN's attention returns have no last dimension.
                if value.squeeze(-1).shape != tensor.squeeze(-1).shape:
                    continue
                value = value.view(tensor.shape)
            key = storage_key(tensor)
            base = self._bases.get(key)
            if base is None:
                made.add(key)
                self._keep(tensor, value, value.untyped_storage()._cdata in used)
                used.add(value.untyped_storage()._cdata)
            elif parts or key in made:  # gradients of cuDNN's weights are parts of one
                view_of(base, layout_of(tensor)).copy_(value)

    def _keep(self, tensor: torch.Tensor, source: torch.Tensor, shared: bool) -> None:
        if not self._keeps(tensor):
            return
        if (
            not shared
            and source.dtype == tensor.dtype
            and source.is_contiguous()
            and not source.storage_offset()
            and tensor.is_contiguous()
            and self._covers(tensor)
        ):
            self._put(tensor, source.view(-1))
            return
        base = raw.empty(self._elements(tensor), dtype=tensor.dtype, device=raw.CPU)
        view_of(base, layout_of(tensor)).copy_(source)
        self._put(tensor, base)

    def _put(self, tensor: torch.Tensor, base: torch.Tensor) -> None:
        self.put(storage_key(tensor), base)
        self._watch(tensor)

    def _put_blank(self, tensor: torch.Tensor) -> None:
        self._put(tensor, raw.empty(self._elements(tensor), dtype=tensor.dtype, device=raw.CPU))

    def _elements(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
        """Return the elements of ``dtype`` in the whole storage; on the dry device in its block."""
        size: int = (dtype or tensor.dtype).itemsize
        nbytes: int = tensor.untyped_storage().nbytes()
        return nbytes // size

    def _covers(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is all of its storage."""
        return covers(tensor)

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages.by_key or key in self._loose:
            return

        def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
            # Another storage may have the address by now.
            if self._loose.get(key) is reference:
                del self._loose[key]
                self.forget(key)

        self._loose[key] = weakref.ref(storage, died)

    def _hold(self, nbytes: int) -> None:
        if self._held + nbytes > self._limit:
            raise HostMemoryError(
                f"real values take more than {self._limit:,} bytes of host memory, half of what "
                f"was free"
            )
        self._held += nbytes


def _pairs(result: Any, computed: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield the tensors of the device in ``result``, each with its computed value."""
    if isinstance(result, (list, tuple)):
        if isinstance(computed, (list, tuple)):
            for one, other in zip(result, computed, strict=False):
                yield from _pairs(one, other)
    elif isinstance(result, torch.Tensor) and raw.is_on_device(result):
        yield result, computed
