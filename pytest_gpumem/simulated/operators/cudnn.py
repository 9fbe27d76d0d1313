"""Bytes that only cuDNN determines: measured sizes, else stated estimates.

PyTorch calls the library (``getWorkspaceSize`` of a convolution's plan,
cudnnGetBatchNormalization...Size), which answers by its choice of algorithm. The sizes below were
read from public traces of cuDNN 8 and 9: ResNet-50 on an A10G and an A100, a variational
autoencoder, cellular automata, all float32 in contiguous tensors, TF32 allowed; and for halves
from printed peaks of single convolutions. Every byte that comes from this module is marked as
estimated.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from pytest_gpumem.simulated.operators.layout import round_up

ATTENTION_BYTES = 256
"""Workspace of attention, forward and backward, besides cudnn-frontend's sums: for any shape, mask,
dropout and type on an H100 with cuDNN 9.19."""

FORWARD, INPUT, WEIGHT = "forward", "backward for the input", "backward for the weight"
"""The results that a convolution can compute."""

_DESCRIPTOR = 16
"""Bytes beyond the copies of a plan that transposes its operands."""

_VECTOR = 16
"""Bytes that tensor cores load at a time."""

_FEW = 4
"""Input channels below which operands are left as they are: three of float32 and three of float16
took nothing, four of float16 were transposed."""

_DEEP = 512
"""Input channels from which forward kernels were seen to transpose the output, too, in float32."""

_FLOAT_BYTES = 4
_TINY = 7
"""Pixels in a direction, of images that an H100 did not transform."""
_MOST_TRANSFORMED = 1_500_000_000
"""Operations of a TF32 convolution below which an H100 transformed the images for the weights."""
_HOPPER = (9, 0)
_WIDE = 32
"""Channels below which an H100 left float32 without TF32 as it is."""
_NARROW = 64
"""Channels up to which a TF32 convolution of small images was seen to write them as they are."""
_FEW_PRODUCTS = 128
"""Products of one output below which an H100 read fewer than ``_FEW`` channels as they are: those
of 3x3 and 5x5 kernels, not of 7x7 ones."""

_WINOGRAD_CHANNELS = 64
_WINOGRAD_PIXELS = 256 * 256
"""Channels in and out, and pixels of all images, up to which a 3x3 convolution was seen to be
computed by Winograd's method."""


def on_tensor_cores(is_float32: bool, itemsize: int, capability: tuple[int, int]) -> bool:
    """Return whether a convolution of such numbers runs on tensor cores: float32 only as TF32."""
    if is_float32:
        return capability >= (8, 0) and bool(sys.modules["torch"].backends.cudnn.allow_tf32)
    return itemsize == 2 and capability >= (7, 0)


@dataclass(frozen=True)
class Convolution:
    """The properties that the choice of an algorithm depends on; bytes of whole tensors."""

    direction: str
    input: tuple[int, ...]
    """Batch, channels of all groups, and the spatial sizes."""
    outputs: int
    """Channels of the output."""
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    input_bytes: int
    weight_bytes: int
    output_bytes: int
    element_bytes: int
    channels_last: bool
    tensor_cores: bool
    """Whether the GPU multiplies this type on tensor cores, which want channels last."""
    capability: tuple[int, int] = (0, 0)

    @property
    def inputs(self) -> int:
        """Channels of the input."""
        return self.input[1]

    @property
    def pointwise(self) -> bool:
        """Whether it is a product of matrices: 1x1 without a stride."""
        return self.pixelwise and set(self.stride) == {1}

    @property
    def pixelwise(self) -> bool:
        """Whether the kernel covers one pixel, with or without a stride."""
        return set(self.kernel) == {1}

    @property
    def narrow(self) -> bool:
        """Whether few channels of small images are written."""
        pixels = self.output_bytes // (self.outputs * self.element_bytes)
        return self.outputs <= _NARROW and pixels <= _WINOGRAD_PIXELS

    @property
    def few_products(self) -> bool:
        """Whether few are summed for a number of the output."""
        return self.inputs * math.prod(self.kernel) < _FEW_PRODUCTS

    @property
    def steps_by_one(self) -> bool:
        """Whether a 3x3 kernel goes pixel by pixel."""
        return self.kernel == (3, 3) and set(self.stride) == set(self.dilation) == {1}

    @property
    def transformed(self) -> bool:
        """Whether TF32 was seen to transform images of such a size."""
        channels = sorted((self.inputs, self.outputs))
        products = 2 * self.output_bytes // self.element_bytes * self.inputs * 9
        is_medium = channels[0] >= _NARROW < channels[1] < _DEEP and min(self.input[2:]) > _TINY
        return self.steps_by_one and is_medium and products < _MOST_TRANSFORMED

    @property
    def winograd(self) -> bool:
        """Whether transformed weights of 3x3 tiles were seen for such channels."""
        return (
            self.steps_by_one
            and self.groups == 1
            and self.element_bytes == 4
            and max(self.inputs, self.outputs) <= _WINOGRAD_CHANNELS
            and min(self.inputs, self.outputs) >= 16
            and math.prod(self.input) // self.inputs <= _WINOGRAD_PIXELS
        )


