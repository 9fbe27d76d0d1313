"""scaled_dot_product_attention: allocations of the kernel that CUDA takes.

Source: aten/src/ATen/native/transformers/attention.cpp (scaled_dot_product_attention and the math
path), cuda/attention.cu, attention_backward.cu, cuda/flash_attn/flash_api.cpp (mha_fwd, mha_bwd,
set_params_splitkv), cuda/mem_eff_attention/kernel_forward.h, kernel_backward.h and
kernels/cutlassB.h, of torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pytest_gpumem.simulated.common import raw
from pytest_gpumem.simulated.common.raw import META
from pytest_gpumem.simulated.gpu.catalogue import limits_of
from pytest_gpumem.simulated.gpu.releases import cudnn_of
from pytest_gpumem.simulated.operators import reductions
from pytest_gpumem.simulated.operators.attention_choice import (
    EFFICIENT,
    FLASH,
    MATH,
    AttentionCall,
    splits_of,
)
from pytest_gpumem.simulated.operators.cudnn import ATTENTION_BYTES
from pytest_gpumem.simulated.operators.layout import HALF_DTYPES, copied, round_up
from pytest_gpumem.simulated.operators.rules import (
    Composite,
    Rule,
    Scratch,
    borrow,
    first_of,
    with_in_place,
)
from pytest_gpumem.sizes import KIB

_FLOAT_BYTES = 4

if TYPE_CHECKING:
    from pytest_gpumem.simulated.machine.machine import GPU

_aten = torch.ops.aten


def scaled_dot_product_attention(gpu: GPU, *args: Any) -> Tensor:
    """Run ``aten::scaled_dot_product_attention`` by the kernel that CUDA chooses."""
    *given, scale, enable_gqa = args
    given.append(enable_gqa)
    call = AttentionCall(gpu, *given)
    query, key, value, mask = call.query, call.key, call.value, call.mask
    are_heads_alone = query.dim() == key.dim() == value.dim() == 3
    if gpu.version >= _HEADS_ALONE_SINCE and are_heads_alone:
        batch = [tensor.unsqueeze(0) for tensor in (query, key, value)]
        mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 3 else mask
        return scaled_dot_product_attention(gpu, *batch, mask, *args[4:]).squeeze(0)
    kernel = call.kernel()
    mask = _as_bias(mask, query)
    options = call.dropout, call.causal
    if kernel == MATH:
        made = _by_products(query, key, value, mask, *options, None, scale, call.gqa)
        return first_of(made)  # type: ignore[no-any-return]  # a composite
    if kernel == FLASH:
        padded = [with_padded_heads(tensor) for tensor in (query, key, value)]
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        flash = _aten._scaled_dot_product_flash_attention
        out: Tensor = first_of(flash(*padded, *options, scale=scale))
        size = value.shape[-1]
        return out if out.shape[-1] == size else out[..., :size]
    if kernel == EFFICIENT:
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        keeps = call.trains or (mask is not None and mask.requires_grad and call.grad_mode)
        fused = _aten._scaled_dot_product_efficient_attention
    else:
        keeps, fused = call.trains, _aten._scaled_dot_product_cudnn_attention
    return first_of(fused(query, key, value, mask, keeps, *options, scale=scale))  # type: ignore[no-any-return]  # an operator


ABOVE_AUTOGRAD: dict[str, Composite] = {
    "aten.scaled_dot_product_attention.default": scaled_dot_product_attention
}

_HEADS_ALONE_SINCE = (2, 14)
"""First release that takes tensors of three dimensions for a batch of one (tried on 2.13, 2.15)."""


def _as_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    # convert_boolean_attn_mask: where(mask, 0.0, scalar_tensor(-inf)).
    if mask is None or mask.dtype != torch.bool:
        return mask
    hidden = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=mask.device)
    shown = torch.scalar_tensor(0.0, dtype=query.dtype, device=mask.device)
    return torch.where(mask, shown, hidden)


def with_padded_heads(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with its heads a multiple of 8 long: a copy, unless they are."""
    excess = tensor.shape[-1] % 8
    return pad(tensor, (0, 8 - excess)) if excess else tensor


