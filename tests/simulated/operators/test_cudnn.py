"""Workspaces of cuDNN's convolutions against public traces, shape by shape."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpumem.simulated.operators.cudnn import (
    FORWARD,
    INPUT,
    WEIGHT,
    Convolution,
    convolution_bytes,
)


def convolution(
    direction: str, inputs: int, size: int, outputs: int, kernel: int, stride: int = 1
) -> Convolution:
    """Return a convolution of one float32 image, padded to keep its size."""
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


def batch_of(direction: str, inputs: int, size: int, outputs: int) -> Convolution:
    """Return a 3x3 convolution of 300 images."""
    one = convolution(direction, inputs, size, outputs, 3)
    return replace(
        one,
        input=(300, *one.input[1:]),
        input_bytes=300 * one.input_bytes,
        output_bytes=300 * one.output_bytes,
        capability=(8, 9),
    )


@pytest.mark.parametrize(
    ("direction", "inputs", "size", "outputs", "nbytes"),
    [
        # VGG-19, 300 images of 86 x 86 pixels: Stone-ResearchLife/xMem 235b5abb.
        (FORWARD, 64, 86, 64, 568_160_272),
        (FORWARD, 64, 43, 128, 142_298_128),
        (FORWARD, 256, 21, 256, 137_834_512),
        (FORWARD, 256, 10, 512, 35_438_608),
        (FORWARD, 512, 5, 512, 40_157_200),
        (INPUT, 64, 86, 64, 1_136_173_072),
        (INPUT, 64, 43, 128, 426_304_528),
        (INPUT, 256, 21, 256, 273_309_712),
        (INPUT, 256, 10, 512, 96_878_608),
        (INPUT, 512, 10, 512, 132_317_200),
        (WEIGHT, 256, 10, 512, 96_878_608),
        (WEIGHT, 512, 5, 512, 40_157_200),
        (WEIGHT, 3, 86, 64, 0),
    ],
)
def test_large_batches_are_transposed_whole(
    direction: str, inputs: int, size: int, outputs: int, nbytes: int
) -> None:
    assert convolution_bytes(batch_of(direction, inputs, size, outputs)) == nbytes


@pytest.mark.parametrize(
    ("direction", "inputs", "size", "outputs", "nbytes"),
    [
        # The same trace: partial sums, and tiles of the images.
        (FORWARD, 512, 10, 512, 132_484_959),
        (WEIGHT, 64, 86, 64, 1_136_173_092),
        (WEIGHT, 128, 43, 128, 576_860_875),
        (WEIGHT, 256, 21, 256, 273_309_784),
    ],
)
def test_workspaces_exceed_the_copies_by_less_than_2_percent(
    direction: str, inputs: int, size: int, outputs: int, nbytes: int
) -> None:
    assert convolution_bytes(batch_of(direction, inputs, size, outputs)) == pytest.approx(
        nbytes, rel=0.02
    )


def of_halves(
    direction: str,
    input: tuple[int, ...],
    outputs: int,
    kernel: tuple[int, ...],
    stride: int = 1,
) -> Convolution:
    """Return a float16 convolution, padded to keep its size."""
    batch, inputs, *sizes = input
    pixels, taps = math.prod(sizes), math.prod(kernel)
    return Convolution(
        direction,
        input,
        outputs,
        kernel,
        (stride,) * len(kernel),
        (1,) * len(kernel),
        1,
        2 * batch * inputs * pixels,
        2 * inputs * outputs * taps,
        2 * batch * outputs * pixels // stride ** len(kernel),
        2,
        channels_last=False,
        tensor_cores=True,
    )


@pytest.mark.parametrize(
    ("input", "outputs", "kernel", "nbytes"),
    [
        # pytorch#123533: 1 GiB in, 1 GiB out; reserved by 1.0 GiB more than with float32's rule.
        ((1, 256, 2048, 1024), 256, (3, 3), 2 * 2**30 + 1_179_648 + 16),
        # pytorch#95024: of a peak of 12,874,233,344 bytes, this rounded up to 6,437,116,416.
        ((1, 64, 361, 370, 251), 32, (3, 3, 3), 6_437_116_048),
    ],
)
def test_halves_are_transposed_with_their_output(
    input: tuple[int, ...], outputs: int, kernel: tuple[int, ...], nbytes: int
) -> None:
    assert convolution_bytes(of_halves(FORWARD, input, outputs, kernel)) == nbytes


@pytest.mark.parametrize("direction", [FORWARD, INPUT, WEIGHT])
def test_halves_are_transposed_except_weights_of_one_pixel(direction: str) -> None:
    # The kinds of ResNet-50, whose step launches 158 and 68 transposes: apuaaChen/EVT_AE 67eaea63.
    images, halved = 2 * 128 * 56 * 56, 2 * 128 * 28 * 28
    first = of_halves(direction, (128, 4, 224, 224), 64, (7, 7), 2)
    assert convolution_bytes(first) == 16 * images * (4 + 16) + 2 * 4 * 64 * 49 + 16
    square = of_halves(direction, (128, 64, 56, 56), 64, (3, 3))
    assert convolution_bytes(square) == images * (64 + 64) + 2 * 64 * 64 * 9 + 16
    strided = of_halves(direction, (128, 256, 56, 56), 512, (1, 1), 2)
    assert convolution_bytes(strided) == images * 256 + halved * 512 + 16
    assert convolution_bytes(of_halves(direction, (128, 64, 56, 56), 256, (1, 1))) == 0


def test_images_of_three_channels_are_not_transposed() -> None:
    # VGG-19 of xMem in float32; the encoder of invoke-ai/InvokeAI#9305 in float16.
    call = of_halves(FORWARD, (1, 3, 3, 1026, 1026), 96, (3, 3, 3))
    assert convolution_bytes(call) == 0
    assert convolution_bytes(replace(call, input=(1, 4, 3, 1026, 1026))) > 0
    assert convolution_bytes(replace(call, element_bytes=4)) == 0


def test_halves_without_transposition_have_no_workspace() -> None:
    call = of_halves(FORWARD, (1, 256, 64, 64), 256, (3, 3))
    assert convolution_bytes(call) > 0
    assert convolution_bytes(replace(call, channels_last=True)) == 0
    assert convolution_bytes(replace(call, tensor_cores=False)) == 0


def test_a_convolution_without_copies_has_no_workspace() -> None:
    call = convolution(WEIGHT, 128, 28, 128, 3)
    assert convolution_bytes(replace(call, channels_last=True)) == 0
    assert convolution_bytes(replace(call, groups=4)) == 0
    assert convolution_bytes(replace(call, tensor_cores=False)) == 0
    assert convolution_bytes(convolution(FORWARD, 128, 28, 128, 1)) == 0


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [(64, 0), (302, 4_194_304), (604, 134_217_728), (1208, 134_217_728), (4830, 134_217_728)],
)
def test_large_products_on_tensor_cores_have_recorded_workspaces(size: int, nbytes: int) -> None:
    # HugePandaCoder/octree-nca-groupeq 0cc72993: 32 to 64 channels of one image.
    call = replace(convolution(FORWARD, 32, size, 64, 1), capability=(8, 9))
    assert convolution_bytes(call) == nbytes


def test_other_products_have_no_workspace() -> None:
    call = replace(convolution(FORWARD, 32, 4830, 64, 1), capability=(8, 9))
    assert convolution_bytes(replace(call, outputs=13)) == 0  # recorded there too: 64 to 13
    assert convolution_bytes(replace(call, input=(2, 32, 4830, 4830))) == 0
    assert convolution_bytes(replace(call, tensor_cores=False)) == 0
    assert convolution_bytes(replace(call, direction=WEIGHT)) == 0
    assert convolution_bytes(replace(call, capability=(8, 6))) == 0


def test_measured_shapes_override_the_rule() -> None:
    call = convolution(INPUT, 256, 14, 256, 3)
    assert convolution_bytes(call) == 2_760_720
    assert convolution_bytes(replace(call, capability=(8, 6))) == 0
    larger = replace(call, capability=(8, 6), input=(2, 256, 14, 14))
    assert convolution_bytes(larger) == 2_760_720


HALVES, TF32, FLOAT32 = "halves", "tf32", "float32"


def on_hopper(
    direction: str,
    images: tuple[int, ...],
    outputs: int,
    kernel: int,
    kind: str,
    *,
    stride: int = 1,
    groups: int = 1,
    channels_last: bool = False,
) -> Convolution:
    """Return a convolution on an H100, padded to keep its size."""
    batch, inputs, *sizes = images
    size = 2 if kind == HALVES else 4
    dims = len(sizes)
    return Convolution(
        direction,
        images,
        outputs,
        (kernel,) * dims,
        (stride,) * dims,
        (1,) * dims,
        groups,
        size * math.prod(images),
        size * inputs * outputs // groups * kernel**dims,
        size * batch * outputs * math.prod(-(-each // stride) for each in sizes),
        size,
        channels_last=channels_last,
        tensor_cores=kind != FLOAT32,
        capability=(9, 0),
    )


@pytest.mark.parametrize(
    ("direction", "images", "outputs", "kernel", "kind", "options", "nbytes"),
    [
        # As an H100 took them, with cuDNN 9.19: operands and result are copied,
        (FORWARD, (2, 128, 14, 14), 96, 3, HALVES, {}, 396_816),
        (FORWARD, (16, 128, 16, 16), 128, 3, TF32, {}, 4_784_144),
        (INPUT, (16, 64, 28, 28), 128, 3, TF32, {}, 9_928_720),
        # not the result of few channels, or of volumes; and no weights of one pixel;
        (FORWARD, (2, 512, 56, 56), 16, 3, TF32, {}, 13_139_984),
        (FORWARD, (8, 96, 14, 14, 14), 768, 5, TF32, {}, 45_293_584),
        (FORWARD, (4, 768, 16, 16), 96, 1, TF32, {"stride": 2}, 3_244_048),
        # three channels of halves as eight, and where few products are summed, none.
        (INPUT, (32, 3, 64, 64), 64, 7, HALVES, {}, 18_924_560),
        (FORWARD, (4, 3, 224, 224), 64, 7, HALVES, {"stride": 2}, 9_683_984),
        (FORWARD, (8, 3, 224, 224), 64, 7, TF32, {"stride": 2}, 30_544_656),
        (FORWARD, (8, 3, 16, 16), 64, 3, HALVES, {}, 0),
        (INPUT, (16, 3, 56, 56), 64, 5, TF32, {}, 0),
        # Products: those of each image, summed in float32; copied are deep ones of 7 x 7 pixels,
        # and halves of 7 x 7 pixels or of 24 channels.
        (FORWARD, (2, 96, 64, 64), 256, 1, TF32, {}, 0),
        (WEIGHT, (2, 96, 64, 64), 256, 1, TF32, {}, 196_608),
        (WEIGHT, (16, 512, 28, 28), 512, 1, HALVES, {}, 16_777_216),
        (FORWARD, (4, 2048, 7, 7), 512, 1, HALVES, {}, 1_003_536),
        (WEIGHT, (4, 512, 7, 7), 2048, 1, HALVES, {}, 1_003_536),
        (WEIGHT, (4, 160, 7, 7), 960, 1, HALVES, {}, 439_056),
        (WEIGHT, (4, 160, 7, 7), 960, 1, TF32, {}, 2_457_600),
        (INPUT, (4, 160, 7, 7), 960, 1, HALVES, {}, 0),
        # Weights of 3x3 kernels in float32, by tiles: 36 x (64 x 512 + 256 x 256) numbers.
        (WEIGHT, (4, 256, 14, 14), 256, 3, TF32, {}, 14_155_776),
        (WEIGHT, (4, 128, 28, 28), 128, 3, TF32, {}, 9_584_640),
        (WEIGHT, (32, 256, 14, 14), 512, 3, FLOAT32, {}, 75_497_472),
        (WEIGHT, (1, 256, 64, 64), 768, 3, TF32, {}, 23_855_120),
        # Without tensor cores channels last is copied, and what the weights' kernel reads.
        (FORWARD, (8, 128, 16, 16), 32, 5, FLOAT32, {"channels_last": True}, 1_720_336),
        (FORWARD, (8, 16, 7, 7), 512, 5, FLOAT32, {"stride": 2, "channels_last": True}, 0),
        (INPUT, (8, 16, 7, 7), 512, 5, FLOAT32, {"stride": 2, "channels_last": True}, 1_106_448),
        (WEIGHT, (2, 96, 28, 28), 96, 7, FLOAT32, {"channels_last": True}, 0),
        (WEIGHT, (4, 256, 16, 16), 512, 3, FLOAT32, {"stride": 2}, 6_291_472),
        (WEIGHT, (4, 16, 28, 28), 128, 3, FLOAT32, {"stride": 2}, 0),
        (WEIGHT, (4, 512, 32, 32), 128, 1, FLOAT32, {}, 0),
        # Channels last on tensor cores: whole vectors of halves.
        (FORWARD, (1, 3, 16, 16), 1024, 3, HALVES, {"channels_last": True}, 151_568),
        (FORWARD, (4, 3, 224, 224), 64, 7, HALVES, {"stride": 2, "channels_last": True}, 0),
        (FORWARD, (1, 96, 28, 28), 192, 5, HALVES, {"channels_last": True}, 0),
        # Groups.
        (FORWARD, (2, 192, 28, 28), 256, 3, HALVES, {"groups": 4}, 1_626_176),
        (INPUT, (1, 192, 64, 64), 64, 1, HALVES, {"groups": 4, "stride": 2}, 1_704_000),
        (FORWARD, (1, 192, 64, 64), 64, 1, HALVES, {"groups": 4, "stride": 2}, 0),
        (WEIGHT, (4, 192, 14, 14), 1024, 1, FLOAT32, {"groups": 4}, 3_813_440),
        (INPUT, (32, 96, 64, 64), 96, 3, FLOAT32, {"groups": 4, "stride": 2}, 0),
    ],
)
def test_workspaces_equal_those_of_an_h100(
    direction: str,
    images: tuple[int, ...],
    outputs: int,
    kernel: int,
    kind: str,
    options: dict[str, Any],
    nbytes: int,
) -> None:
    call = on_hopper(direction, images, outputs, kernel, kind, **options)
    assert convolution_bytes(call) == nbytes
