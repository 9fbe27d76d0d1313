"""States of an allocator: snapshots, and checkpoints of private pools, which can be restored.

Snapshots are in the schema of ``torch.cuda.memory._snapshot()`` (torch/csrc/cuda/Module.cpp);
checkpoints contain the division of a pool's segments: getCheckpointState, setCheckpointPoolState
and setSegmentStateToCheckpoint of c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_gpumem.allocator import releases
from pytest_gpumem.allocator.blocks import (
    SHARED_POOL,
    Block,
    FreeList,
    PoolId,
    new_block,
    split_off,
)
from pytest_gpumem.allocator.device_memory import DeviceMemory, ExpandableSegments
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.private_pools import Pools
from pytest_gpumem.allocator.releases import Version
from pytest_gpumem.allocator.settings import AllocatorSettings
from pytest_gpumem.allocator.state import AllocatorState
from pytest_gpumem.allocator.trace import Contexts, Recording, Trace

Json = dict[str, Any]
State = Mapping[str, Any]
"""A segment or a block as a snapshot has it, to be restored."""


def frames_of(context: Any, trace: Trace) -> list[Any]:
    """Return the stack frames of a block: the attribute ``frames`` of its context, if it has one.

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
    found = []
    for time, (index, entry) in enumerate(trace.shown):
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
        recording = trace.recorded(index)
        # torch shows no stack elsewhere (record_trace).
        if entry.context is not None and not (recording and recording.contexts < Contexts.ALLOC):
            result["frames"] = frames_of(entry.context, trace)
        found.append(result)
    return found


def settings_dict(settings: AllocatorSettings, version: Version) -> Json:
    """Return the ``allocator_settings`` of a snapshot."""
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
    """Return ``size``; -1 for no limit, as torch shows the largest size_t."""
    return -1 if size is None else size


class PoolState(NamedTuple):
    """The saved state of a private pool: its segments and their blocks, as a snapshot has them."""

    pool: PoolId
    segments: Sequence[Json]


def divide(block: Block, states: Sequence[State], memory: DeviceMemory) -> list[Block]:
    """Allocate a free block in parts, which ``states`` describe."""
    made: list[Block] = []
    for state in states:
        was_split, free_list = block.is_split, block.free_list
        free_list.remove(block)
        made.append(block)
        is_last = len(made) == len(states)
        rest = block if is_last else split_off(block, state["size"])
        if not is_last:
            free_list.add(rest)
            if not was_split:
                free_list.note_split(rest.size)
        if was_split:
            for tally in free_list.split_tallies:
                tally.change("split_bytes", -block.size)
                tally.change("splits", -int(is_last))
        block.requested = state.get("requested_size", 0)
        for tally in (free_list.tally, free_list.every):
            tally.change("blocks", 1)
            tally.change("bytes", block.size)
            tally.change("requested", block.requested)
        if block.size >= memory.oversize:
            memory.counters.oversize_allocations.change(1)
        memory.note(("alloc", block.address, block.requested, free_list.stream, None))
        block = rest
    return made


def restored(
    segments: Iterable[State],
    pools: Pools,
    memory: DeviceMemory,
    expandable: ExpandableSegments | None,
) -> list[tuple[Block, Sequence[State]]]:
    """Make segments, and return each as one free block, with the blocks that it is to have.

    Mapped ranges of one expandable segment share pool and stream. Its addresses begin at
    ``reserved_from`` of the first range, or at that range. Raises ``AllocatorError`` where no
    settings have turned them on.
    """
    made: list[tuple[Block, Sequence[State]]] = []
    mapped: dict[FreeList, list[tuple[int, Block]]] = {}
    for segment in segments:
        address, size = segment["address"], segment["total_size"]
        first, second = segment.get("segment_pool_id", SHARED_POOL)
        pool = pools.get_or_create((first, second), small=segment["segment_type"] == "small")
        free_list = pool.free_list(segment["stream"])
        if segment.get("is_expandable"):
            free_list = free_list.expandable_side()
        block = new_block(free_list, address, size, 0)
        free_list.add(block)
        made.append((block, segment["blocks"]))
        if free_list.is_expandable:
            memory.reserve(free_list, size)
            base: int = segment.get("reserved_from", address)
            mapped.setdefault(free_list, []).append((base, block))
        else:
            memory.add_segment(free_list, size)
    for free_list, ranges in mapped.items():
        if expandable is None:
            raise AllocatorError(
                "There are expandable segments, and the settings do not turn them on."
            )
        blocks = sorted((block for _, block in ranges), key=lambda block: block.address)
        expandable.restore(free_list, min(base for base, _ in ranges), blocks)
    return made
