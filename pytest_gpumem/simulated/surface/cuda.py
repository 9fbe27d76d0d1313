"""``torch.cuda``, replaced one level down: its own Python runs on top, of whichever version."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from pytest_gpumem.allocator.snapshot import frames_of
from pytest_gpumem.allocator.trace import Contexts, Recording
from pytest_gpumem.simulated.common.callsite import refusing
from pytest_gpumem.simulated.common.patching import Patches, add_functions
from pytest_gpumem.simulated.gpu.catalogue import limits_of
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.machine.generators import generator_type
from pytest_gpumem.simulated.machine.machine import GPU, SimulatedMachine
from pytest_gpumem.simulated.surface.pools import chosen_pool
from pytest_gpumem.sizes import KIB, MIB

CUDA_OF_CPU_BUILDS = "12.6"
"""``torch.version.cuda`` where the running build has none; the allocator does not depend on it."""
FLATTENS_POOL_IDS = "2.13"
"""First release whose ``torch.cuda.memory_stats`` accepts keys that are no strings.

``torch.__version__`` compares itself by releases.
"""
_PRIVATE = "reserved_bytes_by_private_pools"
_JOINS_POOL_IDS = torch.__version__ < FLATTENS_POOL_IDS


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace ``torch._C._cuda_*`` and the state that ``torch.cuda`` keeps."""
    functions = _functions(machine)
    add_functions(functions | _recording(machine), patches)
    cuda = torch.cuda
    count = len(machine.gpus)
    generator = generator_type(torch.Generator, lambda: machine.capture)
    state: dict[str, Any] = {
        "_initialized": True,
        "_cached_device_count": count,
        "_get_device_properties": lambda index: properties_of(machine.device(index)),
        "_exchange_device": functions["_cuda_exchangeDevice"],
        "_maybe_exchange_device": functions["_cuda_exchangeDevice"],
        "_is_in_bad_fork": functions["_cuda_isInBadFork"],
        "default_generators": tuple(generator(f"cuda:{i}") for i in range(count)),
        "has_magma": True,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or machine.current.model.compute_capability >= (8, 0)
        ),
    }
    for name, value in state.items():
        patches.add(cuda, name, value)
    # Up to 2.10 torch copies the whole trace for this, whatever the arguments.
    for module in (cuda, cuda.memory):
        patches.add(module, "memory_snapshot", partial(_memory_snapshot, machine))
    patches.add(torch._C, "_has_cuda", True)
    patches.add(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    # The original remembers its answers, also beyond the simulation.
    patches.wrap(
        torch, "get_device_module", lambda find, device=None: find(device) if device else torch.cuda
    )
    patches.add(torch, "Generator", generator)
    # A type that can neither be changed nor inherited from.
    patches.add(torch, "device", device)
    patches.add(torch.version, "cuda", torch.version.cuda or CUDA_OF_CPU_BUILDS)


_STATE = frozenset(
    {"_cached_device_count", "_get_device_properties", "_initialized", "default_generators"}
)


def answers_for_gpu(owner: Any, name: str, value: Any) -> bool:
    """Return whether a replacement stands below ``torch.cuda``, where no user code calls it."""
    if isinstance(value, type):
        return False
    below = (torch._C, torch.version, torch.backends.cudnn, torch.backends.cuda)
    if owner in (torch.cuda.graphs, torch.cuda.memory):
        return hasattr(torch._C, name)  # a copy: torch.cuda uses this name, not torch._C
    if owner is torch.amp.autocast_mode.autocast:
        return True  # it casts for the GPU in compiled code, too
    return owner in below or (owner is torch.cuda and name in _STATE)


def _functions(machine: SimulatedMachine) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch._C`` that ``torch.cuda`` and ``torch.accelerator`` call."""

    def gpu(device: Any = None) -> GPU:
        return machine.device(device.index if isinstance(device, torch.device) else device)

    def memory(device: Any) -> Memory:
        return gpu(device).allocator

    def set_device(index: int) -> None:
        machine.current_index = gpu(index).index

    def exchange_device(index: int) -> int:
        before = machine.current_index
        if index >= 0:
            set_device(index)
        return before

    def memory_stats(device: Any) -> dict[str, Any]:
        stats = memory(device).stats()
        if _PRIVATE in stats and _JOINS_POOL_IDS:
            stats[_PRIVATE] = {f"{a}_{b}": value for (a, b), value in stats[_PRIVATE].items()}
        return stats

    def clear_workspaces() -> None:
        for each in machine.gpus:
            each.workspaces.clear()

    def blas_handle() -> int:
        machine.current.workspaces.handle(machine.current.stream)
        return 1

    return {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: machine.execution.in_child,
        "_cuda_getDeviceCount": lambda: len(machine.gpus),
        "_cuda_getDevice": lambda: machine.current_index,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_canDeviceAccessPeer": lambda one, other: one != other,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_getCompiledVersion": lambda: 0,
        "_cuda_getArchFlags": lambda: "sm_{}{}".format(*machine.current.model.compute_capability),
        "_cuda_ipc_collect": lambda: None,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": lambda device: memory(device).reset_peak_stats(),
        "_cuda_resetAccumulatedMemoryStats": lambda index: memory(index).reset_accumulated_stats(),
        "_cuda_setMemoryFraction": lambda share, device: memory(device).set_memory_fraction(share),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_raw_alloc": lambda *given: memory(None).malloc(*given),
        "_cuda_cudaCachingAllocator_raw_delete": lambda address: memory(None).free(address),
        "_cuda_clearCublasWorkspaces": clear_workspaces,
        "_cuda_getCurrentBlasHandle": blas_handle,
        "_cuda_getCurrentSolverHandle": lambda: 1,
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getDeviceIndex": lambda: machine.current_index,
        "_accelerator_setDeviceIndex": set_device,
        "_accelerator_deviceCount": lambda: len(machine.gpus),
        "_accelerator_exchangeDevice": exchange_device,
        "_accelerator_maybeExchangeDevice": exchange_device,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getDeviceStats": memory_stats,
        "_accelerator_resetPeakStats": lambda index: memory(index).reset_peak_stats(),
        "_accelerator_resetAccumulatedStats": lambda index: memory(index).reset_accumulated_stats(),
        "_accelerator_getMemoryInfo": lambda index: gpu(index).free_and_total,
    }


_CONTEXTS = dict(zip((None, "state", "alloc", "all"), Contexts, strict=True))
_KEPT_WITHOUT_TRACE = 1
"""Events kept with ``enabled="state"``."""


def _recording(machine: SimulatedMachine) -> dict[str, Callable[..., Any]]:
    """Return the functions that record history (torch/csrc/cuda/memory_snapshot.cpp).

    The two that record have more parameters in later releases: 2.6 ends before ``clear_history``,
    ``skip_actions`` is the last one since 2.10, and the last two are of 2.15. Without
    ``record_cuda`` the recording of the device allocator is off (seen with torch 2.15.0+cu132);
    the history of pinned memory of the host, ``record_pinned_host_memory``, is not recorded.
    """

    def record_history(
        enabled: str | None,
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Any = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        if enabled not in (None, "state", "all"):
            raise RuntimeError("expected state to be 'state', 'all', or None")
        if context not in _CONTEXTS:
            raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
        if stacks not in ("python", "all"):
            raise RuntimeError("expected stacks to be 'python', or 'all'")
        recording = Recording(
            on=enabled is not None and record_cuda,
            contexts=_CONTEXTS[context],
            with_cpp=stacks == "all",
            max_entries=max_entries if enabled == "all" else _KEPT_WITHOUT_TRACE,
            skipped=frozenset(skip_actions),
        )
        for gpu in machine.gpus:
            gpu.allocator.record_history(recording, clear=clear_history)

    def is_enabled() -> bool:
        recording = machine.current.allocator.trace.recording
        return recording is None or recording.on

    def allocation_traceback(data_ptr: int) -> list[dict[str, Any]] | None:
        for gpu in machine.gpus:
            context = gpu.allocator.live_contexts().get(data_ptr)
            if context is not None:
                return frames_of(context, gpu.allocator.trace) or None
        return None

    return {
        "_cuda_record_memory_history": record_history,
        "_cuda_record_memory_history_legacy": refusing(
            "torch.cuda.memory._record_memory_history(True)",
            "has the arguments of torch 2.0: record with 'all', and stop with None",
        ),
        "_cuda_isHistoryEnabled": is_enabled,
        "_cuda_allocationTraceback": allocation_traceback,
    }


def _memory_snapshot(
    machine: SimulatedMachine, mempool_id: Any = None, include_traces: bool = True
) -> list[dict[str, Any]]:
    """Return the segments of every device, as ``torch.cuda.memory_snapshot()``, without stacks.

    torch has none either unless history is recorded; ``_snapshot()`` shows them.
    """
    pool = chosen_pool(machine, mempool_id)
    return [
        segment for gpu in machine.gpus for segment in gpu.allocator.segments(pool, frames=False)
    ]


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


class Uuid(uuid.UUID):
    """``torch._C._CUuuid``: the unique name of a device (torch/csrc/cuda/Module.cpp)."""

    @property
    def bytes(self) -> list[int]:  # type: ignore[override]  # as torch has them
        """The sixteen bytes, as numbers."""
        return list(self.int.to_bytes(16, "big"))


class DeviceProperties(SimpleNamespace):
    """``torch.cuda.get_device_properties()`` of a simulated GPU; sizes in bytes.

    It has no clock rates, which newer releases have, because a simulated GPU has no clock, and not
    the width of the memory bus, on which no memory depends.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]  # as torch's own has

    def __repr__(self) -> str:
        # torch/csrc/cuda/Module.cpp, registerCudaDeviceProperties
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // MIB}MB, "
            f"multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


def properties_of(gpu: GPU) -> DeviceProperties:
    """Return the properties of ``gpu``, by torch's names."""
    model = gpu.model
    limits = limits_of(model.compute_capability)
    return DeviceProperties(
        name=model.full_name,
        major=model.compute_capability[0],
        minor=model.compute_capability[1],
        total_memory=model.total_memory,
        multi_processor_count=model.sm_count,
        max_threads_per_multi_processor=model.max_threads_per_sm,
        max_threads_per_block=1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        L2_cache_size=model.l2_cache_bytes,
        shared_memory_per_multiprocessor=limits.shared_memory,
        shared_memory_per_block=48 * KIB,
        shared_memory_per_block_optin=limits.shared_memory_per_block,
        uuid=Uuid(str(uuid.uuid5(uuid.NAMESPACE_OID, f"{model.name}/{gpu.index}"))),
        gcnArchName=model.full_name,
        pci_bus_id=gpu.index,
        pci_device_id=0,
        pci_domain_id=0,
        is_integrated=0,
        is_multi_gpu_board=0,
    )
