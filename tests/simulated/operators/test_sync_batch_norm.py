"""The operators of SyncBatchNorm, and cuDNN's convolutions called by name."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.simulation import SimulatedGPU
from pytest_gpumem.values.errors import UnknownValueError


def allocations(gpu: object, before: int) -> list[int]:
    return [event.size for event in gpu.trace[before:] if event.action == "alloc"]  # type: ignore[attr-defined]  # of a run


CHANNELS, BYTES = 16, 16 * 4


class TestAllocations:
    def test_statistics_have_the_accumulation_type(self) -> None:
        with simulate("T4") as gpu:
            x = torch.ones(4, CHANNELS, 8, 8, device="cuda", dtype=torch.float16)
            before = len(gpu.trace)
            mean, invstd = torch.batch_norm_stats(x, 1e-5)
            assert mean.dtype == invstd.dtype == torch.float32
            assert allocations(gpu, before) == [BYTES, BYTES]

    def test_channels_last_statistics_have_partial_results(self) -> None:
        with simulate("T4") as gpu:
            x = torch.ones(64, CHANNELS, 64, 64, device="cuda")
            x = x.to(memory_format=torch.channels_last)
            before = len(gpu.trace)
            torch.batch_norm_stats(x, 1e-5)
            # 16 channels wide and 32 high, so 512 of 64 * 64 * 64 positions are one block of
            # threads: 262,144 / (32 * 16) = 512 blocks, of which 128 are made.
            assert allocations(gpu, before) == [BYTES, BYTES, 4 * CHANNELS * 128 * 4, 4]

    def test_counts_are_copied_from_the_host_and_converted(self) -> None:
        with simulate("T4") as gpu:
            x = torch.ones(1, CHANNELS, 3, 3, device="cuda")
            mean = torch.ones(2, CHANNELS, device="cuda")
            before = len(gpu.trace)
            torch.batch_norm_gather_stats(x, mean, mean, None, None, 0.1, 1e-5, 2)
            # Two int64, two float32, mean and deviation.
            assert allocations(gpu, before) == [16, 8, BYTES, BYTES]

    @pytest.mark.parametrize(
        ("wanted", "made"), [((True, True, True), 4), ((True, False, False), 2)]
    )
    def test_backward_reduces_requested_gradients_alone(
        self, wanted: tuple[bool, bool, bool], made: int
    ) -> None:
        with simulate("T4") as gpu:
            x = torch.ones(4, CHANNELS, 8, 8, device="cuda")
            mean = torch.ones(CHANNELS, device="cuda")
            before = len(gpu.trace)
            results = torch.batch_norm_backward_reduce(x, x, mean, mean, mean, *wanted)
            assert allocations(gpu, before) == [BYTES] * made
            assert [result is not None for result in results].count(True) == made


def test_values_of_the_statistics_are_unknown() -> None:
    with simulate("T4", real_values=True):
        mean, _ = torch.batch_norm_stats(torch.ones(4, 3, 5, 5, device="cuda"), 1e-5)
        assert mean.shape == (3,)
        with pytest.raises(UnknownValueError, match="batch_norm_stats"):
            mean.sum().item()


class TestConvolutionsByName:
    PLAIN = ((1, 1), (2, 2), (1, 1))
    """Padding, stride and dilation."""

    def test_cudnn_convolutions_allocate_as_conv2d(self) -> None:
        def run(name: str) -> list[int]:
            (gpu,) = SimulatedGPU.machine("T4")
            with gpu.active():
                x = torch.ones(4, 8, 16, 16, device="cuda")
                weight = torch.ones(8, 8, 3, 3, device="cuda")
                before = len(gpu.allocator.trace)
                padding, stride, dilation = self.PLAIN
                if name == "conv2d":
                    torch.conv2d(x, weight, None, stride, padding, dilation)
                elif name == "cudnn_convolution_relu":
                    torch.cudnn_convolution_relu(x, weight, None, stride, padding, dilation, 1)
                else:
                    torch.cudnn_convolution(
                        x, weight, padding, stride, dilation, 1, False, False, True
                    )
                return [
                    event.size for event in gpu.allocator.trace[before:] if event.action == "alloc"
                ]

        assert run("cudnn_convolution") == run("cudnn_convolution_relu") == run("conv2d")
