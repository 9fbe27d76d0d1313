"""In-place operations of autograd's engine and formulas on a GPU.

Under a dispatch mode, and for ``meta`` tensors, they take out-of-place paths meant for tensor
subclasses. Each entry recognises one of these calls and names the in-place operator that CUDA runs.

Source: torch/csrc/autograd/input_buffer.cpp (accumulate, can_accumulate_inplace),
FunctionsManual.cpp and aten/src/ATen/native/ReduceOps.cpp, TensorAdvancedIndexing.cpp, Loss.cpp
(every use of areAnyTensorSubclassLike and isTensorSubclassLike), torch 2.6 to 2.15.

Running torch's own samples of every differentiable operator (torch.testing._internal.opinfo) with a
dispatch mode and without shows the same list on 2.13. Besides, only formulas differ that depend on
values, as those of ``prod`` and of ``masked_fill`` with a tensor, and of decompositions (eig, eigh,
householder_product, ormqr, matrix_exp): these stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.signatures import Args, Kwargs
from pytest_gpumem.simulated.operators.layout import is_dense
from pytest_gpumem.simulated.operators.rules import Composite, decompose, is_traced

InPlace = Callable[[tuple[Any, ...], str], OpOverload | None]
"""(arguments, name of the running autograd node) -> the operator CUDA runs, or ``None``."""

_aten = torch.ops.aten
_ENGINE_RUNS = graph._engine_run_backward.__code__


def in_formula(caller: FrameType | None) -> bool:
    """Return whether the engine, or one of its C++ formulas, made the call from frame ``caller``.

    Python in between (custom functions, hooks, checkpointing) leaves a frame of its own.
    """
    return (
        caller is not None
        and caller.f_code is _ENGINE_RUNS
        and torch._C._current_graph_task_id() != -1
    )


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    storage = int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    return tensor._use_count(), storage  # type: ignore[attr-defined]  # not in the stubs


class _Count(TorchDispatchMode):
    seen = (0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and skipping it would import it

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if func is _aten.add.Tensor:
            self.seen = _references(args[0])
        return func(*args, **(kwargs or {}))


@cache
def references_of_sole_owner() -> tuple[int, int]:
    """Return the references to a tensor, and to its storage, if only the engine's buffer has it.

    They depend on how torch wraps tensors for Python, so they are measured, not written down: once,
    when a simulation begins. A backward pass starts the engine's threads, and a process that has
    them cannot be forked, so importing this module does not run one.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        root = leaf.exp()
        twice = root.sin() * root.cos()
    count = _Count()  # type: ignore[no-untyped-call]  # torch's constructor
    with count:
        torch.autograd.grad(twice, leaf)
    return count.seen


