"""Python objects that ranks send each other: those of other ranks are assumed to equal this one's.

On a GPU they travel as bytes in small tensors, which are left out. Whole state dictionaries are
derived from this rank's state: under FSDP a rank keeps the optimizer's state of parameters that it
has a part of, and receives descriptions of the other states. Rank 0 announces the tensors of a
state before it sends it. Messages of pipelines' stages and of checkpoints' plans are derived, too.

Source: torch/distributed/distributed_c10d.py (``all_gather_object`` and those that follow it),
torch/distributed/fsdp/_optim_utils.py (``_map_param_key_to_optim_keys``,
``_allgather_state_info``), torch/distributed/_state_dict_utils.py (``_broadcast_state_dict``),
torch 2.6 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint import default_planner, state_dict, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.fsdp import _optim_utils
from torch.distributed.pipelining import stage as stages

from pytest_gpumem.simulated.common.callsite import refusing, user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.values.errors import UnknownValueError

_FUNCTIONS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the functions, wherever torch names them, and derive other ranks' states."""
    _add_pipelines(machine, patches)
    _add_checkpoints(machine, patches)
    objects = _Objects(machine)
    for name in _FUNCTIONS:
        for owner in (dist, c10d):
            patches.add(owner, name, getattr(objects, name))
    patches.add(_optim_utils, "_map_param_key_to_optim_keys", objects.keys)
    patches.add(_optim_utils, "_allgather_state_info", objects.gathered)
    for owner in (_state_dict_utils, state_dict):
        patches.add(owner, "_broadcast_state_dict", objects.broadcast_state_dict)


