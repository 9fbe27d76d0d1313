"""The kinds of operators: pairs of a predicate and a function that makes the handler.

``is_pinned`` and ``pin_memory``, of plain tensors and of subclasses that hold tensors.

Source: aten/src/ATen/native/Memory.cpp (is_pinned, pin_memory): a subclass that handles operators
itself gets ``aten::is_pinned`` and ``aten::_pin_memory``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.execution import computing, custom
from pytest_gpumem.simulated.execution.computing import may_resize
from pytest_gpumem.simulated.execution.custom import of_parts, placement_noting
from pytest_gpumem.simulated.execution.runner import CUDA, HOST, Runner, no_shapes
from pytest_gpumem.simulated.execution.shapes import is_of_lists
from pytest_gpumem.simulated.machine.checks import INDEXING, NO_DATA
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.signatures import Args, Handler, Kwargs
from pytest_gpumem.simulated.machine.values.operator import Operator
from pytest_gpumem.simulated.operators import comparisons, rnn, sparse, tables, transfers
from pytest_gpumem.simulated.operators.indexing import is_masked_fill, is_sorted
from pytest_gpumem.simulated.operators.sparse import is_sparse
from pytest_gpumem.values.errors import UnknownValueError


def _is_pinned(machine: SimulatedMachine, tensor: torch.Tensor) -> bool:
    """Return whether a tensor of the host has memory that is pinned."""
    if machine.storages.of(tensor) is not None:
        return False
    try:
        return machine.pinned.has(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return False


def _pinned(machine: SimulatedMachine, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a pinned copy of ``tensor``.

    Raises ``RuntimeError`` in torch's words for a tensor on a GPU.
    """
    if machine.storages.of(tensor) is not None:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    if tensor.layout is not torch.strided or machine.storages.is_unknown_on_cpu(tensor):
        return machine.pinned.add(tensor.clone())
    return machine.pinned.copied(tensor)


def makes_views(func: Any) -> bool:
    """Return whether ``func`` returns views, and no target that it has written to."""
    aliases = [one.alias_info for one in func._schema.returns]
    writes = [alias is not None and alias.is_write for alias in aliases]
    return any(alias is not None for alias in aliases) and not all(writes)


def views(runner: Runner, func: Any) -> Handler:
    """Return a handler that runs torch's own kernel, and nothing else."""
    run = runner.run
    machine = runner.machine

    def viewed(args: Args, kwargs: Kwargs) -> Any:
        if machine.has_real_meta:
            runner.device_kind_of(args, kwargs)  # scalars that C++ makes next are of this kind
        return run(func, args, kwargs)

    parts = sparse.TRANSPOSES.get(str(func))
    if parts is None:
        return placement_noting(runner, viewed)
    copied = of_parts(runner, parts)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if is_sparse(args[0]) and runner.device_kind_of(args, kwargs) == CUDA:
            return copied(args, kwargs)
        return viewed(args, kwargs)

    return placement_noting(runner, handle)


def quantize(runner: Runner, func: Any) -> Handler:
    """Return a handler that refuses quantizing, but for tensors of the CPU."""

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if runner.device_kind_of(args, kwargs) is None:
            return runner.run_elsewhere(func, args, kwargs)
        # The meta kernel returns an ordinary tensor of the input's type.
        raise no_shapes(runner, func, args, kwargs)

    return handle


_READS = frozenset(
    {"aten::_local_scalar_dense", "aten::equal", "aten::allclose", "aten::is_nonzero"}
)
"""Operators that return a Python number."""


def read(runner: Runner, func: Any) -> Handler:
    """Return a handler that gives the known value, else a placeholder, else an error."""
    machine = runner.machine
    operator = Operator.of(func)
    parts = comparisons.PARTS.get(func._schema.name)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if runner.device_kind_of(args, kwargs) is None:
            return runner.run_elsewhere(func, args, kwargs)
        if func is torch.ops.aten.equal.default:
            runner.check_placement(func, args, kwargs)
            unseen = comparisons.equal_unseen(*args)
            if unseen is not None:
                return unseen
        machine.current.waits()
        value = runner.values.computed(operator, args, kwargs)
        if value is None and func is torch.ops.aten._local_scalar_dense.default:
            value = machine.placeholder_value(args[0])
        if value is None:
            raise UnknownValueError(runner.unknown(func))
        if parts is not None:
            with runner.mode, runner.values.ignoring():
                parts(*args, **kwargs)
        return value

    return handle