def _is_temporary(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False  # it has no storage of its own
    tensor_uses, storage_uses = _references(tensor)
    of_owner = references_of_sole_owner()
    return tensor_uses <= of_owner[0] and storage_uses <= of_owner[1]


def _accumulation(args: Args, node: str) -> OpOverload | None:
    # The engine adds a gradient to the one its buffer already holds for the same input of a node.
    if torch.is_grad_enabled() or len(args) != 2 or node == _LEAF:
        return None
    if node.startswith(_FORMULAS_THAT_ADD) or "BackwardBackward" in node:
        return None
    if node in _MEANS_TOO and not _additions.count():
        return None
    held, new = args
    if not isinstance(new, torch.Tensor) or held.shape != new.shape or held.dtype != new.dtype:
        return None
    return _aten.add_.Tensor if _is_temporary(held) and is_dense(held) else None


_LEAF = "torch::autograd::AccumulateGrad"
"""A leaf's node, which adds a dense gradient to a sparse one out of place."""

_FORMULAS_THAT_ADD = (
    *("Atan2", "Logcumsumexp", "LinalgEig", "LinalgSvd", "LinalgQr", "LinalgLu", "SpecialI1E"),
    *("SpecialModifiedBesselK1", "Mvlgamma", "LinalgCholesky", "LinalgPinv", "LinalgLstsq"),
    *("LinalgPolar", "LuUnpack", "TriangularSolve", "CholeskyBackward0"),
)
"""Nodes whose own formula adds two tensors; the engine's addition after it stays out of place."""

_MEANS_TOO = frozenset({"VarMeanBackward0", "StdMeanBackward0"})
"""Nodes whose formula adds the gradient of a mean to another one, before the engine adds."""


class _Calls(threading.local):
    """Calls that the running node has made."""

    run = (-1, -1)
    """The graph task and the number of the node that called last."""
    before = 0

    def count(self) -> int:
        """Count a call; return how many the node has made before."""
        node = torch._C._current_autograd_node()
        run = torch._C._current_graph_task_id(), -1 if node is None else int(node._sequence_nr())
        self.before = self.before + 1 if run == self.run else 0
        self.run = run
        return self.before


_additions, _products = _Calls(), _Calls()


def _in(nodes: str, operator: OpOverload) -> InPlace:
    names = frozenset(nodes.split())
    return lambda args, node: operator if node in names else None


_SELECTIONS = (
    "MaxBackward0 MinBackward0 TopkBackward0 SortBackward0 SortBackward1 KthvalueBackward0 "
    "MedianBackward1 NanmedianBackward1 ModeBackward0"
)
_WHOLE_SELECTIONS = "MaxBackward1 MinBackward1 MedianBackward0 NanmedianBackward0"
_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
_SINCE_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether the torch that runs has the formulas of 2.14."""
_CHOICES = (
    "Atan2Backward0 ClampBackward0 ClampMaxBackward1 ClampMinBackward1 MaximumBackward0 "
    "MinimumBackward0" + (" FmaxBackward0 FminBackward0" if _SINCE_2_14 else "")
)
"""Nodes that pass a gradient on to one of two tensors, and fill the other's with zeros."""


def _product(args: Args, node: str) -> OpOverload | None:
    if torch.is_grad_enabled():
        return None
    if node == "BinaryCrossEntropyBackward0":
        return _aten.mul_.Tensor if _is_temporary(args[0]) else None
    if node != _LOGITS:
        return None
    running: Any = torch._C._current_autograd_node()
    pos_weight = running._saved_pos_weight
    if pos_weight is not None:
        # torch multiplies its own results in place, but never pos_weight.
        is_weight = _storage(pos_weight) == _storage(args[0])
        return None if is_weight else _aten.mul_.Tensor
    # By the input: times the gradient, times the weight. By the target: a product of its own first.
    by_input = 1 + (running._saved_weight is not None) if running.next_functions[0][0] else 0
    return None if _products.count() == by_input else _aten.mul_.Tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


IN_PLACE: dict[str, InPlace] = {
    "aten.add.Tensor": _accumulation,
    "aten.scatter.src": _in(_SELECTIONS, _aten.scatter_.src),
    "aten.scatter_add.default": _in(
        "GatherBackward0 CummaxBackward0 CumminBackward0", _aten.scatter_add_.default
    ),
    "aten.index_put.default": _in("IndexBackward0 UnsafeIndexBackward0", _aten.index_put_.default),
    "aten.index_add.default": _in("IndexSelectBackward0", _aten.index_add_.default),
    "aten.put.default": _in("TakeBackward0", _aten.put_.default),
    "aten.masked_scatter.default": _in("MaskedSelectBackward0", _aten.masked_scatter_.default),
    "aten.index_fill.int_Tensor": _in("TraceBackward0", _aten.index_fill_.int_Tensor),
    "aten.index_fill.int_Scalar": _in("TraceBackward0", _aten.index_fill_.int_Scalar),
    "aten.logical_and.default": _in(
        _WHOLE_SELECTIONS if _SINCE_2_14 else f"{_WHOLE_SELECTIONS} ClampBackward0",
        _aten.logical_and_.default,
    ),
    "aten.logical_or.default": _in(
        "" if _SINCE_2_14 else "ClampBackward0", _aten.logical_or_.default
    ),
    "aten.masked_fill.Scalar": _in(_CHOICES, _aten.masked_fill_.Scalar),
    "aten.sub.Tensor": lambda args, node: (
        _aten.sub_.Tensor if node == _LOGITS and not torch.is_grad_enabled() else None
    ),
    "aten.mul.Tensor": _product,
}
"""By overload: which in-place operator CUDA runs instead, given arguments and node."""


ACCUMULATED = frozenset({"aten.linalg_vector_norm.default", "aten.sum.dim_IntList"})
"""Overloads that a formula calls with the type which sums of a device have (renorm_backward)."""
_SUMS_BY_DEVICE = "RenormBackward0"
_ON_CUDA = {torch.float64: torch.float32, torch.complex128: torch.complex64}
"""By the type in which the CPU sums (AccumulateType.h): CUDA's, for narrower numbers."""


def with_cuda_sums(given: Tensor, kwargs: Kwargs, node: str) -> dict[str, Any]:
    """Return the arguments with CUDA's type of sums: that of ``meta`` tensors is the CPU's."""
    dtype = kwargs.get("dtype")
    if node == _SUMS_BY_DEVICE and dtype in _ON_CUDA and dtype is not given.dtype:
        return {**kwargs, "dtype": _ON_CUDA[dtype]}
    return kwargs


def cumprod_backward(gpu: GPU, grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    """Run ``aten::cumprod_backward`` (ReduceOps.cpp) for an input in which no element is zero.

    Nothing is known of elements that a compiler traces (areAnyTensorSubclassLike).
    """
    if is_traced(input):
        return decompose(_aten.cumprod_backward.default, grad, input, dim, output)
    if input.numel() <= 1 or input.shape[dim] == 1:
        return grad
    weighted = output.conj() * grad
    is_zero = input == 0
    is_zero.any()
    gpu.waits()
    # C++ keeps the temporaries of an expression until its end.
    flipped = weighted.flip(dim)
    summed = flipped.cumsum(dim)
    reversed_sum = summed.flip(dim)
    del summed, flipped
    return reversed_sum.div(input.conj())


ABOVE_AUTOGRAD: dict[str, Composite] = {"aten.cumprod_backward.default": cumprod_backward}
"""By overload: formulas that look at values, and have another path for tensor subclasses."""
