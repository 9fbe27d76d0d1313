"""``torch.cuda.MemPool``, checkpoints of pools, and the caching allocator for user code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any, ClassVar

import torch

from pytest_gpumem.allocator import AllocatorError, SettingsError
from pytest_gpumem.allocator.blocks import SHARED_POOL, PoolId
from pytest_gpumem.allocator.releases import GENERIC_CONFIG
from pytest_gpumem.allocator.snapshot import PoolState, snapshot
from pytest_gpumem.simulated.common.callsite import refuse, refusing
from pytest_gpumem.simulated.common.patching import Patches, add_functions
from pytest_gpumem.simulated.gpu.memory import Memory
from pytest_gpumem.simulated.gpu.releases import OPTIONS_SINCE, THREAD_POOLS
from pytest_gpumem.simulated.machine.graphs import Graph
from pytest_gpumem.simulated.machine.machine import SimulatedMachine
from pytest_gpumem.simulated.machine.storages import BORROWED, storage_key


class SimulatedMemPool:
    """``torch.cuda.MemPool`` of a simulated GPU."""

    _machine: ClassVar[SimulatedMachine]

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False, **_: Any
    ) -> None:
        if allocator is not None:
            refuse("torch.cuda.MemPool with an allocator of its own", _PAST)
        gpu = self._machine.current
        for option, given in (("use_on_oom", use_on_oom), ("no_split", no_split)):
            if given and gpu.version < OPTIONS_SINCE[option]:
                raise TypeError(f"MemPool.__init__() got an unexpected keyword argument '{option}'")
        self.id: PoolId = (0, next(self._machine.user_pools))
        self.allocator = None
        self.device = gpu.index
        self._memory: Memory = gpu.allocator
        self._memory.pools.create(self.id, use_on_oom=use_on_oom, no_split=no_split)

    def use_count(self) -> int:
        """Return how many pool objects, scopes and graphs refer to the memory."""
        return self._memory.pools.get(self.id).uses

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the pool's segments."""
        return self._memory.segments(self.id)

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None and not exiting():  # the modules this needs may be gone by then
            memory.pools.get(self.id).use_on_oom = False
            memory.pools.release(self.id)
            memory.empty_cache(self.id)


class SimulatedMemPoolContext:
    """``torch.cuda.MemPoolContext``, up to 2.7: its pool is the active one while it lives.

    Source: ``MemPoolContext`` of c10/cuda/CUDACachingAllocator.cpp. ``use_mem_pool`` makes one
    around its scope; snapshots and ``empty_cache`` then concern only the active pool.
    """

    _machine: ClassVar[SimulatedMachine]

    def __init__(self, pool: SimulatedMemPool) -> None:
        self._active = self._machine.thread_state
        self._previous = self._active.pool
        self._active.pool = pool

    def __del__(self) -> None:
        self._active.pool = self._previous

    @classmethod
    def active_pool(cls) -> SimulatedMemPool | None:
        """Return the pool that is active in this thread."""
        active: SimulatedMemPool | None = cls._machine.thread_state.pool
        return active


def chosen_pool(machine: SimulatedMachine, pool: Sequence[Any] | None) -> PoolId:
    """Return the pool of a snapshot or ``empty_cache``; ``SHARED_POOL`` stands for all pools."""
    if pool is not None:
        return pool[0], pool[1]
    active: SimulatedMemPool | None = machine.thread_state.pool
    if active is None or machine.current.version >= THREAD_POOLS:
        return SHARED_POOL
    return active.id


