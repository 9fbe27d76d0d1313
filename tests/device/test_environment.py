"""The key of baselines, which is the name of their folder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpumem.jsonfile import schema_problem
from pytest_gpumem.measurement.nvml import NvmlReading, read_visible
from pytest_gpumem.report.json_report import report_of
from pytest_gpumem.report.record import TestRecord
from pytest_gpumem.report.terminal import describe
from pytest_gpumem.values.environment import Environment
from tests.fake_nvml import MACHINES, found

PLAIN = Environment(False, "NVIDIA A100-SXM4-40GB", "8.0", "2.13", cuda="13.0", driver="580.65")
KEY = "cuda-NVIDIA-A100-SXM4-40GB-torch2.13-cu13.0"


def environment_on(machine: str) -> Environment:
    with found(MACHINES[machine].nvml(), MACHINES[machine].environ):
        readings = read_visible()
    assert isinstance(readings, list)
    (reading, *_) = readings
    assert isinstance(reading, NvmlReading)
    return replace(PLAIN, partition=reading.mode.partition)


@pytest.mark.parametrize(
    ("machine", "ending"),
    [
        ("plain", ""),
        ("docker", ""),
        ("wsl", ""),
        ("mig", "-MIG-3g.20gb"),
        # MPS recommends exclusive mode: both together are MPS.
        ("mps", "-MPS"),
        ("vgpu", "-vGPU"),
        ("exclusive", "-exclusive"),
        ("hami", "-HAMi"),
        ("cgpu", "-cGPU"),
        ("cgroup", "-cgroup"),
    ],
)
def test_the_key_of_baselines_names_the_mode_of_the_device(machine: str, ending: str) -> None:
    assert environment_on(machine).key == KEY + ending


def test_terminal_and_report_name_the_mode() -> None:
    environment = environment_on("hami")
    assert describe(environment) == (
        "NVIDIA A100-SXM4-40GB (torch 2.13, CUDA 13.0, driver 580.65, HAMi)"
    )
    report = report_of([TestRecord("test_a.py::test", "passed", environment, None)])
    assert report["environment"]["partition"] == "HAMi"
    assert schema_problem("pytest_gpumem.report", report) is None


T4 = Environment(simulated=True, gpu="T4", compute_capability="7.5", torch="2.13")


@pytest.mark.parametrize(
    ("alloc_conf", "cublas", "key"),
    [
        ("", "", "sim-T4-torch2.13"),
        ("expandable_segments:True", "", "sim-T4-torch2.13-expandable_segments=True"),
        (
            "max_split_size_mb:128,garbage_collection_threshold:0.8",
            "",
            "sim-T4-torch2.13-max_split_size_mb=128,garbage_collection_threshold=0.8",
        ),
        ("", ":4096:8", "sim-T4-torch2.13-cublas=4096=8"),
        (
            "expandable_segments:True",
            ":0:0",
            "sim-T4-torch2.13-expandable_segments=True-cublas=0=0",
        ),
    ],
)
def test_the_key_has_settings_as_they_are_written(alloc_conf: str, cublas: str, key: str) -> None:
    environment = replace(T4, alloc_conf=alloc_conf, cublas_workspace_config=cublas)
    assert environment.key == key


@pytest.mark.parametrize(
    "alloc_conf", ["a/b", "roundup_power2_divisions:[256:1,512:2]", "x: 1", "a:" + "1" * 200, ":"]
)
def test_settings_that_make_no_folder_name_are_hashed(alloc_conf: str) -> None:
    key = replace(T4, alloc_conf=alloc_conf).key
    assert key.startswith("sim-T4-torch2.13-conf")
    assert len(key) == len("sim-T4-torch2.13-conf") + 8
    assert key != replace(T4, alloc_conf=alloc_conf + "2").key


def test_keys_tell_settings_of_allocator_and_cublas_apart() -> None:
    settings = [
        ("", ""),
        ("a:1", ""),
        ("a:1,b:2", ""),
        ("a:1", ":2:3"),
        ("a:1=2", ""),
        ("", ":1"),
        ("", ":1:1"),
    ]
    keys = {replace(T4, alloc_conf=a, cublas_workspace_config=c).key for a, c in settings}
    assert len(keys) == len(settings)
