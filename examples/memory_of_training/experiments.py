"""Where the memory of a training step goes, one experiment at a time.

Plain PyTorch for a CUDA device. Every experiment returns bytes, as ``read()`` gave them at the
named moments; by default that is ``torch.cuda.memory_allocated()``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pytest_gpumem.measurement.nvml import NvmlAbsent, NvmlReading, read_device

Read = Callable[[], int]

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.uint16,
)


def allocated() -> int:
    """Bytes in live blocks: tensors, and the workspaces that cuBLAS keeps."""
    return torch.cuda.memory_allocated()


def without_workspaces() -> int:
    """Bytes in live blocks when cuBLAS has given its workspaces back: tensors alone."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def reserved_and_allocated() -> dict[str, tuple[int, int]]:
    """Return reserved and allocated bytes: PyTorch keeps segments until ``empty_cache()``."""

    def both() -> tuple[int, int]:
        return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    torch.cuda.empty_cache()
    seen = {"start": both()}
    x = torch.randn(1024, device="cuda")
    seen["tensor"] = both()
    del x
    seen["deleted"] = both()
    torch.cuda.empty_cache()
    seen["cache emptied"] = both()
    return seen


def device_use() -> NvmlReading | NvmlAbsent:
    """Return NVML's reading of the whole device, as in nvidia-smi, or the reason for none."""
    return read_device()


def bytes_per_element() -> dict[str, float]:
    """Return the bytes of one element of each dtype."""

    def of(dtype: torch.dtype) -> float:
        before = allocated()
        x = torch.ones(1024, dtype=dtype, device="cuda")
        return (allocated() - before) / x.numel()

    return {str(dtype).removeprefix("torch."): of(dtype) for dtype in DTYPES}


def tensor_of(elements: int) -> int:
    """Return the bytes of a float32 tensor with ``elements`` elements."""
    before = allocated()
    x = torch.randn(elements, device="cuda")
    taken = allocated() - before
    del x
    return taken


def staircase(sizes: range = range(1050)) -> list[int]:
    """Return the bytes of float32 tensors of growing size, in blocks of 512 bytes."""
    return [tensor_of(elements) for elements in sizes]


def linear_layer(*, backward: bool, read: Read = allocated) -> dict[str, int]:
    """Train one layer with one sample; autograd's thread has its own cuBLAS workspace."""
    seen = {"start": read()}
    model = nn.Linear(256, 250, device="cuda")
    seen["model"] = read()
    x = torch.randn(1, 256, device="cuda")
    seen["input"] = read()
    y = model(x)
    seen["forward"] = read()
    if backward:
        y.sum().backward()
        seen["backward"] = read()
    del model, x, y
    torch.cuda.empty_cache()
    seen["deleted"] = read()
    torch._C._cuda_clearCublasWorkspaces()
    seen["workspaces cleared"] = read()
    return seen


def saved_for_backward(compute: Callable[..., Tensor], *inputs: Tensor) -> list[tuple[int, ...]]:
    """The shapes of the tensors that autograd saves for the gradients of ``compute``."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute(*inputs)
    return shapes


def kept_for_backward(compute: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Return the bytes that ``compute`` keeps beside inputs and output: training less inference."""

    def taken() -> int:
        before = without_workspaces()
        output = compute(*inputs)
        after = without_workspaces()
        del output
        return after - before

    in_training = taken()
    with torch.no_grad():
        return in_training - taken()


def layer_norm_by_hand(read: Read = allocated) -> int:
    """Four operations, of which one needs its input again."""
    before = read()
    x = torch.rand(10, device="cuda")
    w = torch.rand(10, device="cuda", requires_grad=True)
    y = (x - x.mean()) / (x.std() + 1e-6) * w
    taken = read() - before
    del y
    return taken


def deep_network(blocks: int) -> nn.Module:
    """Return ``blocks`` blocks of two linear layers, each with its activation."""
    layers = [
        layer
        for _ in range(blocks)
        for layer in (nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 200), nn.Sigmoid())
    ]
    return nn.Sequential(*layers).to("cuda")


def deep_forward(blocks: int, *, inference: bool, read: Read = allocated) -> int:
    """Return the bytes of model, input, output and everything kept for backward."""
    before = read()
    model = deep_network(blocks)
    x = torch.randn(5, 200, device="cuda")
    with torch.inference_mode(inference):
        y = model(x)
    taken = read() - before
    del y
    return taken


def deep_backward(blocks: int, read: Read = allocated) -> int:
    """Return the same bytes after backward, with the gradients."""
    before = read()
    model = deep_network(blocks)
    x = torch.randn(5, 200, device="cuda")
    y = model(x)
    y.sum().backward()
    return read() - before
