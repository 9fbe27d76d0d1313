"""``nn.SyncBatchNorm`` over several ranks: its statistics are gathered from all of them.

Source: torch/nn/modules/_functions.py (``SyncBatchNorm``), torch 2.6 to 2.15.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate

CHANNELS, RANKS = 4096, 8
KIB = 1024


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use .torch.distributed")
def test_statistics_of_all_ranks_are_gathered() -> None:
    with simulate("H100", world_size=RANKS, rank=3) as gpu:
        norm = nn.SyncBatchNorm(CHANNELS).cuda()
        x = torch.randn(8, CHANNELS, 4, 4, device="cuda", requires_grad=True)
        before = len(gpu.trace)
        y = norm(x)
        forward = [e.size for e in gpu.trace[before:] if e.action == "alloc" and e.size >= 8 * KIB]
        before = len(gpu.trace)
        y.sum().backward()
        backward = [e.size for e in gpu.trace[before:] if e.action == "alloc" and e.size >= 8 * KIB]
    assert forward == [
        *(16 * KIB, 16 * KIB),  # mean and deviation
        32 * KIB + 4,  # both, and how many they are of
        RANKS * (32 * KIB + 4),
        *(RANKS * 16 * KIB, RANKS * 16 * KIB),  # without those of ranks that have no input
        *(16 * KIB, 16 * KIB),  # mean and deviation over all
        x.nbytes,
    ]
    # Two sums, the gradients of weight and bias, both sums to be reduced, the gradient of input.
    assert [size for size in backward if size != x.nbytes] == [16 * KIB] * 4 + [32 * KIB]
    assert gpu.notes == ("SyncBatchNorm assumed that no rank has an empty batch",)


@pytest.mark.parametrize("ranks", [2, 4096])
def test_a_model_trains_whose_norms_are_converted(ranks: int) -> None:
    with simulate("H100", world_size=ranks) as gpu:
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(torch.randn(4, 3, 32, 32, device="cuda")).sum().backward()
        assert gpu.peak_allocated > 0
