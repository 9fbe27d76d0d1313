"""Recurrent layers: cuDNN's kernels, their parameters in one buffer, and the fused cells.

Source: aten/src/ATen/native/cudnn/RNN.cpp (_cudnn_impl, try_get_weight_buf, _cudnn_rnn,
_cudnn_rnn_backward, _cudnn_rnn_flatten_weight), native/RNN.cpp (LSTMCell, GRUCell),
native/cuda/RNN.cu (_thnn_fused_lstm_cell_cuda, _thnn_fused_gru_cell_cuda), native/ConvUtils.h
(cudnn_is_acceptable), of torch 2.6 to 2.15. cuDNN's workspace and reserve come from :mod:`cudnn`;
the state of its dropout, of a size that only cuDNN determines, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.backends.cudnn.rnn as cudnn_rnn
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.real import recurrent
from pytest_gpumem.simulated.operators import cudnn
from pytest_gpumem.simulated.operators.rules import Composite, Rule, Scratch, is_traced

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_LSTM = 2
_DTYPES = frozenset({torch.float16, torch.float32, torch.float64})
_aten = torch.ops.aten


def is_acceptable(tensor: Tensor) -> bool:
    """``torch.backends.cudnn.is_acceptable`` of a build that has cuDNN."""
    return (
        tensor.is_cuda
        and bool(torch.backends.cudnn.enabled)
        and tensor.dtype in _DTYPES
        and tensor.numel() > 0
    )


def flatten_weight(weights: list[Tensor], per_layer: int, *args: Any) -> Tensor:
    """``torch._cudnn_rnn_flatten_weight``: the parameters become views of one new buffer."""
    elements = _buffer_elements(weights, per_layer)
    buffer = torch.zeros(elements, dtype=weights[0].dtype, device=weights[0].device)
    with torch.no_grad():
        for weight, view in zip(weights, _views(buffer, weights), strict=True):
            view.copy_(weight)
            weight.set_(view)  # type: ignore[call-overload]  # the stubs have storages only
    return buffer


def add_patches(patches: Patches) -> None:
    """Plan replacements of answers that differ in a build without cuDNN."""
    patches.add(torch.backends.cudnn, "is_acceptable", is_acceptable)
    patches.add(cudnn_rnn, "get_cudnn_mode", lambda mode: _MODES[mode.lower()])
    patches.add(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    patches.add(torch, "_cudnn_rnn_flatten_weight", flatten_weight)


def _elements(weights: list[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


_WITHOUT_BIASES = (2, 3)
"""Parameters per layer: both matrices, and a third where the state is projected."""


def _buffer_elements(weights: list[Tensor], per_layer: int) -> int:
    """Return the elements of cuDNN's buffer, which always has two bias vectors per layer."""
    elements = _elements(weights)
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


# The composite operators, one for padded and one for packed sequences.


def _padded(name: str, overload: Any) -> Composite:
    def layer(
        input: Tensor,
        hx: Any,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        *args: Any,
    ) -> Any:
        if not is_acceptable(input):
            return overload.decompose(*args)
        shape = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return _run(name, input, hx, params, shape, [])

    return layer


def _packed(name: str, overload: Any) -> Composite:
    def layer(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        *args: Any,
    ) -> Any:
        if not is_acceptable(data):
            return overload.decompose(*args)
        shape = (has_biases, num_layers, dropout, train, bidirectional, False)
        return _run(name, data, hx, params, shape, batch_sizes.tolist())

    return layer


def _run(
    name: str,
    input: Tensor,
    hx: Any,
    params: list[Tensor],
    shape: tuple[bool, int, float, bool, bool, bool],
    batch_sizes: list[int],
) -> Any:
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
    f"aten.{name}.{overload}": make(name, getattr(getattr(_aten, name), overload))
    for name in _MODES
    for overload, make in (("input", _padded), ("data", _packed))
}


# Cells: one fused kernel behind two products.


def _lstm_cell(
    input: Tensor,
    hx: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Any:
    if not input.is_cuda:
        return _aten.lstm_cell.default.decompose(input, hx, w_ih, w_hh, b_ih, b_hh)
    gates = (torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t()))
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return hidden, cell


def _gru_cell(
    gpu: GPU,
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Any:
    if not input.is_cuda:
        return _aten.gru_cell.default.decompose(input, hx, w_ih, w_hh, b_ih, b_hh)
    if is_traced(input):
        # torch has no shapes for it: compiled code breaks here, and continues after it.
        raise UnsupportedOperatorException(_aten._thnn_fused_gru_cell.default)
    gates = (torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t()))
    return _FusedGruCell.apply(gpu, *gates, hx, b_ih, b_hh)  # type: ignore[no-untyped-call]  # torch's


class _FusedGruCell(torch.autograd.Function):
    """_thnn_fused_gru_cell and its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        gpu: GPU,
        input_gates: Tensor,
        hidden_gates: Tensor,
        hx: Tensor,
        input_bias: Tensor | None,
        hidden_bias: Tensor | None,
    ) -> Tensor:
        workspace = hx.new_empty((hx.shape[0], hx.shape[1] * 5))
        # Its gradient may be differentiated, which takes the gates (derivatives.yaml).
        ctx.save_for_backward(hidden_gates, input_gates, workspace)
        ctx.biases = (input_bias is not None, hidden_bias is not None)
        output = torch.empty_like(hx, memory_format=torch.contiguous_format)
        gates = (input_gates, hidden_gates, hx, input_bias, hidden_bias)
        ctx.gpu = gpu
        gpu.simulation.values.assign((output, workspace), recurrent.gru_cell, *gates)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *_, workspace = ctx.saved_tensors
        batch, size = gradients[0].shape
        grad_input_gates = workspace.new_empty((batch, 3 * size))
        grad_hidden_gates = workspace.new_empty((batch, 3 * size))
        grad_hx = torch.empty_like(gradients[0], memory_format=torch.contiguous_format)
        ctx.gpu.simulation.values.assign(
            (grad_input_gates, grad_hidden_gates, grad_hx),
            recurrent.gru_cell_backward,
            gradients[0],
            workspace,
        )
        grad_biases = [
            gates.sum(0) if has_bias else None
            for gates, has_bias in zip(
                (grad_input_gates, grad_hidden_gates), ctx.biases, strict=True
            )
        ]
        return None, grad_input_gates, grad_hidden_gates, grad_hx, *grad_biases


COMPOSITES |= {
    "aten.lstm_cell.default": _lstm_cell,
    "aten.gru_cell.default": _gru_cell,
}


def _fused_lstm_outputs(result: tuple[Tensor, Tensor, Tensor]) -> Iterator[Tensor]:
    hidden, cell, workspace = result
    yield from (workspace, hidden, cell)


RULES = {"aten::_thnn_fused_lstm_cell": Rule(placed=_fused_lstm_outputs)}


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
        next(name for name, number in _MODES.items() if number == mode),
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
}
