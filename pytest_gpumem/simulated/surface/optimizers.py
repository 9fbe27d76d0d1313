"""Properties of tensors that ``torch.optim`` and ``clip_grad_norm_`` read in C++."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_Lists = list[list[torch.Tensor | None]]
_Key = tuple[torch.device, torch.dtype]
_Group = tuple[list[list[torch.Tensor | None]], list[int]]


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Group tensors by the device they report: C++ would see ``meta``."""
    group = torch._C._group_tensors_by_device_and_dtype

    def group_tensors(lists: _Lists, with_indices: bool = False) -> dict[_Key, _Group]:
        groups: dict[_Key, _Group] = group(lists, True)
        result: dict[_Key, _Group] = {}
        for (device, dtype), (members, indices) in groups.items():
            if device.type != "meta":
                result[device, dtype] = members, indices if with_indices else []
                continue
            for seen, at in _by_device(members[0]).items():
                split = [[tensors[i] for i in at] if tensors else [] for tensors in members]
                result[seen, dtype] = split, [indices[i] for i in at] if with_indices else []
        return result

    patches.add(torch._C, "_group_tensors_by_device_and_dtype", group_tensors)


def _by_device(tensors: Sequence[torch.Tensor | None]) -> dict[torch.device, list[int]]:
    """Group positions of ``tensors`` by device, the last one met first, as C++'s hash map does."""
    devices: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(tensors):
        assert tensor is not None  # torch checks the first list
        devices.setdefault(tensor.device, []).append(position)
    return dict(reversed(devices.items()))