def _functions(machine: SimulatedMachine) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch._C`` about pools and settings of the allocator."""

    def memory(device: Any) -> Memory:
        index = device.index if isinstance(device, torch.device) else device
        return machine.device(index).allocator

    def begin(device: int, pool: PoolId, accepts: Any) -> None:
        with _torch_errors():
            memory(device).begin_allocate_to_pool((pool[0], pool[1]), accepts)

    def begin_of_all(device: int, pool: PoolId) -> None:
        active = machine.thread_state.pool
        if active is not None and active.id == (pool[0], pool[1]):
            # use_mem_pool of a torch up to 2.7, whichever release is simulated.
            begin_of_thread(device, pool)
        else:
            begin(device, pool, lambda _: True)

    def begin_of_thread(device: int, pool: PoolId) -> None:
        if machine.device(device).version < THREAD_POOLS:
            begin(device, pool, lambda _: True)
            return
        thread = _thread_on_gpu()
        begin(device, pool, lambda _: _thread_on_gpu() == thread)

    def begin_of_stream(device: int, pool: PoolId) -> None:
        chosen = machine.device(device).stream
        begin(device, pool, lambda stream: stream == chosen)

    def end(device: int, pool: PoolId) -> None:
        with _torch_errors():
            memory(device).end_allocate_to_pool((pool[0], pool[1]))

    def release(device: int, pool: PoolId) -> None:
        with _torch_errors():
            memory(device).pools.release((pool[0], pool[1]))

    def check_live(device: int, mempool_id: PoolId, expected_live_allocations: set[int]) -> bool:
        with _torch_errors():
            live = memory(device).pool_addresses((mempool_id[0], mempool_id[1]))
        return live == set(expected_live_allocations)

    def attach_observer(observer: Callable[[int, int, int, int], object]) -> None:
        for gpu in machine.gpus:
            gpu.allocator.observers.append(observer)

    def empty_cache(pool: Sequence[Any] | None = None) -> None:
        chosen = chosen_pool(machine, pool)
        for gpu in machine.gpus:
            gpu.allocator.empty_cache(chosen)

    def take_snapshot(chosen: Any = None, *_: Any) -> dict[str, Any]:
        """Return a snapshot; ``chosen`` is a pool's id, since 2.11 with whether to add traces."""
        traces = [] if chosen is None else chosen[2:]
        memories = [gpu.allocator for gpu in machine.gpus]
        return snapshot(memories, chosen_pool(machine, chosen), traces=list(traces) != [False])

    def enable_caching(enabled: bool) -> None:
        if not enabled:
            refuse("torch.cuda.caching_allocator_enable(False)", _PAST)

    def set_settings(settings: str) -> None:
        for gpu in machine.gpus:
            try:
                gpu.allocator.set_settings(settings)
            except SettingsError as error:
                # ValueError since the generic configuration class.
                kind = ValueError if gpu.version >= GENERIC_CONFIG else RuntimeError
                raise kind(str(error)) from None

    def capability(device: int) -> dict[str, Any]:
        every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        return {"supported_dtypes": every}

    return {
        "_cuda_beginAllocateToPool": begin_of_all,
        "_cuda_beginAllocateCurrentThreadToPool": begin_of_thread,
        "_cuda_beginAllocateCurrentStreamToPool": begin_of_stream,
        "_cuda_endAllocateToPool": end,
        "_cuda_endAllocateCurrentStreamToPool": end,
        "_graph_pool_handle": lambda: (0, next(machine.user_pools)),
        "_cuda_releasePool": release,
        "_cuda_checkPoolLiveAllocations": check_live,
        "_cuda_attach_out_of_memory_observer": attach_observer,
        "_cuda_emptyCache": empty_cache,
        "_accelerator_emptyCache": empty_cache,
        "_cuda_memorySnapshot": take_snapshot,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": enable_caching,
        "_cuda_cudaCachingAllocator_set_allocator_settings": set_settings,
        "_accelerator_setAllocatorSettings": set_settings,
        "_accelerator_getAllocatorSettings": lambda: machine.current.allocator.settings.conf,
        "_cuda_getMemoryFraction": lambda device: memory(device).memory_fraction,
        "_host_emptyCache": lambda: None,
        "_accelerator_emptyHostCache": lambda: None,
        "_accelerator_getDeviceCapability": capability,
    }


@contextmanager
def _torch_errors() -> Iterator[None]:
    try:
        yield
    except AllocatorError as error:
        raise RuntimeError(str(error)) from None


def _thread_on_gpu() -> tuple[int, bool]:
    # On a GPU, autograd's nodes run on another thread; here they run on this one.
    return threading.get_ident(), torch._C._current_graph_task_id() != -1


_PAST = "takes memory past the simulated allocator, so it cannot run on a simulated GPU"


