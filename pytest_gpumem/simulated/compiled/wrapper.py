"""The environment of a generated wrapper: memory of the simulated GPU, and kernels without effect.

Inductor makes a module of Python for each graph. It takes memory from ``_empty_strided_cuda``,
calls libraries through ATen's operators, and gets its Triton kernels from ``AsyncCompile``, as
source. Where Triton is not installed, the names that Inductor writes into that source stand in for
it; the kernels are never compiled.

Source: torch/_inductor/codegen/wrapper.py, async_compile.py and runtime/triton_compat.py, and
torch/utils/_triton.py, torch 2.11 and 2.13.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
from torch._inductor import select_algorithm
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import triton_utils
from torch._inductor.codegen.common import WorkspaceArg
from torch._inductor.codegen.wrapper import AllocateLine, PythonWrapperCodegen
from torch._inductor.ir import ExternKernel
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator, OpOverload

from pytest_gpumem.simulated.common.callsite import (
    COMPUTED,
    Purpose,
    SourceLine,
    is_internal,
    running,
    shown_operator,
)
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.compiled.settings import launched
from pytest_gpumem.values.operator_names import FUSED


def add_patches(patches: Patches) -> None:
    """Plan the names that wrappers load, and changes to their source."""
    patches.add(torch._C._dynamo.guards, "_empty_strided_cuda", WrapperAllocator())
    patches.add(
        torch._C._dynamo.guards,
        "_empty_strided_cpu_pinned",
        lambda *layout: torch.empty_strided(*layout[:2], dtype=layout[2], pin_memory=True),
    )
    patches.add(AsyncCompile, "triton", lambda _, name, source, **__: Kernel(name, source))
    for name, write in (
        ("make_buffer_allocation", _with_origin),
        ("generate_extern_kernel_alloc", _between_origins),
        ("generate_fallback_kernel", _between_origins),
    ):
        patches.wrap(PythonWrapperCodegen, name, write)


class WrapperAllocator:
    """``empty_strided_cuda`` of a wrapper, with the purpose of the next allocation."""

    def of(self, operators: tuple[str, ...], place: SourceLine | None) -> None:
        """Set the purpose of the next allocation: the results of ``operators`` at ``place``."""
        running.purpose = Purpose(_together(operators), COMPUTED, place)

    def done(self) -> None:
        """Clear the purpose."""
        running.purpose = None

    def __call__(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Allocate memory of the current GPU."""
        # Looked up when it is called: a wrapper outlives the simulation that it was made in.
        try:
            return torch.empty_strided(size, stride, dtype=dtype, device="cuda")
        finally:
            running.purpose = None


@cache
def _together(operators: tuple[str, ...]) -> str:
    """Return the operators as users call them: ``torch.softmax + torch.dropout, fused``."""
    names = list(dict.fromkeys(map(shown_operator, operators)))
    return " + ".join(names) + (FUSED if len(names) > 1 else "")


_TAKES = "empty_strided_cuda"


def _with_origin(write: Callable[..., str], codegen: Any, buffer: Any) -> str:
    line = write(codegen, buffer)
    origin = origin_of(_nodes_of(codegen, buffer))
    # The written line stays as it is: tests of compiled code read it.
    has_origin = origin is not None and f"{_TAKES}(" in line
    return f"{_TAKES}.of{origin}; {line}" if has_origin else line


def _nodes_of(codegen: Any, buffer: Any) -> Iterable[torch.fx.Node]:
    """Return the nodes that ``buffer`` is computed by, in Inductor's graph.

    A library's kernel counts as its own operator only. A workspace belongs to the kernel that uses
    it, and the copy of a graph's input in a library's layout to its readers.
    """
    if isinstance(buffer, WorkspaceArg):
        lines = (line for line in codegen.lines if isinstance(line, AllocateLine))
        step = next(line.scheduler_node_index for line in lines if line.node is buffer)
        return _nodes_of_steps([V.graph.scheduler.nodes[step]])
    nodes = _computed_by(buffer)
    if all(node.op == "placeholder" for node in nodes):
        users = V.graph.scheduler.name_to_buf[buffer.get_name()].users
        return _nodes_of_steps(user.node for user in users)
    return nodes


def _nodes_of_steps(steps: Iterable[Any]) -> list[torch.fx.Node]:
    """Return the nodes that these steps of Inductor's scheduler compute; outputs compute none."""
    scheduled = [step for step in steps if isinstance(step, BaseSchedulerNode)]
    parts = [part.node for step in scheduled for part in step.get_nodes() if part.node is not None]
    return [node for part in parts for node in _computed_by(part)]


