"""``torch.cuda``, replaced one level down: its own Python runs on top, of whichever version."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from pytest_gpumem.simulated.common.patching import Patches, add_functions
from pytest_gpumem.simulated.machine.generators import generator_type
from pytest_gpumem.simulated.machine.machine import GPU, SimulatedMachine
from pytest_gpumem.simulated.surface.pools import chosen_pool
from pytest_gpumem.simulated.surface.properties import DeviceProperties

CUDA_OF_CPU_BUILDS = "12.6"
"""``torch.version.cuda`` where the running build has none; the allocator does not depend on it."""
FLATTENS_POOL_IDS = "2.13"
"""First release whose ``torch.cuda.memory_stats`` takes keys that are no strings.

``torch.__version__`` compares itself by releases.
"""
_PRIVATE = "reserved_bytes_by_private_pools"


@cache
def _joins_pool_ids(release: str) -> bool:
    """Return whether this release has strings for keys; each comparison parses the release."""
    return release < FLATTENS_POOL_IDS


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace ``torch._C._cuda_*`` and the state that ``torch.cuda`` keeps."""
    api = _Api(machine)
    add_functions(api, patches)
    cuda = torch.cuda
    count = len(machine.gpus)
    generator = generator_type(torch.Generator)
    state: dict[str, Any] = {
        "_initialized": True,
        "_cached_device_count": count,
        "_get_device_properties": api.device_properties,
        "_exchange_device": api._cuda_exchangeDevice,
        "_maybe_exchange_device": api._cuda_exchangeDevice,
        "_is_in_bad_fork": api._cuda_isInBadFork,
        "default_generators": tuple(generator(f"cuda:{i}") for i in range(count)),
        "has_magma": True,
        "is_bf16_supported": api.is_bf16_supported,
    }
    for name, value in state.items():
        patches.add(cuda, name, value)
    # Up to 2.10 torch copies the whole trace for this, whatever the arguments.
    patches.add(torch.cuda, "memory_snapshot", api.memory_snapshot)
    patches.add(torch.cuda.memory, "memory_snapshot", api.memory_snapshot)
    patches.add(torch._C, "_has_cuda", True)
    patches.add(torch._C, "_get_accelerator", api._accelerator_getAccelerator)
    patches.add(torch, "get_device_module", _device_module(torch.get_device_module))
    patches.add(torch, "Generator", generator)
    # A type that can neither be changed nor inherited from.
    patches.add(torch, "device", device)
    patches.add(torch.version, "cuda", torch.version.cuda or CUDA_OF_CPU_BUILDS)


_STATE = frozenset(
    {"_cached_device_count", "_get_device_properties", "_initialized", "default_generators"}
)


def answers_for_gpu(owner: Any, name: str, value: Any) -> bool:
    """Return whether a replacement is a part of ``torch.cuda`` that user code does not call."""
    if isinstance(value, type):
        return False
    below = (torch._C, torch.version, torch.backends.cudnn, torch.backends.cuda)
    if owner in (torch.cuda.graphs, torch.cuda.memory):
        return hasattr(torch._C, name)  # a copy: torch.cuda uses this name, not torch._C
    if owner is torch.amp.autocast_mode.autocast:
        return True  # it casts for the GPU in compiled code, too
    return owner in below or (owner is torch.cuda and name in _STATE)


def _device_module(find: Callable[..., Any]) -> Callable[..., Any]:
    def get_device_module(device: torch.device | str | None = None) -> Any:
        # The original remembers its answers, also beyond the simulation.
        return torch.cuda if device is None else find(device)

    return get_device_module


