"""Convolutions choose CUDA's kernel and make its allocations in its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from producers import vision
from torch import nn
from torch.nn import functional

from pytest_gpumem import simulate
from pytest_gpumem.simulated.operators import convolution, convolution_choice

IMAGE = 2 * 128 * 32 * 32 * 4
WEIGHTS = 128 * 128 * 9 * 4


def conv(**settings: Any) -> nn.Conv2d:
    values: dict[str, Any] = {"kernel_size": 3, "padding": 1, "bias": False, **settings}
    return nn.Conv2d(128, 128, **values).cuda()


def image(grad: bool = True) -> torch.Tensor:
    return torch.randn(2, 128, 32, 32, device="cuda", requires_grad=grad)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of kernels that are chosen during the test."""
    taken: list[str] = []
    choose: Callable[..., str] = convolution_choice.kernel_of

    def spy(*args: Any) -> str:
        taken.append(choose(*args))
        return taken[-1]

    monkeypatch.setattr(convolution, "kernel_of", spy)
    return taken


@pytest.mark.parametrize(
    ("model", "version", "dtype", "groups", "kernel"),
    [
        ("A100-40GB", "2.6", torch.float32, 1, "cudnn"),
        ("A100-40GB", "2.6", torch.bfloat16, 1, "cudnn"),
        ("T4", "2.6", torch.bfloat16, 1, "slow"),
        ("T4", "2.6", torch.float16, 1, "cudnn"),
        ("A100-40GB", "2.6", torch.float32, 128, "depthwise"),
        ("A100-40GB", "2.6", torch.float16, 128, "cudnn"),
        ("A100-40GB", "2.6", torch.bfloat16, 128, "depthwise"),
        ("A100-40GB", "2.6", torch.float32, 64, "cudnn"),
    ],
)
def test_the_kernel_depends_on_gpu_dtype_and_groups(
    on: Any,
    kernels: list[str],
    model: str,
    version: str,
    dtype: torch.dtype,
    groups: int,
    kernel: str,
) -> None:
    on(model, version)
    conv(groups=groups).to(dtype)(image().to(dtype))
    assert kernels == [kernel]


def test_channels_last_depthwise_goes_to_cudnn(on: Any, kernels: list[str]) -> None:
    on()
    conv(groups=128)(image().contiguous(memory_format=torch.channels_last))
    assert kernels == ["cudnn"]


def test_volumes_of_halves_avoid_releases_of_cudnn_with_a_bug(on: Any, kernels: list[str]) -> None:
    for version in ("2.8", "2.9"):
        on("A100-40GB", version)
        layer = nn.Conv3d(8, 8, 3).cuda().bfloat16()
        layer(torch.randn(1, 8, 8, 8, 8, device="cuda", dtype=torch.bfloat16))
    assert kernels == ["cudnn", "slow"]


def test_without_cudnn_each_group_has_its_own_copies(on: Any) -> None:
    # As torch's own code allocates on the dry device: of two groups, 3 of 6 channels of the output
    # and 2 of 4 of the input, 2 images of 9 x 9 numbers.
    gpu = on()
    layer = nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False).cuda()
    x = torch.randn(2, 4, 9, 9, device="cuda", requires_grad=True)
    outputs, inputs, weights = 2 * 3 * 81 * 4, 2 * 2 * 81 * 4, 3 * 2 * 9 * 4
    columns = 2 * 9 * 81 * 4
    with torch.backends.cudnn.flags(enabled=False):
        output = layer(x)
        gradient = torch.ones_like(output)
        torch.autograd.grad(output, (x, layer.weight), gradient, retain_graph=True)
        gpu.events()
        torch.autograd.grad(output, (x, layer.weight), gradient)
    group = [outputs, inputs, inputs, columns, weights, -columns, -inputs, -outputs]
    both = [2 * inputs, 2 * weights, -weights, -weights, -inputs, -inputs]
    assert gpu.events()[: len(group + group + both)] == group + group + both


def test_forward_allocates_the_output_then_the_workspace(on: Any) -> None:
    gpu = on()
    layer, x = conv(bias=True), image()
    # cuDNN's estimate: both operands transposed, and sixteen bytes.
    workspace = IMAGE + WEIGHTS + 16
    assert gpu.of(lambda: layer(x)) == [IMAGE, workspace, -workspace]


