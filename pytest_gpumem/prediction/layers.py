"""A model layer by layer: shapes, parameters, memory kept for backward, peaks and FLOPs.

Matrix products are counted by ``torch.utils.flop_counter`` while they run. The fewer operations of
activations, norms and pooling, which it does not count, are computed by kind of layer.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pytest_gpumem.measurement.contents import tensors_in
from pytest_gpumem.prediction.function import on_device
from pytest_gpumem.values.serialization import Plain

DEEPEST = 8
"""The levels of containers in which inputs and outputs are searched."""


@dataclass
class CallMemory(Plain):
    """The memory of one call of a module, including modules inside it; sizes in bytes."""

    kept: int = 0
    """Bytes allocated by the call and live when it returned: its output, and saved tensors."""
    peak: int = 0
    """The most bytes allocated beyond those at its start."""


@dataclass
class Layer(Plain):
    """A call of a module."""

    path: str
    kind: str
    depth: int
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    parameters: int = 0
    """Number of parameters, including those of modules inside, each once."""
    flops: int = 0
    """FLOPs of the forward pass: in a matrix product two for each multiplication and addition."""
    multiply_adds: int = 0
    """Multiply-adds (MACs) of the forward pass: half of a matrix product's FLOPs."""
    read: int = 0
    """Bytes of the inputs, parameters and buffers that its layers read in the forward pass."""
    written: int = 0
    """Bytes of the outputs that its layers write."""
    outputs_held: int = 0
    """Bytes of those outputs that are new tensors: not views, nor results in place."""
    training: CallMemory = field(default_factory=CallMemory)
    inference: CallMemory = field(default_factory=CallMemory)


Input = tuple[tuple[int, ...], str]
"""The shape of an input, and the name of its type in torch."""


def layers_of(
    target: Callable[[], Any], gpu: str = "A100-40GB", inputs: Sequence[Input] = ()
) -> list[Layer]:
    """Return the module calls of the first model that ``target`` calls, in order, outermost first.

    ``target`` may also return a model, or a model and its inputs, and the model is then called; the
    last input may be a mapping of keywords. ``inputs`` are shapes and types, ``((8, 256),
    "int64")``, for a model returned without inputs.
    It runs on a simulated ``gpu``, or on the CUDA device for ``"cuda"``, once without gradients and
    once with them. Raises ``ValueError`` if no model is found, or its inputs are missing.
    """
    return on_device(gpu, "", lambda _: _analyzed(target, inputs))


def _analyzed(target: Callable[[], Any], inputs: Sequence[Input]) -> list[Layer]:
    layers: list[Layer] = []
    with pytest.MonkeyPatch.context() as patches, suppress(_DoneError):
        patches.setattr(nn.Module, "__call__", _analyzing_call(nn.Module.__call__, layers))
        returned = target()
        if not layers:
            _call(returned, inputs)
    if not layers:
        raise ValueError(
            "no model was called; let the function call one, or return it with its inputs"
        )
    return layers


class _DoneError(BaseException):
    """A signal that ends the target after its model has been recorded."""


def _call(returned: Any, given: Sequence[Input]) -> None:
    if isinstance(returned, nn.Module):
        try:
            if not given:
                inspect.signature(returned.forward).bind()
        except TypeError as error:
            raise ValueError(
                f"the function returned a {type(returned).__name__} without its inputs ({error}); "
                "give their shapes, like --input 1x3x224x224 or 8x256:int64, or return them "
                "with it"
            ) from error
        returned.cuda()(
            *(
                torch.zeros(shape, dtype=getattr(torch, name), device="cuda")
                for shape, name in given
            )
        )
    elif isinstance(returned, tuple) and returned and isinstance(returned[0], nn.Module):
        model, *inputs = returned
        keywords: Mapping[str, Any] = {}
        if inputs and isinstance(inputs[-1], Mapping):
            with suppress(TypeError):  # an input that is a mapping itself
                inspect.signature(model.forward).bind(*inputs[:-1], **inputs[-1])
                keywords = inputs.pop()
        model(*inputs, **keywords)


def _analyzing_call(call: Callable[..., Any], found: list[Layer]) -> Callable[..., Any]:
    """Return a ``Module.__call__`` that runs the first model and adds its layers to ``found``."""
    following: _Pass | None = None

    @functools.wraps(call)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if following is not None:
            return following.through(call, self, args, kwargs)
        names = {id(part): name for name, part in self.named_modules()}

        def ran(counter: FlopCounterMode | None = None) -> list[Layer]:
            nonlocal following
            following = _Pass(names, counter)
            following.through(call, self, args, kwargs)
            return following.layers

        with torch.no_grad():
            ran()  # so that libraries have allocated their workspaces
            inference = defaultdict[str, list[CallMemory]](list)
            for layer in ran():
                inference[layer.path].append(layer.training)
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            found.extend(ran(counter))
        for layer in found:
            if inference[layer.path]:
                layer.inference = inference[layer.path].pop(0)
        raise _DoneError

    return called


