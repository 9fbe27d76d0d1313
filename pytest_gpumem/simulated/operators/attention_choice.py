"""scaled_dot_product_attention: the choice of a kernel on CUDA.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h, of torch 2.6 to
2.15; the CUDA wheel of each release chooses alike on the dry device, H100 and B200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.simulated.gpu.releases import cudnn_of
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.layout import HALF_DTYPES

MATH, FLASH, EFFICIENT, CUDNN = "math", "flash", "efficient", "cudnn"
_NAMES = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
"""torch.nn.attention.SDPBackend values (math, flash, efficient, cuDNN)."""


@dataclass
class AttentionCall:
    """The arguments of one call (sdp_params) and the checks on them."""

    gpu: GPU
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    gqa: bool = False

    def __post_init__(self) -> None:
        self.capability = self.gpu.model.compute_capability
        self.grad_mode = torch.is_grad_enabled()
        self._operands = self.query, self.key, self.value
        self.needs_gradients = any(tensor.requires_grad for tensor in self._operands)
        self.trains = self.grad_mode and self.needs_gradients

    def kernel(self) -> str:
        """Return the first kernel in torch's order of priority that can run this call."""
        order = [_NAMES[n] for n in torch._C._get_sdp_priority_order() if n in _NAMES]
        # check_prefer_cudnn_attention: cuDNN of more than 9.15.0, compute capability 9 or 10.
        prefers = cudnn_of(self.gpu.version) > 91500 and self.capability[0] in (9, 10)
        if order[:1] == [FLASH] and prefers:
            order = [CUDNN, *(kernel for kernel in order if kernel != CUDNN)]
        usable = self.fused()
        for kernel in order:
            if torch.backends.cuda.math_sdp_enabled() if kernel == MATH else usable[kernel]():
                return kernel
        raise RuntimeError("No available kernel. Aborting execution.")

    def fused(self) -> dict[str, Callable[[], bool]]:
        """Return the fused kernels, with functions that tell whether one can run this call."""
        return {FLASH: self._flash, EFFICIENT: self._efficient, CUDNN: self._cudnn}

    def _fits(self, *, grouped: bool = True, kv_heads_may_differ: bool = False) -> bool:
        # check_batch_size_and_num_heads_dense; ``grouped``: whether a kernel accepts fewer heads of
        # keys than of queries.
        q, k, v = self.query, self.key, self.value
        if not q.dim() == k.dim() == v.dim() == 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
            return False
        if not q.shape[-2] or not k.shape[-2]:
            return False
        if self.gqa and grouped:
            divides = not q.shape[1] % k.shape[1] and not q.shape[1] % v.shape[1]
            return divides and (kv_heads_may_differ or k.shape[1] == v.shape[1])
        # One head for all queries needs no enable_gqa since 2.14.
        one_for_all = grouped and self.gpu.version >= (2, 14) and k.shape[1] == v.shape[1] == 1
        return one_for_all or q.shape[1] == k.shape[1] == v.shape[1]

    def _is_small(self, since: Version) -> bool:
        # check_flash_attention_grid_size, check_cudnn_tensor_shapes.
        return self.gpu.version < since or max(self.query.shape[:2]) <= _MOST

    def _last_stride_is_one(self, ignore_single: bool) -> bool:
        # check_last_dim_stride_equals_1_dense: of the mask, too, where the device is no CPU.
        operands = () if ignore_single and self.query.shape[-1] == 1 else self._operands
        masks = () if self.mask is None else (self.mask,)
        return all(tensor.stride(-1) == 1 for tensor in (*operands, *masks))

    def _same_dtype(self, dtypes: Set[torch.dtype]) -> bool:
        dtype = self.query.dtype
        return dtype == self.key.dtype == self.value.dtype and dtype in dtypes

    def _low_precision(self) -> bool:
        return self._same_dtype(HALF_DTYPES if self.capability >= (8, 0) else {torch.float16})

    def _flash(self) -> bool:
        size = self.query.shape[-1]
        is_consumer = (8, 6) <= self.capability <= (8, 9) or self.capability[0] == 12
        is_limited = is_consumer and self.needs_gradients
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and self.mask is None
            and self._fits()
            and size == self.key.shape[-1] == self.value.shape[-1]
            and size <= 256
            and self.capability >= (8, 0)
            and (not is_limited or size <= 192 or (not self.dropout and size > 224))
            and not (self.causal and self.query.shape[-2] != self.key.shape[-2])
            and self._low_precision()
            and self._last_stride_is_one(True)
            and self._is_small(since=(2, 15))
        )

    def _efficient(self) -> bool:
        size, value_size = self.query.shape[-1], self.value.shape[-1]
        half = self.query.dtype in HALF_DTYPES
        alignment = 4 if self.capability >= (8, 0) else 1
        if self.capability >= (8, 0) or (self.capability >= (7, 0) and half):
            alignment = max(alignment, 8 if half else 4)
        dtypes = {torch.float16, torch.float32}
        if self.capability >= (8, 0):
            dtypes.add(torch.bfloat16)
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and self._fits(grouped=self.gpu.version >= (2, 14))
            and size == self.key.shape[-1]
            and size > 0
            and value_size > 0
            and not size % alignment
            and not value_size % alignment
            and self._last_stride_is_one(False)
            and self._is_aligned(alignment)
            and self._same_dtype(dtypes)
        )

    def _is_aligned(self, elements: int) -> bool:
        # check_data_ptr_alignment_mem_efficient, which is in the binaries since 2.13.
        is_checked = self.gpu.version >= (2, 13) and self.capability >= (8, 0)
        return not is_checked or not any(
            tensor.storage_offset() % elements for tensor in self._operands if tensor.numel()
        )

    def _cudnn(self) -> bool:
        size, value_size = self.query.shape[-1], self.value.shape[-1]
        mask, release = self.mask, self.gpu.version
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and self._fits(kv_heads_may_differ=True)
            and self._low_precision()
            and self.capability >= (8, 0)
            and (
                not torch.are_deterministic_algorithms_enabled()
                or torch.is_deterministic_algorithms_warn_only_enabled()
            )
            and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
            and (release < (2, 12) or self.dropout * 16 == math.floor(self.dropout * 16))
            and self._is_small(since=(2, 13))
            and self._cudnn_head(size, value_size)
            and not size % 8
            and not value_size % 8
            and self.key.shape[-2] != 1
            and not ((self.dropout or release < (2, 9)) and self.query.shape[-2] == 1)
            and self._last_stride_is_one(True)
        )

    def _cudnn_head(self, size: int, value_size: int) -> bool:
        """Check heads over 128: check_cudnn_tensor_shapes, check_cudnn_d256_bprop_head_dim."""
        heads, most, cudnn = (size, value_size), max(size, value_size), cudnn_of(self.gpu.version)
        is_hopper = self.capability == (9, 0)
        if most <= 128 or not (is_hopper or self.capability[0] == 10):
            return most <= 128
        if cudnn > 92200:
            trainable = heads in {(192, 128), (256, 256)}
            return most <= 256 and (trainable or not self.needs_gradients)
        if is_hopper:
            return cudnn >= 91000 and most <= 256
        return cudnn >= 91100 and heads == (192, 128)


_MOST = 65535
"""Most batches, and most heads, that cuDNN and flash-attention accept."""


def usable_kernels(gpu: GPU, *params: Any) -> set[str]:
    """Return the fused kernels that can run a call of these ``SDPAParams``, in their order."""
    fused = AttentionCall(gpu, *params).fused()
    return {kernel for kernel, can_run in fused.items() if can_run()}


def splits_of(processors: int, blocks: int, size: int, keys: int) -> int:
    """Return over how many blocks the keys are split on ``processors`` (num_splits_heuristic).

    ``blocks`` are batch times heads times blocks of 64 queries; set_params_splitkv doubles the
    processors, because a block has 128 threads.
    """
    processors *= 2
    block_keys = 256 if size <= 64 else 128 if size <= 128 else 64
    key_blocks = -(-keys // block_keys)
    if blocks >= 0.8 * processors:
        return 1
    most = min(128, processors, key_blocks)
    efficiency: dict[int, float] = {}
    for splits in range(1, most + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = blocks * splits / processors
            efficiency[splits] = waves / math.ceil(waves)
    best = max(efficiency.values(), default=0.0)
    return next((n for n, value in efficiency.items() if value >= 0.85 * best), 1)
