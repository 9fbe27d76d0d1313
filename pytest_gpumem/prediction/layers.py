"""A model layer by layer: shapes, parameters, what is kept for backward, peaks and FLOPs.

The operations of layers beyond their matrix products: activations, norms and pooling.

Products are counted as they run (``torch.utils.flop_counter``); these operations are few beside
them, no kernel counts them, and so they are counted by kind of layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pytest_gpumem.prediction.lines import MEASURED
from pytest_gpumem.simulating import simulate
from pytest_gpumem.values.plain import Plain


class NoModelError(ValueError):
    """The target calls no module; the message is one sentence for the user."""


@dataclass
class Run(Plain):
    """The memory of one call of a module, the modules inside it included; sizes in bytes."""

    kept: int = 0
    """Bytes allocated by the call and still live when it returned: its output, and saved
    tensors."""
    peak: int = 0
    """The most bytes allocated beyond those when it began."""


@dataclass
class Layer(Plain):
    """A call of a module."""

    path: str
    kind: str
    depth: int
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    parameters: int = 0
    """Number of parameters, those of the modules inside included, each once."""
    flops: int = 0
    """FLOPs of the forward pass: in a matrix product two for each multiplication and addition."""
    multiply_adds: int = 0
    """MACs of the forward pass, as architectures are compared: half of a matrix product's FLOPs."""
    read: int = 0
    """Bytes of the inputs, parameters and buffers that its layers read in the forward pass."""
    written: int = 0
    """Bytes of the outputs that its layers write."""
    outputs_held: int = 0
    """Bytes of those outputs that have memory of their own: not views, nor in place."""
    training: Run = field(default_factory=Run)
    inference: Run = field(default_factory=Run)


def layers_of(
    target: Callable[[], Any], gpu: str = "A100-40GB", inputs: Sequence[tuple[int, ...]] = ()
) -> list[Layer]:
    """Return the module calls of the first model that ``target`` calls, in order, outermost first.

    ``target`` may also return a model, or a model and its inputs, which is then called; ``inputs``
    are the shapes of float32 inputs for a model without inputs. It runs on a simulated ``gpu``, or
    on the CUDA device where that is ``"cuda"``. The model runs once without gradients and once with
    them. Raises :class:`NoModelError` where no model is found, or its inputs are missing.
    """
    with on_device(gpu):
        analysis = _Analysis()
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(nn.Module, "__call__", analysis.calling(nn.Module.__call__))
            try:
                returned = target()
                if not analysis.layers:
                    _call(returned, inputs)
            except _DoneError:
                pass
    if not analysis.layers:
        raise NoModelError(
            "no model was called; let the function call one, or return it with its inputs"
        )
    return analysis.layers


def on_device(gpu: str) -> AbstractContextManager[object]:
    """Return a context with a simulated ``gpu``, or an empty one for ``"cuda"``."""
    return nullcontext() if gpu == MEASURED else simulate(gpu)


class _DoneError(BaseException):
    """A signal that ends the target: everything is known."""


