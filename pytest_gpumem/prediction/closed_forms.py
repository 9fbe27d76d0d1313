"""Memory by formula: parameters, gradients, optimizer state and tensors saved for backward.

Bytes are those of live blocks: the bytes of a tensor's elements, rounded up to :data:`BLOCK`, the
caching allocator's smallest block. A tensor of more than 1 MiB may get a block that is up to 1 MiB
larger, if the allocator does not split it (CUDACachingAllocator.cpp, ``should_split``); closed
forms do not contain that. Modules and optimizers may be on any device, also on ``meta``: only
shapes and types are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from pytest_gpumem.attribution.history import GRADIENTS, OPTIMIZER_STATE, PARAMETERS

BLOCK = 512
"""kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp."""

Shape = Sequence[int]


def block_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor of ``shape`` on the device, 0 for an empty one."""
    return -(-prod(shape) * dtype.itemsize // BLOCK) * BLOCK


def parameter_bytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the parameters, each counted once; in ``dtype`` where it is given.

    Buffers are not parameters: see :func:`buffer_bytes`.
    """
    return sum(block_bytes(p.shape, dtype or p.dtype) for p in model.parameters())


def buffer_bytes(model: nn.Module) -> int:
    """Return the bytes of the buffers: the running statistics of batch norm, for example."""
    return sum(block_bytes(b.shape, b.dtype) for b in model.buffers())


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the gradients after backward: one for each parameter that requires it."""
    return sum(block_bytes(p.shape, p.dtype) for p in model.parameters() if p.requires_grad)


def autocast_cache_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of autocast's copies of float32 parameters, kept until its context ends.

    It copies parameters that require grad and that an operator casts: all weights of linear and
    convolution layers. Source: aten/src/ATen/autocast_mode.cpp, ``cached_cast``.
    """
    layers = (nn.Linear, nn.modules.conv._ConvNd)
    parameters = {
        id(p): p
        for layer in model.modules()
        if isinstance(layer, layers)
        for p in layer.parameters(recurse=False)
        if p.requires_grad and p.dtype == torch.float32
    }
    return sum(block_bytes(p.shape, dtype) for p in parameters.values())


# Optimizers.

Group = Mapping[str, Any]
State = Callable[[torch.Tensor, Group], Iterable[tuple[Shape, torch.dtype]]]
"""Function that returns the tensors that an optimizer keeps on the device for one parameter."""


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state on the device after a step, by its options.

    Source: ``_init_group`` of each module in torch/optim. Raises ``ValueError`` for an optimizer
    without a closed form: of a library, or one whose state depends on the run (LBFGS).
    """
    own = (kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim"))
    tensors = next((_STATES[kind.__name__] for kind in own if kind.__name__ in _STATES), None)
    if tensors is None:
        raise ValueError(
            f"{type(optimizer).__name__} has no closed form; there are: {', '.join(_STATES)}"
        )
    return sum(
        block_bytes(shape, dtype)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
        for shape, dtype in tensors(parameter, group)
    )


_SCALAR: Shape = ()


def _like(count: int | Callable[[Group], int], *, scalars: int = 1) -> State:
    """Return a state of ``count`` tensors like the parameter; ``count`` may depend on the options.

    Step counters (``scalars``) are on the device if the options ask for that, else on the CPU
    (torch/optim/optimizer.py, _get_scalar_dtype).
    """

    def state(parameter: torch.Tensor, group: Group) -> Iterable[tuple[Shape, torch.dtype]]:
        tensors = count if isinstance(count, int) else count(group)
        yield from [(parameter.shape, parameter.dtype)] * tensors
        if group.get("capturable") or group.get("fused"):
            yield from [(_SCALAR, torch.float32)] * scalars

    return state


def _asgd(parameter: torch.Tensor, group: Group) -> Iterable[tuple[Shape, torch.dtype]]:
    yield parameter.shape, parameter.dtype
    # step, eta and mu are always made on the parameter's device.
    yield from [(_SCALAR, torch.float32)] * 3


def _adafactor(parameter: torch.Tensor, group: Group) -> Iterable[tuple[Shape, torch.dtype]]:
    shape = list(parameter.shape)
    if len(shape) < 2:
        return [(shape, parameter.dtype)]
    rows, columns = [*shape[:-1], 1], [*shape[:-2], 1, shape[-1]]
    return [(rows, parameter.dtype), (columns, parameter.dtype)]


_ADAM = _like(lambda group: 3 if group["amsgrad"] else 2)
_STATES: Mapping[str, State] = {
    "SGD": _like(lambda group: 1 if group["momentum"] else 0, scalars=0),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": _like(2),
    "NAdam": _like(2, scalars=2),
    "RAdam": _like(2),
    "Adagrad": _like(1),
    "Adadelta": _like(2),
    "ASGD": _asgd,
    "RMSprop": _like(lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"])),
    "Rprop": _like(2),
    "SparseAdam": _like(2, scalars=0),
    "Adafactor": _adafactor,
    "Muon": _like(1, scalars=0),
}


# Layers.


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that a layer keeps for backward.

    ``input`` and ``output`` are tensors that a neighbouring layer may keep, too; they count once.
    ``extra`` are further bytes.
    """

    shape: tuple[int, ...]
    """Shape of the output."""
    input: bool = False
    output: bool = False
    extra: int = 0


Layer = Callable[[Any, tuple[int, ...]], SavedTensors]


def activation_bytes(
    layers: nn.Module | Sequence[nn.Module],
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    *,
    requires_grad: bool = False,
) -> int:
    """Return the bytes that a chain of layers keeps for backward, with output and without input.

    ``shape`` and ``dtype`` are those of the input; ``requires_grad``: it needs a gradient, as
    inside a larger model. A tensor that several layers keep counts once. Raises ``ValueError`` for
    a layer without a closed form.
    """
    chain = _flattened([layers] if isinstance(layers, nn.Module) else layers)
    current = tuple(shape)
    graph = requires_grad
    # Whether the tensor between two layers is kept, and its bytes; the first input is not counted.
    kept, between = True, 0
    total = 0
    for layer in chain:
        kind = next((kind for kind in type(layer).__mro__ if kind in _LAYERS), None)
        if kind is None:
            raise ValueError(
                f"{type(layer).__name__} has no closed form; there are: "
                f"{', '.join(known.__name__ for known in _LAYERS)}"
            )
        rule = _LAYERS[kind](layer, current)
        graph = graph or any(p.requires_grad for p in layer.parameters())
        if not _makes_new(layer):
            current = rule.shape
            kept = kept or (graph and rule.output)
            continue
        if graph and rule.input:
            kept = True
        total += between if kept else 0
        total += rule.extra if graph else 0
        current = rule.shape
        kept, between = graph and rule.output, block_bytes(current, dtype)
    return total + between


def _flattened(layers: Iterable[nn.Module]) -> Iterable[nn.Module]:
    for layer in layers:
        if isinstance(layer, nn.Sequential):
            yield from _flattened(layer)
        else:
            yield layer


def _makes_new(layer: nn.Module) -> bool:
    """Return whether the output is a new tensor, unlike that of views and in-place layers."""
    if isinstance(layer, (nn.Identity, nn.Flatten)):
        return False
    if isinstance(layer, nn.Dropout) and (not layer.training or layer.p == 0):
        return False
    return not getattr(layer, "inplace", False)


def _convolution(layer: nn.modules.conv._ConvNd, shape: tuple[int, ...]) -> SavedTensors:
    """derivatives.yaml, convolution: the input; batch · channels · height · width elements."""
    if isinstance(layer.padding, str):
        raise ValueError(f"padding={layer.padding!r} has no closed form; give it in numbers")
    sizes = zip(
        shape[2:], layer.padding, layer.dilation, layer.kernel_size, layer.stride, strict=True
    )
    spatial = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, padding, dilation, kernel, stride in sizes
    ]
    return SavedTensors((shape[0], layer.out_channels, *spatial), input=layer.weight.requires_grad)


def _max_pool(layer: nn.MaxPool2d, shape: tuple[int, ...]) -> SavedTensors:
    """derivatives.yaml, max_pool2d_with_indices: self, and an int64 index per output element."""
    kernel, stride, padding = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (layer.kernel_size, layer.stride, layer.padding)
    )
    spatial = [
        (size + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i, size in enumerate(shape[2:])
    ]
    output = (*shape[:2], *spatial)
    return SavedTensors(output, input=True, extra=block_bytes(output, torch.int64))


def _flatten(layer: nn.Flatten, shape: tuple[int, ...]) -> SavedTensors:
    """A view."""
    begin, end = layer.start_dim, layer.end_dim % len(shape)
    return SavedTensors((*shape[:begin], prod(shape[begin : end + 1]), *shape[end + 1 :]))


def _two_of(shape: tuple[int, ...]) -> int:
    """Return the bytes of two statistics in float32, one number each for every index of shape."""
    return 2 * block_bytes(shape, torch.float32)


# The tensors that each layer keeps, by its formula in derivatives.yaml of autograd.
_LAYERS: Mapping[type[nn.Module], Layer] = {
    # addmm: the weight's gradient needs the input; batch · in elements.
    nn.Linear: lambda layer, shape: SavedTensors(
        (*shape[:-1], layer.out_features), input=layer.weight.requires_grad
    ),
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    # native_layer_norm: the input, and mean and rstd of each row.
    nn.LayerNorm: lambda layer, shape: SavedTensors(
        shape, input=True, extra=_two_of(shape[: len(shape) - len(layer.normalized_shape)])
    ),
    # native_batch_norm: the input, and mean and inverse deviation of each channel.
    nn.modules.batchnorm._BatchNorm: lambda _, shape: SavedTensors(
        shape, input=True, extra=_two_of((shape[1],))
    ),
    # embedding: the indices.
    nn.Embedding: lambda layer, shape: SavedTensors((*shape, layer.embedding_dim), input=True),
    # native_dropout (aten/src/ATen/native/cuda/Dropout.cu): a mask of one byte per element.
    nn.Dropout: lambda layer, shape: SavedTensors(
        shape, extra=block_bytes(shape, torch.bool) if layer.training and layer.p > 0 else 0
    ),
    nn.MaxPool2d: _max_pool,
    nn.Flatten: _flatten,
    nn.Identity: lambda _, shape: SavedTensors(shape),
    # relu, sigmoid, tanh, _softmax, _log_softmax: result.
    **dict.fromkeys(
        (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.LogSoftmax),
        lambda _, shape: SavedTensors(shape, output=True),
    ),
    # gelu, silu, softplus, elu, leaky_relu, hardswish, mish: self.
    **dict.fromkeys(
        (nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Hardswish, nn.Mish),
        lambda _, shape: SavedTensors(shape, input=True),
    ),
}


def attention_bytes(
    batch: int, heads: int, queries: int, keys: int, head_size: int, dtype: torch.dtype, kind: str
) -> int:
    """Return the bytes that ``scaled_dot_product_attention`` keeps beside query, key and value.

    ``kind`` is the kernel: ``flash`` and ``efficient`` keep the output and the logarithm of the
    normaliser in float32, one number per query (for ``efficient`` rows are padded to 32 queries);
    ``math`` keeps the scaled query and key, the probabilities and the output. Source:
    derivatives.yaml, _scaled_dot_product_flash_attention and
    _scaled_dot_product_efficient_attention; aten/src/ATen/native/transformers/attention.cpp,
    _scaled_dot_product_attention_math.
    """
    output = block_bytes((batch, heads, queries, head_size), dtype)
    if kind == "flash":
        return output + block_bytes((batch, heads, queries), torch.float32)
    if kind == "efficient":
        padded = -(-queries // 32) * 32
        return output + block_bytes((batch, heads, padded), torch.float32)
    if kind == "math":
        scaled = output + block_bytes((batch, heads, keys, head_size), dtype)
        return output + scaled + block_bytes((batch, heads, queries, keys), dtype)
    raise ValueError(f"{kind!r} is not a kernel of attention; write flash, efficient or math")


class Expected:
    """Bytes by category, counting each parameter and optimizer once, with weak references.

    It begins with the bytes of ``before``.
    """

    def __init__(self, before: Expected | None = None) -> None:
        self.categories: Counter[str] = Counter(before.categories if before else ())
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary(
            dict(before._seen.items()) if before else None
        )

    def add(self, holder: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Count the bytes that ``holder`` holds after a training step.

        The state of an optimizer that has no closed form is left out.
        """
        if isinstance(holder, torch.nn.Module):
            for parameter in holder.parameters():
                if self._is_new(parameter):
                    size = block_bytes(parameter.shape, parameter.dtype)
                    self.categories[PARAMETERS] += size
                    self.categories[GRADIENTS] += size if parameter.requires_grad else 0
        elif self._is_new(holder):
            with suppress(ValueError):
                self.categories[OPTIMIZER_STATE] += optimizer_state_bytes(holder)

    def _is_new(self, one: object) -> bool:
        new = one not in self._seen
        self._seen[one] = True
        return new
