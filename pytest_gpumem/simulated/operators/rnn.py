"""Recurrent layers: cuDNN's kernels, and their parameters in one buffer.

Source: aten/src/ATen/native/cudnn/RNN.cpp (_cudnn_impl, try_get_weight_buf, _cudnn_rnn,
_cudnn_rnn_backward, _cudnn_rnn_flatten_weight), native/ConvUtils.h (cudnn_is_acceptable), of torch
2.6 to 2.15. cuDNN's workspace and reserve come from :mod:`cudnn`;
the state of its dropout, of a size that only cuDNN determines, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.backends.cudnn.rnn as cudnn_rnn
from torch import Tensor

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators import cudnn, rnn_cells
from pytest_gpumem.simulated.operators.rules import Composite, Scratch, is_traced

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_DTYPES = frozenset({torch.float16, torch.float32, torch.float64})
_aten = torch.ops.aten


def is_acceptable(tensor: Tensor) -> bool:
    """``torch.backends.cudnn.is_acceptable`` of a build that has cuDNN."""
    return _may_be_acceptable(tensor) and tensor.dtype in _DTYPES


def _may_be_acceptable(tensor: Tensor) -> bool:
    return tensor.is_cuda and bool(torch.backends.cudnn.enabled) and tensor.numel() > 0


def _cudnn_takes(gpu: GPU, tensor: Tensor) -> bool:
    """``cudnn_is_acceptable``, which since 2.11 accepts a type that its Python namesake does not.

    So parameters in bfloat16 are never made one buffer, and each call copies them into one.
    """
    also = tensor.dtype is torch.bfloat16 and gpu.version >= (2, 11)
    return _may_be_acceptable(tensor) if also else is_acceptable(tensor)


def _flatten_weight(weights: list[Tensor], per_layer: int, *args: Any) -> Tensor:
    """``torch._cudnn_rnn_flatten_weight``: the parameters become views of one new buffer."""
    elements = _buffer_elements(weights, per_layer)
    buffer = torch.zeros(elements, dtype=weights[0].dtype, device=weights[0].device)
    with torch.no_grad():
        for weight, view in zip(weights, _views(buffer, weights), strict=True):
            view.copy_(weight)
            weight.set_(view)  # type: ignore[call-overload]  # the stubs have storages only
    return buffer


FLATTENING: dict[str, Callable[..., Any]] = {
    "aten._use_cudnn_rnn_flatten_weight.default": lambda: True,
    "aten._cudnn_rnn_flatten_weight.default": _flatten_weight,
}
"""By overload: operators of ``nn.RNNBase.flatten_parameters`` that need no gradient."""


def add_patches(patches: Patches) -> None:
    """Plan replacements of answers that differ in a build without cuDNN."""
    patches.add(torch.backends.cudnn, "is_acceptable", is_acceptable)
    patches.add(cudnn_rnn, "get_cudnn_mode", lambda mode: _MODES[mode.lower()])


_WITHOUT_BIASES = (2, 3)
"""Parameters per layer: both matrices, and a third where the state is projected."""


def _buffer_elements(weights: list[Tensor], per_layer: int) -> int:
    """Return the elements of cuDNN's buffer, which always has two bias vectors per layer."""
    elements = sum(weight.numel() for weight in weights)
    if per_layer in _WITHOUT_BIASES:
        elements += sum(2 * weight.shape[0] for weight in weights[::per_layer])
    return elements


def _views(buffer: Tensor, weights: list[Tensor]) -> list[Tensor]:
    views, offset = [], 0
    for weight in weights:
        views.append(buffer.narrow(0, offset, weight.numel()).view(weight.shape))
        offset += weight.numel()
    return views


def _buffer_of(weights: list[Tensor]) -> Tensor | None:
    first = weights[0].untyped_storage()
    if any(weight.untyped_storage()._cdata != first._cdata for weight in weights[1:]):
        return None
    elements = weights[0].untyped_storage().nbytes() // weights[0].element_size()
    return weights[0].detach().as_strided((elements,), (1,), 0)


