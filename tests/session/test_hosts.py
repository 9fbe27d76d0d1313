"""Devices, needs and waits that workers report to the controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from pytest_gpumem.session.conclusion import differing
from pytest_gpumem.session.hosts import CHANNEL, ControllerChannel, Hosts
from pytest_gpumem.sharing.admission import NOWHERE, Need
from pytest_gpumem.sharing.learned import Learned, TestCost
from pytest_gpumem.values.environment import Environment

T4 = Environment(True, "T4", "7.5", "2.13")
H100 = Environment(False, "NVIDIA H100", "9.0", "2.13", cuda="12.8", driver="570")


@pytest.fixture
def hosts(pytestconfig: pytest.Config) -> Hosts:
    return Hosts(pytestconfig)


def will_need(host: str, folder: str, *, capacity: int = 100) -> dict[str, Any]:
    needs = {"a": [7, "max", 1.5, False, 0, True]}
    fields = {"device": "GPU", "capacity": capacity, "needs": needs, "real": True}
    return {"host": [host, folder], **fields}


def has_run(worker: str, nodeid: str, began: float, ended: float) -> dict[str, Any]:
    return {"stays": [["run", worker, nodeid, "GPU", began, ended, 50]]}


def test_a_place_is_one_device_of_one_host(hosts: Hosts) -> None:
    hosts.take("gw0", will_need("one", "/tmp"))
    hosts.take("gw1", will_need("one", "/tmp"))
    hosts.take("gw2", will_need("other", "/tmp", capacity=80))
    assert hosts.place_of("gw0") == hosts.place_of("gw1")
    assert hosts.place_of("gw0").needs == {"a": Need(7, "max", 1.5)}
    assert hosts.place_of("gw2").name != hosts.place_of("gw0").name
    assert hosts.place_of("gw2").capacity == 80
    assert hosts.place_of("gw3") == NOWHERE


def test_times_of_two_hosts_are_never_mixed(hosts: Hosts) -> None:
    for worker, host, clock in (("gw0", "one", 0.0), ("gw1", "one", 0.0), ("gw2", "two", 9e9)):
        hosts.take(worker, will_need(host, "/tmp"))
        hosts.take(worker, has_run(worker, f"test_{worker}", clock + 1, clock + 3))
    one, two = hosts.usages("run")
    assert (one.device, one.workers, one.makespan, one.peak) == ("one GPU", 2, 2.0, 100)
    assert (two.device, two.workers, two.makespan, two.peak) == ("two GPU", 1, 2.0, 50)
    assert hosts.usages("another") == []


def test_hosts_of_one_name_get_numbers_and_a_single_host_no_name(hosts: Hosts) -> None:
    hosts.take("gw0", will_need("one", "/a"))
    hosts.take("gw0", has_run("gw0", "test", 1, 3))
    assert [usage.device for usage in hosts.usages("run")] == ["GPU"]
    hosts.take("gw1", will_need("one", "/b"))
    hosts.take("gw1", has_run("gw1", "test", 1, 3))
    assert [usage.device for usage in hosts.usages("run")] == ["one (/a) GPU", "one (/b) GPU"]


def test_learned_needs_of_all_workers_are_merged(hosts: Hosts) -> None:
    for worker, nodeid in (("gw0", "a"), ("gw1", "b")):
        learned = Learned()
        learned.learn("cuda", nodeid, TestCost(predicted=5))
        hosts.take(worker, {"learned": learned.to_dict()})
    assert {nodeid for _, nodeid, _ in hosts.learned} == {"a", "b"}


def test_environments_are_listed_where_hosts_differ() -> None:
    assert list(differing({"gw0": [T4], "gw1": [T4]})) == []
    # A test of another simulated model may have run on one of them.
    assert list(differing({"gw0": [T4, replace(T4, gpu="L4")], "gw1": [T4]})) == []
    assert list(differing({"gw2": [H100], "gw0": [T4], "gw1": [T4]})) == [
        "gw0, gw1: simulated GPU (torch 2.13)",
        "gw2: NVIDIA H100 (torch 2.13, CUDA 12.8, driver 570)",
    ]


def test_a_wait_is_shown_by_the_controller_after_some_time() -> None:
    lines: list[str] = []
    reporter = Mock(write_line=lines.append)
    plugins = {"terminalreporter": reporter, "capturemanager": None}
    controller: Any = Mock()
    controller.pluginmanager.getplugin = plugins.get
    hosts = Hosts(controller)
    worker: Any = Mock(workerinput={CHANNEL: Mock(send=lambda data: hosts.take("gw0", data))})
    channel = ControllerChannel(worker)

    for waited in (4.9, 5.2, 9.0, 59.9, 61.0):
        channel.report_wait("test_it", waited, "2.0 GiB: gw1 holds 3.0 GiB (test_other)")

    assert lines == [
        "test_it has waited 5 s for 2.0 GiB: gw1 holds 3.0 GiB (test_other)",
        "test_it has waited 61 s for 2.0 GiB: gw1 holds 3.0 GiB (test_other)",
    ]
