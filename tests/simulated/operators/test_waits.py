"""Operators in which the host waits, by torch 2.15 on the dry device.

A wait ends what other streams do with freed memory, and is an error under torch's debug mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate

KIB = 1 << 10

WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "argwhere": torch.argwhere,
    "bincount": lambda x: x[0].long().bincount(),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT),
    "ctc_loss": lambda x: torch.ctc_loss(x[:, None].log_softmax(-1), x[:1, :2].long(), (8,), (2,)),
    "cumprod backward": lambda x: torch.autograd.grad(
        x.requires_grad_().cumprod(0).sum(), x, materialize_grads=True
    ),
    "eigh": lambda x: torch.linalg.eigh(x),
    "histc of all": lambda x: x.histc(5),
    "index of the host": lambda x: x[torch.tensor([1, 2])],
    "index_put from the host": lambda x: x.index_put_((x[0].long(),), torch.tensor(1.0)),
    "index_put by a sum": lambda x: x.index_put_((torch.tensor([1]),), x[0] * 2, accumulate=True),
    "index_fill": lambda x: x.index_fill(0, x[0].long(), x[0, 0]),
    "inv": torch.linalg.inv,
    "list of indices": lambda x: x[[1, 2]],
    "lu_factor": torch.linalg.lu_factor,
    "mask": lambda x: x[x > 0],
    "masked_fill": lambda x: x.masked_fill(x > 0, x[0, 0]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "matrix_rank": torch.linalg.matrix_rank,
    "repeat_interleave": lambda x: x.repeat_interleave(x[0].long(), 0),
    "searchsorted": lambda x: torch.searchsorted(x, x, sorter=x.argsort()),
    "segment_reduce": lambda x: torch.segment_reduce(x[0], "sum", lengths=x[0].long()),
    "solve": lambda x: torch.linalg.solve(x, x),
    "svdvals": torch.linalg.svdvals,
    "unique": torch.unique,
    "where": lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
    "zero points": lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.ones(8, device="cuda"), torch.zeros(8, dtype=torch.int32, device="cuda"), 0, 0, 9
    ),
}
NOT_WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "bucketize": lambda x: torch.bucketize(x, x[0]),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x),
    "clip_grad_norm_": lambda x: nn.utils.clip_grad_norm_([x], 1.0),
    "histc of a range": lambda x: x.histc(5, 0, 1),
    "index": lambda x: x[x[0].long()],
    "index_put": lambda x: x.index_put_((x[0].long(),), x * 2, accumulate=True),
    "inv_ex": torch.linalg.inv_ex,
    "lu_solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(x)[:2], x),
    "mask from the host": lambda x: x.masked_fill(x > 0, torch.tensor(0.0)),
    "median": torch.median,
    "multinomial": lambda x: x.multinomial(2),
    "number": lambda x: torch.where(x > 0, x, 0.0),
    "number of an item": lambda x: x.__setitem__(x[0].long(), 2.0),
    "qr": torch.linalg.qr,
    "quantile": lambda x: x.quantile(0.5),
    "randperm": lambda x: torch.randperm(9, device="cuda"),
    "repeat_interleave to a size": lambda x: x.repeat_interleave(x[0].long(), 0, output_size=8),
    "sort": torch.sort,
    "topk": lambda x: x.topk(2),
}


def pending() -> int:
    """Return the bytes that wait for another stream."""
    torch.empty(1, device="cuda")  # the allocator looks at streams
    stats = torch.cuda.memory_stats()
    return int(stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"])


@pytest.mark.parametrize("name", [*WAITING, *NOT_WAITING])
def test_the_host_waits(name: str) -> None:
    with simulate("A100-40GB", real_values=True):
        x = torch.eye(8, device="cuda")
        side = torch.cuda.Stream()
        used = torch.empty(64 * KIB, dtype=torch.uint8, device="cuda")
        used.record_stream(side)
        del used
        torch.cuda.current_stream().wait_stream(side)
        assert pending() == 64 * KIB
        result = {**WAITING, **NOT_WAITING}[name](x)
        assert pending() == (0 if name in WAITING else 64 * KIB)
        del result


@pytest.mark.parametrize("name", WAITING)
def test_the_wait_is_an_error_of_the_debug_mode(name: str) -> None:
    with simulate("A100-40GB", real_values=True):
        x = torch.eye(8, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            WAITING[name](x)


def test_a_library_waits_unseen() -> None:
    with simulate("A100-40GB", real_values=True):
        x = torch.eye(8, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        x.unique(dim=0)  # sorted by Thrust
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match="previous error during capture"),
            torch.cuda.graph(graph),
            pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        ):
            x.unique(dim=0)
