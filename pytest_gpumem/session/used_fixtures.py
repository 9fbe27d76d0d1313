"""The fixtures that a test uses, in pytest's order, and the devices that they were set up on.

An unmarked test may set up a module's fixture without a GPU, and a marked test with a simulated GPU
may then request it; or two tests with different GPU models may. The value would belong to the
wrong device, and numbers would depend on the order of tests. So a shared fixture that depends on
the device is set up again for a test on another device; and one that has allocated there in a test
that is not measured, for the first one that is: its bytes belong to that test.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from _pytest.fixtures import FixtureDef

from pytest_gpumem.device.device import Device

_DEVICE_FUNCTIONS = ("is_available", "device_count")
"""Functions of torch.cuda whose result differs between devices."""

_DEVICE_NAME = re.compile(r"cpu|cuda(:\d+)?")


def fixtures_of(item: pytest.Item) -> list[FixtureDef[Any]]:
    """Return the fixtures that ``item`` uses now, each after those that it requests.

    pytest keeps them on the item's request in the order in which they were requested, which does
    not depend on what an earlier test has set up already.
    """
    request: Any = getattr(item, "_request", None)
    ordered: dict[FixtureDef[Any], None] = {}
    known: Mapping[str, Sequence[FixtureDef[Any]]] = getattr(request, "_arg2fixturedefs", {})
    for name, fixture in active_fixtures(request).items():
        ordered.update(dict.fromkeys(_overridden(fixture, known.get(name, ()))))
        ordered[fixture] = None
    return list(ordered)


def expected_fixtures(item: pytest.Item) -> list[FixtureDef[Any]]:
    """Return the fixtures that ``item`` names, in the order in which pytest sets them up.

    That is the order of scopes, and each fixture comes after those that its arguments name.
    Set-ups by earlier tests do not change it. Source: ``FixtureManager.getfixtureclosure`` and
    ``FixtureDef.execute`` of _pytest/fixtures.py.
    """
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return []
    known: Mapping[str, Sequence[FixtureDef[Any]]] = info.name2fixturedefs
    ordered: dict[FixtureDef[Any], None] = {}

    def visit(same_name: Sequence[FixtureDef[Any]]) -> None:
        if not same_name or same_name[-1] in ordered:
            return
        fixture = same_name[-1]
        for name in fixture.argnames:
            visit(same_name[:-1] if name == fixture.argname else known.get(name, ()))
        ordered[fixture] = None

    for name in info.names_closure:
        visit(known.get(name, ()))
    return list(ordered)


def _overridden(
    fixture: FixtureDef[Any], same_name: Sequence[FixtureDef[Any]]
) -> Iterator[FixtureDef[Any]]:
    """Yield the fixtures that ``fixture`` extends by requesting its own name."""
    if fixture not in same_name or fixture.argname not in fixture.argnames:
        return
    below = same_name[: list(same_name).index(fixture)]
    if below:
        yield from _overridden(below[-1], below)
        yield below[-1]


def active_fixtures(request: pytest.FixtureRequest) -> dict[str, FixtureDef[Any]]:
    """Return the fixtures that a test has requested so far, from a private attribute of pytest."""
    return dict(getattr(request, "_fixture_defs", {}))


@contextmanager
def call_after_getfixturevalue(item: pytest.Item, notice: Callable[[], None]) -> Iterator[None]:
    """Call ``notice`` after each ``request.getfixturevalue`` of the body, which runs inside.

    pytest calls a hook for each set-up, but none for a fixture that an earlier test has set up.
    """
    request: Any = getattr(item, "_request", None)
    if request is None:
        yield
        return
    get = request.getfixturevalue

    def called(argname: str) -> Any:
        value = get(argname)
        notice()
        return value

    request.getfixturevalue = called
    try:
        yield
    finally:
        del request.getfixturevalue


@contextmanager
def undo_failed_set_up(fixture: FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """Reset ``fixture`` if its set-up, inside, raises an error of the simulation.

    pytest does so only for subclasses of ``Exception``; after others it stays half set up.
    """
    try:
        yield
    except BaseException as error:
        from pytest_gpumem.values.errors import SimulationError

        if isinstance(error, SimulationError):
            fixture.cached_result = (None, fixture.cache_key(request), None)  # type: ignore[arg-type]  # a SubRequest
            fixture.finish(request)  # type: ignore[arg-type]
        raise


@dataclass
class _Origin:
    device: Device | None
    """The device of the set-up; ``None`` for the machine as it is."""
    depends_on_device: bool = False
    """Whether the set-up called torch's functions on CUDA devices, or made process groups."""
    is_unmetered: bool = False
    """Whether the set-up allocated on a device, in a test that is not measured."""


