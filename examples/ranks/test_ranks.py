"""The memory limit of one rank of eight, and of the worst of several."""

from __future__ import annotations

import pytest

from examples.ranks.training import step


@pytest.mark.gpumem(ranks=8, gpu="H100", max="1.2GiB", phases={"forward": "1GiB"}, baseline=True)
def test_step() -> None:
    step()


@pytest.mark.gpumem(ranks=64, rank="worst", gpu="H100", max="1GiB", baseline=False)
def test_step_of_the_worst_rank() -> None:
    step()
