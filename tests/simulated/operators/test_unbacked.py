"""Meta tensors that rules make for themselves are not taken for meta tensors of the user's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_gpumem import SimulatedRun, simulate

MATRICES = {
    "fft": torch.fft.fft,
    "rfft": torch.fft.rfft,
    "hfft": torch.fft.hfft,
    "solve": lambda x: torch.linalg.solve(x, x),
    "inverse": torch.linalg.inv,
    "lu_solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), x),
    "cholesky_inverse": torch.cholesky_inverse,
    "qr": torch.linalg.qr,
    "lstsq": lambda x: torch.linalg.lstsq(x.to(torch.complex64), x.to(torch.complex64)[:, :1]),
    "embedding": lambda x: torch.nn.functional.embedding(
        torch.zeros(3, dtype=torch.long, device="cuda"), x, max_norm=1.0
    ),
}


@pytest.mark.parametrize("operator", MATRICES.values(), ids=list(MATRICES))
def test_an_operator_changes_no_later_allocation(operator: Callable[[Tensor], object]) -> None:
    with simulate("A100-40GB") as gpu:
        x = torch.ones(4, 4, device="cuda")
        expected = of_a_quantile(gpu, x)
        operator(x)
        # native/Sorting.cpp (quantile): the 4 bytes of scalar_tensor(q) come first.
        assert of_a_quantile(gpu, x)[0] == 4
        assert of_a_quantile(gpu, x) == expected


def of_a_quantile(gpu: SimulatedRun, x: Tensor) -> list[int]:
    before = len(gpu.trace)
    torch.quantile(x, 0.5, dim=1)
    return [event.size for event in gpu.trace[before:] if event.action == "alloc"]
