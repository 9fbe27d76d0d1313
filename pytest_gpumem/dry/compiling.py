"""Compilers on the dry device: no kernel is timed, constants are known, memory is in its own pool.

A compiler that finds its results in a cache of an earlier run allocates less than one that does
not. So no number may depend on what it allocates, reserved bytes included.

Source: torch/_inductor/constant_folding.py and torch/_inductor/runtime/triton_heuristics.py,
benchmarking.py and autotune_cache.py, torch 2.6 to 2.15; triton/runtime/autotuner.py, releases 3.2
to 3.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch

from pytest_gpumem.simulated.common.patching import (
    Patches,
    Plan,
    add_functions,
    patched_when_imported,
    wrapped,
)

Context = Callable[[], AbstractContextManager[object]]
TIME = 1.0
"""Milliseconds of every kernel: choices between two divide by one of them."""


@contextmanager
def skip_tuning(following: Context) -> Iterator[None]:
    """Give each kernel inside the first configuration that can be launched, without timing any.

    What a cache on disk says of earlier timings is neither used nor changed: it may be a GPU's.
    Inductor computes constants in a context of ``following``, where small tensors have values.
    """
    constants = {"torch._inductor.constant_folding": partial(_of_constants, following)}
    with patched_when_imported({**_PLANS, **constants}), _noting_pools():
        yield


_BEGIN = "_cuda_beginAllocateCurrentThreadToPool"
"""Function since torch 2.7 (``use_mem_pool`` in torch/cuda/memory.py)."""
_BEGINS = (_BEGIN, "_cuda_beginAllocateCurrentStreamToPool", "_cuda_beginAllocateToPool")
"""With those of 2.6, which torch/_inductor/cudagraph_trees.py calls, too."""
_END = "_cuda_endAllocateToPool"
_ENDS = (_END, "_cuda_endAllocateCurrentStreamToPool")
"""With that of 2.6."""

_receiving: set[tuple[int, int]] = set()
"""The pools that receive a thread's allocations, by identity."""


@contextmanager
def _noting_pools() -> Iterator[None]:
    """Note which pools receive allocations, those of CUDA graphs that warm up included."""

    def noting(note: Callable[[Any], None], function: Callable[..., Any], *args: Any) -> None:
        function(*args)
        note(args[-1])

    notes = dict.fromkeys(_BEGINS, _receiving.add) | dict.fromkeys(_ENDS, _receiving.discard)
    functions = {
        name: wrapped(getattr(torch._C, name), partial(noting, note))
        for name, note in notes.items()
        if hasattr(torch._C, name)
    }
    patches = Patches()
    add_functions(functions, patches)
    with patches.applied():
        yield


@contextmanager
def separate_pool() -> Iterator[None]:
    """Make the allocations inside in a pool of their own, but for the state of optimizers.

    Dynamo makes that while it traces a step (``_init_group`` in torch/_dynamo/variables/
    optimizer.py), and moves steps that the host counted (``move_step_if_cpu``). The pool's segments
    are gone at the end, but for those of blocks in use.

    A pool must not end while another one receives allocations, as in a warm-up of Inductor's CUDA
    graphs (``synchronize_and_free_events`` of CUDACachingAllocator.cpp in torch 2.11, which ends
    the process; 2.15 does not), so that one goes on receiving them.
    """
    is_native = torch.cuda.get_allocator_backend() == "native"  # others have no pools
    if not is_native or _receiving or torch.cuda.is_current_stream_capturing():
        yield
        return
    from torch._dynamo.variables.optimizer import OptimizerVariable

    pool = torch.cuda.MemPool()
    patches = Patches()
    traced = (OptimizerVariable, "move_step_if_cpu")
    makers = [traced, *((kind, "_init_group") for kind in torch.optim.Optimizer.__subclasses__())]
    for kind, name in makers if hasattr(torch._C, _BEGIN) else ():
        if name in vars(kind):
            patches.wrap(kind, name, partial(_outside, pool))
    with torch.cuda.use_mem_pool(pool), patches.applied():
        yield


def _outside(pool: torch.cuda.MemPool, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``call`` with its allocations in the default pool."""
    device = torch.cuda.current_device()
    # As use_mem_pool ends: with another user a pool is never freed; 2.8 ends the process.
    getattr(torch._C, _END)(device, pool.id)
    torch._C._cuda_releasePool(device, pool.id)
    try:
        return call(*args, **options)
    finally:
        getattr(torch._C, _BEGIN)(device, pool.id)


def _of_constants(following: Context, patches: Patches, module: ModuleType) -> None:
    def run(fold: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with following():
            return fold(*args, **options)

    patches.wrap(vars(module)["ConstantFolder"], "run", run)


def _of_inductors_kernels(patches: Patches, module: ModuleType) -> None:
    patches.add(vars(module)["CachingAutotuner"], "bench", lambda *args, **options: TIME)


def _of_inductors_choices(patches: Patches, module: ModuleType) -> None:
    for kind in list(vars(module).values()):
        for name in ("benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
            if isinstance(kind, type) and name in vars(kind):
                patches.add(kind, name, lambda *args, **options: TIME)


def _of_inductors_cache(patches: Patches, module: ModuleType) -> None:
    patches.add(vars(module)["AutotuneCache"], "create", staticmethod(lambda *args: None))


def _of_triton(patches: Patches, module: ModuleType) -> None:
    kind = vars(module)["Autotuner"]
    tuned: WeakSet[Any] = WeakSet()
    """The tuners that have found a configuration that can be launched."""

    def prune_configs(prune: Callable[..., Any], tuner: Any, *args: Any, **options: Any) -> Any:
        tuned.discard(tuner)
        return prune(tuner, *args, **options)

    def do_bench(
        tuner: Any, launch: Callable[[], object], *args: Any, **options: Any
    ) -> list[float]:
        if tuner in tuned:  # the others are not even compiled
            return [math.inf] * 3
        launch()
        tuned.add(tuner)
        return [TIME] * 3

    patches.wrap(kind, "prune_configs", prune_configs)
    patches.add(kind, "do_bench", do_bench)
    patches.wrap(kind, "_bench", _without_copies)
    if "check_disk_cache" in vars(kind):
        patches.add(kind, "check_disk_cache", _without_disk)


def _without_copies(bench: Callable[..., Any], tuner: Any, *args: Any, **options: Any) -> Any:
    """Call ``Autotuner._bench``: arguments that each run would change (``restore_value``) are not
    copied, which happens before a configuration is known and never again after it is."""
    restored, tuner.restore_value = tuner.restore_value, []
    try:
        return bench(tuner, *args, **options)
    finally:
        tuner.restore_value = restored


def _without_disk(tuner: Any, key: object, configs: object, tune: Callable[[], object]) -> bool:
    tune()
    return False


_PLANS: Mapping[str, Plan] = {
    "torch._inductor.runtime.triton_heuristics": _of_inductors_kernels,
    "torch._inductor.runtime.benchmarking": _of_inductors_choices,
    "torch._inductor.runtime.autotune_cache": _of_inductors_cache,
    "triton.runtime.autotuner": _of_triton,
}
