"""Execution of operators of any kind: on ``meta``, on the host, or as without a simulation.

CPU tensors of unknown values are copies from a simulated GPU, and results computed from them. To
torch they are CPU tensors like all others, so autograd, views and errors are those of the CPU; only
:class:`~pytest_gpumem.simulated.machine.storages.Storages` tells them apart. They compute nothing:
their operators run on ``meta``, and memory of large ones is allocated but never touched, so
that a model of any size can be moved to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import GeneratorType
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import callers_line, user_line
from pytest_gpumem.simulated.execution.shapes import NEW, TORCHS_OWN, Shapes
from pytest_gpumem.simulated.machine import checks
from pytest_gpumem.simulated.machine.dispatch import Dispatch
from pytest_gpumem.simulated.machine.machine import GPU, SimulatedMachine
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, is_data_dependent
from pytest_gpumem.simulated.machine.storages import Storages, poison, storage_key
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.machine.values.views import covers
from pytest_gpumem.simulated.operators.custom_kernels import how_to_describe
from pytest_gpumem.simulated.operators.layout import strides_in_cpp
from pytest_gpumem.values.errors import (
    UndescribedKernelError,
    UnknownValueError,
    UnsupportedOperatorError,
)

CUDA = "cuda"
HOST = "cpu"


_OF_LISTS = frozenset({torch.int64, torch.bool, torch.uint8})
"""Types of the tensors that C++ makes of lists of indices."""
_SEVERAL = (tuple, list, GeneratorType)
"""Types of several results: of an operator, and of a rule that allocates between them."""
_SIGNS_OF_NO_SHAPES = ("no fake impl", "not linked with support for cuda", "INTERNAL ASSERT")


def laid_out(func: Any, args: Args, kwargs: Kwargs, result: Any) -> Any:
    """Return the ``result`` that a kernel for ``meta`` has made, with the strides of C++."""
    first, *others = result if isinstance(result, tuple) and result else (result,)
    strides = strides_in_cpp(func, args, kwargs, first)
    if strides is None:
        return result
    made = raw.empty_strided(first.shape, strides, dtype=first.dtype, device=raw.META)
    return (made, *others) if others else made


class Runner:
    """Ways to run the operators of one machine, for the handlers of every kind.

    ``execution`` is the :class:`Dispatch` with these handlers, and the context in which it sees the
    parts of an operator one by one.
    """

    def __init__(self, machine: SimulatedMachine, execution: Any) -> None:
        self.machine = machine
        self.mode: AbstractContextManager[object] = execution
        self.storages = machine.storages
        self.values = machine.values
        self.shapes = Shapes(machine.storages, self.device_name, alike=machine.gpus[0].version)
        self._dispatch: Dispatch = execution

    def run(self, func: Any, args: Args, kwargs: Kwargs, *, unknown: bool = False) -> Any:
        """Run a kernel of torch's; ``unknown``: instead of one on CPU tensors of unknown values."""
        self._dispatch.inside = True
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            is_ours = unknown or kwargs.get("device") == raw.META
            if not is_ours and self.machine.has_real_meta:
                # Meta tensors of the user's own have torch's errors.
                is_ours = self.device_kind_of(args, kwargs) is not None
            elif not is_ours:
                is_ours = any(map(raw.is_meta, raw.tensors_in((args, kwargs))))
            if is_ours:
                self._explain(error, func, args, kwargs)
            raise
        finally:
            self._dispatch.inside = False

    def run_once(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run a kernel of torch's that makes a tensor, or repeat its result for such arguments."""
        key, make = self.shapes.find(func, args, kwargs)
        if make is not NEW and make is not None:
            return make(args)
        result = laid_out(func, args, kwargs, self.run(func, args, kwargs))
        if key is not None and make is NEW:
            self.shapes.learn(key, args, kwargs, result)
        return result

    def run_seeded(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run a kernel of torch's without drawing random numbers."""
        if kwargs.get("generator") is not None and any(map(raw.is_meta, raw.tensors_in(args))):
            kwargs = {**kwargs, "generator": None}
        return self.run(func, *self.concealed(args, kwargs))

    def run_elsewhere(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator without CUDA tensors, with torch's own errors."""
        self._dispatch.inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._dispatch.inside = False
        self.storages.mark_users_own(raw.tensors_in(result))
        return result

    def run_on_host(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator of CPU tensors whose values are unknown."""
        func = operator.func
        result = self._run_by_shapes(operator, args, kwargs)
        if func in finite.QUESTIONS and self.storages.is_unknown_on_cpu(args[0]):
            answer = self.values.if_finite(func, args)
            if answer is not None:
                self.machine.note_finite()
                return torch.full(result.shape, answer, device=raw.CPU)
        self.values.follow_on_host(func, args, result)
        return result

    def _run_by_shapes(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator on CPU tensors, some unknown: what it makes or writes is unknown, too."""
        func = operator.func
        if any(isinstance(value, torch.UntypedStorage) for value in args):
            return func(*args, **kwargs)  # set_ to a storage, whatever that holds
        places = [args[at] if at < len(args) else kwargs.get(name) for at, name in operator.written]
        targets = [tensor for tensor in raw.tensors_in(places) if not raw.is_meta(tensor)]
        if targets and self._writes_known_values(operator, args, kwargs, targets):
            result = self.run(func, args, kwargs)
            for target in filter(covers, targets):
                self.storages.mark_known(target)
            return result
        pairs = _OnMeta(self.storages, targets)
        result = self.run(func, pairs.of(args), pairs.of(kwargs), unknown=True)
        for target in targets:
            shape = pairs.made[id(target)].shape
            if target.shape != shape:
                target.resize_(shape)
            self.mark_unknown(func, target)
        return pairs.on_host(result)

    def _writes_known_values(
        self, operator: Operator, args: Args, kwargs: Kwargs, targets: Sequence[torch.Tensor]
    ) -> bool:
        if not operator.overwrites or any(map(self.storages.is_untouched, targets)):
            return False
        read = operator.read(args, kwargs)
        return not any(map(self.storages.is_unknown_on_cpu, raw.tensors_in(read)))

    def mark_unknown(self, func: Any, target: torch.Tensor) -> None:
        """Mark the values of a CPU tensor as unknown from now on.

        numpy can read its memory unnoticed, so that is filled with NaN; other types are refused.
        """
        if self.storages.is_unknown_on_cpu(target):
            return
        if not (target.dtype.is_floating_point or target.dtype.is_complex):
            raise UnknownValueError(self.unknown(func))
        with torch.no_grad():
            poison(target)
        self.storages.mark_unknown(target)

    def concealed(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the arguments, with CPU tensors of unknown values on ``meta``: none is read."""
        given = args, kwargs
        if not self.storages.unknown_on_cpu:
            return given
        return _OnMeta(self.storages, (), unknown_only=True).of(given)

    def check_placement(self, func: Any, args: Args, kwargs: Kwargs) -> bool:
        """Check arguments of a new kind: raise the errors of a GPU, which meta kernels do not.

        Returns whether they are on ``meta``, although not by a request in this simulation.
        """
        indexes = func._schema.name in checks.INDEXING

        def place_of(tensor: torch.Tensor) -> str:
            place = self.device_name(tensor)
            if place == "meta" and indexes and tensor.dtype in _OF_LISTS:
                # From x[:, [0, 1]] C++ makes a tensor that the mode does not see.
                is_users = storage_key(tensor) in self.storages.users_own
                return place if is_users else checks.HOST_SCALAR
            return place

        tensors = checks.placed(func, args, kwargs, place_of)
        where = {each.device for each in tensors}
        if "meta" in where and where <= {"meta", "cpu"}:
            self.machine.has_real_meta = True
            return True
        checks.refuse_mixed(func, tensors)
        checks.refuse_types(func, tensors, (*args, *kwargs.values()))
        checks.refuse_cast(func, args, kwargs)
        return False

    def track(self, result: Any, device: GPU) -> None:
        """Give every new storage in ``result`` a block on ``device``."""
        if isinstance(result, torch.Tensor):
            if raw.is_meta(result):
                self.storages.track(result, device)
        elif isinstance(result, _SEVERAL):
            for item in result:
                self.track(item, device)

    def device_kind_of(self, args: Args, kwargs: Kwargs) -> str | None:
        """Return whose memory the tensor arguments stand for: ``CUDA``, ``HOST``, or ``None``."""
        owner = None
        is_number = False
        machine = self.machine
        of = self.storages.of
        first = args[0] if args and not machine.has_real_meta else None
        if isinstance(first, torch.Tensor) and of(first) is not None:  # nearly always
            return CUDA
        for tensor in raw.tensors_in((args, kwargs)):
            if of(tensor) is not None:
                if machine.has_real_meta:
                    machine.thread_state.on_meta = False
                    self._place_number(tensor)
                return CUDA
            if self.storages.is_unknown_on_cpu(tensor):
                owner = HOST
            elif raw.is_meta(tensor):
                if storage_key(tensor) in self.storages.host_scalars:
                    is_number = True
                elif machine.has_real_meta:
                    machine.thread_state.on_meta = True
                    machine.thread_state.number = None
        if owner is None and is_number and not machine.thread_state.on_meta:
            # C++ made it for the CUDA tensors of the operator before, as quantile() does.
            return CUDA
        return owner

    def _place_number(self, other: torch.Tensor) -> None:
        """Give a number that C++ has made for this operator a block on the GPU of ``other``."""
        thread, record = self.machine.thread_state, self.storages.of(other)
        if thread.number is not None and record is not None:
            self.storages.track(thread.number, record.device)
            thread.number = None

    def is_users_own(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on ``meta`` because user code requested that."""
        return raw.is_meta(tensor) and self.device_name(tensor) == "meta"

    def device_name(self, tensor: torch.Tensor) -> str:
        """Return the device of ``tensor`` on a machine with a GPU, or ``HOST_SCALAR``."""
        record = self.storages.of(tensor)
        if record is not None:
            return str(record.device.torch_device)
        if not raw.is_meta(tensor):
            return HOST
        return checks.HOST_SCALAR if storage_key(tensor) in self.storages.host_scalars else "meta"

    def unknown(self, func: Any) -> str:
        """Return the sentence that ``func`` reads an unknown value."""
        return self.values.refusal(f"{func} at {user_line()} reads")

    def _explain(self, error: Exception, func: Any, args: Args, kwargs: Kwargs) -> None:
        """Raise the error of a simulated GPU for ``error``, of a kernel without values."""
        text = str(error)
        if isinstance(error, NotImplementedError):
            if is_data_dependent(func):
                raise UnknownValueError(self.unknown(func)) from error
            raise no_shapes(self, func, args, kwargs) from error
        if any(sign in text for sign in _SIGNS_OF_NO_SHAPES):
            raise no_shapes(self, func, args, kwargs) from error
        if "meta tensor" in text:
            raise UnknownValueError(self.unknown(func)) from error


def no_shapes(runner: Runner, func: Any, args: Args, kwargs: Kwargs) -> UnsupportedOperatorError:
    """Return the refusal of the operator ``func``, called with these arguments."""
    own = func.namespace in TORCHS_OWN
    line = user_line() if own else callers_line()
    sentence = (
        f"{func} at {line} has no shape-only implementation, so it cannot run on a simulated GPU"
    )
    if own:
        return UnsupportedOperatorError(sentence)
    return UndescribedKernelError(f"{sentence}: {how_to_describe(func)}", func._schema.name)


class _OnMeta:
    """``meta`` tensors in the place of CPU tensors.

    A single known number stays on the CPU, because it may be used with CUDA tensors, too.
    """

    def __init__(
        self, storages: Storages, targets: Iterable[torch.Tensor], *, unknown_only: bool = False
    ) -> None:
        self._storages = storages
        self._unknown_only = unknown_only
        self._targets = {id(target) for target in targets}
        self.made: dict[int, torch.Tensor] = {}
        """By the identity of the CPU tensor; with the shape that the operator has given it."""
        self.originals: dict[int, torch.Tensor] = {}
        """The CPU tensors, by the identity of what stands for them."""

    def of(self, value: Any) -> Any:
        """Return ``value`` with the tensors in it replaced."""
        if isinstance(value, torch.Tensor):
            return self.made.get(id(value)) if id(value) in self.made else self._on_meta(value)
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self.of(item) for item in value])
        return value

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if raw.is_meta(tensor) or tensor.layout is not torch.strided:
            return tensor
        stays = not tensor.dim() and id(tensor) not in self._targets
        if (stays or self._unknown_only) and not self._storages.is_unknown_on_cpu(tensor):
            return tensor
        made = raw.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=raw.META)
        self.made[id(tensor)] = made
        self.originals[id(made)] = tensor
        return made

    def on_host(self, result: Any) -> Any:
        """Return ``result`` with CPU tensors, given or new ones of unknown values."""
        if isinstance(result, torch.Tensor):
            given = self.originals.get(id(result))
            if given is not None:
                return given
            if not raw.is_meta(result):
                return result
            return self._storages.new_unknown_on_cpu(result.shape, result.stride(), result.dtype)
        if isinstance(result, (list, tuple)):
            return type(result)([self.on_host(item) for item in result])
        return result
