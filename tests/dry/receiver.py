"""What a process does that is sent a tensor."""

from __future__ import annotations

from typing import Any


def receive(there: Any, back: Any) -> None:
    """Answer with the bytes that were received, and those that this process has allocated."""
    import torch

    tensor = there.get()
    back.put([tensor.nbytes, torch.cuda.memory_allocated()])
    del tensor