def test_the_workspace_depends_on_both_sides_of_the_kernel(on: Any) -> None:
    gpu = on()
    x = torch.randn(1, 16, 128, 128, device="cuda")
    square, wide = (nn.Conv2d(16, 32, kernel).cuda() for kernel in ((3, 3), (1, 3)))
    # As recorded in JasperSolt/EoR_NN: weights and their 4x4 tiles, of a kernel of 3x3 alone.
    assert 51_328 in gpu.of(lambda: square(x))
    # Of another kernel both operands are transposed.
    assert 4 * 16 * (128 * 128 + 32 * 3) + 16 in gpu.of(lambda: wide(x))


def test_a_volume_of_halves_has_the_published_peak(on: Any) -> None:
    # pytorch#95024: max_memory_allocated and max_memory_reserved.
    on("A100-80GB", "2.13")
    volume = torch.empty(1, 64, 361, 370, 251, device="cuda", dtype=torch.float16)
    layer = nn.Conv3d(64, 32, 3, padding=1).half().cuda()
    layer(volume)
    assert torch.cuda.max_memory_allocated() == 12_874_233_344
    assert torch.cuda.max_memory_reserved() == 12_880_707_584


def test_backward_allocates_input_then_weight_then_bias(on: Any) -> None:
    gpu = on()
    layer, x = conv(bias=True), image()
    output = layer(x)
    gradient = torch.ones_like(output)
    workspace = 2 * IMAGE + WEIGHTS + 16
    events = gpu.of(lambda: output.backward(gradient))
    assert events[:7] == [IMAGE, workspace, -workspace, WEIGHTS, workspace, -workspace, 512]


def test_a_plan_without_workspace_runs_when_it_does_not_fit(on: Any) -> None:
    gpu = on()
    layer, x = conv(), image(grad=False)
    total = torch.cuda.get_device_properties(0).total_memory
    # The output fits in a segment of 2 MiB; the workspace wants one of 20 MiB.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 2**20) / total)
    assert gpu.of(lambda: layer(x)) == [IMAGE]
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert gpu.of(lambda: layer(x)) == [IMAGE]  # the plan that ran is kept
    larger = torch.randn(4, 128, 32, 32, device="cuda")
    workspace = 2 * IMAGE + WEIGHTS + 16
    assert gpu.of(lambda: layer(larger)) == [2 * IMAGE, workspace, -workspace]


def test_channels_last_weights_make_channels_last_outputs(on: Any) -> None:
    gpu = on()
    layer, x = conv(), image(grad=False)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    events = gpu.of(lambda: layer(x))
    assert events == [IMAGE, IMAGE, -IMAGE]  # the input's copy, freed after the call
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


def test_a_depthwise_convolution_has_the_recorded_events(on: Any) -> None:
    # HugePandaCoder/octree-nca-groupeq, 796241: 16 channels of 302 x 302 pixels, channels last.
    gpu = on()
    layer = nn.Conv2d(16, 16, 3, groups=16).cuda()
    x = torch.rand(1, 302, 302, 16, device="cuda").permute(0, 3, 1, 2)
    padded: list[torch.Tensor] = []
    events = gpu.of(lambda: padded.append(functional.pad(x, (1, 1, 1, 1), mode="reflect")))
    assert events == [5_914_624, 5_837_056, -5_837_056]
    with torch.no_grad():
        assert gpu.of(lambda: layer(padded[0])) == [5_837_056]


def test_depthwise_backward_computes_the_weight_first(on: Any) -> None:
    gpu = on()
    layer, x = conv(groups=128), image()
    output = layer(x)
    gradient = torch.ones_like(output)
    events = gpu.of(lambda: output.backward(gradient))
    assert events[:2] == [128 * 9 * 4, IMAGE]


def test_depthwise_kernels_read_contiguous_weights_and_biases(on: Any) -> None:
    gpu = on()
    # Convolutions of complex numbers are three of their parts, which lie beside each other.
    weight = torch.zeros(128, 1, 3, 3, dtype=torch.complex64, device="cuda").real
    bias = torch.zeros(128, dtype=torch.complex64, device="cuda").real
    x, numbers = image(grad=False), 128 * 9 * 4
    events = gpu.of(lambda: functional.conv2d(x, weight, bias, padding=1, groups=128))
    assert events == [numbers, 512, IMAGE, -512, -numbers]