_MASK_ALIGNMENT = 8
_GRADIENT_ALIGNMENT = 16


def _aligned(mask: Tensor) -> Tensor:
    """Return the efficient kernel's mask (preprocess_mask), with rows of multiples of 8."""
    if mask.stride(-1) == 1 and not any(s % _MASK_ALIGNMENT for s in mask.stride()[:-1]):
        return mask
    size = mask.shape[-1]
    padded = pad(mask, (0, _MASK_ALIGNMENT - size % _MASK_ALIGNMENT))
    return padded[..., :size]


_by_products = with_in_place(
    _aten._scaled_dot_product_attention_math.default, {_aten.add.Tensor: _aten.add_.Tensor}
)


# Allocations of the kernels.


def _flash_outputs(
    gpu: GPU, query: Tensor, key: Tensor, dropout_p: float, result: tuple[Tensor, ...]
) -> Iterator[Tensor]:
    # out, logsumexp, ..., seed, offset, ...: the last two are CPU tensors up to 2.6.
    state = result[6:8] if gpu.version >= (2, 7) else ()
    return flash_outputs(gpu, query, key, dropout_p, result[:2], state)


def flash_outputs(
    gpu: GPU,
    query: Tensor,
    key: Tensor,
    dropout_p: float,
    sums: Sequence[Tensor],
    state: Sequence[Tensor],
) -> Iterator[Tensor]:
    """Yield the outputs of mha_fwd: ``sums``, and the generator's ``state``.

    If the keys of (batch, heads, length, size) are split, a logsumexp and an output for each split
    are allocated between them.
    """
    yield from sums
    batch, heads, length, size = query.shape
    if length == 1 and heads > key.shape[1]:
        length, heads = heads // key.shape[1], key.shape[1]
    blocks = batch * heads * -(-length // 64)
    splits = 1 if dropout_p else splits_of(gpu.model.sm_count, blocks, size, key.shape[2])
    rows = splits * batch * heads * length * _FLOAT_BYTES if splits > 1 else 0
    parts = Scratch(gpu)
    taken = parts.take(rows), parts.take(rows * head_size_rounded(size, gpu.version))
    yield from generator_state(gpu, dropout_p, state)
    parts.drop(*taken)


def generator_state(gpu: GPU, dropout_p: float, state: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield seeds and an unused number of mha_fwd and mha_varlen_fwd (flash_api.cpp).

    The seeds are allocated for the capture of a graph; dropout allocates others, and frees these.
    """
    with Scratch(gpu, _RNG_STATE if dropout_p and state else 0):
        if dropout_p:
            gpu.draw()
        yield from reversed(state) if dropout_p else state


def efficient_outputs(gpu: GPU, dropout_p: float, result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the outputs of the memory efficient kernel that are on the device.

    Seed and offset are there, and come first, in a capture, and since 2.14 where there is no
    dropout; else they are on the CPU (seen with torch 2.13.0+cu130, 2.14.1 and 2.15.0+cu132).
    """
    is_captured = gpu.simulation.streams.is_capturing(gpu.index)
    if is_captured or (gpu.version >= (2, 14) and not dropout_p):
        return result[2], result[3], result[0], result[1]
    return result[:2]


def _cudnn_backward(gpu: GPU, grad_out: Tensor | None, query: Tensor, out: Tensor) -> None:
    """Allocate for run_cudnn_SDP_bprop (MHA.cpp): a copy of the gradient, then the frontend's sums.

    Without a gradient its results stay as they were allocated.
    cudnn-frontend sums queries' gradients, and a number of each row, in float32
    (scaled_dot_product_flash_attention.h, dQ_accum and softmax_sum); seen on torch's own code.
    """
    if grad_out is None:
        return
    sums = (query.numel() // query.shape[-1]) * (query.shape[-1] + 1) * _FLOAT_BYTES
    if cudnn_of(gpu.version) < 90501:
        is_copied = grad_out.stride() != out.stride()
    else:
        is_copied = grad_out.stride(-1) != 1
    borrow(gpu, out.nbytes if is_copied else 0, sums + ATTENTION_BYTES)


def head_size_rounded(size: int, version: tuple[int, int]) -> int:
    """Return the elements of a head in flash-attention's accumulators (flash_api.cpp)."""
    if size > 128 and version >= _WIDE_HEADS_BY_64:
        return round_up(size, 64)
    if size > 192 and version >= _WIDEST_HEADS_ALIKE:
        return 256
    return round_up(size, 32)


_WIDEST_HEADS_ALIKE, _WIDE_HEADS_BY_64 = (2, 7), (2, 11)
"""First releases with these rules, seen in the allocations of 2.6 to 2.8, 2.10, 2.11 and 2.13 to
2.15; 2.9 and 2.12 are taken to follow their neighbours."""


_RNG_STATE = 16
"""Two numbers of 64 bits."""


def _copies_by_length(gpu: GPU, *read: Tensor) -> Scratch:
    return Scratch(gpu, *copied(*(each.transpose(1, 2) for each in read)))


def flash_backward(gpu: GPU, query: Tensor, key: Tensor, starts: Tensor | None = None) -> None:
    """Allocate row sums, queries' gradients in float32, and those of repeated keys and values.

    Tensors are (batch, heads, length, size); with ``starts`` of sequences (lengths, heads, size).
    """
    heads, size = query.shape[1], query.shape[-1]
    if starts is None:
        batch = query.shape[0]
        rows = batch * round_up(query.shape[2], 128)
    else:
        batch = starts.numel() - 1
        rows = query.shape[0] + 128 * batch
    rows *= heads * _FLOAT_BYTES
    copies = 1
    if torch.are_deterministic_algorithms_enabled():
        copies = -(-gpu.model.sm_count // (batch * heads))
    expanded = [key.nbytes // key.shape[1] * heads] * 2 if key.shape[1] != heads else []
    borrow(gpu, rows, copies * rows * head_size_rounded(size, gpu.version), *expanded)


_KEYS_AT_ONCE = 128
"""Value head size up to which the efficient kernel keeps its output in registers."""


def efficient_forward(gpu: GPU, query: Tensor, value: Tensor, result: tuple[Tensor, ...]) -> None:
    """Allocate the output in float32, where it does not stay in registers."""
    if query.dtype in HALF_DTYPES and value.shape[-1] > _KEYS_AT_ONCE:
        borrow(gpu, result[0].numel() * 4)


def efficient_backward(
    gpu: GPU,
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    lengths: tuple[int, int, int] | None = None,
) -> None:
    """Allocate the temporaries of the efficient kernel's backward.

    ``lengths``: the number of concatenated sequences, and the most queries and keys of one.
    """
    batch, heads, length, size = query.shape
    sizes = size, value.shape[-1]
    rows = batch * heads * length
    half = query.dtype in HALF_DTYPES
    block, keys_block = _backward_blocks(gpu, half, max(sizes), dropout_p > 0)
    in_registers = half and max(sizes) <= block
    scratch = Scratch(gpu)
    grouped = (key, value) if heads != key.shape[1] else ()
    for tensor in grouped:
        # grad_k_expanded, grad_v_expanded: one for each head of queries.
        scratch.take(tensor.nbytes // tensor.shape[1] * heads)
    if half and (in_registers or gpu.model.compute_capability != (7, 0)):
        delta = scratch.take(rows * 4)
    else:
        products = [scratch.take(grad_out_.numel() * 4) for _ in range(3 if half else 1)]
        delta = sums = scratch.take(rows * 4)
        if heads > 1 and length > 1:  # else the transposed sums are contiguous as they are
            delta = scratch.take(rows * 4)
            scratch.drop(sums)
        scratch.drop(*reversed(products))
    sequences, queries, keys = lengths or (batch, length, key.shape[2])
    staged = sizes if half and not in_registers else None
    blocks = block, keys_block
    scratch.take(_workspace(sequences * heads, queries, keys, size, staged, blocks))
    scratch.drop(delta)
    for tensor in grouped:
        _sum_groups(gpu, tensor, heads)


def _sum_groups(gpu: GPU, tensor: Tensor, heads: int) -> None:
    """Allocate for ``at::sum_out`` of gradients of queries' heads to the heads of ``tensor``."""
    batch, own_heads, length, size = tensor.shape
    groups = heads // own_heads
    shape = batch, length, own_heads, groups, size
    strides = length * heads * size, heads * size, groups * size, size, 1
    reductions.reduce(gpu, shape, strides, tensor.dtype, 3, reductions.SUMS)


def _gradients_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    grad_input_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the efficient kernel's gradients: up to 2.13 torch's shapes assume equal heads."""
    by_query, by_key, by_value = (
        raw.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype, device=META)
        for tensor in (query, key, value)
    )
    if attn_bias is None or not grad_input_mask[3]:
        return by_query, by_key, by_value, None
    return by_query, by_key, by_value, gradient_of_bias(attn_bias)


def gradient_of_bias(bias: Tensor) -> Tensor:
    """Return the gradient of an efficient kernel's bias, on meta, in rows of multiples of 16."""
    *sizes, last = bias.shape
    rows = round_up(last, _GRADIENT_ALIGNMENT)
    return raw.empty((*sizes, rows), dtype=bias.dtype, device=META)[..., :last]


def _backward_blocks(gpu: GPU, half: bool, size: int, drops: bool) -> tuple[int, int]:
    """Return kBlockSizeI, kBlockSizeJ of the first kernel of cutlassB.h that fits head and GPU."""
    if size <= 64:
        return 64, 64
    capability = gpu.model.compute_capability
    is_large = limits_of(capability).shared_memory_per_block >= 163 * KIB
    if half and capability >= (8, 0) and size <= 128:
        if is_large:
            return 128, 128
        is_narrow = capability in {(8, 6), (8, 9)} and size <= 96 and not drops
        return (128, 64) if is_narrow else (64, 64)
    return (128, 64) if half or is_large else (64, 64)


def _workspace(
    pairs: int,
    length: int,
    keys: int,
    size: int,
    staged: tuple[int, int] | None,
    blocks: tuple[int, int],
) -> int:
    """Return AttentionBackwardKernel::Params::workspace_size, in bytes.

    ``staged``: head sizes of keys and values whose gradients do not stay in registers.
    """
    block, keys_block = blocks
    splits = -(-keys // keys_block)
    if pairs >= 256 and keys <= 2 * keys_block:
        splits = 1
    elements = -(-length // block) * -(-size // keys_block) * (16 + block * keys_block * 4) // 4
    if staged is not None:
        splits = max(min(splits, 200 // pairs), 1)
        elements += splits * keys_block * sum(round_up(each, block) for each in staged)
    return pairs * round_up(elements, 4) * 4


RULES = {
    "_scaled_dot_product_flash_attention": Rule(outputs=_flash_outputs),
    "_scaled_dot_product_flash_attention_backward": Rule(
        before=lambda gpu, grad_out, out: _copies_by_length(gpu, grad_out, out),
        after=flash_backward,
    ),
    "_scaled_dot_product_efficient_attention": Rule(
        after=efficient_forward, outputs=efficient_outputs
    ),
    "_scaled_dot_product_efficient_attention_backward": Rule(
        before=lambda gpu, grad_out_: _copies_by_length(gpu, grad_out_),
        after=efficient_backward,
        shapes=_gradients_by_length,
    ),
    # _cudnn_attention_forward: seed and offset even without dropout; logsumexp only to train.
    "_scaled_dot_product_cudnn_attention": Rule(
        after=lambda gpu: borrow(gpu, ATTENTION_BYTES),
        outputs=lambda compute_log_sumexp, result: (
            *result[6:8],
            *result[: 1 + compute_log_sumexp],
        ),
    ),
    "_scaled_dot_product_cudnn_attention_backward": Rule(after=_cudnn_backward),
}
