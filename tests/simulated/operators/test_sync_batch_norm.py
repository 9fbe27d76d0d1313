"""The parts of a batch norm over several processes, and cuDNN's convolutions by name."""

from __future__ import annotations

import pytest
import torch

from pytest_gpumem import simulate
from pytest_gpumem.simulated.simulation import SimulatedGPU


def allocations(gpu: object, before: int) -> list[int]:
    return [event.size for event in gpu.trace[before:] if event.action == "alloc"]  # type: ignore[attr-defined]  # of a run


CHANNELS, BYTES = 16, 16 * 4


class TestAllocations:
    def test_statistics_are_in_the_type_of_sums(self) -> None:
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

    def test_counts_come_from_the_host_and_change_their_type(self) -> None:
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
    def test_backward_reduces_what_is_wanted(
        self, wanted: tuple[bool, bool, bool], made: int
    ) -> None:
        with simulate("T4") as gpu:
            x = torch.ones(4, CHANNELS, 8, 8, device="cuda")
            mean = torch.ones(CHANNELS, device="cuda")
            before = len(gpu.trace)
            results = torch.batch_norm_backward_reduce(x, x, mean, mean, mean, *wanted)
            assert allocations(gpu, before) == [BYTES] * made
            assert [result is not None for result in results].count(True) == made


def test_values_are_those_of_a_batch_norm_over_all_samples() -> None:
    torch.manual_seed(0)
    parts = [torch.rand(4, 3, 5, 5, dtype=torch.float64) for _ in range(2)]
    gradients = [torch.rand(4, 3, 5, 5, dtype=torch.float64) for _ in range(2)]
    weight = torch.rand(3, dtype=torch.float64)
    whole = torch.cat(parts).requires_grad_()
    scale = weight.clone().requires_grad_()
    running_mean, running_var = torch.zeros(3).double(), torch.ones(3).double()
    expected = torch.nn.functional.batch_norm(
        whole, running_mean, running_var, scale, None, training=True
    )
    expected.backward(torch.cat(gradients))
    assert whole.grad is not None
    assert scale.grad is not None

    with simulate("T4", real_values=True):
        inputs = [part.cuda() for part in parts]
        stats = [torch.batch_norm_stats(one, 1e-5) for one in inputs]
        means, invstds = (torch.stack(each) for each in zip(*stats, strict=True))
        mean_of_all, var_of_all = torch.zeros(3).double().cuda(), torch.ones(3).double().cuda()
        mean, invstd = torch.batch_norm_gather_stats(
            inputs[0], means, invstds, mean_of_all, var_of_all, 0.1, 1e-5, 100
        )
        outputs = [
            torch.batch_norm_elemt(one, weight.cuda(), None, mean, invstd, 1e-5) for one in inputs
        ]
        sums = [
            torch.batch_norm_backward_reduce(
                gradient.cuda(), one, mean, invstd, weight.cuda(), True, True, True
            )
            for gradient, one in zip(gradients, inputs, strict=True)
        ]
        sum_dy, sum_dy_xmu, grad_weight, _ = (sum(each) for each in zip(*sums, strict=True))
        counts = torch.tensor([100, 100], dtype=torch.int32).cuda()
        grad_inputs = [
            torch.batch_norm_backward_elemt(
                gradient.cuda(), one, mean, invstd, weight.cuda(), sum_dy, sum_dy_xmu, counts
            )
            for gradient, one in zip(gradients, inputs, strict=True)
        ]
        torch.testing.assert_close(torch.cat(outputs).cpu(), expected.detach())
        torch.testing.assert_close(torch.cat(grad_inputs).cpu(), whole.grad)
        torch.testing.assert_close(grad_weight.cpu(), scale.grad)
        torch.testing.assert_close(mean_of_all.cpu(), running_mean)
        torch.testing.assert_close(var_of_all.cpu(), running_var)


def test_statistics_are_gathered_without_running_ones() -> None:
    with simulate("T4", real_values=True):
        ones = torch.ones(2, 3, device="cuda")
        x = torch.rand(1, 3, 3, 3, device="cuda")
        mean, invstd = torch.batch_norm_gather_stats(x, ones, ones, None, None, 0.1, 1e-5, 2)
        torch.testing.assert_close(mean.cpu(), torch.ones(3))
        torch.testing.assert_close(invstd.cpu(), torch.ones(3))


class TestConvolutionsByName:
    PLAIN = ((1, 1), (2, 2), (1, 1))
    """Padding, stride and dilation."""

    def test_they_take_what_a_convolution_takes(self) -> None:
        def run(name: str) -> list[int]:
            gpu = SimulatedGPU("T4")
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

    def test_values(self) -> None:
        x, weight, bias = torch.rand(2, 4, 8, 8), torch.rand(6, 4, 3, 3), torch.rand(6)
        padding, stride, dilation = self.PLAIN
        expected = torch.conv2d(x, weight, bias, stride, padding, dilation)
        z = -2 * expected
        back = torch.conv_transpose2d(expected, weight, None, stride, padding, (1, 1))
        with simulate("T4", real_values=True):
            gpu = [one.cuda() for one in (x, weight, bias, z, expected)]
            fused = torch.cudnn_convolution_add_relu(
                gpu[0], gpu[1], gpu[3], 0.25, gpu[2], stride, padding, dilation, 1
            )
            transposed = torch.cudnn_convolution_transpose(
                gpu[4], gpu[1], padding, (1, 1), stride, dilation, 1, False, False, True
            )
            torch.testing.assert_close(fused.cpu(), (expected / 2).relu())
            torch.testing.assert_close(transposed.cpu(), back)
