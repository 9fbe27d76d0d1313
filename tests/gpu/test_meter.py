"""The meter against ``torch.cuda`` and NVML."""

from __future__ import annotations

import json
from typing import Any

import torch

from pytest_gpumem.device.cuda import find_device
from tests.gpu.conftest import CudaProject
from tests.gpu.device import kept_workspaces

STEP = """
    import json
    from pathlib import Path
    from torch import nn

    def train():
        model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    @pytest.fixture(scope="module")
    def table():
        return torch.zeros(1 << 20, device="cuda")

    @pytest.mark.gpumem
    def test_step(table):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train()
        torch.cuda.synchronize()
        Path("seen.json").write_text(json.dumps({
            "before": before,
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }))
"""

TABLE = 4 << 20


def measured(cuda: CudaProject, *args: str) -> tuple[dict[str, Any], dict[str, int]]:
    cuda.write(test_step=STEP)
    record = cuda.records(*args)["test_step"]
    assert record["outcome"] == "passed"
    seen: dict[str, int] = json.loads((cuda.path / "seen.json").read_text())
    return record, seen


def test_the_meter_agrees_with_torch_cuda(cuda: CudaProject) -> None:
    record, seen = measured(cuda)

    measurement = record["measurement"]
    # Bytes that other tests have left, and fillers of their free blocks.
    others = seen["before"] - TABLE
    assert 0 <= measurement["stray"] <= others
    assert measurement["allocated_before"] == TABLE
    assert measurement["peak_allocated"] == seen["peak_allocated"] - others
    assert measurement["phases"]["setup"]["peak_allocated"] == TABLE
    assert measurement["leaked"] == 0
    assert measurement["allocated_after"] == TABLE
    assert measurement["peak_reserved"] >= measurement["peak_allocated"]
    assert measurement["simulated"] is False


def test_phases_of_a_step_are_found(cuda: CudaProject) -> None:
    phases = measured(cuda)[0]["measurement"]["phases"]

    assert {"forward", "backward", "step"} <= set(phases)
    assert phases["forward"]["entered"] == phases["backward"]["entered"] == 2
    highest = max(phases[name]["peak_allocated"] for name in ("forward", "backward", "step"))
    assert phases["call"]["peak_allocated"] >= highest
    # Workspaces of the body's thread and of autograd's.
    kept = kept_workspaces()
    assert phases["forward"]["cublas_workspace"] in {a + b for a in kept for b in {0, *kept}}


def test_recording_history_changes_no_number(cuda: CudaProject) -> None:
    plain = measured(cuda)[0]["measurement"]
    recorded = measured(cuda, "--gpumem-history=python")[0]["measurement"]

    for name in ("peak_allocated", "peak_reserved", "allocated_before", "allocated_after"):
        assert plain[name] == recorded[name], name


def test_the_measurement_is_the_same_alone_and_after_other_tests(cuda: CudaProject) -> None:
    body = """
        kept = []

        @pytest.mark.gpumem
        def test_leaks():
            kept.append(torch.ones(1 << 18, device="cuda"))
            kept.append(torch.ones(1 << 20, device="cuda"))  # in a segment of 20 MiB

        @pytest.fixture(scope="module")
        def weights():
            return torch.ones(1 << 18, device="cuda")

        @pytest.mark.gpumem
        def test_product(weights):
            x = torch.ones(256, 256, device="cuda")
            y = torch.ones(3 << 20, device="cuda", dtype=torch.uint8)
            (x @ x).sum()
    """
    cuda.write(test_order=body)

    alone = cuda.records("-k", "product")["test_product"]["measurement"]
    after = cuda.records()["test_product"]["measurement"]

    assert after["stray"] >= alone["stray"] + (1 << 20)
    names = ("peak_allocated", "peak_reserved", "allocated_before", "allocated_after", "leaked")
    for name in names:
        assert after[name] == alone[name], name


def test_a_body_that_resets_peaks_does_not_reset_the_meter(cuda: CudaProject) -> None:
    body = """
        @pytest.mark.gpumem
        def test_reset():
            torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            # An earlier test may have left something in this process.
            now = torch.cuda.memory_allocated()
            assert torch.cuda.max_memory_allocated() == now + (1 << 20)
    """
    cuda.write(test_reset=body)

    record = cuda.records()["test_reset"]

    assert record["outcome"] == "passed"
    assert record["measurement"]["peak_allocated"] == 8 << 20


def test_environment_and_nvml_reading_describe_the_device() -> None:
    device = find_device(None, required=True)
    assert device is not None
    properties = torch.cuda.get_device_properties(0)

    assert device.environment.gpu == properties.name
    assert device.environment.compute_capability == f"{properties.major}.{properties.minor}"
    assert device.environment.simulated is False
    assert device.total_memory == properties.total_memory
    reading = device.nvml()
    if "absent" in reading:
        assert reading["absent"]
    else:
        # NVML counts the driver's own memory as well.
        assert reading["total"] >= properties.total_memory
        assert reading["used"] >= torch.cuda.memory_reserved()
        assert device.environment.driver == reading["driver"]
