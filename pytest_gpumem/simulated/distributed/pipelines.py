"""Pipeline schedules: whether shapes are known beforehand is this rank's own word.

Stages vote on that by numbers that they send each other. What a stage receives has the shapes that
it was told; without them it would need what only another rank knows, and that is refused.

Source: torch/distributed/pipelining/stage.py (``_warmup_forward_vote``), torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import stage as stages

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches


def plan(patches: Patches) -> None:
    """Let a stage be alone in its vote."""
    if hasattr(stages.PipelineStage, "_warmup_forward_vote"):
        patches.plan(stages.PipelineStage, "_warmup_forward_vote", _vote)
        patches.plan(stages.PipelineStage, "_warmup_backward_result", _result)


def _vote(stage: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
    needs_shapes = vars(stages)["InferenceMode"].needs_dynamic(stage._user_meta, has_backward)
    return torch.tensor([int(not needs_shapes)], dtype=torch.int32, device=stage.device)


def _result(stage: Any, received_result: Any = None) -> Any:
    return received_result
