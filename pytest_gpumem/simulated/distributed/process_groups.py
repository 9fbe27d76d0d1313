"""Process groups whose other ranks do not exist: torch's fake groups, under the usual names.

``init_process_group("nccl")``, ``"gloo"`` and code that uses them find ``World.size`` ranks at
once, whatever address or store they get: no call waits.

Source: torch/distributed/distributed_c10d.py (``init_process_group``,
``_new_process_group_helper``), torch 2.6 to 2.15; the fake group is FakeProcessGroup.hpp of
torch/csrc/distributed/c10d.

``torch.multiprocessing.spawn`` runs its function in this process, for this rank only, with the
rank's index. The process groups that the function has made are destroyed, and its errors are raised
as they are.

Source: torch/multiprocessing/spawn.py (``start_processes``), torch 2.6 to 2.13.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    HashStore,
    Logger,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.values.errors import UnsupportedOperatorError
from pytest_gpumem.values.world import NCCL_TIMEOUT, World

_LOST = timedelta(seconds=1)
"""The time that a read waits for a key that no other rank writes."""
_NCCL = (2, 27, 5)
"""``torch.cuda.nccl.version()`` of torch 2.8 to 2.10's wheels."""
_NOTIFIED = (
    *("_set_sequence_number_for_group", "_set_default_timeout", "_shutdown", "shutdown", "abort"),
)
_OF_NCCL = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
"""Backends of NCCL by class; ``"nccl"`` is the second one since 2.15 in builds with CUDA
(``_register_builtin_nccl_backend``), and other builds have none of them."""
_RENDEZVOUS = ("init_method", "store", "rank", "world_size")


class _Kind(type):
    """A metaclass by which fake groups made by C++ are instances of a backend's class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeProcessGroup)

    def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
        make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)  # since 2.9
        return make(rank, size)


class _Simulated(metaclass=_Kind):
    """``ProcessGroupGloo``, ``ProcessGroupNCCL`` and its successors; nothing reads the options."""

    class Options:
        """``ProcessGroupNCCL.Options``."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""
            self._timeout = NCCL_TIMEOUT
            self.config = SimpleNamespace()  # NCCLConfig, which takes any setting


def add_patches(world: World, patches: Patches) -> None:
    """Make every process group a fake one, whose ranks are those of ``world``."""
    for owner in (dist, c10d):
        init = initializing(world, c10d.init_process_group, _store)
        patches.add(owner, "init_process_group", init)
    plan_groups(patches)
    _add_spawned(world, patches)


def plan_groups(patches: Patches) -> None:
    """Make NCCL available, and every process group a fake one of the requested size."""
    yes: Callable[..., bool] = lambda *_: True  # noqa: E731  # many names have it
    for owner in (dist, c10d):
        for name in ("is_nccl_available", "is_gloo_available"):
            patches.add(owner, name, yes)
        patches.add(owner, "monitored_barrier", lambda *_, **__: None)
        for name in ("ProcessGroupGloo", *_OF_NCCL):
            patches.add(owner, name, _Simulated)
    for owner in (dist, c10d, device_mesh):
        if hasattr(owner, "split_group"):
            patches.add(owner, "split_group", split_group)
    patches.add(c10d, "default_pg_nccl_timeout", NCCL_TIMEOUT)
    # Methods of NCCL's groups that fake ones lack in some releases.
    for name in _NOTIFIED:
        patches.add(FakeProcessGroup, name, lambda group, *_: None)
    if not hasattr(FakeProcessGroup, "options"):  # as in 2.8
        patches.add(FakeProcessGroup, "options", property(lambda group: _Simulated.Options()))
    patches.add(FakeProcessGroup, "supports_coalescing", property(yes))
    # Subgroups are fake, too: C++ would make them with options that are none of NCCL's.
    patches.add(FakeProcessGroup, "supports_splitting", property(lambda group: False))
    # DDP's logger warns of an unknown device, and reads the number of threads of Gloo's group,
    # which a fake one lacks (logger.cpp, set_construction_data_and_log).
    patches.add(Logger, "set_runtime_stats_and_log", lambda logger: None)
    patches.add(Logger, "set_construction_data_and_log", lambda logger, *_: None)
    patches.add(torch.cuda.nccl, "is_available", yes)
    patches.add(torch.cuda.nccl, "version", lambda: _NCCL)


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """Return the part of a group with this rank; meshes call this if there is a ``device_id``."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parents = dist.get_process_group_ranks(parent_pg)
    own = dist.get_rank(parent_pg)
    ranks = next((part for part in split_ranks if own in part), None)
    if ranks is None:
        return None
    return dist.new_group(
        [parents[rank] for rank in ranks],
        timeout=timeout,
        backend=backend,
        use_local_synchronization=True,
        group_desc=group_desc,
    )


def initializing(
    world: World,
    init: Callable[..., Any],
    store: Callable[[], Any],
    known: Callable[[Any], Any] = lambda backend: backend,
) -> Callable[..., Any]:
    """Return ``init`` for a rank without peers: with a ``store`` that waits for none."""

    @functools.wraps(init)
    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if OWN_GROUP in vars(c10d._world) and dist.is_initialized():
            # The group that existed before the code under test asked for any.
            dist.destroy_process_group()
            delattr(c10d._world, OWN_GROUP)
        names = ("world_size", "rank", "store", "group_name", "pg_options", "device_id")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        rest = {name: value for name, value in given.items() if name not in _RENDEZVOUS}
        return init(known(backend), None, timeout, world.size, world.rank, store(), **rest)

    return init_process_group


def _store() -> Any:
    store = HashStore()
    store.set_timeout(_LOST)
    return store


OWN_GROUP = "_pytest_gpumem_own"
"""Attribute of torch's world: its default group existed before the test asked for one."""
_TABLES = (
    *("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg"),
    "_pg_to_tag",
)
"""The tables of process groups in distributed_c10d, for any world."""
_SETTINGS = ("_world", "_group_count", "_default_pg_init_method")


