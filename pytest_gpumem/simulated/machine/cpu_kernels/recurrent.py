"""cuDNN's recurrent layers, and the cells that CUDA has fused kernels for, on the CPU.

Source: aten/src/ATen/native/cudnn/RNN.cpp and native/RNN.cpp, of torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.machine.signatures import UNREAD

_aten = torch.ops.aten
_LAYERS: tuple[Any, ...] = (torch._VF.rnn_relu, torch._VF.rnn_tanh, torch._VF.lstm, torch._VF.gru)
"""By cuDNN's mode."""
_LSTM = 2
_GATES = (1, 1, 4, 3)
"""Gates of a cell, by cuDNN's mode."""


def _recurrent(
    input: Tensor, weight: list[Tensor], weight_stride0: int, hx: Tensor, cx: Tensor | None,
    mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float,
    train: bool, bidirectional: bool, batch_sizes: Sequence[int],
) -> Any:  # fmt: skip
    if dropout and train:
        raise NotImplementedError("cuDNN does not return its dropout mask")
    state = (hx, cx) if mode == _LSTM else hx
    per_layer = weight_stride0 - (1 if proj_size else 0)
    weight = [
        _in_layer_shape(one, at % weight_stride0, per_layer, _GATES[mode] * hidden_size)
        for at, one in enumerate(weight)
    ]
    shape = (per_layer == 4, num_layers, 0.0, train, bidirectional)
    if batch_sizes:
        sizes = torch.tensor(batch_sizes, device="cpu")
        result = _LAYERS[mode](input, sizes, state, weight, *shape)
    else:
        result = _LAYERS[mode](input, state, weight, *shape, batch_first)
    output, hidden, *cell = result
    return output, hidden, *(cell or [UNREAD]), UNREAD, None


def _in_layer_shape(weight: Tensor, at: int, per_layer: int, rows: int) -> Tensor:
    """Return ``weight``, number ``at`` of its layer, in the shape that a CPU layer expects.

    Autocast passes parts of its buffer, in columns (``get_parameters``).
    """
    if at < 2:
        return weight.reshape(rows, -1)
    return weight.reshape(-1) if at < per_layer else weight


_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def _with_autograd() -> Iterator[None]:
    """Enable autograd inside an operator, where autograd itself has finished."""
    with (
        torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def _leaf(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` that requires a gradient."""
    return tensor.detach().clone().requires_grad_()


def _recurrent_backward(
    input: Tensor, weight: list[Tensor], weight_stride0: int, hx: Tensor, cx: Tensor | None,
    grad_output: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float,
    train: bool, bidirectional: bool, batch_sizes: Sequence[int],
) -> Any:  # fmt: skip
    with _with_autograd():
        data, hidden = _leaf(input), _leaf(hx)
        cell = None if cx is None else _leaf(cx)
        weights = [_leaf(one) for one in weight]
        results = _recurrent(
            data, weights, weight_stride0, hidden, cell, mode, hidden_size, proj_size, num_layers,
            batch_first, dropout, train, bidirectional, batch_sizes,
        )  # fmt: skip
        pairs = zip(results, (grad_output, grad_hy, grad_cy), strict=False)
        used = [(result, gradient) for result, gradient in pairs if gradient is not None]
        wanted = [data, hidden, *([] if cell is None else [cell]), *weights]
        results, gradients = zip(*used, strict=True)
        found = torch.autograd.grad(
            results, wanted, gradients, allow_unused=True, materialize_grads=True
        )
    of_cell = None if cell is None else found[2]
    return found[0], found[1], of_cell, list(found[-len(weights) :])


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None,
    hidden_bias: Tensor | None,
) -> Any:
    gates = _sum(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1)
    entry, forget, exit = (gates[at].sigmoid() for at in (0, 1, 3))
    new = gates[2].tanh()
    cy = forget * cx + entry * new
    return exit * cy.tanh(), cy, torch.cat([entry, forget, new, exit], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> Any:
    entry, forget, new, exit = workspace.chunk(4, 1)
    hidden = torch.zeros_like(cx) if grad_hy is None else grad_hy
    cell = hidden * exit * (1 - cy.tanh() ** 2) + (0 if grad_cy is None else grad_cy)
    parts = (
        cell * new * entry * (1 - entry),
        cell * cx * forget * (1 - forget),
        cell * entry * (1 - new**2),
        hidden * cy.tanh() * exit * (1 - exit),
    )
    gates = torch.cat(parts, 1)
    return gates, cell * forget, gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None,
    hidden_bias: Tensor | None,
) -> Any:
    given = _sum(input_gates, input_bias).chunk(3, 1)
    held = _sum(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (given[0] + held[0]).sigmoid(), (given[1] + held[1]).sigmoid()
    new = (given[2] + reset * held[2]).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, held[2]], 1)


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    reset, update, new, hx, held = workspace.chunk(5, 1)
    by_new = grad_hy * (1 - update) * (1 - new**2)
    by_reset = by_new * held * reset * (1 - reset)
    by_update = grad_hy * (hx - new) * update * (1 - update)
    gates = [torch.cat([by_reset, by_update, each], 1) for each in (by_new, by_new * reset)]
    return *gates, grad_hy * update, *(each.sum(0) if has_bias else None for each in gates)


def _sum(*terms: Tensor | None) -> Tensor:
    total, *others = (term for term in terms if term is not None)
    for term in others:
        total = total + term
    return total


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent_backward,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""By operator name."""
