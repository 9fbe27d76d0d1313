"""CPU tensors of unknown values: copies from a simulated GPU, and results computed from them.

To torch they are CPU tensors like all others, so autograd, views and errors are those of the CPU;
only :class:`~pytest_gpumem.simulated.machine.storages.Storages` tells them apart. Nothing is
computed of them: their operators run on ``meta``, and memory of large ones is allocated but never
touched, so that a model of any size can be moved to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.raw import META, tensors_in
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import Storages, poison
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.views import covers
from pytest_gpumem.values.errors import UnknownValueError

Run = Callable[..., Any]
_empty_strided = torch.empty_strided


class OnHost:
    """Runs operators of CPU tensors where the values of some are unknown."""

    def __init__(self, storages: Storages, run: Run, unknown: Callable[[Any], str]) -> None:
        self._storages = storages
        self._run = run
        self._unknown = unknown
        """Returns a sentence that an operator reads unknown values."""

    def run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run ``operator`` by shapes: tensors that it returns or writes to are unknown."""
        func = operator.func
        if any(isinstance(value, torch.UntypedStorage) for value in args):
            return func(*args, **kwargs)  # set_ to a storage, whatever that holds
        places = [args[at] if at < len(args) else kwargs.get(name) for at, name in operator.written]
        targets = [tensor for tensor in tensors_in(places) if not raw.is_meta(tensor)]
        if targets and self._writes_known_values(operator, args, kwargs, targets):
            result = self._run(func, args, kwargs)
            for target in filter(covers, targets):
                self._storages.forget_on_host(target)
            return result
        pairs = _StandIns(self._storages, targets)
        result = self._run(func, pairs.of(args), pairs.of(kwargs), unknown=True)
        for target in targets:
            shape = pairs.made[id(target)].shape
            if target.shape != shape:
                target.resize_(shape)
            self.lose(func, target)
        return self._made(result, pairs)

    def concealed(self, value: Any) -> Any:
        """Return ``value`` with tensors of unknown values on ``meta``: no kernel may read them."""
        return _StandIns(self._storages, (), unknown_only=True).of(value)

    def lose(self, func: Any, target: torch.Tensor) -> None:
        """Mark the values of a CPU tensor as unknown from now on.

        Its memory may be read out of sight, through numpy: it is filled with NaN where possible.
        """
        if self._storages.is_on_host(target):
            return
        if not (target.dtype.is_floating_point or target.dtype.is_complex):
            raise UnknownValueError(self._unknown(func))
        with torch.no_grad():
            poison(target)
        self._storages.adopt_on_host(target)

    def _writes_known_values(
        self, operator: Operator, args: Args, kwargs: Kwargs, targets: Sequence[torch.Tensor]
    ) -> bool:
        if not operator.overwrites or any(map(self._storages.is_untouched, targets)):
            return False
        places = {at for at, _ in operator.written}
        names = {name for _, name in operator.written}
        read = [value for at, value in enumerate(args) if at not in places]
        read += [value for name, value in kwargs.items() if name not in names]
        return not any(map(self._storages.is_on_host, tensors_in(read)))

    def _made(self, result: Any, pairs: _StandIns) -> Any:
        if isinstance(result, torch.Tensor):
            given = pairs.originals.get(id(result))
            if given is not None:
                return given
            if not raw.is_meta(result):
                return result
            return self._storages.unknown_on_host(result.shape, result.stride(), result.dtype)
        if isinstance(result, (list, tuple)):
            return type(result)([self._made(item, pairs) for item in result])
        return result


class _StandIns:
    """``meta`` tensors in the place of CPU tensors.

    A single known number stays one, beside which CUDA tensors may stand too.
    """

    def __init__(
        self, storages: Storages, targets: Iterable[torch.Tensor], *, unknown_only: bool = False
    ) -> None:
        self._is_unknown = storages.is_on_host
        self._unknown_only = unknown_only
        self._targets = {id(target) for target in targets}
        self.made: dict[int, torch.Tensor] = {}
        """By the identity of the CPU tensor; with the shape that the operator has given it."""
        self.originals: dict[int, torch.Tensor] = {}
        """The CPU tensors, by the identity of what stands for them."""

    def of(self, value: Any) -> Any:
        """Return ``value`` with the tensors in it replaced."""
        if isinstance(value, torch.Tensor):
            return self.made.get(id(value)) if id(value) in self.made else self._stand_in(value)
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.of(item) for item in value])
        return value

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if raw.is_meta(tensor) or tensor.layout is not torch.strided:
            return tensor
        stays = not tensor.dim() and id(tensor) not in self._targets
        if (stays or self._unknown_only) and not self._is_unknown(tensor):
            return tensor
        made = _empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
        self.made[id(tensor)] = made
        self.originals[id(made)] = tensor
        return made
