"""Names that a simulated GPU patches: the number of torch's, and Python's with a reason."""

from __future__ import annotations

from typing import Any

import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.simulation import SimulatedGPU

MOST = 200
"""Attributes in a build without CUDA; one with CUDA has functions that this one lacks."""

MOST_OF_TORCH = 157
"""Attributes of torch besides those of ``torch._C``."""

OF_PYTHON = {
    "Thread.start": "a thread of the test uses the simulated GPU, too",
    "Thread.join": "an error of the thread is raised there",
    "ThreadPoolExecutor.submit": "a task uses the simulated GPU, too",
    "CDLL.__init__": "functions of a library with CUDA's kernels would end the process",
}


def replaced() -> list[tuple[Any, str]]:
    simulation = SimulatedGPU.machine("A100-40GB")[0].simulation
    lists = (
        simulation._patches,
        simulation._single_rank.patches,
        simulation.threads.exclusive.patches,
    )
    return [(owner, name) for patches in lists for owner, name, _ in patches.attributes]


def is_of_torch(owner: Any) -> bool:
    return str(getattr(owner, "__module__", None) or owner.__name__).startswith("torch")


def test_each_patched_name_of_python_has_a_reason() -> None:
    found = {f"{owner.__name__}.{name}" for owner, name in replaced() if not is_of_torch(owner)}
    assert found == set(OF_PYTHON)


def test_the_number_of_patched_names_of_torch_does_not_grow() -> None:
    found = [row for row in replaced() if is_of_torch(row[0])]
    assert len([row for row in found if row[0] is not torch._C]) <= MOST_OF_TORCH
    assert len(found) <= MOST or torch.backends.cuda.is_built()


def test_a_method_restored_by_a_tool_is_restored_by_the_simulation() -> None:
    # torch.distributed._tools.mem_tracker patches it for a time.
    kind: Any = torch.UntypedStorage
    for _ in range(2):
        with simulate("T4"):
            kind.resize_ = kind.resize_
            x = torch.empty(1 << 20, device="cuda")
            x.untyped_storage().resize_(0)
            assert torch.cuda.memory_allocated() == 0
    assert "resize_" not in vars(kind)