def add_patches(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the classes of pools and graphs, and the functions below ``torch.cuda.memory``."""
    pool = type("MemPool", (SimulatedMemPool,), {"_machine": machine})
    context = type("MemPoolContext", (SimulatedMemPoolContext,), {"_machine": machine})
    for module in (torch.cuda, torch.cuda.memory):
        patches.add(module, "MemPool", pool)
        if hasattr(module, "MemPoolContext"):
            patches.add(module, "MemPoolContext", context)
    pluggable = torch.cuda.memory.CUDAPluggableAllocator
    refuses = refusing("torch.cuda.memory.CUDAPluggableAllocator", _PAST)
    patches.add(pluggable, "__init__", refuses)
    add_functions(_functions(machine), patches)
    _add_states(machine, patches)
    graph = type(
        "CUDAGraph", (_with_base(Graph, torch.cuda.graphs.CUDAGraph),), {"_machine": machine}
    )
    for module in (torch.cuda, torch.cuda.graphs):
        patches.add(module, "CUDAGraph", graph)
    # torch keeps one capture stream for the whole process.
    patches.add(torch.cuda.graphs.graph, "default_capture_stream", None)


def _with_base(base: type[Graph], torchs: type) -> type:
    """Return torch's Python class of graphs with ``base`` in the place of its C++ base.

    Its methods have the same code, with another class for ``super()``. Those that only look at the
    driver's graph are left out, and refused by ``base``.
    """
    own = CellType()

    def bound(value: Any) -> Any:
        if isinstance(value, staticmethod):  # __new__
            return staticmethod(bound(value.__func__))
        if not isinstance(value, FunctionType) or value.__code__.co_freevars != ("__class__",):
            return value
        made = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, (own,)
        )
        made.__kwdefaults__, made.__doc__ = value.__kwdefaults__, value.__doc__
        return made

    left_out = {"__dict__", "__weakref__", "__del__", "debug_dump", "get_graph_data"}
    names = {name: bound(value) for name, value in vars(torchs).items() if name not in left_out}
    made = own.cell_contents = type(torchs.__name__, (base,), names)
    return made


def _add_states(machine: SimulatedMachine, patches: Patches) -> None:
    """Replace the functions about pools' checkpoints, and about storages of borrowed memory.

    Source: torch/csrc/cuda/Module.cpp (_cuda_setCheckpointPoolState, removeStorageDeleterFns,
    addStorageDeleterFns, _construct_storage_from_data_pointer, _has_Standard_Deleter,
    _free_And_Remove_DeleterFn, _set_storage_access_error_msg,
    _tensors_data_ptrs_at_indices_equal), torch 2.6 to 2.15.
    """
    storages = machine.storages

    def pool_state(device: int, pool: PoolId) -> PoolState:
        with _torch_errors():
            return machine.device(device).allocator.pool_state((pool[0], pool[1]))

    def set_pool_state(
        device: int,
        state: PoolState,
        stale_storages: Sequence[int],
        storages_to_own: Sequence[int] = (),
    ) -> None:
        """Set a pool's state; both lists hold the addresses of storages (``_cdata``)."""
        memory = machine.device(device).allocator
        with _torch_errors():
            freed, live = memory.set_pool_state(state)
        if len(set(stale_storages)) < len(freed - live):
            raise RuntimeError(
                "Any stale tensors which are being manually freed must be passed to set checkpoint"
            )
        records = storages.by_key
        for key in stale_storages:
            if key in records and records[key].address in freed:
                records[key].allocator = BORROWED
        for key in storages_to_own:
            if key in records and records[key].address in live:
                records[key].allocator = memory

    def storage_at(pointer: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
        """Return a storage that refers to memory at ``pointer``, and does not free it."""
        storage = torch.UntypedStorage(nbytes, device="meta")
        record = storages.refer(storage, pointer, machine.device(torch.device(device).index))
        left = machine.pool_contents.elements_at(pointer, nbytes)
        if left is not None:
            machine.values.put(record.key, left)
        return storage

    def tensor_on(metadata: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(0, dtype=metadata["dtype"], device="cuda")
        return made.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])

    def frees_memory(key: int) -> bool:
        record = storages.by_key.get(key)
        return record is not None and record.allocator is not BORROWED

    def release(key: int) -> None:
        """Free the memory of the storage at ``key`` now, instead of when it dies."""
        record = storages.by_key[key]
        record.allocator.free(record.address)
        record.allocator = BORROWED

    def set_access_error(key: int, words: str) -> None:
        """Make each later read of the storage at ``key`` raise an error with ``words``."""
        storages.reused[key] = words

    for name, function in {
        "_cuda_getCheckpointState": pool_state,
        "_cuda_setCheckpointPoolState": set_pool_state,
        "_construct_storage_from_data_pointer": storage_at,
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": tensor_on,
        "_has_Standard_Deleter": frees_memory,
        "_free_And_Remove_DeleterFn": release,
        "_tensors_data_ptrs_at_indices_equal": lambda tensors, addresses, indices: all(
            tensors[index].data_ptr() == addresses[index] for index in indices
        ),
        # torch takes its storage from the tensor; here tensors that share the storage raise, too.
        "_set_storage_access_error_msg": lambda tensor, words: set_access_error(
            storage_key(tensor), words
        ),
        "_set_storage_data_ptr_access_error_msg": set_access_error,
        "_clear_storage_data_ptr_access_error_msg": lambda key: storages.reused.pop(key, None),
        "_cuda_get_conv_benchmark_empty_cache": lambda: True,
        "_cudnn_set_conv_benchmark_empty_cache": lambda *_: None,
    }.items():
        patches.add(torch._C, name, function)
