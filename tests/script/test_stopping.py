"""When a script is stopped: after enough steps, or enough time."""

from __future__ import annotations

import time

import pytest
import torch

from pytest_gpumem.script.stopping import Alarm, Steps, StopError


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


class Log(list[str]):
    """Who stepped, and where iterations ended."""

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
    # The first time, nobody knows of the others yet.
    assert log == ["a", "over", "b", "c", "a", "b", "c", "last"]


def test_where_the_others_do_not_come_again_the_first_one_ends_it(log: Log) -> None:
    first, second = optimizer(), optimizer()
    with Steps(2, log.over).counted(), pytest.raises(StopError):
        log.step("a", first)
        log.step("b", second)
        while True:
            log.step("a", first)
    assert log == ["a", "over", "b", "a", "a"]


def test_an_optimizer_made_anew_takes_over(log: Log) -> None:
    with Steps(2, log.over).counted(), pytest.raises(StopError):
        while True:
            log.step("a", optimizer())
    assert log == ["a", "over", "a", "last"]


def test_steps_that_a_scaler_skips_are_none(log: Log) -> None:
    steps = Steps(1, log.over)
    only = optimizer()
    only.param_groups[0]["params"][0].grad.fill_(float("inf"))
    scaler = torch.amp.GradScaler("cpu")
    with steps.counted():
        scaler.scale(torch.ones(1))
        scaler.step(only)
    assert (steps.count, log) == (0, [])


def test_afterwards_nothing_is_counted() -> None:
    steps = Steps(1)
    with steps.counted():
        pass
    optimizer().step()
    assert steps.count == 0


def test_no_handler_of_exceptions_keeps_a_script_from_stopping() -> None:
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


def test_an_alarm_interrupts_what_waits() -> None:
    alarm = Alarm(0.05)
    with alarm.set(), pytest.raises(StopError):
        time.sleep(60)
    assert alarm.rang


def test_an_alarm_that_is_not_reached_does_not_ring() -> None:
    alarm = Alarm(0.05)
    with alarm.set():
        pass
    time.sleep(0.1)
    assert not alarm.rang
