"""memory_efficient_attention: which of torch's kernels xformers takes, and what it keeps of them.

Source: xformers/ops/fmha/__init__.py, common.py, dispatch.py, flash.py, cutlass.py and
torch_attention_compat.py of xformers 0.0.35, where neither flash-attn nor flash-attn 3 is
installed: all kernels are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pytest_gpumem.simulated.operators.layout import HALVES
from pytest_gpumem.simulated.stand_ins.usage import used
from pytest_gpumem.simulated.stand_ins.xformers import biases, padded
from pytest_gpumem.simulated.stand_ins.xformers.inputs import Inputs

_aten = torch.ops.aten
LIBRARY = "xformers"


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    lse: Tensor
    random: Any = None


_BLOCKS = (
    biases.BlockDiagonalMask,
    biases.BlockDiagonalCausalMask,
    biases.BlockDiagonalCausalFromBottomRightMask,
    biases.BlockDiagonalCausalLocalAttentionMask,
    biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
)
_PADDED = padded.BlockDiagonalCausalWithOffsetPaddedKeysMask
_PARTLY_USED = (
    _PADDED,
    padded.BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    padded.BlockDiagonalCausalWithOffsetGappyKeysMask,
    padded.BlockDiagonalGappyKeysMask,
    padded.BlockDiagonalPaddedKeysMask,
)
"""Taken forward alone."""
_FROM_TOP_LEFT = (
    biases.LowerTriangularMask,
    biases.LowerTriangularMaskWithTensorBias,
    biases.BlockDiagonalCausalMask,
    biases.BlockDiagonalCausalLocalAttentionMask,
)
_FROM_BOTTOM_RIGHT = (
    biases.LowerTriangularFromBottomRightMask,
    biases.LowerTriangularFromBottomRightLocalAttentionMask,
    biases.BlockDiagonalCausalFromBottomRightMask,
    biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    *_PARTLY_USED[:3],
)
_PLAIN = (
    type(None),
    biases.LowerTriangularMask,
    *_FROM_BOTTOM_RIGHT[:2],
    *_BLOCKS,
)


def _alignment(name: str, tensor: Tensor, multiple: int) -> list[str]:
    """check_lastdim_alignment_stride1."""
    reasons = []
    if tensor.shape[-1] % multiple:
        reasons.append(f"{name}.shape[-1] % {multiple} != 0")
    elif tensor.stride(-2) % multiple:
        reasons.append(f"{name}.stride(-2) % {multiple} != 0 ({name}.stride() = {tensor.stride()})")
    if tensor.stride(-1) > 1:
        reasons.append(
            f"{name}.stride(-1) > 1 ({name}.stride() = {tensor.stride()}) - you should call "
            f"`.contiguous()` on the input"
        )
    return reasons


class Kernel:
    """One of torch's, forward and backward."""

    NAME: str
    dtypes: Collection[torch.dtype]
    biases: tuple[type, ...]
    biases_backward: tuple[type, ...]
    capability: tuple[tuple[int, int], tuple[int, int]]
    largest = 65536

    @classmethod
    def not_supported_reasons(cls, inp: Inputs, *, backward: bool = False) -> list[str]:
        """Why it cannot run ``inp``; nothing if it can."""
        size = max(inp.query.shape[-1], inp.value.shape[-1])
        reasons = []
        if size > cls.largest:
            reasons.append(f"max(query.shape[-1], value.shape[-1]) > {cls.largest}")
        if not inp.query.is_cuda:
            return [*reasons, f"device={inp.query.device.type} (supported: {{'cuda'}})"]
        has = torch.cuda.get_device_capability(inp.query.device)
        oldest, newest = cls.capability
        if has < oldest:
            reasons.append(
                f"requires device with capability >= {oldest} but your GPU has capability {has} "
                f"(too old)"
            )
        if has > newest:
            reasons.append(
                f"requires device with capability <= {newest} but your GPU has capability {has} "
                f"(too new)"
            )
        if inp.query.dtype not in cls.dtypes:
            reasons.append(f"dtype={inp.query.dtype} (supported: {set(cls.dtypes)})")
        if inp.query.dtype is torch.bfloat16 and has[0] < 8:
            reasons.append("bf16 is only supported on A100+ GPUs")
        if type(inp.attn_bias) not in (cls.biases_backward if backward else cls.biases):
            reasons.append(f"attn_bias type is {type(inp.attn_bias)}")
        if backward and inp.query.ndim == 5:
            reasons.append("operator does not support BMGHK format")
        return [*reasons, *cls._more_reasons(inp, has, backward)]

    @classmethod
    def _more_reasons(cls, inp: Inputs, has: tuple[int, int], backward: bool) -> list[str]:
        raise NotImplementedError

    @classmethod
    def forward(cls, inp: Inputs, *, trains: bool) -> tuple[Tensor, Kept | None]:
        """The output, and logsumexp and random numbers' state where something is dropped."""
        raise NotImplementedError

    @classmethod
    def backward(
        cls, inp: Inputs, out: Tensor, kept: Kept, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys, values and the matrix that was added."""
        raise NotImplementedError


class Flash(Kernel):
    """flash.FwOp and flash.BwOp."""

    NAME = "fa2F@2.5.7-pt"
    dtypes = HALVES
    biases_backward = (*_PLAIN, biases.LocalAttentionFromBottomRightMask)
    biases = (*biases_backward, *_PARTLY_USED)
    capability = (8, 0), (99, 0)
    largest = 256

    @classmethod
    def _more_reasons(cls, inp: Inputs, has: tuple[int, int], backward: bool) -> list[str]:
        reasons = _alignment("query", inp.query, 8)
        if inp.query.shape[-1] != inp.value.shape[-1]:
            reasons.append("query.shape[-1] != value.shape[-1]")
        bias = inp.attn_bias
        if isinstance(bias, biases.BlockDiagonalCausalMask):
            if bias.q_seqinfo.seqstart_py != bias.k_seqinfo.seqstart_py:
                reasons.append(
                    "Only support BlockDiagonalCausalMask if equal numbers of keys and queries"
                )
        elif (
            isinstance(bias, biases.LowerTriangularMask) and inp.query.shape[1] != inp.key.shape[1]
        ):
            reasons.append("Only support LowerTriangularMask if equal number of keys and queries")
        if backward and torch.are_deterministic_algorithms_enabled():
            reasons.append(
                "operator is non-deterministic, but `torch.use_deterministic_algorithms` is set"
            )
        return reasons

    @staticmethod
    def _call(inp: Inputs) -> tuple[tuple[Tensor, ...], tuple[Any, ...], dict[str, Any]]:
        """Tensors, lengths and options, as torch's operator takes them."""
        tensors = inp.query, inp.key, inp.value
        if inp.query.ndim == 5:
            # Heads in groups are put together; a head that is repeated is taken once.
            tensors = tuple(
                each[:, :, :, 0] if each.stride(3) == 0 else each.flatten(2, 3) for each in tensors
            )  # type: ignore[assignment]  # three of three
        query, key, value = tensors
        if key.stride(2) == 0 and value.stride(2) == 0:
            key, value = key[:, :, :1], value[:, :, :1]
        lengths: tuple[Any, ...] = (None, None, query.shape[1], key.shape[1])
        if inp.lengths is not None:
            lengths = inp.lengths
            query, key, value = (each.flatten(0, 1) for each in (query, key, value))
        bias = inp.attn_bias
        window = (-1, -1)
        if isinstance(bias, biases.LocalAttentionFromBottomRightMask):
            window = bias.window_left, bias.window_right
        elif (size := getattr(bias, "_window_size", None)) is not None:
            window = size - 1, -1
        scale = inp.query.shape[-1] ** -0.5 if inp.scale is None else inp.scale
        options = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        return (query, key, value), lengths, options

    @classmethod
    def forward(cls, inp: Inputs, *, trains: bool) -> tuple[Tensor, Kept | None]:
        """See ``Kernel``."""
        tensors, lengths, options = cls._call(inp)
        causal = isinstance(inp.attn_bias, (*_FROM_TOP_LEFT, *_FROM_BOTTOM_RIGHT))
        out, lse, random = _without_offset(
            *tensors,
            *lengths,
            inp.p,
            causal,
            return_debug_mask=False,
            seqused_k=inp.used,
            **options,
        )
        out = out.reshape(*inp.query.shape[:-1], inp.value.shape[-1])
        if not trains:
            return out, None
        if inp.lengths is not None:
            lse = lse.unsqueeze(0)
        elif inp.query.ndim == 5:
            lse = lse.unflatten(1, inp.query.shape[2:4])
        return out, Kept(lse, random if inp.p else None)

    @classmethod
    def backward(
        cls, inp: Inputs, out: Tensor, kept: Kept, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys, values and none of the mask."""
        tensors, lengths, options = cls._call(inp)
        lse = kept.lse[0] if inp.lengths else kept.lse[:, :, : lengths[2]].contiguous()
        shape = (*tensors[0].shape[:-1], inp.value.shape[-1])
        causal = isinstance(inp.attn_bias, (*_FROM_TOP_LEFT, *_FROM_BOTTOM_RIGHT))
        random = kept.random if inp.p else None
        made = _aten._flash_attention_backward(
            grad.reshape(shape).contiguous(),
            *tensors,
            out.reshape(shape),
            lse,
            *lengths,
            inp.p,
            causal,
            random,
            random,
            **options,
        )
        return *_like(inp, made), None


def _without_offset(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``xformers_flash::flash_fwd``, which gives back no offset of random numbers."""
    out, lse, random, _, _ = _aten._flash_attention_forward(*args, **options)
    return out, lse, random


def _like(inp: Inputs, made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    given = inp.query, inp.key, inp.value
    return tuple(each.reshape(of.shape) for each, of in zip(made, given, strict=True))


class Cutlass(Kernel):
    """cutlass.FwOp and cutlass.BwOp."""

    NAME = "cutlassF-pt"
    dtypes = (torch.float32, *HALVES)
    biases_backward = tuple(
        each
        for each in (*_PLAIN, Tensor)
        if each
        not in (
            biases.LowerTriangularFromBottomRightLocalAttentionMask,
            biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask,
        )
    )
    biases = (*_PLAIN, Tensor, biases.LowerTriangularMaskWithTensorBias, _PADDED)
    capability = (5, 0), (9, 0)

    @classmethod
    def _more_reasons(cls, inp: Inputs, has: tuple[int, int], backward: bool) -> list[str]:
        half = inp.query.dtype in HALVES
        # _minimum_gemm_alignment: 128 bits where tensor cores multiply.
        multiple = 4 if has >= (8, 0) else 1
        if has >= (8, 0) or (has >= (7, 0) and half):
            multiple = max(multiple, 8 if half else 4)
        tensors = {"query": inp.query, "key": inp.key, "value": inp.value}
        if not backward:
            del tensors["key"]
        reasons = [each for item in tensors.items() for each in _alignment(*item, multiple)]
        if (bias := inp.bias) is not None:
            step = 128 // torch.finfo(bias.dtype).bits
            if any(stride % step for stride in bias.stride()[:-1]):
                reasons.append(
                    f"attn_bias.stride(-2) % {step} != 0 (attn_bias.stride() = {bias.stride()})"
                )
            if bias.stride(-1) > 1:
                reasons.append(f"attn_bias.stride(-1) > 1 (attn_bias.stride() = {bias.stride()})")
        return reasons

    @staticmethod
    def _call(inp: Inputs) -> tuple[tuple[Any, ...], int]:
        lengths = inp.lengths or (None, None, -1, -1)
        kind = type(inp.attn_bias)
        mask = 1 if kind in _FROM_TOP_LEFT else 2 if kind in _FROM_BOTTOM_RIGHT else 0
        return lengths, mask

    @classmethod
    def forward(cls, inp: Inputs, *, trains: bool) -> tuple[Tensor, Kept | None]:
        """The output, and logsumexp and random numbers' state where something is dropped."""
        if inp.query.ndim == 5:
            return cls._by_group(inp, trains=trains)
        lengths, mask = cls._call(inp)
        out, lse, seed, offset, _, _ = _aten._efficient_attention_forward(
            inp.query,
            inp.key,
            inp.value,
            inp.bias,
            *lengths,
            inp.p,
            mask,
            trains,
            scale=inp.scale,
            seqlen_k=inp.used,
            window_size=getattr(inp.attn_bias, "_window_size", None),
        )
        return out, Kept(lse, (seed, offset) if inp.p else None) if trains else None

    @classmethod
    def _by_group(cls, inp: Inputs, *, trains: bool) -> tuple[Tensor, Kept | None]:
        """Each group of heads on a stream of its own."""
        main = torch.cuda.current_stream()
        groups = inp.key.shape[2]
        streams = [main, *(torch.cuda.Stream(inp.query.device) for _ in range(groups - 1))]
        made = []
        for group, stream in enumerate(streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                parts = (each[:, :, group] for each in (inp.query, inp.key, inp.value))
                query, key, value = parts
                bias = inp.attn_bias
                if isinstance(bias, Tensor):
                    bias = bias.select(1, group)
                part = replace(inp, query=query, key=key, value=value, attn_bias=bias)
                made.append(cls.forward(part, trains=trains))
        for stream in streams[1:]:
            main.wait_stream(stream)
        out = torch.stack([each for each, _ in made], dim=2)
        sums = [kept.lse for _, kept in made if kept is not None]
        return out, Kept(torch.stack(sums, dim=1)) if trains else None

    @classmethod
    def backward(
        cls, inp: Inputs, out: Tensor, kept: Kept, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys, values and the matrix that was added."""
        lengths, mask = cls._call(inp)
        seed, offset = kept.random or (torch.Tensor(), torch.Tensor())
        bias, dtype = inp.bias, inp.query.dtype
        wanted = bias is not None and bias.requires_grad
        *made, by_bias = _aten._efficient_attention_backward(
            grad.to(dtype),
            inp.query,
            inp.key,
            inp.value,
            bias,
            out.to(dtype),
            *lengths,
            _padded(kept.lse, out),
            inp.p,
            seed,
            offset,
            mask,
            wanted,
            scale=inp.scale,
            window_size=getattr(inp.attn_bias, "_window_size", None),
        )
        return *_like(inp, tuple(made)), by_bias if wanted else None


def _padded(lse: Tensor, out: Tensor) -> Tensor:
    """Context.get_padded_lse(32): rows of logsumexp begin at multiples of 32."""
    exact = torch.cuda.get_device_capability(lse.device) == (7, 5)
    missing = -lse.shape[2] % 32
    if missing:
        if exact:
            lse = lse[:, :, : out.shape[1]]
            missing = -lse.shape[2] % 32
        return pad(lse, [0, missing], value=math.inf)
    if exact and out.shape[1] != lse.shape[2]:
        lse[:, :, out.shape[1] :].fill_(math.inf)
    return lse


def chosen(
    inp: Inputs, wanted: type[Kernel] | None, *, backward: bool = False, asked: bool = True
) -> type[Kernel]:
    """The kernel for ``inp``; raises ``NotImplementedError`` with all reasons where there is none.

    ``ValueError`` where ``wanted`` was ``asked`` for, or is the one that numbers were drawn for.
    Where sequences lie one behind the other, the two kernels keep different sums: a backward has
    to be of its forward's kind, which ``wanted`` says.
    """
    used(LIBRARY)
    function = "memory_efficient_attention_" + ("backward" if backward else "forward")
    reasons = {}
    for kernel in (Flash, Cutlass) if wanted is None else (wanted,):
        found = kernel.not_supported_reasons(inp, backward=backward)
        if not found:
            return kernel
        reasons[kernel.NAME] = found
    described = "\n".join(
        f"     {name}: shape={tuple(each.shape)} ({each.dtype})"
        for name, each in (("query", inp.query), ("key", inp.key), ("value", inp.value))
    )
    told = "\n".join(
        f"`{name}` is not supported because:\n    " + "\n    ".join(found)
        for name, found in reasons.items()
    )
    raise (ValueError if wanted is not None and asked else NotImplementedError)(
        f"No operator found for `{function}` with inputs:\n{described}\n{told}"
    )
