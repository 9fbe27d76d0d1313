"""torchvision's kernels: their allocations, and the number of boxes that nms keeps."""

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


def _pooled(input: Tensor, rois: Tensor, scale: float, height: int, width: int, *_: Any) -> Tensor:
    return input.new_empty(rois.shape[0], input.shape[1], height, width)


def _sized_by_values(dets: Tensor, *_: Any) -> Tensor:
    return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]  # raises


@pytest.fixture(scope="module", autouse=True)
def torchvision() -> Iterator[None]:
    """Provide torchvision, or an ``nms`` operator that keeps the first and last of three boxes."""
    if importlib.util.find_spec("torchvision") is not None:
        importlib.import_module("torchvision")

        yield
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    given = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h"
    given += ", SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w"
    given += ", SymInt groups, SymInt offset_groups, bool use_mask"
    library.define(f"deform_conv2d({given}) -> Tensor")
    results = ", ".join(["Tensor"] * 5)
    library.define(f"_deform_conv2d_backward(Tensor grad, {given}) -> ({results})")
    given = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height"
    given += ", SymInt pooled_width, int sampling_ratio, bool aligned"
    library.define(f"roi_align({given}) -> Tensor")
    library.impl("roi_align", _pooled, "CPU")
    torch.library.register_fake("torchvision::roi_align", _pooled, lib=library)
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


def test_temporaries_of_nms_live_until_it_returns(on: Any) -> None:
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


IMAGES, OFFSETS, WEIGHT = 64 * 6 * 56 * 4, 64 * 18 * 56 * 4, 4 * 3 * 9 * 4
OUTPUT = 64 * 4 * 56 * 4
COLUMNS = 6 * 9 * 32 * 56 * 4
"""Of half of the images."""
WORKSPACE = 8519680


def _convolved() -> tuple[Tensor, ...]:
    made = (64, 6, 8, 7), (4, 3, 3, 3), (64, 18, 8, 7), (64, 1), (4,)
    return tuple(torch.zeros(shape, device="cuda") for shape in made)


AS_IT_IS = (1, 1, 1, 1, 1, 1, 2, 1, False)
"""Two groups of channels, and no mask."""


def test_deform_conv2d_multiplies_half_of_the_images_at_once(on: Any) -> None:
    """Seen on the dry device, 2.15 with torchvision 0.29."""
    gpu = on("A100-40GB", "2.15")
    given = _convolved()
    events = gpu.of(lambda: torch.ops.torchvision.deform_conv2d(*given, *AS_IT_IS))
    assert [event for event in events if abs(event) != WORKSPACE] == [
        *(OUTPUT, OUTPUT, COLUMNS),
        *(OUTPUT, -COLUMNS, -OUTPUT, -OUTPUT),
    ]


def test_gradients_of_deform_conv2d_are_made_one_after_the_other(on: Any) -> None:
    """Seen on the dry device, 2.15 with torchvision 0.29."""
    gpu = on("A100-40GB", "2.15")
    given = _convolved()
    grad = torch.ones(64, 4, 8, 7, device="cuda")
    backward = torch.ops.torchvision._deform_conv2d_backward
    events = gpu.of(lambda: backward(grad, *given, *AS_IT_IS))
    mask, part, group = 64 * 4, OUTPUT // 4, WEIGHT // 2
    product = [group, group, -group, -group]
    assert [event for event in events if abs(event) != WORKSPACE] == [
        *(IMAGES, OFFSETS, mask, COLUMNS),
        *[part, -part] * 4,
        *(-COLUMNS, WEIGHT, OUTPUT, COLUMNS),
        *product * 4,
        *(-COLUMNS, -OUTPUT),
        *(16, 16, 16, -16, -16),
    ]


def test_pooled_regions_are_read_from_contiguous_images(on: Any) -> None:
    gpu = on()
    images = torch.zeros(2, 8, 12, 12, device="cuda").to(memory_format=torch.channels_last)
    regions = torch.zeros(3, 5, device="cuda")
    pool = torch.ops.torchvision.roi_align
    pooled = 3 * 8 * 2 * 2 * 4
    events = gpu.of(lambda: pool(images, regions, 1.0, 2, 2, 2, False))
    assert events == [pooled, images.nbytes, -images.nbytes]


def test_nms_of_unknown_boxes_is_refused() -> None:
    with simulate("T4"):
        boxes, scores = torch.rand(3, 4, device="cuda"), torch.rand(3, device="cuda")
        with pytest.raises(UnknownValueError, match=r"^torchvision.ops.nms at .* reads a value"):
            nms(boxes, scores, 0.5)


@pytest.fixture
def library() -> Iterator[None]:
    """Define a user's operator whose result size depends on values."""
    made = torch.library.Library("gpumem_test", "FRAGMENT")
    made.define("positive(Tensor x) -> Tensor")
    made.impl("positive", lambda x: x[x > 0], "CPU")
    torch.library.register_fake("gpumem_test::positive", _sized_by_values, lib=made)
    yield
    made._destroy()


@pytest.mark.usefixtures("library")
def test_a_users_kernel_with_a_data_dependent_size_is_computed() -> None:
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
