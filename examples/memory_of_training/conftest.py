from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.memory_of_training.experiments import Read, without_workspaces
from pytest_gpumem import simulate


@pytest.fixture
def recorded_gpu() -> Iterator[None]:
    """The kind of GPU, and the torch, that the recorded numbers come from."""
    with simulate("T4", torch_version="2.6", alloc_conf="", cublas_workspace_config=""):
        yield


@pytest.fixture
def tensors_alone() -> Read:
    """Read what the test's tensors take: the same bytes on every GPU, with every torch."""
    before = without_workspaces()
    return lambda: without_workspaces() - before
