"""Pipeline schedules: messages between stages are derived from this rank's own.

Stages vote by exchanged numbers whether shapes are known. A stage's inputs have the shapes given to
it. Without them gradients are like their outputs, and inputs from a stage on another rank are like
the outputs that an earlier stage on this rank has sent; without such a stage they are unknown, and
an error is raised.

Source: torch/distributed/pipelining/stage.py (``_warmup_forward_vote``, ``_recv_meta``), torch
2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import stage as stages

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace a pipeline stage's votes and metadata exchanges with other ranks."""
    if hasattr(stages.PipelineStage, "_warmup_forward_vote"):
        patches.add(stages.PipelineStage, "_warmup_forward_vote", _vote)
        patches.add(
            *(stages.PipelineStage, "_warmup_backward_result"),
            lambda stage, received_result=None: received_result,
        )
    if hasattr(stages, "_StageBackwardMeta"):
        _add_shapes(machine, patches)


def _vote(stage: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
    needs_shapes = vars(stages)["InferenceMode"].needs_dynamic(stage._user_meta, has_backward)
    return torch.tensor([int(not needs_shapes)], dtype=torch.int32, device=stage.device)


def _add_shapes(machine: SimulatedMachine, patches: Patches) -> None:
    """Derive the shapes that a stage receives from those that this rank's stages have sent."""
    receive = vars(stages.PipelineStage)["_recv_meta"]
    sent: Any = None

    def send_meta(stage: Any, meta: Any, dst_stage: int) -> None:
        nonlocal sent
        if dst_stage > stage.stage_index:
            sent = meta

    def recv_meta(stage: Any, src_stage: int) -> Any:
        if src_stage > stage.stage_index:
            gradients = vars(stages)["_derive_grad_metas"](stage._stage_meta.outputs)
            return vars(stages)["_StageBackwardMeta"](gradients)
        if sent is None:
            return receive(stage, src_stage)
        machine.note(
            f"a pipeline's stage at {user_line()} takes what it receives for the shapes that an "
            "earlier stage of this rank sends"
        )
        return sent

    patches.add(stages.PipelineStage, "_recv_meta", recv_meta)
    patches.add(stages.PipelineStage, "_send_meta", send_meta)
