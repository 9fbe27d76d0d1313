"""Triton's driver of the device: a simulated GPU's.

Source: triton/backends/nvidia/driver.py and triton/runtime/driver.py, releases 3.2 to 3.9.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.surface.properties import DeviceProperties
from pytest_gpumem.values.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from pytest_gpumem.simulated.common.patching import Patches
    from pytest_gpumem.simulated.machine.machine import SimulatedMachine


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Make Triton find the simulated GPU; only to be called where Triton is imported."""
    backends = importlib.import_module("triton.backends").backends
    driver = importlib.import_module("triton.runtime.driver").driver
    # Up to 3.4 an attribute, since then a property that creates a missing driver.
    name = "active" if "active" in vars(driver) else "_active"
    patches.add(driver, name, _driver(backends["nvidia"].driver, machine))


def answers_for_gpu(owner: Any, name: str, value: Any) -> bool:
    """Return whether a replacement is the driver, by which Inductor finds the GPU of kernels."""
    return isinstance(value, _Simulated)


class _Simulated:
    """A marker of simulated drivers, to tell them from Triton's own."""


def _driver(kind: type, machine: SimulatedMachine) -> Any:
    """Return Triton's own driver for CUDA, but for its queries to the device."""

    def __init__(self: Any) -> None:  # noqa: N807  # of the class below
        self.utils = _Utils(machine)
        # Looked up when they are called: a simulation replaces them when it begins.
        self.get_device_capability = lambda *of: torch.cuda.get_device_capability(*of)
        self.get_current_stream = lambda index=None: torch.cuda.current_stream(index).cuda_stream
        self.get_current_device = lambda: torch.cuda.current_device()
        self.set_current_device = lambda index: torch.cuda.set_device(index)

    made = type(
        "SimulatedDriver", (_Simulated, kind), {"__init__": __init__, "launcher_cls": _no_launcher}
    )
    return made()


def _no_launcher(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedOperatorError(
        f"{user_line()} launches compiled code of Triton's by hand, which no simulated GPU runs"
    )


class _Properties(dict[str, int]):
    """The driver's properties of a device, but for its clocks."""

    def __missing__(self, name: str) -> NoReturn:
        raise UnsupportedOperatorError(
            f"{user_line()} asks Triton's driver for {name}, which no simulated GPU has"
        )


class _Utils:
    """The driver functions that Triton compiles: ``triton.runtime.driver.active.utils``."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def get_device_properties(self, index: int) -> dict[str, int]:
        """Return shared memory (bytes), registers, multiprocessors and threads of a warp."""
        properties = DeviceProperties.of(self._machine.device(index))
        return _Properties(
            max_shared_mem=properties.shared_memory_per_block_optin,
            max_num_regs=properties.regs_per_multiprocessor,
            multiprocessor_count=properties.multi_processor_count,
            warpSize=properties.warp_size,
        )

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise UnsupportedOperatorError(
                f"{user_line()} calls {name} of Triton's driver, which needs a real CUDA device, "
                f"so it cannot run on a simulated GPU"
            )

        return refuse
