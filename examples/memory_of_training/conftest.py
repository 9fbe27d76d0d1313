from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.memory_of_training.experiments import Read, without_workspaces
from pytest_gpumem import simulate


@pytest.fixture
def recorded_gpu() -> Iterator[None]:
    """Simulate the GPU and the torch release of the recorded numbers."""
    with simulate("T4", torch_version="2.6", alloc_conf="", cublas_workspace_config=""):
        yield


@pytest.fixture
def tensors_alone() -> Read:
    """Return a reading of the tensors' bytes, which are the same on every GPU and torch."""
    before = without_workspaces()
    return lambda: without_workspaces() - before
