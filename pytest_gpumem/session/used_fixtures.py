"""The fixtures that a test uses, in pytest's order, and the devices that they were set up on.

A module's fixture may be set up by an unmarked test, where there is no GPU, and then be requested
by a marked one, where there is one; or by tests of two GPU models. Its value would belong to the
wrong machine, and numbers would depend on the order of tests. So a shared fixture that depends on
the device is set up anew for a test of another one.
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

_QUESTIONS = ("is_available", "device_count")
"""Functions of torch.cuda whose result tells one machine from the other."""

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

    That is the order of scopes, and each fixture comes after those that its arguments name. What
    an earlier test has set up does not change it. Source: ``FixtureManager.getfixtureclosure`` and
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
    """Return the fixtures that a test has requested so far; only its request has them."""
    return dict(getattr(request, "_fixture_defs", {}))


@contextmanager
def call_after_getfixturevalue(item: pytest.Item, notice: Callable[[], None]) -> Iterator[None]:
    """Call ``notice`` after each ``request.getfixturevalue`` of the body, which runs inside.

    A fixture that is set up has a hook, and one that an earlier test has set up has none.
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
    """Reset ``fixture`` if the simulation cannot set it up, which happens inside.

    pytest does so for ordinary exceptions; any other leaves it half set up for the next test.
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
    asked: bool = False
    """Whether the set-up called torch's functions on CUDA devices, or made process groups."""


class FixtureDevices:
    """A record of the devices that shared fixtures were set up on."""

    def __init__(self) -> None:
        self._origins: dict[FixtureDef[Any], _Origin] = {}

    @contextmanager
    def setting_up(self, fixture: FixtureDef[Any], device: Device | None) -> Iterator[None]:
        """Record that ``fixture`` is set up inside, for a test on ``device``."""
        if fixture.scope == "function":
            yield
            return
        origin = self._origins[fixture] = _Origin(device)
        cuda = getattr(sys.modules.get("torch"), "cuda", None)

        def noticed(question: Callable[[], Any]) -> Any:
            origin.asked = True
            return question()

        with pytest.MonkeyPatch.context() as patches:
            for name in _QUESTIONS if cuda else ():
                patches.setattr(cuda, name, partial(noticed, getattr(cuda, name)))
            groups = _process_groups()
            try:
                yield
            finally:
                origin.asked |= _process_groups() != groups

    def forget(self, fixture: FixtureDef[Any]) -> None:
        """Drop a fixture that has been torn down."""
        self._origins.pop(fixture, None)

    def renew(self, item: pytest.Item, device: Device | None) -> None:
        """Tear down fixtures that ``item`` shares with earlier tests of another device."""
        info = getattr(item, "_fixtureinfo", None)
        definitions = info.name2fixturedefs.values() if info else ()
        for fixture in self._origins.keys() & {one for same in definitions for one in same}:
            origin = self._origins.get(fixture)  # finishing one finishes those that depend on it
            if origin is None or origin.device is device or fixture.cached_result is None:
                continue
            failed = fixture.cached_result[2] is not None
            if failed or origin.asked or _depends_on_device(fixture.cached_result[0]):
                with origin.device.active() if origin.device else nullcontext():
                    fixture.finish(item._request)  # type: ignore[attr-defined]  # as pytest itself


def _process_groups() -> int:
    """Return the number of process groups, which a simulated machine has for itself."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return len(c10d._world.pg_map) if c10d else 0


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
