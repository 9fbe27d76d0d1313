"""Collectives as ``ProcessGroupNCCL`` runs them: their memory, and the tensors kept until a wait.

Nothing is moved. Where the values that a rank sends are known, the other ranks are assumed to send
the same; all other results are unknown. A collective that is not asynchronous runs on
the current stream and keeps nothing; what an asynchronous one reads and writes is kept until
``wait()`` (``stashed_for_allocator_safety_``).

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (``collective``, ``allgather``,
``reduce_scatter``, ``barrier``, ``newLikeFlat``), Ops.cpp, Functional.cpp, torch 2.8 to 2.14.

A callback of a future runs on a stream of the pool, not the current one, and the memory of the
future's values is recorded as used on that stream: it is free again only when the host has seen
the stream's work done. Source: aten/src/ATen/core/ivalue_inl.h
(``ivalue::Future::invokeCallback``, ``synchronizeWithCurrentStreams``), torch 2.6 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Reducer, Work
from torch.futures import Future

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import is_internal, is_own, user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.distributed.alike import (
    BARRIER,
    COLLECTIVES,
    Collective,
    Transfer,
    kept,
    unchanged,
)
from pytest_gpumem.simulated.distributed.nccl import Communicator
from pytest_gpumem.simulated.execution.mode import ShapeExecution
from pytest_gpumem.simulated.gpu.releases import COPIES_ALONE, NCCL2
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.signatures import Args, Handler, Kwargs, named
from pytest_gpumem.simulated.operators.rules import Scratch


class _DoneFuture(Future[Any]):
    """A future that is already done, with its value: the results of a collective, or a callback's.

    The memory of a value is recorded as used on each stream that waits for it, or runs a callback.
    """

    def __init__(self, machine: SimulatedMachine, value: Any) -> None:
        super().__init__()
        self._machine = machine
        self.set_result(value)

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Run ``callback`` at once, on a stream of the pool."""
        streams, device = self._machine.streams, self._machine.current_index
        before = streams.current(device)
        streams.choose(device, streams.make(device, 0))
        try:
            self._use()
            return _DoneFuture(self._machine, callback(self))
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))  # as C++
            return failed
        finally:
            streams.choose(device, before)

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Run ``callback`` at once, on a stream of the pool."""
        self.then(callback)

    def wait(self) -> Any:
        """Return the value for the current stream."""
        self._use()
        return self.value()

    def _use(self) -> None:
        machine = self._machine
        for tensor in raw.tensors_in(self.value()):
            record = machine.storages.of(tensor)
            if record is not None and record.address:
                index = record.device.index
                stream = machine.streams.current(index)
                record.allocator.record_stream(record.address, stream, index)


_BARRIER_BYTES = 4
"""Bytes of the tensor that a barrier reduces: one float."""


_group_named: Callable[[str], Any] = vars(c10d)["_resolve_process_group"]
_create_work: Callable[[_DoneFuture], Work] = vars(c10d)["_create_work_from_future"]


_FUNCTIONAL = (
    *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    *("all_gather_into_tensor_out", "all_to_all_single", "broadcast", "broadcast_", "wait_tensor"),
)
"""Operators that consist of those above, and of factories of tensors like their inputs."""
_IN_CPP = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""Keys by which their one kernel for all devices is found."""


