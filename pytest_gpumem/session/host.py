"""The GPUs of the host that tests run on, and the refusal of a run before its first test.

Imported by every project with the plugin installed: modules that call the driver are imported on
use.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.measurement.nvml import NvmlReading
    from pytest_gpumem.options import Settings

REFUSAL = "gpumem_refusal"
"""Key of a pytest-xdist worker's input, and attribute of its collection's report: the reason why
tests cannot run on the GPU."""

SIZED = pytest.StashKey[str]()
"""The text in the header on the number of workers that ``-n auto`` stands for."""


class Host:
    """The driver's data on the GPUs, read once: by the process that starts workers for them."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings

    @property
    def described(self) -> list[str]:
        """The unusual properties of the GPUs and their workers, in clauses."""
        from pytest_gpumem.device.host_gpus import describe

        sized = self._config.stash.get(SIZED, None)
        return [*describe(self._gpus), *([sized] if sized else [])]

    @cached_property
    def refusal(self) -> str | None:
        """The reason why tests cannot run on the GPUs, ``None`` where they can."""
        if hasattr(self._config, "workerinput"):
            received: str | None = self._config.workerinput.get(REFUSAL)
            return received
        from pytest_gpumem.device.host_gpus import refusal

        workers = 1
        if self._config.getoption("dist", "no") != "no":
            specs = self._config.getoption("tx", [])
            local = [re.fullmatch(r"(?:(\d+)\*)?popen\b.*", spec) for spec in specs]
            workers = max(sum(int(one[1] or 1) for one in local if one), 1)
        return refusal(self._gpus, workers, placed=self._settings.share)

    def refuse(self, report: pytest.CollectReport, why: str) -> None:
        """Raise ``pytest.UsageError`` before any test, in a worker by way of its controller."""
        if not hasattr(self._config, "workerinput"):
            raise pytest.UsageError(why)
        report.outcome = "failed"
        report.longrepr = why
        report.result = []
        setattr(report, REFUSAL, True)

    @cached_property
    def _gpus(self) -> tuple[NvmlReading, ...]:
        from pytest_gpumem.device.host_gpus import host_gpus

        return host_gpus(self._settings.device)


def leave_if_refused(report: pytest.CollectReport) -> None:
    """Raise ``pytest.UsageError`` where a worker reports that its tests cannot run on the GPU."""
    if hasattr(report, REFUSAL) and "PYTEST_XDIST_WORKER" not in os.environ:
        raise pytest.UsageError(str(report.longrepr))