class _Api:
    """The functions of ``torch._C`` that ``torch.cuda`` calls, for simulated devices."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine

    def _gpu(self, device: Any = None) -> GPU:
        index = device.index if isinstance(device, torch.device) else device
        return self._machine.device(index)

    # Devices.

    def _cuda_init(self) -> None: ...

    def _cuda_isInBadFork(self) -> bool:
        return self._machine.execution.in_child

    def _cuda_getDeviceCount(self) -> int:
        return len(self._machine.gpus)

    def _cuda_getDevice(self) -> int:
        return self._machine.current_index

    def _cuda_setDevice(self, index: int) -> None:
        self._machine.device(index)
        self._machine.current_index = index

    def _cuda_exchangeDevice(self, index: int) -> int:
        before = self._machine.current_index
        if index >= 0:
            self._cuda_setDevice(index)
        return before

    _cuda_maybeExchangeDevice = _cuda_exchangeDevice

    def _cuda_canDeviceAccessPeer(self, one: int, other: int) -> bool:
        return one != other

    def _cuda_hasPrimaryContext(self, index: int) -> bool:
        return True

    def _cuda_getCompiledVersion(self) -> int:
        return 0

    def _cuda_getArchFlags(self) -> str:
        major, minor = self._gpu().model.compute_capability
        return f"sm_{major}{minor}"

    def _cuda_ipc_collect(self) -> None: ...

    def device_properties(self, index: int) -> DeviceProperties:
        return DeviceProperties.of(self._gpu(index))

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self._gpu().model.compute_capability >= (8, 0)

    # The caching allocator.

    def _cuda_memoryStats(self, device: Any) -> dict[str, Any]:
        stats = self._gpu(device).allocator.stats()
        if _PRIVATE in stats and _joins_pool_ids(torch.__version__):
            stats[_PRIVATE] = {f"{a}_{b}": value for (a, b), value in stats[_PRIVATE].items()}
        return stats

    def _cuda_resetPeakMemoryStats(self, device: Any) -> None:
        self._gpu(device).allocator.reset_peak_stats()

    def _cuda_resetAccumulatedMemoryStats(self, device: Any) -> None:
        self._gpu(device).allocator.reset_accumulated_stats()

    def memory_snapshot(
        self, mempool_id: Any = None, include_traces: bool = True
    ) -> list[dict[str, Any]]:
        """``torch.cuda.memory_snapshot()``: the segments of every device, without stacks.

        torch has none either unless history is recorded; ``_snapshot()`` shows them.
        """
        pool = chosen_pool(self._machine, mempool_id)
        return [
            segment
            for gpu in self._machine.gpus
            for segment in gpu.allocator.segments(pool, frames=False)
        ]

    def _cuda_isHistoryEnabled(self) -> bool:
        return True

    def _cuda_setMemoryFraction(self, fraction: float, device: Any) -> None:
        self._gpu(device).allocator.set_memory_fraction(fraction)

    def _cuda_getAllocatorBackend(self) -> str:
        return "native"

    def _cuda_cudaCachingAllocator_raw_alloc(self, size: int, stream: int) -> int:
        return self._machine.current.allocator.malloc(size, stream)

    def _cuda_cudaCachingAllocator_raw_delete(self, address: int) -> None:
        self._machine.current.allocator.free(address)

    # Library workspaces.

    def _cuda_clearCublasWorkspaces(self) -> None:
        for gpu in self._machine.gpus:
            gpu.workspaces.clear()

    def _cuda_getCurrentBlasHandle(self) -> int:
        gpu = self._machine.current
        gpu.workspaces.handle(gpu.stream)
        return 1

    def _cuda_getCurrentSolverHandle(self) -> int:
        return 1

    # The same, through torch.accelerator.

    def _accelerator_getAccelerator(self) -> torch.device:
        return torch.device("cuda")

    def _accelerator_getDeviceIndex(self) -> int:
        return self._machine.current_index

    def _accelerator_setDeviceIndex(self, index: int) -> None:
        self._cuda_setDevice(index)

    def _accelerator_deviceCount(self) -> int:
        return len(self._machine.gpus)

    def _accelerator_exchangeDevice(self, index: int) -> int:
        return self._cuda_exchangeDevice(index)

    _accelerator_maybeExchangeDevice = _accelerator_exchangeDevice

    def _accelerator_isAllocatorInitialized(self) -> bool:
        return True

    def _accelerator_getDeviceStats(self, index: int) -> dict[str, Any]:
        return self._cuda_memoryStats(index)

    def _accelerator_resetPeakStats(self, index: int) -> None:
        self._cuda_resetPeakMemoryStats(index)

    def _accelerator_resetAccumulatedStats(self, index: int) -> None:
        self._cuda_resetAccumulatedMemoryStats(index)

    def _accelerator_getMemoryInfo(self, index: int) -> tuple[int, int]:
        gpu = self._gpu(index)
        return gpu.allocator.free_memory, gpu.model.total_memory


_Device: Any = torch.device


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
