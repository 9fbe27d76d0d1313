"""Recurrent layers: cuDNN's kernels, their parameters in one buffer, and cells.

Source: aten/src/ATen/native/cudnn/RNN.cpp (_cudnn_impl, try_get_weight_buf, _cudnn_rnn,
_cudnn_rnn_backward, _cudnn_rnn_flatten_weight), native/ConvUtils.h (cudnn_is_acceptable), of torch
2.6 to 2.15. cuDNN's workspace and reserve come from :mod:`cudnn_rnn`.

Layers that cuDNN does not accept run a fused cell for each step: native/RNN.cpp (LSTMCell,
GRUCell, FullLayer, FullBidirectionalLayer, apply_layer_stack, _lstm_impl), native/cuda/RNN.cu
(_thnn_fused_lstm_cell_cuda, _thnn_fused_gru_cell_cuda), torch 2.6 to 2.15. Layers without gates
have no fused cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
import torch.backends.cudnn.rnn
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.machine.storages import storage_key
from pytest_gpumem.simulated.operators import cudnn_rnn
from pytest_gpumem.simulated.operators.rules import (
    Composite,
    Scratch,
    decompose,
    first_of,
    is_traced,
)

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_DTYPES = frozenset({torch.float16, torch.float32, torch.float64})
_aten = torch.ops.aten


def is_acceptable(tensor: Tensor, dtypes: Set[torch.dtype] = _DTYPES) -> bool:
    """Return ``torch.backends.cudnn.is_acceptable`` of a build with cuDNN, for these ``dtypes``."""
    is_enabled = tensor.is_cuda and torch.backends.cudnn.enabled
    return bool(is_enabled and tensor.numel() > 0 and tensor.dtype in dtypes)


def _flatten_weight(weights: list[Tensor], per_layer: int, *args: Any) -> Tensor:
    """Run ``torch._cudnn_rnn_flatten_weight``: the parameters become views of one new buffer."""
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
    patches.add(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: _MODES[mode.lower()])


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


def _layer(name: str, overload: Any, gpu: GPU, *args: Any) -> Any:
    """Run a layer on padded sequences, or on packed ones, which have batch sizes."""
    is_packed = overload._overloadname == "data"
    input, *rest = args
    batch_sizes = rest.pop(0) if is_packed else None
    hx, params, *shape = rest
    if is_packed:
        shape.append(False)
    # cudnn_is_acceptable since 2.11 accepts a type that its Python namesake does not: bfloat16
    # parameters are never made one buffer, and each call copies them into one.
    also = gpu.version >= (2, 11)
    if is_acceptable(input, {*_DTYPES, torch.bfloat16} if also else _DTYPES):
        lengths = [] if batch_sizes is None else batch_sizes.tolist()
        return _run(gpu, name, input, hx, params, shape, lengths)
    has_cell = not is_packed and name in ("lstm", "gru")
    if has_cell and input.is_cuda and not is_traced(input):
        return run_in_steps(name, input, hx, params, shape)
    return decompose(overload, *args)


def _run(
    gpu: GPU,
    name: str,
    input: Tensor,
    hx: Any,
    params: list[Tensor],
    shape: Sequence[Any],
    batch_sizes: list[int],
) -> Any:
    """Run cuDNN's layers; ``shape`` has the arguments after the parameters in the padded schema."""
    has_biases, layers, dropout, train, bidirectional, batch_first = shape
    hidden, cell = (hx[0], hx[1]) if name == "lstm" else (hx, None)
    if dropout > 0 and train and not is_traced(input):
        gpu.hold_dropout_state()
    size = params[1].shape[1] if name != "lstm" else params[0].shape[0] // 4
    projected = name == "lstm" and hidden.shape[2] != size
    per_layer = (4 if has_biases else 2) + projected
    output, hy, cy, _, _ = _aten._cudnn_rnn(
        *(input, params, per_layer, _buffer_of(params), hidden, cell, _MODES[name], size),
        *(hidden.shape[2] if projected else 0, layers, batch_first, dropout, train, bidirectional),
        *(batch_sizes, None),
    )
    return (output, hy, cy) if name == "lstm" else (output, hy)


# Below autograd.


