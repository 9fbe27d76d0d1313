"""Estimates of NCCL's memory outside of the allocator."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pytest_gpumem.prediction.function import predict
from pytest_gpumem.simulated.distributed.nccl import Communicator, connection, estimate
from pytest_gpumem.simulating import simulate

MIB = 1 << 20


def test_a_connection_has_the_sizes_that_nccl_logs() -> None:
    # NVIDIA/nccl#1685: 10485760 and 2097152, for each channel and peer.
    assert connection() == 10_485_760 + 2_097_152


def test_a_communicator_connects_neighbours_or_all_peers() -> None:
    assert estimate([Communicator(1)]) == 0
    assert estimate([Communicator(2)]) == 16 * 12 * MIB
    assert estimate([Communicator(8)]) == 2 * 16 * 12 * MIB
    assert estimate([Communicator(64)]) == 2 * 16 * 12 * MIB
    # 7 peers by 32 channels more: the all-to-all of NVIDIA/nccl#1685, where 3.28 GB were seen.
    assert estimate([Communicator(8, to_each=True)]) == (2 * 16 + 7 * 32) * 12 * MIB


def test_a_communicator_is_made_by_its_first_collective_on_the_gpu() -> None:
    with simulate("H100", world_size=8) as gpu:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)]
        dist.all_reduce(torch.zeros(8))
        assert gpu.nccl == ""
        dist.all_reduce(torch.zeros(8, device="cuda"))
        for _ in range(2):
            dist.all_reduce(torch.zeros(8, device="cuda"), group=pairs[0])
    assert gpu.nccl.startswith(
        "NCCL's buffers come on top, outside of PyTorch's allocator: some 576.0 MiB for 2 "
        "communicators, an estimate by NCCL's sources (12.0 MiB for each channel and peer"
    )


def test_a_prediction_of_ranks_has_a_note_about_nccl() -> None:
    def call() -> None:
        x = torch.zeros(1024, device="cuda")
        dist.all_to_all_single(torch.empty_like(x), x)

    predicted = predict(call, "H100", ranks=8)
    assert predicted.peak_allocated == 8192
    assert any("some 3.00 GiB for 1 communicator, an estimate" in one for one in predicted.notes)
    assert not any("NCCL" in note for note in predict(lambda: None, "H100").notes)
