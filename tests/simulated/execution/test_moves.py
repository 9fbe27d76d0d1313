"""Primitives that move tensors between host and GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch._prims  # makes the operator

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
