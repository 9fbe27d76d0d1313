"""Shapes remembered: what is made again must be what the operator would have returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_gpumem import simulate
from pytest_gpumem.simulated.execution.shapes import Shapes


def describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    return [describe(item) for item in value]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x + 1.5,
        lambda x: x.t() * 2,
        lambda x: x.sum(0, keepdim=True),
        lambda x: x.max(0),
        lambda x: x.to(torch.float16),
        lambda x: x > 0,
        lambda x: F.layer_norm(x, (6,)),
        lambda x: F.softmax(x, -1),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.ops.aten._unsafe_view(x, (6, 4)),
        lambda x: torch._foreach_add([x, x], 1),
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: F.conv2d(x.view(1, 1, 4, 6), x[:2, :2].reshape(1, 1, 2, 2)),
    ],
)
def test_the_second_result_looks_like_the_first_and_like_the_cpus(
    compute: Callable[[torch.Tensor], Any],
) -> None:
    with simulate("T4") as gpu:
        x = torch.ones(4, 6, device="cuda")
        before = len(gpu.trace)
        first = compute(x)
        middle = len(gpu.trace)
        second = compute(x)
        assert describe(first) == describe(second)
        allocations = [event.size for event in gpu.trace[before:middle] if event.action == "alloc"]
        again = [event.size for event in gpu.trace[middle:] if event.action == "alloc"]
        assert [size for size in allocations if size < 8_000_000] == again

    def without_device(described: Any) -> Any:
        return described[:3] if isinstance(described, tuple) else [*map(without_device, described)]

    on_cpu = compute(torch.ones(4, 6))
    assert without_device(describe(on_cpu)) == without_device(describe(second))


def test_arguments_that_compare_equal_are_told_apart_by_type() -> None:
    with simulate("T4"):
        x = torch.ones(3, dtype=torch.int64, device="cuda")
        assert (x + 1).dtype == torch.int64
        assert (x + 1.0).dtype == torch.float32
        assert (x + True).dtype == torch.int64


def test_default_dtype_is_part_of_the_question() -> None:
    with simulate("T4"):
        x = torch.ones(3, dtype=torch.int64, device="cuda")
        assert (x / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (x / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_in_place_operators_return_their_own_tensor() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(3, device="cuda")
        assert x.add_(1) is x
        assert x.add_(1) is x
        a, b = torch.ones(3, device="cuda"), torch.ones(4, device="cuda")
        for _ in range(2):
            torch._foreach_add_([a, b], 1)
        assert gpu.peak_allocated == 3 * 512


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0),
        lambda x: x.squeeze_(),
        lambda x: x.t_(),
        lambda x: x.transpose_(0, 1),
        lambda x: x.swapdims_(0, 1),
        lambda x: x.as_strided_((2,), (1,)),
    ],
)
def test_what_changes_a_tensors_own_shape_does_so_every_time(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    expected = describe(change(torch.ones(1, 6)))[:3]
    with simulate("T4"):
        for _ in range(3):
            assert describe(change(torch.ones(1, 6, device="cuda").abs()))[:3] == expected


def test_cpu_tensors_are_written_every_time() -> None:
    with simulate("T4"):
        x = [torch.zeros(2), torch.zeros(3)]
        for _ in range(3):
            torch._foreach_add_(x, 1)
        assert x[1].tolist() == [3.0, 3.0, 3.0]


def test_memory_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gpumem.simulated.execution.shapes.MOST_SHAPES", 5)
    with simulate("T4") as gpu:
        for size in range(1, 20):
            assert (torch.ones(size, device="cuda") + 1).shape == (size,)
        assert len(gpu._gpu.simulation.execution._shapes._known) <= 5


def test_complex_tensors_are_run_each_time() -> None:
    with simulate("T4"):
        x = torch.ones(4, dtype=torch.complex64, device="cuda")
        assert (x.conj() * x).dtype == torch.complex64
        assert (x * x).shape == (4,)


def test_numbers_of_foreach_operators_are_told_apart_by_type_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned: list[Any] = []
    with simulate("T4"):
        x = [torch.ones(4, dtype=torch.int32, device="cuda") for _ in range(3)]
        numbers: list[list[float]] = [[2, 3, 4], [2.0, 3.0, 4.0], [5, 6, 7], [5.0, 6.0, 7.0]]
        monkeypatch.setattr(Shapes, "learn", _counted(Shapes.learn, learned))
        dtypes = [torch._foreach_mul(x, each)[0].dtype for each in numbers]
    assert dtypes == [torch.int32, torch.float32, torch.int32, torch.float32]
    assert learned.count(torch.ops.aten._foreach_mul.ScalarList) == 2


def _counted(learn: Callable[..., None], learned: list[Any]) -> Callable[..., None]:
    def count(shapes: Shapes, key: Any, *rest: Any) -> None:
        learned.append(key[0])
        learn(shapes, key, *rest)

    return count
