"""The analysis of a failed allocation: the request, the holders of memory, possible remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pytest_gpumem.allocator.recording import Json, SnapshotError
from pytest_gpumem.attribution.composition import Site
from pytest_gpumem.attribution.explanation import explanation_lines
from pytest_gpumem.attribution.history import SUPPLY
from pytest_gpumem.simulated.gpu.replay import replay
from pytest_gpumem.sizes import format_size

REMEDIES = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "garbage_collection_threshold:0.8",
)
"""Settings of PYTORCH_CUDA_ALLOC_CONF to try, the recommended ones first."""


@dataclass(frozen=True)
class OutOfMemory:
    """A failed allocation; sizes in bytes."""

    requested: int
    """Bytes requested, after rounding."""
    free: int
    """Bytes left on the device."""
    total: int
    allocated: int
    reserved: int
    site: str | None
    operator: str | None
    holders: tuple[Site, ...]
    """The live blocks, most bytes first."""
    avoided_by: tuple[str, ...]
    """Allocator settings under which the allocations up to this one, and this one, fit."""
    limit: int | None = None
    """Bytes of the device that this process may reserve, if that is not the whole device."""
    cause: str = ""
    """The reason for the size of the request, where known: a clause."""

    @property
    def over_limit(self) -> bool:
        """Whether the process's limit prevented the allocation, and not the device."""
        return self.limit is not None and self.requested <= self.free

    @property
    def fragmentation(self) -> int:
        """Bytes reserved and not allocated, in free blocks that were too small."""
        return self.reserved - self.allocated

    @property
    def elsewhere(self) -> int:
        """Bytes held outside this process's allocator: the context and other processes."""
        return max(self.total - self.free - self.reserved, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **vars(self),
            "fragmentation": self.fragmentation,
            "elsewhere": self.elsewhere,
            "sentence": self.sentence,
            "holders": [site.to_dict() for site in self.holders],
            "avoided_by": list(self.avoided_by),
        }

    @property
    def available(self) -> int:
        """Bytes available to the failed allocation."""
        if self.over_limit and self.limit is not None:
            return max(self.limit - self.reserved, 0)
        return self.free

    @property
    def sentence(self) -> str:
        """The request, its origin, the missing bytes and, where known, the reason."""
        where = " ".join(filter(None, (self.site, self.operator)))
        by = f" by {where}" if where else ""
        free = f"{format_size(self.free)} free of {format_size(self.total)}"
        if self.over_limit and self.limit is not None:
            free = (
                f"{format_size(self.available)} left of the {format_size(self.limit)} that this "
                "process may reserve (torch.cuda.set_per_process_memory_fraction, or a quota); the "
                f"device has {free}"
            )
        missing = self.requested - self.available
        over = f", {format_size(missing)} too much" if missing > 0 and not self.over_limit else ""
        why = f": {self.cause}" if self.cause else ""
        return f"out of memory: {format_size(self.requested)} asked for{by}, {free}{over}{why}"

    def lines(self) -> list[str]:
        """Return the text below the failure; the last line is on allocator settings."""
        unused, outside = format_size(self.fragmentation), format_size(self.elsewhere)
        remedy = f"no allocator setting would have helped (tried: {', '.join(REMEDIES)})"
        if self.avoided_by:
            remedy = (
                "this request would have fitted with "
                f"PYTORCH_CUDA_ALLOC_CONF={self.avoided_by[0]} "
                "(found by replaying the allocations up to it)"
            )
        return [
            self.sentence,
            f"  {format_size(self.allocated)} allocated, {unused} reserved and not allocated, "
            f"{outside} held outside PyTorch",
            *explanation_lines([site.to_dict() for site in self.holders], signed=False),
            f"  {remedy}",
        ]


def post_mortem(
    snapshot: Json,
    device: int,
    *,
    total: int,
    limit: int,
    version: tuple[int, int],
    holders: Iterable[Site],
    place: tuple[str | None, str | None] = (None, None),
    unfused: str = "",
) -> OutOfMemory | None:
    """Return the data of a snapshot of the allocator on its last failure, ``None`` without one.

    ``limit`` are the bytes of ``total`` that the process may reserve, ``holders`` the sites of the
    live blocks, ``place`` the site and the operator of the request. ``unfused`` is the reason why
    attention ran no fused kernel, if attention made the request.
    """
    trace = snapshot["device_traces"][device]
    failures = [index for index, event in enumerate(trace) if event["action"] == "oom"]
    if not failures:
        return None
    index = failures[-1]
    event = trace[index]
    sites = tuple(holders)
    site, operator = place
    return OutOfMemory(
        requested=event["size"],
        free=event.get("device_free", event.get("addr", 0)),
        total=total,
        allocated=sum(holder.bytes for holder in sites),
        reserved=_reserved_at(snapshot, device, index),
        site=site,
        operator=operator,
        holders=sites,
        avoided_by=tuple(_remedies(_within(snapshot, device, limit), device, version)),
        limit=limit if limit < total else None,
        cause=f"scaled_dot_product_attention ran unfused, as {unfused}" if unfused else "",
    )


def _reserved_at(snapshot: Json, device: int, index: int) -> int:
    """Return the reserved bytes at event ``index``: those at the end without later events'."""
    reserved: int = sum(
        segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device
    )
    later = snapshot["device_traces"][device][index + 1 :]
    taken: int = sum(SUPPLY.get(event["action"], 0) * event["size"] for event in later)
    return reserved - taken


def _within(snapshot: Json, device: int, limit: int) -> Json:
    """Return ``snapshot`` for a device with as many bytes as the process may reserve.

    A failure is recorded with the driver's free bytes, which do not depend on
    ``torch.cuda.set_per_process_memory_fraction``.
    """

    def limited(index: int, event: Json) -> Json:
        if event["action"] != "oom":
            return event
        left = max(limit - _reserved_at(snapshot, device, index), 0)
        return {**event, "device_free": min(event["device_free"], left)}

    traces = list(snapshot["device_traces"])
    traces[device] = [limited(index, event) for index, event in enumerate(traces[device])]
    return {**snapshot, "device_traces": traces}


def _remedies(snapshot: Json, device: int, version: tuple[int, int]) -> Iterator[str]:
    for setting in REMEDIES:
        with suppress(SnapshotError, ValueError):
            result = replay(dict(snapshot), alloc_conf=setting, version=version)
            found = next((one for one in result.devices if one.device == device), None)
            if found is not None and found.what_if and found.what_if.out_of_memory is None:
                yield setting
