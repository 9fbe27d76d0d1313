"""FlexAttention that is not compiled: the gradient of its scores is traced while the program runs.

torch traces it with fake tensors, in a mode that takes the place of the simulation's own. The
example of a gradient that the trace is given is no fake tensor, so it takes memory.

Source: torch/_higher_order_ops/flex_attention.py (``create_fw_bw_graph``), torch 2.11 to 2.15.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch._higher_order_ops.flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gpumem.simulated.common.late_imports import Unpatched
from pytest_gpumem.simulated.common.patching import Patches

if TYPE_CHECKING:
    from pytest_gpumem.simulated.compiled.tracing import Tracing


_MODULE = sys.modules["torch._higher_order_ops.flex_attention"]
_TRACES = "create_fw_bw_graph"
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def add_patches(patches: Patches, tracer: Callable[[], Tracing], code: Unpatched) -> None:
    """Replace the tracing of the gradient: inside ``code()`` operators run on a simulated GPU."""
    trace = getattr(_MODULE, _TRACES)
    make = torch.empty_strided

    def empty_strided(*args: Any, **options: Any) -> Any:
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return make(*args, **options)
        with code():
            return torch.empty_strided(*args, **options)

    def create_fw_bw_graph(*args: Any) -> Any:
        tracing = tracer()
        if tracing.is_entered:  # Dynamo traces it, with fake tensors of its own
            return trace(*args)
        with (
            tracing.entered(),
            _disable_current_modes(),
            mock.patch.object(torch, "empty_strided", empty_strided),
        ):
            return trace(*args)

    patches.add(_MODULE, _TRACES, create_fw_bw_graph)