_Shape = tuple[int, int, int, int, int]
"""Input channels, input pixels in each direction, output channels, kernel size, stride."""

_MEASURED: dict[tuple[int, int], dict[str, dict[_Shape, int]]] = {
    # An A10G with cuDNN 9.1: one image, float32, padded to keep its size.
    (8, 6): {
        FORWARD: {
            (3, 224, 64, 7, 2): 75_776,
            (128, 28, 512, 1, 1): 3_211_776,
            (128, 56, 128, 3, 2): 2_195_472,
            (256, 14, 256, 3, 1): 2_822_575,
            (256, 14, 1024, 1, 1): 3_211_776,
            (256, 28, 256, 3, 2): 3_424_687,
            (256, 56, 128, 1, 1): 1_024,
            (512, 7, 512, 3, 1): 9_669_120,
            (512, 14, 512, 3, 2): 9_970_176,
            (512, 28, 128, 1, 1): 1_212_416,
            (512, 28, 256, 1, 1): 2_408_960,
            (1024, 14, 256, 1, 1): 1_212_416,
            (1024, 14, 512, 1, 1): 2_408_960,
            (2048, 7, 512, 1, 1): 1_917_440,
        },
        INPUT: {
            (64, 56, 64, 3, 1): 1_753_104,
            (64, 56, 256, 1, 1): 1_606_144,
            (256, 14, 256, 3, 1): 0,
            (256, 14, 1024, 1, 1): 1_212_416,
            (256, 28, 256, 3, 2): 0,
            (256, 56, 128, 1, 1): 1_536,
            (512, 7, 512, 3, 1): 0,
            (512, 7, 2048, 1, 1): 1_917_440,
            (512, 14, 512, 3, 2): 0,
            (512, 28, 1024, 1, 2): 0,
            (1024, 14, 512, 1, 1): 1_606_144,
            (1024, 14, 2048, 1, 2): 0,
            (2048, 7, 512, 1, 1): 1_212_416,
        },
        WEIGHT: {
            (3, 224, 64, 7, 2): 4_867_584,
            (64, 56, 64, 1, 1): 541_184,
            (64, 56, 64, 3, 1): 2_654_208,
            (64, 56, 256, 1, 1): 786_944,
            (128, 28, 128, 3, 1): 1_982_976,
            (128, 28, 512, 1, 1): 2_359_808,
            (128, 56, 128, 3, 2): 3_187_200,
            (256, 14, 1024, 1, 1): 1_048_576,
            (256, 56, 64, 1, 1): 2_163_200,
            (256, 56, 128, 1, 1): 1_507_328,
            (256, 56, 512, 1, 2): 5_341_696,
            (512, 7, 512, 3, 1): 18_432,
            (512, 7, 2048, 1, 1): 502_272,
            (512, 14, 512, 3, 2): 18_432,
            (512, 28, 128, 1, 1): 2_359_808,
            (512, 28, 256, 1, 1): 524_288,
            (1024, 14, 256, 1, 1): 1_048_576,
            (1024, 14, 512, 1, 1): 2_097_152,
            (2048, 7, 512, 1, 1): 502_272,
        },
    }
}
"""Bytes by compute capability, direction and shape, where they differ from the rule; multiples of
512 are blocks, whose last bytes were not requested."""


