"""What needs other ranks, refused by name where nobody has said how many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch import nn

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches

_Applies = Callable[..., bool]


def plan(patches: Patches) -> None:
    """Refuse process groups of GPUs and what is built on them."""
    refused: list[tuple[Any, str, str, _Applies]] = [
        (nn.parallel.DistributedDataParallel, "__init__", "DistributedDataParallel", _on_gpu),
    ]
    if torch.distributed.is_available():
        # What fully_shard and tensor parallelism begin with.
        mesh = torch.distributed.device_mesh.DeviceMesh
        init = 'torch.distributed.init_process_group("nccl")'
        refused += [
            (mesh, "__init__", "DeviceMesh of GPUs", _of_gpus),
            (torch.distributed, "init_process_group", init, _by_nccl),
        ]
    for owner, name, called, applies in refused:
        patches.plan(owner, name, _refusing(called, getattr(owner, name), applies))


def _on_gpu(this: Any, module: nn.Module, *_: Any, **__: Any) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


def _of_gpus(this: Any, device_type: str, *_: Any, **__: Any) -> bool:
    return device_type == "cuda"


def _by_nccl(backend: Any = None, *_: Any, **__: Any) -> bool:
    return "nccl" in str(backend).lower()


def _refusing(name: str, function: Callable[..., Any], applies: _Applies) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if applies(*args, **kwargs):
            raise UnsupportedOperatorError(
                f"{name} at {user_line()} is for several ranks, and nobody has said which one of "
                "how many this is: mark the test with @pytest.mark.gpumem(ranks=8), or write "
                "simulate(..., world_size=8, rank=0)"
            )
        return function(*args, **kwargs)

    return call
