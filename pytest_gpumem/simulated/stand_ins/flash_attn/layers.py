"""Rotary embedding and cross entropy, whose kernels Triton compiles.

Source: flash_attn/layers/rotary.py, flash_attn/losses/cross_entropy.py and rotary.py and
cross_entropy.py of flash_attn/ops/triton, of flash-attn 2.8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pytest_gpumem.simulated.operators.described import simulate_operator
from pytest_gpumem.simulated.stand_ins.usage import used
from pytest_gpumem.values.errors import UnsupportedOperatorError


def launch(*tensors: Tensor | None) -> None:
    """Replace a kernel that writes to its arguments and allocates nothing."""
    raise RuntimeError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


@simulate_operator(launch)
def _launched(*tensors: Tensor | None) -> None:
    used()


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the first dimensions of each head, twice as many as ``cos`` has; copy the others."""
    if cu_seqlens is None:
        length = x.shape[1]
    else:
        assert max_seqlen is not None, "If cu_seqlens is passed in, then max_seqlen must be passed"
        length = max_seqlen
    rotated = 2 * cos.shape[1]
    assert sin.shape == cos.shape
    assert rotated <= x.shape[-1], "rotary_dim must be <= headdim"
    assert x.shape[-1] <= 256, "Only support headdim <= 256"
    assert cos.shape[0] >= length, "seqlen_ro must be >= seqlen"
    cos, sin = cos.contiguous(), sin.contiguous()
    if isinstance(seqlen_offsets, Tensor):
        seqlen_offsets = seqlen_offsets.contiguous()
    output = x if inplace else torch.empty_like(x)
    if rotated < x.shape[-1] and not inplace:
        output[..., rotated:].copy_(x[..., rotated:])
    launch(output, x, cos, sin)
    return output


class ApplyRotaryEmb(torch.autograd.Function):
    """Rotates, and rotates gradients back; keeps nothing of the size of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Rotate the input."""
        ctx.mode = interleaved, inplace
        ctx.max_seqlen = max_seqlen
        ctx.offset = None if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        out = apply_rotary(
            x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace
        )
        offsets = (seqlen_offsets,) if isinstance(seqlen_offsets, Tensor) else ()
        ctx.save_for_backward(cos, sin, cu_seqlens, *offsets)
        return x if inplace else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Rotate the gradient back."""
        cos, sin, cu_seqlens, *offsets = ctx.saved_tensors
        interleaved, inplace = ctx.mode
        offset = offsets[0] if offsets else ctx.offset
        made = apply_rotary(
            grads[0], cos, sin, offset, cu_seqlens, ctx.max_seqlen, interleaved, inplace, True
        )
        return made, None, None, None, None, None, None, None


_rotate: Callable[..., Any] = ApplyRotaryEmb.apply


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Any:
    """Rotate (batch, length, heads, size), or (all lengths together, heads, size)."""
    return _rotate(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


class CrossEntropy(torch.autograd.Function):
    """Losses, logsumexp and z-losses of rows of logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        precomputed_lse: Tensor | None,
        plain: bool,
        inplace_backward: bool,
    ) -> tuple[Tensor, Tensor]:
        """Make them, as float32."""
        if labels.dtype == torch.long and labels.data_ptr() % 16 != 0:
            labels = pad(labels, (0, 1))[..., :-1]
        rows = logits.shape[0]
        assert labels.shape == (rows,)
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        losses = torch.empty(rows, dtype=torch.float, device=logits.device)
        if precomputed_lse is not None and plain:
            assert precomputed_lse.shape == (rows,)
            lse = precomputed_lse.contiguous()
        else:
            lse = torch.empty(rows, dtype=torch.float, device=logits.device)
        z_losses = torch.empty(rows, dtype=torch.float, device=logits.device)
        launch(losses, lse, z_losses)
        ctx.save_for_backward(logits, lse, labels)
        ctx.mark_non_differentiable(z_losses)
        ctx.inplace_backward = inplace_backward
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Make gradients of the logits, in their place if requested."""
        logits, _, _ = ctx.saved_tensors
        made = logits if ctx.inplace_backward else torch.empty_like(logits)
        launch(made)
        return made, None, None, None, None


_losses: Callable[..., Any] = CrossEntropy.apply


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> Any:
    """Return losses and z-losses, one of each row."""
    if process_group is not None:
        raise UnsupportedOperatorError(
            "flash_attn.ops.triton.cross_entropy.cross_entropy_loss(process_group=...) spreads "
            "logits over processes, which its stand-in does not"
        )
    plain = logit_scale == 1.0 and label_smoothing == 0.0
    return _losses(logits, labels, precomputed_lse, plain, inplace_backward)


class CrossEntropyLoss(nn.Module):
    """The loss as a module."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError("Only support reduction = 'mean' or 'none' or 'sum'")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        """Return the reduced losses of (rows, classes)."""
        is_cuda = input.is_cuda and target.is_cuda
        assert is_cuda, "Only support CUDA tensors"
        losses, z_losses = cross_entropy_loss(
            input,
            target,
            precomputed_lse=precomputed_lse,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        loss = self._reduced(losses, target)
        return (loss, self._reduced(z_losses, target)) if self.return_z_loss else loss

    def _reduced(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "mean":
            return losses.sum() / (target != self.ignore_index).sum()
        return losses.sum() if self.reduction == "sum" else losses
