"""The operations of layers beyond their matrix products: activations, norms and pooling.

Products are counted as they run (``torch.utils.flop_counter``); these operations are few beside
them, no kernel counts them, and so they are counted by kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

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
