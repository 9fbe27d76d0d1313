"""cuDNN's fused attention of 16 bit: what its kernels and transformer-engine allocate for them.

Source: transformer_engine/pytorch/csrc/extensions/attention.cpp (``fused_attn_fwd``,
``fused_attn_bwd``), common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu and utils.cu
(``get_max_batch_size``, ``get_max_tokens``) of 2.8; cudnn-frontend 1.14,
include/cudnn_frontend/node/scaled_dot_product_flash_attention.h
(``SDPABackwardNode::get_fe_workspace_size_node``). What the plans of cuDNN itself need is in no
source: none is taken for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.simulated.stand_ins.registering import compiled
from pytest_gpumem.simulated.stand_ins.transformer_engine import layouts
from pytest_gpumem.simulated.stand_ins.transformer_engine.kernels import launched
from pytest_gpumem.simulated.stand_ins.usage import tell


class Shape(NamedTuple):
    """Of one call."""

    batch: int
    heads: int
    groups: int
    length_q: int
    length_kv: int
    size_qk: int
    size_v: int
    tokens: tuple[int, int] | None
    """Of queries and of keys, where sequences of a batch lie behind each other."""
    pads: bool
    keeps_scores: bool
    """Whether gradients of scores are kept: of a bias, or to be the same each time."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def quantized_batch(batch: int) -> int:
    """get_max_batch_size(): so that few plans are made."""
    if batch <= 32:
        return 32
    return 1 << (batch - 1).bit_length() if batch <= 512 else batch


def quantized_tokens(tokens: int) -> int:
    """get_max_tokens()."""
    if tokens <= 1024:
        return 1024
    return 1 << (tokens - 1).bit_length() if tokens <= 32768 else _up(tokens, 32768)


def _is_counted() -> bool:
    """Whether cuDNN takes statistics of tokens instead of padded sequences."""
    return (torch.backends.cudnn.version() or 0) >= 90600


def workspace(shape: Shape, *, backward: bool) -> int:
    """Return the bytes beside the plan's own."""
    batch, nbytes = shape.batch, 0
    ragged = shape.tokens is not None and _is_counted()
    if ragged:
        batch = quantized_batch(batch)
    if backward:
        nbytes = _up(_of_gradients(shape), 16)
    if shape.pads:
        nbytes += 2 * _up(4 * batch, 16)
    if shape.tokens is not None:
        width = 8 if (torch.backends.cudnn.version() or 0) >= 90500 else 4
        nbytes += (4 + ragged) * _up((batch + 1) * width, 16)
    return max(nbytes, 1)


def _of_gradients(shape: Shape) -> int:
    """Sums for the softmax, and the gradient of queries in float32."""
    heads, size = shape.heads, shape.size_qk
    if shape.tokens is not None and _is_counted():
        queries, keys = (quantized_tokens(each) for each in shape.tokens)
        nbytes = queries * heads * 4 * (1 + (0 if shape.keeps_scores else size))
        if heads != shape.groups:
            nbytes += keys * heads * (size + shape.size_v) * 4
        return nbytes
    rows = shape.batch * heads * shape.length_q
    if shape.keeps_scores:
        scores = _up(shape.length_q, 64) * _up(shape.length_kv, 64)
        return rows * 4 + shape.batch * heads * scores * 2
    return rows * 4 * (1 + size)


def _take(shape: Shape, device: torch.device, *, backward: bool) -> Tensor:
    tell(
        "the workspace of cuDNN's attention in transformer-engine is an estimate: it leaves out "
        "what cuDNN's own plans need, which only cuDNN knows"
    )
    nbytes = workspace(shape, backward=backward)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _forward(q: Tensor, v: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    launched()
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    state = torch.empty(2, dtype=torch.int64, device=q.device)
    work = _take(shape, q.device, backward=False)
    statistics: tuple[int, ...] = shape.batch, shape.heads, shape.length_q, 1
    if shape.tokens is not None and _is_counted():
        statistics = quantized_tokens(shape.tokens[0]), shape.heads, 1
    sums = torch.empty(statistics, dtype=torch.float32, device=q.device)
    del work
    return out, sums, state


def _backward(
    layout: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor | None, shape: Shape
) -> tuple[list[Tensor], Tensor | None]:
    launched()

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=grad.dtype, device=grad.device)

    if layout == layouts.PACKED:
        made = [empty(*q.shape[:-2], 3, *q.shape[-2:])]
    elif layout == layouts.INTERLEAVED:
        made = [empty(*q.shape[:-1], 3, q.shape[-1])]
    elif layout == layouts.PAIRED:
        made = [empty(*q.shape), empty(*k.shape[:-2], 2, *k.shape[-2:])]
    elif layout == layouts.PAIRED_INTERLEAVED:
        made = [empty(*q.shape), empty(*k.shape[:-1], 2, k.shape[-1])]
    else:
        made = [empty(*each.shape) for each in (q, k, v)]
    of_bias = None if bias is None else empty(*bias.shape)
    _take(shape, grad.device, backward=True)
    return made, of_bias


forward = compiled(_forward)
"""fused_attn_fwd(): output, statistics of the softmax, and the state of the generator."""
_gradients = compiled(_backward)


def backward(
    layout: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias: Tensor | None, shape: Shape
) -> tuple[list[Tensor], Tensor | None]:
    """fused_attn_bwd(): gradients of queries, keys and values, laid out as these, and the bias'."""
    made, of_bias = _gradients(layout, q, k, v, grad, bias, shape)
    dim = -2 if layout in (layouts.INTERLEAVED, layouts.PAIRED_INTERLEAVED) else -3
    if layout == layouts.APART:
        return made, of_bias
    return [*made[:-1], *made[-1].unbind(dim)], of_bias
