"""The recorded history: snapshots for memory_viz, and the sites that hold the bytes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.gpu.conftest import CudaProject

MODEL = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(512, 512)

        def forward(self, x):
            x = self.layer(x)
            return torch.softmax(x, -1)  # the line of softmax

    @pytest.mark.gpumem(max="1KiB")
    def test_forward():
        model = Net().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(4096, 512, device="cuda")).sum().backward()
        optimizer.step()
"""

ACTIVATION = 4096 * 512 * 4


def line_of(cuda: CudaProject, text: str) -> str:
    source = (cuda.path / "test_model.py").read_text().splitlines()
    return f"test_model.py:{1 + next(i for i, line in enumerate(source) if text in line)}"


def sites(record: dict[str, Any], phase: str = "call") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record["measurement"]["phases"][phase]["sites"]
    return found


@pytest.mark.parametrize(
    "arguments",
    [(), ("--gpumem-explain=always",), ("--gpumem-history=all",)],
    ids=["second run", "always", "history"],
)
def test_sites_name_lines_and_operators(cuda: CudaProject, arguments: tuple[str, ...]) -> None:
    cuda.write(test_model=MODEL)

    record = cuda.records(*arguments)["test_forward"]

    found = sites(record, "forward")
    (softmax,) = [site for site in found if site["site"] == line_of(cuda, "line of softmax")]
    assert softmax["bytes"] == ACTIVATION
    assert softmax["category"] == "activations"
    assert "softmax" in softmax["operator"]
    (linear,) = [site for site in found if site["site"] == line_of(cuda, "self.layer(x)")]
    assert linear["bytes"] == ACTIVATION


@pytest.mark.parametrize(
    "arguments", [(), ("--gpumem-history=all",)], ids=["second run", "history"]
)
def test_categories_and_sites_sum_to_peaks(cuda: CudaProject, arguments: tuple[str, ...]) -> None:
    cuda.write(test_model=MODEL)

    measurement = cuda.records(*arguments)["test_forward"]["measurement"]

    composed = [measurement, *(p for n, p in measurement["phases"].items() if n != "setup")]
    for one in composed:
        assert sum(one["composition"].values()) == one["peak_allocated"]
        assert sum(site["bytes"] for site in one["sites"]) == one["peak_allocated"]
    held = measurement["phases"]["step"]["composition"]
    parameters = (512 * 512 + 512) * 4
    assert held["parameters"] == held["gradients"] == parameters
    # Adam's two averages; its step count lives on the CPU.
    assert held["optimizer state"] == 2 * parameters


def test_a_passing_test_records_no_history(cuda: CudaProject) -> None:
    cuda.write(test_model=MODEL.replace("1KiB", "1GiB"))

    record = cuda.records()["test_forward"]

    assert record["outcome"] == "passed"
    assert record["measurement"]["composition"] == {}


@pytest.mark.parametrize("recorded", [False, True], ids=["explained", "history"])
def test_artifacts_open_in_memory_viz(cuda: CudaProject, recorded: bool) -> None:
    cuda.write(test_model=MODEL)

    cuda.run("--gpumem-artifacts=artifacts", *(["--gpumem-history=all"] if recorded else []))

    (path,) = (cuda.path / "artifacts").iterdir()
    snapshot = pickle.loads(path.read_bytes())
    assert set(snapshot) >= {"segments", "device_traces", "allocator_settings"}
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert {"address", "stream", "segment_type", "device"} <= set(segment)
    events = [event for trace in snapshot["device_traces"] for event in trace]
    wanted = [e for e in events if e["action"] == "alloc" and e["size"] == ACTIVATION]
    assert wanted
    assert {"addr", "stream", "time_us", "frames"} <= set(wanted[0])
    if recorded:
        places = {frame["filename"] for event in wanted for frame in event["frames"]}
        assert any(place.endswith("test_model.py") for place in places)


def test_memory_viz_reads_the_artifact(cuda: CudaProject) -> None:
    from torch.cuda._memory_viz import segsum, trace_plot

    cuda.write(test_model=MODEL)
    cuda.run("--gpumem-artifacts=artifacts", "--gpumem-history=python")

    (path,) = (cuda.path / "artifacts").iterdir()
    snapshot = pickle.loads(path.read_bytes())
    assert "<html>" in trace_plot(snapshot).lower() or "<!doctype html>" in trace_plot(snapshot)
    assert "segment" in segsum(snapshot).lower()
