from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from _pytest.pytester import SysModulesSnapshot

from pytest_gpumem.device.host_gpus import REFUSED
from tests import distributions
from tests.forked import begin_to_serve, can_serve, is_quick, quick, quicken_workers, stop_forking

if TYPE_CHECKING:
    from tests.pytest_project import Project

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parent.parent

# Hundreds of tests run pytest: without bytecode, each run compiles the package anew, for seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Workers and what they start share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a CUDA build, too, the projects of most tests are simulated: tests/dry asks for the dry device.
os.environ[REFUSED] = "the tests' projects are simulated"

# Without a fixed language, argparse looks on the disk for a translation of each of its words.
os.environ["LANGUAGE"] = "C"

# Hypothesis fails no test for a slow example: the cores are shared.
hypothesis.settings.register_profile("usual", deadline=None)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
hypothesis.settings.load_profile("usual")

ONCE = {"readline", "zope", "mpmath", "numpy", "sympy", "torch", "triton"}
"""Packages that cannot be imported twice, or whose import takes seconds."""

# pytester takes what a run in this process imported out of sys.modules.
setattr(  # noqa: B010  # its name belongs to the class
    pytest.Pytester,
    "_Pytester__take_sys_modules_snapshot",
    lambda _: SysModulesSnapshot(lambda name: name.partition(".")[0] in ONCE),
)

LONG = ("test_terminal_output", "test_largest_batch", "test_docs")
"""Modules that run first, so that no worker is left with a long test at the end."""

MANY_MODULES = 50
MANY_TESTS = 100
"""New modules, and tests, after which the heap is frozen, so that collections skip its objects."""

_frozen_modules = _tests = 0

_OF_EVERY_RUN = """
    sqlite3 filelock pytest_gpumem.device.simulated
    pytest_gpumem.baseline.collected
    pytest_gpumem.report.failures pytest_gpumem.report.header pytest_gpumem.report.remarks
    pytest_gpumem.report.record pytest_gpumem.report.terminal
    pytest_gpumem.session.lifecycle pytest_gpumem.session.conclusion
    pytest_gpumem.session.used_fixtures pytest_gpumem.session.prepare
    pytest_gpumem.session.hooks pytest_gpumem.session.item
    pytest_gpumem.sharing.learned
    pytest_gpumem.session.rerun pytest_gpumem.sharing.watched
"""


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") and is_quick():
        stop_forking()
    # One server for all workers, which are its first forks.
    elif sys.platform == "linux" and config.getoption("numprocesses", None) and can_serve():
        begin_to_serve(at_once=True)
        quicken_workers()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests that search the whole heap first, before others fill it; then long ones."""
    logs = config.pluginmanager.get_plugin("logging-plugin")
    if logs and not any("caplog" in getattr(item, "fixturenames", ()) for item in items):
        # The plugin iterates over all loggers six times in each test, and torch has a thousand.
        config.pluginmanager.unregister(logs)
        logs.log_file_handler.close()
    items.sort(
        key=lambda item: (
            "thawed" not in getattr(item, "fixturenames", ()),
            item.path.stem not in LONG,
        )
    )


def pytest_collection_finish() -> None:
    _freeze()


def pytest_runtest_logfinish() -> None:
    global _tests
    _tests += 1
    # Modules that a test imported stay: libraries of models add a million objects.
    if len(sys.modules) > _frozen_modules + MANY_MODULES or _tests % MANY_TESTS == 0:
        _freeze()


def _freeze() -> None:
    """Exclude the objects of torch and of earlier tests from garbage collections."""
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


@pytest.fixture
def thawed() -> Iterator[None]:
    """Return frozen objects to the garbage collector, so that searches find old ones, too."""
    gc.unfreeze()
    yield
    gc.collect(1)  # the test's own objects; a full collection visits all of torch
    gc.freeze()


@pytest.fixture
def frozen() -> None:
    """Freeze all existing objects, so that a search of the collector finds the test's alone."""
    _freeze()


@pytest.fixture(scope="session")
def _loaded_torch() -> None:
    # Imported once for the hundreds of pytest runs in this process.
    import torch._dynamo  # noqa: F401

    for name in _OF_EVERY_RUN.split():
        importlib.import_module(name)

    _freeze()


@pytest.fixture
def remembered_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pytest runs in this process share the metadata of installed distributions."""
    monkeypatch.setattr("importlib.metadata.distributions", distributions.remembering)


class Unrecorded:
    """A hook recorder that records nothing: recording takes a tenth of a run.

    pytester sets ``ret`` to the exit status.
    """

    ret: int

    def __init__(self, plugins: pytest.PytestPluginManager) -> None: ...

    def getcalls(self, names: str) -> list[object]:
        return []


@pytest.fixture
def project(
    _loaded_torch: None,
    remembered_distributions: None,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> Project:
    """A user's project, on which pytest runs with this plugin."""
    from tests.pytest_project import Project  # imports torch, unlike a controller

    for name in ("CI", "GITHUB_ACTIONS", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(pytester, "make_hook_recorder", Unrecorded)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
    return Project(pytester)


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``sys.executable`` start forks of a process that has imported torch."""
    monkeypatch.setattr(sys, "executable", str(quick()))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:rerunfailures")  # it starts a thread in each run


@pytest.fixture
def forgotten_imports(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Remove modules that a command imported from a test's folder, as its process's end would."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
            del sys.modules[name]


@pytest.fixture
def plain_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set one lasting cuBLAS workspace for each thread, the same in every release of torch."""
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