class RankProcessGroups:
    """The process groups of one rank, kept by this object; they can be entered repeatedly.

    Enter :meth:`taken` while a simulation of ``world`` is active.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups = Groups()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Enter the rank inside, as under torchrun, with the default group initialised.

        A group that earlier code has left is replaced by one that later code asks for.
        """
        with environment_of(self._world), self._replaced(), self._groups.entered():
            if not dist.is_initialized():
                dist.init_process_group("cpu:gloo,cuda:nccl")
            setattr(c10d._world, OWN_GROUP, True)
            yield

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Replace names inside that a simulation has not replaced."""
        yield

    @contextmanager
    def for_good(self) -> Iterator[None]:
        """Enter the rank, and destroy its groups at the end."""
        with self.taken():
            try:
                yield
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()


class Groups:
    """Torch's record of process groups, empty at first; it can be entered repeatedly."""

    def __init__(self) -> None:
        self.tables: Mapping[str, dict[Any, Any]] = {name: {} for name in _TABLES}
        self._settings: tuple[Any, ...] = (c10d._World(), 0, None)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Use these groups inside, and keep what is added; restore the process's afterwards."""
        hook, outer = sys.excepthook, Groups()
        outer._read()
        self._replace(outer)
        try:
            yield
        finally:
            self._read()
            outer._replace(self)
            sys.excepthook = hook
            forget_meshes()

    def _read(self) -> None:
        self.tables = {name: dict(getattr(c10d, name)) for name in _TABLES}
        self._settings = tuple(getattr(c10d, name) for name in _SETTINGS)

    def _replace(self, present: Groups) -> None:
        """Install these groups in place of ``present``."""
        for name in present.tables["_pg_names"].values():
            _unregister_process_group(name)  # C++ registers groups by name, each of them once
        for name, content in self.tables.items():
            table = getattr(c10d, name)
            table.clear()
            table.update(content)
        vars(c10d).update(zip(_SETTINGS, self._settings, strict=True))
        for group, name in self.tables["_pg_names"].items():
            _register_process_group(name, group)


@contextmanager
def environment_of(world: World) -> Iterator[None]:
    """Set the variables that torchrun sets, inside the context."""
    before = {name: os.environ.get(name) for name in world.environment}
    os.environ.update(world.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forget_meshes() -> None:
    """Drop DTensor's caches of meshes: an equal mesh may have other groups."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    propagator = tensor.DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:  # came with 2.10
        clear()
    redistribute = sys.modules["torch.distributed.tensor._redistribute"]
    for name in ("_gen_transform_infos", "clear_redistribute_planner_cache"):
        function = getattr(redistribute, name, None)
        if function is not None:
            getattr(function, "cache_clear", function)()


def _add_spawned(world: World, patches: Patches) -> None:
    """Replace ``spawn`` and ``start_processes``, which start no process."""

    def start_processes(
        fn: Callable[..., object],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        *_: Any,
        **__: Any,
    ) -> Any:
        if nprocs == world.size:
            index = world.rank
        elif nprocs == world.local_size:
            index = world.local_rank
        else:
            raise UnsupportedOperatorError(
                f"{nprocs} processes are spawned at {user_line()}, one of which would be rank "
                f"{world.rank} of {world.size}: spawn {world.local_size}, as many as there are "
                "GPUs (torch.cuda.device_count())"
            )
        with RankProcessGroups(world).for_good():
            try:
                fn(index, *args)
            except SystemExit as left:
                if left.code:
                    raise ProcessExitedException(
                        f"process {index} terminated with exit code {left.code}",
                        error_index=index,
                        error_pid=os.getpid(),
                        exit_code=left.code if isinstance(left.code, int) else 1,
                    ) from left
        return None if join else ProcessContext([], [])

    for owner in (mp, sys.modules["torch.multiprocessing.spawn"]):
        for name in ("spawn", "start_processes"):
            patches.add(owner, name, start_processes)
