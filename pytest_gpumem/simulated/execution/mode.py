"""Shape-only execution: CUDA tensors are served by ``meta`` tensors whose storages hold blocks.

Reading the result of a CUDA graph whose memory a later run has used again raises an error. On a GPU
an operator that asks such a tensor for its storage, or the storage for its address,
raises the error that compiled code has set before. Here operators that only view are refused, too.

Source: c10/core/TensorImpl.h (release_storage_and_set_meta_custom_data_ptr_error_msg_),
StorageImpl.h (release_data_and_set_meta_custom_data_ptr_error_msg_), torch 2.6 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from math import prod
from threading import get_ident
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import clear_own_frames, running
from pytest_gpumem.simulated.execution import custom
from pytest_gpumem.simulated.execution.computing import is_factory
from pytest_gpumem.simulated.execution.kinds import handler_of
from pytest_gpumem.simulated.execution.runner import Runner
from pytest_gpumem.simulated.execution.shapes import TORCHS_OWN
from pytest_gpumem.simulated.machine.checks import refuse_in_child
from pytest_gpumem.simulated.machine.dispatch import Dispatch, Handler
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import Storages, storage_key
from pytest_gpumem.simulated.operators.engine import (
    ACCUMULATED,
    IN_PLACE,
    in_formula,
    with_cuda_sums,
)
from pytest_gpumem.simulated.operators.rules import CALLED_IN_PLACE, within

_DISABLED = torch._C._disabled_torch_dispatch_impl


class ShapeExecution(TorchDispatchMode, Dispatch):
    """The mode that runs every operator on ``meta`` and gives each new storage a block.

    It takes the place of a fake mode (``_mode_key``): factory calls with ``device="cuda"`` then
    reach it without initialising CUDA, and dispatch modes of the user's own stay above it.
    """

    _mode_key = torch._C._TorchDispatchModeKey.FAKE
    supports_higher_order_operators = True
    shape_env = None
    """Read from a fake mode by tracing inside an operator (``flex_attention``)."""

    def __init__(self, machine: SimulatedMachine) -> None:
        TorchDispatchMode.__init__(self)
        Dispatch.__init__(self, machine.storages)
        self._machine = machine
        self._runner = Runner(machine, self)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return true: modes of the user's own run before this one."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that keeps dynamo out would cost more than this whole handler.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run one operator."""
        if types and any(kind.__torch_dispatch__ is not _DISABLED for kind in types):
            if any(issubclass(kind, FakeTensor) for kind in types):
                # It would leave the operator to the fake mode whose place this one has.
                return FakeTensor.__torch_dispatch__(func, types, args, kwargs or {})
            # A subclass that handles operators itself; its inner calls come back here.
            return NotImplemented
        lock = self.lock
        if lock is not None:
            lock.acquire()
            self._owner_thread = get_ident()
            self.users.add(self._owner_thread)
        try:
            running.operator = func
            if self._storages.reused:
                refuse_reused(self._storages, func, args, kwargs)
            handler = self._handlers.get(func)
            if handler is None:
                handler = self._handlers[func] = self._bind(func)
            return handler(args, kwargs or {})
        except torch.OutOfMemoryError as error:
            clear_own_frames(error.__traceback__)
            del args, kwargs
            raise
        finally:
            if lock is not None:
                lock.release()

    def _bind(self, func: Any) -> Handler:
        if self.in_child:

            def without_gpu(args: Args, kwargs: Kwargs) -> Any:
                target = self._machine.thread_state.destination
                refuse_in_child(self._storages, args, kwargs, target)
                return func(*args, **kwargs)

            return without_gpu
        if isinstance(func, HigherOrderOperator):
            return custom.higher_order(self._runner, func)
        handler = handler_of(self._runner, func)
        handler = in_place(
            func, handler, lambda func, *call: self.__torch_dispatch__(func, (), *call)
        )
        if func.namespace not in TORCHS_OWN:
            return custom.custom(self._runner, func, handler)
        handler = self._machine.values.work.counting(func, handler)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return noting_randomness(self._machine, func, handler)
        return handler


