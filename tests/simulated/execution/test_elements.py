"""Foreach operators run once for each kind of element: an optimisation without visible effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.execution.computing import run_by_kinds
from pytest_gpumem.simulated.execution.shapes import Shapes
from pytest_gpumem.simulated.machine.storages import Storages

aten = torch.ops.aten
KIB = 1024


def lengths_run(func: Any, *args: Any, **kwargs: Any) -> tuple[list[int], Any]:
    """Return the number of elements of each run of ``func``, and the results."""
    lengths = []

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lengths.append(len(args[0]))
        return func(*args, **kwargs)

    key, _ = Shapes(Storages(), lambda tensor: "meta").find(func, args, kwargs)
    return lengths, run_by_kinds(run, key, args, kwargs)


def on_meta(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=dtype, device="meta") for size in sizes]


def test_each_kind_of_element_is_run_once() -> None:
    lengths, results = lengths_run(aten._foreach_sqrt.default, on_meta(3, 4, 3, 3, 4))
    assert lengths == [2]
    assert [result.shape for result in results] == [(3,), (4,), (3,), (3,), (4,)]
    assert len({result.untyped_storage()._cdata for result in results}) == 5


def test_a_kind_combines_the_elements_of_all_lists() -> None:
    half = on_meta(3, dtype=torch.float16)
    assert lengths_run(aten._foreach_mul.List, on_meta(3, 3, 3), on_meta(3, 3) + half)[0] == [2]
    numbers = [0.5, 2, 0.25]  # only their types matter
    assert lengths_run(aten._foreach_add_.ScalarList, on_meta(3, 3, 3), numbers) == ([2], None)


@pytest.mark.parametrize(
    ("func", "others"),
    [
        (aten._foreach_addcdiv.Tensor, (on_meta(3, 3), on_meta(3, 3), torch.ones(2))),
        (aten._foreach_sqrt.default, ()),
    ],
)
def test_operators_that_mix_elements_run_on_whole_lists(func: Any, others: tuple[Any, ...]) -> None:
    elements = on_meta(3, 3) if others else on_meta(3, 4)
    assert lengths_run(func, elements, *others)[0] == [2]


def test_every_result_has_a_block_of_its_own() -> None:
    with simulate("T4") as gpu:
        tensors = [torch.empty(KIB * size, device="cuda") for size in (1, 2, 1, 1)]
        before = len(gpu.trace)
        results = torch._foreach_neg(tensors)
        sizes = [event.size for event in gpu.trace[before:] if event.action == "alloc"]
        addresses = {result.data_ptr() for result in results}
    assert sizes == [4 * KIB, 8 * KIB, 4 * KIB, 4 * KIB]
    assert len(addresses) == 4


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: torch._foreach_add([x, x, x], [x, x]),
        lambda x, y: torch._foreach_add_([x, x, x], [x, x, y]),
        lambda x, y: torch._foreach_addcmul_([x, x], [x, x], [x, x], [1.0, 2.0, 3.0]),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    compute: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    with simulate("T4"), pytest.raises(RuntimeError):
        compute(torch.ones(3, device="cuda"), torch.ones(4, device="cuda"))
