"""``:`` among several indices made a view up to torch 2.8."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
WHOLE, PART = 8 * 16 * 32 * 4, 8 * 32 * 4


@pytest.mark.parametrize(
    ("version", "filled"),
    [
        pytest.param("2.8", [PART, WHOLE, WHOLE], id="2.8"),
        pytest.param("2.9", [WHOLE], id="2.9", marks=pytest.mark.skipif(_OLD, reason="is older")),
    ],
)
def test_backward_fills_a_gradient_for_every_view(on: Any, version: str, filled: list[int]) -> None:
    # NiuHuangxiaozi/assignment2-systems: logits[:, -1, :] in torch 2.6.
    gpu = on("A100-40GB", version)
    x = torch.randn(8, 16, 32, device="cuda", requires_grad=True)
    last = x[:, -1, :]
    gradient = torch.ones_like(last)
    events = gpu.of(lambda: last.backward(gradient))
    assert [event for event in events if event > 0] == filled


def test_an_import_while_simulating_adds_no_view(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.show_pickle", raising=False)
    gpu = on("A100-40GB", "2.8")
    importlib.import_module("torch.utils.show_pickle")
    x = torch.randn(8, 16, 32, device="cuda", requires_grad=True)
    last = x[:, -1, :]
    gradient = torch.ones_like(last)
    events = gpu.of(lambda: last.backward(gradient))
    assert [event for event in events if event > 0] == [PART, WHOLE, WHOLE]


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), 0),
        (slice(None), slice(None), slice(3, 5)),
        (..., slice(None)),
        (slice(None), None, slice(None), 2),
        (slice(None), ..., 1),
        (slice(None), slice(2, None, 3), slice(None)),
        (slice(None), slice(0, 16)),
    ],
    ids=str,
)
def test_shapes_are_those_of_plain_indexing(on: Any, index: Any) -> None:
    real = torch.zeros(8, 16, 32)
    on("A100-40GB", "2.6")
    taken = torch.zeros(8, 16, 32, device="cuda")[index]
    wanted = real[index]
    assert (taken.shape, taken.stride()) == (wanted.shape, wanted.stride())
    assert taken.storage_offset() == wanted.storage_offset()


def test_index_tensors_have_the_shapes_of_the_cpu(on: Any) -> None:
    real = torch.zeros(8, 16, 32)
    rows = torch.tensor([1, 2, 3])
    on("A100-40GB", "2.6")
    taken = torch.zeros(8, 16, 32, device="cuda")
    there = rows.cuda()
    assert taken[there, :].shape == real[rows, :].shape
    assert taken[:, there].shape == real[:, rows].shape
    assert taken[:, there, :, None].shape == real[:, rows, :, None].shape
    assert taken[there, :, there].shape == real[rows, :, rows].shape
