"""``--gpumem-artifacts``: snapshots of failing tests; ``--gpumem-history``: with their stacks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.pytest_project import Project

TESTS = """
    @pytest.mark.gpumem(max="1KiB")
    def test_too_large():
        torch.empty(4096, dtype=torch.uint8, device="cuda")

    @pytest.mark.gpumem
    def test_fails():
        held = torch.empty(4096, dtype=torch.uint8, device="cuda")
        assert held is None

    @pytest.mark.gpumem
    def test_skips():
        torch.empty(1, device="cuda")
        pytest.skip("in the body")

    @pytest.mark.gpumem
    def test_passes():
        torch.empty(1, device="cuda")
"""


def snapshots(project: Project) -> dict[str, Any]:
    return {
        path.name: pickle.loads(path.read_bytes())
        for path in (project.path / "artifacts").iterdir()
    }


@pytest.mark.parametrize("history", [(), ("--gpumem-history",)], ids=["default", "history"])
def test_a_failing_test_leaves_a_snapshot(project: Project, history: tuple[str, ...]) -> None:
    project.write(test_fail=TESTS)

    project.run("--gpumem-artifacts=artifacts", *history)

    found = snapshots(project)
    assert len(found) == 2
    too_large = next(content for name, content in found.items() if "too_large" in name)
    (trace,) = too_large["device_traces"]
    assert 4096 in [event["size"] for event in trace if event["action"] == "alloc"]
    assert set(too_large) >= {"segments", "device_traces", "allocator_settings"}


def test_no_snapshot_is_written_without_a_folder(project: Project) -> None:
    project.write(test_fail=TESTS)

    project.run()

    assert not (project.path / "artifacts").exists()


def test_a_folder_that_cannot_be_written_is_reported(project: Project) -> None:
    project.write(test_fail=TESTS)
    (project.path / "artifacts").write_text("a file")

    result = project.run("--gpumem-artifacts=artifacts")

    result.assert_outcomes(passed=1, failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        ["*test_fail.py::test_too_large: its snapshot cannot be written: *"]
    )
