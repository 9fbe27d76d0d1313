"""Recurrent cells, and the layers that cuDNN does not take: a fused cell for each step.

Source: aten/src/ATen/native/RNN.cpp (LSTMCell, GRUCell, FullLayer, FullBidirectionalLayer,
apply_layer_stack, _lstm_impl), native/cuda/RNN.cu (_thnn_fused_lstm_cell_cuda,
_thnn_fused_gru_cell_cuda), torch 2.6 to 2.15. Layers without gates have no fused cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from pytest_gpumem.simulated.machine.real import recurrent
from pytest_gpumem.simulated.operators.rules import Composite, is_traced

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import GPU

_aten = torch.ops.aten

# One fused kernel behind two products.


def _lstm_cell(*args: Any) -> Any:
    input, hx, *parameters = args
    if not input.is_cuda:
        return _aten.lstm_cell.default.decompose(*args)
    return _lstm_step(input, (hx[0], hx[1]), parameters)


def _lstm_step(input: Tensor, state: tuple[Tensor, Tensor], parameters: Any) -> Any:
    w_ih, w_hh, b_ih, b_hh, *projection = parameters
    gates = (torch.matmul(input, w_ih.t()), torch.matmul(state[0], w_hh.t()))
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(*gates, state[1], b_ih, b_hh)
    return (torch.matmul(hidden, projection[0].t()) if projection else hidden), cell


def _gru_cell(gpu: GPU, *args: Any) -> Any:
    input, hx, *parameters = args
    if not input.is_cuda:
        return _aten.gru_cell.default.decompose(*args)
    if is_traced(input):
        # torch has no shapes for it: compiled code breaks here, and continues after it.
        raise UnsupportedOperatorException(_aten._thnn_fused_gru_cell.default)
    return _gru_step(gpu, input, hx, parameters)


def _gru_step(gpu: GPU, input: Tensor, hx: Tensor, parameters: Any) -> Any:
    w_ih, w_hh, b_ih, b_hh = parameters
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
        # Its gradient may be differentiated, which takes all of them (derivatives.yaml); they are
        # released in the order of their names.
        ctx.save_for_backward(hidden_bias, hidden_gates, hx, input_bias, input_gates, workspace)
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
        wanted = grad_hx if ctx.needs_input_grad[3] else None
        return None, grad_input_gates, grad_hidden_gates, wanted, *grad_biases


COMPOSITES: dict[str, Composite] = {
    "aten.lstm_cell.default": _lstm_cell,
    "aten.gru_cell.default": _gru_cell,
}


def _fused_lstm(input_gates: Tensor, cx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # The shapes that torch has for it ask, up to 2.13, where the biases are, if there are any.
    workspace = torch.empty_like(input_gates, memory_format=torch.contiguous_format)
    hidden, cell = (torch.empty_like(cx, memory_format=torch.contiguous_format) for _ in range(2))
    return hidden, cell, workspace


IN_VIEW: dict[str, Composite] = {"aten._thnn_fused_lstm_cell.default": _fused_lstm}


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
    gpu: GPU, name: str, input: Tensor, hx: Any, params: list[Tensor], shape: Sequence[Any]
) -> Any:
    """Run an ``lstm`` or a ``gru``; ``shape`` is what follows the parameters in its schema."""
    has_biases, layers, dropout, train, bidirectional, batch_first = shape
    size = len(params) // (layers * (2 if bidirectional else 1))
    groups: list[Any] = [params[first : first + size] for first in range(0, len(params), size)]
    if not has_biases:
        groups = [(*group[:2], None, None, *group[2:]) for group in groups]
    by_time = input.transpose(0, 1) if batch_first else input
    chances = dropout if train else 0.0
    if name == "gru":
        cell: _Cell = partial(_gru_step, gpu)
        states = list(hx.unbind(0))
        output, finals = _stacked(cell, by_time, states, groups, chances, bidirectional)
        last: tuple[Tensor, ...] = (torch.stack(finals),)
    else:
        states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
        output, finals = _stacked(_lstm_step, by_time, states, groups, chances, bidirectional)
        cells = torch.stack([cell for _, cell in finals])  # C++ evaluates the last argument first
        last = (torch.stack([hidden for hidden, _ in finals]), cells)
    return (output.transpose(0, 1) if batch_first else output, *last)