def _all_gathered(
    inputs: Sequence[torch.Tensor], group_size: int, group_name: str, *, gathers: bool = True
) -> list[torch.Tensor]:
    """Allocate the results of gathering, or of reducing and scattering, and run the collective."""
    given = [torch.view_as_real(one) if one.is_complex() else one for one in inputs]
    rows = [one.shape[0] * group_size if gathers else one.shape[0] // group_size for one in given]
    made = [one.new_empty((count, *one.shape[1:])) for one, count in zip(given, rows, strict=True)]
    group = _group_named(group_name)
    run = (
        group.allgather_into_tensor_coalesced if gathers else group.reduce_scatter_tensor_coalesced
    )
    work = run(made, given)
    for one in made:
        c10d._register_work(one, work)
    pairs = zip(made, inputs, strict=True)
    return [torch.view_as_complex(one) if like.is_complex() else one for one, like in pairs]


def _scattered(inputs: Sequence[torch.Tensor], reduce_op: str, *rest: Any) -> list[torch.Tensor]:
    return _all_gathered(inputs, *rest, gathers=False)


_ALLOCATING: Mapping[str, Callable[..., Any]] = {
    "all_gather_into_tensor": lambda input, *rest: _all_gathered([input], *rest)[0],
    "all_gather_into_tensor_coalesced": _all_gathered,
    "reduce_scatter_tensor": lambda input, *rest: _scattered([input], *rest)[0],
    "reduce_scatter_tensor_coalesced": _scattered,
}
"""Operators whose results C++ allocates on a device, which it finds to be ``meta``."""


_REDUCING = (
    *("allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
)
"""Methods of a group that take a reduction or options with one."""
_COPYING = ("reduce_scatter_", "_reduce_scatter_base_")
"""Operators that some releases replace by a copy in a group of one (``COPIES_ALONE``)."""
_TO_EACH = ("alltoall_", "alltoall_base_")
"""Operators in which each rank sends to every other one."""


class _Work(Work):
    """An asynchronous collective: it keeps its tensors alive until ``wait()`` is called."""

    def __init__(
        self,
        result: Sequence[torch.Tensor],
        waited: Callable[[_Work], None],
        machine: SimulatedMachine,
    ) -> None:
        super().__init__()
        self._machine = machine
        self._result = result
        self._waited = waited

    def wait(self, *_: Any) -> bool:
        """Order later work of the current stream after this one and drop the kept tensors."""
        self._waited(self)
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Any:
        self.wait()
        return _DoneFuture(self._machine, self.result())

    def result(self) -> list[torch.Tensor]:
        return list(self._result)

    def is_completed(self) -> bool:
        return True

    is_success = is_completed


class Collectives:
    """The collectives of one machine; ``execution`` runs its operators."""

    def __init__(
        self,
        machine: SimulatedMachine,
        execution: ShapeExecution,
        communicators: MutableMapping[str, Communicator],
    ) -> None:
        self._execution = execution
        self._machine = machine
        self._of = machine.storages.of
        self._operation = "SUM"
        """The reduction of a collective that C++ calls, as DDP does to find unused parameters."""
        self._has_result = True
        """Whether a work is asked for its results: C++ may keep one after it has waited for it."""
        self._communicators = communicators
        """Communicators that NCCL would have created by now, at their first use, by group name."""
        self._barriers = WeakKeyDictionary[ProcessGroup, Scratch]()
        """The number that the barriers of a group reduce, which it keeps."""
        self._pending: set[_Work] = set()
        """Works that have not been waited for."""

    def add_patches(self, patches: Patches) -> None:
        """Plan hooks that record the reduction, which the operators do not pass to Python.

        Collectives between the beginning and the end of coalescing are one work to wait for, like
        NCCL's; fake groups support neither.
        """
        earlier: set[_Work] = set()

        def reducing(reduce: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(self, "_operation", _operation((*args, *kwargs.values()))):
                return reduce(group, *args, **kwargs)

        def start_coalescing(group: Any, *_: Any) -> None:
            earlier.update(self._pending)

        def end_coalescing(group: Any, *_: Any) -> Work:
            works = self._pending - earlier
            earlier.clear()

            def waited(work: _Work) -> None:
                for each in works:
                    each.wait()

            return _Work((), waited, self._machine)

        def rebuild_buckets(rebuild: Any, reducer: Any) -> Any:
            """Free the old buckets, whose use on other streams ends before the next operator.

            Source: torch/csrc/distributed/c10d/reducer.cpp (``sync_bucket_indices``: the host waits
            just before they are freed), torch 2.6 to 2.15.
            """
            is_rebuilt = rebuild(reducer)
            if is_rebuilt:
                self._machine.streams.synchronize(self._machine.current_index)
            return is_rebuilt

        def verify(verify: Any, group: Any, tensors: Any, *args: Any) -> None:
            """Compare shapes on the GPU of ``tensors`` (verify_params_across_processes, C++)."""
            if self._machine.placement is not None:
                self._machine.placement.follow(tensors)
            verify(group, tensors, *args)

        for name in filter(vars(ProcessGroup).__contains__, _REDUCING):
            patches.wrap(ProcessGroup, name, reducing)
        patches.wrap(Reducer, "_rebuild_buckets", rebuild_buckets)
        patches.wrap(torch.distributed, "_verify_params_across_processes", verify)
        patches.add(ProcessGroup, "_start_coalescing", start_coalescing)
        patches.add(ProcessGroup, "_end_coalescing", end_coalescing)

    def bind(self) -> None:
        """Bind the operators to their handlers."""
        for name in COLLECTIVES:
            func = getattr(torch.ops.c10d, name).default
            self._execution.bind(func, self._handler(name, func))
        for name in _FUNCTIONAL:
            func = getattr(torch.ops._c10d_functional, name).default
            self._execution.bind(func, self._functional(func, func.redispatch, (_IN_CPP,)))
        for name, composite in _ALLOCATING.items():
            func = getattr(torch.ops._c10d_functional, name).default
            self._execution.bind(func, self._functional(func, composite))

    def _functional(
        self, func: Any, kernel: Callable[..., Any], first: tuple[Any, ...] = ()
    ) -> Handler:
        """Return a handler that runs C++'s kernel: that for ``meta`` would only make a result."""
        change = mock.patch.multiple

        def handle(args: Args, kwargs: Kwargs) -> Any:
            operation = named(func, args, kwargs).get("reduce_op", "").upper()
            with change(self, _operation=operation, _has_result=False), self._execution:
                return kernel(*first, *args, **kwargs)

        return handle

    def _handler(self, name: str, func: Any) -> Handler:
        collective = COLLECTIVES[name]
        defaults = {
            argument.name: argument.default_value
            for argument in func._schema.arguments
            if argument.has_default_value()
        }

        def handle(args: Args, kwargs: Kwargs) -> Any:
            given = defaults | named(func, args, kwargs)
            group = ProcessGroup.unbox(given["process_group"])
            version = self._machine.current.version
            copies = name in _COPYING and group.size() == 1 and COPIES_ALONE <= version < NCCL2
            sent = Transfer.of(collective, group, given, "SUM" if copies else self._operation)
            tensors = [*sent.written, *sent.read]  # none for a barrier
            if tensors and all(self._of(tensor) is None for tensor in tensors):
                result = func(*args, **kwargs)
                # Between CPU tensors: every rank's values are assumed to be these.
                if sent.size == 1:
                    kept(sent)
                if any(map(self._machine.storages.is_unknown_on_cpu, sent.read)):
                    for tensor in sent.written:
                        self._machine.storages.mark_unknown(tensor)
                return result
            known = self._communicators.get(group.group_name)
            to_each = name in _TO_EACH or (known is not None and known.to_each)
            self._communicators[group.group_name] = Communicator(group.size(), to_each)
            work = self._run(name, group, given, sent)
            has_result = len(func._schema.returns) > 1
            return (given[collective.written], work.boxed()) if has_result else work.boxed()

        return handle

    def _run(self, name: str, group: ProcessGroup, given: Mapping[str, Any], sent: Transfer) -> Any:
        machine, collective = self._machine, COLLECTIVES[name]
        device = machine.device_of(sent.written, sent.read)
        scratch = Scratch(device)
        if collective.flattened and device.version < NCCL2:
            for tensors in given[collective.flattened]:
                if len({tensor.shape for tensor in tensors}) == 1:
                    scratch.take(sum(tensor.nbytes for tensor in tensors))
        if name == BARRIER and device.version < NCCL2:
            scratch.take(_BARRIER_BYTES)
        elif name == BARRIER and group not in self._barriers:
            self._barriers[group] = Scratch(device, _BARRIER_BYTES)
        self._write_results(collective, sent)

        def end() -> None:
            scratch.free()
            if name == BARRIER:
                machine.streams.host_waits(machine.current_index)

        if not given.get("async_op", True):
            end()
            return _create_work(_DoneFuture(machine, list(sent.written)))
        kept_tensors = [*sent.read, *sent.written]

        def waited(work: _Work) -> None:
            kept_tensors.clear()
            self._pending.discard(work)
            end()

        work = _Work(sent.written if self._has_result else (), waited, machine)
        self._pending.add(work)
        return work

    def _write_results(self, collective: Collective, sent: Transfer) -> None:
        """Write the results that follow if every rank sends the same as this one."""
        tensors = sent.read or sent.written
        known = self._machine.values.of
        write = collective.results(sent)
        if write is None or not tensors or any(known(tensor) is None for tensor in tensors):
            self._machine.kernel_wrote(*sent.written)
            return
        with self._execution:
            write(sent)
        if write not in (unchanged, kept) and _is_users_own():
            self._machine.note(
                f"a collective at {user_line()} assumes that other ranks send what this one does"
            )


_FUNCTIONS = ("distributed_c10d.py", "c10d_logger.py")


def _is_users_own() -> bool:
    """Return whether code outside torch, not torch itself, called a collective's function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_own(file) and not file.endswith(_FUNCTIONS):
            return not is_internal(file)
        frame = frame.f_back
    return False


def _operation(arguments: tuple[Any, ...]) -> str:
    for argument in arguments:
        found = getattr(argument, "reduceOp", argument)
        if isinstance(found, (ReduceOp, ReduceOp.RedOpType)):
            return str(getattr(found, "op", found)).rpartition(".")[2]
    return ""
