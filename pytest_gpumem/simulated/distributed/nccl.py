"""An estimate of NCCL's memory, which is outside PyTorch's allocator and counts in no total.

For each channel and each peer in its machine, a rank has a buffer for each protocol to receive in,
and a flag for sending, each in whole blocks of 2 MiB: 10 MiB and 2 MiB.
These are the two sizes that NCCL's log of allocations shows on eight H100 (NVIDIA/nccl#1685). Where
the receiver reads, as A100 do over NVLink, the same 12 MiB are 6 and 6. In rings and chains of
trees a rank has two neighbours as peers, in an all-to-all every rank of its machine.

The number of channels depends on GPUs and their links: those used are from logs of HGX H100, 16 for
collectives (NVIDIA/nccl#1453) and 32 to each peer of an all-to-all (#1685). On four A100 the third
GPU of a communicator takes 144 MB more than two (#964): 12 channels. By the formula the all-to-all
of #1685 takes 2.6 GiB, and 3.28 GB were seen: NVLS, proxies and the code of kernels are in no
formula.

Source: NCCL's src/init.cc (``computeBuffSizes``), src/include/device.h, whose constants are those
of 2020 until 2026, and src/transport/p2p.cc (``p2pSendSetup``, ``p2pRecvSetup``:
``ALIGN_SIZE(..., CUDA_IPC_MIN)``), read in the sources of 2020.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pytest_gpumem.sizes import format_size
from pytest_gpumem.values.world import MOST_LOCAL

_STEPS = 8
_SIMPLE = 1 << 22
"""DEFAULT_BUFFSIZE, which ``NCCL_BUFFSIZE`` changes."""
_LL = 8 * 512 * _STEPS * 16
"""NCCL_LL_LINES_PER_THREAD * NCCL_LL_MAX_NTHREADS * NCCL_STEPS * sizeof(ncclLLFifoLine)."""
_LL128 = 120 * 640 * _STEPS * 8
"""NCCL_LL128_ELEMS_PER_THREAD * NCCL_LL128_MAX_NTHREADS * NCCL_STEPS * sizeof(uint64_t)."""
_BLOCK = 2 << 20
"""CUDA_IPC_MIN."""

COLLECTIVE_CHANNELS, PEER_CHANNELS = 16, 32
"""Channels of one communicator on an HGX H100: of collectives, and to each peer."""


class Communicator(NamedTuple):
    """A communicator of a rank."""

    size: int
    """The number of ranks that it connects."""
    to_each: bool = False
    """Whether the rank sends to each of them, as in an all-to-all."""


def connection() -> int:
    """Return the bytes of one channel to and from one peer of the same machine."""
    received = -(-(_SIMPLE + _LL + _LL128) // _BLOCK) * _BLOCK
    return received + _BLOCK


def estimate(communicators: Iterable[Communicator]) -> int:
    """Return the bytes of the buffers of ``communicators``, on an HGX H100."""
    connections = 0
    for one in communicators:
        others = one.size - 1
        connections += COLLECTIVE_CHANNELS * min(others, 2)
        if one.to_each:
            connections += PEER_CHANNELS * min(others, MOST_LOCAL - 1)
    return connections * connection()


def sentence(communicators: Iterable[Communicator]) -> str:
    """Return the remark on NCCL's memory for a rank's numbers; empty without communicators."""
    known = [one for one in communicators if one.size > 1]
    if not known:
        return ""
    count = f"{len(known)} communicator{'s' * (len(known) > 1)}"
    return (
        f"NCCL's buffers come on top, outside of PyTorch's allocator: some "
        f"{format_size(estimate(known))} for {count}, an estimate by NCCL's sources "
        f"({format_size(connection())} for each channel and peer, channels as on an HGX H100)"
    )
