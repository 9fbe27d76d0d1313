"""fit_batch: peaks as a linear function of the batch size, and the largest batch that fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.prediction.batch import fit_batch

MIB = 1 << 20


class Step:
    """A step that takes 100 MiB for the model and 3 MiB for each sample."""

    def __init__(self) -> None:
        self.model: torch.Tensor | None = None

    def __call__(self, batch: int) -> None:
        if self.model is None:
            self.model = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(batch * 3 * MIB, dtype=torch.uint8, device="cuda")


def test_a_line_is_fitted_and_the_largest_batch_is_confirmed() -> None:
    fit = fit_batch(Step(), [10, 20, 40], gpu="T4")
    assert (fit.model_bytes, fit.bytes_per_sample, fit.residual) == (100 * MIB, 3 * MIB, 0)
    assert fit.peaks == {10: 130 * MIB, 20: 160 * MIB, 40: 220 * MIB}
    # 15,102.06 MiB: 100 for the model, and 5,000 samples of 3 MiB.
    assert fit.largest == 5000
    assert str(fit) == "100.0 MiB + batch × 3.0 MiB; largest batch in 14.75 GiB: 5000"


def test_fit_batch_uses_the_current_simulation() -> None:
    with simulate("T4"):
        layer = nn.Linear(1024, 1024).cuda()

        def step(batch: int) -> None:
            layer(torch.ones(batch, 1024, device="cuda")).sum().backward()
            layer.zero_grad()

        fit = fit_batch(step, [64, 128, 256], largest=False)
    # Input and output; sum() does not keep the output, so its gradient takes its place.
    assert fit.bytes_per_sample == 2 * 1024 * 4
    assert fit.largest is None


def test_a_constant_peak_has_no_largest_batch() -> None:
    def step(batch: int) -> None:
        torch.empty(MIB, device="cuda")

    fit = fit_batch(step, [8, 16], gpu="T4")
    assert (fit.model_bytes, fit.bytes_per_sample, fit.largest) == (4 * MIB, 0, None)


@pytest.mark.parametrize("sizes", [[8], [8, 8], [], [0, 4]])
def test_fit_batch_needs_two_sizes(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="give at least two different batch sizes from 1 up"):
        fit_batch(Step(), sizes, gpu="T4")
