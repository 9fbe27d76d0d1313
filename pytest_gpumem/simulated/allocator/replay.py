"""Feed a recorded memory snapshot through the simulated allocator and compare every event.

A snapshot of ``torch.cuda.memory._snapshot()`` holds the events of each device and the segments at
its end. :func:`starting_segments` undoes the events to get the state in which recording began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpumem.simulated.allocator.allocator import Allocator
from pytest_gpumem.simulated.allocator.constants import SMALL_SEGMENT, SMALL_SIZE
from pytest_gpumem.simulated.allocator.messages import AllocatorError
from pytest_gpumem.simulated.allocator.rounding import round_size
from pytest_gpumem.simulated.allocator.settings import AllocatorSettings, Version

Json = Mapping[str, Any]

_UNBOUNDED = 1 << 48
"""Device memory of a replay: what did not fit then is on record as events."""
_ELSEWHERE = 1 << 50
"""Where segments land that the recording does not have."""
_XZ_MAGIC = b"\xfd7zXZ\x00"
_NOT_COMPARED = frozenset({"free_requested", "snapshot", "oom", "annotate"})
"""free_requested repeats free_completed; the others do not change the allocator's state."""


class SnapshotError(AllocatorError):
    """The file or object is not a memory snapshot that can be replayed."""


@dataclass(frozen=True)
class ReplayResult:
    """How a simulated allocator compares with a recorded one; peaks in bytes.

    With several devices the counts are sums, and the peaks those of the device with the highest.
    """

    exact: bool
    """Every event has the recorded action, address and size, and the final segments are equal."""
    exact_addresses: int
    total: int
    """Recorded allocations."""
    first_mismatch: str | None
    peak_allocated: int
    peak_reserved: int


def replay(
    snapshot: Json | str | Path, alloc_conf: str | None = None, version: Version = (2, 13)
) -> ReplayResult:
    """Run the recorded allocations and frees through a simulated allocator.

    Args:
        snapshot: a dict of ``torch.cuda.memory._snapshot()``, or the path of a pickled one.
        alloc_conf: allocator settings to try instead of the recorded ones; what was live when
            recording began is then allocated anew, and the result is not exact.
        version: the torch release whose rules hold; a snapshot does not say which one made it.

    Raises:
        SnapshotError: ``snapshot`` is not a memory snapshot, or its start cannot be restored.
        AllocatorError: the settings ask for something that is not simulated.
    """
    data = load_snapshot(snapshot) if isinstance(snapshot, str | Path) else snapshot
    traces = data.get("device_traces")
    if not isinstance(traces, list) or not isinstance(data.get("segments"), list):
        raise SnapshotError(
            "This is not a memory snapshot: it has no segments and device_traces;"
            " make one with torch.cuda.memory._dump_snapshot()."
        )
    conf = recorded_conf(data) if alloc_conf is None else alloc_conf
    settings = AllocatorSettings.parse(conf, version)
    results = [
        _replay_device(data, device, settings, follow=alloc_conf is None)
        for device, trace in enumerate(traces)
        if trace
    ]
    if not results:
        raise SnapshotError(
            "The snapshot holds no events: start recording with"
            " torch.cuda.memory._record_memory_history() before the code of interest."
        )
    return _combined(results)


def recorded_conf(snapshot: Json) -> str:
    """The allocator settings that a snapshot was recorded with; old snapshots have none."""
    return str((snapshot.get("allocator_settings") or {}).get("PYTORCH_CUDA_ALLOC_CONF", ""))


