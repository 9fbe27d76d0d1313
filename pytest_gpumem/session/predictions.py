"""The needs of tests with ``predict=`` by simulation, before they run on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.report.pytest_reports import ARGUMENTS, without_group
from pytest_gpumem.values.prediction import PredictedTest

if TYPE_CHECKING:
    from pytest_gpumem.device.cuda import CudaDevice
    from pytest_gpumem.prediction.process import Answer


class Predictions:
    """Simulated runs of one module's tests at a time, each in a process of its own."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._known: dict[str, PredictedTest] = {}

    def of(
        self, item: pytest.Item, device: CudaDevice, wanted: Callable[[pytest.Item], bool]
    ) -> PredictedTest:
        """Return the needs of ``item`` on the simulated device of ``device``'s model.

        The first test of a module is simulated together with all others of it that are ``wanted``.
        """
        if item.nodeid not in self._known:
            same = [one for one in item.session.items if one.path == item.path and wanted(one)]
            self._known.update(self._predicted({one.nodeid: one for one in (item, *same)}, device))
        return self._known[item.nodeid]

    def of_all(
        self, items: Iterable[pytest.Item], device: CudaDevice, seconds: float
    ) -> dict[str, PredictedTest]:
        """Return the needs of those ``items`` that the simulation runs within ``seconds``."""
        found = self._predicted({item.nodeid: item for item in items}, device, seconds)
        # Tests that have not been run may still be requested later.
        self._known.update({nodeid: one for nodeid, one in found.items() if one.measurement})
        return found

    def _predicted(
        self, items: dict[str, pytest.Item], device: CudaDevice, seconds: float | None = None
    ) -> dict[str, PredictedTest]:
        from pytest_gpumem.prediction.process import PredictionError, run_tests

        machine = device.machine
        try:
            answers = run_tests(
                list(map(_by_path, items.values())),
                [machine],
                arguments=self._arguments(),
                folder=self._config.invocation_params.dir,
                options=self._options(),
                seconds=seconds,
            )
        except PredictionError as error:
            unknown = PredictedTest(machine.model.name, None, f"it was not simulated: {error}")
            return dict.fromkeys(items, unknown)
        return dict(_by_test(items, answers, machine.model.name))

    def _arguments(self) -> list[str]:
        """Return the arguments of pytest; a worker receives them from the controller."""
        worker = getattr(self._config, "workerinput", {})
        given: Iterable[str | os.PathLike[str]] = worker.get(
            ARGUMENTS, self._config.invocation_params.args
        )
        return [os.fspath(argument) for argument in given]

    def _options(self) -> dict[str, int]:
        """Return options that pytest chose by itself: the seed of pytest-randomly."""
        seed = getattr(self._config.option, "randomly_seed", None)
        return {"randomly_seed": seed} if isinstance(seed, int) else {}


def _by_path(item: pytest.Item) -> str:
    # A path that is absolute means the same in every folder.
    _, separator, name = without_group(item.nodeid).partition("::")
    return f"{item.path}{separator}{name}"


def _by_test(
    nodeids: Iterable[str], answers: Iterable[Answer], gpu: str
) -> Iterable[tuple[str, PredictedTest]]:
    told = {answer.nodeid: answer for answer in answers}
    for nodeid in nodeids:
        answer = told.get(without_group(nodeid))
        if answer is None:
            yield nodeid, PredictedTest(gpu, None, "the simulation did not run it")
        elif not answer.measured or answer.record is None:
            why = answer.problem or "it allocates nothing there"
            yield nodeid, PredictedTest(gpu, None, f"on a simulated {gpu}: {why}")
        else:
            yield nodeid, PredictedTest(gpu, answer.record.measurement)
