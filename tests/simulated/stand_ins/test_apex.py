"""apex: fused norms and FusedAdam allocate what csrc/ and apex/ of 25.09 do."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pytest_gpumem import simulate
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.simulated.stand_ins.apex import MODULES

ROWS, SIZE = 40, 256
OUT = ROWS * SIZE * 2
SUMS = ROWS * 4
"""Mean, or inverse of the deviation, in float32."""
WEIGHT = SIZE * 2
PARTS = 16 * SIZE * 4
"""Partial gradients of a weight, 16 rows of float32."""


@pytest.fixture
def gpu(on: Any) -> Any:
    return on("A100-40GB")


def norm(name: str, **options: Any) -> Any:
    return MODULES["apex.normalization"][name](SIZE, **options).cuda().half()


def made(*shape: int, dtype: torch.dtype = torch.half) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)


def gradients(gpu: Any, out: Tensor, *inputs: Tensor) -> list[int]:
    grad = torch.empty_like(out)
    return gpu.of(lambda: torch.autograd.grad(out, inputs, grad))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "sums"), [("FusedLayerNorm", 2), ("FusedRMSNorm", 1)])
def test_norms_keep_sums_and_make_gradients_of_weights_in_parts(
    gpu: Any, name: str, sums: int
) -> None:
    module, x = norm(name), made(4, 10, SIZE)
    assert gpu.of(lambda: module(x)) == [OUT, *[SUMS] * sums]
    out = module(x)
    events = gradients(gpu, out, x, *module.parameters())
    # Operators: autograd makes zeros for the gradients of the sums.
    assert events[: 1 + 4 * sums] == [
        *[SUMS] * sums,
        *(OUT, *[WEIGHT] * sums, *[PARTS] * sums, *[-PARTS] * sums),
    ]


@pytest.mark.parametrize(("name", "sums"), [("MixedFusedLayerNorm", 2), ("MixedFusedRMSNorm", 1)])
def test_mixed_norms_have_outputs_of_the_weights_type(gpu: Any, name: str, sums: int) -> None:
    module, x = norm(name).float(), made(4, 10, SIZE)
    out = module(x)
    assert out.dtype == torch.float32
    assert gpu.of(lambda: module(x)) == [2 * OUT, *[SUMS] * sums]
    assert gradients(gpu, out, x)[:2] == [OUT, 2 * WEIGHT], "no operator, and no zeros"


def test_without_the_input_the_output_is_kept_instead(gpu: Any) -> None:
    def held(efficient: bool) -> int:
        module = norm("FusedLayerNorm", memory_efficient=efficient)
        x = made(4, 10, SIZE)
        before = torch.cuda.memory_allocated()
        out = module(x.clone())
        kept = torch.cuda.memory_allocated() - before
        assert out.shape == x.shape
        return kept

    # The input of 20,480 B goes, and so does the mean, of a block of 512.
    assert held(efficient=False) - held(efficient=True) == OUT + 512


def test_what_does_not_fit_is_refused(gpu: Any) -> None:
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[256\], expected input"):
        norm("FusedLayerNorm")(made(4, 128))
    with (
        pytest.raises(RuntimeError, match="does not support `elementwise_affine = False`"),
        pytest.warns(UserWarning, match="does not support `elementwise_affine`"),
    ):
        norm("MixedFusedRMSNorm", elementwise_affine=False)


def parameters(dtype: torch.dtype) -> list[Any]:
    tensors = [torch.zeros(size, device="cuda", dtype=dtype) for size in (1000, 3000)]
    for each in tensors:
        each.requires_grad_()
        each.grad = torch.zeros_like(each)
    return tensors


def test_adam_keeps_moments_in_float32(gpu: Any) -> None:
    adam = MODULES["apex.optimizers"]["FusedAdam"]
    given = parameters(torch.half)
    gpu.events()
    optimizer = adam(given)
    assert gpu.events() == [4], "the flag of an overflow"
    # Zeros of the parameter's type, and then of float32.
    assert gpu.of(optimizer.step) == [
        *(2000, 4000, -2000, 2000, 4000, -2000, 6000, 12000, -6000, 6000, 12000, -6000)
    ]
    assert gpu.of(optimizer.step) == [], "and nothing from then on"
    assert gpu.of(optimizer.zero_grad) == [-2000, -6000]


def test_adam_keeps_master_weights_where_it_is_asked_to(gpu: Any) -> None:
    adam = MODULES["apex.optimizers"]["FusedAdam"]
    given = parameters(torch.half)
    gpu.events()
    kept = adam(given, capturable=True, master_weights=True)
    # Copies, in float32; the rate, and the flag.
    assert gpu.events() == [2000, 4000, -2000, 6000, 12000, -6000, 4, 4]
    kept.step()
    # Step counts: whether none overflowed, and found, scale and its inverse.
    assert gpu.of(kept.step) == [1, 4, -1, -4, 4, 4, 4, -4, -4, -4]
    with pytest.raises(RuntimeError, match="only supported with the capturable version"):
        adam(given, master_weights=True)
    with pytest.raises(RuntimeError, match="does not support the AMSGrad"):
        adam(given, amsgrad=True)


def test_the_norm_of_all_gradients_is_summed_by_block(gpu: Any) -> None:
    flag, tensors = torch.zeros(1, device="cuda", dtype=torch.int), [made(70_000), made(10)]
    l2norm = MODULES["amp_C"]["multi_tensor_l2norm"]
    assert gpu.of(lambda: l2norm(65536, flag, [tensors], False)) == [320 * 4, 4, -320 * 4]
    # Two chunks for each of two tensors, and their norms.
    events = gpu.of(lambda: l2norm(65536, flag, [tensors], True))
    assert events == [320 * 4, 2 * 2 * 4, 2 * 4, 4, -2 * 2 * 4, -320 * 4]


@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm"])
def test_where_values_are_computed_they_are_those_of_torch(name: str) -> None:
    with simulate(real_values=True):
        module = MODULES["apex.normalization"][name](16).cuda()
        x = torch.randn(4, 16, device="cuda", requires_grad=True)
        out = module(x)
        grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        host = x.detach().cpu().requires_grad_()
        weights = [each.detach().cpu().requires_grad_() for each in module.parameters()]
        call: Any = functional.layer_norm if name == "FusedLayerNorm" else functional.rms_norm
        expected = call(host, (16,), *weights, eps=1e-5)
        torch.testing.assert_close(out.cpu(), expected)
        reference = torch.autograd.grad(expected.square().sum(), [host, *weights])
        for one, other in zip(grads, reference, strict=True):
            torch.testing.assert_close(one.cpu(), other)


def test_it_is_there_where_it_is_named() -> None:
    if importlib.util.find_spec("apex") is not None:
        pytest.skip("apex is installed")
    with simulate(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("apex")
    with SimulatedGPU("T4", stand_ins=("apex",)).active():
        assert importlib.import_module("apex.optimizers").FusedAdam
