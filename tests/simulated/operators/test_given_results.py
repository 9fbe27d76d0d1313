"""Operators with ``out``: their other allocations, as of torch's own code on the dry device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_gpumem.simulated.operators.tables import MAY_OVERRIDE

WORKSPACE = 8_519_680
"""cuBLAS's, before Hopper."""


@pytest.mark.parametrize(
    ("dtype", "call", "events"),
    [
        # The result of the operator without ``out``, which is copied.
        (torch.float32, lambda x, out: torch.dot(x[0], x[1], out=out), [4, 4, WORKSPACE, -4]),
        (torch.float32, lambda x, out: torch.view_copy(x, [256], out=out), [1024, 1024, -1024]),
        (torch.complex64, lambda x, out: torch.fft.fft(x, out=out), [1088, 2048, -1088]),
        (torch.complex64, lambda x, out: torch.fft.rfft(x, out=out), [1088, 1088, -1088]),
        (torch.float32, lambda x, out: torch.histc(x, 8, out=out), [32, 4, 4, -4, -4, 32, -32]),
        (
            torch.float32,
            lambda x, out: torch.logsumexp(x, 1, out=out),
            [32, 32, 8, -8, -32, 1024, 32, -1024, -32],
        ),
        # No other allocation.
        (torch.int64, lambda x, out: torch.argmax(x, 1, out=out), [64]),
    ],
)
def test_an_out_variant_has_torchs_events(
    on: Any, dtype: torch.dtype, call: Callable[[Any, Any], Any], events: list[int]
) -> None:
    gpu = on(version="2.13")
    x = torch.ones(8, 32, device="cuda")
    out = torch.empty(0, dtype=dtype, device="cuda")
    assert gpu.of(lambda: call(x, out)) == events


@pytest.mark.parametrize(
    ("call", "events"),
    [
        (lambda x: x[0].cumsum_(0), [1023, -1023]),  # cub's counters
        (lambda x: x[0, 0].cumsum_(0), [4, -4]),  # a number fills itself with its copy
        (lambda x: x.ldexp_(x), [1024, 8, -8, -1024]),
        pytest.param(
            lambda x: x.mvlgamma_(2),
            [8, 2048, -8, 1024, -2048, -1024],
            marks=pytest.mark.skipif(torch.__version__ < "2.11", reason="2.6 frees another first"),
        ),
    ],
)
def test_in_place_calls_equal_torchs(
    on: Any, call: Callable[[Any], Any], events: list[int]
) -> None:
    gpu = on(version="2.13")
    x = torch.ones(8, 32, device="cuda") + 1
    assert gpu.of(lambda: call(x)) == events


def test_operators_with_several_out_arguments(on: Any) -> None:
    gpu = on()
    x = torch.ones(256, device="cuda")
    parts = [torch.empty(0, device="cuda") for _ in range(2)]
    assert gpu.of(lambda: torch.split_with_sizes_copy(x, [128, 128], out=parts)) == [
        512, 512, 88, -88,  # addresses and sizes of the blocks
    ]  # fmt: skip
    values, places = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.long, device="cuda")
    assert gpu.of(lambda: torch.topk(x, 4, out=(values, places))) == [16, 32]
    highest, places = torch.empty(0, device="cuda"), torch.empty(0, dtype=torch.long, device="cuda")
    assert gpu.of(lambda: torch.max(x.view(8, 32), 1, out=(highest, places))) == [32, 64]


def _statistics(x: torch.Tensor, out: Any) -> Any:
    weight = x[0, :8]
    given = (x.view(4, 8, -1), *[weight] * 4, True, 0.1, 1e-5)
    operator: Any = torch._native_batch_norm_legit
    operator(*given, out=out)


def _huber(x: torch.Tensor, out: Any) -> Any:
    torch.ops.aten.huber_loss.out(x, x, out=out)


@pytest.mark.skipif(not MAY_OVERRIDE, reason="torch 2.6 keeps its own kernels")
@pytest.mark.parametrize(
    ("call", "dtypes", "empty", "sized"),
    [
        (
            lambda x, out: torch.mode(x, 0, True, out=out),
            "fi", [128, 256, 1024, -1024], [1024, -1024],
        ),
        (lambda x, out: torch.geqrf(x, out=out), "ff", [1024, 32, 4, -4], [4, -4]),
        (
            lambda x, out: torch.linalg.eigh(x[:, :8], out=out),
            "ff", [256, 32, 4, 1, 1, -1, -1, -4], [4, 1, 1, -1, -1, -4],
        ),
        (_statistics, "fff", [32, 32, 1024], []),
        (_huber, "f", [1024, 4, -4], [4, -4]),
        (lambda x, out: torch.normal(x, x, out=out), "f", [4, 1, -1, -4, 1024], [4, 1, -1, -4]),
        (lambda x, out: torch.ops.aten.log_sigmoid.out(x, out=out), "f", [1024], []),
    ],
)  # fmt: skip
def test_results_are_given_empty_or_of_the_right_size(
    on: Any, call: Callable[[Any, Any], Any], dtypes: str, empty: list[int], sized: list[int]
) -> None:
    """Bytes of the dry device with torch 2.15."""
    gpu = on(version="2.15")
    x = torch.ones(8, 32, device="cuda")
    types = {"f": torch.float32, "i": torch.int64}
    given = tuple(torch.empty(0, dtype=types[one], device="cuda") for one in dtypes)
    out = given if len(given) > 1 else given[0]
    assert gpu.of(lambda: call(x, out)) == empty
    assert gpu.of(lambda: call(x, out)) == sized


def test_matrix_rank_writes_out_under_a_dispatch_mode(on: Any) -> None:
    on()
    rank = torch.empty(0, dtype=torch.long, device="cuda")
    torch.linalg.matrix_rank(torch.ones(8, 32, device="cuda"), out=rank)
    assert rank.shape == ()


def test_a_number_of_the_host_may_come_first(on: Any) -> None:
    gpu = on()
    x, number = torch.ones(30, 20, device="cuda"), torch.tensor(2.0)
    given = torch.empty_like(x)
    for operator in (torch.add, torch.mul, torch.pow):
        assert gpu.of(lambda operator=operator: operator(number, x, out=given)) == []
    assert torch.add(number, torch.ones(2), out=torch.empty(2)).tolist() == [3.0, 3.0]
