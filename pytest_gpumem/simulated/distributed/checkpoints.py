"""Distributed checkpoints: a rank plans, writes and reads its own shards, and coordinates itself.

Ranks send their plans to a coordinator, which makes one plan of all. In the simulation it is made
of this rank's plan: the checkpoint holds its shards, and tensors that all ranks have.

Source: torch/distributed/checkpoint/utils.py (``_DistWrapper``), default_planner.py
(``_validate_global_plan``), state_dict_saver.py, torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import default_planner, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _DistWrapper

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.values.errors import UnsupportedOperatorError


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Make every rank the coordinator of the checkpoints that it has a part of."""
    init = _DistWrapper.__init__

    def initialize(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        init(wrapper, *args, **kwargs)
        wrapper.is_coordinator = True

    def gather_object(wrapper: Any, object: Any) -> list[Any]:
        if wrapper.use_dist and dist.get_world_size() > 1:
            machine.note(
                f"the distributed checkpoint at {user_line()} is what this rank knows of one: its "
                "own shards, and what every rank has"
            )
        return [object]

    validate = default_planner._validate_global_plan

    def validate_global_plan(global_plan: Any, metadata: Metadata) -> Any:
        # Tensors with all parts on this rank: of others missing parts cannot be detected.
        known = {
            name: found
            for name, found in metadata.state_dict_metadata.items()
            if not isinstance(found, TensorStorageMetadata)
            or sum(math.prod(chunk.sizes) for chunk in found.chunks) >= found.size.numel()
        }
        return validate(global_plan, replace(metadata, state_dict_metadata=known))

    patches.add(_DistWrapper, "__init__", initialize)
    patches.add(_DistWrapper, "gather_object", gather_object)
    patches.add(_DistWrapper, "scatter_object", lambda wrapper, object_list: object_list[0])
    patches.add(_DistWrapper, "broadcast_object", lambda wrapper, object: object)
    patches.add(default_planner, "_validate_global_plan", validate_global_plan)
    pins = getattr(_state_dict_utils, "pin_memory_utils", None)
    if pins is not None:  # came with 2.10
        unpin = pins.unpin_memory
        # Nothing outlives its simulation: finalizers run at any time, also in another one.
        patches.add(
            pins, "unpin_memory", lambda data_ptr: unpin(data_ptr) if machine.is_active else None
        )
    process = getattr(state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor", None)
    if process is not None:  # came with 2.7
        patches.add(process, "__init__", _refuse_process)


def _refuse_process(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedOperatorError(
        f"async_save at {user_line()} hands a checkpoint to another process, which is on no "
        "simulated GPU: save with AsyncCheckpointerType.THREAD, which takes the same GPU memory"
    )
