"""The fixtures that a test uses, in the order in which pytest sets them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.fixtures import FixtureDef


def fixtures_of(item: pytest.Item) -> list[FixtureDef[Any]]:
    """Return the fixtures that ``item`` uses now, each after those that it requests.

    pytest keeps them on the item's request in the order in which they were requested, which does
    not depend on what an earlier test has set up already.
    """
    request = getattr(item, "_request", None)
    if request is None:
        return []
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
    """Return the fixtures that a test has requested so far, which pytest records only there."""
    return dict(getattr(request, "_fixture_defs", {}))


@contextmanager
def noticing(item: pytest.Item, notice: Callable[[], None]) -> Iterator[None]:
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
def taken_back(fixture: FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
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
