"""Names for allocations of sharding and data parallelism: operators only show ``torch.empty``.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _flat_param.py and
_runtime_utils.py of torch/distributed/fsdp, torch/nn/parallel/distributed.py, torch 2.6 to 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Reducer
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from pytest_gpumem.simulated.common.callsite import Purpose, running
from pytest_gpumem.simulated.common.patching import Patches

_BUFFER, _UNSHARDED = "buffer", "unsharded"
_Named = Callable[[Any], Purpose]


def _named(name: str, kind: str) -> _Named:
    return lambda owner: Purpose(name, kind)


def _of_module(name: str) -> _Named:
    """Return a purpose that includes the module's path from the root."""
    return lambda group: Purpose(f"{name} of {group._module_fqn or 'the root'}", _BUFFER)


_PURPOSES: tuple[tuple[Any, str, _Named], ...] = (
    (FSDPParamGroup, "unshard", _of_module("all-gather")),
    (FSDPParamGroup, "wait_for_unshard", _named("unsharded parameters", _UNSHARDED)),
    (FSDPParamGroup, "post_backward", _of_module("reduce-scatter")),
    (_flat_param.FlatParamHandle, "pre_unshard", _named("shards to gather", _UNSHARDED)),
    (_flat_param.FlatParamHandle, "unshard", _named("unsharded parameters", _UNSHARDED)),
    (_runtime_utils, "_reduce_grad", _named("reduce-scatter", _BUFFER)),
    (DistributedDataParallel, "_ddp_init_helper", _named("gradient buckets", _BUFFER)),
    (Reducer, "_rebuild_buckets", _named("gradient buckets", _BUFFER)),
)


def add_patches(patches: Patches) -> None:
    """Attach its purpose to every allocation in these functions."""
    for owner, name, purpose in _PURPOSES:
        if hasattr(owner, name):
            patches.add(owner, name, _doing(getattr(owner, name), purpose))


def _doing(function: Callable[..., Any], purpose: _Named) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        with running.doing(purpose(first)):
            return function(first, *args, **kwargs)

    return call