def _forward(
    gpu: GPU,
    input: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    settings = args[6:15]
    _, hidden_size, proj_size, _, batch_first, _, train, bidirectional, batch_sizes = settings
    by_time = input.transpose(0, 1) if batch_first and not batch_sizes else input
    copied = by_time.contiguous()
    width = (proj_size or hidden_size) * (2 if bidirectional else 1)
    output = input.new_empty((*copied.shape[:-1], width))
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    cy = input.new_empty(0) if cx is None else torch.empty_like(cx)
    buffer = weight_buf
    if buffer is None:
        buffer = input.new_empty(_buffer_elements(weight, weight_stride0))
    call = _recurrent(copied, settings)
    workspace = _workspace(gpu, call)
    reserve = input.new_empty(cudnn_rnn.reserve_bytes(call) if train else 0, dtype=torch.uint8)
    if train:
        address = gpu.simulation.storages.by_key[storage_key(reserve)].address
        nbytes = gpu.allocator.block(address)
        gpu.estimates.hold(reserve, nbytes, f"cuDNN's reserve for {call.name}")
    workspace.free()
    if batch_first and not batch_sizes:
        output = output.transpose(0, 1)
    return output, hy, cy, reserve, buffer


def _recurrent(by_time: Tensor, settings: Sequence[Any]) -> cudnn_rnn.Recurrent:
    """Return a call of layers; ``settings`` are the schema's, from the mode to the batch sizes."""
    mode, hidden, projected, layers, _, dropout, train, bidirectional, batch_sizes = settings
    steps, batch = (len(batch_sizes), batch_sizes[0]) if batch_sizes else by_time.shape[:2]
    rows = sum(batch_sizes) if batch_sizes else steps * batch
    sizes = by_time.shape[-1], hidden, projected, layers, 2 if bidirectional else 1, batch, steps
    is_bfloat16 = by_time.dtype == torch.bfloat16
    flags = is_bfloat16, bool(batch_sizes), dropout > 0, train
    element_bytes = by_time.element_size()
    return cudnn_rnn.Recurrent(list(_MODES)[mode], *sizes, rows, element_bytes, *flags)


def _workspace(gpu: GPU, call: cudnn_rnn.Recurrent) -> Scratch:
    scratch = Scratch(gpu)
    scratch.estimate(cudnn_rnn.workspace_bytes(call), "cuDNN", call.name)
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
    output_mask: list[bool],
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    settings = args[10:19]
    _, _, _, _, batch_first, _, _, _, batch_sizes = settings
    transposed = batch_first and not batch_sizes
    if grad_output is None:
        grad_output = torch.zeros_like(output, memory_format=torch.contiguous_format)
    states = [torch.zeros_like(hx) if grad_hy is None else grad_hy]
    if cx is not None:
        states.append(torch.zeros_like(cx) if grad_cy is None else grad_cy)
    by_time = input.transpose(0, 1) if transposed else input
    call = _recurrent(by_time, settings)
    gradient = grad_output.transpose(0, 1) if transposed else grad_output
    kept = [by_time.contiguous(), gradient.contiguous()]
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
        with _workspace(gpu, call):
            if weight_stride0 in _WITHOUT_BIASES:
                # cuDNN's layers have biases anyway: only the weights' part is copied.
                grads = [torch.empty_like(one) for one in weight]
            else:
                grads = _views(buffer, weight)
        del copied, buffer
    return dx.transpose(0, 1) if transposed else dx, dhx, dcx, grads


# One fused kernel after two products.


def _lstm_cell(*args: Any) -> Any:
    input, hx, *parameters = args
    if not input.is_cuda:
        return decompose(_aten.lstm_cell.default, *args)
    return _lstm_step(input, (hx[0], hx[1]), parameters)


def _lstm_step(input: Tensor, state: tuple[Tensor, Tensor], parameters: Any) -> Any:
    w_ih, w_hh, b_ih, b_hh, *projection = parameters
    gates = (torch.matmul(input, w_ih.t()), torch.matmul(state[0], w_hh.t()))
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(*gates, state[1], b_ih, b_hh)
    return (torch.matmul(hidden, projection[0].t()) if projection else hidden), cell


def _gru_cell(*args: Any) -> Any:
    input, hx, *parameters = args
    if not input.is_cuda:
        return decompose(_aten.gru_cell.default, *args)
    if is_traced(input):
        # torch has no shapes for it: compiled code breaks here, and continues after it.
        raise UnsupportedOperatorException(_aten._thnn_fused_gru_cell.default)
    return _gru_step(input, hx, parameters)


def _gru_step(input: Tensor, hx: Tensor, parameters: Any) -> Any:
    w_ih, w_hh, b_ih, b_hh = parameters
    gates = (torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t()))
    return first_of(_aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh))


def _fused_gru(hx: Tensor) -> tuple[Tensor, Tensor]:
    workspace = hx.new_empty((hx.shape[0], hx.shape[1] * 5))
    return torch.empty_like(hx, memory_format=torch.contiguous_format), workspace


def _fused_gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    batch, size = grad_hy.shape
    gates = [workspace.new_empty((batch, 3 * size)) for _ in range(2)]
    grad_hx = torch.empty_like(grad_hy, memory_format=torch.contiguous_format)
    return *gates, grad_hx, *(each.sum(0) if has_bias else None for each in gates)