_LARGE_PRODUCTS: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    # A GPU of 23.64 GiB, which an RTX 4090 has, with cuDNN 8.9: HugePandaCoder/octree-nca-groupeq
    # 0cc72993, 32 to 64 channels over 302, 604, 1208, 2415 and 4830 pixels in each direction; 64
    # to 13 channels took nothing.
    (8, 9): ((604 * 604, 134_217_728), (302 * 302, 4_194_304))
}
"""Bytes that a pointwise convolution of one large image takes on tensor cores, by compute
capability and from how many pixels up; channels in and out are whole vectors."""


def _measured(convolution: Convolution) -> int | None:
    batch, channels, *sizes = convolution.input
    kernel, stride = convolution.kernel[-1], convolution.stride[-1]
    if (
        batch > 1
        or convolution.channels_last
        or convolution.element_bytes != 4
        or not convolution.tensor_cores
        or convolution.groups > 1
        or len({*sizes}) > 1
        or len(sizes) != 2
        or len({*convolution.kernel}) > 1
        or set(convolution.dilation) != {1}
    ):
        return None
    table = _MEASURED.get(convolution.capability, {}).get(convolution.direction, {})
    return table.get((channels, sizes[0], convolution.outputs, kernel, stride))


def convolution_bytes(convolution: Convolution) -> int:
    """Return the bytes of the plan's workspace: an estimate, for some shapes a measured one.

    - channels last, grouped or pointwise: nothing. The kernel reads its operands as they are (a
      pointwise one is a product). One large float32 image whose channels suit tensor cores took
      4 or 128 MiB on one GPU, whatever its size.
    - 3x3 over at most 64 channels of small images, forward and for the input: the weights and their
      4x4 tiles, padded to 8 channels by 32. Byte-exact in eight of ten recorded shapes.
    - otherwise contiguous tensors are transposed for tensor cores: input and weights in forward, of
      many channels the output, too; all three in backward. Fewer than four channels
      are left as they are. In a training step of VGG-19 with 300 images of
      86 x 86 pixels, on a GPU of 8 GB (the trace in the notebook of xMem's figures,
      Stone-ResearchLife/xMem 235b5abb), this is byte-exact for 12 of 16 convolutions forward (the
      others: 0.1 %, and 44 KB of the images) and for all 15 back to the input, and within 2 % for
      16 weights. With one image some kernels below 28 x 28 pixels took nothing.
    - contiguous halves: see :func:`_half_bytes`.
    """
    if convolution.capability == _HOPPER:
        return _hopper_bytes(convolution)
    measured = _measured(convolution)
    if measured is not None:
        return measured
    if convolution.channels_last or convolution.groups > 1:
        return 0
    if convolution.pointwise:
        return _product_bytes(convolution)
    if convolution.winograd and convolution.direction != WEIGHT:
        return _winograd_bytes(convolution)
    if not convolution.tensor_cores or convolution.inputs < _FEW:
        return 0
    if convolution.element_bytes == 2:
        return _half_bytes(convolution)
    if convolution.direction == FORWARD:
        if convolution.pixelwise:
            return 0
        copies = convolution.input_bytes + convolution.weight_bytes + _DESCRIPTOR
        return copies + (convolution.output_bytes if convolution.inputs >= _DEEP else 0)
    copies = convolution.input_bytes + convolution.output_bytes + _DESCRIPTOR
    if convolution.pixelwise and convolution.direction == WEIGHT:
        return copies
    return copies + convolution.weight_bytes


