from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import quick
from tests.pytest_project import Project

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parent.parent

# Hundreds of tests run pytest: without bytecode, each run compiles the package anew, for seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_OF_EVERY_RUN = (
    *("sqlite3", "filelock", "pytest_gpumem.device.simulated"),
    *(f"pytest_gpumem.baseline.{name}" for name in ("collected", "renamed", "unused", "update")),
    *(f"pytest_gpumem.report.{name}" for name in ("failures", "header", "remarks", "terminal")),
    *(
        f"pytest_gpumem.session.{name}"
        for name in ("ahead", "affinity", "faults", "hooks", "item", "judge", "learning")
    ),
    *(
        f"pytest_gpumem.session.{name}"
        for name in ("measuring", "missing", "progress", "rerun", "second_run", "watched")
    ),
)


def pytest_collection_finish() -> None:
    # Thousands of tests and all of torch: each of many full collections would go through them.
    gc.freeze()


@pytest.fixture
def thawed() -> Iterator[None]:
    """Let the collector know what there was before the first test, too."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(scope="session")
def _loaded_torch() -> None:
    # pytester takes what a test imported out of sys.modules: torch cannot be imported twice, and
    # all else would be imported in each of hundreds of runs.
    import torch._dynamo  # noqa: F401

    for name in _OF_EVERY_RUN:
        importlib.import_module(name)

    gc.freeze()


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
def forked_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is started as ``sys.executable`` have torch already."""
    monkeypatch.setattr(sys, "executable", str(quick()))
    # It starts a thread in every run, and with several threads torch's compilers are imported.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:rerunfailures")


@pytest.fixture
def forgotten_imports(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let what a command imports of a test's folder go with the test, as with its process."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(folder):
            del sys.modules[name]


@pytest.fixture
def plain_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One workspace of cuBLAS for each thread, which stays: as in every release but by settings."""
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
