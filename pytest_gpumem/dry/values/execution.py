"""Operators on the dry device, each followed by its CPU kernel.

Torch's own code runs first, and allocates as on a GPU. Then the CPU computes the values, if those
of the arguments are known, into the memory of the device, by the rules of the simulated device.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pytest_gpumem.dry.values import sizes
from pytest_gpumem.dry.values.dispatch import followed_again, not_followed
from pytest_gpumem.dry.values.graphs import Graphs
from pytest_gpumem.dry.values.known import DryValues
from pytest_gpumem.dry.values.libraries import Libraries, Parts, is_composite
from pytest_gpumem.dry.values.memory import Memory, seen_by_cpu
from pytest_gpumem.dry.values.reads import Reads
from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.callsite import shown_operator
from pytest_gpumem.simulated.machine.signatures import (
    Args,
    Handler,
    Kwargs,
    is_data_dependent,
    is_view,
    named,
)
from pytest_gpumem.simulated.machine.storages import parts_of_sparse
from pytest_gpumem.simulated.machine.values import finite
from pytest_gpumem.simulated.machine.values.operator import Operator

_OWN = frozenset({"aten", "prim", "prims", "profiler", "quantized"})
_READS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::allclose"})
_COMPARISONS = _READS - {"aten::_local_scalar_dense"}
"""Operators that read two tensors as a whole, and not by reads of their elements."""
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
_ONLY_COPIES = _COPIES | {"aten::clone", "aten::cat", "aten::stack", "aten::lift_fresh_copy"}
"""Operators whose results only contain values of their arguments."""
_GROUPED = frozenset({"aten::_grouped_mm", "aten::_scaled_grouped_mm"})
_WRITES_NOTHING = frozenset({"aten::record_stream"})
"""Operators whose schema declares a write to the tensor, though they only change its storage."""
_DECIDING = frozenset(
    f"aten::{name}"
    for name in (
        *("linalg_matrix_exp", "isin", "segment_reduce", "masked_scatter_backward"),
        *("_embedding_bag_backward", "quantize_per_tensor_dynamic"),
        *("_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned"),
    )
)
"""Operators whose C++ code depends on values computed by operators that it calls (2.6 to 2.15):

- norms determine the number of squarings (mexp_impl of aten/src/ATen/native/LinearAlgebra.cpp);
- the number of distinct elements, the sorted tensors (isin_sorting of native/TensorCompare.cpp);
- lengths, whether they are valid (segment_reduce_kernel of native/SegmentReduce.cpp);
- a mask, the number of elements to pad (masked_scatter_backward_symint of
  native/TensorAdvancedIndexing.cpp), the indices without padding (embedding_sparse_backward of
  native/Embedding.cpp), the packed sequences (NestedTensor_nested_tensor_from_mask of
  native/nested/NestedTensorMath.cpp);
- minimum and maximum, the scale (quantize_per_tensor_dynamic of native/quantized/QTensor.cpp).