def _computed_by(operation: Any) -> Collection[torch.fx.Node]:
    nodes: Collection[torch.fx.Node] = operation.get_origins()
    if isinstance(operation, ExternKernel) and nodes:
        return [operation.origin_node or max(nodes)]
    return nodes


def _between_origins(write: Callable[..., None], codegen: Any, node: Any, *args: Any) -> None:
    origin = origin_of(_nodes_of(codegen, node))
    if origin is not None:
        codegen.writeline(f"{_TAKES}.of{origin}")
    write(codegen, node, *args)
    if origin is not None:
        codegen.writeline(f"{_TAKES}.done()")


def origin_of(nodes: Iterable[torch.fx.Node]) -> tuple[tuple[str, ...], SourceLine | None] | None:
    """Return the operators that ``nodes`` compute together, and their filename, line and function.

    The line is that of the last node with user code, ``None`` if no node has any, as in torch's own
    modules. The result is ``None`` if there is no operator.
    """
    order = sorted(nodes)
    operators = [node.meta.get("original_aten") or node.target for node in order]
    computing = [each for each in operators if not getattr(each, "is_view", False)]
    # Other targets compute sizes.
    names = dict.fromkeys(
        each._schema.name if isinstance(each, OpOverload) else each.name()
        for each in computing or operators
        if isinstance(each, (OpOverload, HigherOrderOperator))
    )
    places = [place for node in order if (place := _place(node.stack_trace)) is not None]
    return (tuple(names), places[-1] if places else None) if names else None


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def _place(stack: str | None) -> SourceLine | None:
    """Return the innermost frame outside torch."""
    for filename, line, function in reversed(_FRAME.findall(stack or "")):
        if not is_internal(filename):
            return filename, int(line), function.strip()
    return None


class Kernel:
    """A Triton kernel of Inductor's: its launch writes values that are not computed."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self._source = source

    def run(self, *args: Any, stream: Any = None, **options: Any) -> None:
        """Launch the kernel: tensors that it writes to have unknown values from then on."""
        if launched.wrote is not None:
            launched.wrote(*(args[at] for at in self._outputs if at < len(args)))

    @cached_property
    def _outputs(self) -> list[int]:
        """The positions of the arguments that it writes to."""
        found = re.search(rf"^def {re.escape(self.name)}\(([^)]*)\)", self._source, re.MULTILINE)
        names = found[1].split(",") if found else []
        return [at for at, name in enumerate(names) if name.strip().startswith(_WRITTEN)]


_WRITTEN = ("out_ptr", "in_out_ptr")


_TRITON = "triton"

_ATTRIBUTES: dict[str, dict[str, Any]] = {
    _TRITON: {"__version__": "3.5.0"},
    f"{_TRITON}.backends": {"backends": {"nvidia": None}},
    f"{_TRITON}.backends.compiler": {},
    f"{_TRITON}.compiler": {},
    f"{_TRITON}.compiler.compiler": {},
    f"{_TRITON}.language": {"dtype": type("dtype", (), {})},
}
"""By module: the attributes that are read of it."""


@contextmanager
def standing_in() -> Iterator[None]:
    """Make ``import triton`` succeed inside, if Triton is not installed."""
    if _TRITON in sys.modules or importlib.util.find_spec(_TRITON) is not None:
        yield
        return
    made = {name: ModuleType(name) for name in _ATTRIBUTES}
    for name, module in made.items():
        vars(module).update(_ATTRIBUTES[name], __path__=[], __spec__=ModuleSpec(name, None))
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    sys.modules.update(made)
    _forget_answers()
    try:
        with (
            mock.patch.object(triton_utils, "AttrsDescriptorWrapper", _attributes),
            mock.patch.object(select_algorithm, "PyCodeCache", _Sources),
        ):
            yield
    finally:
        for name in made:
            del sys.modules[name]
        _forget_answers()


def _attributes(
    divisible_by_16: Any = (), equal_to_1: Any = (), pointer_range_32: Any = ()
) -> dict[Any, Any]:
    """Return Inductor's attributes of kernel arguments for a Triton of 2025 (runtime/hints.py)."""
    return {(position,): [["tt.divisibility", 16]] for position in divisible_by_16}


class _Sources:
    """``PyCodeCache`` for kernels made of templates, which are read and not run."""

    @staticmethod
    def load(source: str, extra: str = "", **_: Any) -> ModuleType:
        key, path = PyCodeCache.write(source, extra)
        module = ModuleType(f"{__name__}.{key}")
        vars(module).update(__file__=path, key=key)
        return module


def _forget_answers() -> None:
    """Clear torch's cached answers, under many names, to whether there is a Triton."""
    for function in vars(torch.utils._triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
