"""Recurrent layers: cuDNN's kernels, and their parameters in one buffer.

Source: aten/src/ATen/native/cudnn/RNN.cpp (_cudnn_impl, try_get_weight_buf, _cudnn_rnn,
_cudnn_rnn_backward, _cudnn_rnn_flatten_weight), native/RNN.cpp, native/ConvUtils.h
(cudnn_is_acceptable). cuDNN's workspace, its reserve and the state of its dropout have sizes that
only cuDNN knows: they are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends.cudnn import rnn as cudnn_rnn

from pytest_gpumem.simulated.patching import Patches

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


def flatten_weight(weights: list[Tensor], *args: Any) -> Tensor:
    """``torch._cudnn_rnn_flatten_weight``: the parameters become views of one new buffer."""
    buffer = torch.zeros(_elements(weights), dtype=weights[0].dtype, device=weights[0].device)
    with torch.no_grad():
        for weight, view in zip(weights, _views(buffer, weights), strict=True):
            weight.set_(view)  # type: ignore[call-overload]  # the stubs know storages only
    return buffer


def plan(patches: Patches) -> None:
    """What a build without cuDNN answers otherwise."""
    patches.plan(torch.backends.cudnn, "is_acceptable", is_acceptable)
    patches.plan(cudnn_rnn, "get_cudnn_mode", lambda mode: _MODES[mode.lower()])
    patches.plan(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    patches.plan(torch, "_cudnn_rnn_flatten_weight", flatten_weight)


def _elements(weights: list[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


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
    return weights[0].detach().as_strided((_elements(weights),), (1,), 0)


# The composite operators, one for padded and one for packed sequences.


def _padded(name: str, overload: Any) -> Callable[..., Any]:
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
    ) -> Any:
        if not is_acceptable(input):
            return overload.decompose(
                input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
                batch_first,
            )  # fmt: skip
        shape = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return _run(name, input, hx, params, shape, [])

    return layer


def _packed(name: str, overload: Any) -> Callable[..., Any]:
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
    ) -> Any:
        if not is_acceptable(data):
            return overload.decompose(
                data, batch_sizes, hx, params, has_biases, num_layers, dropout, train,
                bidirectional,
            )  # fmt: skip
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


COMPOSITES: dict[str, Callable[..., Any]] = {
    f"aten.{name}.{overload}": make(name, getattr(getattr(_aten, name), overload))
    for name in _MODES
    for overload, make in (("input", _padded), ("data", _packed))
}


# Below autograd.


def _forward(
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
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: Tensor | None,
) -> Any:
    by_time = input.transpose(0, 1) if batch_first and not batch_sizes else input
    copied = by_time.contiguous()
    width = (proj_size or hidden_size) * (2 if bidirectional else 1)
    output = input.new_empty((*copied.shape[:-1], width))
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    cy = input.new_empty(0) if cx is None else torch.empty_like(cx)
    buffer = weight_buf if weight_buf is not None else input.new_empty(_elements(weight))
    reserve = input.new_empty(0, dtype=torch.uint8)
    if batch_first and not batch_sizes:
        output = output.transpose(0, 1)
    return output, hy, cy, reserve, buffer


def _backward(
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
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: Tensor | None,
    reserve: Tensor,
    output_mask: list[bool],
) -> Any:
    transposed = batch_first and not batch_sizes
    if grad_output is None:
        grad_output = torch.zeros_like(output, memory_format=torch.contiguous_format)
    kept = [torch.zeros_like(hx) if grad_hy is None else grad_hy]
    if cx is not None:
        kept.append(torch.zeros_like(cx) if grad_cy is None else grad_cy)
    by_time = input.transpose(0, 1) if transposed else input
    kept += [
        by_time.contiguous(),
        (grad_output.transpose(0, 1) if transposed else grad_output).contiguous(),
        (output.transpose(0, 1) if transposed else output).contiguous(),
    ]
    dx = input.new_empty(by_time.shape)
    dhx = torch.empty_like(hx)
    dcx = None if cx is None else torch.empty_like(cx)
    grads: list[Tensor] = []
    if output_mask[3]:
        grads = _views(torch.zeros_like(weight_buf), weight)
    return dx.transpose(0, 1) if transposed else dx, dhx, dcx, grads


IN_VIEW: dict[str, Callable[..., Any]] = {
    "aten._cudnn_rnn.default": _forward,
    "aten._cudnn_rnn_backward.default": _backward,
}
