"""The parts that follow values on a dry device, put together for each test."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import torch

from pytest_gpumem.dry.values.dispatch import follow_operators
from pytest_gpumem.dry.values.execution import Execution
from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.dry.values.known import DryValues
from pytest_gpumem.dry.values.memory import Memory
from pytest_gpumem.dry.values.reads import Reads
from pytest_gpumem.simulated.common.patching import Patches, having, patched_when_imported
from pytest_gpumem.simulated.common.raw import PLAIN, tensors_in
from pytest_gpumem.simulated.machine.notes import Notes
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.machine.storages import Storages
from pytest_gpumem.simulated.operators.custom_kernels import base_function
from pytest_gpumem.simulated.operators.triton_stores import Stores

_LAUNCHERS = {
    "triton.runtime.jit": "JITFunction",
    "torch._inductor.runtime.triton_heuristics": "CachingAutotuner",
}
"""Classes whose ``run`` launches a kernel with tensors among its arguments, by module.

Triton 3.2 to 3.9, torch 2.6 to 2.15.
"""
_OF_USER = "USER_AUTOTUNE"
"""Kind of a user's own kernel in compiled code (``HeuristicType`` of runtime/hints.py)."""


@contextmanager
def launches_seen(values: DryValues, graphs: Graphs) -> Iterator[None]:
    """Mark the tensors that Triton's kernels inside may write to as unknown in ``values``."""
    stores = Stores()

    def plan(patches: Patches, module: ModuleType) -> None:
        kind = getattr(module, _LAUNCHERS[module.__name__])
        run = kind.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(kernel, *args, **kwargs)
            name = getattr(getattr(kernel, "fn", None), "__name__", "of compiled code")
            values.uncomputed = values.uncomputed or f"the Triton kernel {name}"
            for tensor in tensors_in(_written(stores, kernel, args, kwargs)):
                if tensor.__class__ in PLAIN and tensor.is_cuda:
                    graphs.mark_unknown(tensor)
            return result

        patches.add(kind, "run", launch)

    with patched_when_imported(dict.fromkeys(_LAUNCHERS, plan)):
        yield


def _written(stores: Stores, kernel: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the arguments that ``kernel`` may write to: all of them if that is unknown.

    Inductor drops the source of its kernels, but names their arguments by use: ``in_ptr0`` is only
    read (``KernelArgs`` of torch/_inductor/codegen/common.py, torch 2.6 to 2.15).
    """
    function = base_function(kernel)
    if isinstance(function, FunctionType):
        names, written = list(inspect.signature(function).parameters), set(stores.of(kernel))
    elif getattr(getattr(kernel, "heuristic_type", None), "name", _OF_USER) == _OF_USER:
        return args, kwargs
    else:
        names = kernel.fn.arg_names
        written = {name for name in names if not name.startswith("in_ptr")}
        written |= set(kernel.mutated_arg_names)
    if len(args) > len(names):
        return args, kwargs
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given[name] for name in given.keys() & written]


_OWN = os.path.join(os.path.dirname(__file__), "")  # noqa: PTH118, PTH120 - as frames write it
_CALLED_BY_OWN = os.path.join("torch", "_ops.py")  # noqa: PTH118

Frame = dict[str, Any]


@contextmanager
def snapshots_without_own() -> Iterator[None]:
    """Remove this package's frames from the stacks in torch's snapshots inside.

    Followed operators pass through Python code (``dispatch.py``), which the allocator records with
    each allocation. Without it, the program's line is the innermost one, as on a GPU.
    """
    taken = torch._C._cuda_memorySnapshot

    def shortened(*args: Any) -> dict[str, Any]:
        snapshot = taken(*args)
        segments = snapshot.get("segments", [])
        blocks = [block for segment in segments for block in segment["blocks"]]
        traces = [entry for trace in snapshot.get("device_traces", []) for entry in trace]
        holders = (*segments, *blocks, *traces)
        # Entries with the same stack share one list.
        stacks = {id(each["frames"]): each["frames"] for each in holders if each.get("frames")}
        for frames in stacks.values():
            frames[:] = _programs(frames)
        return snapshot

    with having(torch._C, "_cuda_memorySnapshot", shortened):
        yield


def _programs(frames: list[Frame]) -> list[Frame]:
    """Return the frames, innermost first, that are neither of this folder nor called by it."""
    kept: list[Frame] = []
    is_own = False
    for frame in reversed(frames):
        name = frame["filename"]
        if name.endswith(".py"):
            is_own = name.startswith(_OWN) or (is_own and name.endswith(_CALLED_BY_OWN))
            if is_own:
                continue
        kept.append(frame)
    kept.reverse()
    return kept


class Follower:
    """A follower of the values of the tests on one device, one after the other."""

    def __init__(self, *, follows: bool, everything: bool, makes_up_integers: bool = True) -> None:
        self.notes = Notes()
        """Notes on the current test for readers of its numbers."""
        self._follows = follows
        self._memory = Memory(lambda size: self.reads.unknown_read(size))
        self.values = DryValues(self._memory, Storages(), self.notes, everything=everything)
        self.reads = Reads(
            self.values,
            lambda: self.following(of_torch=True),
            followed=follows,
            makes_up_integers=makes_up_integers,
        )
        self._graphs = Graphs(self._memory, self.values)
        self._execution = Execution(self._memory, self.values, self.reads, self._graphs)
        self._depth = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Follow the values inside."""
        if self._depth:
            yield
            return
        self._depth += 1
        self._memory.begin(everything=self.values.everything, followed=self._follows)
        self.values.resume()
        try:
            with ExitStack() as inside:
                inside.enter_context(self.reads.patched())
                inside.enter_context(launches_seen(self.values, self._graphs))
                if self._follows:
                    inside.enter_context(follow_operators(self._execution))
                    inside.enter_context(snapshots_without_own())
                    inside.enter_context(self._graphs.replays_computed())
                yield
        finally:
            self._memory.end()
            self._depth -= 1

    def following(self, *, of_torch: bool = False) -> AbstractContextManager[None]:
        """Return a context in which operators are followed, even if those of the test are not.

        With ``of_torch`` it starts faster, but may leave out other libraries' operators.
        """
        return (
            nullcontext() if self._follows else follow_operators(self._execution, of_torch=of_torch)
        )

    def begin(self) -> None:
        """Begin a test."""
        self._memory.renew()
        self.reads.begin()
        self.values.begin()

    @property
    def used_placeholder(self) -> bool:
        """Whether the current test has read an unknown value."""
        return self.reads.used_placeholder or self.notes.assumed
