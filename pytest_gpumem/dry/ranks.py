"""A single rank of several, on torch's own process groups.

NCCL groups are torch's own, over the runtime's stubs (``source/nccl.c``); a store that replies for
the other ranks lets them start. Gloo groups, whose ranks would connect over the network, are
replaced by torch's fake groups.

Source: torch/distributed/distributed_c10d.py (``init_process_group``,
``_new_process_group_helper``), torch 2.6 to 2.15.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer, Store
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers "fake"

from pytest_gpumem.simulated.common.patching import Patches
from pytest_gpumem.simulated.distributed import process_groups
from pytest_gpumem.simulated.distributed.process_groups import Groups, initializing, split_group
from pytest_gpumem.values.world import World

_ID_BYTES = 128
"""Bytes of ncclUniqueId, which all ranks but the first read from the store."""
_FAILURE = "exception_dump"
"""Key by which a rank makes all ranks write what they did: NCCL's monitor reads it each second, and
would then wait for minutes to end the process (kStoreDumpKey of ProcessGroupNCCL.hpp)."""
_AT_REBUILD = (2, 3)
"""The forward pass at which DDP rebuilds its buckets, without and with a static graph
(reducer.cpp)."""
_LONG_STEP = 0.25
"""Seconds after which NCCL's watchdog has run."""


class SingleProcessStore(Store):
    """A store that never waits: values of other ranks read as zero bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Write ``value``."""
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return the written value, or zeros of the length of NCCL's unique id."""
        return self._known.get(key, bytes(_ID_BYTES))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        now = int(self._known.get(key, b"0")) + amount
        self._known[key] = str(now).encode()
        return now

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Write ``desired`` in place of ``expected``, or nothing; return the present value."""
        if self._known.get(key, b"") in (b"", bytes(expected)):
            self._known[key] = bytes(desired)
        return self._known[key]

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` exist: those of other ranks do, but no other rank fails."""
        return not any(key.endswith(_FAILURE) for key in keys if key not in self._known)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: the store never waits."""

    def clone(self) -> SingleProcessStore:
        """Return itself: a separate store is not needed."""
        return self


class DryRankProcessGroups(process_groups.RankProcessGroups):
    """The process groups of a rank, until :meth:`close`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # C++ keeps its part of a store alive, but not the Python object with the methods.
        self._store = SingleProcessStore()

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        init = initializing(
            self._world,
            c10d.init_process_group,
            lambda: self._store,
            lambda backend: _without_gloo(backend or "cpu:gloo,cuda:nccl"),
        )
        patches = Patches()
        for owner in (dist, c10d):
            patches.add(owner, "init_process_group", init)
            patches.wrap(owner, "new_group", _new_group)
        # Groups made by splitting become new groups: only NCCL knows the size of a color.
        for owner in (dist, c10d, device_mesh):
            if hasattr(owner, "split_group"):
                patches.add(owner, "split_group", split_group)
        patches.add(c10d, "_get_split_source", lambda *_: None)
        patches.wrap(Reducer, "_rebuild_buckets", partial(_rebuild_buckets, Counter()))
        patches.wrap(dist, "_broadcast_coalesced", _broadcast_coalesced)
        with patches.applied():
            torch.cuda.set_device(self._world.local_rank)
            yield

    def end_body(self) -> None:
        """Wait until NCCL has released the tensors of the last collectives.

        Else they would be freed during the next test. Since torch 2.8 the watchdog leaves tensors
        to the next collective (``shelvesToUnstash_`` of ProcessGroupNCCL.cpp), so this runs one
        without elements, which allocates nothing.
        """
        if not dist.is_initialized():
            return
        time.sleep(_LONG_STEP)
        groups: list[Any] = list(c10d._world.pg_map)
        for group in groups:
            # A group with several backends does not count its collectives
            # (``ProcessGroup::getSequenceNumberForGroup`` of ProcessGroup.hpp, 2.6).
            of_gpus = group._get_backend(torch.device("cuda"))
            if "nccl" in dist.get_backend(group) and of_gpus._get_sequence_number_for_group():
                dist.all_reduce(torch.empty(0, device="cuda"), group=group)

    def close(self) -> None:
        """Leave all groups: a watchdog thread of NCCL that still runs would end the process."""
        with self._groups.entered():
            if dist.is_initialized():
                dist.destroy_process_group()
        self._groups = Groups()


def _rebuild_buckets(calls: Counter[int], rebuild: Any, reducer: Any) -> Any:
    """Call ``Reducer._rebuild_buckets`` as late as on a GPU whose steps are long.

    NCCL's watchdog, which runs every 100 ms (kWatchdogThreadSleepMillis of ProcessGroupNCCL.cpp),
    releases the tensors of the first step's collectives: the old buckets, which are then replaced.
    ``calls`` counts the calls of each reducer.
    """
    calls[id(reducer)] += 1
    if calls[id(reducer)] in _AT_REBUILD:
        time.sleep(_LONG_STEP)
    is_rebuilt = rebuild(reducer)
    if is_rebuilt:
        calls[id(reducer)] = _AT_REBUILD[-1]
        torch.cuda.synchronize()  # the host has waited just before (sync_bucket_indices)
    return is_rebuilt


def _broadcast_coalesced(broadcast: Any, *args: Any, **kwargs: Any) -> None:
    """Call ``_broadcast_coalesced``, with which DDP begins, and free its copy of the weights.

    Up to torch 2.7 a collective calls ``record_stream`` on its tensors (``avoidRecordStreams_`` of
    ProcessGroupNCCL.cpp), so that the copy would stay until the watchdog runs.
    """
    broadcast(*args, **kwargs)
    torch.cuda.synchronize()


def _new_group(
    new_group: Any,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return new_group(ranks, timeout, backend and _without_gloo(backend), *args, **kwargs)


def _without_gloo(backend: Any) -> str:
    """Return ``backend`` with torch's fake backend in place of Gloo."""
    return str(backend).lower().replace("gloo", "fake")
