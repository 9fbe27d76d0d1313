"""``fp8_autocast`` with ``DelayedScaling``: scales, histories of maxima, and copies in fp8.

Source: transformer_engine/pytorch/fp8.py, common/recipe/__init__.py,
pytorch/tensor/_internal/float8_tensor_base.py, pytorch/csrc/quantizer.cpp (Float8Quantizer) and
csrc/extensions/bias.cpp (``bgrad_quantize``) of 2.8.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import clear, launched, refuse
from pytest_gpumem.simulated.stand_ins.transformer_engine.plans import bias_workspace
from pytest_gpumem.simulated.stand_ins.usage import keeping

_FORWARD, _BACKWARD = 3, 2
"""Input, weight and output of a product; gradients of its output and its input."""

_WIDEST_NORM = 8192
"""Columns for which no kernel with an output in fp8 needs several blocks for a row."""


class Format(Enum):
    """What fp8 is, forward and backward."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


@dataclass
class DelayedScaling:
    """Scales come from the maxima of the steps before."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        if self.fp8_format is Format.E5M2:
            raise AssertionError("Pure E5M2 training is not supported.")


class _Newest(NamedTuple):
    """Newest maxima of one module."""

    module: weakref.ref[ModuleState]
    maxima: Tensor


@dataclass
class _Manager:
    """FP8GlobalStateManager."""

    recipe: DelayedScaling | None = None
    """Of the innermost region, if fp8 is on there."""
    depth: int = 0
    is_first: bool = False
    is_reentrant: bool = True
    """How the last checkpoint of the process runs its function again."""
    maxima: dict[tuple[bool, str], list[_Newest]] = field(default_factory=dict)
    """Of every module that ever ran, by direction and recipe: the library drops none."""

    def take_first(self) -> bool:
        """Whether this is the first module of a region: its backward pass ends the step."""
        first, self.is_first = self.is_first, False
        return first

    def update(self, *, forward: bool) -> None:
        """reduce_and_update_fp8_tensors()."""
        for (direction, _), maxima in self.maxima.items():
            if direction is forward and maxima:
                joined = torch.cat([each.maxima for each in maxima])
                if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                    torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX)

    def tidy(self) -> None:
        """Drop the maxima of modules that are gone."""
        for maxima in self.maxima.values():
            maxima[:] = [each for each in maxima if each.module() is not None]


def manager() -> _Manager:
    """The state of the process."""
    return keeping("transformer-engine's fp8", _Manager)


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: DelayedScaling | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Let products inside take fp8."""
    recipe = _supported(fp8_recipe or DelayedScaling()) if enabled else None
    for name, value in (("calibrating", calibrating), ("fp8_group", fp8_group), ("_graph", _graph)):
        if value:
            refuse(f"fp8_autocast({name}={value!r})")
    state = manager()
    before = state.recipe, state.is_first
    state.recipe = recipe
    if not state.depth:
        state.is_first = True
    state.depth += 1
    try:
        yield
    finally:
        state.recipe, state.is_first = before
        state.depth -= 1
        if enabled and not state.depth and torch.is_grad_enabled():
            state.update(forward=True)


def _supported(recipe: DelayedScaling) -> DelayedScaling:
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        raise AssertionError("Device compute capability 8.9 or higher required for FP8 execution.")
    if capability >= (10, 0):
        refuse("fp8_autocast on a GPU of compute capability 10 or more")
    if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
        refuse("DelayedScaling with functions of one's own")
    if recipe.fp8_dpa or recipe.fp8_mha:
        refuse("DelayedScaling with attention in fp8")
    return recipe


class Quantized:
    """Float8TensorBase: a tensor in fp8, its transpose, and the inverse of its scale."""

    def __init__(self, data: Tensor, inverse: Tensor, transposed: Tensor | None) -> None:
        self.data: Tensor | None = data
        self.inverse: Tensor | None = inverse
        self.transposed = transposed

    def saved(self) -> tuple[Tensor | None, ...]:
        """prepare_for_saving(): what autograd keeps, and this no longer does."""
        tensors = self.data, self.transposed, self.inverse
        self.data = self.transposed = self.inverse = None
        return tensors

    def clear(self) -> None:
        """Give the memory back whoever keeps it, but for the scale."""
        clear(*(each for each in (self.data, self.transposed) if each is not None))

    @property
    def upright(self) -> Tensor:
        """The transpose, seen as the matrix that it is of."""
        if self.transposed is None:
            raise RuntimeError("FP8 data is required to generate FP8 data transpose")
        return self.transposed.view(self.transposed.shape[0], -1).t()


