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


_PURPOSES: tuple[tuple[Any, str, str, str], ...] = (
    (FSDPParamGroup, "unshard", "all-gather of {}", _BUFFER),
    (FSDPParamGroup, "wait_for_unshard", "unsharded parameters", _UNSHARDED),
    (FSDPParamGroup, "post_backward", "reduce-scatter of {}", _BUFFER),
    (_flat_param.FlatParamHandle, "pre_unshard", "shards to gather", _UNSHARDED),
    (_flat_param.FlatParamHandle, "unshard", "unsharded parameters", _UNSHARDED),
    (_runtime_utils, "_reduce_grad", "reduce-scatter", _BUFFER),
    (DistributedDataParallel, "_ddp_init_helper", "gradient buckets", _BUFFER),
    (Reducer, "_rebuild_buckets", "gradient buckets", _BUFFER),
)
"""Owner, function, name and kind of the purpose; the name may have the module's path."""


def add_patches(patches: Patches) -> None:
    """Attach its purpose to every allocation in these functions."""
    for owner, function, name, kind in _PURPOSES:
        if hasattr(owner, function):
            patches.add(owner, function, _doing(getattr(owner, function), name, kind))


def _doing(function: Callable[..., Any], name: str, kind: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        path = getattr(first, "_module_fqn", None) or "the root"
        with running.doing(Purpose(name.format(path), kind)):
            return function(first, *args, **kwargs)

    return call
