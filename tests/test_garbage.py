"""Frames and tracebacks that code leaves behind keep no local variable of its caller alive."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pytest_gpumem import garbage
from pytest_gpumem.garbage import FramesCleared


class Anything:
    """An object that a weak reference can refer to."""


@pytest.fixture(autouse=True)
def without_automatic_collection() -> Iterator[None]:
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


def called_with_frames_cleared(function: Callable[[], None]) -> weakref.ref[Anything]:
    variable = Anything()
    with FramesCleared():
        function()
    return weakref.ref(variable)


def called_without_clearing(function: Callable[[], None]) -> weakref.ref[Anything]:
    variable = Anything()
    function()
    return weakref.ref(variable)


@pytest.mark.parametrize("function", [keep_own_frame, keep_an_exception])
def test_variables_of_the_caller_are_freed_when_it_returns(function: Callable[[], None]) -> None:
    assert called_with_frames_cleared(function)() is None
    assert called_without_clearing(function)() is not None


def test_frames_that_existed_before_are_not_cleared() -> None:
    keep_own_frame()
    frames = [each for each in gc.get_objects(0) if inspect.isframe(each)]
    mine = [each for each in frames if each.f_code is keep_own_frame.__code__]
    called_with_frames_cleared(keep_own_frame)
    assert all("frame" in each.f_locals for each in mine)
    assert mine


def test_tracebacks_that_existed_before_are_not_cleared() -> None:
    never_raised = ValueError("no")
    try:
        raise ValueError("no")
    except ValueError as error:
        kept = error
    called_with_frames_cleared(keep_an_exception)
    assert kept.__traceback__ is not None
    assert never_raised.__traceback__ is None


def test_a_suspended_generator_can_be_resumed() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2

    with FramesCleared():
        generator = numbers()
        assert next(generator) == 1
    assert next(generator) == 2


def test_an_exception_that_propagates_keeps_its_traceback() -> None:
    with pytest.raises(ValueError, match="no") as raised, FramesCleared():
        raise ValueError("no")
    assert raised.traceback


class Between:
    """Calls ``begin`` and ``end`` as a context manager of another package does."""

    def __init__(self) -> None:
        self.frames = FramesCleared()

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.frames.begin()
        try:
            yield
        finally:
            self.frames.end()


@pytest.mark.parametrize("function", [keep_own_frame, keep_an_exception])
def test_begin_and_end_called_below_a_function_clear_its_frames(
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
    frames = FramesCleared()
    frames.begin()
    frames.end()
    frames.end()


def test_objects_are_searched_only_where_a_frame_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[object] = []
    monkeypatch.setattr(garbage, "_clear_frames_below", lambda *given: searches.append(given))
    assert called_with_frames_cleared(leave_nothing)() is None
    assert not searches
    called_with_frames_cleared(keep_own_frame)
    assert len(searches) == 1
