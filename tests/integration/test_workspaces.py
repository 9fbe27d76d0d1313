"""Sizes of cuBLAS workspaces that tests and fixtures set."""

from __future__ import annotations

import pytest
import torch

from tests.pytest_project import Project

needs_setters = pytest.mark.skipif(
    not hasattr(torch.backends.cuda, "cublas_workspace_size"), reason="came with torch 2.13"
)


def test_a_workspace_config_of_a_body_or_fixture_ends_with_the_test(project: Project) -> None:
    project.write(
        test_a="""
        def product():
            x = torch.ones(8, 8, device="cuda")
            return x @ x

        @pytest.fixture
        def small(monkeypatch):
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:1")

        @pytest.mark.gpumem
        def test_fixture(small):
            product()

        @pytest.mark.gpumem
        def test_body(monkeypatch):
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:3")
            product()

        @pytest.mark.gpumem
        def test_default():
            product()
        """
    )
    tests = project.report()
    peaks = {nodeid: test["measurement"]["peak_allocated"] for nodeid, test in tests.items()}
    assert peaks == {
        "test_a.py::test_fixture": 16_384 + 1024,
        "test_a.py::test_body": 3 * 16_384 + 1024,
        "test_a.py::test_default": 8_519_680 + 1024,
    }


@needs_setters
def test_a_workspace_size_of_a_shared_fixture_holds_for_its_tests(project: Project) -> None:
    project.write(
        test_a="""
        @pytest.fixture(scope="module")
        def small():
            torch.backends.cuda.cublas_workspace_size(16384)

        @pytest.mark.gpumem("32KiB")
        @pytest.mark.parametrize("number", [1, 2])
        def test_small(small, number):
            x = torch.ones(8, 8, device="cuda")
            x @ x
        """
    )
    project.run().assert_outcomes(passed=2)