class _Objects:
    """Replacements of torch's functions, with the same arguments, for ranks that are alike."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._announced: Any = None
        """The object that the root broadcasts now; ``None`` if it is not known."""
        self._map = _optim_utils._map_param_key_to_optim_keys
        self._gather = _optim_utils._allgather_state_info
        self._broadcast = _state_dict_utils._broadcast_state_dict
        self._like: Mapping[str, Any] = {}
        """The state of some parameter, from which those of other ranks are made."""

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        self._gather_object("all_gather_object", obj, object_list, group)

    def _gather_object(self, name: str, obj: Any, object_list: list[Any], group: Any) -> None:
        self._note(name)
        size = dist.get_world_size(group)
        object_list[:size] = [deepcopy(obj) for _ in range(size)]

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        if object_gather_list is not None:
            self._gather_object("gather_object", obj, object_gather_list, group)

    def broadcast_object_list(self, object_list: list[Any], *_: Any, **__: Any) -> None:
        """Receive what this rank would send, unless the root's object is known."""
        if self._announced is not None:
            object_list[0] = self._announced
            return
        self._note("broadcast_object_list")

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        if scatter_object_input_list is None:
            _refuse("scatter_object_list")
        scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]

    def send_object_list(self, *_: Any, **__: Any) -> None:
        """Send nothing."""

    def recv_object_list(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("recv_object_list")

    def _note(self, name: str) -> None:
        if dist.get_world_size() == 1:
            return  # there are no others
        self._machine.note(
            f"{name} at {user_line()} assumes that other ranks send what this one does"
        )

    def broadcast_state_dict(
        self,
        full_state_dict: Mapping[str, Any],
        local_state_dict: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if dist.get_rank():
            sent = full_state_dict or local_state_dict
            self._announced = {name: _announcement(value) for name, value in sent.items()}
        try:
            self._broadcast(dict(full_state_dict), local_state_dict, *args, **kwargs)
        finally:
            self._announced = None

    def keys(
        self,
        optim_state_dict: dict[str, Any],
        group: Any,
        param_key_to_param: dict[Any, Any],
        param_to_fqns: dict[Any, list[str]],
        fqn_to_fsdp_param_info: dict[str, Any],
        merge_keys: bool = False,
    ) -> tuple[list[Any], dict[Any, Any]]:
        """Run ``_map_param_key_to_optim_keys``, and add the keys of other ranks' states."""
        given = param_key_to_param, param_to_fqns, fqn_to_fsdp_param_info
        every, own = self._map(optim_state_dict, group, *given, merge_keys=True)
        states = optim_state_dict["state"]
        self._like = next(iter(states.values()), {})
        if not merge_keys:
            return list(own), own
        elsewhere = {
            _optim_utils._OptimStateKey(tuple(param_to_fqns[param]), is_fsdp_managed=True)
            for key, param in param_key_to_param.items()
            if states and key not in states and not param.numel()
            if param_to_fqns[param][0] in fqn_to_fsdp_param_info
        }
        return sorted({*every, *elsewhere}), own

    def gathered(self, fsdp_state: Any, input_states: dict[str, Any]) -> Any:
        """Run ``_allgather_state_info``, with some state for parameters that this rank lacks."""
        states = {name: state or self._like for name, state in input_states.items()}
        return self._gather(fsdp_state, states)


def _announcement(value: Any) -> Any:
    """Return the description of a value that rank 0 sends before the value."""
    if not isinstance(value, torch.Tensor):
        return value
    return _state_dict_utils._TensorInfo(value.size(), value.dtype) if value.dim() else value.cpu()


def _refuse(name: str) -> NoReturn:
    raise UnknownValueError(
        f"{name} at {user_line()} receives what only another rank knows: a pipeline's stage needs "
        "its input_args and output_args"
    )


def _add_pipelines(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace a pipeline stage's votes and metadata exchanges with other ranks.

    Stages send each other numbers to vote whether shapes are known. A stage's inputs have the
    shapes given to it. Without them gradients are like their outputs, and inputs from another rank
    are like the outputs that an earlier stage on this rank has sent; without such a stage they are
    unknown, and an error is raised. Source: torch/distributed/pipelining/stage.py
    (``_warmup_forward_vote``, ``_recv_meta``), torch 2.13.
    """
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
            f"a pipeline's stage at {user_line()} is assumed to receive the shapes that an "
            "earlier stage of this rank sends"
        )
        return sent

    patches.add(stages.PipelineStage, "_recv_meta", recv_meta)
    patches.add(stages.PipelineStage, "_send_meta", send_meta)


def _add_checkpoints(machine: SimulatedMachine, patches: Patches) -> None:
    """Make every rank the coordinator of a checkpoint, of which it knows its own part.

    Ranks send their plans to a coordinator, which merges them; here there is only this rank's
    plan: the checkpoint holds its shards, and tensors that all ranks have. Source:
    torch/distributed/checkpoint/utils.py (``_DistWrapper``), default_planner.py
    (``_validate_global_plan``), state_dict_saver.py, torch 2.6 to 2.15.
    """

    def initialize(init: Callable[..., None], wrapper: Any, *args: Any, **kwargs: Any) -> None:
        init(wrapper, *args, **kwargs)
        wrapper.is_coordinator = True

    def gather_object(wrapper: Any, object: Any) -> list[Any]:
        if wrapper.use_dist and dist.get_world_size() > 1:
            machine.note(
                f"the distributed checkpoint at {user_line()} is what this rank knows of one: its "
                "own shards, and what every rank has"
            )
        return [object]

    def validate_global_plan(validate: Any, global_plan: Any, metadata: Metadata) -> Any:
        # Tensors with all parts on this rank: missing parts of others cannot be detected.
        known = {
            name: found
            for name, found in metadata.state_dict_metadata.items()
            if not isinstance(found, TensorStorageMetadata)
            or sum(math.prod(chunk.sizes) for chunk in found.chunks) >= found.size.numel()
        }
        return validate(global_plan, replace(metadata, state_dict_metadata=known))

    patches.wrap(_DistWrapper, "__init__", initialize)
    patches.add(_DistWrapper, "gather_object", gather_object)
    patches.add(_DistWrapper, "scatter_object", lambda wrapper, object_list: object_list[0])
    patches.add(_DistWrapper, "broadcast_object", lambda wrapper, object: object)
    patches.wrap(default_planner, "_validate_global_plan", validate_global_plan)
    pins = getattr(_state_dict_utils, "pin_memory_utils", None)
    if pins is not None:  # came with 2.10
        unpin = pins.unpin_memory
        # No pinned memory outlives its simulation, but finalizers may run in a later one.
        patches.add(
            pins, "unpin_memory", lambda data_ptr: unpin(data_ptr) if machine.is_active else None
        )
    process = getattr(state_dict_saver, "_ProcessBasedAsyncCheckpointExecutor", None)
    if process is not None:  # came with 2.7
        refuse_process = refusing(
            "async_save",
            "hands a checkpoint to another process, which is on no simulated GPU: save with "
            "AsyncCheckpointerType.THREAD, which takes the same GPU memory",
        )
        patches.add(process, "__init__", refuse_process)
