"""Activations, softmax, dropout, and losses with the tensors that they keep.

Source: aten/src/ATen/native/cuda/SoftMax.cu (host_softmax, host_softmax_backward,
softmax_backward_cuda_out), native/SoftMax.cpp (softmax and log_softmax with a ``dtype``),
native/Dropout.cpp (is_fused_kernel_acceptable), native/cuda/Dropout.cu (native_dropout_cuda,
dropout_cuda), native_functions.yaml (dispatch of mish_backward) and native/Activation.cpp
(mish_backward: one output of TensorIterator::binary_op, log_sigmoid_forward_cuda), torch 2.6 to
2.15. Outputs come first, as of every structured operator: the meta kernels give their sizes, types
and strides as CUDA's do.

Losses: native/Loss.cpp (binary_cross_entropy_with_logits, mse_loss, smooth_l1_loss: their result is
made as large as the input before the reduction shrinks it; huber_loss, soft_margin_loss),
native/cuda/Loss.cu (binary_cross_entropy), NLLLoss2d.cu, MultiMarginLoss.cu; LossCTC.cpp
(ctc_loss, ctc_loss_impl) and native/cuda/LossCTC.cu (ctc_loss_gpu_template,
ctc_loss_backward_gpu_template), of torch 2.6 to 2.15. cuDNN's kernel, which takes 32-bit targets in
CPU memory, is not simulated: such a loss is computed by ATen's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, make_contiguous_strides_for

from pytest_gpumem.simulated.common.patching import having
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.layout import INDEX_BYTES, copied
from pytest_gpumem.simulated.operators.rules import (
    CALLED_IN_PLACE,
    Composite,
    Rule,
    Scratch,
    borrow,
    copies_of,
    decompose,
    is_dual,
    within,
)

_aten = torch.ops.aten
_Softmax = Callable[..., Tensor]


def mish_backward(gpu: GPU, grad_output: Tensor, self: Tensor) -> Tensor:
    """Run ``aten::mish_backward`` as one kernel; on ``meta`` it is a formula of several.

    The product has the shape, type and strides of its output.
    """
    result = torch.mul(grad_output, self)
    gpu.simulation.values.assign(result, _aten.mish_backward, grad_output, self)
    return result


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Run ``aten::dropout`` as CUDA's fused kernel, with a mask of one byte per element.

    Complex numbers are multiplied by real noise (_dropout_impl).
    """
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    if input.is_complex():
        noise = torch.empty_like(input, dtype=input.dtype.to_real())
        return input * noise.bernoulli_(1 - p).div_(1 - p)
    return _aten.native_dropout(input, p, train)[0]  # type: ignore[no-any-return]  # an operator


def _backward(gpu: GPU, grad_output: Tensor, output: Tensor) -> None:
    """Allocate for ``_softmax_backward_data``: grad * output, a contiguous copy of it if its
    strides are others, and one of ``output`` if that is not contiguous."""
    sizes = [grad_output.nbytes]
    if not (grad_output.is_contiguous() and output.is_contiguous()):
        strides = compute_elementwise_output_strides(grad_output, output)
        wanted = make_contiguous_strides_for(output.shape)
        compared = zip(output.shape, strides, wanted, strict=True)
        if any(size != 1 and stride != step for size, stride, step in compared):
            sizes *= 2
    borrow(gpu, *sizes, *copied(output))


def _of_halves(
    whole: _Softmax, kernel: _Softmax, self: Tensor, dim: int, dtype: torch.dtype | None
) -> Tensor:
    """Run ``softmax(input, dim, dtype)``: one kernel from float16 to float32, else after a cast.

    Its tangent multiplies in place (FunctionsManual.cpp, logsumexp_jvp); autograd keeps a copy.
    """
    in_place = is_dual(self) and not (self.requires_grad and torch.is_grad_enabled())
    with having(within, "in_place", dict(_OF_TANGENT) if in_place else {}):
        if dtype is torch.float32 and self.dtype is torch.float16:
            return kernel(self, dim, True)
        return whole(self, dim, dtype)


_OF_TANGENT = {_aten.mul.Tensor: _aten.mul_.Tensor}
CALLED_IN_PLACE.update(_OF_TANGENT)


def _reduce_all(gpu: GPU, elements: int, dtype: torch.dtype) -> None:
    reductions.reduce(gpu, (elements,), (1,), dtype, None, reductions.SUMS)


def _elements(self: Tensor, target: Tensor) -> int:
    return math.prod(torch.broadcast_shapes(self.shape, target.shape))


def _enlarged(self: Tensor, target: Tensor, result: Tensor) -> Iterator[Tensor]:
    """Yield a result as large as the input, which shrinks where it is reduced."""
    nbytes = _elements(self, target) * result.element_size()
    if result.untyped_storage().nbytes() < nbytes:
        result.untyped_storage().resize_(nbytes)
    yield result


def _reduced(
    in_result: bool, gpu: GPU, self: Tensor, target: Tensor, reduction: int, result: Tensor
) -> None:
    """Allocate to reduce a loss of each element, which is in the result or in a temporary."""
    if reduction:
        elements = _elements(self, target)
        with Scratch(gpu, (1 if in_result else elements) * result.element_size()):
            _reduce_all(gpu, elements, result.dtype)


