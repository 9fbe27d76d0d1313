"""Errors that a CUDA context does not recover from."""

from __future__ import annotations

import torch

STICKY = (
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "the MPS client has been terminated",
)
"""Errors after which, as driver_types.h of CUDA 12.4 has it, "the process must be terminated and
relaunched": 700, 702, 710, 714 to 719, and 810 of a client that its MPS server has terminated; in
the words of ``cudaGetErrorString`` of that release."""


def fault_of(index: int) -> str | None:
    """Return the first line of the sticky error of ``cuda:index``, ``None`` for none.

    Other errors pass, such as that of a stream capture left open by a test: it ends with the test.
    """
    try:
        torch.cuda.synchronize(index)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        return text if any(sticky in text for sticky in STICKY) else None
    return None