def load_snapshot(path: str | Path) -> Json:
    """Read a pickled snapshot, plain or xz-compressed, without running any code it may name.

    Raises:
        SnapshotError: the file cannot be read, or holds anything but plain values.
    """
    import lzma
    import pickle
    from io import BytesIO

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str) -> Any:
            raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")

    try:
        content = Path(path).read_bytes()
        if content.startswith(_XZ_MAGIC):
            content = lzma.decompress(content)
        data = PlainUnpickler(BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises errors of nearly every type
        raise SnapshotError(f"Cannot read the memory snapshot {path}: {error}.") from error
    if not isinstance(data, dict):
        raise SnapshotError(f"{path} is not a memory snapshot: it holds a {type(data).__name__}.")
    return data


def starting_segments(
    segments: Iterable[Json], trace: Sequence[Json], settings: AllocatorSettings
) -> list[dict[str, Any]]:
    """The segments at the beginning of ``trace``, which ends with ``segments``; by address.

    Each has ``address``, ``total_size``, ``stream``, ``segment_type`` and ``blocks``, as in a
    snapshot. Of a block that was live at the beginning and freed later, only the requested size is
    on record: its size follows from its neighbours, see :func:`_handed_out`.

    Raises:
        SnapshotError: an expandable segment had memory when recording began; its pages cannot be
            told from the events.
    """
    segments = list(segments)
    _check_expandable(segments, trace)
    held, live = _undo(segments, trace)
    divisions = settings.roundup_power2_divisions
    start = []
    for segment in sorted(held.values(), key=lambda each: int(each["address"])):
        first, end = segment["address"], segment["address"] + segment["total_size"]
        inside = sorted(address for address in live if first <= address < end)
        blocks: list[dict[str, Any]] = []
        position = first
        for address, following in zip(inside, [*inside, end][1:], strict=True):
            requested, size = live[address]
            if size is None:
                size = round_size(requested, divisions)
                if segment["segment_type"] == "large":
                    size = _handed_out(address, size, following, trace)
            blocks += _gap(position, address)
            blocks.append(_block(address, size, requested, "active_allocated"))
            position = address + size
        blocks += _gap(position, end)
        start.append({**segment, "blocks": blocks})
    return start


def _check_expandable(segments: Sequence[Json], trace: Sequence[Json]) -> None:
    changes = {"segment_map": 1, "segment_unmap": -1}
    mapped = sum(changes.get(event["action"], 0) * event["size"] for event in trace)
    held = sum(segment["total_size"] for segment in segments if segment.get("is_expandable"))
    if mapped != held:
        raise SnapshotError(
            f"The recording began when expandable segments held {held - mapped} bytes;"
            " to replay it, start recording before the first allocation."
        )


def _undo(
    segments: Sequence[Json], trace: Sequence[Json]
) -> tuple[dict[int, dict[str, Any]], dict[int, tuple[int, int | None]]]:
    """Segments held, and (requested, size or None) of the blocks live, when recording began."""
    held = {
        segment["address"]: {key: segment[key] for key in _SEGMENT_KEYS}
        for segment in segments
        if not segment.get("is_expandable")
    }
    for event in reversed(trace):
        if event["action"] == "segment_alloc":
            held.pop(event["addr"], None)
        elif event["action"] == "segment_free":
            held[event["addr"]] = {
                "address": event["addr"],
                "total_size": event["size"],
                "stream": event["stream"],
                "segment_type": "small" if event["size"] == SMALL_SEGMENT else "large",
            }
    live: dict[int, tuple[int, int | None]] = {}
    born: set[int] = set()
    for event in trace:
        if event["action"] == "alloc":
            born.add(event["addr"])
        elif event["action"] == "free_completed":
            if event["addr"] in born:
                born.remove(event["addr"])
            else:
                live[event["addr"]] = (event["size"], None)
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in born:
                live[block["address"]] = (block.get("requested_size", 0), block["size"])
    return held, live


_SEGMENT_KEYS = ("address", "total_size", "stream", "segment_type")


def _handed_out(address: int, rounded: int, following: int, trace: Sequence[Json]) -> int:
    """Bytes of a large block that was live from the beginning, until it was freed.

    Up to 1 MiB is handed out beyond the request when a free block fits almost. Free blocks of the
    large pool are never that small, so a small gap up to the ``following`` block belongs to this
    one; in a larger gap, the lowest address allocated during its life is where it ends.
    """
    gap = following - address - rounded
    if gap <= SMALL_SIZE:
        return following - address
    limit = address + rounded + SMALL_SIZE
    for event in trace:
        if event["action"] == "free_completed" and event["addr"] == address:
            break
        if event["action"] == "alloc" and address + rounded <= event["addr"] <= limit:
            return int(event["addr"]) - address
    return rounded


def _gap(start: int, end: int) -> list[dict[str, Any]]:
    return [_block(start, end - start, 0, "inactive")] if end > start else []


def _block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


def _replay_device(
    data: Json, device: int, settings: AllocatorSettings, *, follow: bool
) -> ReplayResult:
    trace = data["device_traces"][device]
    final = [segment for segment in data["segments"] if segment["device"] == device]
    run = _Run(settings, trace, follow=follow)
    start = starting_segments(final, trace, settings)
    if follow and start:
        run.allocator.restore(start)
    else:
        run.allocate_anew(start)
    run.feed(trace)
    mismatch = run.first_mismatch(trace) or _layout_mismatch(final, run.allocator.segments())
    return ReplayResult(
        exact=mismatch is None,
        exact_addresses=run.exact,
        total=run.total,
        first_mismatch=None if mismatch is None else f"device {device}: {mismatch}",
        peak_allocated=run.allocator.peak_allocated,
        peak_reserved=run.allocator.peak_reserved,
    )


class _Run:
    """One allocator that follows one trace."""

    def __init__(self, settings: AllocatorSettings, trace: Sequence[Json], *, follow: bool) -> None:
        self.allocator = Allocator(
            _UNBOUNDED, settings, settings.version, place_segment=self._place_segment
        )
        self.addresses: dict[int, int] = {}
        self.total = self.exact = 0
        self._follow = follow
        self._recorded: list[tuple[int, int]] = []
        self._elsewhere = _ELSEWHERE
        self._released = 0

    def allocate_anew(self, segments: Iterable[Json]) -> None:
        """What was live at the beginning, placed as these settings would have placed it."""
        for segment in segments:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    self.addresses[address] = self.allocator.malloc(
                        block["requested_size"], segment["stream"]
                    )
                address += block["size"]

    def feed(self, trace: Sequence[Json]) -> None:
        """Repeat what the program did; what the allocator did by itself must follow."""
        for event in trace:
            action, address = event["action"], event.get("addr", 0)
            if action == "alloc":
                self._allocate(event["size"], event["stream"], address)
            elif action == "free_completed":
                self.allocator.free(self.addresses.pop(address, address))
            elif action in ("segment_alloc", "segment_map") and self._follow:
                self._recorded.append((event["size"], address))
            elif action in ("segment_free", "segment_unmap"):
                self._release()

    def _allocate(self, size: int, stream: int, address: int) -> None:
        simulated = self.allocator.malloc(size, stream)
        self.addresses[address] = simulated
        self._recorded.clear()
        self.total += 1
        self.exact += simulated == address

    def _release(self) -> None:
        """The recording returns memory: once for each run of these, the cache was emptied."""
        if self._released == 0:
            before = self.allocator.device_frees
            self.allocator.empty_cache()
            self._released = self.allocator.device_frees - before
        self._released = max(0, self._released - 1)

    def _place_segment(self, size: int) -> int:
        expandable = self.allocator.settings.expandable_segments
        for index, (recorded, address) in enumerate(self._recorded):
            if recorded == size or expandable:
                del self._recorded[index]
                return address
        address = self._elsewhere
        self._elsewhere += size
        return address

    def first_mismatch(self, trace: Sequence[Json]) -> str | None:
        """Where the two sequences of events first differ."""
        recorded = [
            (event["action"], event["addr"], event["size"], event["stream"])
            for event in trace
            if event["action"] not in _NOT_COMPARED
        ]
        simulated = [
            (entry.action, entry.addr, entry.size, entry.stream)
            for entry in self.allocator.trace
            if entry.action not in _NOT_COMPARED
        ]
        for index, (expected, actual) in enumerate(zip(recorded, simulated, strict=False)):
            if expected != actual:
                return f"event {index} is {_words(expected)}, simulated {_words(actual)}"
        if len(recorded) != len(simulated):
            return f"{len(recorded)} events are recorded, {len(simulated)} simulated"
        return None


def _words(event: tuple[str, int, int, int]) -> str:
    action, address, size, stream = event
    return f"{action} of {size} B at {address:#x} on stream {stream}"


def _layout_mismatch(recorded: Iterable[Json], simulated: Iterable[Json]) -> str | None:
    """The first difference between two layouts: segments, and size and state of their blocks."""
    expected, actual = _layout(recorded), _layout(simulated)
    for address in sorted(expected.keys() | actual.keys()):
        if expected.get(address) != actual.get(address):
            return (
                f"the final block at {address:#x} is {expected.get(address)},"
                f" simulated {actual.get(address)}"
            )
    return None


def _layout(segments: Iterable[Json]) -> dict[int, tuple[int, str, int]]:
    """Block address -> size, state and segment."""
    layout = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            layout[address] = (block["size"], block["state"], segment["address"])
            address += block["size"]
    return layout


def _combined(results: Sequence[ReplayResult]) -> ReplayResult:
    mismatches = [result.first_mismatch for result in results if result.first_mismatch]
    return ReplayResult(
        exact=not mismatches,
        exact_addresses=sum(result.exact_addresses for result in results),
        total=sum(result.total for result in results),
        first_mismatch=mismatches[0] if mismatches else None,
        peak_allocated=max(result.peak_allocated for result in results),
        peak_reserved=max(result.peak_reserved for result in results),
    )
