"""``torch.cuda``, replaced one level down: its own Python runs on top, of whichever version."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpumem.simulated.allocator.snapshot import snapshot
from pytest_gpumem.simulated.surface.streams import SimulatedStream

if TYPE_CHECKING:
    from pytest_gpumem.simulated.device import SimulatedGPU
    from pytest_gpumem.simulated.patching import Patches
    from pytest_gpumem.simulated.simulation import Simulation


CUDA_OF_CPU_BUILDS = "12.6"
"""``torch.version.cuda`` where the running build has none; the allocator does not depend on it."""


def plan(simulation: Simulation, patches: Patches) -> None:
    """Replace ``torch._C._cuda_*`` and the state that ``torch.cuda`` keeps."""
    api = _Api(simulation)
    for name in dir(api):
        # A CPU build has no _cuda_* at all; of _accelerator_* each release has its own.
        if name.startswith("_cuda_") or (
            name.startswith("_accelerator_") and hasattr(torch._C, name)
        ):
            patches.plan(torch._C, name, getattr(api, name))
    for module in (torch.cuda.graphs, torch.cuda.memory):
        # They hold some of these functions under their own names.
        for name in vars(module):
            if name.startswith("_cuda_") and hasattr(api, name):
                patches.plan(module, name, getattr(api, name))
    cuda = torch.cuda
    count = len(simulation.gpus)
    state: dict[str, Any] = {
        "_initialized": True,
        "_cached_device_count": count,
        "_get_device_properties": api.device_properties,
        "_exchange_device": api._cuda_exchangeDevice,
        "_maybe_exchange_device": api._cuda_exchangeDevice,
        "_is_in_bad_fork": bool,
        "_cudart": _Runtime(simulation),
        "default_generators": tuple(torch.Generator() for _ in range(count)),
        "has_magma": True,
        "get_rng_state": api.get_rng_state,
        "set_rng_state": api.set_rng_state,
        "get_arch_list": api.arch_list,
        "_is_compiled": _yes,
        "_nvml_based_avail": bool,
        "_raw_device_count_nvml": lambda: -1,
        "is_bf16_supported": api.is_bf16_supported,
    }
    for name, value in state.items():
        patches.plan(cuda, name, value)
    patches.plan(torch.cuda.random, "get_rng_state", api.get_rng_state)
    patches.plan(torch.cuda.random, "set_rng_state", api.set_rng_state)
    # Up to 2.10 torch copies the whole trace for this, whatever is asked of it.
    patches.plan(torch.cuda, "memory_snapshot", api.memory_snapshot)
    patches.plan(torch.cuda.memory, "memory_snapshot", api.memory_snapshot)
    patches.plan(torch._C, "_has_cuda", True)
    patches.plan(torch, "Generator", _generator(torch.Generator))
    patches.plan(torch.version, "cuda", torch.version.cuda or CUDA_OF_CPU_BUILDS)


def _yes() -> bool:
    return True


def _generator(real: type[torch.Generator]) -> Callable[..., torch.Generator]:
    class Generator(real):  # type: ignore[misc,valid-type]  # stays a class for isinstance()
        def __new__(cls, device: Any = None) -> Any:
            if device is not None and torch.device(device).type == "cuda":
                device = None
            return super().__new__(cls) if device is None else super().__new__(cls, device=device)

    return Generator


@dataclass(frozen=True)
class DeviceProperties:
    """``torch.cuda.get_device_properties()`` of a simulated GPU; sizes in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    regs_per_multiprocessor: int = 65536
    uuid: str = ""
    L2_cache_size: int = 0