def _huber(
    gpu: GPU, self: Tensor, target: Tensor, reduction: int, result: Tensor, out: Any = None
) -> Iterator[Tensor]:
    if out is not None and reduction:
        yield from _enlarged(self, target, result)
        _reduced(True, gpu, self, target, reduction, result)
        return
    with Scratch(gpu, self.nbytes if reduction else 0):
        yield result
        if reduction:
            _reduce_all(gpu, self.numel(), result.dtype)


def _margin_of_rows(
    gpu: GPU, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Scratch:
    copies = Scratch(gpu, *copied(self, target, weight))
    copies.take(self.shape[0] * self.element_size() if self.dim() == 2 and reduction else 0)
    return copies


def _target_first(
    gpu: GPU, self: Tensor, target: Tensor, reduction: int, result: tuple[Tensor, Tensor]
) -> Iterator[Tensor]:
    """Yield target flags and the loss, losses of rows between (multilabel_margin_loss_forward)."""
    is_reduced = self.dim() == 2 and reduction
    with Scratch(gpu, *copied(self, target)) as scratch:
        yield result[1]
        scratch.take(self.shape[0] * self.element_size() if is_reduced else 0)
        yield result[0]


def _of_classes(
    gpu: GPU, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int
) -> Scratch:
    """Copy tensors that a sum reads; single losses are read by strides (NLLLoss2d.cu)."""
    return Scratch(gpu, *copied(*((self, weight, target) if reduction else (weight,))))


# Connectionist temporal classification, by ATen's own kernels.


def _ctc_loss(*args: Any) -> Any:
    """Run ctc_loss with lengths on the host, as for a loss of no subclass."""
    if not args[0].is_cuda:
        return decompose(_aten.ctc_loss.Tensor, *args)
    lengths = [each.flatten().tolist() for each in args[2:4]]
    return _aten.ctc_loss.IntList(*args[:2], *lengths, *args[4:])


def _lengths(gpu: GPU, log_probs: Tensor) -> Scratch:
    """Copy the lengths of targets and of inputs, and where each target begins, from the host."""
    gpu.copies()  # the targets, which the host looks at
    scratch = Scratch(gpu)
    for _ in range(3):
        scratch.take(log_probs.shape[1] * INDEX_BYTES)
        gpu.copies()
    return scratch


def _ctc_backward(gpu: GPU, log_probs: Tensor, log_alpha: Tensor) -> Tensor:
    lengths = _lengths(gpu, log_probs)
    log_beta = torch.empty_like(log_alpha, memory_format=torch.contiguous_format)
    gradient = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    steps, batch, labels = log_probs.shape
    if 2 * steps + 24 * batch // 10 + 2 * labels // 10 > 450:  # is_large: blanks are summed apart
        joined = log_alpha[..., ::2] + log_beta[..., ::2]
        joined.logsumexp(2, keepdim=True)
        del joined
    del log_beta, lengths
    return gradient


ABOVE_AUTOGRAD: dict[str, Composite] = {
    "aten.mish_backward.default": mish_backward,
    "aten.dropout.default": dropout,
    "aten.softmax.int": partial(_of_halves, _aten.softmax.int.decompose, _aten._softmax),
    "aten.log_softmax.int": partial(
        _of_halves, _aten.log_softmax.int.decompose, _aten._log_softmax
    ),
    "aten.ctc_loss.Tensor": _ctc_loss,
}

BELOW_AUTOGRAD: dict[str, Composite] = {"aten._ctc_loss_backward.default": _ctc_backward}

RULES = {
    "_softmax _log_softmax": Rule(after=copies_of("self")),
    "_softmax_backward_data": Rule(after=_backward),
    "_log_softmax_backward_data": Rule(after=copies_of("grad_output", "output")),
    # dropout_cuda makes the mask first; if everything is dropped, zeros come before the mask.
    "native_dropout": Rule(
        outputs=lambda p, train, result: result if p == 1 or train is False else result[::-1]
    ),
    "_ctc_loss": Rule(
        before=_lengths,
        outputs=lambda result: result[::-1],
    ),
    # The buffer is empty on CUDA.
    "log_sigmoid_forward": Rule(outputs=lambda result: result[:1]),
    "mse_loss smooth_l1_loss": Rule(outputs=_enlarged, after=partial(_reduced, False)),
    "binary_cross_entropy soft_margin_loss": Rule(outputs=_enlarged, after=partial(_reduced, True)),
    "huber_loss": Rule(outputs=_huber),
    "nll_loss_forward nll_loss_backward": Rule(after=copies_of("self", "target")),
    "nll_loss2d_forward": Rule(outputs=lambda result: result[::-1], after=_of_classes),
    "multi_margin_loss": Rule(after=_margin_of_rows),
    "multi_margin_loss_backward": Rule(after=copies_of("self", "grad_output", "target")),
    "multilabel_margin_loss_forward": Rule(outputs=_target_first),
    "multilabel_margin_loss_backward": Rule(
        after=copies_of("self", "target", "is_target", "grad_output")
    ),
}
