"""A script is stopped after a number of steps or an amount of time."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from pytest_gpumem.measurement import automatic_phases
from pytest_gpumem.script import entry
from pytest_gpumem.script.stopping import Alarm, Steps, StopError, _computes
from pytest_gpumem.simulated.machine import pool_contents

T = TypeVar("T")


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


class Log(list[str]):
    """A log of the optimizers that stepped and of the ends of iterations."""

    def over(self, more: bool) -> None:
        self.append("over" if more else "last")

    def step(self, name: str, each: torch.optim.Optimizer) -> None:
        self.append(name)
        each.step()


@pytest.fixture
def log() -> Log:
    return Log()


def test_one_optimizer_ends_each_iteration(log: Log) -> None:
    only = optimizer()
    with Steps(3, log.over).counted(), pytest.raises(StopError):
        while True:
            log.step("a", only)
    assert log == ["a", "over", "a", "over", "a", "last"]


def test_with_several_an_iteration_ends_with_the_last_of_them(log: Log) -> None:
    first, second, third = optimizer(), optimizer(), optimizer()
    with Steps(2, log.over).counted(), pytest.raises(StopError):
        while True:
            log.step("a", first)
            log.step("b", second)
            log.step("c", third)
    # In the first iteration the other optimizers are not known yet.
    assert log == ["a", "over", "b", "c", "a", "b", "c", "last"]


def test_an_iteration_ends_with_the_only_optimizer_that_steps_again(log: Log) -> None:
    first, second = optimizer(), optimizer()
    with Steps(2, log.over).counted(), pytest.raises(StopError):
        log.step("a", first)
        log.step("b", second)
        while True:
            log.step("a", first)
    assert log == ["a", "over", "b", "a", "a"]


def test_a_new_optimizer_takes_the_place_of_an_old_one(log: Log) -> None:
    with Steps(2, log.over).counted(), pytest.raises(StopError):
        while True:
            log.step("a", optimizer())
    assert log == ["a", "over", "a", "last"]


def test_steps_that_a_scaler_skips_do_not_count(log: Log) -> None:
    steps = Steps(1, log.over)
    only = optimizer()
    only.param_groups[0]["params"][0].grad.fill_(float("inf"))
    scaler = torch.amp.GradScaler("cpu")
    with steps.counted():
        scaler.scale(torch.ones(1))
        scaler.step(only)
    assert (steps.count, log) == (0, [])


def test_no_step_is_counted_after_the_script() -> None:
    steps = Steps(1)
    with steps.counted():
        pass
    optimizer().step()
    assert steps.count == 0


def test_a_script_that_catches_every_exception_is_stopped() -> None:
    ended = []
    only = optimizer()
    with Steps(1).counted(), pytest.raises(StopError):
        try:
            while True:
                try:
                    only.step()
                except Exception:
                    continue
        finally:
            ended.append("finally")
    assert ended == ["finally"]


def test_an_alarm_interrupts_a_wait() -> None:
    alarm = Alarm(0.05)
    with alarm.set(), pytest.raises(StopError):
        time.sleep(60)
    assert alarm.rang


def test_an_alarm_is_cancelled_by_an_earlier_end() -> None:
    alarm = Alarm(0.05)
    with alarm.set():
        pass
    time.sleep(0.1)
    assert not alarm.rang


def test_an_alarm_that_a_finalizer_swallows_rings_again() -> None:
    number = getattr(signal, "SIGALRM", signal.SIGINT)

    class Held:
        def __del__(self) -> None:
            signal.raise_signal(number)
            swallowed.append("the rest of a finalizer")

    alarm, swallowed = Alarm(60), list[str]()
    with alarm.set(), pytest.raises(StopError):
        Held()
        time.sleep(20)
    assert (alarm.rang, swallowed) == (True, [])


def test_other_exceptions_of_finalizers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        def __del__(self) -> None:
            raise KeyError

    reported = list[type[BaseException]]()
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(error.exc_type))
    with Alarm(60).set():
        Held()
    Held()
    assert reported == [KeyError, KeyError]


def test_a_check_raises_once_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alarm, "_start", lambda alarm, seconds: None)  # no signal comes
    alarm = Alarm(0.05)
    with alarm.set():
        alarm.check()
        time.sleep(0.06)
        with pytest.raises(StopError):
            alarm.check()
        alarm.check()  # in a finally block
    assert alarm.rang


def called_in(files: list[str], function: Callable[[], T]) -> T:
    """Call ``function``, as it is written, in functions of ``files``, the outermost first."""
    for file in reversed(files):
        names = {"function": function}
        exec(compile("def call():\n    return function()\n", file, "exec"), names)
        function = names["call"]
    return function()


OWN, STANDARD, TORCH = pool_contents.__file__, weakref.__file__, torch._ops.__file__
PHASES, STARTER, USERS = automatic_phases.__file__, entry.__file__, "/home/user/train.py"
INSTALLED = pytest.__file__


@pytest.mark.parametrize(
    ("files", "computes"),
    [
        # From the outermost function to the innermost one.
        ([USERS], False),
        ([USERS, OWN], True),
        ([USERS, OWN, STANDARD], True),  # a finalizer of this package
        ([USERS, OWN, TORCH, STANDARD], True),
        ([USERS, OWN, TORCH, "<frozen importlib._bootstrap>"], True),
        ([USERS, OWN, TORCH, USERS], False),
        ([USERS, OWN, TORCH, INSTALLED], False),
        ([USERS, TORCH, STANDARD], False),  # a loader waits for its worker
        ([USERS, PHASES], True),
        ([USERS, PHASES, STANDARD], True),
        ([USERS, PHASES, TORCH], False),
        ([STARTER, STANDARD], False),  # python -m of the standard library
    ],
)
def test_a_signal_interrupts_a_script_only_outside_of_this_package(
    files: list[str], computes: bool
) -> None:
    frames = "lambda: sys._getframe(1)"  # a function of a frozen module, which is passed over
    frame = called_in(files, eval(compile(frames, "<frozen test>", "eval"), {"sys": sys}))
    assert _computes(frame) is computes
