"""Memory snapshots as files: read without running anything, and checked before use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_gpumem.allocator.blocks import SHARED_POOL
from pytest_gpumem.allocator.messages import AllocatorError
from pytest_gpumem.allocator.releases import OLDEST, Version
from pytest_gpumem.garbage import paused

Json = Mapping[str, Any]

_MEMORY_PER_BYTE = 16
"""Unpickled, the recorded snapshots take up to 7 bytes of memory per byte of their file."""
_MEMORY_BASE = 1 << 30

_USUAL = {
    *("alloc", "free_requested", "free_completed"),
    *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
}
MOST_DEVICES = 120
"""C10_COMPILE_TIME_MAX_GPUS of c10/cuda/CUDAMacros.h."""
_LARGEST = 1 << 63
_LARGEST_SIZE = 1 << 44
"""More memory than any device has."""

_RELEASES: tuple[tuple[str, Version], ...] = (
    # Fields added to the events of a snapshot, and a release that has them.
    ("pool_id", (2, 13)),
    ("user_metadata", (2, 11)),
    ("compile_context", (2, 9)),
)


class SnapshotError(AllocatorError):
    """The file or object is not a memory snapshot that can be replayed."""


def load_snapshot(path: str | Path) -> Json:
    """Read a pickled snapshot.

    No code that the file may name is run, and it cannot take more memory than a snapshot of its
    size would.

    Raises ``SnapshotError``: the file cannot be read, or holds anything but plain values.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise SnapshotError(f"{path} is not a file; give a memory snapshot.")
        data = _unpickled(path.read_bytes())
    except SnapshotError:
        raise
    except OSError as error:
        raise SnapshotError(
            f"Cannot read the memory snapshot {path}: {error.strerror or error}."
        ) from error
    except Exception as error:  # a damaged pickle raises errors of nearly every type
        text = " ".join("".join(c if c.isprintable() else "?" for c in str(error)).split())
        reason = (text if len(text) <= 200 else f"{text[:200]}...").rstrip(".")
        reason = reason or type(error).__name__
        raise SnapshotError(f"Cannot read the memory snapshot {path}: {reason}.") from error
    if isinstance(data, list):
        raise SnapshotError(
            f"{path} is not a memory snapshot: it holds a list, as torch.cuda.memory_snapshot() "
            "returns it; make one with torch.cuda.memory._dump_snapshot()."
        )
    if not isinstance(data, dict):
        raise SnapshotError(f"{path} is not a memory snapshot: it holds a {type(data).__name__}.")
    return data


def checked(snapshot: Json) -> Json:
    """Return ``snapshot``; raise a ``SnapshotError`` that names a part that a replay lacks."""
    traces, segments = snapshot.get("device_traces"), snapshot.get("segments")
    if not isinstance(traces, list) or not isinstance(segments, list):
        raise SnapshotError(
            "This is not a memory snapshot: it has no segments and device_traces;"
            " make one with torch.cuda.memory._dump_snapshot()."
        )
    if len(traces) > MOST_DEVICES:
        raise SnapshotError(
            f"The snapshot has traces of {len(traces):,} devices, and torch knows {MOST_DEVICES}"
            " at most."
        )
    for device, trace in enumerate(traces):
        if not isinstance(trace, list):
            raise SnapshotError(f"The trace of device {device} is not a list of events.")
        _check_once(trace, f"The trace of device {device} holds the same event")
        for index, event in enumerate(trace):
            _check_event(event, index, device)
    lists = [segment.get("blocks") for segment in segments if isinstance(segment, Mapping)]
    known = [blocks for blocks in lists if blocks is not None]
    _check_once(known, "The snapshot holds the same list of blocks")
    for index, segment in enumerate(segments):
        _check_segment(segment, index)
    if not any(traces):
        raise SnapshotError(
            "The snapshot holds no events: start recording with"
            " torch.cuda.memory._record_memory_history() before the code of interest, and dump the"
            " snapshot before recording is switched off, which forgets them."
        )
    return snapshot


def _check_once(values: Sequence[object], text: str) -> None:
    """Refuse repeated objects: a pickle of a few bytes can hold one a million times."""
    if len(set(map(id, values))) != len(values):
        raise SnapshotError(f"{text} more than once, so it is not a recording of torch.")


def _check_event(event: Any, index: int, device: int) -> None:
    """Check an event; one with the usual fields by a single condition, as there are millions."""
    if type(event) is dict:
        get = event.get
        action, size, stream, address = get("action"), get("size"), get("stream"), get("addr")
        if (
            type(action) is str
            and type(size) is type(stream) is type(address) is int
            and 0 <= size < _LARGEST_SIZE
            and 0 <= stream < _LARGEST
            and 0 <= address < _LARGEST
            and action in _USUAL
            and ("pool_id" not in event or _is_pool(event["pool_id"]))
        ):
            return
    name = f"event {index} of device {device}"
    _check(event, name, action=str, size=int, stream=int)
    if event["action"] not in ("oom", "snapshot"):
        _check(event, name, addr=int)
    _check_pool(event.get("pool_id", SHARED_POOL), name)
    if event["action"] == "oom":
        _check(event, name, device_free=int)