def _hopper_bytes(convolution: Convolution) -> int:
    """Return bytes on an H100, by rules seen in 1,244 convolutions (cuDNN 9.19, torch 2.11).

    They were 420 layers drawn at random, forward and both gradients, of which 29 % are float32
    without TF32. The blocks of 7 in 10 are equal, of the rest many are low: partial sums of weights
    that are computed in several parts, and the plans by Fourier transforms that some float32 takes.

    - Tensor cores, contiguous: operands and result are copied, halves in whole vectors of channels.
      TF32 of volumes leaves the result out below ``_DEEP`` channels. Few channels and taps forward
      are left as they are.
    - A pointwise product's weights are summed in float32 over the images, whose products are kept.
      Copied instead are deep images of an odd number of pixels, as ResNet's last, each way, and
      halves of an odd number of pixels or of channels that are no multiple of ``_WIDE``.
    - Without tensor cores it is channels last that is copied, and both ways back need more than
      forward; the weights' kernel copies contiguous tensors, too.
    - Weights of 3x3 kernels in float32 are computed by Winograd's method; in TF32 from 64 to below
      ``_DEEP`` channels, in small layers.
    - Groups: as with tensor cores, and 48 bytes more.
    """
    is_weight, is_input = (convolution.direction == each for each in (WEIGHT, INPUT))
    copies = sum(_vectors(convolution))
    if convolution.groups > 1:
        if convolution.channels_last:
            return 0
        is_kernel = convolution.tensor_cores and not convolution.pixelwise
        returns = convolution.tensor_cores or convolution.pointwise
        return copies + 64 if is_kernel or (returns and (is_weight or is_input)) else 0
    if convolution.channels_last:
        return _hopper_bytes_of_channels_last(convolution)
    if convolution.pointwise:
        if not convolution.tensor_cores:
            return 0
        return _hopper_bytes_of_products(convolution, copies + _DESCRIPTOR)
    if not convolution.tensor_cores:
        if is_weight:
            is_wide = min(convolution.inputs, convolution.outputs) >= _WIDE
            if is_wide and convolution.steps_by_one:
                return _transformed_bytes(convolution)
            return copies + _DESCRIPTOR if is_wide and not convolution.pixelwise else 0
        return _winograd_bytes(convolution) if convolution.winograd else 0
    is_float32 = convolution.element_bytes == 4
    if is_weight and is_float32 and convolution.transformed:
        return _transformed_bytes(convolution)
    is_forward = not (is_weight or is_input)
    if convolution.inputs < _FEW:
        reads_as_it_is = is_float32 if is_input else is_forward and convolution.few_products
        return 0 if reads_as_it_is else copies + _DESCRIPTOR
    is_volume = len(convolution.kernel) > 2
    writes_as_it_is = convolution.inputs < _DEEP if is_volume else convolution.narrow
    if is_forward and is_float32 and writes_as_it_is:
        copies -= convolution.output_bytes
    return copies + _DESCRIPTOR