@dataclass
class _Open:
    layer: Layer
    module: nn.Module
    highest: int = 0
    storages: frozenset[int] = frozenset()
    """Storages of its inputs."""
    bytes_read: int = 0
    is_layer: bool = True
    """Whether it has called no other module."""
    flops: int = 0
    """FLOPs beyond those that torch counts, of the layers inside."""


class _Pass:
    """A pass through the model."""

    def __init__(self, names: Mapping[int, str], counter: FlopCounterMode | None) -> None:
        self.layers: list[Layer] = []
        self._names = names
        self._counter = counter
        self._open: list[_Open] = []

    def through(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call ``module`` and record it; returns its output."""
        self._note_peak()
        given = list(tensors_in((args, kwargs), DEEPEST))
        layer = Layer(
            path=self._names.get(id(module), ""),
            kind=type(module).__name__,
            depth=len(self._open),
            inputs=_shapes(given),
            parameters=sum(p.numel() for p in module.parameters()),
        )
        self.layers.append(layer)
        for outer in self._open[-1:]:
            outer.is_layer = False
        now = torch.cuda.memory_allocated()
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        storages, size = frozenset(map(_storage, given)), sum(map(_bytes, (*given, *own)))
        del given  # must not keep tensors alive
        opened = _Open(layer, module, now, storages, size)
        self._open.append(opened)
        products = self._flops()
        returned = None
        try:
            returned = call(module, *args, **kwargs)
            return returned
        finally:
            self._note_peak()
            outputs = list(tensors_in(returned, DEEPEST))
            layer.outputs = _shapes(outputs)
            if opened.is_layer:
                self._count(opened, outputs)
            self._open.pop()
            products = self._flops() - products
            layer.flops = products + opened.flops
            layer.multiply_adds += products // 2
            kept = torch.cuda.memory_allocated() - now
            layer.training = CallMemory(kept, opened.highest - now)

    def _count(self, call: _Open, outputs: list[torch.Tensor]) -> None:
        """Add a layer's numbers to its call and to all enclosing calls."""
        layer = call.layer
        first = [shapes[0] if shapes else () for shapes in (layer.inputs, layer.outputs)]
        read, made = (prod(shape) for shape in first)
        counts = (count for kinds, count in _COUNTS if isinstance(call.module, kinds))
        multiply_adds, flops = next(counts, lambda *_: (0, 0))(call.module, read, made)
        written = sum(map(_bytes, outputs))
        own = {_storage(one): one for one in outputs if _storage(one) not in call.storages}
        held = sum(map(_bytes, own.values()))
        for each in self._open:
            each.flops += flops
            each.layer.multiply_adds += multiply_adds
            each.layer.read += call.bytes_read
            each.layer.written += written
            each.layer.outputs_held += held

    def _note_peak(self) -> None:
        highest = torch.cuda.max_memory_allocated()
        for call in self._open:
            call.highest = max(call.highest, highest)
        torch.cuda.reset_peak_memory_stats()

    def _flops(self) -> int:
        return 0 if self._counter is None else int(self._counter.get_total_flops())


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of all elements, because ``nbytes`` is not defined for sparse tensors."""
    return tensor.numel() * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _norm(module: Any, written: int) -> tuple[int, int]:
    """Count by element: minus mean, divided by deviation; if learned, times weight, plus bias."""
    affine = getattr(module, "affine", getattr(module, "elementwise_affine", False))
    return (2 * written, 4 * written) if affine else (written, 2 * written)


def _window(module: Any) -> int:
    """Return the elements of a pooling window."""
    size: int | tuple[int, ...] = module.kernel_size
    if isinstance(size, int):
        return int(size ** int(type(module).__name__[-2]))  # MaxPool2d
    return prod(size)


_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softplus,
    nn.Softsign, nn.LogSigmoid, nn.Threshold,
)  # fmt: skip
_NORMS = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
)  # fmt: skip
_COUNTS: tuple[tuple[Any, Callable[[Any, int, int], tuple[int, int]]], ...] = (
    # One operation for each element, B·H·W·C.
    (_ACTIVATIONS, lambda module, read, written: (written, written)),
    # For each element its exponential, the sum, and the division.
    (
        (nn.Softmax, nn.LogSoftmax, nn.Softmax2d),
        lambda module, read, written: (written, 3 * written),
    ),
    (_NORMS, lambda module, read, written: _norm(module, written)),
    # K·K - 1 comparisons for each output; each input is read.
    (
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        lambda module, read, written: (read, (_window(module) - 1) * written),
    ),
    # K·K - 1 additions and a division for each output.
    (
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        lambda module, read, written: (read, _window(module) * written),
    ),
    # One operation for each element of the input, which the windows cover once.
    (
        (nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
        lambda module, read, written: (read, read),
    ),
)
"""Functions that return a call's operations besides matrix products from the elements of its first
input and first output: multiply-adds, where a product with its addition, or any other operation on
an element, counts as one; and FLOPs, where each operation counts. They are counted as by torchstat
and in papers: the window for pooling, 2 for a batch norm with weights, 1 for an activation."""