def _check_segment(segment: Any, index: int) -> None:
    _check(segment, f"segment {index}", device=int, address=int, total_size=int, stream=int)
    _check_pool(segment.get("segment_pool_id", SHARED_POOL), f"segment {index}")
    if segment.get("segment_type") not in ("small", "large"):
        raise SnapshotError(f"The type of segment {index} is neither small nor large.")
    blocks = segment.get("blocks")
    if not isinstance(blocks, list):
        raise SnapshotError(f"The blocks of segment {index} are not a list.")
    for block in blocks:
        _check(block, f"a block of segment {index}", size=int, state=str)
    if sum(block["size"] for block in blocks) != segment["total_size"]:
        raise SnapshotError(f"The blocks of segment {index} do not add up to its size.")


def recorded_conf(snapshot: Json) -> str:
    """Return the allocator settings that a snapshot was recorded with.

    Old snapshots have none: the segments then show whether expandable segments were on.
    """
    settings = snapshot.get("allocator_settings")
    found = settings.get("PYTORCH_CUDA_ALLOC_CONF") if isinstance(settings, Mapping) else None
    conf = found if isinstance(found, str) else ""
    if "expandable_segments" in conf:
        return conf
    expandable = any(segment.get("is_expandable") for segment in snapshot["segments"]) or any(
        event["action"] == "segment_map" for trace in snapshot["device_traces"] for event in trace
    )
    return ",".join(filter(None, (conf, "expandable_segments:True" if expandable else "")))


def release_of(snapshot: Json) -> Version:
    """Return a torch release whose rules a snapshot follows, by what its events have.

    No snapshot contains its release. ``compile_context`` came with 2.8, ``user_metadata``
    with 2.10 and ``pool_id`` with 2.12 (torch/csrc/cuda/Module.cpp).
    """
    events = (event for trace in snapshot["device_traces"] for event in trace)
    first: Json = next(events, {})
    return next((version for key, version in _RELEASES if key in first), OLDEST)


def line_of(event: Json) -> str:
    """Return ``file:line, function`` of the code that caused an event, empty if not recorded.

    It is the innermost Python frame outside torch; recordings may have frames of C++ as well.
    """
    frames = [each for each in event.get("frames") or () if isinstance(each, Mapping)]
    python = [each for each in frames if str(each.get("filename", "")).endswith(".py")]
    users = [each for each in python if "/torch/" not in f"/{each['filename']}"]
    for frame in (*users[:1], *python[:1]):
        return f"{frame['filename']}:{frame.get('line', 0)}, {frame.get('name', '?')}"
    return ""


def _check(value: Any, name: str, **kinds: type) -> None:
    """Check the fields of an event, segment or block by their types."""
    if not isinstance(value, Mapping):
        raise SnapshotError(f"The {name} is a {type(value).__name__}, not a dict.")
    for field, kind in kinds.items():
        found = value.get(field)
        if type(found) is not kind:
            raise SnapshotError(f"The {field} of {name} is missing or no {kind.__name__}.")
        limit = _LARGEST_SIZE if field in ("size", "total_size") else _LARGEST
        if isinstance(found, int) and not 0 <= found < limit:
            raise SnapshotError(f"The {field} of {name} is out of range.")


def _check_pool(pool: Any, name: str) -> None:
    if not _is_pool(pool):
        raise SnapshotError(f"The pool of {name} is not a pair of numbers.")


def _is_pool(pool: Any) -> bool:
    return (
        isinstance(pool, (tuple, list))
        and len(pool) == 2
        and type(pool[0]) is type(pool[1]) is int
        and 0 <= pool[0] < _LARGEST
        and 0 <= pool[1] < _LARGEST
    )


def _unpickled(content: bytes) -> Any:
    import pickle
    from io import BytesIO

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str) -> Any:
            raise pickle.UnpicklingError(
                f"it refers to {module_name}.{global_name}, and a snapshot holds only plain values"
            )

    if not content:
        raise EOFError("it is empty")
    with _memory_for(len(content)), paused():
        return PlainUnpickler(BytesIO(content)).load()


@contextmanager
def _memory_for(nbytes: int) -> Iterator[None]:
    """Limit what the process may allocate while a file of ``nbytes`` is unpickled.

    A pickle of a few bytes can ask for gigabytes; with a limit that is a ``MemoryError``. Only
    Linux reports how much memory the process has already.
    """
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + _MEMORY_BASE + _MEMORY_PER_BYTE * nbytes
    limits = [limit for limit in (before, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *limits]), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
