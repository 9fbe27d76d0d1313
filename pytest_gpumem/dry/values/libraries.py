"""Operators that run other operators: composite ones, those of other libraries, and collectives.

Torch operators that a library's C++ code calls are followed, its own CUDA kernels are not. Those
write to tensors that the code has made before, such as the mask of kept boxes in torchvision's
``nms`` (torchvision/csrc/ops/cuda/nms_kernel.cu, 0.29), whose zeros are then not the true values.
If the library has a CPU kernel, that computes the values of the result.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from pytest_gpumem.dry.values.dispatch import not_followed
from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.dry.values.known import DryValues
from pytest_gpumem.dry.values.memory import Memory
from pytest_gpumem.simulated.common.raw import tensors_in
from pytest_gpumem.simulated.distributed.alike import COLLECTIVES, Collective, Transfer
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs, named
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.values.errors import SimulationError

_OF_C10D = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of operators composed of operators of c10d."""
_COLLECTIVE = frozenset({"c10d", "symm_mem"})
"""Namespaces of collectives."""


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Parts:
    """An operator composed of others that are followed; a library's results are unknown."""

    def __init__(self, func: Any, graphs: Graphs | None) -> None:
        self._func = func
        self._graphs = graphs
        self._operator = Operator.of(func)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the kernel at the key below, not this one again."""
        func = self._func
        if is_composite(func):
            result = func._op_dk(_COMPOSITE, *args, **kwargs)
        else:  # a kernel in Python, which torch calls by a set of keys only
            keys = torch._C.DispatchKeySet(_key_of(args, kwargs))
            result = func.redispatch(keys, *args, **kwargs)
        self._write(result, args, kwargs)
        return result

    def _write(self, result: Any, args: Args, kwargs: Kwargs) -> None:
        """Mark the values written by the operator as unknown, also at replays of a capture."""
        if self._graphs is not None:
            for tensor in tensors_in((result, self._operator.targets(args, kwargs))):
                if tensor.is_cuda:
                    self._graphs.mark_unknown(tensor)


def is_composite(func: Any) -> bool:
    """Return whether torch composes ``func`` of others on a GPU, unlike ``silu_backward``."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), _COMPOSITE.name) and not has_kernel(func.name(), "CUDA")


def _key_of(args: Args, kwargs: Kwargs) -> Any:
    """Return the backend that runs an operator of other libraries."""
    on_gpu = any(tensor.is_cuda for tensor in tensors_in((args, kwargs)))
    device = kwargs.get("device")
    on_gpu = on_gpu or (isinstance(device, torch.device) and device.type == "cuda")
    return torch._C.DispatchKey.CUDA if on_gpu else torch._C.DispatchKey.CPU


class _Call(threading.local):
    """The call of a library's C++ operator that a thread is in."""

    is_under_way = False
    count: int | None = None
    """Length of the result, if the CPU has computed it."""
    stopped: SimulationError | None = None
    """The error that ended the call; C++ may turn it into another exception."""