def in_place(func: Any, handler: Handler, run: Callable[[Any, Args, Kwargs], Any]) -> Handler:
    """Wrap ``handler``: autograd's formulas and composites call some operators in place, or with
    another dtype, only on a GPU."""
    sums = str(func) in ACCUMULATED
    chosen = IN_PLACE.get(str(func))
    if not sums and chosen is None and func not in CALLED_IN_PLACE:
        return handler

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if func in within.in_place:
            return run(within.in_place.pop(func), args, kwargs)
        # Two frames up is the operator's caller.
        if in_formula(sys._getframe(2)):
            node = torch._C._current_autograd_node().name()
            operator = None if chosen is None else chosen(args, node)
            if operator is not None:
                return run(operator, args, kwargs)
            if sums:
                kwargs = with_cuda_sums(args[0], kwargs, node)
        return handler(args, kwargs)

    return handle


SMALLEST = 1 << 16
"""Fewest numbers of a tensor that is left unfilled; code may decide by smaller ones."""


def noting_randomness(machine: SimulatedMachine, func: Any, handler: Handler) -> Handler:
    """Wrap a random operator: in a capture it may allocate a generator's state, after its results.

    Memory efficient attention and cuDNN's do so first, flash attention in its rule. On the CPU,
    large tensors may stay unfilled, if ``machine`` leaves them so.
    """
    unfilled = _UNFILLED.get(func)
    draws = _draws(func)
    is_first = any(argument.name == "dropout_p" for argument in func._schema.arguments)
    is_first = is_first and "flash" not in func._schema.name

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if machine.streams.captures:
            is_drawn, generator = draws(args, kwargs), kwargs.get("generator")
            if is_drawn and is_first:
                machine.current.draw(generator)
            result = handler(args, kwargs)
            if is_drawn:
                machine.current.draw(generator)
            return result
        if unfilled is not None and machine.leaves_unfilled:
            left = unfilled(args, kwargs)
            if left is not None:
                return left
        return handler(args, kwargs)

    return handle


def _draws(func: Any) -> Callable[[Args, Kwargs], bool]:
    """Return a predicate: whether a call draws numbers, as fused attention does only for dropout.

    Source: native/transformers/cuda/attention.cu (_efficient_attention_forward) and
    flash_attn/flash_api.cpp (mha_fwd), ``if (p_dropout > 0.0)``; cuDNN's always does.
    """
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names or "cudnn" in func._schema.name:
        return lambda args, kwargs: True
    at = names.index("dropout_p")

    def draws(args: Args, kwargs: Kwargs) -> bool:
        return bool(args[at] if len(args) > at else kwargs.get("dropout_p", 0.0))

    return draws


def _in_place(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    tensor: torch.Tensor = args[0]
    return None if raw.is_meta(tensor) or tensor.numel() < SMALLEST else tensor


def _factory(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    device = kwargs.get("device")
    is_on_host = device is None or device.type == "cpu"
    if not is_on_host or kwargs.get("pin_memory") or prod(args[0]) < SMALLEST:
        return None
    return torch.empty(args[0], **kwargs)


_UNFILLED: dict[Any, Callable[[Args, Kwargs], torch.Tensor | None]] = {
    torch.ops.aten.uniform_.default: _in_place,
    torch.ops.aten.normal_.default: _in_place,
    torch.ops.aten.rand.default: _factory,
    torch.ops.aten.randn.default: _factory,
}
"""Functions that return an uninitialised tensor, or ``None`` for one that must be filled."""


def refuse_reused(storages: Storages, func: Any, args: Args, kwargs: Any) -> None:
    """Raise an error if ``func`` reads memory that a CUDA graph has used again."""
    if _reads(func):
        for tensor in raw.tensors_in((args, kwargs or {})):
            storages.refuse_reused(storage_key(tensor))


@cache
def _reads(func: Any) -> bool:
    """Return whether ``func`` uses more of its tensors than their shapes."""
    if isinstance(func, HigherOrderOperator):
        return True
    name = func._schema.name
    return name == "aten::_to_copy" or not (name == "aten::detach" or is_factory(func))
