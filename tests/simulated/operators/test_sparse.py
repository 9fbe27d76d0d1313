"""Sparse COO tensors: number of elements, values and memory are those of CUDA's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@pytest.fixture(params=[False, True], ids=["shapes", "real_values"])
def gpu(request: pytest.FixtureRequest) -> Any:
    with simulate("A100-40GB", real_values=request.param) as simulated:
        yield simulated


def on_cuda() -> Tensor:
    """Return a COO tensor: two elements at one index and one at another."""
    indices = torch.tensor([[0, 2, 2], [1, 0, 0]], device="cuda")
    return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0], device="cuda"), (3, 3))


DENSE = [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]]


def test_values_of_sparse_operators_equal_the_cpus(gpu: Any) -> None:
    sparse, dense = on_cuda(), torch.ones(3, 3, device="cuda")
    merged = sparse.coalesce()
    assert (merged.is_cuda, merged._nnz(), merged.is_coalesced()) == (True, 2, True)
    assert (merged.indices().tolist(), merged.values().tolist()) == ([[0, 2], [1, 0]], [1.0, 5.0])
    assert sparse.to_dense().tolist() == merged.to_dense().tolist() == DENSE
    assert (dense + sparse)[2].tolist() == [6.0, 1.0, 1.0]
    assert dense.add_(merged, alpha=2)[2].tolist() == [11.0, 1.0, 1.0]
    assert dense.sparse_mask(merged).values().tolist() == [3.0, 11.0]
    assert (sparse * 2)._values().tolist() == [2.0, 4.0, 6.0]
    assert (-sparse)._values().tolist() == [-1.0, -2.0, -3.0]
    assert sparse.div_(2)._values().tolist() == [0.5, 1.0, 1.5]
    assert sparse.sum().item() == 3.0
    assert (sparse + merged)._values().tolist() == [0.5, 1.0, 1.5, 1.0, 5.0]
    assert sparse.copy_(merged)._nnz() == 2
    assert sparse.clone()._values().tolist() == [1.0, 5.0]


def test_infinities_in_sparse_tensors_are_found(gpu: Any) -> None:
    places = torch.zeros(1, 2, dtype=torch.long)
    for numbers, is_found in (([1.0, float("inf")], 1.0), ([1.0, 2.0], 0.0)):
        gradient = torch.sparse_coo_tensor(places, torch.tensor(numbers), (3,), device="cuda")
        found = torch.zeros(1, device="cuda")
        scale = torch.ones(1, device="cuda")
        torch._amp_foreach_non_finite_check_and_unscale_([gradient._values()], found, scale)
        assert found.item() == is_found


def test_a_conversion_keeps_the_number_of_elements(gpu: Any) -> None:
    half = on_cuda().half()
    assert (half.dtype, half.is_coalesced()) == (torch.half, False)
    assert half._values().tolist() == [1.0, 2.0, 3.0]
    assert half.coalesce().to("cuda", torch.float64).to_dense().tolist() == DENSE


def test_a_dense_tensor_becomes_sparse(gpu: Any) -> None:
    sparse = torch.tensor(DENSE, device="cuda").to_sparse()
    assert (sparse.is_coalesced(), sparse._indices().tolist()) == (True, [[0, 2], [1, 0]])
    assert sparse._values().tolist() == [1.0, 5.0]
    again = sparse.new(sparse._indices(), sparse._values(), sparse.shape)
    assert again.to_dense().tolist() == DENSE
    assert sparse.new()._nnz() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_elements_of_one_index_are_summed(gpu: Any, dtype: torch.dtype) -> None:
    # Rows of a table, and the CPU's result.
    rows = torch.tensor([3, 1, 3, 0])
    numbers = torch.arange(8.0).view(4, 2).to(dtype)
    expected = torch.sparse_coo_tensor(rows[None], numbers, (5, 2)).coalesce()
    merged = torch.sparse_coo_tensor(rows[None].cuda(), numbers.cuda(), (5, 2)).coalesce()
    assert merged._indices().tolist() == expected._indices().tolist()
    assert merged._values().tolist() == expected._values().tolist()


def gradient_of(table: nn.Embedding) -> Tensor:
    assert table.weight.grad is not None
    return table.weight.grad


def test_gradients_of_a_table_are_added_one_after_the_other(gpu: Any) -> None:
    table = nn.Embedding(10, 2, sparse=True).cuda()
    tokens = torch.tensor([1, 1, 2], device="cuda")
    (table(tokens).sum() + table(tokens).sum()).backward()
    assert gradient_of(table)._nnz() == 6
    table(tokens).sum().backward()
    assert gradient_of(table)._nnz() == 9
    assert gradient_of(table).coalesce()._values().tolist() == [[6.0, 6.0], [3.0, 3.0]]


def test_the_first_sparse_gradient_is_kept_without_a_copy() -> None:
    with simulate("A100-40GB") as gpu:
        table = nn.Embedding(1000, 128, sparse=True).cuda()
        tokens = torch.arange(100, device="cuda")
        before = gpu.allocated
        table(tokens).square().sum().backward()
        # 100 rows; their indices are the tokens themselves.
        assert gradient_of(table)._nnz() == 100
        assert gpu.allocated - before == 100 * 128 * 4


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], float]] = [
    (torch.optim.SGD, 0.6),  # two steps of 0.1 times two
    (torch.optim.Adagrad, 1 - 0.1 - 0.1 / 2**0.5),
    (torch.optim.SparseAdam, 0.8),
]


@pytest.mark.parametrize(("kind", "expected"), OPTIMIZERS)
def test_optimizers_step_sparse_tables(
    gpu: Any, kind: type[torch.optim.Optimizer], expected: float
) -> None:
    table = nn.Embedding(4, 2, sparse=True).cuda()
    with torch.no_grad():
        table.weight.fill_(1.0)
    optimizer = kind(table.parameters(), lr=0.1)  # type: ignore[call-arg]  # all three have one
    tokens = torch.tensor([1, 1], device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        table(tokens).sum().backward()
        optimizer.step()
    assert table.weight[0].tolist() == [1.0, 1.0]
    assert table.weight[1, 0].item() == pytest.approx(expected, abs=1e-6)


def test_coalesce_allocates_indices_three_times_and_thrusts_memory() -> None:
    with simulate("A100-40GB") as gpu:
        rows = torch.arange(1000, device="cuda") // 2
        table = torch.sparse_coo_tensor(rows[None], torch.ones(1000, 16, device="cuda"), (600, 16))
        start = len(gpu.trace)
        merged = table.coalesce()
        taken = [event.size for event in gpu.trace[start:] if event.action == "alloc"]
        # Indices, their order, where each begins; keys, places and tiles; then the rows.
        assert taken[:3] == [8000] * 3
        assert taken[3] == 8192 + 8192 + 256 + 255
        assert taken[5:] == [500 * 16 * 4]
        assert merged._nnz() == 500
        assert any("Thrust's workspace for coalesce" in note for note in gpu.notes)


def test_coalesce_of_unknown_indices_is_refused() -> None:
    with simulate("A100-40GB"):
        rows = torch.randint(9, (1, 100_000), device="cuda")
        table = torch.sparse_coo_tensor(rows, torch.ones(100_000, device="cuda"), (9,))
        with pytest.raises(UnknownValueError, match=r"coalesce\(\) at .* reads a value"):
            table.coalesce()
        assert table.sum().is_cuda


@pytest.mark.parametrize(
    "use",
    [
        lambda sparse: sparse @ sparse,
        lambda sparse: sparse * sparse,
        lambda sparse: torch.isinf(sparse),
        lambda sparse: torch.add(sparse, sparse, out=sparse),
        lambda sparse: torch.ones(3, 3, device="cuda").to_sparse(1),
        lambda sparse: torch.ones(3, 3, device="cuda").to_sparse(layout=torch.sparse_csr),
        lambda sparse: sparse.copy_(torch.ones(3, 3, device="cuda")),
    ],
)
def test_other_sparse_operators_are_refused_by_name(use: Any) -> None:
    with (
        simulate("A100-40GB"),
        pytest.raises(UnsupportedOperatorError, match="cannot run on a simulated GPU"),
    ):
        use(on_cuda())


def test_a_dense_tensor_is_not_added_to_a_sparse_one() -> None:
    with simulate("A100-40GB"):
        sparse, dense = on_cuda(), torch.ones(3, 3, device="cuda")
        with pytest.raises(RuntimeError, match=r"Use add\(dense, sparse\)"):
            torch.add(sparse, dense)


def test_values_get_gradients_of_what_they_were_put_into(gpu: Any) -> None:
    # Two of the numbers are at one index. Derived by hand.
    indices = torch.tensor([[0, 1, 2, 0], [2, 0, 3, 2]], device="cuda")
    factors = torch.arange(8.0, device="cuda").view(4, 2)
    cases: list[tuple[Callable[[Tensor], Tensor], list[float]]] = [
        (lambda one: one.to_dense().square().sum(), [10.0, 4.0, 6.0, 10.0]),
        (lambda one: torch.sparse.mm(one, factors).sum(), [9.0, 1.0, 13.0, 9.0]),
    ]
    for use, expected in cases:
        values = torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda", requires_grad=True)
        made = torch.sparse_coo_tensor(indices, values, (4, 4))
        (found,) = torch.autograd.grad(use(made), values)
        assert found.tolist() == expected


def test_a_sparse_mask_hashes_the_elements(gpu: Any) -> None:
    # The events of torch 2.15's own code on the dry device.
    indices = torch.tensor([[0, 1, 2], [2, 0, 3]], device="cuda")
    values = torch.ones(3, 50, device="cuda")
    whole = torch.sparse_coo_tensor(indices, values, (10, 10, 50)).coalesce()
    mask = torch.sparse_coo_tensor(indices, values, (10, 10, 50))
    began = len(gpu.trace)
    kept = whole.sparse_mask(mask)
    events = [
        one.size if one.action == "alloc" else -one.size
        for one in gpu.trace[began:]
        if one.action in ("alloc", "free_requested")
    ]
    assert events == [24, 24, 48, 8, -8, 48, 600, -48, -24, -24]
    assert kept._nnz() == 3
    with pytest.raises(UnsupportedOperatorError, match="not coalesced"):
        mask.sparse_mask(whole)