def flat_copies(
    weights: list[Tensor], per_layer: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Return a buffer of another type and the parameters as copies in it, as autocast makes them.

    ``copy_weights_to_flat_buf_views`` of native/cudnn/RNN.cpp: gradients go through the copies.
    """
    elements = _buffer_elements(weights, per_layer)
    buffer = torch.zeros(elements, dtype=dtype, device=weights[0].device)
    views = [view.detach() for view in _views(buffer, weights)]
    return buffer, [view.copy_(weight) for view, weight in zip(views, weights, strict=True)]


def _layer(name: str, overload: Any) -> Composite:
    """Return the composite of padded sequences, or of packed ones, which have batch sizes."""
    is_packed = overload._overloadname == "data"

    def layer(gpu: GPU, *args: Any) -> Any:
        input, *rest = args
        batch_sizes = rest.pop(0) if is_packed else None
        hx, params, *shape = rest
        if is_packed:
            shape.append(False)
        if _cudnn_takes(gpu, input):
            lengths = [] if batch_sizes is None else batch_sizes.tolist()
            return _run(name, input, hx, params, shape, lengths)
        has_cell = not is_packed and name in ("lstm", "gru")
        if has_cell and input.is_cuda and not is_traced(input):
            return rnn_cells.run_in_steps(gpu, name, input, hx, params, shape)
        return overload.decompose(*args)

    return layer


def _run(
    name: str,
    input: Tensor,
    hx: Any,
    params: list[Tensor],
    shape: Sequence[Any],
    batch_sizes: list[int],
) -> Any:
    """Run cuDNN's layers; ``shape`` is what follows the parameters in the padded schema."""
    has_biases, layers, dropout, train, bidirectional, batch_first = shape
    hidden, cell = (hx[0], hx[1]) if name == "lstm" else (hx, None)
    size = params[1].shape[1] if name != "lstm" else params[0].shape[0] // 4
    projected = name == "lstm" and hidden.shape[2] != size
    per_layer = (4 if has_biases else 2) + projected
    output, hy, cy, _, _ = _aten._cudnn_rnn(
        input,
        params,
        per_layer,
        _buffer_of(params),
        hidden,
        cell,
        _MODES[name],
        size,
        hidden.shape[2] if projected else 0,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
        None,
    )
    return (output, hy, cy) if name == "lstm" else (output, hy)


COMPOSITES: dict[str, Composite] = {
    f"aten.{name}.{overload}": _layer(name, getattr(getattr(_aten, name), overload))
    for name in _MODES
    for overload in ("input", "data")
} | rnn_cells.COMPOSITES


# Below autograd.


def _forward(
    gpu: GPU,
    input: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    by_time = input.transpose(0, 1) if batch_first and not batch_sizes else input
    copied = by_time.contiguous()
    width = (proj_size or hidden_size) * (2 if bidirectional else 1)
    output = input.new_empty((*copied.shape[:-1], width))
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    cy = input.new_empty(0) if cx is None else torch.empty_like(cx)
    buffer = weight_buf
    if buffer is None:
        buffer = input.new_empty(_buffer_elements(weight, weight_stride0))
    call = _recurrent(mode, hidden_size, num_layers, bidirectional, batch_sizes, copied, buffer)
    workspace = _workspace(gpu, call)
    reserve = input.new_empty(cudnn.reserve_bytes(call) if train else 0, dtype=torch.uint8)
    if train:
        nbytes = gpu.allocator.block(
            gpu.simulation.storages.by_key[reserve.untyped_storage()._cdata].address
        )
        gpu.estimates.hold(reserve, nbytes, f"cuDNN's reserve for {call.name}")
    workspace.free()
    if batch_first and not batch_sizes:
        output = output.transpose(0, 1)
    return output, hy, cy, reserve, buffer


def _recurrent(
    mode: int,
    hidden_size: int,
    layers: int,
    bidirectional: bool,
    batch_sizes: list[int],
    by_time: Tensor,
    buffer: Tensor,
) -> cudnn.Recurrent:
    rows = sum(batch_sizes) if batch_sizes else by_time.shape[0] * by_time.shape[1]
    return cudnn.Recurrent(
        list(_MODES)[mode],
        rows,
        batch_sizes[0] if batch_sizes else by_time.shape[1],
        hidden_size,
        layers,
        2 if bidirectional else 1,
        buffer.numel(),
        buffer.element_size(),
    )


def _workspace(gpu: GPU, call: cudnn.Recurrent) -> Scratch:
    scratch = Scratch(gpu)
    scratch.estimate(cudnn.recurrent_workspace_bytes(call), "cuDNN", call.name)
    return scratch


def _backward(
    gpu: GPU,
    input: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    hidden_size: int,
    num_layers: int,
    batch_first: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    transposed = batch_first and not batch_sizes
    if grad_output is None:
        grad_output = torch.zeros_like(output, memory_format=torch.contiguous_format)
    states = [torch.zeros_like(hx) if grad_hy is None else grad_hy]
    if cx is not None:
        states.append(torch.zeros_like(cx) if grad_cy is None else grad_cy)
    by_time = input.transpose(0, 1) if transposed else input
    call = _recurrent(
        mode, hidden_size, num_layers, bidirectional, batch_sizes, by_time, weight_buf
    )
    kept = [
        by_time.contiguous(),
        (grad_output.transpose(0, 1) if transposed else grad_output).contiguous(),
    ]
    dx = input.new_empty(by_time.shape)
    kept += [state.contiguous() for state in states]
    dhx = torch.empty_like(hx)
    dcx = None if cx is None else torch.empty_like(cx)
    _workspace(gpu, call).free()
    del kept
    grads: list[Tensor] = []
    if output_mask[3]:
        copied = by_time.contiguous()
        buffer = torch.zeros_like(weight_buf)
        workspace = _workspace(gpu, call)
        if weight_stride0 in _WITHOUT_BIASES:
            # cuDNN's layers have biases all the same: the part of the weights is copied.
            grads = [torch.empty_like(one) for one in weight]
        else:
            grads = _views(buffer, weight)
        workspace.free()
        del copied, buffer
    return dx.transpose(0, 1) if transposed else dx, dhx, dcx, grads


IN_VIEW: dict[str, Composite] = {
    "aten._cudnn_rnn.default": _forward,
    "aten._cudnn_rnn_backward.default": _backward,
    **rnn_cells.IN_VIEW,
}
