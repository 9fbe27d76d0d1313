"""Features of the marker and the options, on the device that ``torch.cuda`` reports."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import CudaProject
from tests.gpu.device import is_dry, stands_in

MIB = 1 << 20

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="torch.compile needs Triton for a GPU"
)

ALLOCATE = """
    def allocate(mib, device="cuda"):
        return torch.empty(mib << 20, dtype=torch.uint8, device=device)
"""


def line_of(project: CudaProject, module: str, text: str) -> str:
    """Return ``module:line`` of the first line that contains ``text``."""
    lines = (project.path / module).read_text().splitlines()
    return f"{module}:{1 + next(at for at, line in enumerate(lines) if text in line)}"


def measured(project: CudaProject, source: str, *arguments: str) -> dict[str, Any]:
    """Run the tests of ``source`` and return their records, by name."""
    project.write(test_it=ALLOCATE + source)
    return project.records(*arguments)


def test_the_dropout_state_of_cudnn_is_not_counted_as_a_leak(cuda: CudaProject) -> None:
    """Torch keeps the state until the process ends."""
    record = measured(
        cuda,
        """
    @pytest.mark.gpumem(max_leak=0)
    def test_recurs():
        layer = torch.nn.LSTM(8, 8, 2, dropout=0.5, device="cuda")
        layer(torch.ones(3, 2, 8, device="cuda"))[0].sum().backward()
    """,
    )["test_recurs"]

    assert (record["outcome"], record["measurement"]["leaked"]) == ("passed", 0)


@pytest.mark.skipif(is_dry(), reason="kernels compute nothing, and no device follows values")
def test_a_printed_tensor_is_formatted_on_its_device(cuda: CudaProject) -> None:
    record = measured(
        cuda,
        """
    @pytest.mark.gpumem
    def test_prints():
        print(torch.randn(10, device="cuda"))
    """,
    )["test_prints"]

    # Seven blocks (_Formatter of torch/_tensor_str.py): the numbers, those that are not zero, their
    # amounts, the least and the largest of these, the ratio, and whether that is above 1,000.
    assert record["measurement"]["peak_allocated"] == 7 * 512
    assert not [note for note in record["measurement"]["notes"] if "again" in note or "NaN" in note]


def test_the_measurement_is_that_of_the_last_repeat(cuda: CudaProject) -> None:
    records = measured(
        cuda,
        """
    runs = []

    @pytest.mark.gpumem(warmup=1, repeat=2)
    def test_it():
        runs.append(len(runs))
        allocate(1 + len(runs))

    def test_count():
        assert len(runs) == 3
""",
    )

    assert records["test_it"]["outcome"] == "passed"
    assert records["test_it"]["measurement"]["peak_allocated"] == 4 * MIB


def test_a_leak_names_its_holder(cuda: CudaProject) -> None:
    records = measured(
        cuda,
        """
    class Cache:
        def __init__(self):
            self.entries = []

    CACHE = Cache()

    @pytest.mark.gpumem(max_leak=0)
    def test_leaks():
        CACHE.entries.append(allocate(3))  # kept
""",
    )

    found = records["test_leaks"]
    assert found["outcome"] == "failed"
    assert found["measurement"]["leaked"] == 3 * MIB
    (leak,) = found["measurement"]["leaks"]
    assert leak["bytes"] == 3 * MIB
    assert leak["site"] == line_of(cuda, "test_it.py", "dtype=torch.uint8")
    assert "entries" in str(leak)


def test_phases_have_the_bytes_of_each_category(cuda: CudaProject) -> None:
    records = measured(
        cuda,
        """
    @pytest.mark.gpumem(max="1KiB")
    def test_step():
        model = torch.nn.Linear(512, 512, bias=False, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2048, 512, device="cuda")).sum().backward()
        optimizer.step()
