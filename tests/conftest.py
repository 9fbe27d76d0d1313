from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pytest_project import Project

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def _loaded_torch() -> None:
    # pytester takes what a test imported out of sys.modules, and torch cannot be imported twice.
    import torch  # noqa: F401

    import pytest_gpumem.session.item
    import pytest_gpumem.simulated.simulation  # noqa: F401


@pytest.fixture
def project(
    _loaded_torch: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Project:
    """A user's project, on which pytest runs with this plugin."""
    for name in ("CI", "GITHUB_ACTIONS", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    return Project(pytester)


@pytest.fixture
def plain_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One workspace of cuBLAS for each thread, which stays: as in every release but by settings."""
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
