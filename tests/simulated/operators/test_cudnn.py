"""Sizes that only cuDNN knows: against public traces, shape by shape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.simulated.operators.cudnn import (
    FORWARD,
    INPUT,
    WEIGHT,
    Convolution,
    Recurrent,
    convolution_bytes,
    reserve_bytes,
)


def convolution(
    direction: str, inputs: int, size: int, outputs: int, kernel: int, stride: int = 1
) -> Convolution:
    """One float32 image, padded to keep its size."""
    return Convolution(
        direction,
        (1, inputs, size, size),
        outputs,
        (kernel, kernel),
        (stride, stride),
        (1, 1),
        1,
        4 * inputs * size**2,
        4 * inputs * outputs * kernel**2,
        4 * outputs * (size // stride) ** 2,
        4,
        channels_last=False,
        tensor_cores=True,
    )


@pytest.mark.parametrize(
    ("direction", "inputs", "size", "outputs", "nbytes"),
    [
        # JasperSolt/EoR_NN: an encoder of 256 x 256 pixels.
        (FORWARD, 30, 256, 16, 82_880),
        (FORWARD, 16, 128, 32, 51_328),
        (FORWARD, 32, 64, 64, 205_056),
        (INPUT, 32, 64, 64, 204_928),
        (INPUT, 16, 128, 32, 84_032),
        (INPUT, 30, 256, 16, 50_168),
        # ResNet-50 on an A100, of PyTorch's blog.
        (INPUT, 64, 56, 64, 409_856),
    ],
)
def test_winograd_transforms_the_weights(
    direction: str, inputs: int, size: int, outputs: int, nbytes: int
) -> None:
    assert convolution_bytes(convolution(direction, inputs, size, outputs, 3)) == nbytes


@pytest.mark.parametrize(
    ("direction", "inputs", "size", "outputs", "kernel", "stride", "nbytes"),
    [
        # ResNet-50 on an A100, of PyTorch's blog.
        (FORWARD, 128, 28, 128, 3, 1, 991_248),
        (FORWARD, 128, 56, 128, 3, 2, 2_195_472),
        (INPUT, 128, 28, 128, 3, 1, 1_392_656),
        (INPUT, 128, 56, 128, 3, 2, 2_596_880),
        (INPUT, 256, 28, 256, 3, 2, 3_362_832),
        (INPUT, 256, 56, 512, 1, 2, 5_341_200),
        (WEIGHT, 128, 28, 128, 3, 1, 1_392_656),
        (WEIGHT, 256, 28, 256, 3, 2, 3_362_832),
        (WEIGHT, 256, 14, 256, 3, 1, 2_760_720),
        (WEIGHT, 256, 56, 512, 1, 2, 4_816_912),
        (WEIGHT, 1024, 14, 2048, 1, 2, 1_204_240),
    ],
)
def test_contiguous_operands_are_transposed(
    direction: str, inputs: int, size: int, outputs: int, kernel: int, stride: int, nbytes: int
) -> None:
    call = convolution(direction, inputs, size, outputs, kernel, stride)
    assert convolution_bytes(call) == nbytes


def test_what_needs_no_copy_takes_nothing() -> None:
    call = convolution(WEIGHT, 128, 28, 128, 3)
    assert convolution_bytes(replace(call, channels_last=True)) == 0
    assert convolution_bytes(replace(call, groups=4)) == 0
    assert convolution_bytes(replace(call, tensor_cores=False)) == 0
    assert convolution_bytes(convolution(FORWARD, 128, 28, 128, 1)) == 0


def test_measured_shapes_of_a_gpu_go_before_the_rule() -> None:
    call = convolution(INPUT, 256, 14, 256, 3)
    assert convolution_bytes(call) == 2_760_720
    assert convolution_bytes(replace(call, capability=(8, 6))) == 0
    larger = replace(call, capability=(8, 6), input=(2, 256, 14, 14))
    assert convolution_bytes(larger) == 2_760_720


@pytest.mark.parametrize(("name", "nbytes"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_reserve_as_printed_in_pytorch_2895(name: str, nbytes: int) -> None:
    assert reserve_bytes(Recurrent(name, 25_000, 100, 320, 4, 1, 0, 4)) == nbytes
