from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pytest_gpumem.report.pytest_reports import ATTRIBUTE
from tests.gpu.device import device_under_test, missing
from tests.pytest_project import Project

DEVICE = "--gpumem-device=cuda"


def pytest_pycollect_makemodule() -> None:
    """Skip the folder as a whole where there is no device."""
    if reason := missing():
        pytest.skip(reason, allow_module_level=True)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Make the device available, empty except for leaks of other tests."""
    gc.collect()
    with device_under_test():
        yield


class Records:
    """A plugin that collects the plugin's records from the reports of a run."""

    def __init__(self) -> None:
        self.by_test: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = getattr(report, ATTRIBUTE, None)
        if record is not None:
            self.by_test[report.nodeid.rpartition("::")[2]] = record


class CudaProject(Project):
    """A user's project whose tests run on the device that ``torch.cuda`` reports."""

    def run(
        self,
        *args: str,
        device: str = DEVICE,
        use: tuple[str, ...] = (),
        plugins: Sequence[object] = (),
    ) -> pytest.RunResult:
        """Run pytest in this process, on the device under test."""
        return super().run(*args, device=device, use=use, plugins=plugins)

    def records(self, *args: str) -> dict[str, dict[str, Any]]:
        """Run pytest and return each test's record, by name.

        Needs no JSON report, and so no jsonschema.
        """
        records = Records()
        self.run(*args, plugins=[records])
        return records.by_test


@pytest.fixture
def cuda(project: Project, pytester: pytest.Pytester) -> CudaProject:
    """A user's project on the device under test."""
    return CudaProject(pytester)