def _call(returned: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    if isinstance(returned, nn.Module):
        if not shapes:
            _check_needs_nothing(returned)
        returned.cuda()(*(torch.randn(shape, device="cuda") for shape in shapes))
    elif isinstance(returned, tuple) and returned and isinstance(returned[0], nn.Module):
        model, *inputs = returned
        model(*inputs)


def _check_needs_nothing(model: nn.Module) -> None:
    try:
        inspect.signature(model.forward).bind()
    except TypeError as error:
        raise NoModelError(
            f"the function returned a {type(model).__name__} without its inputs ({error}); give "
            "their shapes, like --input 1x3x224x224, or return them with it"
        ) from error


class _Analysis:
    """A runner of the first model, which runs it twice and follows each call."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self._names: Mapping[int, str] = {}
        self._follows: _Pass | None = None

    def calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``Module.__call__``, followed."""

        @functools.wraps(call)
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._follows is not None:
                with self._follows.inside(module, (args, kwargs)) as outputs:
                    outputs.append(call(module, *args, **kwargs))
                return outputs[0]
            self._names = {id(part): name for name, part in module.named_modules()}
            with torch.no_grad():
                self._ran(call, module, args, kwargs)  # libraries take their workspaces
                inference = self._ran(call, module, args, kwargs)
            with torch.enable_grad(), FlopCounterMode(display=False) as counter:
                training = self._ran(call, module, args, kwargs, counter)
            self.layers = _merged(training.layers, inference.layers)
            raise _DoneError

        return called

    def _ran(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        counter: FlopCounterMode | None = None,
    ) -> _Pass:
        self._follows = _Pass(self._names, counter)
        with self._follows.inside(module, (args, kwargs)) as outputs:
            outputs.append(call(module, *args, **kwargs))
        return self._follows


@dataclass
class _Open:
    layer: Layer
    module: nn.Module
    before: int
    flops_before: int
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

    def inside(self, module: nn.Module, arguments: Any) -> _Call:
        """Return a context around one call; its value receives the output."""
        return _Call(self, module, arguments)

    def enter(self, module: nn.Module, arguments: Any) -> None:
        """Record that a call begins."""
        self._reach()
        layer = Layer(
            path=self._names.get(id(module), ""),
            kind=type(module).__name__,
            depth=len(self._open),
            inputs=tuple(_shapes(arguments)),
            parameters=sum(p.numel() for p in module.parameters()),
        )
        self.layers.append(layer)
        for outer in self._open[-1:]:
            outer.is_layer = False
        now = torch.cuda.memory_allocated()
        given = list(_tensors(arguments))
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        call = _Open(layer, module, now, self._flops(), now)
        call.storages = frozenset(map(_storage, given))
        call.bytes_read = sum(map(_bytes, (*given, *own)))
        self._open.append(call)

    def leave(self, outputs: Any) -> None:
        """Record that the call entered last returns."""
        self._reach()
        call = self._open[-1]
        call.layer.outputs = tuple(_shapes(outputs))
        if call.is_layer:
            self._count(call, list(_tensors(outputs)))
        self._open.pop()
        products = self._flops() - call.flops_before
        call.layer.flops = products + call.flops
        call.layer.multiply_adds += products // 2
        kept = torch.cuda.memory_allocated() - call.before
        call.layer.training = Run(kept, call.highest - call.before)

    def _count(self, call: _Open, outputs: list[torch.Tensor]) -> None:
        """Add a layer's numbers to its own call and to all enclosing ones."""
        layer = call.layer
        first = [shapes[0] if shapes else () for shapes in (layer.inputs, layer.outputs)]
        operations = operations_of(call.module, *first)
        written = sum(map(_bytes, outputs))
        own = {_storage(one): one for one in outputs if _storage(one) not in call.storages}
        held = sum(map(_bytes, own.values()))
        for each in self._open:
            each.flops += operations.flops
            each.layer.multiply_adds += operations.multiply_adds
            each.layer.read += call.bytes_read
            each.layer.written += written
            each.layer.outputs_held += held

    def _reach(self) -> None:
        highest = torch.cuda.max_memory_allocated()
        for call in self._open:
            call.highest = max(call.highest, highest)
        torch.cuda.reset_peak_memory_stats()

    def _flops(self) -> int:
        return 0 if self._counter is None else int(self._counter.get_total_flops())


class _Call:
    def __init__(self, follows: _Pass, module: nn.Module, arguments: Any) -> None:
        self._follows = follows
        self._module = module
        self._arguments = arguments
        self._outputs: list[Any] = []

    def __enter__(self) -> list[Any]:
        self._follows.enter(self._module, self._arguments)
        return self._outputs

    def __exit__(self, *_: object) -> None:
        self._follows.leave(self._outputs)


def _merged(training: list[Layer], inference: list[Layer]) -> list[Layer]:
    """Return the calls of the training pass with the numbers of the other one beside them."""
    by_path: dict[str, list[Layer]] = {}
    for layer in inference:
        by_path.setdefault(layer.path, []).append(layer)
    for layer in training:
        same = by_path.get(layer.path)
        if same:
            layer.inference = same.pop(0).training
    return training


def _shapes(value: Any) -> Iterator[tuple[int, ...]]:
    return (tuple(tensor.shape) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operations:
    """Operations of one call."""

    multiply_adds: int = 0
    """A multiplication and the addition of its product are one, as is any other operation on an
    element: FLOPs in papers on architectures."""
    flops: int = 0
    """Each multiplication, addition, division and comparison by itself."""


def operations_of(module: nn.Module, inputs: Shape, outputs: Shape) -> Operations:
    """Return the operations of the layer ``module`` besides matrix products, none for other kinds.

    ``inputs`` and ``outputs`` are the shapes of its first input and its first output.
    """
    for kinds, count in _COUNTS:
        if isinstance(module, kinds):
            return count(module, prod(inputs), prod(outputs))
    return Operations()


def _activation(module: Any, read: int, written: int) -> Operations:
    """Count one operation for each element, B·H·W·C."""
    return Operations(written, written)


def _softmax(module: Any, read: int, written: int) -> Operations:
    """Count for each element its exponential, the sum, and the division."""
    return Operations(written, 3 * written)


def _norm(module: Any, read: int, written: int) -> Operations:
    """Count for each element minus the mean, by the deviation; if learned, times weight, plus
    bias."""
    affine = getattr(module, "affine", getattr(module, "elementwise_affine", False))
    return Operations(2 * written, 4 * written) if affine else Operations(written, 2 * written)


def _max_pool(module: Any, read: int, written: int) -> Operations:
    """Count K·K - 1 comparisons for each output; each input is read."""
    return Operations(read, (_window(module) - 1) * written)


def _average_pool(module: Any, read: int, written: int) -> Operations:
    """Count K·K - 1 additions and a division for each output."""
    return Operations(read, _window(module) * written)


def _adaptive_pool(module: Any, read: int, written: int) -> Operations:
    """Count one operation for each element of the input, which the windows cover once."""
    return Operations(read, read)


def _window(module: Any) -> int:
    """Return the elements of a pooling window."""
    size: int | tuple[int, ...] = module.kernel_size
    if isinstance(size, int):
        dimensions = int(type(module).__name__[-2])  # MaxPool2d
        return prod((size,) * dimensions)
    return prod(size)


_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softplus,
    nn.Softsign, nn.LogSigmoid, nn.Threshold,
)  # fmt: skip
_NORMS = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
)  # fmt: skip
_COUNTS: tuple[tuple[Any, Callable[[Any, int, int], Operations]], ...] = (
    (_ACTIVATIONS, _activation),
    ((nn.Softmax, nn.LogSoftmax, nn.Softmax2d), _softmax),
    (_NORMS, _norm),
    ((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), _max_pool),
    ((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), _average_pool),
    (
        (nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
        _adaptive_pool,
    ),
)
"""Kinds of layers, as torchstat and the papers count them: MAdd by the window for pooling, 2 for a
batch norm with weights, 1 for an activation."""
