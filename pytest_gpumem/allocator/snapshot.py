"""States of an allocator: snapshots, and checkpoints of private pools, to be restored later.

Snapshots are in the schema of ``torch.cuda.memory._snapshot()`` (torch/csrc/cuda/Module.cpp);
checkpoints say how the segments of a pool are divided: getCheckpointState, setCheckpointPoolState
and setSegmentStateToCheckpoint of c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pytest_gpumem.allocator import releases
from pytest_gpumem.allocator.blocks import (
    SHARED_POOL,
    Block,
    FreeList,
    PoolId,
    join,
    new_block,
    split_off,
)
from pytest_gpumem.allocator.device_memory import DeviceMemory, ExpandableSegments
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.private_pools import Pools
from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.allocator.settings import AllocatorSettings
from pytest_gpumem.allocator.state import AllocatorState
from pytest_gpumem.allocator.trace import Contexts, RawEntry, Recording, Trace, TraceEntry

Json = dict[str, Any]


def frames_of(context: Any, trace: Trace) -> list[Any]:
    """Stack frames of a block: the attribute ``frames`` of its context, if it has one.

    Blocks allocated while ``_record_memory_history`` recorded no stacks have none.
    """
    recording = trace.recording
    if recording is None:
        return list(getattr(context, "frames", None) or ())
    recorded: Recording | None = getattr(context, "recording", recording)
    if recorded is None or not recorded.on or recorded.contexts < Contexts.STATE:
        return []
    frames = [*getattr(context, "script_frames", ()), *(getattr(context, "frames", None) or ())]
    return [*getattr(context, "cpp_frames", ()), *frames] if recorded.with_cpp else frames


def snapshot(
    allocators: Sequence[AllocatorState], pool: PoolId = SHARED_POOL, *, traces: bool = True
) -> Json:
    """Return a snapshot of the allocators of all devices; the settings are those of the first.

    With the id of a private ``pool``, the segments are only those of that pool.
    """
    settings = allocators[0].settings
    result: Json = {
        "segments": [segment for each in allocators for segment in segments(each, pool)],
        "device_traces": [trace_dicts(each.trace, each.version) for each in allocators]
        if traces
        else [],
        "allocator_settings": settings_dict(settings, allocators[0].version),
        "external_annotations": [],
    }
    if allocators[0].version >= releases.HOST_MEMORY:
        result |= {"host_segments": [], "host_traces": []}
    return result


def segments(
    allocator: AllocatorState, pool: PoolId = SHARED_POOL, *, frames: bool = True
) -> list[Json]:
    """Return one allocator's segments by address, with their blocks; looking up frames is slow."""
    heads = [
        block
        for block in allocator.every_block()
        if pool in (SHARED_POOL, block.free_list.pool.identity)
        # An expandable segment has one range of memory after each gap.
        and (block.previous is None or not block.previous.is_mapped)
    ]
    heads.sort(key=lambda block: block.address)
    return [_segment(allocator, head, frames=frames) for head in heads]


def _segment(allocator: AllocatorState, head: Block, *, frames: bool) -> Json:
    blocks = []
    block: Block | None = head
    while block is not None and block.is_mapped:
        blocks.append(block)
        block = block.next
    active = [block for block in blocks if not block.key]
    pool = head.free_list.pool
    pending = sum(block.size for block in active if allocator.is_pending(block))
    active_size = sum(block.size for block in active)
    context = allocator.memory.contexts.get(head.address) if frames else None
    result: Json = {
        "device": allocator.device,
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": active_size - pending,
        "active_size": active_size,
        "requested_size": sum(block.requested for block in active),
        "stream": int(head.free_list.stream),
        "segment_type": "small" if pool.small else "large",
        "segment_pool_id": pool.identity,
        "is_expandable": head.free_list.is_expandable,
    }
    if context is None:
        result["frames"] = []
    result["blocks"] = [_block(allocator, block, frames=frames) for block in blocks]
    if context is not None:
        result["frames"] = frames_of(context, allocator.trace)
    return result


def _block(allocator: AllocatorState, block: Block, *, frames: bool) -> Json:
    state = "active_pending_free" if allocator.is_pending(block) else "active_allocated"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": "inactive" if block.key else state,
        "frames": frames_of(block.context, allocator.trace) if frames else [],
    }


def trace_dicts(trace: Trace, version: Version) -> list[Json]:
    """Return a trace in torch's format; ``time_us`` counts events, so that it is reproducible."""
    return [
        _trace_dict(time, entry, trace, trace.recorded(index), version)
        for time, (index, entry) in enumerate(trace.shown)
    ]


def _trace_dict(
    time: int, entry: TraceEntry, trace: Trace, recording: Recording | None, version: Version
) -> Json:
    result: Json = {
        "action": entry.action,
        "device_free" if entry.action == "oom" else "addr": entry.addr,
        "size": entry.size,
        "stream": int(entry.stream),
        "time_us": time,
    }
    if version >= releases.COMPILE_CONTEXT:
        result["compile_context"] = "N/A"
    if version >= releases.USER_METADATA:
        result["user_metadata"] = ""
    if version >= releases.POOL_OF_EVENT:
        result["pool_id"] = entry.pool_id
    # torch shows no stack elsewhere (record_trace).
    if entry.context is not None and not (recording and recording.contexts < Contexts.ALLOC):
        result["frames"] = frames_of(entry.context, trace)
    return result


