"""Normalisation: the choice of cuDNN's batch norm, and the allocations of all kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_gpumem import simulate


def norm_of(x: torch.Tensor, norm: nn.Module) -> str:
    return str(norm(x).grad_fn.name())


@pytest.mark.parametrize(
    ("shape", "node"),
    [
        ((32, 64, 8), "CudnnBatchNormBackward0"),
        ((32, 64), "NativeBatchNormBackward0"),
        ((32, 64, 8, 8), "CudnnBatchNormBackward0"),
    ],
    ids=["1d", "1d, without length", "2d"],
)
def test_batch_norm_of_float32_runs_cudnn(on: Any, shape: tuple[int, ...], node: str) -> None:
    on()
    norm = (nn.BatchNorm1d if len(shape) < 4 else nn.BatchNorm2d)(64).cuda()
    assert norm_of(torch.randn(shape, device="cuda"), norm) == node


def test_batch_norm_of_halves_or_without_affine_runs_native(on: Any) -> None:
    on()
    x = torch.randn(32, 64, 4, device="cuda", requires_grad=True)
    assert norm_of(x.bfloat16(), nn.BatchNorm1d(64).cuda().bfloat16()).startswith("Native")
    assert norm_of(x.half(), nn.BatchNorm1d(64).cuda().half()).startswith("Native")
    assert norm_of(x.half(), nn.BatchNorm1d(64).cuda()).startswith("Cudnn")
    assert norm_of(x, nn.BatchNorm1d(64, affine=False).cuda()).startswith("Native")


def test_batch_norm_saves_two_statistics(on: Any) -> None:
    # HugePandaCoder/octree-nca-groupeq: the output and two vectors, no workspace.
    gpu = on()
    norm = uncounted(nn.BatchNorm2d(64))
    x = torch.randn(4, 64, 8, 8, device="cuda")
    assert gpu.of(lambda: norm(x)) == [4 * 64 * 64 * 4, 256, 256]


def test_a_copy_of_the_input_goes_before_the_statistics(on: Any) -> None:
    # HugePandaCoder/octree-nca-groupeq d47727a2, Model_BasicNCA3D.py: inference over a transposed
    # volume, normalised by its own statistics.
    gpu = on()
    norm = nn.BatchNorm3d(64, track_running_stats=False).cuda()
    x = torch.randn(1, 6, 5, 4, 64, device="cuda").transpose(1, 4)
    nbytes = 64 * 6 * 5 * 4 * 4
    with torch.no_grad():
        assert gpu.of(lambda: norm(x)) == [nbytes, nbytes, 256, 256, -nbytes, -256, -256]


def uncounted(norm: nn.Module) -> nn.Module:
    norm.num_batches_tracked = None  # type: ignore[assignment]  # its increment is not the kernel's
    return norm.cuda()


def test_batch_norm_of_many_rows_has_staging_buffers(on: Any) -> None:
    # flexible_launch_configs: blocks of 32 x 16; 4096 rows make 16 of them, 64 channels two.
    gpu = on()
    norm = uncounted(nn.BatchNorm1d(64))
    x = torch.randn(4096, 64, device="cuda", requires_grad=True)
    output = 4096 * 64 * 4
    staged = [4 * 64 * 16 * 4, 4 * 2]
    forward = gpu.of(lambda: norm(x))
    assert forward == [output, 256, 256, *staged, *(-size for size in reversed(staged))]
    result = norm(x)
    gradient = torch.ones_like(result)
    staged = [2 * 64 * 16 * 4, 4 * 2]
    events = gpu.of(lambda: result.backward(gradient))
    assert events[:8] == [256, 256, 256, 256, *staged, -8, -staged[0]]
    assert events[8:11] == [output, -256, -256]


def test_the_general_backward_of_batch_norm_makes_a_missing_weight(on: Any) -> None:
    # batch_norm_elementwise_backward_train: scalar_tensor(1), where layouts differ.
    gpu = on()
    x = torch.randn(33, 100, device="cuda", requires_grad=True)
    output, sums = 33 * 100 * 4, [400, 400]
    for weight, taken in ((None, [4]), (torch.ones(100, device="cuda"), [])):
        result = functional.batch_norm(x, None, None, weight, training=True)
        expanded = torch.ones((), device="cuda").expand(33, 100)
        events = gpu.of(lambda result=result, given=expanded: result.backward(given))
        freed = [-size for size in reversed([*sums, *taken])]
        assert [*sums, *taken, output, *freed] == events[: 5 + 2 * len(taken)]
        x.grad = None


def test_gradients_of_weight_and_bias_alone_take_no_sums(on: Any) -> None:
    # batch_norm_backward_reduce: sum_dy and sum_dy_xmu are for the gradient of the input.
    gpu = on()
    norm = nn.BatchNorm1d(100).cuda().eval()
    result = norm(torch.randn(33, 100, device="cuda"))
    expanded = torch.ones((), device="cuda").expand(33, 100)
    assert gpu.of(lambda: result.backward(expanded))[:3] == [400, 400, -33 * 100 * 4]


def test_batch_norm_of_few_rows_has_no_staging_buffers(on: Any) -> None:
    gpu = on()
    norm = uncounted(nn.BatchNorm1d(64))
    x = torch.randn(1024, 64, device="cuda")
    assert gpu.of(lambda: norm(x)) == [1024 * 64 * 4, 256, 256]


def test_layer_norm_copies_what_is_not_contiguous(on: Any) -> None:
    gpu = on()
    norm = nn.LayerNorm(64).cuda()
    x = torch.randn(8, 64, 32, device="cuda").transpose(1, 2)
    size = 8 * 64 * 32 * 4
    assert gpu.of(lambda: norm(x)) == [size, size, 1024, 1024, -size]


@pytest.mark.parametrize(
    ("version", "rows", "partial"),
    [("2.7", 70_000, 0), ("2.8", 70_000, 2188 * 64 * 4), ("2.8", 60_000, 0)],
)
def test_many_short_rows_are_summed_in_blocks(
    on: Any, version: str, rows: int, partial: int
) -> None:
    gpu = on("A100-40GB", version)
    norm = nn.LayerNorm(64).cuda()
    x = torch.randn(rows, 64, device="cuda", requires_grad=True)
    output = norm(x)
    gradient = torch.ones_like(output)
    events = gpu.of(lambda: output.backward(gradient))
    assert events[:3] == [rows * 64 * 4, 256, 256]
    assert events.count(partial) == (2 if partial else 0)


def peaks(call: Callable[[], object]) -> float:
    """Return the median peak of ten calls in MiB, as in Liger's benchmarks."""
    found = []
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        call()
        found.append(torch.cuda.max_memory_allocated() / 2**20)
    return statistics.median(found)


