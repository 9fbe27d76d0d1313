"""torchvision's suppression of boxes: what it allocates, and what values say of its result."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gpumem import simulate
from pytest_gpumem.values.errors import UnknownValueError

BOXES = [[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 11.0, 11.0], [20.0, 20.0, 30.0, 30.0]]
"""The first two overlap by 81 of 119."""
SCORES = [0.9, 0.8, 0.7]


def _kept(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return torch.tensor([0, 2])


def _sized_by_values(dets: Tensor, *_: Any) -> Tensor:
    return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]  # raises


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> Iterator[None]:
    """torchvision, or an operator of its name that keeps the first and the last of three boxes."""
    if importlib.util.find_spec("torchvision") is not None:
        importlib.import_module("torchvision")

        yield
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", _kept, "CPU")
    torch.library.register_fake("torchvision::nms", _sized_by_values, lib=library)
    yield
    library._destroy()


def nms(*args: Any) -> Any:
    return torch.ops.torchvision.nms(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("real_values", [False, True])
def test_boxes_that_overlap_are_suppressed(real_values: bool, dtype: torch.dtype) -> None:
    with simulate("T4", real_values=real_values):
        boxes = torch.tensor(BOXES, device="cuda", dtype=dtype)
        scores = torch.tensor(SCORES, device="cuda", dtype=dtype)
        kept = nms(boxes, scores, 0.5)
        assert kept.is_cuda
        assert kept.tolist() == [0, 2]
        assert nms(boxes.cpu().float(), scores.cpu().float(), 0.5).device.type == "cpu"
        assert nms(boxes[:0], scores[:0], 0.5).shape == (0,)


def test_its_temporaries_live_until_it_returns(on: Any) -> None:
    gpu = on("A100-40GB", "2.13")
    count = 3
    boxes = torch.tensor(BOXES, device="cuda")
    scores = torch.tensor(SCORES, device="cuda")
    gpu.events()
    kept = nms(boxes, scores, 0.5)

    numbers, order, sorted_boxes = count * 4, count * 8, count * 16
    overlaps, keep = count * 8, count  # one number for each 64 boxes
    events = gpu.events()
    # Sorting three numbers in shared memory takes their indices beside.
    # The sorted numbers are gone with the pair that only their order is taken of.
    sorting = [numbers, order, order, -order, -numbers]
    assert events[:8] == [*sorting, sorted_boxes, overlaps, keep]
    assert events[-4:] == [-keep, -overlaps, -sorted_boxes, -order]
    assert sum(events) == kept.numel() * 8 == 16


def test_boxes_that_nobody_knows_are_not_suppressed() -> None:
    with simulate("T4"):
        boxes, scores = torch.rand(3, 4, device="cuda"), torch.rand(3, device="cuda")
        with pytest.raises(UnknownValueError, match=r"^torchvision.ops.nms at .* reads a value"):
            nms(boxes, scores, 0.5)


@pytest.fixture
def library() -> Iterator[None]:
    """A stranger's operator whose result is as large as values say."""
    made = torch.library.Library("gpumem_test", "FRAGMENT")
    made.define("positive(Tensor x) -> Tensor")
    made.impl("positive", lambda x: x[x > 0], "CPU")
    torch.library.register_fake("gpumem_test::positive", _sized_by_values, lib=made)
    yield
    made._destroy()


@pytest.mark.usefixtures("library")
def test_a_kernel_of_a_stranger_whose_size_values_decide_is_computed() -> None:
    with simulate("T4", real_values=True) as gpu:
        numbers = torch.tensor([1.0, -1.0, 2.0], device="cuda")
        before = gpu.allocated
        found = torch.ops.gpumem_test.positive(numbers)
        assert found.tolist() == [1.0, 2.0]
        assert gpu.allocated == before + 512
    with simulate("T4"):
        numbers = torch.rand(3, device="cuda")
        with pytest.raises(UnknownValueError, match="reads a value of a CUDA tensor"):
            torch.ops.gpumem_test.positive(numbers)
