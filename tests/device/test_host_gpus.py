"""The host's GPUs before torch is imported: notes about them, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_gpumem.device import host_gpus as rooms
from pytest_gpumem.device.host_gpus import describe, host_gpus, why_not_usable
from pytest_gpumem.measurement.nvml import NvmlReading, read_visible
from pytest_gpumem.option_values import DeviceChoice
from tests.fake_nvml import MACHINES, FakeNvml, found


def gpus(machine: str) -> list[NvmlReading]:
    with found(MACHINES[machine].nvml(), MACHINES[machine].environ):
        readings = read_visible()
    assert isinstance(readings, list)
    return readings


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("plain", []),
        (
            "mig",
            [
                "NVIDIA A100-SXM4-40GB (MIG 3g.20gb)",
                "NVIDIA A100-SXM4-40GB (MIG 2g.10gb)",
                "NVIDIA A100-SXM4-40GB (MIG 1g.5gb)",
            ],
        ),
        ("two exclusive", ["2 x NVIDIA A100-SXM4-40GB (exclusive-process mode)"]),
        ("vgpu", ["GRID A100D-20C (vGPU)"]),
        ("hami", ["NVIDIA A100-SXM4-40GB (HAMi leaves 2.93 GiB)"]),
        (
            "docker",
            [
                "NVML reports PIDs of the host, so memory cannot be assigned to processes in this "
                "container"
            ],
        ),
    ],
)
def test_unusual_states_of_gpus_are_described(
    machine: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {28_290}
    if machine == "plain":
        monkeypatch.setattr("psutil.pid_exists", known.__contains__)
    assert describe(gpus(machine)) == said


EXCLUSIVE = (
    "-n 2: NVIDIA A100-SXM4-40GB is in exclusive-process mode, in which one process at a time can "
    "use it, and MPS does not run; write -n 1, start MPS (nvidia-cuda-mps-control -d), or let an "
    "administrator set the mode (nvidia-smi -c DEFAULT)"
)


def test_a_second_process_is_refused_in_exclusive_mode() -> None:
    assert why_not_usable(gpus("exclusive"), 1, placed=False) is None
    assert why_not_usable(gpus("exclusive"), 2, placed=False) == EXCLUSIVE
    assert why_not_usable(gpus("exclusive"), 2, placed=True) == EXCLUSIVE


def test_an_exclusive_gpu_takes_one_placed_worker() -> None:
    two = gpus("two exclusive")
    assert why_not_usable(two, 2, placed=True) is None
    assert why_not_usable(two, 2, placed=False) == EXCLUSIVE
    assert str(why_not_usable(two, 3, placed=True)).startswith(
        "-n 3: 2 GPUs are in exclusive-process mode, in which one process at a time can use each,"
    )
    assert why_not_usable([*gpus("exclusive"), *gpus("plain")], 5, placed=True) is None


@pytest.mark.parametrize("machine", ["plain", "mps", "mig", "vgpu", "docker", "wsl"])
def test_gpus_in_other_modes_are_usable(machine: str) -> None:
    assert why_not_usable(gpus(machine), 16, placed=False) is None
    assert why_not_usable([], 16, placed=False) is None


def test_mode_prohibited_is_refused_for_one_process_too() -> None:
    assert str(why_not_usable(gpus("prohibited"), 1, placed=False)).startswith(
        "NVIDIA A100-SXM4-40GB is in compute mode prohibited, in which no process can use it;"
    )
    assert why_not_usable([*gpus("prohibited"), *gpus("plain")], 3, placed=True) is None


@pytest.mark.parametrize(
    ("kind", "index", "count"),
    [("auto", None, 2), ("cuda", None, 2), ("cuda", 1, 1), ("sim", 0, 0)],
)
def test_a_choice_selects_its_gpus(
    kind: str, index: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "DRIVERS", (__file__,))
    choice = DeviceChoice(kind, index)  # type: ignore[arg-type]  # it is one of the kinds
    with found(MACHINES["two"].nvml()):
        assert len(host_gpus(choice)) == count


def test_nvml_is_not_loaded_without_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(rooms, "DRIVERS", (str(tmp_path / "nvidiactl"),))
    assert host_gpus(DeviceChoice("auto")) == ()
    assert nvml.inits == 0
