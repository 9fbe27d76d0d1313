"""A script is stopped after a number of steps or an amount of time."""

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
