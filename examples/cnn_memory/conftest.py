from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_gpumem import simulate
from pytest_gpumem.simulating import SimulatedRun


@pytest.fixture
def t4() -> Iterator[SimulatedRun]:
    """Simulate one GPU and one torch release, so that workspaces are the same on every machine."""
    with simulate("T4", torch_version="2.6", alloc_conf="", cublas_workspace_config="") as gpu:
        yield gpu
