"""Collectives as ``ProcessGroupNCCL`` runs them: what they take, and what they keep until a wait.

Nothing is moved, so a result's values are unknown. A collective that is not asynchronous runs on
the current stream and keeps nothing; what an asynchronous one reads and writes is kept until
``wait()`` (``stashed_for_allocator_safety_``).

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (``collective``, ``allgather``,
``reduce_scatter``, ``barrier``, ``newLikeFlat``), Ops.cpp, torch 2.8 to 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch._C._distributed_c10d import FakeWork
from torch.futures import Future

from pytest_gpumem.simulated.common.nesting import tensors_in
from pytest_gpumem.simulated.operators.rules import Scratch

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.machine.dispatch import Dispatch, Handler
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_Arguments = Mapping[str, Any]
_BARRIER = 4
"""Bytes of the tensor that a barrier reduces: one float."""


class _Collective(NamedTuple):
    """What one operator of ``c10d`` does with its arguments, by the names in its schema."""

    written: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    flattened: str = ""
    """The lists of tensors of one size that it copies from or to a tensor that holds them all."""
    returned: str = ""
    """The argument that it returns beside the work."""
    is_awaited: bool = False
    """Whether the host waits in ``wait()``."""


_COLLECTIVES: Mapping[str, _Collective] = {
    "allreduce_": _Collective(written=("tensors",), returned="tensors"),
    "allreduce_coalesced_": _Collective(written=("tensors",)),
    "reduce_": _Collective(written=("tensors",)),
    "broadcast_": _Collective(written=("tensors",), returned="tensors"),
    "allgather_": _Collective(
        ("output_tensors",), ("input_tensors",), "output_tensors", returned="output_tensors"
    ),
    "_allgather_base_": _Collective(
        ("output_tensor",), ("input_tensor",), returned="output_tensor"
    ),
    "allgather_into_tensor_coalesced_": _Collective(("outputs",), ("inputs",)),
    "allgather_coalesced_": _Collective(("output_lists",), ("input_list",)),
    "reduce_scatter_": _Collective(
        ("output_tensors",), ("input_tensors",), "input_tensors", returned="output_tensors"
    ),
    "_reduce_scatter_base_": _Collective(
        ("output_tensor",), ("input_tensor",), returned="output_tensor"
    ),
    "reduce_scatter_tensor_coalesced_": _Collective(("outputs",), ("inputs",)),
    "gather_": _Collective(("output_tensors",), ("input_tensors",)),
    "scatter_": _Collective(("output_tensors",), ("input_tensors",), returned="output_tensors"),
    "alltoall_": _Collective(("output_tensors",), ("input_tensors",), returned="output_tensors"),
    "alltoall_base_": _Collective(("output",), ("input",)),
    "barrier": _Collective(is_awaited=True),
    "send": _Collective(read=("tensors",)),
    "recv_": _Collective(written=("tensors",)),
    "recv_any_source_": _Collective(written=("tensors",)),
}


@dataclass(eq=False)
class _Kept:
    """What a collective keeps until somebody waits for it, and its result beyond that."""

    tensors: Sequence[torch.Tensor]
    result: Sequence[torch.Tensor]
    scratch: Scratch
    is_awaited: bool

    def release(self) -> None:
        """Keep nothing but the result any more."""
        self.tensors = ()
        self.scratch.free()


class Collectives:
    """The collectives of one machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._of = machine.storages.of
        self._kept: WeakKeyDictionary[Any, _Kept] = WeakKeyDictionary()
        self._latest: Any = None
        """The work that was made last: after the operator C++ hands the same object out."""

    def bind(self, dispatch: Dispatch) -> None:
        """Let ``dispatch`` run the operators here."""
        for name, collective in _COLLECTIVES.items():
            func = getattr(torch.ops.c10d, name).default
            dispatch.bind(func, self._handler(func, collective))

    def plan(self, patches: Patches) -> None:
        """Let works say when they are done, and what their results are."""
        wait, get_future, result = FakeWork.wait, FakeWork.get_future, FakeWork.result
        kept = self._kept

        def waiting(work: Any, *args: Any) -> bool:
            self._wait(work)
            return bool(wait(work, *args))

        def synchronize(work: Any) -> None:
            self._wait(work)

        def future(work: Any) -> Any:
            one = kept.get(work)
            if one is None:
                return get_future(work)
            done: Future[Any] = Future()
            done.set_result(list(one.result))
            self._wait(work)
            return done

        def results(work: Any) -> Any:
            one = kept.get(work)
            return result(work) if one is None else list(one.result)

        for name, function in {
            "wait": waiting,
            "synchronize": synchronize,
            "block_current_stream": synchronize,
            "is_completed": lambda work: True,
            "is_success": lambda work: True,
            "get_future": future,
            "result": results,
        }.items():
            if hasattr(FakeWork, name):
                patches.plan(FakeWork, name, function)

    def _wait(self, work: Any) -> None:
        kept = self._kept.get(work)
        if work is self._latest:
            self._latest = None
        if kept is not None:
            kept.release()
            if kept.is_awaited:
                self._machine.streams.host_waits(self._machine.current_index)

    def _handler(self, func: Any, collective: _Collective) -> Handler:
        names = [argument.name for argument in func._schema.arguments]
        defaults = {
            argument.name: argument.default_value
            for argument in func._schema.arguments
            if argument.has_default_value()
        }

        def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            written = list(tensors_in([given[name] for name in collective.written]))
            read = list(tensors_in([given[name] for name in collective.read]))
            if not self._is_of_gpu(func, written + read):
                return self._on_host(func, args, kwargs, written, read)
            work = self._run(collective, given, written, read)
            if not collective.returned:
                return work.boxed()
            return given[collective.returned], work.boxed()

        return handle

    def _is_of_gpu(self, func: Any, tensors: Sequence[torch.Tensor]) -> bool:
        if not tensors:  # a barrier
            return True
        return any(self._of(tensor) is not None for tensor in tensors)

    def _run(
        self,
        collective: _Collective,
        given: _Arguments,
        written: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
    ) -> Any:
        scratch = Scratch(self._machine.device_of(written, read))
        if collective.flattened:
            for tensors in given[collective.flattened]:
                if len({tensor.shape for tensor in tensors}) == 1:
                    scratch.take(sum(tensor.nbytes for tensor in tensors))
        if collective.is_awaited:
            scratch.take(_BARRIER)
        self._machine.kernel_wrote(*written)
        work = FakeWork()
        if given.get("async_op", True) or collective.is_awaited:
            self._kept[work] = _Kept([*read, *written], written, scratch, collective.is_awaited)
            self._latest = work
        else:
            scratch.free()
        return work

    def _on_host(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[torch.Tensor],
        read: Sequence[torch.Tensor],
    ) -> Any:
        """Run it between CPU tensors, which have values: every rank's are taken to be these."""
        result = func(*args, **kwargs)
        if any(map(self._machine.storages.is_on_host, read)):
            for tensor in written:
                self._machine.storages.adopt_on_host(tensor)
        return result
