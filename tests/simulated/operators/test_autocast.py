"""Autocast for CUDA: its lists of operators, its casts and its cache."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_gpumem import simulate
from pytest_gpumem.simulated.operators import autocast

OTHER_BACKENDS_ONLY = {
    # Registered for real cuDNN tensors; reached through lstm(), gru() and rnn().
    "_cudnn_rnn",
}
BY_NAME_OF_DIMENSIONS = ("Dimname", "dimname", "names")


def registered() -> set[str]:
    """Return the operators that have CUDA autocast kernels in the installed torch."""
    return {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
        and not any(part in name for part in BY_NAME_OF_DIMENSIONS)
    }


def test_the_lists_cover_the_kernels_of_the_installed_torch() -> None:
    ours = {
        name
        for names in (
            autocast.LOWER_PRECISION,
            autocast.FLOAT32,
            autocast.FLOAT32_OUTPUT,
            autocast.FLOAT32_NORMS,
            autocast.PROMOTE,
            autocast.BANNED,
        )
        for name in names
    }
    missing = registered() - ours - OTHER_BACKENDS_ONLY
    assert missing == set()
    # Added after 2.6; all others exist in every release.
    assert ours - registered() <= {"rms_norm", "linalg_matrix_sqrth"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precision_and_float32_operators(dtype: torch.dtype) -> None:
    with simulate("A100-40GB"), torch.autocast("cuda", dtype=dtype):
        x = torch.ones(4, 4, device="cuda")
        half = x @ x
        assert half.dtype == dtype
        assert F.linear(x, x).dtype == dtype
        assert F.conv2d(x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)).dtype == dtype
        assert (half + 1).dtype == dtype
        assert half.exp().dtype == torch.float32
        assert F.layer_norm(half, (4,)).dtype == torch.float32
        assert F.softmax(half, 0).dtype == torch.float32
        assert half.sum().dtype == torch.float32
        assert half.sum(0, dtype=dtype).dtype == dtype
        assert half.norm().dtype == torch.float32
        assert half.norm(2, 0).dtype == torch.float32
        assert half.norm(2, 0, True).shape == (1, 4)
        assert half.double().exp().dtype == torch.float64
        assert torch.addcmul(x, half, half).dtype == torch.float32
        assert torch.addcmul(half, half, half).dtype == dtype
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_the_last_argument_is_cast_first_and_freed_last(on: Any) -> None:
    gpu = on()
    given = torch.randn(8, 32, device="cuda")
    weight, bias = torch.randn(64, 32, device="cuda"), torch.randn(64, device="cuda")
    product = 8 * 64 * 2
    with torch.autocast("cuda", dtype=torch.bfloat16):
        # Bias, weight and input in bfloat16, and the product; input, weight and bias go.
        events = gpu.of(lambda: F.linear(given, weight, bias))
    workspace = [event for event in events if abs(event) > 2 * 64 * 32]
    assert [event for event in events if event not in workspace] == [
        128, 4096, 512, product, -512, -4096, -128,
    ]  # fmt: skip


def test_outside_autocast_nothing_is_cast() -> None:
    with simulate("A100-40GB"):
        x = torch.ones(4, 4, device="cuda")
        with torch.autocast("cuda"):
            pass
        assert (x @ x).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.float32


def test_binary_cross_entropy_is_refused_as_by_torch() -> None:
    with simulate("A100-40GB"), torch.autocast("cuda"):
        x = torch.ones(4, device="cuda")
        with pytest.raises(RuntimeError, match="are unsafe to autocast"):
            F.binary_cross_entropy(x, x)


def test_casts_of_leaves_are_cached_until_the_outermost_exit() -> None:
    with simulate("A100-40GB", torch_version="2.6") as gpu:
        weight = torch.ones(256, 256, device="cuda", requires_grad=True)
        x = torch.ones(256, 256, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for _ in range(3):
                with torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
                    x @ weight
            gc.collect()
            # weight, x, one cached cast of the weight (2 bytes each) and the cuBLAS workspace.
            assert gpu.allocated == 2 * 256 * 256 * 4 + 256 * 256 * 2 + 8_519_680
        gc.collect()
        assert gpu.allocated == 2 * 256 * 256 * 4 + 8_519_680


@pytest.mark.parametrize(("release", "kept"), [("2.10", 256 * 256 * 2), ("2.11", 0)])
def test_casts_in_inference_mode_are_not_cached_since_2_11(release: str, kept: int) -> None:
    with simulate("A100-40GB", torch_version=release) as gpu:
        weight = torch.ones(256, 256, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.inference_mode():
            weight @ weight
            gc.collect()
            assert gpu.allocated == 256 * 256 * 4 + kept + 8_519_680


@pytest.mark.parametrize(("release", "reaches_the_weight"), [("2.10", False), ("2.11", True)])
def test_a_cast_cached_without_gradients_is_reused_since_2_11(
    release: str, reaches_the_weight: bool
) -> None:
    with simulate("A100-40GB", torch_version=release):
        weight = torch.ones(256, 256, device="cuda", requires_grad=True)
        x = torch.ones(256, 256, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                x @ weight
            assert (x @ weight).requires_grad is reaches_the_weight


def test_the_cache_can_be_switched_off() -> None:
    with simulate("A100-40GB", torch_version="2.6") as gpu:
        weight = torch.ones(256, 256, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False), torch.no_grad():
            weight @ weight
            gc.collect()
            assert gpu.allocated == 256 * 256 * 4 + 8_519_680


def test_training_under_autocast_gives_float32_gradients() -> None:
    with simulate("A100-40GB"):
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
        with torch.amp.autocast("cuda", dtype=torch.bfloat16):
            logits = model(torch.ones(2, 16, device="cuda"))
            loss = F.cross_entropy(logits, torch.zeros(2, dtype=torch.long, device="cuda"))
        assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        loss.backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_bias_gradients_are_summed_in_float32_under_autocast(on: Any) -> None:
    # convolution_backward calls at::sum, which autocast knows; the engine casts the gradient back.
    gpu = on()
    layer = torch.nn.Conv2d(3, 128, 3).cuda()
    x = torch.randn(4, 3, 16, 16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
        gradient = torch.ones_like(y)
        inside = gpu.of(lambda: y.backward(gradient))
        y = layer(x)
    outside = gpu.of(lambda: y.backward(gradient))
    summed = [128 * 4, 128 * 2, -128 * 4]
    assert inside[1:4] == summed
    assert outside[1] == 128 * 2
