"""Primitives that move tensors between host and GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.inductor_prims  # makes operators

from pytest_gpumem import simulate

device_put: Any = torch.ops.prims.device_put.default


def test_a_primitive_copies_to_the_host_and_back() -> None:
    with simulate("A100-40GB", real_values=True) as gpu:
        x = torch.arange(1024.0, device="cuda")
        on_host = device_put(x, torch.device("cpu"))
        assert not on_host.is_cuda
        back = device_put(on_host, torch.device("cuda", 0), True)
        assert back.is_cuda
        assert gpu.allocated == 2 * 4096
        assert torch.equal(back.cpu(), on_host)


def test_a_primitive_makes_a_tensor_like_its_result_before_it_runs() -> None:
    """A checkpoint's seeds are one: the kernels of a wrapper call none (``_prim_impl``)."""
    with simulate("A100-40GB") as gpu:
        device = torch.device("cuda", 0)
        seeds = torch.ops.prims.inductor_seeds(2, device)
        assert seeds.is_cuda
        sizes = [event.size for event in gpu.trace if event.action == "alloc"]
        assert sizes == [16, 16, 16]
        assert gpu.allocated == 512
        assert torch.ops.prims.view_of(seeds).is_cuda
        assert gpu.allocated == 512
