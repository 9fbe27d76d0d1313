"""Products of sparse matrices: their values, and the allocations of CUDA's functions in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnsupportedOperatorError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

INDICES = [[0, 2, 2, 1], [1, 0, 0, 3]]


def matrix(device: str, *, merged: bool) -> Tensor:
    """Return a matrix of three rows and four columns; one index is there twice unless merged."""
    sparse = torch.sparse_coo_tensor(torch.tensor(INDICES), torch.arange(1.0, 5.0), (3, 4))
    made = sparse.to(device)
    return made.coalesce() if merged else made


def products(device: str, *, merged: bool) -> list[Tensor]:
    sparse = matrix(device, merged=merged)
    dense = torch.arange(8.0).view(4, 2).to(device).requires_grad_()
    made = [
        torch.sparse.mm(sparse, dense),
        sparse @ dense,
        torch.addmm(torch.ones(2, device=device), sparse, dense, beta=2, alpha=3),
        torch.mv(sparse, torch.ones(4, device=device)),
        torch.ones(2, 3, device=device) @ sparse,
        sparse.t() @ torch.ones(3, 2, device=device),
        sparse.transpose(0, 1).to_dense(),
    ]
    torch.stack([one.pow(2).sum() for one in made]).sum().backward()
    assert dense.grad is not None
    return [one.detach().cpu() for one in (*made, dense.grad)]


@pytest.mark.parametrize("real_values", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_sparse_products_have_the_values_of_the_cpu(real_values: bool, merged: bool) -> None:
    expected = products("cpu", merged=merged)
    with simulate("T4", real_values=real_values):
        found = products("cuda", merged=merged)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_a_product_converts_to_compressed_rows_and_columns(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    sparse = matrix("cuda", merged=True)
    dense = torch.ones(4, 2, device="cuda")
    zeros, result = 3 * 2 * 4, 3 * 2 * 4
    rows, of_each, columns = (3 + 1) * 4, 3 * 4, 3 * 4  # three elements, merged
    assert gpu.of(lambda: torch.sparse.mm(sparse, dense)) == [
        *(zeros, result, rows, of_each, -of_each, columns),
        *(result, -result, -columns, -rows),  # the result by columns, and back
        -zeros,
    ]


def test_a_dense_factor_by_columns_is_not_copied(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    sparse = matrix("cuda", merged=True)
    by_columns = torch.ones(200, 4, device="cuda").t()
    steps = torch.ones(4, 400, device="cuda")[:, ::2]  # of neither order
    copy = 4 * 200 * 4
    assert copy not in gpu.of(lambda: torch.sparse.mm(sparse, by_columns))
    assert copy in gpu.of(lambda: torch.sparse.mm(sparse, steps))


def test_a_transpose_is_a_copy_with_its_indices_exchanged(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    sparse = matrix("cuda", merged=True)
    indices, values, row = 2 * 3 * 8, 3 * 4, 3 * 8
    assert gpu.of(sparse.t) == [values, indices, row, -row]


def test_copies_take_values_first_and_conversions_indices(on: Any) -> None:
    """Events of torch 2.11.0+cu130 and 2.15.0+cu132."""
    gpu = on("A100-40GB")
    sparse = matrix("cuda", merged=True)
    host, indices, values = matrix("cpu", merged=True), 2 * 3 * 8, 3 * 4
    assert gpu.of(sparse.clone) == [values, indices]
    assert gpu.of(sparse.double) == [indices, 2 * values]
    assert gpu.of(host.cuda) == [indices, values]


@pytest.mark.parametrize("real_values", [False, True])
def test_other_products_are_refused_by_name(real_values: bool) -> None:
    with simulate("T4", real_values=real_values):
        sparse = matrix("cuda", merged=True)
        with pytest.raises(UnsupportedOperatorError, match=r"_sparse_sparse_matmul"):
            torch.mm(sparse, sparse.t())
        with pytest.raises(NotImplementedError, match="not implemented for 'Half'"):
            torch.sparse.mm(sparse.half(), torch.ones(4, 2, device="cuda", dtype=torch.half))
        with pytest.raises(RuntimeError, match="Expected dim 0 size 4, got 3"):
            torch.sparse.mm(sparse, torch.ones(3, 2, device="cuda"))


def test_a_note_names_the_missing_workspace_of_cusparse() -> None:
    with simulate("T4") as gpu:
        torch.sparse.mm(matrix("cuda", merged=True), torch.ones(4, 2, device="cuda"))
        assert any("cuSPARSE's workspace for a sparse product" in note for note in gpu.notes)
