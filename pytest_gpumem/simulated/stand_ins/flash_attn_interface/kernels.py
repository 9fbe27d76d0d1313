"""What the kernels of flash-attn 3 allocate.

Source: hopper/flash_api.cpp (mha_fwd, mha_bwd) and the operators that
hopper/flash_attn_interface.py registers for them, of flash-attn 3.0.0 (hopper/, July 2026).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_gpumem.simulated.operators.layout import HALVES
from pytest_gpumem.simulated.stand_ins.flash_attn_interface import values
from pytest_gpumem.simulated.stand_ins.flash_attn_interface.tiles import Call, rounded
from pytest_gpumem.simulated.stand_ins.registering import compiled, register
from pytest_gpumem.simulated.stand_ins.usage import used

_EIGHT_BITS = torch.float8_e4m3fn
LARGEST_HEAD = 256
_MOST_SPLITS = 256


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _arch(tensor: Tensor) -> int:
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return major * 10 + minor


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [each if each is None or each.stride(-1) == 1 else each.contiguous() for each in tensors]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The conditions that users meet, in the library's own words."""
    used("flash-attn-3")
    arch = _arch(q)
    _require(arch >= 80, "FlashAttention only supports Ampere GPUs or newer.")
    _require(
        q.dtype in (*HALVES, _EIGHT_BITS),
        "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type",
    )
    _require(
        arch >= 90 or q.dtype in HALVES,
        "FlashAttention on Ampere/Ada cards only supports fp16 and bf16 data type",
    )
    _require(k.dtype == q.dtype, "query and key must have the same dtype")
    _require(v.dtype == q.dtype, "query and value must have the same dtype")
    size, value_size = q.shape[-1], v.shape[-1]
    _require(
        size <= LARGEST_HEAD, "FlashAttention forward only supports head dimension at most 256"
    )
    _require(
        q.shape[-2] % k.shape[-2] == 0,
        "Number of heads in key/value must divide number of heads in query",
    )
    multiple = 16 if q.dtype == _EIGHT_BITS else 8
    _require(size % multiple == 0, f"head_size should be a multiple of {multiple}")
    _require(value_size % multiple == 0, f"head_size_v should be a multiple of {multiple}")
    if size != value_size:
        _require(
            (128 < size <= 192 and 96 < value_size <= 128) or (size <= 64 and value_size <= 512),
            "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] "
            "and V headdim in (96, 128], or (Q/K <= 64 and V <= 512).",
        )
        _require(arch // 10 == 9, "Only Hopper supports different V headdim")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mha_fwd: out, softmax_lse, and where keys are split their parts, out_accum and lse_accum."""
    q, k, k_new, v_new = _contiguous(q, k, k_new, v_new)
    v = v.contiguous() if v.stride(-1) != 1 and v.stride(-3) != 1 else v
    _check(q, k, v)
    starts, heads, size, value_size = cu_seqlens_q, q.shape[-2], q.shape[-1], v.shape[-1]
    if starts is not None:
        _require(
            max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"
        )
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    length = q.shape[1] if starts is None else int(max_seqlen_q or 0)
    page = 0 if page_table is None else k.shape[1]
    keys = k.shape[1] if page_table is None else page_table.shape[1] * page
    if cu_seqlens_k is not None:
        _require(
            max_seqlen_k is not None, "max_seqlen_k must be provided if cu_seqlens_k is provided"
        )
        keys = int(max_seqlen_k or 0)
    masking = _masking(
        *(length, keys, size, page > 0, causal),
        *(window_size_left, window_size_right, attention_chunk),
    )
    is_varlen = any(
        each is not None for each in (starts, cu_seqlens_k, seqused_q, seqused_k, leftpad_k)
    )
    dtype = torch.bfloat16 if q.dtype == _EIGHT_BITS else q.dtype
    out = q.new_empty((*q.shape[:-1], value_size), dtype=dtype) if out_ is None else out_
    rows = (batch, heads, length) if starts is None else (heads, q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32)
    arch = _arch(q)
    if num_splits <= 0:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count - sm_margin
        num_splits = Call(
            *(arch, processors, batch, length, keys, heads, k.shape[-2], size, value_size),
            *(q.element_size(), *masking, softcap > 0, is_varlen),
            *(k_new is not None, page, leftpad_k is not None),
        ).splits()
    semaphore = None
    if scheduler_metadata is None:
        semaphore = _semaphore(q, batch, arch, num_splits, masking, varlen=is_varlen)
    parts = [q.new_empty(0, dtype=torch.float32) for _ in range(2)]
    if num_splits > 1:
        _require(num_splits <= _MOST_SPLITS, "num_splits > 256 not supported")
        split = (num_splits, *rows)
        parts[0] = q.new_empty((*split, value_size), dtype=torch.float32)
        parts[1] = q.new_empty(split, dtype=torch.float32)
    del semaphore
    return out, lse, parts[0], parts[1]


class _Masking(NamedTuple):
    is_causal: bool
    is_local: bool
    window: tuple[int, int]


def _masking(
    length: int, keys: int, size: int, paged: bool, causal: bool, left: int, right: int, chunk: int
) -> _Masking:
    """What is left of masks that hide nothing."""
    left = -1 if left >= keys - 1 else left
    right = -1 if right >= length - 1 else right
    # Of one query, causal means nothing.
    if length == 1 and left == right == -1 and not chunk and (not 64 < size <= 128 or not paged):
        causal = False
    right = 0 if causal else right
    is_causal = left < 0 and right == 0 and not chunk
    is_local = (left >= 0 or right >= 0 or chunk >= 1) and not is_causal
    window = keys - 1 if left < 0 else left, length - 1 if right < 0 else right
    if chunk:
        window = min(window[0], chunk - 1), min(window[1], chunk - 1)
    return _Masking(is_causal, is_local, window)


def _semaphore(
    like: Tensor, batch: int, arch: int, splits: int, masking: _Masking, *, varlen: bool
) -> Tensor | None:
    """tile_count_semaphore: a counter, and vectors with a number for each sequence."""
    masked = masking.is_causal or masking.is_local
    if arch >= 90:
        counts = (masked and splits == 1) or varlen
    else:
        counts = (masking.is_causal and not varlen) or (varlen and splits > 1)
    if not counts and not varlen:
        return None
    vectors = 2 * varlen + (not masking.is_local) + masked
    return like.new_empty(counts + -(-batch // 4) * 4 * vectors, dtype=torch.int32)


def _metadata(
    cache_seqlens: Tensor,
    dtype: torch.dtype,
    batch: int,
    sizes: tuple[int, int, int, int, int, int],
    masking: _Masking,
    num_splits: int,
    sm_margin: int,
    **options: Any,
) -> Tensor | None:
    used("flash-attn-3")
    _require(
        dtype in (*HALVES, _EIGHT_BITS),
        "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type",
    )
    _require(
        sizes[2] % sizes[3] == 0,
        "Number of heads in key/value must divide number of heads in query",
    )
    arch = _arch(cache_seqlens)
    if num_splits <= 0:
        properties = torch.cuda.get_device_properties(cache_seqlens.device)
        processors = properties.multi_processor_count - sm_margin
        num_splits = Call(
            arch, processors, batch, *sizes, dtype.itemsize, *masking, is_varlen=True, **options
        ).splits()
    return _semaphore(cache_seqlens, batch, arch, num_splits, masking, varlen=True)


_scheduled = compiled(_metadata)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor | None:
    """mha_fwd_get_scheduler_metadata: a counter and numbers of sequences, (n,) in int32."""
    masking = _masking(
        *(max_seqlen_q, max_seqlen_k, headdim, page_size is not None, causal),
        *(*window_size, attention_chunk),
    )
    sizes = max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v or headdim
    made: Tensor | None = _scheduled(
        *(*_contiguous(cache_seqlens), qkv_dtype, batch_size, sizes, masking),
        num_splits,
        sm_margin,
        has_softcap=has_softcap,
        appends=max_seqlen_k_new > 0,
        page=page_size or 0,
        has_leftpad=cache_leftpad is not None,
    )
    return made


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """mha_bwd: softmax_d. Sequences lie a block of rows apart in what is accumulated."""
    dout, q, k, v, out = _contiguous(dout, q, k, v, out)
    _check(q, k, v)
    starts, heads, key_heads = cu_seqlens_q, q.shape[-2], k.shape[-2]
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    length = q.shape[1] if starts is None else int(max_seqlen_q or 0)
    keys = k.shape[1] if cu_seqlens_k is None else int(max_seqlen_k or 0)
    left = -1 if window_size_left >= keys - 1 else window_size_left
    right = -1 if window_size_right >= length - 1 else window_size_right
    right = 0 if is_causal else right
    causal = left < 0 and right == 0
    size = rounded(max(q.shape[-1], v.shape[-1]))
    _require(
        not deterministic or size < LARGEST_HEAD,
        "Deterministic backward not supported for hdim 256.",
    )
    local = (left >= 0 or right >= 0) and not causal
    rows, columns = _blocks(_arch(q), size, causal=causal, local=local, softcap=softcap > 0)
    is_varlen = any(each is not None for each in (starts, cu_seqlens_k, sequed_q, sequed_k))
    by_row: tuple[int, ...] = (batch, heads, _up(length, rows))
    by_key: tuple[int, ...] = (batch, key_heads, _up(keys, columns))
    if is_varlen:
        total = q.shape[:-2].numel(), k.shape[:-2].numel()
        by_row = heads, _up(total[0] + batch * rows, rows)
        by_key = key_heads, _up(total[1] + batch * columns, columns)
    made = [torch.empty_like(of) for of, each in ((q, dq), (k, dk), (v, dv)) if each is None]
    softmax_d = q.new_empty(by_row, dtype=torch.float32)
    scratch = [q.new_empty(by_row, dtype=torch.float32)]
    scratch.append(q.new_empty((*by_row, size), dtype=torch.float32))
    grouped = heads != key_heads
    if grouped:
        scratch += [q.new_zeros((*by_key, size), dtype=torch.float32) for _ in range(2)]
    counters = [q.new_empty((-(-length // rows), batch, heads), dtype=torch.int32)]
    if grouped and deterministic:
        shape = (-(-keys // columns), batch, key_heads)
        counters += [q.new_zeros(shape, dtype=torch.int32) for _ in range(2)]
    while counters:
        counters.pop()
    while scratch:
        scratch.pop()
    del made
    return softmax_d


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _blocks(arch: int, size: int, *, causal: bool, local: bool, softcap: bool) -> tuple[int, int]:
    """kBlockM and kBlockN of the backward kernel."""
    if arch >= 90:
        columns = 128 if size <= 128 else 96 if size <= 192 else 80
        if size <= 64:
            return (96 if causal and softcap else 128), columns
        if size == 128 and not (causal or local or softcap):
            return 80, columns
        return 64, columns
    if arch in (86, 89):
        return 64 if size <= 192 else 32, 128 if size <= 96 else 96 if size <= 128 else 64
    return 128 if size <= 64 else 64, 128 if size <= 128 else 80 if size <= 192 else 64


_OPTIONAL = "Tensor? {}=None"
_FORWARD = ", ".join(
    (
        *map(_OPTIONAL.format, "k_new v_new qv out_ cu_seqlens_q cu_seqlens_k".split()),
        *map(_OPTIONAL.format, "cu_seqlens_k_new seqused_q seqused_k".split()),
        "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None",
        *map(_OPTIONAL.format, "page_table kv_batch_idx leftpad_k rotary_cos".split()),
        *map(_OPTIONAL.format, "rotary_sin seqlens_rotary q_descale k_descale v_descale".split()),
        "float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1",
        "SymInt window_size_right=-1, SymInt attention_chunk=0, float softcap=0.0",
        "bool rotary_interleaved=True, Tensor? scheduler_metadata=None, SymInt num_splits=1",
        "bool? pack_gqa=None, SymInt sm_margin=0",
    )
)
_BACKWARD = ", ".join(
    (
        *map(_OPTIONAL.format, "cu_seqlens_q cu_seqlens_k sequed_q sequed_k".split()),
        "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None",
        "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None",
        "float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1",
        "SymInt window_size_right=-1, float softcap=0.0, bool deterministic=False",
        "SymInt sm_margin=0",
    )
)

OPERATORS = {
    "_flash_attn_forward": register(
        "flash_attn_3::_flash_attn_forward",
        f"(Tensor q, Tensor k, Tensor v, {_FORWARD}) -> (Tensor, Tensor, Tensor, Tensor)",
        forward,
        values=values.forward,
    ),
    "_flash_attn_backward": register(
        "flash_attn_3::_flash_attn_backward",
        f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {_BACKWARD})"
        f" -> Tensor",
        backward,
        mutates=("dq", "dk", "dv"),
        values=values.backward,
    ),
}
"""By their names in ``torch.ops.flash_attn_3``."""