def test_a_volumes_bias_is_summed_before_its_gradients_copy_is_freed(on: Any) -> None:
    gpu = on()
    x, weight, bias = (
        torch.zeros(shape, device="cuda", requires_grad=True)
        for shape in ((2, 4, 8, 8, 8), (4, 1, 3, 3, 3), (4,))
    )
    with torch.backends.cudnn.flags(enabled=False):
        output = functional.conv3d(x, weight, bias, groups=4)
    gradient = torch.zeros(*output.shape, 2, device="cuda")[..., 0]
    events = gpu.of(lambda: torch.autograd.grad(output, (x, weight, bias), gradient))
    copy = output.nbytes
    assert events == [x.nbytes, weight.nbytes, copy, bias.nbytes, -copy]


def test_without_cudnn_patches_become_columns(on: Any) -> None:
    gpu = on()
    layer, x = conv(), image()
    columns = 128 * 9 * 32 * 32 * 4
    with torch.backends.cudnn.flags(enabled=False):
        assert gpu.of(lambda: layer(x)) == [IMAGE, columns, 8_519_680, -columns]


def test_transposed_convolution(on: Any) -> None:
    gpu = on()
    layer = nn.ConvTranspose2d(128, 128, 4, 2, 1, bias=False).cuda()
    x = image()
    workspace = 5 * IMAGE + layer.weight.numel() * 4 + 16
    assert gpu.of(lambda: layer(x)) == [4 * IMAGE, workspace, -workspace]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(4, 8, 3, padding=1), (2, 4, 10)),
        (lambda: nn.Conv2d(4, 8, 3, 2, groups=2), (2, 4, 11, 10)),
        (lambda: nn.Conv3d(4, 8, (1, 3, 3), dilation=2), (2, 4, 9, 9, 9)),
        (lambda: nn.ConvTranspose1d(4, 8, 3, 2, output_padding=1), (2, 4, 10)),
        (lambda: nn.ConvTranspose2d(4, 8, 4, 2, 1, groups=2), (2, 4, 10, 10)),
        (lambda: nn.ConvTranspose3d(4, 8, 3), (2, 4, 5, 5, 5)),
        (lambda: nn.Conv2d(4, 8, 3), (4, 9, 9)),
        (lambda: nn.Conv2d(4, 8, 3), (0, 4, 9, 9)),
        (lambda: nn.Conv2d(4, 8, 3, padding="same"), (2, 4, 9, 9)),
    ],
)
def test_shapes_equal_those_of_the_cpu(
    on: Any, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    expected = make()(torch.randn(shape)).shape
    on()
    layer = make().cuda()
    x = torch.randn(shape, device="cuda", requires_grad=True)
    output = layer(x)
    assert output.shape == expected
    output.sum().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape


def test_cpu_convolutions_compute(on: Any) -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.rand(1, 3, 8, 8)
    with torch.no_grad():
        expected = layer(x)
        on()
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: nn.Conv2d(5, 4, 3).cuda()(x), "to have 5 channels, but got 3"),
        (lambda x: nn.Conv2d(3, 4, 11).cuda()(x), "Kernel size can't be greater than actual"),
        (lambda x: nn.Conv2d(3, 4, 3)(x), r"weight type \(torch.float32 on cpu\) should be"),
    ],
)
def test_invalid_arguments_raise_torchs_errors(
    on: Any, call: Callable[[torch.Tensor], object], message: str
) -> None:
    on()
    with pytest.raises(RuntimeError, match=message):
        call(torch.rand(1, 3, 8, 8, device="cuda"))


@pytest.mark.parametrize(
    ("optimizer", "peak", "final"),
    [("SGD", 283_144_680, 111_570_920), ("Adam", 529_772_520, 320_983_016)],
)
def test_resnet50_has_the_peaks_of_an_a10g(optimizer: str, peak: int, final: int) -> None:
    # tonghuikang/optimizer-memory-profiles; earlier blocks count there by requested bytes.
    before = 103_047_144
    with simulate("A10G", torch_version="2.6", alloc_conf="") as gpu:
        model = vision.resnet50().cuda()
        x = torch.randn(1, 3, 224, 224, device="cuda")
        labels = torch.rand_like(model(x))
        stepper = getattr(torch.optim, optimizer)(model.parameters())
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            prediction = model(x)
            functional.cross_entropy(prediction, labels).backward()
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        assert torch.cuda.max_memory_allocated() - start + before == peak
        assert torch.cuda.memory_allocated() - start + before == final
    assert any("estimate" in note for note in gpu.notes)
