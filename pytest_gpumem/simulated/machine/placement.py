"""The GPU of a machine that an operator runs on: to torch all its tensors are on ``meta``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.gpu.device import GpuState
from pytest_gpumem.simulated.machine.checks import INDEXING, indices_elsewhere, two_devices
from pytest_gpumem.simulated.machine.signatures import Args, Handler, Kwargs
from pytest_gpumem.simulated.machine.storages import Storages

_D = TypeVar("_D", bound=GpuState)

_ANYWHERE = ("aten::_foreach_copy_", "aten::_amp_foreach_non_finite_check_and_unscale_")
"""Operators that accept tensors of several devices, and run on each device separately."""

SOURCE = "pytest_gpumem source"
"""Metadata key of an autograd node that copied to another GPU: the GPU it copied from."""


class Placement(Generic[_D]):
    """The GPUs that operators run on, in a machine with several.

    An operator runs where its tensors are, as on real devices, whichever device is the current
    one. A tensor that C++ makes from another's options (``at::zeros(size, grad.options())`` in
    a formula of autograd) names no GPU here: it goes where the operator before it ran.
    """

    def __init__(self, storages: Storages, gpus: Sequence[_D]) -> None:
        self._storages = storages
        self._gpus = gpus
        self.latest = gpus[0]
        """The GPU that the last operator ran on."""

    def of(self, name: str, args: Args, kwargs: Kwargs) -> _D:
        """Return the GPU of an operator's tensors; raise torch's error for tensors of two GPUs."""
        found = None
        if "index_put" in name:
            args = (args[0], *args[2:])  # it copies indices of another GPU
        for tensor in tensors_in((args, kwargs)):
            record = self._storages.of(tensor)
            if record is None or record.device is found:
                continue
            if found is None:
                found = record.device
            elif name not in _ANYWHERE:
                first, second = str(found.torch_device), str(record.device.torch_device)
                mixed = two_devices(first, second)
                sentence = indices_elsewhere(first) if name in INDEXING else mixed
                raise RuntimeError(f"{sentence} (at {user_line()})")
        if found is not None:
            self.latest = self._gpus[found.index]
        return self.latest

    def noting(self, handler: Handler) -> Handler:
        """Return a handler that notes the operator's GPU; its parts may span several."""

        def handle(args: Args, kwargs: Kwargs) -> Any:
            self.follow(args, kwargs)
            return handler(args, kwargs)

        return handle

    def follow(self, *values: Any) -> None:
        """Note the device of the first tensor among ``values``."""
        self.latest = self.first(values) or self.latest

    def first(self, values: Any) -> _D | None:
        """Return the GPU that holds the first tensor among ``values`` that is on one."""
        found = filter(None, map(self._storages.of, tensors_in(values)))
        return next((self._gpus[record.device.index] for record in found), None)

    def device_by_device(self, handler: Handler, alone: Handler | None) -> Handler:
        """Return a handler of ``_foreach_`` operators by GPU, of reductions ``alone`` by tensor."""

        def handle(args: Args, kwargs: Kwargs) -> Any:
            positions: dict[GpuState | None, list[int]] = {}
            tensors = next(value for value in args if isinstance(value, (list, tuple)))
            for position, tensor in enumerate(tensors):
                positions.setdefault(self.first(tensor), []).append(position)
            if len(positions) < 2:
                return handler(args, kwargs)
            if alone is not None:
                return [alone((tensor, *args[1:]), kwargs) for tensor in tensors]
            count = len(tensors)
            results: list[Any] = [None] * count
            for chosen in positions.values():
                part = handler(
                    tuple(_chosen(value, count, chosen) for value in args),
                    {name: _chosen(value, count, chosen) for name, value in kwargs.items()},
                )
                if part is not None:
                    for position, tensor in zip(chosen, part, strict=True):
                        results[position] = tensor
            return None if results[0] is None else results

        return handle


def return_gradient(moved: torch.Tensor, source: GpuState, position: int = 0) -> None:
    """Make autograd copy the gradient of ``moved``, itself a copy, back to the GPU ``source``.

    torch's formula does so by the options of the original, which name only ``meta`` here.
    ``position`` is that of the original among the inputs of the copy.
    """
    node: Any = (moved._base if moved._is_view() and moved._base is not None else moved).grad_fn
    if node is None:
        return
    node.metadata[SOURCE] = source

    def move(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        gradient = inputs[position]
        if gradient is None:
            return inputs
        returned = gradient.to(source.torch_device)
        return (*inputs[:position], returned, *inputs[position + 1 :])

    node.register_hook(move)


def source_of_node() -> GpuState | None:
    """Return the GPU that the running node copies its gradient to; ``None`` if it is no copy."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node.metadata.get(SOURCE)


def _chosen(value: Any, count: int, positions: Sequence[int]) -> Any:
    if isinstance(value, (list, tuple)) and len(value) == count:
        return [value[position] for position in positions]
    return value