""",
    )

    phases = records["test_step"]["measurement"]["phases"]
    assert list(phases)[-3:] == ["forward", "backward", "step"]
    assert phases["forward"]["composition"]["parameters"] == MIB
    assert phases["forward"]["composition"]["activations"] == 4 * MIB
    assert phases["step"]["composition"]["gradients"] == MIB
    assert phases["step"]["composition"]["optimizer state"] == MIB


def test_a_graph_and_a_pool_are_measured(cuda: CudaProject) -> None:
    records = measured(
        cuda,
        """
    @pytest.mark.gpumem(max_leak=0)
    def test_graph():
        static = torch.ones(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static * 2
        graph.replay()
        torch.cuda.synchronize()

    @pytest.mark.gpumem(max_leak=0)
    def test_pool():
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            inside = allocate(4)
        del inside
        allocate(2)
""",
    )

    assert {record["outcome"] for record in records.values()} == {"passed"}
    assert records["test_graph"]["measurement"]["peak_allocated"] >= 8 * MIB
    assert records["test_pool"]["measurement"]["peak_allocated"] == 4 * MIB


def test_a_quota_limits_one_test(cuda: CudaProject) -> None:
    records = measured(
        cuda,
        """
    @pytest.mark.gpumem(quota="64MiB")
    def test_within():
        allocate(30)

    @pytest.mark.gpumem(quota="64MiB")
    def test_beyond():
        allocate(30)
        allocate(200)

    @pytest.mark.gpumem
    def test_without():
        allocate(200)
""",
    )

    assert {name: record["outcome"] for name, record in records.items()} == {
        "test_within": "passed",
        "test_beyond": "failed",
        "test_without": "passed",
    }
    assert "quota" in str(records["test_beyond"])


def test_an_isolated_test_has_a_process_of_its_own(cuda: CudaProject) -> None:
    if stands_in() is not None:
        pytest.skip("the process of its own has no simulated device that stands in")
    cuda.write(
        test_it=ALLOCATE
        + f"""
    import os

    @pytest.mark.gpumem(isolate=True, max="4MiB")
    def test_alone():
        assert os.getpid() != {os.getpid()}
        allocate(4)
"""
    )

    records = cuda.records()

    assert records["test_alone"]["outcome"] == "passed"
    assert records["test_alone"]["measurement"]["peak_allocated"] == 4 * MIB


def test_workers_share_the_device(
    cuda: CudaProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stands_in() is not None:
        pytest.skip("NVML knows no simulated device")
    monkeypatch.setenv("GPUMEM_SHARE_DIR", str(tmp_path))
    if is_dry():
        monkeypatch.setenv("PYTEST_GPUMEM_DRY_SHARED", str(tmp_path))
    cuda.write(
        test_it=ALLOCATE
        + """
    @pytest.mark.gpumem
    @pytest.mark.parametrize("number", range(6))
    def test_part(number):
        allocate(100 + number)
"""
    )

    result = cuda.run("-n", "2", "--gpumem-share", "-p", "xdist")

    result.assert_outcomes(passed=6)


def test_every_device_that_a_test_uses_is_measured(cuda: CudaProject) -> None:
    if stands_in() is None and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if stands_in() is not None:
        pytest.skip("the simulated device that stands in is one GPU")
    records = measured(
        cuda,
        """
    @pytest.mark.gpumem(max="4MiB")
    def test_both():
        kept = allocate(3)
        allocate(4, "cuda:1")

    @pytest.mark.gpumem(max="4MiB")
    def test_too_much_on_the_second():
        allocate(1)
        allocate(5, "cuda:1")
""",
    )

    assert records["test_both"]["outcome"] == "passed"
    assert records["test_too_much_on_the_second"]["outcome"] == "failed"
    assert "cuda:1" in str(records["test_too_much_on_the_second"]["verdicts"])


@needs_triton
def test_compiled_code_is_measured(cuda: CudaProject) -> None:
    records = measured(
        cuda,
        """
    @torch.compile
    def fused(x):
        return torch.relu(x * 2 + 1).sum(-1)

    @pytest.mark.gpumem(warmup=1, max="1KiB")
    def test_compiled():
        fused(torch.ones(1024, 1024, device="cuda"))
""",
    )

    found = records["test_compiled"]["measurement"]
    # The argument and the sums: one kernel fuses the operators between them.
    assert found["peak_allocated"] == 4 * MIB + 4096


@needs_triton
def test_a_compiled_kernel_leaves_its_inputs_values_known(cuda: CudaProject) -> None:
    records = measured(
        cuda,
        """
    @torch.compile
    def scaled(x, factor):
        return x * factor + 1

    @pytest.mark.gpumem
    def test_decides_by_an_argument():
        count = torch.tensor([3], device="cuda")
        scaled(torch.ones(8, device="cuda"), count)
        assert torch.empty(int(count), device="cuda").numel() == 3
""",
    )

    assert records["test_decides_by_an_argument"]["outcome"] == "passed"
