"""Launches of Triton kernels on simulated GPUs, with the stand-in for Triton.

``test_real_triton.py`` does the same with Triton itself, where it is installed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from pytest_gpumem import simulate, simulate_operator
from pytest_gpumem.simulated.operators.custom_kernels import DESCRIPTIONS
from pytest_gpumem.values.errors import UnknownValueError, UnsupportedOperatorError
from tests.simulated.surface.triton_kernels.stand_in import (
    Autotuner,
    Config,
    GridExecutor,
    Heuristics,
    JITFunction,
    driver,
    triton,
)

__all__ = ["triton"]

tl: Any = None


def add_kernel(x_ptr: Any, y_ptr: Any, out_ptr: Any, n: Any, BLOCK: Any = 128) -> None:  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@pytest.fixture(autouse=True)
def language(triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "tl", vars(triton)["language"])


@pytest.fixture
def kernel() -> JITFunction:
    return JITFunction(add_kernel)


def tensors(count: int = 256) -> list[torch.Tensor]:
    return [torch.ones(count, device="cuda") for _ in range(3)]


def test_a_launch_allocates_nothing_itself(
    kernel: JITFunction,
) -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[(2,)](x, y, out, x.numel())
        return out

    with simulate("T4") as gpu:
        x, y, _ = tensors()
        add(x, y)
        assert [event.size for event in gpu.trace if event.action == "alloc"] == [1024] * 4


def test_only_arguments_that_the_kernel_stores_to_become_unknown(kernel: JITFunction) -> None:
    with simulate("T4"):
        x, y, out = (torch.arange(3, device="cuda") for _ in range(3))
        kernel[(1,)](x, y, out_ptr=out, n=3)
        assert (x.tolist(), y.tolist()) == ([0, 1, 2], [0, 1, 2])
        with pytest.raises(UnknownValueError):
            out.sum().item()


def test_tensors_of_the_cpu_are_refused_and_pinned_ones_are_not(kernel: JITFunction) -> None:
    with simulate("T4"):
        x, y, out = tensors()
        with pytest.raises(ValueError, match=r"Pointer argument \(at 1\) cannot be accessed"):
            kernel[(1,)](x, torch.ones(3), out, 256)
        with pytest.raises(ValueError, match=r"Pointer argument \(at 0\) cannot be accessed"):
            kernel[(1,)](x.cpu(), y, out, 256)
        kernel[(1,)](x, torch.ones(256).pin_memory(), out, 256)


def test_reading_a_kernels_output_names_it_with_real_values(
    kernel: JITFunction,
) -> None:
    with simulate("T4", real_values=True):
        x, y, out = tensors()
        kernel[(2,)](x, y, out, 256)
        assert x.sum().item() == 256
        sentence = r"because the Triton kernel \S*add_kernel cannot be computed on the CPU"
        with pytest.raises(UnknownValueError, match=sentence):
            out.sum().item()


def test_a_kernels_output_is_assumed_finite_with_real_values(
    kernel: JITFunction,
) -> None:
    with simulate("T4", real_values=True):
        x, y, out = tensors()
        kernel[(2,)](x, y, out, 256)
        total = out.float().sum() / 2
        assert not torch.isnan(total)
        assert not torch.isinf(total)


def test_the_autotuner_takes_the_first_configuration_without_timing(kernel: JITFunction) -> None:
    tuner = Autotuner(kernel, [Config({"BLOCK": 64}), Config({"BLOCK": 32})])
    with simulate("T4") as gpu:
        tuner[(1,)](*tensors(), 256)
        assert gpu.peak_allocated == 3 * 1024
    assert tuner.best_config.kwargs == {"BLOCK": 64}
    (note,) = gpu.notes
    assert note.startswith(f"{__name__}.add_kernel at tests/simulated/")
    assert note.endswith("Triton's runs clear 256 MiB of memory, which is left out")
    assert tuner.cache == {}, "a real GPU would never time it"


def test_allocations_of_a_custom_do_bench_are_left_out(kernel: JITFunction) -> None:
    tuner = Autotuner(kernel, [Config({})], do_bench=lambda *_, **__: [1.0])
    with simulate("T4") as gpu:
        tuner[(1,)](*tensors(), 256)
    assert gpu.notes[0].endswith("what its own do_bench allocates is left out")


def test_heuristics_see_the_arguments(kernel: JITFunction) -> None:
    seen: list[int] = []
    chosen = Heuristics(kernel, {"BLOCK": lambda given: seen.append(given["n"])})
    with simulate("T4"):
        chosen[(1,)](*tensors(), 256)
    assert seen == [256]


def test_a_kernel_is_compiled_on_the_dry_device_alone(kernel: JITFunction) -> None:
    with simulate("T4"), pytest.raises(UnsupportedOperatorError) as caught:
        kernel.warmup(*tensors(), 256, grid=(1,))
    assert f"compiles the Triton kernel {__name__}.add_kernel, which no " in str(caught.value)
    assert str(caught.value).endswith("run pytest --gpumem-device=dry")


def test_the_driver_answers_for_the_gpu(triton: ModuleType) -> None:
    with simulate("A100-40GB*2"):
        active = driver.active
        assert active.get_current_target() == ("cuda", 80)
        with torch.cuda.device(1):
            assert active.get_current_device() == 1
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert active.get_current_stream(0) == stream.cuda_stream
        properties = active.utils.get_device_properties(0)
        assert properties["multiprocessor_count"] == 108
        assert properties["max_shared_mem"] == 163 * 1024
        with pytest.raises(UnsupportedOperatorError, match="for sm_clock_rate, which no simulated"):
            _ = properties["sm_clock_rate"]
        with pytest.raises(
            UnsupportedOperatorError, match=r"test_launches.py:\d+ asks for load_bin"
        ):
            active.utils.load_binary("name", b"", 0, 0)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        _ = driver.active


def test_the_interpreter_computes_tensors_of_the_cpu_alone() -> None:
    executor = GridExecutor(add_kernel)
    with simulate("T4"):
        assert executor(torch.ones(3)) == "computed on the CPU"
        x = torch.arange(3, device="cuda")
        assert executor(x) is None
        with pytest.raises(UnknownValueError):
            x.sum().item()


def test_a_replay_of_a_graph_writes_again(kernel: JITFunction) -> None:
    with simulate("T4"):
        x, y, out = (torch.arange(3, device="cuda") for _ in range(3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel[(1,)](x, y, out, 3)
        out.fill_(7)
        assert out.tolist() == [7, 7, 7]
        graph.replay()
        with pytest.raises(UnknownValueError):
            out.sum().item()


@pytest.fixture
def no_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DESCRIPTIONS, "kernels", {})


@pytest.mark.usefixtures("no_descriptions")
def test_a_description_replaces_a_kernel(kernel: JITFunction) -> None:
    seen = []
    tuner = Autotuner(kernel, [Config({"BLOCK": 64})])
    simulate_operator(tuner)(lambda *args, **options: seen.append((len(args), options)))
    with simulate("T4") as gpu:
        for launched in (kernel, tuner):
            launched[(1,)](*tensors(), 256, num_warps=4)
        assert kernel.warmup(*tensors(), 256, grid=(1,)) is None
        assert seen == [(4, {"num_warps": 4})] * 2
        assert gpu.notes == ()
    with pytest.raises(AssertionError, match="was compiled"):
        kernel[(1,)](*(torch.ones(3) for _ in range(3)), 256)
