"""While torch compiles: it sees itself as it is, fake tensors of a GPU, and that GPU's properties.

What answers for the GPU is replaced below ``torch.cuda`` (``torch._C._cuda_getDevice``, ...), so
Dynamo meets torch's own functions and knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch._inductor.codegen.cuda_combined_scheduling  # with what it imports of Triton, or not
import torch._inductor.codegen.triton
import torch._inductor.codegen.triton_combo_kernel
import torch._inductor.config
import torch._inductor.runtime.triton_heuristics
import torch._inductor.utils
import torch.utils._triton

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.compiled import fakes, gradients, wrapper
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

Bare = Callable[[], AbstractContextManager[object]]
"""Inside, torch is its own but for what answers for the GPU."""

SETTINGS: dict[str, Any] = {
    "compile_threads": 1,  # nothing is compiled
}
"""Of Inductor."""


class Tracing:
    """Lets torch compile for the GPUs of ``machine``; can be entered anew inside."""

    def __init__(self, machine: SimulatedMachine, bare: Bare) -> None:
        self._machine = machine
        self._bare = bare
        self._patches = Patches()
        fakes.plan(machine, self._patches)
        wrapper.plan(machine, self._patches)
        self._plan_gpu()
        self._is_entered = False

    def _plan_gpu(self) -> None:
        plan = self._patches.plan
        triton = torch.utils._triton
        plan(triton, "triton_hash_with_backend", lambda: "simulated")
        for guard in (torch.cuda.device, torch.cuda._DeviceGuard):
            plan(guard, "__enter__", lambda guard: None)
            plan(guard, "__exit__", lambda guard, *_: False)
        for owner, name in _measured():
            plan(owner, name, _innermost(getattr(owner, name)))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compile inside."""
        if self._is_entered:
            yield
            return
        self._is_entered = True
        try:
            with ExitStack() as inside:
                inside.enter_context(self._bare())
                inside.enter_context(gradients.kept())
                self._patches.apply()
                inside.callback(self._patches.undo)
                inside.enter_context(torch._inductor.config.patch(SETTINGS))
                yield
        finally:
            self._is_entered = False


def _measured() -> Iterator[tuple[Any, str]]:
    """Where measuring listens, which has nothing to hear while torch compiles."""
    yield torch.nn.Module, "__call__"
    yield torch.nn.Module, "_apply"
    yield torch.nn.Module, "__setstate__"
    yield torch.nn.Parameter, "__new__"
    for owner in (torch.autograd, torch.autograd.graph):
        yield owner, "_engine_run_backward"


def _innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def prepare() -> None:
    """Let torch remember its own functions for what they are; nothing is replaced meanwhile."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    trace_rules.get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    trace_rules.add(__name__.partition(".")[0])  # no frame of this package is compiled
