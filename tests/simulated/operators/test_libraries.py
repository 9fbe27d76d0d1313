"""cuFFT's workspaces, and operators for which torch has no shape functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_gpumem import simulate


def test_transforms_to_real_numbers_work_on_a_copy(on: Any) -> None:
    gpu = on()
    spectrum = torch.zeros(4, 33, dtype=torch.complex64, device="cuda")
    result, copy = 4 * 64 * 4, 4 * 33 * 8
    assert gpu.of(lambda: torch.fft.irfft(spectrum)) == [result, copy, -copy]


def test_transforms_to_complex_numbers_copy_nothing(on: Any) -> None:
    gpu = on()
    signal = torch.zeros(4, 64, device="cuda")
    assert gpu.of(lambda: torch.fft.rfft(signal)) == [4 * 33 * 8]


COMPLEX = 5 * 6 * 7 * 8


def test_inputs_that_the_library_cannot_read_are_copied(on: Any) -> None:
    gpu = on()
    x = torch.zeros(5, 6, 7, dtype=torch.complex64, device="cuda")
    # Batches on both sides of the transformed dim are no single dim.
    assert gpu.of(lambda: torch.fft.fft(x, dim=1)) == [COMPLEX, COMPLEX, -COMPLEX]
    assert gpu.of(lambda: torch.fft.fft(x, dim=0)) == [COMPLEX]
    # Frames overlap: a copy of 10 signals of 26 frames of 16 values.
    frames = torch.zeros(10, 116, device="cuda").unfold(-1, 16, 4)
    spectra, copy = 10 * 26 * 9 * 8, 10 * 26 * 16 * 4
    gpu.events()
    assert gpu.of(lambda: torch.fft.rfft(frames)) == [spectra, copy, -copy]
    # Two real values are aligned as a complex one.
    rest = torch.zeros(257, device="cuda")[1:]
    assert gpu.of(lambda: torch.fft.rfft(rest)) == [129 * 8, 256 * 4, -256 * 4]


def test_an_expanded_gradient_is_copied(on: Any) -> None:
    gpu = on()
    spectrum = torch.zeros(4, 51, dtype=torch.complex64, device="cuda", requires_grad=True)
    signal = torch.fft.irfft(spectrum)
    gradient, copy = 4 * 51 * 8, 4 * 100 * 4
    assert gpu.of(lambda: torch.autograd.grad(signal.sum(), spectrum))[1:] == [
        4, gradient, copy, -copy, -4, -4,
    ]  # fmt: skip


def test_fft_of_more_than_three_dims_alternates_two_results(on: Any) -> None:
    gpu = on()
    x = torch.zeros(4, 3, 8, 8, dtype=torch.complex64, device="cuda")
    whole = 4 * 3 * 8 * 8 * 8
    assert gpu.of(lambda: torch.fft.fftn(x)) == [whole, whole, -whole]
    assert gpu.of(lambda: torch.fft.fftn(x, dim=(1, 2, 3))) == [whole]


def test_an_aligned_copy_is_freed_before_further_dims_are_transformed(on: Any) -> None:
    gpu = on()
    x = torch.zeros(2 * 3 * 4 * 8 + 1, device="cuda")[1:].view(2, 3, 4, 8)
    copy, half = 2 * 3 * 4 * 8 * 4, 2 * 3 * 4 * 5 * 8
    assert gpu.of(lambda: torch.fft.rfftn(x)) == [half, copy, half, -copy, -half]


@pytest.mark.parametrize("version", ["2.6", "2.15"])
def test_batches_of_a_result_lie_in_the_order_of_the_inputs(on: Any, version: str) -> None:
    on("A100-40GB", version)
    x = torch.zeros(5, 6, 7, dtype=torch.complex64, device="cuda")
    assert torch.fft.fft(x, dim=1).stride() == (42, 1, 6)
    assert torch.fft.irfft(x, dim=1).stride() == (70, 1, 10)
    assert torch.fft.rfft(x.real, dim=0).stride() == (1, 21, 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_halves_are_read_without_strides_and_in_powers_of_two(on: Any) -> None:
    gpu = on("A100-40GB", "2.15")
    halves = torch.zeros(4, 8, 16, dtype=torch.float16, device="cuda")
    whole, copy = 4 * 5 * 16 * 4, 4 * 8 * 16 * 2
    assert gpu.of(lambda: torch.fft.rfft(halves[0], dim=0)) == [5 * 16 * 4, 256, -256]
    assert gpu.of(lambda: torch.fft.rfft(halves, dim=1)) == [whole, copy, -copy]
    with pytest.raises(RuntimeError, match="powers of two when computing in half precision"):
        torch.fft.rfft(halves[:, :, :15])


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 takes bfloat16")
@pytest.mark.parametrize(
    ("gpu", "sizes"),
    [("T4", (5, 8)), ("A100-40GB", (5, 12))],
    ids=["before 8.0", "not a power of two"],
)
def test_bfloat16_is_transformed_as_float32(on: Any, gpu: str, sizes: tuple[int, int]) -> None:
    watched = on(gpu, "2.15")
    given = torch.zeros(sizes, dtype=torch.bfloat16, device="cuda")
    copy, spectrum = 5 * sizes[1] * 4, 5 * (sizes[1] // 2 + 1) * 8
    assert watched.of(lambda: torch.fft.rfft(given)) == [copy, spectrum, -copy]


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.15 takes bfloat16")
def test_bfloat16_of_powers_of_two_is_transformed_to_complex_halves(on: Any) -> None:
    # _fft_r2c_cufft: complex values of bfloat16, converted to complex64, then both sides.
    gpu = on("A100-40GB", "2.15")
    given = torch.zeros(5, 8, dtype=torch.bfloat16, device="cuda")
    halves, spectrum, whole = 5 * 5 * 4, 5 * 5 * 8, 5 * 8 * 8
    assert gpu.of(lambda: torch.fft.rfft(given)) == [halves, spectrum, -halves]
    assert gpu.of(lambda: torch.fft.fft(given)) == [halves, spectrum, whole, -spectrum, -halves]
    odd = torch.zeros(65, dtype=torch.bfloat16, device="cuda")[1:]
    # Two real values are aligned as a complex one.
    assert gpu.of(lambda: torch.fft.rfft(odd)) == [33 * 4, 64 * 2, 33 * 8, -64 * 2, -33 * 4]


def test_unknown_workspaces_are_noted() -> None:
    with simulate("A100-40GB") as gpu:
        torch.linalg.svd(torch.zeros(8, 8, device="cuda"))
        torch.fft.rfft(torch.zeros(8, device="cuda"))
    assert [note.split(" is unknown")[0] for note in gpu.notes] == [
        "cuSOLVER's workspace for linalg_svd",
        "cuFFT's workspace for rfft",
    ]


def test_operators_without_shape_functions_are_simulated(on: Any) -> None:
    on()
    factored, scales = torch.geqrf(torch.zeros(8, 4, device="cuda"))
    assert (factored.shape, factored.stride(), scales.shape) == ((8, 4), (1, 8), (4,))
    scores = torch.zeros(16, 10, device="cuda", requires_grad=True)
    functional.multi_margin_loss(
        scores, torch.zeros(16, dtype=torch.long, device="cuda")
    ).backward()
    assert scores.grad is not None
    assert scores.grad.shape == scores.shape
    assert torch.fake_quantize_per_tensor_affine(scores, 0.1, 0, -128, 127).shape == scores.shape


def _four_bits(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a packed weight of ``rows`` x ``columns`` with a scale for each 64 columns."""
    bits = torch.zeros(rows, columns // 2, dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(bits, 8)
    return packed, torch.zeros(columns // 64, rows, 2, dtype=torch.bfloat16, device="cuda")


def test_integer_zero_points_of_channels_are_checked(on: Any) -> None:
    """Events of torch 2.15.0+cu132."""
    gpu = on()
    x, scale = torch.randn(64, 128, device="cuda"), torch.ones(128, device="cuda")
    quantize, limits = torch.fake_quantize_per_channel_affine, (1, -128, 127)
    kept = [x.nbytes, x.numel(), -x.numel()]
    broken = torch.zeros(128, device="cuda")
    whole = broken.int()
    assert gpu.of(lambda: quantize(x, scale, whole, *limits)) == [4, 4, -4, -4, *kept]
    assert gpu.of(lambda: quantize(x, scale, broken, *limits)) == kept


def test_products_with_weights_of_four_bits_allocate_their_result(on: Any) -> None:
    gpu = on()
    packed, scales = _four_bits(1024, 256)
    assert packed.shape == (1024 // 8, 256 // (8 * 16), 32, 8 // 2)
    x = torch.zeros(512, 256, dtype=torch.bfloat16, device="cuda")
    multiply = torch.ops.aten._weight_int4pack_mm
    assert multiply(x, packed, 64, scales).shape == (512, 1024)
    assert gpu.of(lambda: multiply(x, packed, 64, scales)) == [512 * 1024 * 2]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits_are_copied_from_the_host(on: Any, dtype: torch.dtype) -> None:
    on()
    there = torch.zeros(16, device="cuda").to(dtype)
    assert there.copy_(torch.ones(16).to(dtype)).dtype is dtype
    assert torch.ones(16).to(dtype).cuda().float().sum().item() == 16.0
