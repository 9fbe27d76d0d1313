"""The needs of tests by simulation, before they run on a GPU: with ``predict=``, or to share it.

A test of unknown need runs alone once, while the other workers wait. Simulating it instead costs
another pytest process, some seconds of CPU time and no GPU time. So tests are simulated where
several workers would wait for several of them, once per run and host, and the results are kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.jsonfile import replace_file
from pytest_gpumem.report.pytest_reports import ARGUMENTS, without_group
from pytest_gpumem.values.prediction import PredictedTest

if TYPE_CHECKING:
    from pytest_gpumem.device.cuda import CudaDevice
    from pytest_gpumem.prediction.process import MachineResult

PATIENCE = 120.0
"""Seconds after which the simulation starts no further test: the remaining ones run alone."""

SECONDS_KEPT = 86_400.0
"""Seconds for which a result stays in the folder for other workers of the run."""

_PREFIX = "foreseen-"


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

    def of_all(self, items: Iterable[pytest.Item], device: CudaDevice) -> dict[str, PredictedTest]:
        """Return the needs of those ``items`` that were simulated within :data:`PATIENCE`."""
        found = self._predicted({item.nodeid: item for item in items}, device, PATIENCE)
        # Tests that have not been run may still be requested later.
        self._known.update({nodeid: one for nodeid, one in found.items() if one.measurement})
        return found

    def _predicted(
        self, items: dict[str, pytest.Item], device: CudaDevice, seconds: float | None = None
    ) -> dict[str, PredictedTest]:
        from pytest_gpumem.prediction.process import Request, run_tests

        config, machine = self._config, device.machine
        # A worker receives pytest's arguments from the controller.
        given = getattr(config, "workerinput", {}).get(ARGUMENTS, config.invocation_params.args)
        seed = getattr(config.option, "randomly_seed", None)  # chosen by pytest-randomly
        names = [without_group(item.nodeid).partition("::")[2] for item in items.values()]
        request = Request(
            # Absolute, because the simulation runs in another working directory.
            tuple(f"{item.path}::{name}" for item, name in zip(items.values(), names, strict=True)),
            (machine,),
            options={"randomly_seed": seed} if isinstance(seed, int) else {},
            seconds=seconds,
        )
        try:
            answers = run_tests(request, list(map(os.fspath, given)), config.invocation_params.dir)
        except ValueError as error:
            unknown = PredictedTest(machine.model.name, None, f"it was not simulated: {error}")
            return dict.fromkeys(items, unknown)
        known = {answer.nodeid: answer for answer in answers}
        return {
            nodeid: _predicted(known.get(without_group(nodeid)), machine.model.name)
            for nodeid in items
        }


def _predicted(answer: MachineResult | None, gpu: str) -> PredictedTest:
    if answer is None:
        return PredictedTest(gpu, None, "the simulation did not run it")
    if answer.measured and answer.record is not None:
        return PredictedTest(gpu, answer.record.measurement)
    why = answer.problem or "it allocates nothing there"
    return PredictedTest(gpu, None, f"on a simulated {gpu}: {why}")


def is_worth_it(unknown: int, workers: int) -> bool:
    """Return whether to simulate ``unknown`` tests for a run of ``workers``."""
    return workers > 1 and unknown >= 4  # fewer are run alone faster than a simulation starts


def simulated_once(
    folder: Path, run: str, simulate: Callable[[], Mapping[str, int]]
) -> dict[str, int]:
    """Return bytes by node id from ``simulate``, 0 for tests that cannot be simulated.

    The first worker of ``run`` calls it while it holds a lock in the ledger's ``folder``; the
    others wait for its result. If it is killed, the next one calls ``simulate``.
    """
    from filelock import FileLock

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    answer = folder / f"{_PREFIX}{run}.json"
    with FileLock(answer.with_suffix(".lock")):
        with suppress(OSError, ValueError):
            found: dict[str, int] = json.loads(answer.read_bytes())
            return found
        for path in folder.glob(f"{_PREFIX}*"):  # of runs of earlier days
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - SECONDS_KEPT:
                    path.unlink()
        found = dict(simulate())
        replace_file(answer, json.dumps(found).encode("ascii"))
    return found
