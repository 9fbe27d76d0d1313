"""Which attention runs: flash-attn, cuDNN's fused one or one of torch's operators.

Source: transformer_engine/pytorch/attention/dot_product_attention/utils.py
(``get_attention_backend``), backends.py (which flash-attn counts as installed) and
common/fused_attn/fused_attn.cpp (``nvte_get_fused_attn_backend``) of 2.8, for cuDNN 9.1 and newer,
which all wheels of torch have since 2.6.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import NamedTuple

import torch

from pytest_gpumem.simulated.stand_ins.transformer_engine.layouts import APART

FLASH, FLASH_3, FUSED, UNFUSED = "flash-attn", "flash-attn-3", "fused", "unfused"
_FLASH_VERSIONS = ((2, 1, 1), (2, 8, 1))
_BLACKWELL_VERSIONS = ((2, 7, 3), (2, 8, 1))
_UNLIMITED = ((-1, -1), (-1, 0))
_LARGE_HEADS = ((8, 0), (9, 0), (10, 0), (12, 0))
"""Where flash-attn takes heads of more than 192."""


class Asked(NamedTuple):
    """AttentionParams: what decides."""

    dtype: torch.dtype
    format: str
    layout: str
    mask: str
    window: tuple[int, int]
    bias: str
    bias_needs_grad: bool
    dropout: float
    training: bool
    deterministic: bool
    padded: bool
    """Whether there is padding between sequences of one tensor."""
    heads: int
    groups: int
    length_q: int
    length_kv: int
    size_qk: int
    size_v: int

    @property
    def is_causal(self) -> bool:
        """Whether keys behind a query are masked."""
        return "causal" in self.mask


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "1") != "0"


def _installed(name: str, capability: tuple[int, int]) -> bool:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    if name == FLASH_3:
        return True
    least, most = _BLACKWELL_VERSIONS if capability >= (10, 0) else _FLASH_VERSIONS
    digits = [part for part in version.split("+")[0].split(".")[:3] if part.isdigit()]
    return least <= tuple(int(each) for each in digits) <= most


def choose(asked: Asked) -> str:
    """get_attention_backend(): one of FLASH, FLASH_3, FUSED and UNFUSED."""
    capability = torch.cuda.get_device_capability()
    is_fused = _is_on("NVTE_FUSED_ATTN") and _fused(asked, capability)
    flash = next((each for each in (FLASH_3, FLASH) if _flash(each, asked, capability)), None)
    if flash is not None and not (is_fused and capability >= (9, 0)):
        return flash
    if is_fused:
        return FUSED
    if not _is_on("NVTE_UNFUSED_ATTN") or asked.format == "thd":
        raise ValueError(
            "No dot product attention backend is available for the provided inputs. Please"
            " run with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to find out the reasons for"
            " disabling all backends."
        )
    return UNFUSED


def _flash(name: str, asked: Asked, capability: tuple[int, int]) -> bool:
    third = name == FLASH_3
    size = asked.size_qk
    return (
        _is_on("NVTE_FLASH_ATTN")
        and _installed(name, capability)
        and (capability == (9, 0) if third else capability >= (8, 0))
        and asked.dtype in (torch.bfloat16, torch.float16)
        and (third or size == asked.size_v)
        and size <= 256
        and (third or not size % 8)
        and (third or size <= 192 or capability in _LARGE_HEADS)
        and (not third or _third_takes(size, asked.size_v))
        and not (third and asked.dropout)
        and not asked.padded
        and asked.mask != "arbitrary"
        and (asked.mask not in ("causal", "padding_causal") or asked.length_q == asked.length_kv)
        and asked.bias == "no_bias"
    )


def _third_takes(size_qk: int, size_v: int) -> bool:
    wide = 128 < size_qk <= 192 and 96 < size_v <= 128
    return size_qk == size_v or wide or (size_qk <= 64 and size_v <= 512)


def _fused(asked: Asked, capability: tuple[int, int]) -> bool:
    cudnn = torch.backends.cudnn.version() or 0
    arch = 10 * capability[0] + capability[1]
    return (
        asked.dtype in (torch.bfloat16, torch.float16)
        and capability >= (8, 0)
        and (asked.size_qk == asked.size_v or asked.layout == APART)
        and not (arch >= 100 and cudnn < 90700)
        and cudnn not in (91000, 91001)
        and _fused_size(asked, arch, cudnn)
        and _fused_bias(asked)
        and _fused_mask(asked, cudnn)
        and _fused_format(asked, arch, cudnn)
        and _fused_window(asked, cudnn)
        and _fused_determinism(asked, arch, cudnn)
    )


def _fused_size(asked: Asked, arch: int, cudnn: int) -> bool:
    qk, v = asked.size_qk, asked.size_v
    if qk % 8 or v % 8:
        return False
    hopper = arch == 90
    fits = (
        max(qk, v) <= 128
        or (max(qk, v) <= 256 and hopper and (not asked.training or cudnn >= 90500))
        or (not asked.training and arch >= 100 and cudnn >= 90900 and asked.length_q > 1)
        or (
            not asked.training
            and cudnn >= 91002
            and (asked.length_q > 1 or asked.mask not in ("causal", "padding_causal"))
        )
        or ((qk, v) == (192, 128) and asked.training and arch >= 100 and cudnn >= 91100)
    )
    broken = (
        cudnn >= 91100
        and asked.training
        and hopper
        and min(qk, v) >= 128
        and qk != v
        and (qk, v) != (192, 128)
    )
    return fits and not broken


def _fused_bias(asked: Asked) -> bool:
    pads = asked.mask in ("padding", "padding_causal")
    return asked.bias == "no_bias" or (asked.bias == "post_scale_bias" and not pads)


def _fused_mask(asked: Asked, cudnn: int) -> bool:
    plain = asked.bias == "no_bias" and not asked.dropout
    ordered = asked.length_q <= asked.length_kv
    whole = not asked.length_q % 64 and not asked.length_kv % 64
    if asked.mask in ("no_mask", "causal"):
        return asked.format != "thd" or cudnn >= 90700
    if asked.mask in ("padding", "padding_causal"):
        return True
    if asked.mask == "causal_bottom_right":
        early = cudnn >= 90300 and asked.format != "thd" and whole and plain
        return ordered and (early or cudnn >= 90700)
    if asked.mask == "padding_causal_bottom_right":
        early = cudnn >= 90600 and whole and ordered and plain
        return early or (cudnn >= 90700 and (plain or ordered))
    return False


def _fused_format(asked: Asked, arch: int, cudnn: int) -> bool:
    if asked.format != "thd":
        return True
    return arch >= 90 and cudnn >= (90100 if asked.heads == asked.groups else 90600)


def _fused_window(asked: Asked, cudnn: int) -> bool:
    if asked.window in _UNLIMITED:
        return True
    masks = {"causal", "causal_bottom_right"}
    if cudnn >= 90600:
        masks |= {"padding_causal", "padding_causal_bottom_right"}
    elif asked.format == "thd" or asked.length_q != asked.length_kv:
        masks -= {"causal_bottom_right"}
    return (
        cudnn >= 90200
        and asked.window[1] == 0
        and not asked.dropout
        and asked.bias == "no_bias"
        and asked.mask in masks
        and asked.length_q <= asked.length_kv
        and not (asked.mask == "causal" and asked.format == "thd")
    )


def _fused_determinism(asked: Asked, arch: int, cudnn: int) -> bool:
    if not asked.deterministic or not asked.training:
        return True
    return arch >= 90 and not asked.bias_needs_grad and not (arch >= 100 and cudnn <= 91400)
