"""What code leaves behind keeps no local variable of its caller alive."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pytest_gpumem import garbage
from pytest_gpumem.garbage import FramesCleared, LeftoverFrames


class Anything:
    """What can be referred to weakly."""


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def keep_own_frame() -> None:
    frame = inspect.currentframe()
    assert frame is not None


def leave_nothing() -> None:
    pass


def keep_an_exception() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        kept = error
    assert kept


def called(function: Callable[[], None]) -> weakref.ref[Anything]:
    variable = Anything()
    with FramesCleared():
        function()
    return weakref.ref(variable)


def called_as_it_is(function: Callable[[], None]) -> weakref.ref[Anything]:
    variable = Anything()
    function()
    return weakref.ref(variable)


@pytest.mark.parametrize("function", [keep_own_frame, keep_an_exception])
def test_a_variable_of_the_caller_dies_with_it(function: Callable[[], None]) -> None:
    assert called(function)() is None
    assert called_as_it_is(function)() is not None


def test_frames_of_others_are_left_alone() -> None:
    keep_own_frame()
    frames = [each for each in gc.get_objects(0) if inspect.isframe(each)]
    mine = [each for each in frames if each.f_code is keep_own_frame.__code__]
    called(keep_own_frame)
    assert all("frame" in each.f_locals for each in mine)
    assert mine


def test_tracebacks_of_others_are_left_alone() -> None:
    never_raised = ValueError("no")
    try:
        raise ValueError("no")
    except ValueError as error:
        kept = error
    called(keep_an_exception)
    assert kept.__traceback__ is not None
    assert never_raised.__traceback__ is None


def test_a_generator_goes_on() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2

    with FramesCleared():
        generator = numbers()
        assert next(generator) == 1
    assert next(generator) == 2


def test_an_exception_keeps_its_traceback_where_it_is_raised() -> None:
    with pytest.raises(ValueError, match="no") as raised, FramesCleared():
        raise ValueError("no")
    assert raised.traceback


class Between:
    """Calls ``begin`` and ``end`` as a context manager of another package does."""

    def __init__(self) -> None:
        self.frames = LeftoverFrames()

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.frames.begin()
        try:
            yield
        finally:
            self.frames.end()


@pytest.mark.parametrize("function", [keep_own_frame, keep_an_exception])
def test_frames_are_found_between_two_calls_from_below_a_function(
    function: Callable[[], None],
) -> None:
    def others() -> None:
        with Between().watched():
            function()

    def called_by_others() -> weakref.ref[Anything]:
        variable = Anything()
        others()
        return weakref.ref(variable)

    assert called_by_others()() is None


def test_an_end_without_a_beginning_clears_nothing() -> None:
    frames = LeftoverFrames()
    frames.begin()
    frames.end()
    frames.end()


def test_objects_are_searched_only_where_a_frame_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[object] = []
    monkeypatch.setattr(garbage, "_clear_frames_below", lambda *given: searches.append(given))
    assert called(leave_nothing)() is None
    assert not searches
    called(keep_own_frame)
    assert len(searches) == 1
