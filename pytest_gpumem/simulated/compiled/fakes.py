"""Fake tensors of a GPU in a build that may have none.

Autograd's C++ reads the device of each tensor for its guard, and only builds with CUDA have one. So
to C++ fake tensors of a GPU are on ``meta``, as all tensors of a simulation are, and Python sees
``cuda``. Code that is compiled for a GPU never means ``meta`` itself, which stands for the GPU
everywhere in this module.

Source: torch/_subclasses/fake_tensor.py, meta_utils.py and fake_impls.py, torch 2.11 and 2.13.

Composite operators keep their gradients. For ``meta`` torch gives many of them a Python kernel: the
shapes of ``torch.where`` with a number, ``std`` or ``nll_loss``. Autograd's key of a device with
such a kernel no longer decomposes the operator, so Python's dispatcher would pass autograd by, and
nothing would be saved for backward. On CUDA they are decomposed.

Source: torch/_ops.py, ``resolve_key``; torch/_meta_registrations.py, ``activate_meta``; torch 2.11
and 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch._higher_order_ops.flex_attention
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from pytest_gpumem.late_modules import Context
from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.signatures import overload_of
from pytest_gpumem.simulated.surface.wrappers import faking, making, place_of

_PLACES = ("device", "fake_device", "_fake_device")


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Plan replacements that make fake tensors of the GPUs of ``machine``."""
    make = FakeTensor.__new__
    trace: Callable[..., GraphModule] = proxy_tensor.dispatch_trace
    move: Callable[..., Any] = torch.Tensor.to

    def new(
        cls: type, mode: Any = None, elem: Any = None, device: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if device is not None:
            device = place(machine, device)
        given = {name: kwargs[name] for name in _PLACES if kwargs.get(name) is not None}
        kwargs |= {name: place(machine, value) for name, value in given.items()}
        return make(cls, mode, elem, device, *args, **kwargs)

    def to(fake: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: indexed(machine, value) for name, value in kwargs.items()}
        return move(fake, *(indexed(machine, value) for value in args), **kwargs)

    def device(each: torch.Tensor) -> torch.device:
        found = place_of(each) or raw.device(each)
        block = machine.storages.of(each) if found == raw.META else None
        return found if block is None else block.device.torch_device

    def dispatch_trace(*args: Any, **options: Any) -> GraphModule:
        """Trace a graph that has ``cuda`` where C++ has reported ``meta``."""
        graph = trace(*args, **options)
        name_gpu(
            graph, lambda value: place(machine, value) if isinstance(value, torch.device) else value
        )
        return graph

    for name, value in (
        ("__new__", staticmethod(new)),
        ("is_cpu", property(lambda fake: fake.fake_device.type == "cpu")),
        ("get_device", lambda fake: -1 if fake.is_cpu else fake.fake_device.index),
        ("to", to),
        ("cuda", _to_gpu(machine, move)),
    ):
        patches.add(FakeTensor, name, value)
    patches.add(FunctionalTensor, "device", property(lambda each: place(machine, raw.device(each))))
    base = torch.Tensor
    patches.add(base, "_make_subclass", faking(base._make_subclass))
    # A subclass that holds fake tensors has their device; compiled code may hold others.
    patches.add(base, "_make_wrapper_subclass", making(machine, base._make_wrapper_subclass))
    patches.add(base, "device", property(device))
    patches.add(base, "is_cuda", property(lambda each: each.device.type == "cuda"))
    patches.add(base, "is_meta", property(lambda each: each.device.type == "meta"))
    patches.join_inherited(base)  # as the simulation's own, which come back while user code runs
    patches.add(FunctionalTensor, "cuda", _to_gpu(machine, FunctionalTensor.to))
    # While they are traced, numbers stay on the host, as in a build without CUDA.
    patches.add(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
    patches.add(torch._C, "_conv_determine_backend_memory_format", _convolution_format)
    patches.add(fake_tensor, "init_gpu_context", lambda device: None)
    patches.add(proxy_tensor, "dispatch_trace", dispatch_trace)


def place(machine: SimulatedMachine, device: Any) -> torch.device:
    """Return ``device`` as Python sees it: C++'s ``meta`` is the current GPU."""
    found: torch.device = torch.device(device)
    if found.type == "meta" or (found.type == "cuda" and found.index is None):
        found = machine.current.torch_device
    return found


def _to_gpu(machine: SimulatedMachine, to: Callable[..., Any]) -> Callable[..., Any]:
    def call(fake: FakeTensor, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device is None or isinstance(device, int):
            device = torch.device("cuda", machine.current_index if device is None else device)
        return to(fake, place(machine, device), *args, **kwargs)

    return call


def indexed(machine: SimulatedMachine, value: Any) -> Any:
    """Return ``value``, with an index if it names a GPU: C++ would ask the driver for one."""
    if value == "cuda" or (isinstance(value, torch.device) and value.type == "cuda"):
        return place(machine, value)
    return value


def are_of_gpu(values: Any) -> bool:
    """Return whether there is a tensor on a GPU in ``values``."""
    return any(isinstance(each, torch.Tensor) and each.is_cuda for each in tree_leaves(values))


def _convolution_format(input: torch.Tensor, weight: torch.Tensor, _: Any) -> torch.memory_format:
    """Return the format that cuDNN writes, also for symbolic sizes; ``torch._C`` assumes the CPU.

    Source: aten/src/ATen/native/ConvUtils.h, ``cudnn_conv_suggest_memory_format``.
    """
    if torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    found: torch.memory_format = suggest_memory_format(input)
    return found if found is not torch.contiguous_format else suggest_memory_format(weight)


def name_gpu(graph: GraphModule, named: Callable[[Any], Any]) -> None:
    """Replace the devices that operators of ``graph`` and its subgraphs get."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_method":
                    node.args = tree_map(named, node.args)
                node.args = tuple(
                    named(value) if isinstance(value, torch.device) else value
                    for value in node.args
                )
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": named(node.kwargs["device"])}
            module.recompile()


_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key


@contextmanager
def gradients_kept() -> Iterator[None]:
    """Decompose composites that have a Python kernel for ``meta`` inside, above autograd."""
    operators = _with_python_meta_kernel()
    for operator in operators:
        operator.py_kernels[DispatchKey.AutogradMeta] = operator.decompose
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator in operators:
            del operator.py_kernels[DispatchKey.AutogradMeta]
            operator._dispatch_cache.clear()


@cache
def _with_python_meta_kernel() -> tuple[OpOverload, ...]:
    """Return ATen's composite operators that have a Python kernel for ``meta``."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        operator = overload_of(name.removeprefix("aten::")) if name.startswith("aten::") else None
        # One with a kernel for meta in C++ has one for CUDA, too, and is not decomposed there.
        if (
            operator is not None
            and DispatchKey.Meta in operator.py_kernels
            and _has_kernel(operator.name(), "CompositeImplicitAutograd")
            and not any(_has_kernel(name, key) for key in ("Meta", "Autograd", "AutogradMeta"))
        ):
            found.append(operator)
    return tuple(found)


_FLEX = sys.modules["torch._higher_order_ops.flex_attention"]
_TRACES = "create_fw_bw_graph"
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def add_gradients(patches: Patches, tracer: Callable[[], Any], code: Context) -> None:
    """Replace the tracing of scores' gradients for FlexAttention that is not compiled.

    torch traces them while the program runs, with fake tensors, in a mode that takes the place of
    the simulation's own. The example of a gradient that the trace is given is no fake tensor, so it
    takes memory: inside ``code()`` operators run on a simulated GPU. Source:
    torch/_higher_order_ops/flex_attention.py (``create_fw_bw_graph``), torch 2.11 to 2.15.
    """
    trace = getattr(_FLEX, _TRACES)
    make = torch.empty_strided

    def empty_strided(*args: Any, **options: Any) -> Any:
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return make(*args, **options)
        with code():
            return torch.empty_strided(*args, **options)

    def create_fw_bw_graph(*args: Any) -> Any:
        tracing = tracer()
        if tracing.is_entered:  # Dynamo traces it, with fake tensors of its own
            return trace(*args)
        with (
            tracing.entered(),
            _disable_current_modes(),
            mock.patch.object(torch, "empty_strided", empty_strided),
        ):
            return trace(*args)

    patches.add(_FLEX, _TRACES, create_fw_bw_graph)