def allocate(shape: torch.Size, device: torch.device, *, transposed: bool) -> tuple[Tensor, ...]:
    """Float8Quantizer::create_tensor: the scale's inverse, the data, and the transpose."""
    made = [torch.empty(1, dtype=torch.float32, device=device)]
    made.append(torch.empty(shape, dtype=torch.uint8, device=device))
    if transposed:
        turned = (shape[-1], *shape[:-1])
        made.append(torch.empty(turned, dtype=torch.uint8, device=device))
    return tuple(made)


def _quantize(tensor: Tensor, transposed: bool) -> tuple[Tensor, ...]:
    launched()
    given = tensor.contiguous()
    return allocate(given.shape, given.device, transposed=transposed)


def _quantize_with_bias(grad: Tensor) -> tuple[Tensor, ...]:
    launched()
    bias = torch.empty(grad.shape[-1], dtype=grad.dtype, device=grad.device)
    made = allocate(grad.shape, grad.device, transposed=True)
    bias_sums(grad)
    return bias, *made


def bias_sums(grad: Tensor) -> None:
    """Take the partial sums of a bias' gradient for the time of the call."""
    rows, columns = grad.shape
    processors = int(torch.cuda.get_device_properties(grad.device).multi_processor_count)
    nbytes = bias_workspace(rows, columns, grad.dtype.itemsize, processors)
    torch.empty(nbytes, dtype=torch.uint8, device=grad.device)


_quantized = compiled(_quantize)
_quantized_with_bias = compiled(_quantize_with_bias)


def quantize(tensor: Tensor, *, transposed: bool) -> Quantized:
    """Cast to fp8."""
    return quantized(_quantized(tensor, transposed))


def quantize_with_bias(grad: Tensor) -> tuple[Tensor, Quantized]:
    """bgrad_quantize(): the gradient of the bias, and the gradient in fp8."""
    bias, *made = _quantized_with_bias(grad)
    return bias, quantized(tuple(made))


def quantized(made: tuple[Tensor, ...]) -> Quantized:
    """What :func:`allocate` has made."""
    return Quantized(made[1], made[0], made[2] if made[2:] else None)


def _normalize(
    norm: str, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
) -> tuple[tuple[Tensor, ...], Tensor | None, Tensor]:
    launched()
    rows, columns = x.shape
    if columns > _WIDEST_NORM:
        refuse(f"a {norm} of {columns} columns with an output in fp8")
    sums = [
        torch.empty(rows, dtype=torch.float32, device=x.device)
        for _ in range(1 + (norm == "LayerNorm"))
    ]
    made = allocate(x.shape, x.device, transposed=transposed)
    return made, sums[0] if sums[1:] else None, sums[-1]


normalize_to_fp8 = compiled(_normalize)
"""layernorm_fwd() and rmsnorm_fwd() with an output in fp8: its parts, mean and deviation."""


def check_shapes(*tensors: Tensor) -> None:
    """assert_dim_for_fp8_exec()."""
    for tensor in tensors:
        if math.prod(tensor.shape[:-1]) % 8 or tensor.shape[-1] % 16:
            raise AssertionError(
                f"FP8 execution requires the product of all dimensions except the last to be "
                f"divisible by 8 and the last dimension to be divisible by 16, but got tensor with "
                f"dims={list(tensor.shape)}"
            )


class ModuleState:
    """What one module has for fp8 from its first forward pass in a region on."""

    def __init__(self) -> None:
        self._recipe: DelayedScaling | None = None
        self._scales: list[Tensor] = []
        self._kept: dict[int, Quantized] = {}

    def prepare(self, products: int = 1) -> bool:
        """init_fp8_metadata() and add_fp8_tensors_to_global_buffer(); whether fp8 is on."""
        state = manager()
        recipe = state.recipe
        if recipe is None:
            return False
        if self._recipe is not None:
            if recipe != self._recipe:
                refuse("a second recipe for one module")
            return True
        self._recipe = recipe
        for forward, count in ((True, _FORWARD), (False, _BACKWARD)):
            count *= products
            self._scales.append(torch.ones(count, dtype=torch.float32, device="cuda"))
            size = recipe.amax_history_len, count
            history = torch.zeros(size, dtype=torch.float32, device="cuda")
            newest = _Newest(weakref.ref(self), history[0])
            state.maxima.setdefault((forward, repr(recipe)), []).append(newest)
        return True

    def weight(
        self, weight: Tensor, *, transposed: bool, first: bool | None, index: int = 0
    ) -> Quantized:
        """get_weight_workspace(): a weight in fp8, kept where microbatches share it."""
        if first is None:
            return quantize(weight, transposed=transposed)
        kept = self._kept.get(index)
        if kept is None or (transposed and kept.transposed is None):
            kept = None
            self._kept.pop(index, None)
            kept = self._kept[index] = quantize(weight, transposed=transposed)
        if kept.data is None or kept.inverse is None:
            raise RuntimeError("the weight in fp8 is gone")
        return Quantized(kept.data, kept.inverse, kept.transposed)