def selected(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Return a handler of ``masked_select``, where only the mask is known.

    Source: aten/src/ATen/native/cuda/IndexKernel.cpp (masked_select_out_cuda_impl).
    """

    def handle(args: Args, kwargs: Kwargs) -> Any:
        tensor, mask = args
        if runner.device_kind_of(args[:1], {}) != CUDA or not _is_countable(runner, mask):
            return handler(args, kwargs)
        with runner.mode:
            pair = [one if one.dim() else one.unsqueeze(0) for one in (mask, tensor)]
            chosen, whole = torch.broadcast_tensors(*pair)
            return torch.ops.aten.index.Tensor(whole, [chosen])

    return handle


def masked(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Return a handler of indexing by masks, which CUDA first turns into indices.

    Source: aten/src/ATen/native/IndexingUtils.h (expandTensors); ``index_put`` changes a copy,
    and what sorts its indices a contiguous one before (native/TensorAdvancedIndexing.cpp).
    """
    is_copied = func._schema.name == "aten::index_put"
    writes = "put" in func._schema.name

    def handle(args: Args, kwargs: Kwargs) -> Any:
        if (
            any(map(_is_mask, args[1]))
            and runner.device_kind_of(args[:1], {}) == CUDA
            and all(_is_countable(runner, index) for index in args[1])
            and not (writes and is_masked_fill(runner.storages, *args[1:4]))
        ):
            with runner.mode:
                if is_copied:
                    copied = args[0].clone(memory_format=torch.preserve_format)
                    return torch.ops.aten.index_put_.default(copied, *args[1:], **kwargs)
                in_place = func._schema.name.endswith("_") and is_sorted(*args[2:4])
                if in_place and not args[0].is_contiguous():
                    whole = args[0].contiguous()
                    return args[0].copy_(func(whole, *args[1:], **kwargs))
                indices = _expanded(args[1], args[0])
            args = (args[0], indices, *args[2:])
        return handler(args, kwargs)

    return handle


def _is_countable(runner: Runner, index: torch.Tensor | None) -> bool:
    if index is None or not _is_mask(index) or not raw.is_meta(index):
        return True
    # In a capture the attempt to count fails.
    return runner.values.of(index) is not None or runner.machine.capture is not None


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _expanded(indices: Sequence[Any], tensor: torch.Tensor) -> list[Any]:
    expanded: list[Any] = []
    device = tensor.device
    for index in indices:
        if _is_mask(index):
            mask, shape = list(index.shape), list(tensor.shape)
            for at, place in zip(range(len(mask)), range(len(expanded), len(shape)), strict=False):
                if mask[at] != shape[place]:
                    raise IndexError(
                        f"The shape of the mask {mask} at index {at} does not match the shape "
                        f"of the indexed tensor {shape} at index {place}"
                    )
            places = index.nonzero()
            columns = [places.select(1, at) for at in range(index.dim())]
            expanded += [column.to(device) for column in columns]
        else:
            expanded.append(index)
    return expanded


def copy(runner: Runner, func: Any) -> Handler:
    """Return a handler that writes a tensor's contents to another, on any devices."""
    operator = Operator.of(func)

    def handle(args: Args, kwargs: Kwargs) -> Any:
        target, source = args[0], args[1]
        if not isinstance(source, torch.Tensor):
            # C++ took the number out of a tensor of the host: it is one here, too.
            source = torch.tensor(source)
            args = (target, source, *args[2:])
        if runner.storages.of(target) is None and runner.is_users_own(target):
            return runner.run_elsewhere(func, args, kwargs)
        if runner.storages.of(source) is None and runner.is_users_own(source):
            raise NotImplementedError(NO_DATA)
        if sparse.is_sparse(target) and raw.is_meta(target):
            with runner.mode:
                return sparse.copy_(target, source)
        if not raw.is_meta(target) and runner.device_kind_of((source,), {}) is not None:
            _stage(runner, target, source, args, kwargs)
            if runner.values.everything and runner.values.records(operator, args, kwargs, None):
                return target
            if runner.values.computed(operator, args, kwargs) is None:
                runner.mark_unknown(func, target)
            return target
        if runner.storages.unknown_on_cpu and runner.device_kind_of(args, kwargs) == HOST:
            return runner.run_on_host(operator, args, kwargs)
        if not raw.is_meta(source):
            _stage(runner, target, source, args, kwargs)
        result = runner.run(func, args, kwargs)
        runner.values.follow(operator, args, kwargs, result)
        return result

    return handle


def _stage(
    runner: Runner, target: torch.Tensor, source: torch.Tensor, args: Any, kwargs: Kwargs
) -> None:
    """Allocate the memory that ``copy_`` between host and GPU needs during the call, and wait.

    A copy that does not block waits, too, where it is to pageable memory (CUDA Runtime API, "API
    synchronization behavior").
    """
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    machine = runner.machine
    machine.kernel_wrote()  # adds a node to a capture
    to, of = runner.storages.of(target), runner.storages.of(source)
    if to is not None and of is None:
        transfers.stage_upload(machine.device(to.device.index), target, source, non_blocking)
    elif of is not None and to is None:
        gpu = machine.device(of.device.index)
        transfers.stage_download(gpu, target, source, non_blocking)
        if non_blocking and not (_is_pinned(machine, target) or machine.capture):
            gpu.waits(by_torch=False)


def each_device(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Return a handler that runs ``func``, of lists of tensors, on one GPU after the other."""
    placement, alone = runner.machine.placement, _ALONE.get(_name(func))
    if placement is None:
        return handler
    return placement.device_by_device(handler, of_parts(runner, alone) if alone else None)


def without_gradient(runner: Runner, func: Any, handler: Handler) -> Handler:
    """Return a handler of a backward pass that returns no gradients where it is given none."""
    nothing = (None,) * len(func._schema.returns)
    return lambda args, kwargs: nothing if args[0] is None else handler(args, kwargs)


_ALONE: dict[str, Callable[..., Any]] = {
    "aten::_foreach_norm": torch.linalg.vector_norm,
    "aten::_foreach_max": torch.max,
}
"""Reductions of one tensor, for lists on several GPUs (native/ForeachOpsKernels.cpp)."""


def _name(func: Any) -> str:
    return str(func._schema.name)


KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Runner, Any], Handler]], ...] = (
    (
        lambda func: str(func) in rnn.FLATTENING,
        lambda runner, func: of_parts(runner, rnn.FLATTENING[str(func)]),
    ),
    (custom.is_composite, custom.composite),
    (custom.is_written_in_parts, custom.written_in_parts),
    (lambda func: str(func) in tables.BELOW_AUTOGRAD, custom.composite_below_autograd),
    # Outside of Inductor's kernels a primitive makes a tensor like its result before it runs: seeds
    # of checkpoints, parts of a graph (torch/_prims/__init__.py, _prim_impl, 2.6 to 2.15).
    (
        lambda func: hasattr(func, "prim_impl"),
        lambda runner, func: of_parts(runner, func.prim_impl),
    ),
    (lambda func: _name(func) in _READS, read),
    (lambda func: _name(func).startswith("aten::quantize_per_"), quantize),
    (lambda func: _name(func) == "aten::scalar_tensor", computing.scalar),
    # As the methods of a tensor do.
    (
        lambda func: _name(func) == "aten::is_pinned",
        lambda runner, func: lambda args, kwargs: _is_pinned(runner.machine, args[0]),
    ),
    (
        lambda func: _name(func) == "aten::_pin_memory",
        lambda runner, func: of_parts(runner, partial(_pinned, runner.machine)),
    ),
    (computing.is_factory, computing.factory),
    (lambda func: _name(func) == "aten::copy_", copy),
    (makes_views, views),
)
"""Pairs of predicate and handler factory; the first predicate that holds decides.

An operator for which none holds computes."""

_WITHOUT_GRADIENT = "flash_attention_backward", "efficient_attention_backward"

SPECIAL: tuple[tuple[Callable[[Any], bool], Callable[[Runner, Any, Handler], Handler]], ...] = (
    (custom.is_sized_by_values, custom.sized),
    (lambda func: _name(func) in INDEXING, masked),
    (lambda func: _name(func) == "aten::masked_select" and not may_resize(func), selected),
    (is_of_lists, each_device),
    # native/transformers/cuda/attention_backward.cu
    (lambda func: _name(func).endswith(_WITHOUT_GRADIENT), without_gradient),
)
"""Wrappers for operators of which some calls need another handler; the first is innermost."""


def handler_of(runner: Runner, func: Any) -> Handler:
    """Return the handler of the operator ``func``."""
    for applies, make in KINDS:
        if applies(func):
            return make(runner, func)
    resizes = may_resize(func)
    handler = computing.of_rule(runner, func, tables.rule_of(func), resizes=resizes)
    for applies, wrap in SPECIAL:
        if applies(func):
            handler = wrap(runner, func, handler)
    return handler
