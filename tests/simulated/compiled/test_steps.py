"""Steps of CUDA graphs, marked by ``cudagraph_mark_step_begin``."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem import simulate

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]


def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@pytest.mark.parametrize("own", [True, False])
def test_only_steps_marked_in_the_same_simulation_count(own: bool) -> None:
    """Within a marked step, results of all runs stay valid."""
    with simulate("A100-40GB", compile="eager"):
        torch.compiler.cudagraph_mark_step_begin()
    with simulate("A100-40GB", compile="always"):
        run = torch.compile(cube, mode="reduce-overhead")
        x = torch.ones(4, device="cuda")
        if own:
            torch.compiler.cudagraph_mark_step_begin()
        first, _ = run(x), run(x)
        if own:
            assert (first + first).is_cuda
        else:
            with pytest.raises(RuntimeError, match="has been overwritten by a subsequent run"):
                first + first
