"""torchvision's kernels for CUDA, which call torch's operators for memory and products.

The number of boxes that ``nms`` keeps is decided by values. A deformable convolution multiplies
columns of up to 32 images at once.

Source: torchvision/csrc/ops/cuda/nms_kernel.cu (nms_kernel), deform_conv2d_kernel.cu
(deform_conv2d_forward_kernel, backward_gradient_inputs, backward_gradient_parameters) and
roi_align_kernel.cu, roi_pool_kernel.cu, ps_roi_align_kernel.cu and ps_roi_pool_kernel.cu; their
events are those of the dry device with torchvision 0.29.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Composite, Rule, copies_of
from pytest_gpumem.values.errors import UnknownValueError

_BOXES_OF_A_BLOCK = 64
"""Boxes whose overlaps with another are the bits of one number."""


def _nms(gpu: GPU, dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    if not dets.numel():
        return dets.new_empty((0,), dtype=torch.int64)
    values = gpu.simulation.values
    known = values.known(dets), values.known(scores)
    if known[0] is None or known[1] is None:
        read = f"torchvision.ops.nms at {user_line()} reads"
        raise UnknownValueError(values.refusal(read))
    order = scores.sort(stable=True, dim=0, descending=True)[1]
    boxes = dets.index_select(0, order)
    count = dets.shape[0]
    overlaps = dets.new_empty((count * -(-count // _BOXES_OF_A_BLOCK),), dtype=torch.int64)
    keep = dets.new_zeros((count,), dtype=torch.bool)
    values.keep(keep, _kept(known[0], known[1], iou_threshold))
    chosen = order.masked_select(keep)
    # They live until the function ends.
    del keep, overlaps, boxes, order
    return chosen


def _kept(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return which boxes are kept, best first; in float32 where the CPU has no half kernel."""
    with torch._C._DisableTorchDispatch():
        if dets.dtype is torch.half:
            dets, scores = dets.float(), scores.float()
        found = torch.ops.torchvision.nms(dets, scores, iou_threshold)
        order = scores.sort(stable=True, dim=0, descending=True).indices
        return torch.isin(order, found)


_MOST_IMAGES = 32
"""kMaxParallelImgs."""


def _images(batch: int) -> int:
    """Return get_greatest_divisor_below_bound."""
    return next(count for count in range(min(batch, _MOST_IMAGES), 0, -1) if batch % count == 0)


def _deform_conv2d(gpu: GPU, *args: Any) -> Tensor:
    given = args[:5]
    input, weight, offset, _mask, bias = kept = [each.contiguous() for each in given]
    groups = args[-3]
    with gpu.simulation.values.ignoring():
        batch, channels = input.shape[:2]
        outputs, (height, width) = weight.shape[0], offset.shape[2:]
        output: Tensor = input.new_zeros(batch, outputs, height, width)
        if not batch:
            return output
        count = _images(batch)
        products = input.new_zeros(batch // count, groups, outputs // groups, count * height, width)
        columns = input.new_zeros(
            groups, channels * weight[0, 0].numel() // groups, count * height * width
        )
        rows = weight.view(groups, outputs // groups, -1)
        for block in products:
            for product, row, column in zip(block, rows, columns, strict=True):
                product.flatten(1).addmm_(row, column)
        moved = products.view(batch // count, outputs, count, height, width).transpose(1, 2)
        output.view(batch // count, count, outputs, height, width).copy_(moved)
        result: Tensor = output + bias.view(1, outputs, 1, 1)
    # The parameters of the kernel live the longest.
    del moved, column, columns, block, product, products, output
    del kept
    gpu.simulation.values.assign(result, torch.ops.torchvision.deform_conv2d, *args)
    return result


def _deform_conv2d_backward(gpu: GPU, *args: Any) -> tuple[Tensor, ...]:
    grad_out, *kept = [each.contiguous() for each in args[:6]]
    input, weight, offset, mask, bias = kept
    groups = args[-3]
    with gpu.simulation.values.ignoring():
        by_input = [torch.zeros_like(each) for each in (input, offset, mask)]
        batch, channels = input.shape[:2]
        outputs, (height, width) = weight.shape[0], offset.shape[2:]
        rows = weight.view(groups, outputs // groups, -1)
        shape = rows.shape[0], channels * weight[0, 0].numel() // groups
        count = _images(batch) if batch else 1
        in_blocks = grad_out.reshape(batch // count, count, groups, -1, height, width)
        in_blocks = in_blocks.permute(0, 2, 3, 1, 4, 5)
        if batch:
            columns = input.new_empty(*shape, count * height * width)
            for block in in_blocks:
                columns.zero_()
                for column, row, part in zip(columns, rows, block, strict=True):
                    column.addmm_(row.transpose(0, 1), part.flatten(1))
            del column, columns, part
        by_weight = torch.zeros_like(weight)
        if batch:
            buffer = in_blocks.contiguous()
            columns = input.new_empty(*shape, count * height * width)
            for block in buffer:
                for gradient, part, column in zip(
                    by_weight.view_as(rows), block, columns, strict=True
                ):
                    product = part.flatten(1).mm(column.transpose(1, 0))
                    gradient.copy_(gradient + product)
                    del product
            del columns, column, buffer, block, part
        summed = grad_out.sum((0, 2, 3))
        zeros = torch.zeros_like(bias)
        by_bias = zeros + summed
    del zeros, summed, in_blocks, grad_out, kept
    by_image, by_offset, by_mask = by_input
    result = by_image, by_weight, by_offset, by_mask, by_bias
    backward = torch.ops.torchvision._deform_conv2d_backward
    gpu.simulation.values.assign(result, backward, *args)
    return result


_POOLS = "roi_align roi_pool ps_roi_align ps_roi_pool".split()

RULES: dict[str, Rule] = {
    **{f"torchvision::{pool}": Rule(after=copies_of("input", "rois")) for pool in _POOLS},
    **{
        f"torchvision::_{pool}_backward": Rule(
            after=copies_of(*(("grad", "rois") if pool.startswith("ps_") else ("rois",)))
        )
        for pool in _POOLS
    },
}
"""By operator name: their kernels read contiguous tensors."""

PARTS: dict[str, Composite] = {
    "torchvision.nms.default": _nms,
    "torchvision.deform_conv2d.default": _deform_conv2d,
    "torchvision._deform_conv2d_backward.default": _deform_conv2d_backward,
}
