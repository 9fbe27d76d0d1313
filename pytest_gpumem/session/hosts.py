"""Messages from workers to the controller about shared devices, also from other hosts.

Each host has its own ledger, which the controller may not be able to read. So workers send the
data through a channel of execnet, which is part of the input of a pytest-xdist worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from pytest_gpumem.sharing.admission import NOWHERE, Need, Place
from pytest_gpumem.sharing.learned import Learned
from pytest_gpumem.sharing.ledger import Stay
from pytest_gpumem.sharing.usage import RunUsage, usages

CHANNEL = "gpumem_channel"
"""Key of a pytest-xdist worker's input: its channel to :class:`Hosts`."""

REPORTED_AT = (5.0, 60.0, 600.0)
"""Seconds of waiting after which a line names the test and the processes that it waits for."""


class ControllerChannel:
    """A worker's channel to the controller; without one, messages are dropped."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._channel: Any = getattr(config, "workerinput", {}).get(CHANNEL)
        self._wait_lines: dict[str, int] = {}
        """The number of lines shown for a waiting test, by node id."""

    def send(self, **message: Any) -> None:
        """Send a message of builtin types.

        It holds the worker's ``needs`` on its ``device``, the times (``stays``) of its tests, a
        ``suspect``, ``learned`` costs, or the line on a test that ``waits``.
        """
        if self._channel is not None:
            with suppress(OSError):  # of a controller that is gone
                self._channel.send(message)

    def report_wait(self, nodeid: str, waited: float, holders: str) -> None:
        """Show a test's seconds of waiting; ``holders`` names the processes that it waits for."""
        due = sum(waited >= limit for limit in REPORTED_AT)
        if due <= self._wait_lines.get(nodeid, 0):
            return
        self._wait_lines[nodeid] = due
        line = f"{nodeid} has waited {waited:.0f} s for {holders}"
        if self._channel is None:
            show(self._config, line)
        else:
            self.send(waits=line)


def show(config: pytest.Config, line: str) -> None:
    """Write a line to the terminal while tests run."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    if reporter is not None:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter.ensure_newline()
            reporter.write_line(line)
            reporter.flush()


class _Host(NamedTuple):
    name: str
    folder: str
    """The folder of the ledger: two hosts may have one name."""


class Hosts:
    """The controller's data on its workers' devices."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._places: dict[str, Place] = {}
        self._hosts: dict[str, _Host] = {}
        self._stays: dict[str, list[Stay]] = {}
        self.suspects: set[str] = set()
        """Tests whose worker left because of a fault that may be a neighbouring test's."""
        self.learned = Learned()

    def connect(self, node: Any) -> None:
        """Open the channel of a worker that is about to start."""
        worker: str = node.gateway.id
        channel = node.gateway.newchannel()
        channel.setcallback(lambda message: self.take(worker, message))
        node.workerinput[CHANNEL] = channel

    def take(self, worker: str, message: Mapping[str, Any]) -> None:
        """Take in a worker's message; they arrive in the order of sending."""
        match message:
            case {"stays": rows}:
                self._stays.setdefault(worker, []).extend(Stay(*row) for row in rows)
            case {"suspect": nodeid}:
                self.suspects.add(nodeid)
            case {"waits": line}:
                show(self._config, line)
            case {"learned": data}:
                self.learned.merge(Learned.from_dict(data))
            case _:
                name, folder = self._hosts[worker] = _Host(*message["host"])
                needs = {nodeid: Need(*row) for nodeid, row in message["needs"].items()}
                device, capacity = message["device"], message["capacity"]
                self._places[worker] = Place(
                    f"{name} {folder} {device}", capacity, needs, real=message["real"]
                )

    def place_of(self, worker: str) -> Place:
        """Return the device that a worker's tests run on."""
        return self._places.get(worker, NOWHERE)

    def usages(self, run: str) -> list[RunUsage]:
        """Return the usage of each host's devices by tests."""
        hosts = sorted(set(self._hosts.values()))
        names = [host.name for host in hosts]
        found = []
        for host in hosts:
            workers = [worker for worker, its in self._hosts.items() if its == host]
            stays = [stay for worker in workers for stay in self._stays.get(worker, ())]
            capacity = max(self._places[worker].capacity for worker in workers)
            label = host.name if names.count(host.name) == 1 else f"{host.name} ({host.folder})"
            found += [
                replace(usage, device=f"{label} {usage.device}") if len(hosts) > 1 else usage
                for usage in usages(stays, run, capacity)
            ]
        return found