Most operators of sparse tensors do so, too: a coalesced matrix determines the number of products
(s_addmm_out_sparse_dense_cuda of native/sparse/cuda/SparseCUDATensorMath.cu).
"""
_COO = (torch.strided, torch.sparse_coo)
_KEYS = (
    torch._C.DispatchKey.SparseCsrCUDA,
    torch._C.DispatchKey.SparseCUDA,
    torch._C.DispatchKey.CUDA,
    torch._C.DispatchKey.CompositeExplicitAutograd,
)
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_DISABLED = torch._C._disabled_torch_dispatch_impl


class Execution:
    """The execution of operators on a dry device, with their values."""

    def __init__(self, memory: Memory, values: DryValues, reads: Reads, graphs: Graphs) -> None:
        self._memory = memory
        self._graphs = graphs
        self._storages = values.storages
        self._values = values
        self._reads = reads
        self._libraries = Libraries(values, graphs, memory)
        self._handlers: dict[Any, Handler] = {}
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """Make a new lock, which lets one thread at a time follow an operator."""
        self._lock = threading.RLock()

    def __call__(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run ``func`` and compute its values."""
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            # A compiler traces the operator with fake tensors, which have no values.
            with not_followed():
                return func(*args, **kwargs)
        tensors = list(raw.tensors_in((args, kwargs)))
        kinds = {tensor.__class__ for tensor in tensors} - raw.PLAIN
        if kinds and any(kind.__torch_dispatch__ is not _DISABLED for kind in kinds):
            return self._with_subclasses(func, kinds, args, kwargs)
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._bind(func)
        if isinstance(handler, Parts):
            if not any(tensor.is_nested for tensor in tensors):
                return handler(args, kwargs)
            # Nested tensors may have a special kernel, which calls no operators.
            handler = partial(self._compute, Operator.of(func))
        inside = self._libraries.entered()
        with self._lock, not_followed(), torch._C.DisableTorchFunction(), inside:
            with torch._C._DisableTorchDispatch():  # hides this from dispatch modes of the program
                self._values.end()
                self._values.track(tensor for tensor in tensors if tensor.is_cuda)
            return handler(args, kwargs)

    def _with_subclasses(self, func: Any, kinds: set[Any], args: Args, kwargs: Kwargs) -> Any:
        """Run ``func`` by the ``__torch_dispatch__`` of its tensors, as the next key would."""
        if torch._C._len_torch_dispatch_stack() or FakeTensor in kinds:
            with not_followed():
                return func(*args, **kwargs)
        for kind in sorted(kinds, key=lambda each: -len(each.__mro__)):
            result = kind.__torch_dispatch__(func, tuple(kinds), args, kwargs)
            if result is not NotImplemented:
                return result
        raise TypeError(f"no implementation found for {func} on {kinds}")

    def _bind(self, func: Any) -> Handler:
        if func.namespace not in _OWN:
            return self._libraries.handler_of(func)
        if is_composite(func):
            return Parts(func, None)
        name = func._schema.name
        if name in _WRITES_NOTHING:
            return lambda args, kwargs: func(*args, **kwargs)
        own = {
            **dict.fromkeys(_READS, self._read),
            **dict.fromkeys(_COPIES, self._copy),
            **dict.fromkeys(_GROUPED, self._multiply_groups),
            **dict.fromkeys(sizes.SPARSE, self._make_sparse),
            **dict.fromkeys(sizes.NAMES, self._count),
        }
        handler = partial(own.get(name, self._compute), Operator.of(func))
        return handler if name in own else self._values.work.counting(func, handler)

    def _compute(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator, and then its CPU kernel."""
        values, func = self._values, operator.func
        if self._storages.unknown_on_cpu and self._has_unknown_inputs((args, kwargs)):
            return self._run_with_unknown_inputs(operator, args, kwargs)
        if sizes.takes_parts(operator, args) and not is_view(func._schema):
            return self._compute_parts(operator, args, kwargs)
        # In a capture, numbers are drawn at the replay; before CUDA is initialized, on the CPU.
        draws = operator.random and torch.cuda.is_initialized()
        if draws and not torch.cuda.is_current_stream_capturing():
            values.random.begin(values.generator_of(kwargs.get("generator")))
        result = self._run(operator, args, kwargs)
        # Values are computed only for plain tensors on a GPU.
        first = next((one for one in raw.tensors_in((result, args)) if one.is_cuda), None)
        if first is not None and first.__class__ in raw.PLAIN:
            values.forget_dead()
            if torch.cuda.is_current_stream_capturing():
                self._graphs.add(operator, args, kwargs, result)
            else:
                with torch._C._DisableTorchDispatch():
                    if operator.name in _DECIDING:
                        # Operators called inside may have computed only some values: some kernels,
                        # such as the sums of matrix_exp, are called without an operator.
                        follow = values.replace
                    else:
                        follow = values.make if operator.makes else values.follow
                    follow(operator, args, kwargs, result)
                    if operator.name not in _ONLY_COPIES:
                        values.forget_copied(operator, args, kwargs, result)
                    self._libraries.forget_made(operator, result)
        return result

    def _count(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator whose kernel counts elements and returns the number to the host."""
        if not any(tensor.is_cuda for tensor in raw.tensors_in(args)):
            return self._compute(operator, args, kwargs)
        numbers = sizes.numbers_read(self._values, operator, args, kwargs)
        if numbers is None:
            numbers = self._libraries.element_count()
        if numbers is None:
            self._reads.refuse(f"{shown_operator(operator.name)}()")
        with self._memory.answering(numbers):
            return self._compute(operator, args, kwargs)

    def _multiply_groups(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run a grouped product, whose group ends torch reads on the host below capability 9.0.

        If they are unknown, all groups get the same length. Allocations do not depend on the
        lengths, except that an empty group needs no product and no workspace
        (``_grouped_mm_fallback`` in ATen/native/GroupedMMUtils.h, torch 2.9 to 2.15).
        """
        memory = self._memory
        ends = named(operator.func, args, kwargs).get("offs")
        if ends is None or not ends.is_cuda or self._values.known(ends) is not None:
            return self._compute(operator, args, kwargs)
        place = (ends.data_ptr(), ends.numel() * ends.element_size())
        first, second = args[:2]
        # The groups divide the columns of the second tensor if the first has three dimensions, the
        # rows of the first if the second has three, and else the dimension that is summed over.
        whole = first.shape[-1] if second.dim() == 2 else first.shape[0]
        whole, count = second.shape[-1] if first.dim() == 3 else whole, len(ends)
        equal = torch.tensor([whole * (at + 1) // count for at in range(count)], device="cpu")
        seen_by_cpu(place, ends.dtype).copy_(equal)
        memory.mark_known(place)
        try:
            return self._compute(operator, args, kwargs)
        finally:
            memory.forget(place)

    def _make_sparse(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator that makes a sparse tensor whose size depends on values."""
        if not args[0].is_cuda:
            return operator.func(*args, **kwargs)
        parts = sizes.made_sparse(self._values, operator.name, args)
        if parts is None:
            self._reads.refuse(f"{shown_operator(operator.name)}()")
        numbers = sizes.read_by_sparse(self._values, operator.name, args, parts)
        with self._memory.answering(numbers):
            result = operator.func(*args, **kwargs)
        for tensor, part in zip(parts_of_sparse(result), parts, strict=True):
            if part is not None:
                self._values.keep(tensor, part)
        return result

    def _compute_parts(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator with sparse or nested tensors; compute the values of their parts."""
        values = self._values
        captured = torch.cuda.is_current_stream_capturing()  # a replay would not compute it again
        made = None if captured else sizes.from_parts(values, operator, args, kwargs)
        result = self._run(operator, args, kwargs)
        known: list[torch.Tensor | None] = [
            part for one in raw.tensors_in(made) for part in sizes.strided_of(one)
        ]
        if made is None and operator.name == "aten::clone":  # perhaps only the indices are known
            known = [values.known(part) for part in sizes.strided_of(args[0])]
        parts = [part for one in raw.tensors_in(result) for part in sizes.strided_of(one)]
        for at, part in enumerate(parts):
            if not part.is_cuda:  # the sizes of nested tensors
                continue
            kept = known[at] if len(known) == len(parts) else None
            if kept is not None and 0 not in part.stride():  # not written to an expanded tensor
                values.keep(part, kept)
            else:
                values.mark_unknown(part)
        return result

    def _read(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator that returns a Python number.

        An unknown number is returned as it is if the caller checks that, else as a placeholder.
        """
        reads, thread, compares = self._reads, self._reads.thread, operator.name in _COMPARISONS
        if any(tensor.is_cuda for tensor in raw.tensors_in(args)):
            for tensor in raw.tensors_in(args):
                self._values.write_facts(tensor)
            known = self._values.computed(operator, args, kwargs) if compares else None
            before = thread.unknown
            numbers = () if known is None else [int(known)]
            with reads.expected(), self._memory.answering(numbers):
                value = operator.func(*args, **kwargs)
            if thread.unknown == before:
                self._values.note_read(args)
                return value
        else:
            value = operator.func(*args, **kwargs)
            if not self._storages.unknown_on_cpu or not self._has_unknown_inputs(args):
                return value
            thread.unknown += 1
        if thread.expected:
            return value
        if compares:
            reads.refuse(f"{shown_operator(operator.name)}()")
        return reads.placeholder(args[0], value)

    def _copy(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run ``copy_`` or ``_to_copy``: between host and GPU, and on each."""
        reads, thread = self._reads, self._reads.thread
        to_existing = bool(operator.written)
        source = args[1] if to_existing else args[0]
        if not isinstance(source, torch.Tensor):
            return self._compute(operator, args, kwargs)
        if to_existing:
            on_device = args[0].is_cuda
        else:
            device = kwargs.get("device")
            on_device = source.is_cuda if device is None else device.type == "cuda"
        if source.is_cuda == on_device:
            return self._compute(operator, args, kwargs)
        if sizes.has_parts(source):
            result = operator.func(*args, **kwargs)
            if on_device:
                target = sizes.strided_of(args[0] if to_existing else result)
                for part, brought in zip(target, sizes.strided_of(source), strict=True):
                    self._values.keep(part, brought)
            return result
        known = None if on_device else self._values.known(source)
        before, is_expected = thread.unknown, thread.expected > 0
        with reads.expected():
            result = operator.func(*args, **kwargs)
        is_lost = not on_device and known is None
        thread.unknown = before + (is_lost and is_expected)
        target = args[0] if to_existing else result
        if on_device:
            self._bring(operator, args, kwargs, target)
        elif known is not None:
            target.copy_(known)
            self._storages.mark_known(target)
        else:
            reads.used_placeholder = True
            self._storages.mark_unknown(target)
        return result

    def _bring(self, operator: Operator, args: Args, kwargs: Kwargs, target: torch.Tensor) -> None:
        """Record a copy from the host to ``target``."""
        values, made = self._values, not operator.written
        source = args[0 if made else 1]
        if torch.cuda.is_current_stream_capturing():
            self._graphs.add(operator, args, kwargs, target)
        elif self._storages.is_unknown_on_cpu(source):
            values.mark_unknown(target)
        elif not values.track_whole(target, finite.held(source), made=made):
            follow = values.make if made else values.follow
            follow(operator, args, kwargs, target)

    def _has_unknown_inputs(self, given: Any) -> bool:
        return any(map(self._storages.is_unknown_on_cpu, raw.tensors_in(given)))

    def _run_with_unknown_inputs(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator of CPU tensors, some of which hold unknown values."""
        func = operator.func
        if is_data_dependent(func):
            self._reads.refuse(f"{shown_operator(operator.name)}()")
        result = func(*args, **kwargs)
        answer = self._values.if_finite(func, args) if operator.asks else None
        if answer is not None:
            self._values.notes.note_finite()
            return result.fill_(answer)
        written = [args[at] for at, _ in operator.written if at < len(args)]
        for tensor in raw.tensors_in((result, written)):
            if tensor.is_cuda:
                self._values.mark_unknown(tensor)
            else:
                self._storages.mark_unknown(tensor)
        return result

    def _run(self, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator; follow the operators that it calls, too, if it uses their values."""
        func = operator.func
        given = [tensor for tensor in raw.tensors_in((args, kwargs)) if tensor.is_cuda]
        is_sparse = any(tensor.layout is not torch.strided for tensor in given)
        decides = operator.name in _DECIDING or operator.name.startswith(sizes.MAKES_PARTS)
        if not given or not (is_sparse or decides):
            return func(*args, **kwargs)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        is_compressed = any(tensor.layout not in _COO for tensor in given)
        keys = _KEYS if is_compressed else _KEYS[1:] if is_sparse else _KEYS[2:]
        key = next((key for key in keys if has_kernel(func.name(), key.name)), None)
        if key is None:
            return func(*args, **kwargs)
        with followed_again():
            if operator.name == "aten::isin" and not isinstance(args[0], torch.Tensor):
                result = _isin_of_number(func, args, kwargs)
            else:
                result = func._op_dk(key, *args, **kwargs)
        with torch._C._DisableTorchDispatch():
            self._values.track(given)  # again, because the operators inside have ended it
        return result


def _isin_of_number(func: Any, args: Args, kwargs: Kwargs) -> torch.Tensor:
    """Run ``isin`` of a number, which torch's C++ code turns into a tensor on the device.

    torch marks that tensor as a wrapped number, which cannot pass through Python (``toPyObject`` of
    torch/csrc/jit/python/pybind_utils.cpp, torch 2.6 to 2.15).
    """
    number, others, *flags = args
    dtype = torch.float64 if isinstance(number, float) else None
    element = torch.full((), number, dtype=dtype, device=others.device)
    overload = func._overloadname.replace("Scalar_Tensor", "Tensor_Tensor")
    result: torch.Tensor = getattr(torch.ops.aten.isin, overload)(element, others, *flags, **kwargs)
    return result