def settings_dict(settings: AllocatorSettings, version: Version) -> Json:
    """``allocator_settings`` of a snapshot."""
    result: Json = {
        "PYTORCH_CUDA_ALLOC_CONF": settings.conf,
        "max_split_size": _or_unlimited(settings.max_split_size),
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": settings.pinned_num_register_threads,
        "release_lock_on_cudamalloc": settings.release_lock_on_cudamalloc,
        "pinned_use_cuda_host_register": settings.pinned_use_cuda_host_register,
    }
    if version >= releases.REUSE_SETTING:
        result["graph_capture_record_stream_reuse"] = settings.graph_capture_record_stream_reuse
    if version >= releases.BYTES_BY_POOL:
        result["max_round_threshold"] = _or_unlimited(settings.pinned_max_round_threshold)
        result["max_cached_size"] = _or_unlimited(settings.pinned_max_cached_size)
    result["roundup_power2_divisions"] = {
        str(1 << slot): value for slot, value in enumerate(settings.roundup_power2_divisions)
    }
    return result


def _or_unlimited(size: int | None) -> int:
    """torch shows the largest size_t as -1."""
    return -1 if size is None else size


class PoolState(NamedTuple):
    """The saved state of a private pool: its segments and their blocks, as a snapshot has them."""

    pool: PoolId
    segments: Sequence[Json]


def divide(
    states: Sequence[Json], free: dict[int, Block], note: Callable[[RawEntry], None]
) -> list[Block]:
    """Allocate every block of a segment, which is whole and free, as it was divided: ``states``.

    ``free`` has the free blocks of the pool by address. Raises ``AllocatorError`` where the segment
    does not exist any more.
    """
    made = []
    for at, state in enumerate(states):
        block = free.pop(state["address"], None)
        if block is None or block.size < state["size"]:
            raise AllocatorError(
                f"The memory pool has no free segment at {state['address']:#x} any more, as it had"
                " when the checkpoint was taken."
            )
        was_split, is_last = block.is_split, at + 1 == len(states)
        free_list = block.free_list
        free_list.remove(block)
        if not is_last:
            rest = split_off(block, state["size"])
            free[rest.address] = rest
            free_list.add(rest)
            if not was_split:
                free_list.note_split(rest.size)
        if was_split:
            for tally in free_list.split_tallies:
                tally.change("split_bytes", -block.size)
                tally.change("splits", -int(is_last))
        block.requested = block.size
        _count_live(block)
        note(("alloc", block.address, block.size, free_list.stream, None))
        made.append(block)
    return made


def restore(
    segments: Iterable[Mapping[str, Any]],
    pools: Pools,
    memory: DeviceMemory,
    expandable: ExpandableSegments | None,
    live: dict[int, Block],
) -> None:
    """Make segments and their blocks; those in use go to ``live``.

    Mapped ranges of one expandable segment share pool and stream. Its addresses begin at
    ``reserved_from`` of the first range, or at that range. Raises ``AllocatorError`` where no
    settings have turned them on.
    """
    mapped: dict[FreeList, list[Block]] = {}
    bases: dict[FreeList, int] = {}
    for segment in segments:
        first, second = segment.get("segment_pool_id", SHARED_POOL)
        pool = pools.named((first, second), small=segment["segment_type"] == "small")
        plain = pool.free_list(segment["stream"])
        if not segment.get("is_expandable"):
            memory.add_segment(plain, segment["total_size"])
            for before, after in pairwise(_blocks(segment, plain, live)):
                join(before, after)
            continue
        free_list = plain.expandable_side()
        memory.reserve(free_list, segment["total_size"])
        mapped.setdefault(free_list, []).extend(_blocks(segment, free_list, live))
        base = segment.get("reserved_from", segment["address"])
        bases[free_list] = min(base, bases.get(free_list, base))
    for free_list, blocks in mapped.items():
        if expandable is None:
            raise AllocatorError(
                "There are expandable segments, and the settings do not turn them on."
            )
        blocks.sort(key=lambda block: block.address)
        expandable.restore(free_list, bases[free_list], blocks)


def _blocks(segment: Mapping[str, Any], free_list: FreeList, live: dict[int, Block]) -> list[Block]:
    """Return the blocks of a segment, without neighbours."""
    blocks = []
    address = segment["address"]
    for each in segment["blocks"]:
        block = new_block(free_list, address, each["size"], 0)
        block.requested = each.get("requested_size", 0)
        blocks.append(block)
        address += block.size
        if each["state"] == "inactive":
            free_list.add(block)
            if block.size < segment["total_size"]:
                free_list.note_split(block.size)
        else:
            live[block.address] = block
            _count_live(block)
    return blocks


def _count_live(block: Block) -> None:
    free_list = block.free_list
    for tally in (free_list.tally, free_list.every):
        tally.change("blocks", 1)
        tally.change("bytes", block.size)
        tally.change("requested", block.requested)
