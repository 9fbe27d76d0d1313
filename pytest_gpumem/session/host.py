"""The GPUs of the host that tests run on, and what refuses a run before its first test.

Imported by every project with the plugin installed: what asks the driver is imported on use.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_gpumem.measurement.nvml import NvmlReading
    from pytest_gpumem.options import Settings

REFUSAL = "gpumem_refusal"
"""Key of a pytest-xdist worker's input, and attribute of the report of what it collected: why
tests cannot run on the GPU."""

SIZED = pytest.StashKey[str]()
"""What a person reads of the number of workers that ``-n auto`` stands for."""


class Host:
    """What the driver says of the GPUs, asked once: by the process that starts workers for them."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self._config = config
        self._settings = settings

    @property
    def described(self) -> list[str]:
        """What is out of the ordinary about the GPUs and their workers, in clauses."""
        from pytest_gpumem.device.host_gpus import describe

        sized = self._config.stash.get(SIZED, None)
        return [*describe(self._gpus), *([sized] if sized else [])]

    @cached_property
    def refusal(self) -> str | None:
        """Why tests cannot run on the GPUs, ``None`` where they can."""
        if hasattr(self._config, "workerinput"):
            told: str | None = self._config.workerinput.get(REFUSAL)
            return told
        from pytest_gpumem.device.host_gpus import refusal

        return refusal(self._gpus, _local_workers(self._config), placed=self._settings.share)

    def tell(self, node: Any) -> None:
        """Let a worker of this host know, by its input, what it has to refuse."""
        if node.gateway.spec.popen:
            node.workerinput[REFUSAL] = self.refusal

    def refuse(self, report: pytest.CollectReport, why: str) -> None:
        """Let the run end before its tests, of which ``report`` has some on the GPU.

        Raises ``pytest.UsageError``, in a worker of pytest-xdist through the process that has
        started it.
        """
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
    """Raise ``pytest.UsageError`` where a worker says that its tests cannot run on the GPU."""
    if hasattr(report, REFUSAL) and "PYTEST_XDIST_WORKER" not in os.environ:
        raise pytest.UsageError(str(report.longrepr))


def _local_workers(config: pytest.Config) -> int:
    """How many processes of this host run tests."""
    if config.getoption("dist", "no") == "no":
        return 1
    found = [re.fullmatch(r"(?:(\d+)\*)?popen\b.*", spec) for spec in config.getoption("tx", [])]
    return max(sum(int(one[1] or 1) for one in found if one), 1)
