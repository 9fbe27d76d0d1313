"""State of each thread."""

from __future__ import annotations

import threading

import torch


class ThreadState(threading.local):
    """The state of one thread."""

    current_index = 0
    """The current device, as ``cudaGetDevice`` returns it."""
    destination: torch.device | None = None
    """The device that the running call named in Python, where torch gets ``meta``.

    Without it ``meta`` comes from C++, which repeats the device that a tensor reports.
    """
    on_meta = False
    """Whether the last operator was on meta tensors of the user's own."""
    sets_items = False
    """Whether the thread runs ``x[i] = ...``, whose numbers stay on the host."""
    joined = False
    """Whether the thread has entered the simulation."""
