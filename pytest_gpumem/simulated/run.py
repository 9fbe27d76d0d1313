"""``simulate()``: unmodified CUDA code on a machine with no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pytest_gpumem.simulated.device import SimulatedGPU


@contextmanager
def simulate(
    model: str = "A100-40GB",
    *,
    alloc_conf: str | None = None,
    torch_version: str | None = None,
    cublas_workspace_config: str | None = None,
) -> Iterator[SimulatedGPU]:
    """Run the body on a simulated GPU of ``model``; see :class:`SimulatedGPU`."""
    gpu = SimulatedGPU(
        model,
        alloc_conf=alloc_conf,
        torch_version=torch_version,
        cublas_workspace_config=cublas_workspace_config,
    )
    with gpu.active():
        yield gpu
