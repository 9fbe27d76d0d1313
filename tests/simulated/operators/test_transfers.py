"""Copies between host and GPU: with and without staging memory on the GPU.

Recorded: HugePandaCoder/octree-nca-groupeq 0cc72993, whole_slide_inference.ipynb, which writes
images of the host into channels of a state that is laid out channels last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

ELEMENTS = 3 * 4 * 5
FLOATS, HALVES = 4 * ELEMENTS, 2 * ELEMENTS


def state(layout: torch.memory_format = torch.channels_last) -> Tensor:
    """Return sixteen channels of 4 x 5 cells."""
    return torch.zeros(1, 16, 4, 5, device="cuda").contiguous(memory_format=layout)


def pixels(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(3, 4, 5, dtype=dtype)


def interleaved() -> Tensor:
    """Return every other pixel of a row, which is not contiguous."""
    return torch.zeros(3, 4, 10)[..., ::2]


def events(on: Any, make: Callable[[], Tensor], copy: Callable[[Tensor], Any]) -> list[int]:
    """Return the events of ``copy(make())``, without ``make()`` and the result."""
    gpu = on()
    tensor = make()
    found: list[int] = gpu.of(lambda: copy(tensor))
    return found


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x[0, :3].copy_(pixels()),
        lambda x: x[0, :3].copy_(pixels(torch.float64)),
        lambda x: x[0, :3].copy_(pixels()[:1]),
        lambda x: x[0, :3].copy_(pixels(), non_blocking=True),
        lambda x: x.__setitem__((0, slice(3)), pixels()),
    ],
    ids=["same type", "converted on the host", "repeated", "not blocking", "item"],
)
def test_strided_targets_are_written_from_a_contiguous_copy(
    on: Any, copy: Callable[[Tensor], Any]
) -> None:
    assert events(on, state, copy) == [FLOATS, -FLOATS]


@pytest.mark.parametrize(
    ("layout", "copy"),
    [
        (torch.contiguous_format, lambda x: x[0, :3].copy_(pixels())),
        (torch.contiguous_format, lambda x: x[0, :3].copy_(interleaved())),
        (torch.contiguous_format, lambda x: x[0, :3].copy_(pixels(torch.float64))),
        (torch.channels_last, lambda x: x.copy_(x.cpu())),
        (torch.channels_last, lambda x: x[0, 0, 0, 0].copy_(torch.tensor(1.0))),
        (torch.channels_last, lambda x: x[0, :3].copy_(x[0, 3:6])),
        (torch.channels_last, lambda x: x[0, :3].fill_(1.0)),
    ],
    ids=[
        "contiguous",
        "strided source",
        "converted on the host",
        "the same layout",
        "one number",
        "on the GPU",
        "a fill",
    ],
)
def test_other_targets_are_written_directly(
    on: Any, layout: torch.memory_format, copy: Callable[[Tensor], Any]
) -> None:
    assert events(on, lambda: state(layout), copy) == []


def test_uploads_that_do_not_block_are_converted_on_the_gpu(on: Any) -> None:
    gpu = on()
    host = pixels()
    assert gpu.of(lambda: host.to("cuda", torch.half)) == [HALVES]
    assert gpu.of(lambda: host.to("cuda", torch.half, non_blocking=True)) == [
        HALVES,
        FLOATS,
        -FLOATS,
    ]


def test_downloads_that_do_not_block_are_converted_on_the_gpu(on: Any) -> None:
    gpu = on()
    x = pixels().cuda()
    assert gpu.of(lambda: x.to("cpu", torch.half)) == []
    assert gpu.of(lambda: x.to("cpu", torch.half, non_blocking=True)) == [HALVES, -HALVES]
    turned = x.movedim(0, -1)
    assert gpu.of(lambda: turned.to("cpu", torch.half, non_blocking=True)) == [
        HALVES,
        HALVES,
        -HALVES,
        -HALVES,
    ]


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (lambda x: x.cpu(), []),
        (lambda x: x[0, :3].cpu(), [FLOATS, -FLOATS]),
        (lambda x: x[0, :3].tolist(), [FLOATS, -FLOATS]),
        (lambda x: x[0, :3].to("cpu", torch.float64), [FLOATS, -FLOATS]),
        (lambda x: pixels().copy_(x[0, :3]), [FLOATS, -FLOATS]),
        (lambda x: pixels().copy_(x[0, :1]), [FLOATS, -FLOATS]),
        (lambda x: x[0, 0, 0, 0].item(), []),
    ],
    ids=["dense", "strided", "list", "converted", "into a tensor", "repeated", "one number"],
)
def test_strided_sources_are_read_from_a_contiguous_copy(
    on: Any, copy: Callable[[Tensor], Any], expected: list[int]
) -> None:
    assert events(on, state, copy) == expected


def test_the_stride_of_a_dim_of_one_element_leaves_no_gap(on: Any) -> None:
    gpu = on()
    dense = torch.zeros(128, device="cuda").as_strided((2, 8, 1, 8), (64, 1, 77, 8))
    assert gpu.of(dense.cpu) == []


def test_copies_of_real_values_have_the_same_events() -> None:
    from pytest_gpumem import simulate

    with simulate(real_values=True) as gpu:
        x = state()
        x[0, 1] = 2.0
        before = len(gpu.trace)
        assert x[0, :3].cpu()[1].sum() == 40
        sizes = [entry.size for entry in gpu.trace[before:] if entry.action == "alloc"]
    assert sizes == [FLOATS]
