"""The user's own ``meta`` tensors: they hold no CUDA memory, and ``is_meta`` is true."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.machine.checks import NO_DATA

ELSEWHERE = torch.empty(4, 4, device="meta")
"""Made while nothing is simulated."""


def number_of_meta(module: nn.Module) -> int:
    return sum(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to("meta"),
        lambda x: x.to(device="meta", dtype=torch.float16),
        lambda x: x.to(torch.empty(1, device="meta")),
        lambda x: x.cpu().to("meta"),
        lambda x: torch.empty_like(x, device="meta"),
        lambda x: torch.zeros_like(x, device="meta"),
        lambda x: torch.rand_like(x, device="meta"),
        lambda x: x.new_empty(256, device="meta"),
        lambda x: x.new_zeros(256, device="meta"),
        lambda x: x.new_full((256,), 1.0, device=torch.device("meta")),
        lambda x: x.new_tensor([1.0], device="meta"),
    ],
)
def test_tensors_made_on_meta_take_no_memory(make: Callable[[torch.Tensor], Any]) -> None:
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda")
        made = make(x)
        assert made.device == torch.device("meta")
        assert made.is_meta
        assert not made.is_cuda
        assert (made + 1).is_meta
        assert gpu.allocated == 1024


def test_a_tensor_moved_to_meta_frees_its_block_with_the_last_reference() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(256, device="cuda")
        moved = x.to("meta")
        assert gpu.allocated == 1024
        x = moved
        assert gpu.allocated == 0
        assert x.is_meta


def test_a_module_that_moves_to_meta_frees_its_parameters() -> None:
    with simulate("T4") as gpu:
        # 64 x 64 and 64 numbers of 4 bytes.
        module = nn.Linear(64, 64).cuda()
        assert gpu.allocated == 16_384 + 512
        module.to("meta")
        assert gpu.allocated == 0
        assert number_of_meta(module) == 2
        with pytest.raises(NotImplementedError, match=r"use torch\.nn\.Module\.to_empty"):
            module.to("cuda")
        module.to_empty(device="cuda")
        assert gpu.allocated == 16_384 + 512
        module.to_empty(device="meta")
        assert gpu.allocated == 0


def test_modules_are_built_on_meta_copied_and_filled_from_a_state_on_the_gpu() -> None:
    with simulate("T4") as gpu:
        with torch.device("meta"):
            module = nn.Linear(64, 64)
        copied = copy.deepcopy(module)
        assert gpu.peak_allocated == 0
        state = {name: torch.ones_like(p, device="cuda") for name, p in module.named_parameters()}
        module.load_state_dict(state, assign=True)
        assert number_of_meta(module) == 0
        assert number_of_meta(copied) == 2
        assert gpu.allocated == 16_384 + 512


def test_parameters_are_registered_on_meta_as_accelerate_does() -> None:
    """``init_empty_weights`` replaces each parameter when it is registered."""
    register = nn.Module.register_parameter

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to(torch.device("meta")))

    with simulate("T4") as gpu:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(nn.Module, "register_parameter", empty)
            module = nn.Linear(64, 64, device="cuda")
        assert number_of_meta(module) == 2
        assert gpu.allocated == 0


def test_data_of_meta_and_cuda_tensors_can_be_swapped() -> None:
    with simulate("T4") as gpu:
        one, other = torch.ones(256, device="cuda"), torch.ones(256, device="meta")
        torch.utils.swap_tensors(one, other)
        assert one.is_meta
        assert other.is_cuda
        assert gpu.allocated == 1024
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            one.data = other


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.to("cuda"),
        lambda x: x.cuda(),
        lambda x: x.cpu(),
        lambda x: torch.ones(4, 4, device="cuda").copy_(x),
        lambda x: torch.ones(4, 4, device="cuda").__setitem__(0, x[0]),
    ],
)
def test_a_meta_tensor_has_no_data_to_copy(read: Callable[[torch.Tensor], Any]) -> None:
    with simulate("T4"), pytest.raises(NotImplementedError) as caught:
        read(torch.ones(4, 4, device="meta"))
    assert str(caught.value) == NO_DATA


def test_a_meta_tensor_from_before_the_simulation_stays_on_meta() -> None:
    with simulate("T4") as gpu:
        assert (ELSEWHERE + 1).is_meta
        assert (ELSEWHERE @ ELSEWHERE).is_meta
        assert torch.zeros_like(ELSEWHERE).is_meta
        assert gpu.peak_allocated == 0
        with pytest.raises(RuntimeError, match="cuda:0 and meta"):
            torch.ones(4, 4, device="cuda") + ELSEWHERE


def test_a_remembered_cuda_shape_does_not_apply_to_a_meta_tensor() -> None:
    with simulate("T4") as gpu:
        x = torch.ones(4, 4, device="cuda")
        assert (x + 1).is_cuda
        allocated = gpu.allocated
        assert (ELSEWHERE + 1).is_meta
        assert gpu.allocated == allocated


def test_inside_a_meta_context_cuda_operators_stay_on_the_gpu() -> None:
    with simulate("T4"), torch.device("meta"):
        classes = torch.tensor([0, 2], device="cuda")
        assert nn.functional.one_hot(classes, 4).is_cuda
        assert torch.ones(3).is_meta


def test_a_model_trains_on_meta_beside_one_on_the_gpu() -> None:
    with simulate("T4") as gpu:
        for device in ("cuda", "meta"):
            layer = nn.Linear(4, 4, device=device)
            optimizer = torch.optim.AdamW(layer.parameters())
            layer(torch.ones(2, 4, device=device)).sum().backward()
            optimizer.step()
            assert layer.weight.grad is not None
            assert layer.weight.grad.device.type == device
            if device == "cuda":
                before = gpu.peak_allocated
        assert gpu.peak_allocated == before


def test_is_cuda_is_true_under_vmap() -> None:
    with simulate("T4"):
        seen: list[bool] = []

        def row(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.is_cuda)
            return x * torch.ones(4, device=x.device)

        assert torch.vmap(row)(torch.ones(4, 4, device="cuda")).is_cuda
        assert seen == [True]


def test_a_number_argument_becomes_a_tensor_on_the_inputs_device() -> None:
    """``quantile`` makes a tensor of its number and computes with it: ATen/native/Sorting.cpp."""
    with simulate("T4"):
        x = torch.randn(4096, device="cuda")
        assert torch.quantile(x, 0.5).is_cuda
        assert torch.quantile(torch.randn(8, device="meta"), 0.5).is_meta
        assert torch.quantile(x, 0.5).is_cuda
        assert torch.quantile(torch.randn(8, device="meta"), 0.5).is_meta


def test_training_makes_no_meta_tensors_of_the_users_own() -> None:
    with simulate("T4") as gpu:
        layer = nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda()
        layer(torch.randn(4, 32, 64, device="cuda")).sum().backward()
        assert not gpu._gpu.simulation.has_real_meta
        assert not gpu._gpu.simulation.storages.users_own
