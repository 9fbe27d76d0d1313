"""Batch norm goes through cuDNN where CUDA goes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def norm_of(x: torch.Tensor, norm: nn.Module) -> str:
    return str(norm(x).grad_fn.name())


@pytest.mark.parametrize("shape", [(32, 64), (32, 64, 8, 8)], ids=["1d", "2d"])
def test_float_takes_cudnn(on: Any, shape: tuple[int, ...]) -> None:
    on()
    norm = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(64).cuda()
    assert norm_of(torch.randn(shape, device="cuda"), norm) == "CudnnBatchNormBackward0"


def test_bfloat16_and_no_affine_do_not(on: Any) -> None:
    on()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    half = nn.BatchNorm1d(64).cuda().bfloat16()
    assert norm_of(x.bfloat16(), half) == "NativeBatchNormBackward0"
    assert norm_of(x, nn.BatchNorm1d(64, affine=False).cuda()) == "NativeBatchNormBackward0"


def test_saved_statistics(on: Any) -> None:
    # HugePandaCoder/octree-nca-groupeq: the output and two vectors, no workspace.
    gpu = on()
    norm = nn.BatchNorm2d(64).cuda()
    norm.num_batches_tracked = None  # its increment is not cuDNN's
    x = torch.randn(4, 64, 8, 8, device="cuda")
    assert gpu.of(lambda: norm(x)) == [4 * 64 * 64 * 4, 256, 256]