def _transformed_bytes(convolution: Convolution) -> int:
    """Return bytes of 6x6 tiles, made 4x4 by a 3x3 kernel, of images and weights, in float32."""
    batch, inputs, *sizes = convolution.input
    tiles = batch * math.prod(round_up(size, 4) // 4 for size in sizes)
    outputs = convolution.outputs
    return 36 * (tiles * (inputs + outputs) + inputs * outputs) * _FLOAT_BYTES


def _hopper_bytes_of_products(convolution: Convolution, copies: int) -> int:
    channels = convolution.inputs, convolution.outputs
    is_odd = math.prod(convolution.input[2:]) % 2 > 0
    if is_odd and min(channels) >= _DEEP:
        return copies
    if convolution.direction != WEIGHT:
        return 0
    is_uneven = is_odd or any(each % _WIDE for each in channels)
    if convolution.element_bytes == 2 and is_uneven:
        return copies
    return convolution.input[0] * math.prod(channels) * _FLOAT_BYTES


def _hopper_bytes_of_channels_last(convolution: Convolution) -> int:
    operands = sum(_vectors(convolution)[:2])
    is_forward, is_input = (convolution.direction == each for each in (FORWARD, INPUT))
    if not convolution.tensor_cores:
        is_copied = is_input or (is_forward and convolution.inputs >= _WIDE)
        return operands + convolution.output_bytes + _DESCRIPTOR if is_copied else 0
    is_padded = convolution.element_bytes == 2 and convolution.inputs % (_VECTOR // 2) > 0
    is_copied = is_padded and (is_input or (not convolution.pointwise and convolution.few_products))
    return operands + _DESCRIPTOR if is_copied else 0


def _vectors(convolution: Convolution) -> tuple[int, int, int]:
    """Return the bytes of copies of input, weights and output; none of weights of one pixel.

    Tensor cores read halves in whole vectors of channels.
    """
    inputs, outputs = convolution.inputs, convolution.outputs
    sizes = convolution.input_bytes, convolution.weight_bytes, convolution.output_bytes
    if convolution.element_bytes == 2 and convolution.groups == 1:
        more = round_up(inputs, _VECTOR // 2), round_up(outputs, _VECTOR // 2)
        read, written = sizes[0] // inputs * more[0], sizes[2] // outputs * more[1]
        sizes = read, sizes[1] // (inputs * outputs) * more[0] * more[1], written
    return sizes[0], 0 if convolution.pixelwise else sizes[1], sizes[2]


def _half_bytes(convolution: Convolution) -> int:
    """Return bytes of copies of all operands: kernels for halves read and write channels last only.

    Among those for TF32 are some that write a contiguous output (cuDNN calls them
    ``nhwckrsc_nchw``), which is why float32 does without its copy below ``_DEEP`` channels; those
    for float16 and bfloat16 are all ``nhwckrsc_nhwc``. From pytorch#123533: 256 channels of one
    image of 2048 x 1024 to 2176 pixels. Not used, and equal: the bytes of a 3-d convolution
    (pytorch#95024: 64 to 32 channels, 12,874,233,344), and allocated and reserved memory of an
    autoencoder in 18 sizes (invoke-ai/InvokeAI#9305: 96 to 384 channels in two and three dims;
    reserved memory also shows that its first layer, of 3 channels, took nothing).

    A kernel of one pixel has the same weights in both layouts. So count the launches of
    ``nchwToNhwcKernel`` (158) and ``nhwcToNchwKernel`` (68) in a step of ResNet-50 with float16
    (apuaaChen/EVT_AE 67eaea63, benchmark/resnet/torch_result.md, on an A100): all operands of the
    first layer, of 4 channels, and of 3x3 kernels, all but the weights of 38 kernels of one pixel,
    each way; the other 70 of 99 products ran as such. With channels last it launches neither.
    """
    copies = convolution.input_bytes + convolution.output_bytes + _DESCRIPTOR
    return copies if convolution.pixelwise else copies + convolution.weight_bytes


def _product_bytes(convolution: Convolution) -> int:
    batch, channels, *sizes = convolution.input
    if (
        convolution.direction != FORWARD
        or batch > 1
        or convolution.element_bytes != 4
        or not convolution.tensor_cores
        or channels * convolution.element_bytes % _VECTOR
        or convolution.outputs * convolution.element_bytes % _VECTOR
    ):
        return 0
    steps = _LARGE_PRODUCTS.get(convolution.capability, ())
    return next((nbytes for pixels, nbytes in steps if math.prod(sizes) >= pixels), 0)


def _winograd_bytes(convolution: Convolution) -> int:
    read, written = convolution.inputs, convolution.outputs
    if convolution.direction == INPUT:
        read, written = written, read
    tiles = 16 * round_up(read, 8) * round_up(written, 32) * 4
    return convolution.weight_bytes + tiles + written * 4
