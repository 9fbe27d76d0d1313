"""``torch.device(0)``: a bare number is the accelerator's, and a CPU build of torch has none."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.machine.machine import SimulatedMachine

_Device: Any = torch.device


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace ``torch.device``, which is a type that cannot be changed or inherited from."""
    patches.add(torch, "device", device)


class _Kind(type):
    """The type of the stand-in: it makes real devices, and ``isinstance`` finds them."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and type(args[0]) is int and not options:
            return _Device("cuda", args[0])
        return _Device(*args, **options)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _Device)

    def __subclasscheck__(cls, kind: type) -> bool:
        return kind is cls or issubclass(kind, _Device)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _Device

    def __hash__(cls) -> int:
        return hash(_Device)


device = _Kind("device", (), {"__module__": "torch", "__doc__": _Device.__doc__})
