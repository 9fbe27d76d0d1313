"""Results and gradients that kernels on the CPU have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

UNREAD = ...
"""A result that no formula reads."""

_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def with_autograd() -> Iterator[None]:
    """Enable autograd inside an operator, where autograd itself has finished."""
    with (
        torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def leaf(tensor: Tensor) -> Tensor:
    """Return a copy of ``tensor`` that requires a gradient."""
    return tensor.detach().clone().requires_grad_()
