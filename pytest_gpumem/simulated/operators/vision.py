"""torchvision's kernels that are built from torch's operators, of sizes that values decide.

Source: torchvision/csrc/ops/cuda/nms_kernel.cu (nms_kernel) of torchvision 0.29.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_gpumem.simulated.common.callsite import user_line
from pytest_gpumem.simulated.machine.machine import GPU
from pytest_gpumem.simulated.operators.rules import Composite
from pytest_gpumem.values.errors import UnknownValueError

_BOXES_OF_A_BLOCK = 64
"""Boxes whose overlaps with another are the bits of one number."""


def _nms(gpu: GPU, dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    for holds, complaint in (
        (dets.dim() == 2, f"boxes should be a 2d tensor, got {dets.dim()}D"),
        (
            dets.dim() == 2 and dets.shape[1] == 4,
            f"boxes should have 4 elements in dimension 1, got {dets.shape[-1:].numel()}",
        ),
        (scores.dim() == 1, f"scores should be a 1d tensor, got {scores.dim()}D"),
        (
            dets.shape[:1] == scores.shape[:1],
            "boxes and scores should have same number of elements in dimension 0, got "
            f"{dets.shape[:1].numel()} and {scores.shape[:1].numel()}",
        ),
    ):
        if not holds:
            raise RuntimeError(complaint)
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


PARTS: dict[str, Composite] = {"torchvision.nms.default": _nms}
"""By overload."""