class _Runtime:
    """``torch.cuda.cudart()``."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        gpu = self._simulation.device(device)
        return gpu.allocator.free_memory, gpu.model.total_memory

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


class _Api:
    """The functions of ``torch._C`` that ``torch.cuda`` calls, for simulated devices."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def _gpu(self, device: Any = None) -> SimulatedGPU:
        index = device.index if isinstance(device, torch.device) else device
        return self._simulation.device(index)

    # Devices.

    def _cuda_init(self) -> None: ...

    def _cuda_isInBadFork(self) -> bool:
        return False

    def _cuda_getDeviceCount(self) -> int:
        return len(self._simulation.gpus)

    def _cuda_getDevice(self) -> int:
        return self._simulation.current_index

    def _cuda_setDevice(self, index: int) -> None:
        self._simulation.device(index)
        self._simulation.current_index = index

    def _cuda_exchangeDevice(self, index: int) -> int:
        before = self._simulation.current_index
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
        return ""

    def _cuda_synchronize(self) -> None: ...

    def _cuda_ipc_collect(self) -> None: ...

    def _cuda_sleep(self, cycles: int) -> None: ...

    def device_properties(self, index: int) -> DeviceProperties:
        model = self._gpu(index).model
        return DeviceProperties(
            name=model.full_name,
            major=model.compute_capability[0],
            minor=model.compute_capability[1],
            total_memory=model.total_memory,
            multi_processor_count=model.sm_count,
            max_threads_per_multi_processor=model.max_threads_per_sm,
            uuid=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{model.name}/{index}")),
        )

    def arch_list(self) -> list[str]:
        major, minor = self._gpu().model.compute_capability
        return [f"sm_{major}{minor}"]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self._gpu().model.compute_capability >= (8, 0)

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        return torch.cuda.default_generators[0].get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.cuda.default_generators[0].set_state(new_state)

    # Streams.

    def _cuda_getCurrentStream(self, index: int) -> tuple[int, int, int]:
        return self._gpu(index).stream, index, 1

    def _cuda_getDefaultStream(self, index: int) -> tuple[int, int, int]:
        return 0, index, 1

    def _cuda_getCurrentRawStream(self, index: int) -> int:
        return self._gpu(index).stream

    def _cuda_setStream(
        self, stream_id: int = 0, device_index: int = 0, device_type: int = 1
    ) -> None:
        self._gpu(device_index).stream = stream_id

    def _cuda_isCurrentStreamCapturing(self) -> bool:
        return False

    # The caching allocator.

    def _cuda_memoryStats(self, device: Any) -> dict[str, Any]:
        return self._gpu(device).allocator.stats()

    def _cuda_resetPeakMemoryStats(self, device: Any) -> None:
        self._gpu(device).allocator.reset_peak_stats()

    def _cuda_resetAccumulatedMemoryStats(self, device: Any) -> None:
        self._gpu(device).allocator.reset_accumulated_stats()

    def _cuda_emptyCache(self, *_: Any) -> None:
        for gpu in self._simulation.gpus:
            gpu.allocator.empty_cache()

    def memory_snapshot(
        self, mempool_id: Any = None, include_traces: bool = True
    ) -> list[dict[str, Any]]:
        """``torch.cuda.memory_snapshot()``: the segments of every device, without stacks.

        torch has none either unless history is recorded; ``_snapshot()`` shows them.
        """
        return [s for gpu in self._simulation.gpus for s in gpu.allocator.segments(frames=False)]

    def _cuda_memorySnapshot(self, *_: Any) -> dict[str, Any]:
        return snapshot([gpu.allocator for gpu in self._simulation.gpus])

    def _cuda_record_memory_history(self, *args: Any, **kwargs: Any) -> None: ...

    def _cuda_isHistoryEnabled(self) -> bool:
        return True

    def _cuda_setMemoryFraction(self, fraction: float, device: Any) -> None:
        self._gpu(device).allocator.set_memory_fraction(fraction)

    def _cuda_getAllocatorBackend(self) -> str:
        return "native"

    def _cuda_cudaCachingAllocator_raw_alloc(self, size: int, stream: int) -> int:
        return self._simulation.current.allocator.malloc(size, stream)

    def _cuda_cudaCachingAllocator_raw_delete(self, address: int) -> None:
        self._simulation.current.allocator.free(address)

    # Library workspaces.

    def _cuda_clearCublasWorkspaces(self) -> None:
        for gpu in self._simulation.gpus:
            gpu.workspaces.clear()

    def _cuda_getCurrentBlasHandle(self) -> int:
        self._simulation.current.workspaces.gemm()
        return 1

    # The same, through torch.accelerator.

    def _accelerator_getAccelerator(self) -> torch.device:
        return torch.device("cuda")

    def _accelerator_getDeviceIndex(self) -> int:
        return self._simulation.current_index

    def _accelerator_setDeviceIndex(self, index: int) -> None:
        self._cuda_setDevice(index)

    def _accelerator_deviceCount(self) -> int:
        return len(self._simulation.gpus)

    def _accelerator_exchangeDevice(self, index: int) -> int:
        return self._cuda_exchangeDevice(index)

    _accelerator_maybeExchangeDevice = _accelerator_exchangeDevice
    _accelerator_hooks_device_count = _accelerator_deviceCount
    _accelerator_hooks_get_current_device = _accelerator_getDeviceIndex
    _accelerator_hooks_set_current_device = _accelerator_setDeviceIndex
    _accelerator_hooks_exchange_device = _accelerator_exchangeDevice
    _accelerator_hooks_maybe_exchange_device = _accelerator_exchangeDevice

    def _accelerator_getStream(self, index: int) -> SimulatedStream:
        return SimulatedStream(stream_id=self._gpu(index).stream, device_index=index)

    def _accelerator_setStream(self, stream: SimulatedStream) -> None:
        self._gpu(stream.device_index).stream = stream.stream_id

    def _accelerator_synchronizeDevice(self, index: int) -> None: ...

    def _accelerator_isAllocatorInitialized(self) -> bool:
        return True

    def _accelerator_getDeviceStats(self, index: int) -> dict[str, Any]:
        return self._cuda_memoryStats(index)

    def _accelerator_resetPeakStats(self, index: int) -> None:
        self._cuda_resetPeakMemoryStats(index)

    def _accelerator_resetAccumulatedStats(self, index: int) -> None:
        self._cuda_resetAccumulatedMemoryStats(index)

    def _accelerator_emptyCache(self) -> None:
        self._cuda_emptyCache()

    def _accelerator_getMemoryInfo(self, index: int) -> tuple[int, int]:
        gpu = self._gpu(index)
        return gpu.allocator.free_memory, gpu.model.total_memory
