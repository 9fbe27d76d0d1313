"""Results of CUDA graphs: the next run of a graph overwrites their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The CUDA Graph is empty:UserWarning"
    ),  # Inductor's first one
]

OVERWRITTEN = "tensor output of CUDAGraphs that has been overwritten by a subsequent run"


def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


@pytest.fixture(scope="module")
def results() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return the results of two runs of one graph, both held."""
    with simulate("A100-40GB", compile="always"):
        run = torch.compile(cube, mode="reduce-overhead")
        x = torch.ones(4, device="cuda")
        yield run(x), run(x)


Results = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize(
    "read",
    [
        lambda result: result + result,
        lambda result: result.detach() * 2,
        lambda result: result.cpu(),
        lambda result: result.view(2, 2),
        lambda result: result.zero_(),
        lambda result: torch.ones(4, device="cuda").copy_(result),
        lambda result: result.sum().backward(),
        lambda result: result.tolist(),
        lambda result: result.data_ptr(),
        lambda result: result.untyped_storage().data_ptr(),
        lambda result: torch.ops.higher_order.graphsafe_run_with_rng_state(
            torch.ops.aten.mul.Tensor,
            result,
            result,
            rng_state=torch.cuda.default_generators[0].graphsafe_get_state(),
        ),
    ],
)
def test_reading_an_overwritten_result_is_an_error(
    results: Results, read: Callable[[torch.Tensor], Any]
) -> None:
    with pytest.raises(RuntimeError, match=OVERWRITTEN) as told:
        read(results[0])
    assert "return x * x * x" in str(told.value)


def test_metadata_of_an_overwritten_result_may_be_read(results: Results) -> None:
    overwritten, _ = results
    assert (overwritten.shape, overwritten.dtype, overwritten.is_cuda) == (
        (4,),
        torch.float32,
        True,
    )
    assert torch.zeros_like(overwritten).shape == overwritten.new_empty(4).shape


def test_the_last_result_may_be_read(results: Results) -> None:
    _, last = results
    assert (last + last).shape == last.view(4).shape
    assert last.data_ptr()


def test_a_storage_may_be_read_once_it_has_its_own_memory() -> None:
    """A resize gives it memory; the function that sets the error text is part of CUDA builds."""
    inside: Any = torch._C
    with simulate("A100-40GB"):
        x = torch.ones(4, device="cuda")
        storage = x.untyped_storage()
        storage.resize_(0)
        inside._set_storage_data_ptr_access_error_msg(storage._cdata, "storage is dead")
        with pytest.raises(RuntimeError, match="storage is dead"):
            storage.data_ptr()
        inside._clear_storage_data_ptr_access_error_msg(storage._cdata)
        storage.resize_(16)
        assert storage.data_ptr()
        inside._set_storage_data_ptr_access_error_msg(storage._cdata, "storage is dead")
        del x, storage
        assert torch.ones(4, device="cuda").data_ptr()  # another may have the old one's address