class FixtureDevices:
    """A record of the devices that shared fixtures were set up on."""

    def __init__(self) -> None:
        self._origins: dict[FixtureDef[Any], _Origin] = {}

    @contextmanager
    def setting_up(
        self, fixture: FixtureDef[Any], device: Device | None, *, metered: bool
    ) -> Iterator[None]:
        """Record that ``fixture`` is set up inside, for a test on ``device``."""
        if fixture.scope == "function":
            yield
            return
        origin = self._origins[fixture] = _Origin(device)
        cuda = getattr(sys.modules.get("torch"), "cuda", None)

        def record_call(function: Callable[[], Any]) -> Any:
            origin.depends_on_device = True
            return function()

        groups, allocated = _process_groups(), 0 if metered else _bytes_ever_allocated()
        try:
            with pytest.MonkeyPatch.context() as patches:
                for name in _DEVICE_FUNCTIONS if cuda else ():
                    patches.setattr(cuda, name, partial(record_call, getattr(cuda, name)))
                yield
        finally:
            origin.depends_on_device |= _process_groups() != groups
            origin.is_unmetered = not metered and _bytes_ever_allocated() != allocated

    def forget(self, fixture: FixtureDef[Any]) -> None:
        """Drop a fixture that has been torn down."""
        self._origins.pop(fixture, None)

    def renew(self, item: pytest.Item, device: Device | None, *, measured: bool) -> None:
        """Tear down fixtures that ``item`` shares with earlier tests of another device.

        And those that are not metered, for a test that is ``measured``.
        """
        info = getattr(item, "_fixtureinfo", None)
        definitions = info.name2fixturedefs.values() if info else ()
        for fixture in self._origins.keys() & {one for same in definitions for one in same}:
            origin = self._origins.get(fixture)  # finishing one finishes those that depend on it
            if origin is None or fixture.cached_result is None:
                continue
            unmetered = measured and origin.is_unmetered
            if origin.device is device and not unmetered:
                continue
            failed = fixture.cached_result[2] is not None
            if (
                failed
                or unmetered
                or origin.depends_on_device
                or _depends_on_device(fixture.cached_result[0])
            ):
                with origin.device.active() if origin.device else nullcontext():
                    fixture.finish(item._request)  # type: ignore[attr-defined]  # as pytest itself


def _process_groups() -> int:
    """Return the number of process groups: each simulated machine has its own."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return len(c10d._world.pg_map) if c10d else 0


def _bytes_ever_allocated() -> int:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # A user's own allocator has no statistics.
    if not (cuda and cuda.is_initialized()) or cuda.get_allocator_backend() == "pluggable":
        return 0
    found = map(cuda.memory_stats, range(cuda.device_count()))
    return sum(stats.get("allocated_bytes.all.allocated", 0) for stats in found)


def _depends_on_device(value: Any) -> bool:
    if "torch" not in sys.modules:
        return False
    import torch

    from pytest_gpumem.measurement.leaks import reachable_objects

    return any(
        isinstance(found, torch.Tensor | torch.device)
        or (isinstance(found, str) and _DEVICE_NAME.fullmatch(found))
        for found in reachable_objects([value])
    )
