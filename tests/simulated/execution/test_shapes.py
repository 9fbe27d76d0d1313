"""Remembered shapes: a result made from memory must equal the operator's own result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem import simulate
from pytest_gpumem.simulated.execution import shapes
from pytest_gpumem.simulated.execution.runner import Runner
from pytest_gpumem.simulated.execution.shapes import NEW, Shapes
from pytest_gpumem.simulated.machine.storages import Storages


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
def test_a_remembered_result_has_the_layout_of_the_cpus_result(
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


def test_equal_arguments_of_different_types_are_told_apart() -> None:
    with simulate("T4"):
        x = torch.ones(3, dtype=torch.int64, device="cuda")
        assert (x + 1).dtype == torch.int64
        assert (x + 1.0).dtype == torch.float32
        assert (x + True).dtype == torch.int64


def test_the_default_dtype_is_part_of_the_key() -> None:
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
def test_operators_that_change_a_tensors_shape_are_always_run(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    expected = describe(change(torch.ones(1, 6)))[:3]
    with simulate("T4"):
        for _ in range(3):
            assert describe(change(torch.ones(1, 6, device="cuda").abs()))[:3] == expected


def test_writes_to_cpu_tensors_are_always_run() -> None:
    with simulate("T4"):
        x = [torch.zeros(2), torch.zeros(3)]
        for _ in range(3):
            torch._foreach_add_(x, 1)
        assert x[1].tolist() == [3.0, 3.0, 3.0]


def test_the_number_of_remembered_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_SHAPES", 5)
    known: dict[Any, Any] = {}
    monkeypatch.setattr(shapes, "_everywhere", known)
    with simulate("T4"):
        for size in range(1, 20):
            assert (torch.ones(size, device="cuda") + 1).shape == (size,)
    (of_this_torch,) = known.values()
    assert 0 < len(of_this_torch) <= 5


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the operators that are run, beginning with an empty memory of shapes."""
    names: list[str] = []
    kernel = Runner.run

    def noting(runner: Runner, func: Any, *args: Any, **options: Any) -> Any:
        names.append(func._schema.name.removeprefix("aten::"))
        return kernel(runner, func, *args, **options)

    monkeypatch.setattr(Runner, "run", noting)
    monkeypatch.setattr(shapes, "_everywhere", {})
    return names


def test_the_next_simulation_knows_the_shapes_of_torchs_operators(run: list[str]) -> None:
    for _ in range(2):
        with simulate("T4"):
            assert torch.ones(4, 6, device="cuda").sum(0).shape == (6,)
    assert run.count("sum") == 1


def test_shapes_are_remembered_by_release(run: list[str]) -> None:
    for version in ("2.6", "2.13"):
        with simulate("T4", torch_version=version):
            torch.ones(4, 6, device="cuda").sum(0)
    assert run.count("sum") == 2


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("zeros_like", torch.zeros_like),
        ("rand_like", lambda x: torch.rand_like(x, dtype=torch.float16)),
        ("new_full", lambda x: x.new_full((2, 3), 7)),
        ("empty_like", lambda x: torch.empty_like(x, memory_format=torch.channels_last)),
        ("randn", lambda x: torch.randn(x.shape, device=x.device)),
    ],
)
def test_results_of_factories_like_a_tensor_are_remembered(
    run: list[str], name: str, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    of_the_cpu = describe(make(torch.ones(2, 3, 4, 5)))[:3]
    with simulate("T4") as gpu:
        x = torch.ones(2, 3, 4, 5, device="cuda")
        made = [make(x) for _ in range(2)]
        assert [describe(each)[:3] for each in made] == [of_the_cpu] * 2
        assert gpu.allocated == sum(512 if each.nbytes <= 512 else 1024 for each in (x, *made))
    assert run.count(name) == 1


BY_ELEMENT: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x.exp(),
    lambda x, y: x + y,
    lambda x, y: x * y.sum(),
    lambda x, y: torch.where(x > 0, y, x),
    lambda x, y: x.clone(memory_format=torch.channels_last) if x.dim() == 4 else x.neg(),
    lambda x, y: (x > y).logical_not(),
    lambda x, y: x.add_(y),
]

SIZES = st.lists(st.integers(0, 3), min_size=1, max_size=4)


def test_shapes_derived_from_other_sizes_equal_the_operators_results() -> None:
    with simulate("T4"):
        _known_of_any_size()


@given(data=st.data())
def _known_of_any_size(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    order = data.draw(st.permutations(range(len(size))))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.int64]))
    is_permuted, is_other = data.draw(st.booleans()), data.draw(st.booleans())

    def operands() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(size, device="cuda")
        if is_permuted:
            x = x.permute(order)
        other = x.to(dtype) if is_other else torch.ones(x.shape[-1:], dtype=dtype, device="cuda")
        return x, other

    by_what_is_known = [describe(compute(*operands())) for compute in BY_ELEMENT]
    with patch.object(Shapes, "find", lambda *_: (None, NEW)):
        by_kernels = [describe(compute(*operands())) for compute in BY_ELEMENT]
    assert by_what_is_known == by_kernels


def test_scalar_tensors_of_the_host_are_keyed_by_device() -> None:
    shapes_of = Shapes(Storages(), lambda tensor: "cpu")
    add = torch.ops.aten.add.Tensor
    number, _ = shapes_of.find(add, (torch.ones(()), 2), {})
    assert number is not None
    assert shapes_of.find(add, (torch.ones(3), 2), {}) == (None, NEW)  # its values may decide


def test_an_operator_with_two_results_returns_both() -> None:
    with simulate("T4"):
        for size in ((3,), (4, 5)):
            found = torch.frexp(torch.ones(size, device="cuda"))
            assert [(each.shape, each.dtype) for each in found] == [
                (size, torch.float32),
                (size, torch.int32),
            ]


def test_operators_on_complex_tensors_are_always_run() -> None:
    with simulate("T4"):
        x = torch.ones(4, dtype=torch.complex64, device="cuda")
        assert (x.conj() * x).dtype == torch.complex64
        assert (x * x).shape == (4,)


def test_numbers_of_foreach_operators_are_keyed_by_type_alone(
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