def _fused_lstm(input_gates: Tensor, cx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Up to 2.13 torch's own meta kernel asks for the device of biases, if there are any.
    workspace = torch.empty_like(input_gates, memory_format=torch.contiguous_format)
    hidden, cell = (torch.empty_like(cx, memory_format=torch.contiguous_format) for _ in range(2))
    return hidden, cell, workspace


def _fused_lstm_backward(
    cx: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    gates, grad_cx = (
        torch.empty_like(each, memory_format=torch.contiguous_format) for each in (workspace, cx)
    )
    return gates, grad_cx, gates.sum(0) if has_bias else None


# Layers of padded sequences.

_Cell = Callable[[Tensor, Any, Sequence[Tensor | None]], Any]
"""(input, state, parameters of a layer) -> the next state."""


def _stacked(
    cell: _Cell,
    input: Tensor,
    states: list[Any],
    groups: list[Sequence[Tensor | None]],
    dropout: float,
    bidirectional: bool,
) -> tuple[Tensor, list[Any]]:
    """Return the output of the last layer by time, and the final state of each direction.

    ``states`` and ``groups`` have an entry for each layer and direction; a ``dropout`` above zero
    applies between layers.
    """
    finals: list[Any] = []
    directions = 2 if bidirectional else 1
    for first in range(0, len(groups), directions):
        if first and dropout:
            input = torch.dropout(input, dropout, True)
        if bidirectional:
            pairs = [(states[first + at], groups[first + at]) for at in range(2)]
            input, *final = _both_ways(cell, input, pairs)
        else:
            outputs, *final = _steps(cell, input.unbind(0), states[first], groups[first])
            input = torch.stack(outputs)
            del outputs
        finals += final
    return input, finals


def _both_ways(
    cell: _Cell, input: Tensor, pairs: list[tuple[Any, Sequence[Tensor | None]]]
) -> tuple[Tensor, Any, Any]:
    steps = input.unbind(0)
    forward, last = _steps(cell, steps, *pairs[0])
    there = torch.stack(forward)
    backward, first = _steps(cell, steps[::-1], *pairs[1])
    back = torch.stack(backward[::-1])
    return torch.cat([there, back], there.dim() - 1), last, first


def _steps(
    cell: _Cell, steps: Sequence[Tensor], state: Any, parameters: Sequence[Tensor | None]
) -> tuple[list[Tensor], Any]:
    outputs = []
    for step in steps:
        state = cell(step, state, parameters)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return outputs, state


def run_in_steps(
    name: str, input: Tensor, hx: Any, params: list[Tensor], shape: Sequence[Any]
) -> Any:
    """Run an ``lstm`` or a ``gru``; ``shape`` has the arguments after the parameters."""
    has_biases, layers, dropout, train, bidirectional, batch_first = shape
    size = len(params) // (layers * (2 if bidirectional else 1))
    groups: list[Any] = [params[first : first + size] for first in range(0, len(params), size)]
    if not has_biases:
        groups = [(*group[:2], None, None, *group[2:]) for group in groups]
    by_time = input.transpose(0, 1) if batch_first else input
    chances = dropout if train else 0.0
    if name == "gru":
        states = list(hx.unbind(0))
        output, finals = _stacked(_gru_step, by_time, states, groups, chances, bidirectional)
        last: tuple[Tensor, ...] = (torch.stack(finals),)
    else:
        states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
        output, finals = _stacked(_lstm_step, by_time, states, groups, chances, bidirectional)
        cells = torch.stack([cell for _, cell in finals])  # C++ evaluates the last argument first
        last = (torch.stack([hidden for hidden, _ in finals]), cells)
    return (output.transpose(0, 1) if batch_first else output, *last)


ABOVE_AUTOGRAD: dict[str, Composite] = {
    **{
        f"aten.{name}.{overload}": partial(_layer, name, getattr(getattr(_aten, name), overload))
        for name in _MODES
        for overload in ("input", "data")
    },
    "aten.lstm_cell.default": _lstm_cell,
    "aten.gru_cell.default": _gru_cell,
}
BELOW_AUTOGRAD: dict[str, Composite] = {
    "aten._cudnn_rnn.default": _forward,
    "aten._cudnn_rnn_backward.default": _backward,
    "aten._thnn_fused_gru_cell.default": _fused_gru,
    "aten._thnn_fused_gru_cell_backward.default": _fused_gru_backward,
    "aten._thnn_fused_lstm_cell.default": _fused_lstm,
    "aten._thnn_fused_lstm_cell_backward_impl.default": _fused_lstm_backward,
}
