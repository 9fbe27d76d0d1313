"""Compilers on the dry device: no kernel is timed, constants are known, memory is in its own pool.

A compiler that finds its results in a cache of an earlier run allocates less. So no number, not
even reserved bytes, may depend on a compiler's allocations.

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
"""Milliseconds of every kernel; not zero, because comparisons divide by a time."""


@contextmanager
def skip_tuning(following: Context) -> Iterator[None]:
    """Use the first configuration of each kernel that can be launched, without timing any.

    A cache of timings on disk is neither read nor written: it may be a GPU's. Inductor folds
    constants in a context that ``following`` returns, in which small tensors have values.
    """
    constants = {"torch._inductor.constant_folding": partial(_wrap_constant_folder, following)}
    with patched_when_imported({**_PLANS, **constants}), _pools_recorded():
        yield


_BEGIN = "_cuda_beginAllocateCurrentThreadToPool"
"""The function of torch 2.7 and later (``use_mem_pool`` in torch/cuda/memory.py)."""
_BEGINS = (_BEGIN, "_cuda_beginAllocateCurrentStreamToPool", "_cuda_beginAllocateToPool")
"""That function and those of 2.6; torch/_inductor/cudagraph_trees.py calls them, too."""
_END = "_cuda_endAllocateToPool"
_ENDS = (_END, "_cuda_endAllocateCurrentStreamToPool")
"""That function and the one of 2.6."""

_receiving: set[tuple[int, int]] = set()
"""The pools that receive a thread's allocations, by identity."""


@contextmanager
def _pools_recorded() -> Iterator[None]:
    """Record which pools receive allocations, also in the warm-up of CUDA graphs."""

    def recording(note: Callable[[Any], None], function: Callable[..., Any], *args: Any) -> None:
        function(*args)
        note(args[-1])

    notes = dict.fromkeys(_BEGINS, _receiving.add) | dict.fromkeys(_ENDS, _receiving.discard)
    functions = {
        name: wrapped(getattr(torch._C, name), partial(recording, note))
        for name, note in notes.items()
        if hasattr(torch._C, name)
    }
    patches = Patches()
    add_functions(functions, patches)
    with patches.applied():
        yield


@contextmanager
def separate_pool() -> Iterator[None]:
    """Allocate from a separate pool inside, except for the state of optimizers.

    Dynamo allocates that state while it traces a step (``_init_group`` in torch/_dynamo/variables/
    optimizer.py), and moves step counters to the GPU (``move_step_if_cpu``). At the end all
    segments of the pool without live blocks are freed.

    Does nothing while another pool receives allocations, as in the warm-up of Inductor's CUDA
    graphs: the end of a pool would then abort the process in torch 2.11
    (``synchronize_and_free_events`` of CUDACachingAllocator.cpp; not in 2.15).
    """
    if _receiving or torch.cuda.is_current_stream_capturing():
        yield
        return
    from torch._dynamo.variables.optimizer import OptimizerVariable

    pool = torch.cuda.MemPool()
    patches = Patches()
    traced = (OptimizerVariable, "move_step_if_cpu")
    makers = [traced, *((kind, "_init_group") for kind in _kinds(torch.optim.Optimizer))]
    for kind, name in makers if hasattr(torch._C, _BEGIN) else ():
        if name in vars(kind):
            patches.wrap(kind, name, partial(_in_default_pool, pool))
    with torch.cuda.use_mem_pool(pool), patches.applied():
        yield


def _kinds(kind: type) -> Iterator[type]:
    """Yield all that are derived from ``kind``: Dynamo gives each optimizer an ``_init_group``."""
    derived: type
    for derived in kind.__subclasses__():
        yield derived
        yield from _kinds(derived)


def _in_default_pool(
    pool: torch.cuda.MemPool, call: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Call ``call`` with its allocations in the default pool."""
    if pool.id not in _receiving:  # an optimizer calls the function of its base
        return call(*args, **options)
    device = torch.cuda.current_device()
    # As at the end of use_mem_pool: a pool with a second user is never freed, and 2.8 aborts.
    getattr(torch._C, _END)(device, pool.id)
    torch._C._cuda_releasePool(device, pool.id)
    try:
        return call(*args, **options)
    finally:
        getattr(torch._C, _BEGIN)(device, pool.id)


def _wrap_constant_folder(following: Context, patches: Patches, module: ModuleType) -> None:
    def run(fold: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with following():
            return fold(*args, **options)

    patches.wrap(vars(module)["ConstantFolder"], "run", run)


def _patch_times(patches: Patches, module: ModuleType) -> None:
    for kind in list(vars(module).values()):
        for name in ("bench", "benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
            if isinstance(kind, type) and name in vars(kind):
                patches.add(kind, name, lambda *args, **options: TIME)


def _prefer_libraries(patches: Patches, module: ModuleType) -> None:
    for name in ("max_autotune_gemm_backends", "max_autotune_conv_backends"):
        patches.add(module, name, "ATEN")  # templates would seem to be faster: all times are equal


def _patch_inductor_cache(patches: Patches, module: ModuleType) -> None:
    patches.add(vars(module)["AutotuneCache"], "create", staticmethod(lambda *args: None))


def _patch_triton(patches: Patches, module: ModuleType) -> None:
    kind = vars(module)["Autotuner"]
    tuned: WeakSet[Any] = WeakSet()
    """The tuners that have launched a configuration."""

    def prune_configs(prune: Callable[..., Any], tuner: Any, *args: Any, **options: Any) -> Any:
        tuned.discard(tuner)
        return prune(tuner, *args, **options)

    def do_bench(
        tuner: Any, launch: Callable[[], object], *args: Any, **options: Any
    ) -> list[float]:
        if tuner in tuned:  # further configurations are not compiled
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
    """Call ``Autotuner._bench`` without its copies of changed arguments (``restore_value``)."""
    restored, tuner.restore_value = tuner.restore_value, []
    try:
        return bench(tuner, *args, **options)
    finally:
        tuner.restore_value = restored


def _without_disk(tuner: Any, key: object, configs: object, tune: Callable[[], object]) -> bool:
    tune()
    return False


_PLANS: Mapping[str, Plan] = {
    "torch._inductor.runtime.triton_heuristics": _patch_times,
    "torch._inductor.runtime.benchmarking": _patch_times,
    "torch._inductor.runtime.autotune_cache": _patch_inductor_cache,
    "torch._inductor.config": _prefer_libraries,
    "triton.runtime.autotuner": _patch_triton,
}