class _Kernels(Parts):
    """An operator of a library with a kernel in C++."""

    def __init__(self, func: Any, graphs: Graphs, values: DryValues, call: _Call) -> None:
        super().__init__(func, graphs)
        self._values = values
        self._call = call

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the kernel, and take the values of the results from the library's CPU kernel."""
        known = list(tensors_in(self._computed(args, kwargs)))
        call, before = self._call, vars(self._call).copy()
        call.is_under_way, call.stopped = True, None
        call.count = len(known[0]) if known and known[0].dim() else None
        try:
            result = super().__call__(args, kwargs)
        except Exception:
            if call.stopped is not None:
                raise call.stopped from None
            raise
        finally:
            vars(call).clear()
            vars(call).update(before)
        made = list(tensors_in(result))
        if len(made) == len(known):
            with not_followed(), torch._C._DisableTorchDispatch():
                for tensor, value in zip(made, known, strict=True):
                    self._values.keep(tensor, value)
        return result

    def _computed(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the results on the CPU; ``None`` if unknown, or if it writes to arguments."""
        given = list(tensors_in((args, kwargs)))
        if self._operator.written or not any(tensor.is_cuda for tensor in given):
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        with not_followed(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self._values.end()
            self._values.track(tensor for tensor in given if tensor.is_cuda)
            return self._values.computed(self._operator, args, kwargs)


class _Collective(Parts):
    """A collective of c10d, computed as if the other ranks sent the same values as this one."""

    def __init__(self, func: Any, graphs: Graphs, memory: Memory) -> None:
        super().__init__(func, graphs)
        self._memory = memory

    def _write(self, result: Any, args: Args, kwargs: Kwargs) -> None:
        given = named(self._func, args, kwargs)
        group: Any = torch._C._distributed_c10d.ProcessGroup.unbox(given["process_group"])
        on_gpu = any(tensor.is_cuda for tensor in tensors_in(args))
        # Gloo's threads copy its results later, as ordinary copies:
        # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, torch 2.6 to 2.15.
        if not on_gpu or str(group._get_backend(torch.device("cuda")).name()) == "gloo":
            return
        collective = COLLECTIVES.get(self._func._opname, Collective())
        operation = _operation(given, self._memory.reduction())
        sent = Transfer.of(collective, group, given, operation)
        write = collective.results(sent)
        if write is None:
            super()._write(result, args, kwargs)
            return
        # Autograd does not check the version of ``data``.
        data = [tensor.data for tensor in sent.written]
        with torch.no_grad():
            write(sent._replace(written=data))


_OPERATIONS = ("SUM", "PRODUCT", "MAX", "MIN", "AVG")
"""Names of reductions by ``ncclRedOp_t`` (nccl.h); higher numbers are operations with a factor,
which NCCL creates at run time."""


def _operation(given: Mapping[str, Any], number: int) -> str:
    """Return the name of a call's reduction; ``number`` is its ``ncclRedOp_t``."""
    if given.get("reduce_op") is None:
        return ""
    return _OPERATIONS[number] if number < len(_OPERATIONS) else "PREMUL_SUM"


class Libraries:
    """The operators of other libraries on one device."""

    def __init__(self, values: DryValues, graphs: Graphs, memory: Memory) -> None:
        self._values = values
        self._graphs = graphs
        self._memory = memory
        self._call = _Call()

    def handler_of(self, func: Any) -> Parts:
        """Return a handler of ``func``."""
        if func._schema.name in OPDEFS or func.namespace in _OF_C10D:
            return Parts(func, None)
        if func.namespace in _COLLECTIVE:
            has_group = any(each.name == "process_group" for each in func._schema.arguments)
            if has_group and func.namespace == "c10d":
                return _Collective(func, self._graphs, self._memory)
            return Parts(func, self._graphs)
        in_python = f"{func.namespace}/{func._schema.name.partition('::')[2]}"
        if is_composite(func) or f"{in_python}/CUDA" in torch.library._impls:
            return Parts(func, self._graphs)
        return _Kernels(func, self._graphs, self._values, self._call)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Record the error of an operator inside, which ends the library's call around it."""
        try:
            yield
        except SimulationError as error:
            self._call.stopped = error
            raise

    def element_count(self) -> Sequence[int] | None:
        """Return the number of elements that an operator with unknown values finds.

        It is the length of the result of the library's call around it; ``None`` if unknown.
        """
        return None if self._call.count is None else [self._call.count]

    def forget_made(self, operator: Operator, result: Any) -> None:
        """Forget the values of a new tensor inside a library's call: its kernel may write to it."""
        if self._call.is_under_way and (operator.makes or operator.name == "aten::clone"):
            for tensor in tensors_in(result):
                if tensor.is_cuda:
                    self._values.mark_unknown(tensor)
