"""``torch.compiler.set_stance``: stances that compile, skip or forbid recompilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpumem import simulate

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)

SET_STANCE: Any = torch.compiler.set_stance


class Counting:
    """A backend that counts its graphs and runs them unchanged."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def compiled(function: Any, backend: Any) -> Any:
    return torch.compile(function, backend=backend, dynamic=False)


def test_a_new_shape_fails_under_fail_on_recompile() -> None:
    with simulate("A100-40GB", compile="always"):
        count = Counting()
        run = compiled(lambda x: x.sin().cos(), count)
        run(torch.ones(8, device="cuda"))
        with SET_STANCE("fail_on_recompile"):
            assert run(torch.ones(8, device="cuda")).shape == (8,)
            with pytest.raises(RuntimeError, match="expected 8, actual 16"):
                run(torch.ones(16, device="cuda"))
        assert run(torch.ones(16, device="cuda")).shape == (16,)
        assert count.graphs == 2


@pytest.mark.parametrize(
    ("stance", "function", "graphs"),
    [  # a function for each: torch counts calls by file and line
        ("eager_then_compile", lambda x: x.sin().cos(), [0, 1, 2, 2]),
        # AOTAutograd's graph of the first call serves all calls of its shape.
        ("aot_eager_then_compile", lambda x: x.sin().tan(), [0, 0, 1, 1]),
    ],
)
def test_stances_that_wait_for_a_second_call_compile_once(
    stance: str, function: Any, graphs: list[int]
) -> None:
    """The counts are those of torch on the CPU."""
    with simulate("A100-40GB", compile="always") as gpu:
        count = Counting()
        run = compiled(function, count)
        compiled_so_far = []
        with SET_STANCE(stance):
            for size in (8, 8, 16, 16):
                run(torch.ones(size, device="cuda"))
                compiled_so_far.append(count.graphs)
        assert compiled_so_far == graphs
        assert gpu.notes == ()


def test_a_forced_backend_replaces_the_requested_one() -> None:
    """AOTAutograd's graphs are not fused, so both results are allocated: 1 MiB each."""
    with simulate("A100-40GB", compile="always") as gpu:
        run = compiled(lambda x: x.cos().sin(), "inductor")
        x = torch.ones(256, 1024, device="cuda")
        peaks = []
        for options in ({}, {"force_backend": "aot_eager"}):
            with SET_STANCE("default", **options):
                run(x)
                torch.cuda.reset_peak_memory_stats()
                before = gpu.allocated
                run(x)
            peaks.append((torch.cuda.max_memory_allocated() - before) // 2**20)
        assert peaks == [1, 2]
