"""Shape-only execution: CUDA tensors are served by ``meta`` tensors whose storages hold blocks."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.simulated.common.callsite import running
from pytest_gpumem.simulated.common.frames import let_go
from pytest_gpumem.simulated.execution import composites, custom, taken_back
from pytest_gpumem.simulated.execution.in_place import in_place, may_be_in_place
from pytest_gpumem.simulated.execution.kinds import handler_of
from pytest_gpumem.simulated.execution.runner import Runner
from pytest_gpumem.simulated.execution.seeded import noting_randomness
from pytest_gpumem.simulated.machine import forks
from pytest_gpumem.simulated.machine.dispatch import Dispatch, Handler
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_DISABLED = torch._C._disabled_torch_dispatch_impl


class ShapeExecution(TorchDispatchMode, Dispatch):
    """Runs every operator on ``meta`` and gives each new storage a block on the simulated GPU.

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
        self._runner = Runner(machine, self, self)
        self._shapes = self._runner.shapes

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Modes of the user's own run before this one."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that keeps dynamo out would cost more than this whole handler.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
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
            if self._storages.taken_back:
                taken_back.refuse(self._storages, func, args, kwargs)
            handler = self._handlers.get(func)
            if handler is None:
                handler = self._handlers[func] = self._bind(func)
            return handler(args, kwargs or {})
        except torch.OutOfMemoryError as error:
            let_go(error.__traceback__)
            del args, kwargs
            raise
        finally:
            if lock is not None:
                lock.release()

    def _again(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _bind(self, func: Any) -> Handler:
        if self.in_child:
            return self._without_gpu(func)
        if isinstance(func, HigherOrderOperator):
            return composites.higher_order(self._runner, func)
        handler = handler_of(self._runner, func)
        if may_be_in_place(func):
            handler = in_place(func, handler, self._again)
        if custom.is_custom(func):
            return custom.custom(self._runner, func, handler)
        handler = self._machine.values.work.counting(func, handler)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return noting_randomness(self._machine, func, handler)
        return handler

    def _without_gpu(self, func: Any) -> Handler:
        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            forks.check(self._storages, args, kwargs, self._machine.thread_state.destination)
            return func(*args, **kwargs)

        return handle
