"""Events per second of the simulated allocator alone.

300,000 random allocations and frees, small and large, with about 2,000 blocks live, trace and
statistics on and read at the end. The bare loop walks the same list and calls an empty function, in
the same run: what Python itself costs here.

    python benchmarks/allocator_speed.py
"""

from __future__ import annotations

import random
from time import perf_counter

from pytest_gpumem.allocator import Allocator

EVENTS = 300_000
LIVE = 2_000
ROUNDS = 5

Event = tuple[bool, int, int]
"""Whether it allocates, bytes, and the slot that holds the address."""


def random_events(seed: int = 0) -> list[Event]:
    """Allocations and frees that keep about ``LIVE`` blocks live."""
    source = random.Random(seed)
    events: list[Event] = []
    live: list[int] = []
    unused = list(range(2 * LIVE))
    while len(events) < EVENTS:
        if not live or (unused and source.random() < (0.9 if len(live) < LIVE else 0.5)):
            slot = unused.pop()
            live.append(slot)
            events.append((True, random_size(source), slot))
        else:
            index = source.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            slot = live.pop()
            unused.append(slot)
            events.append((False, 0, slot))
    return events


def random_size(source: random.Random) -> int:
    """A size as training has them: small tensors, activations, a few large ones."""
    largest = source.choices((4 << 10, 1 << 20, 16 << 20, 128 << 20), (45, 30, 20, 5))[0]
    return source.randrange(1, largest)


def allocator_seconds(events: list[Event]) -> tuple[float, Allocator]:
    """Time of the events on a fresh allocator, and of reading its statistics at the end."""
    allocator = Allocator(total_memory=1 << 50)
    malloc, free = allocator.malloc, allocator.free
    addresses = [0] * (2 * LIVE)
    start = perf_counter()
    for allocates, size, slot in events:
        if allocates:
            addresses[slot] = malloc(size)
        else:
            free(addresses[slot])
    allocator.stats()
    return perf_counter() - start, allocator


def bare_seconds(events: list[Event]) -> float:
    """Time of the same loop around functions that do nothing."""

    def malloc(size: int) -> int:
        return size

    def free(address: int) -> None:
        return None

    addresses = [0] * (2 * LIVE)
    start = perf_counter()
    for allocates, size, slot in events:
        if allocates:
            addresses[slot] = malloc(size)
        else:
            free(addresses[slot])
    return perf_counter() - start


def main() -> None:
    """Print the table: the best of a few rounds each, taken in turns."""
    events = random_events()
    bare, simulated = [], []
    for _ in range(ROUNDS):
        bare.append(bare_seconds(events))
        seconds, allocator = allocator_seconds(events)
        simulated.append(seconds)
    print(f"{'':12}{'events/s':>14}{'seconds':>10}")
    for name, seconds in (("bare loop", min(bare)), ("allocator", min(simulated))):
        print(f"{name:12}{EVENTS / seconds:>14,.0f}{seconds:>10.3f}")
    print(f"ratio {min(simulated) / min(bare):.1f}")
    print(
        f"{len(allocator.live_blocks()):,} blocks live at the end,"
        f" {allocator.allocated:,} B allocated, {allocator.reserved:,} B reserved,"
        f" peaks {allocator.peak_allocated:,} B and {allocator.peak_reserved:,} B"
    )


if __name__ == "__main__":
    main()