@pytest.mark.parametrize(("channels", "mib"), [(32, 40.06640625), (2048, 2564.0625)])
def test_group_norm_has_the_peaks_of_a_b200(channels: int, mib: float) -> None:
    # linkedin/Liger-Kernel, all_benchmark_data.csv, group_norm, huggingface.
    with simulate("B200", torch_version="2.9", alloc_conf=""):
        norm, rival = (nn.GroupNorm(channels // 4, channels).cuda() for _ in range(2))
        x = torch.randn(128, channels, 512, device="cuda")
        gradient = torch.randn_like(x)
        x.requires_grad_(True)
        assert peaks(lambda: norm(x).backward(gradient, retain_graph=True)) == mib
        del rival


is_fused = pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="this torch has the parts alone"
)


@is_fused
@pytest.mark.parametrize(("size", "mib"), [(1024, 40.0224609375), (16384, 640.1103515625)])
def test_rms_norm_has_the_peaks_of_an_h100(size: int, mib: float) -> None:
    # linkedin/Liger-Kernel, all_benchmark_data.csv, megatron_rms_norm, torch.
    with simulate("H100", torch_version="2.9", alloc_conf=""):
        norm = nn.RMSNorm(size, eps=1e-6).cuda().bfloat16()
        x = torch.randn(4096, 1, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def full() -> None:
            output = norm(x)
            output.sum().backward()

        assert peaks(full) == mib


@is_fused
def test_rms_norm_is_composite_in_earlier_releases(on: Any) -> None:
    nodes = []
    for version in ("2.8", "2.9"):
        on("A100-40GB", version)
        norm = nn.RMSNorm(64).cuda()
        output = norm(torch.randn(8, 64, device="cuda", requires_grad=True))
        nodes.append(output.grad_fn.name())
    assert nodes == ["MulBackward0", "FusedRmsNormBackward0"]


@pytest.mark.parametrize(
    ("dtype", "converted"),
    [(torch.float32, []), (torch.float16, []), (torch.bfloat16, [1536, -1536])],
)
def test_batch_norm_of_channels_last_volumes_reduces_moments(
    on: Any, dtype: torch.dtype, converted: list[int]
) -> None:
    # Their moments are reduced, of bfloat16 in float32; weights and biases are made of none.
    gpu = on()
    x = torch.zeros(2, 3, 4, 4, 4, dtype=dtype, device="cuda")
    x = x.to(memory_format=torch.channels_last_3d)
    mean, variance = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    kept = [x.nbytes, 12, 12]
    events = gpu.of(lambda: torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5))
    assert events == [*kept, *converted, 4, 4, -4, -4]


def test_batch_norm_of_exported_programs_takes_the_same_kernels(on: Any) -> None:
    gpu = on("A100-40GB")
    update = torch.ops.aten._batch_norm_with_update
    weights = [torch.zeros(64, device="cuda") for _ in range(4)]
    rows = torch.zeros(4096, 64, device="cuda")
    # 32 channels of 16 rows in a block, 16 rows a thread: 16 blocks' four numbers of a channel.
    partial = [16 * 64 * 4 * 4, 4 * 2]
    taken = [rows.nbytes, 256, 256, *partial, -partial[1], -partial[0]]
    assert gpu.of(lambda: update(rows, *weights, 0.1, 1e-5)) == taken
    weights = [torch.zeros(3, device="cuda") for _ in range(4)]
    # Sums of each channel come before the gradients; cuDNN takes volumes and images.
    sums = [12, 12, 12, 12]
    images = torch.zeros(2, 3, 5, 5).to(memory_format=torch.channels_last)
    for x, first in ((torch.zeros(20, 3), [*sums, 240]), (images, [600, 12, 12])):
        given = [x.cuda().requires_grad_(), *[one.requires_grad_() for one in weights[:2]]]
        output = update(*given, *weights[2:], 0.1, 1e-5)[0]
        gradient = torch.ones_like(output)
        events = gpu.of(lambda: torch.autograd.grad(output, given, gradient))  # noqa: B023
        assert events[: len(first)] == first
