"""Fast paths of transformer encoders, which modules choose by torch's answers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.backends.mha

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.operators.encoders import is_followed


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Disable fast paths that are not followed."""

    enabled = torch.backends.mha.get_fastpath_enabled

    def fast_path_enabled() -> bool:
        if not enabled():
            return False
        asking = sys._getframe(1).f_locals
        if not isinstance(asking.get("self"), torch.nn.Module) or not _is_on_gpu(asking):
            return True
        if _is_followed(asking):
            return True
        if not torch.is_grad_enabled():
            machine.note(
                "nn.TransformerEncoderLayer and nn.MultiheadAttention take their fast path on a "
                "GPU without gradients, with nested tensors for padding; it is simulated "
                "operator by operator"
            )
        return False

    patches.add(torch.backends.mha, "get_fastpath_enabled", fast_path_enabled)


def _is_on_gpu(asking: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in asking.values())


def _is_followed(asking: dict[str, Any]) -> bool:
    """Return whether the fast path of a ``forward`` with these local variables is followed.

    Source: torch/nn/modules/transformer.py and activation.py of torch 2.6 to 2.15: a layer, its
    attention, and the encoder, which makes nested tensors where there is padding.
    """
    module = asking.get("self")
    if isinstance(module, torch.nn.TransformerEncoderLayer):
        return not _is_nested_there() and is_followed(asking["src"])
    if isinstance(module, torch.nn.MultiheadAttention):
        same = asking["query"] is asking["key"] is asking["value"]
        return same and is_followed(asking["query"])
    return isinstance(module, torch.nn.TransformerEncoder) and not _is_padded(asking)


def _is_padded(asking: dict[str, Any]) -> bool:
    return asking.get("src_key_padding_mask") is not None


def _is_nested_there() -> bool:
    """Return whether the layer that asks is called by an encoder whose input is padded."""
    encoding = torch.nn.TransformerEncoder.forward.__code__
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code is not encoding:
        frame = frame.f_back
    if frame is None:
        return False
    variables = frame.f_locals
    padded = _is_padded(variables)
    if sys.version_info < (3, 13):
        # Else the frame keeps this dictionary, and by it tensors that the function has let go.
        variables.clear()
    return padded
