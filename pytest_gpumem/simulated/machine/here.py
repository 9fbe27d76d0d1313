"""What each thread has of its own."""

from __future__ import annotations

import threading

import torch


class ThreadState(threading.local):
    """What each thread has of its own."""

    current_index = 0
    """The current device, as ``cudaGetDevice`` says."""
    destination: torch.device | None = None
    """The device that the running call asked for in Python, where torch is told ``meta``.

    Without it ``meta`` comes from C++, which repeats what a tensor says of itself.
    """
    on_meta = False
    """Whether the last operator was on meta tensors of the user's own."""
    sets_items = False
    """Whether the thread runs ``x[i] = ...``, whose numbers stay on the host."""
    joined = False
    """Whether the thread has entered the simulation."""
